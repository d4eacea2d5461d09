"""Recorded loads: recordings of a router (`protocol.recording`) and Mooncake's traces, as sessions.

A block's name becomes the tokens of the block, so that prompts share the same beginnings as when they
were recorded. No recorded choice or hit goes into the load: `agreement` compares it afterwards.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from sglang_ext.errors import ConfigError
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol.recording import (
    Applied,
    Blocks,
    Head,
    HintLine,
    Limits,
    Loaded,
    Member,
    Request,
    is_recording,
    names_of,
    read_recording,
)
from sglang_ext.router.policies.base import Role
from sglang_ext.simulator.outcome import STAGES, Decided
from sglang_ext.simulator.settings import BLOCK_TOKENS
from sglang_ext.simulator.workload import Announcement, Observed, Session, Turn

MOONCAKE_TOKENS = 512
"""Tokens of a block in Mooncake's traces."""
DEFAULT_ANSWER = 128
"""Tokens of an answer whose length is not recorded."""
_SETTINGS: Final[Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "--cache-threshold": ("cache_threshold", float),
    "--balance-abs-threshold": ("balance_abs", int),
    "--balance-rel-threshold": ("balance_rel", float),
    "SGLANG_EXT_ROUTER_BALANCE_CACHE_FACTOR": ("balance_cache", float),
    "queue-weight": ("queue_weight", float),
    "exec-weight": ("exec_weight", float),
    "--max-running-per-instance": ("most_running", int),
    "--max-concurrent-requests": ("max_concurrent_requests", int),
    "--queue-size": ("queue_size", int),
    "--queue-timeout-secs": ("queue_timeout_secs", float),
    "--queue-policy": ("queue_policy", str),
    "bytes-per-minute": ("bytes_per_minute", int),
}
_BLOCK_BYTES = BLOCK_TOKENS * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class TracedSession:
    """One recorded request, sent when it came: a `Session`."""

    name: str
    tenant: int
    start_s: float
    turn: Turn

    def turns(self) -> Iterator[Turn]:
        return iter((self.turn,))


@dataclass
class SessionInTurn:
    """The requests of a recorded session, each sent after the answer to the one before: a `Session`."""

    name: str
    tenant: int
    start_s: float
    requests: list[Turn] = field(default_factory=list)

    def turns(self) -> Iterator[Turn]:
        return iter(self.requests)


@dataclass
class Trace:
    """A recorded load, and the fleet that served it.

    policy, settings, instances, tiers: of a recording; the blocks that each tier can hold, the prefill
    instances first. decided: the instance, the tokens found and the times of each request, by the name of its
    turn.
    """

    policy: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    """By the names of `Settings`."""
    costs: Mapping[str, Any] = field(default_factory=dict)
    """That the router expected, as the JSON of a cost profile; empty for the defaults, or where they were not
    recorded."""
    kinds: Mapping[str, str] = field(default_factory=dict)
    """Of the KV of each instance that exports it: those of one kind fetch from each other. Empty where none
    does, or where no instances were recorded; with ``fetch=on``, all do then."""
    instances: Sequence[str] = ()
    tiers: Mapping[str, int] = field(default_factory=dict)
    sessions: list[TracedSession] = field(default_factory=list)
    announcements: list[Announcement] = field(default_factory=list)
    decided: dict[str, Decided] = field(default_factory=dict)
    reports: dict[str, list[float]] = field(default_factory=dict)
    """By instance, the moments at which another load than before was reported; some are before the start."""
    faster: float = 1.0
    """Arrivals in a time, in times the recorded ones."""

    def load(self, *, observed: bool, closed: bool) -> Iterator[Session]:
        """Its requests, in the order of their arrivals or of the beginnings of their sessions.

        Args:
            observed, closed: see ``Settings``.
        """
        if not closed:
            for each in self.sessions:
                yield each if observed else replace(each, turn=replace(each.turn, observed=None))
            return
        found: dict[str, SessionInTurn] = {}
        ended: dict[str, float] = {}
        for each in self.sessions:
            session = found.setdefault(each.name, SessionInTurn(each.name, each.tenant, each.start_s))
            start_s = each.start_s * self.faster  # more users do not think faster
            pause_s = max(0.0, start_s - ended.get(each.name, start_s))
            took_s = 0.0 if each.turn.observed is None else each.turn.observed.last_s
            ended[each.name] = start_s + took_s
            times = each.turn.observed if observed else None
            session.requests.append(replace(each.turn, think_s=pause_s, observed=times))
        yield from found.values()

    @property
    def timed(self) -> int:
        """Requests whose times were recorded."""
        return sum(each.turn.observed is not None for each in self.sessions)

    def at_rate(self, factor: float) -> Trace:
        """The same with so many times the arrivals in a time. Loads are reported every second then."""
        sessions = [replace(each, start_s=each.start_s / factor) for each in self.sessions]
        hints = [replace(each, at_s=each.at_s / factor) for each in self.announcements]
        faster = self.faster * factor
        return replace(self, sessions=sessions, announcements=hints, reports={}, faster=faster)


