"""All readers of strangers' input: each takes bytes, and raises its declared errors only."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson

from sglang_ext.disagg.messages import REPLIES, REQUESTS
from sglang_ext.disagg.transports import tcp, verbs
from sglang_ext.engine.pd.messages import MESSAGES, RANK_COMMANDS
from sglang_ext.engine.ranks import Ranks
from sglang_ext.errors import PeerError, UserError
from sglang_ext.patches.adapter.migration.migration import Migration
from sglang_ext.protocol.agent import (
    FROM_AGENT,
    TO_AGENT,
    Events,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotPart,
    ToAgent,
    Welcome,
)
from sglang_ext.protocol.cluster import ChangeRole, Drain, Registration, decode
from sglang_ext.router.api.dialect import DIALECTS, Dialect
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.messages import check_conversation
from sglang_ext.router.api.validation import parse_json_object
from sglang_ext.router.clients.repairs import repair
from sglang_ext.router.clients.rules import shipped
from sglang_ext.router.cluster.roster import decode_member
from sglang_ext.router.http.body import BodyBudget, unpack
from sglang_ext.router.http.reader import RequestReader
from sglang_ext.router.http.types import Request, RequestRefused
from sglang_ext.router.index.index import Index
from sglang_ext.router.policies.base import Role
from sglang_ext.router.tenancy.admit import admit, admit_hint
from sglang_ext.router.tenancy.admitted import Rules
from sglang_ext.router.tenancy.request_fields import FIELDS, SAMPLING, Who
from sglang_ext.router.tenancy.tenants import ANYBODY, Caller
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.wire import WireError, unpack_ids

CORPUS = Path(__file__).parent / "corpus"
LIMITS = Limits(32_000, 4096)
RULES = Rules(sessions=shipped().sessions)
TENANT = Caller("a", 3, False, "kv-tenant-a")
NEVER = {name for name, who in FIELDS.items() if who in (Who.NOBODY, Who.TRUSTED)}
NEVER_SAMPLED = {name for name, who in SAMPLING.items() if who is Who.NOBODY}


@dataclass(frozen=True)
class Target:
    """A function that inputs are fed to. declared: the exceptions that it may raise. text: whether its inputs
    are JSON."""

    name: str
    feed: Callable[[bytes], object]
    declared: tuple[type[Exception], ...]
    text: bool = True

    def seeds(self) -> list[bytes]:
        """Of the corpus: one file each."""
        return [path.read_bytes() for path in sorted((CORPUS / self.name).iterdir())]


# -- HTTP -------------------------------------------------------------------------------------------


def heads(data: bytes) -> None:
    """A connection's bytes, in pieces whose lengths they say themselves. Nothing is raised at all."""
    reader = RequestReader(2000, 3000, BodyBudget(1 << 30))
    size = 1 + data[0] if data else 1
    for at in range(0, len(data), size):
        for parsed in reader.feed(data[at : at + size]):
            assert parsed.refused is None or 400 <= parsed.refused.status < 600
    reader.abandon()


def packed(data: bytes) -> None:
    """A compressed body."""
    coding = "gzip" if data[:1] == b"\x1f" else "deflate"
    budget = BodyBudget(1 << 20)
    work = unpack(data, coding, 1 << 18, budget)
    try:
        work.send(None)
    except StopIteration as done:
        budget.give(len(done.value))
    except RequestRefused:
        pass
    finally:
        work.close()
    assert budget.used == 0


def body(dialect: Dialect, data: bytes) -> None:
    """A generation request, as far as the router takes it before anything is sent."""
    payload = parse_json_object(data)
    for caller in (ANYBODY, TENANT):
        refused = None
        try:
            _admit(dialect, data, payload, caller)
        except RequestRefused as error:
            refused = error
        if refused is not None:
            orjson.dumps(refused.payload())
            assert 400 <= refused.status < 500


def _admit(dialect: Dialect, data: bytes, payload: dict[str, Any], caller: Caller) -> None:
    if dialect.answer_at_once(payload, LIMITS) is not None:
        return
    if repair(dialect, payload, shipped().rules, lambda rule, at, text: text):
        data = orjson.dumps(payload)
    if dialect.only_warms(payload):
        admit_hint(payload, caller, LIMITS, dialect)
        return
    request = Request("POST", dialect.path, dialect.path, {}, data)
    admitted = admit(dialect, payload, request, caller, LIMITS, RULES, "new-rid")
    for hint in admitted.hints[:4]:
        try:
            admit_hint(hint.body or {}, caller, LIMITS)
        except RequestRefused:
            continue
    for prompt in admitted.job.prompts:
        if prompt.ids is not None and len(prompt.ids):
            assert 0 <= min(prompt.ids) <= max(prompt.ids) < LIMITS.vocab_size
        assert caller.salt is None or prompt.namespace[2] == caller.salt
    assert admitted.session is None or admitted.session.startswith(caller.scope)
    sent = orjson.loads(admitted.sent.body)
    assert {name for name in sent if name not in FIELDS} <= admitted.sent.dialect.own_fields
    assert {name for name in NEVER if sent.get(name) is not None} == set()
    sampling = sent.get("sampling_params")
    for one in sampling if isinstance(sampling, list) else [sampling]:
        if isinstance(one, dict):
            assert not one.keys() & NEVER_SAMPLED
            custom = one.get("custom_params")
            assert not (isinstance(custom, dict) and "sglang_ext_resume" in custom)
    # Where servers take no salt in the body, it is sent as a header.
    expected = caller.salt if admitted.sent.dialect.takes_salt else None
    if caller.salt is not None:
        assert sent.get("cache_salt") == expected