def read_trace(lines: Iterable[bytes]) -> Trace:
    """Read a recording or a trace.

    Raises:
        RecordingError, ConfigError: a line cannot be used.
    """
    iterator = iter(lines)
    first = next((line for line in iterator if line.strip()), b"")
    if is_recording(first):
        return _recording(_chained(first, iterator))
    return _mooncake(_chained(first, iterator))


def _chained(first: bytes, rest: Iterator[bytes]) -> Iterator[bytes]:
    yield first
    yield from rest


def _recording(lines: Iterator[bytes]) -> Trace:
    trace, zero = Trace(), 0.0
    members: dict[str, Member] = {}
    tenants: dict[str, int] = {}
    limits: Mapping[str, Limits] = {}
    requests: list[Request] = []
    hints: list[HintLine] = []
    reports: list[Loaded] = []
    ages: list[float] = []
    for line in read_recording(lines):
        if isinstance(line, Head):
            if line.block_size != BLOCK_TOKENS:
                raise ConfigError(
                    f"blocks of {line.block_size} tokens are not simulated, only of {BLOCK_TOKENS}",
                    field="--trace",
                )
            trace.policy, trace.settings = line.policy, _settings(line.settings)
            trace.costs, limits = line.costs, line.limits
        elif isinstance(line, Member):
            members[line.instance] = line
        elif isinstance(line, Request) and line.status == 200 and len(line.prompts) == 1:
            requests.append(line)
        elif isinstance(line, HintLine):
            hints.append(line)
        elif isinstance(line, Loaded):
            reports.append(line)
        elif isinstance(line, Applied) and line.age_s:
            ages.append(line.age_s)
    requests.sort(key=lambda line: line.at)
    zero = min((line.at for line in (*requests, *hints)), default=0.0)
    for number, line in enumerate(requests):
        tenant = tenants.setdefault(line.tenant, len(tenants))
        turn = _turn(line, str(number))
        trace.sessions.append(
            TracedSession(line.session or f"request-{number}", tenant, line.at - zero, turn)
        )
        if line.choices:
            hits = {tier: tokens for tier, tokens in line.tiers.items() if tokens}
            trace.decided[turn.id] = Decided(line.choices[-1].instance, hits, _stages(line))
    for report in reports:
        trace.reports.setdefault(report.instance, []).append(report.at - zero)
    for hint in hints:
        tenant = tenants.setdefault(hint.tenant, len(tenants))
        key = _tokens(names_of(hint.prompt.names), hint.prompt.tokens, "hint")
        trace.announcements.append(Announcement(hint.at - zero, hint.session, tenant, key, hint.lead_s))
    trace.instances = tuple(sorted(members, key=lambda name: members[name].role != Role.PREFILL.value))
    roles = Counter(line.role for line in members.values())
    if roles[Role.PREFILL.value] and roles[Role.DECODE.value]:
        trace.settings |= {role.value: roles[role.value] for role in (Role.PREFILL, Role.DECODE)}
    sizes = [{name: fill.size for name, fill in line.tiers.items()} for line in members.values()]
    trace.kinds = {name: line.kv for name, line in members.items() if line.kv}
    if chunk := min((line.chunk for line in members.values()), default=0):
        trace.settings["chunk"] = chunk
    if ages:
        trace.settings["lag_ms"] = round(1e3 * statistics.median(ages), 3)
    trace.settings |= _limits(limits, tenants)
    trace.tiers = {name: min(size.get(name, 0) for size in sizes) for name in (sizes[0] if sizes else {})}
    return trace


def _stages(line: Request) -> dict[str, float]:
    """The times of a request, if they were recorded (``outcome.STAGES``)."""
    first_s, stages = line.first_byte_s, line.stages
    if first_s is None or "prefill" not in stages:
        return {}
    queue_s = line.queued_s + stages.get("prefill_queue", 0.0)
    transfer_s = stages.get("transfer", 0.0) + stages.get("decode_queue", 0.0)
    way_s = first_s - queue_s - stages["prefill"] - transfer_s
    return dict(
        zip(STAGES, (way_s, queue_s, stages["prefill"], transfer_s, line.ended_s - first_s), strict=True)
    )


def _settings(flags: Mapping[str, str | float]) -> dict[str, Any]:
    """The settings that a recording's router had, by its flags."""
    return {name: kind(flags[flag]) for flag, (name, kind) in _SETTINGS.items() if flag in flags}


def _limits(limits: Mapping[str, Limits], tenants: Mapping[str, int]) -> dict[str, Any]:
    """The settings of the tenants' keys, by the numbers of the tenants."""
    own = [limits.get(tenant, Limits()) for tenant in tenants]
    if all(each == Limits() for each in own):
        return {}
    return {name: tuple(float(getattr(each, name)) for each in own) for name in Limits.__struct_fields__}


def _turn(line: Request, id: str) -> Turn:
    prompt: Blocks = line.prompts[0]
    answer = max(1, line.completion_tokens or DEFAULT_ANSWER)
    names = names_of(prompt.names) + names_of(prompt.answer)
    whole = _tokens(names, prompt.tokens + answer, f"request {id}")
    border = prompt.tokens * TOKEN_BYTES
    return Turn(whole[:border], whole[border:], id=id, observed=_observed(line))


def _observed(line: Request) -> Observed | None:
    """The times of a request, if they were recorded."""
    if line.first_byte_s is None:
        return None
    first_s, queue_s = line.first_byte_s, line.stages.get("prefill_queue", 0.0)
    prefill_s = line.stages.get("prefill")
    if prefill_s is None:
        began_s = min(first_s, line.routed_s + queue_s)
        computed_s = first_s
    else:
        # The rest is the way to the instance's scheduler and back; the halves are taken to be equal.
        way_s = max(0.0, first_s - line.routed_s - queue_s - prefill_s) / 2
        began_s = min(first_s, line.routed_s + way_s + queue_s)
        computed_s = min(first_s, began_s + prefill_s)
    chosen_s = line.routed_s if line.decided_s is None else line.decided_s
    decided_s = min(began_s, max(0.0, chosen_s - line.queued_s))
    fetch_s = math.inf if line.fetch_s is not None and line.fetch_s < 0 else line.fetch_s
    sending_s = 0.0 if line.sent_s is None or line.decided_s is None else line.sent_s - line.decided_s
    return Observed(
        decided_s, began_s, computed_s, first_s, max(first_s, line.ended_s), fetch_s, max(0.0, sending_s)
    )


def _tokens(names: Sequence[str], tokens: int, tail: str) -> bytes:
    """Tokens of named blocks, and after them tokens that no other prompt has."""
    known = b"".join(bytes.fromhex(name) * (_BLOCK_BYTES // (len(name) // 2)) for name in names)
    return _filled(known, tokens, tail)


def _filled(known: bytes, tokens: int, tail: str) -> bytes:
    missing = tokens * TOKEN_BYTES - len(known)
    if missing <= 0:
        return known[: tokens * TOKEN_BYTES]
    mark = tail.encode().ljust(_BLOCK_BYTES, b".")[:_BLOCK_BYTES]
    return known + (mark * (missing // len(mark) + 1))[:missing]


def _mooncake(lines: Iterator[bytes]) -> Trace:
    trace = Trace()
    each = MOONCAKE_TOKENS // BLOCK_TOKENS
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row: Any = orjson.loads(line)
            at, tokens, answer = row["timestamp"] / 1000, row["input_length"], row["output_length"]
            names = [int(name) * each + place for name in row["hash_ids"] for place in range(each)]
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"line {number + 1} is neither of a recording nor of a Mooncake trace: {error!r}",
                field="--trace",
            ) from None
        known = b"".join(name.to_bytes(8, "little") * (_BLOCK_BYTES // 8) for name in names)
        key = _filled(known, max(1, tokens), f"tail {number}")
        turn = Turn(key, _filled(b"", max(1, answer), f"answer {number}"), id=str(number))
        trace.sessions.append(TracedSession(f"request-{number}", 0, at, turn))
    trace.sessions.sort(key=lambda session: session.start_s)
    return trace


def agreement(trace: Trace, decided: Mapping[str, Decided]) -> dict[str, float]:
    """How far a replay decided as was recorded: shares of the requests that both have.

    instance: the same was chosen. exact: and the same tokens were found in each tier. reused_points: the
    difference of tokens found, per tier, in points of all tokens found.
    """
    both = [id for id in trace.decided if id in decided]
    same = sum(trace.decided[id].instance == decided[id].instance for id in both)
    exact = sum(trace.decided[id].hits == decided[id].hits for id in both)
    then, now = Counter[str](), Counter[str]()
    for id in both:
        then.update(trace.decided[id].hits)
        now.update(decided[id].hits)
    count = max(1, len(both))
    tokens = max(1, sum(len(s.turn.key) // TOKEN_BYTES for s in trace.sessions if s.turn.id in decided))
    points = {f"{tier}_points": 100 * (now[tier] - then[tier]) / tokens for tier in sorted(then | now)}
    return {"requests": float(len(both)), "instance": same / count, "exact_hits": exact / count, **points}