def advisory(data: bytes) -> None:
    payload = parse_json_object(data)
    admit_hint(payload, TENANT, LIMITS)


def messages_count(data: bytes) -> None:
    check_conversation(parse_json_object(data))


# -- messages ------------------------------------------------------------------------------------------


class _Rank:
    """A rank's `Migration` that lives through everything that it is sent."""

    def __init__(self) -> None:
        processor = SimpleNamespace(_maybe_update_reasoning_tokens=lambda req, token: None)
        scheduler = SimpleNamespace(
            model_config=SimpleNamespace(vocab_size=100),
            batch_result_processor=processor,
            running_batch=SimpleNamespace(reqs=[]),
            waiting_queue=[],
            grammar_manager=SimpleNamespace(grammar_queue=[]),
            last_batch=None,
            chunked_req=None,
            spec_algorithm=SimpleNamespace(is_none=lambda: True),
        )
        self.ranks = Ranks()
        cache = SimpleNamespace(scheduler=scheduler, ranks=self.ranks)
        commands = SimpleNamespace(
            epoch=bytes(16), reply_to_move=lambda message: None, enqueue=lambda message: True
        )
        self.migration = Migration(cache, commands)  # type: ignore[arg-type]
        self.at = 0.0

    def obeys(self, message: ToAgent) -> None:
        self.at += 0.01
        self.migration.target.tickets.expire(self.at)
        self.migration.takes_command(message, self.at)
        self.ranks.each_pass()

    def gets(self, data: bytes) -> None:
        """A request whose ``custom_params`` a client has written. It is aborted, or one like any other."""
        custom = orjson.loads(data)
        aborted: list[str] = []
        sampling = SimpleNamespace(custom_params=custom, max_new_tokens=8, min_new_tokens=0)
        req = SimpleNamespace(
            rid="r", to_finish=None, finished=lambda: False, sampling_params=sampling,
            origin_input_ids=array("q", [5, 6, 7]), output_ids=array("q"), is_retracted=False,
            set_finish_with_abort=aborted.append,
        )  # fmt: skip
        self.migration.target.received(SimpleNamespace(rid=req.rid, sampling_params=sampling))
        self.migration.target.queued(req)
        assert len(req.output_ids) == 0
        forged = isinstance(custom, dict) and "sglang_ext_resume" in custom
        assert bool(aborted) == forged
        assert self.migration.counts.get("error", 0) == 0


_rank = _Rank()


def to_agent(data: bytes) -> None:
    """A router's message: decoded, and carried out in the scheduler."""
    _rank.obeys(TO_AGENT.decode(data))


def from_agent(data: bytes) -> None:
    """A message of an instance: decoded, and taken into the index."""
    message = FROM_AGENT.decode(data)
    index = _index
    if isinstance(message, Welcome):
        index.began("i", message.epoch, message.naming)
    elif isinstance(message, Events | SnapshotBegin | SnapshotPart | SnapshotEnd):
        index.apply("i", message)


_index = Index(FakeClock(), block_size=4)
_index.attach("i", Role.COLOCATED)
_index.began("i", bytes(16), None)


def _wire(codec: Any) -> Callable[[bytes], object]:
    return lambda data: codec.decode(data)


WIRE = (WireError,)


def targets() -> Iterator[Target]:
    """All of them."""
    yield Target("heads", heads, (), text=False)
    yield Target("packed", packed, (), text=False)
    for path, dialect in DIALECTS.items():
        yield Target(f"body{path.replace('/', '-')}", partial(body, dialect), (RequestRefused,))
    yield Target("advisory", advisory, (RequestRefused,))
    yield Target("messages-count", messages_count, (RequestRefused,))
    yield Target("custom-params", lambda data: _rank.gets(data), (orjson.JSONDecodeError,))
    yield Target("to-agent", to_agent, WIRE, text=False)
    yield Target("from-agent", from_agent, WIRE, text=False)
    yield Target("ids", lambda data: unpack_ids(data, 1000), WIRE, text=False)
    for name, codec in (
        ("pd-asks", MESSAGES.requests), ("pd-answers", MESSAGES.replies), ("rank-commands", RANK_COMMANDS),
        ("transfer-requests", REQUESTS), ("transfer-replies", REPLIES), ("tcp-answer", tcp._ANSWER),
        ("verbs-offer", verbs._OFFER), ("verbs-answer", verbs._ANSWER),
    ):  # fmt: skip
        yield Target(name, _wire(codec), WIRE, text=False)
    for kind in (Registration, Drain, ChangeRole):
        yield Target(f"cluster-{kind.__name__.lower()}", partial(decode, kind=kind), (UserError,))
    yield Target("cluster-member", decode_member, (PeerError,))
