"""Running requests of models with windows or states are stopped at one scheduler and go on at another.

Both prefill and decode. The first scheduler's tree takes over the request's KV, and the second scheduler
fetches it by name. Each row that a model reads and each block in DRAM equals the oracle's, as in
`test_oracle_store`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_hybrid_pools import MAMBA, SWA
from engine_hybrid_store import Sizes
from engine_hybrids import OVERLAP, SCENARIOS, HybridScenario
from engine_page_pools import COMPRESSED, GROUPED, LOW_RATIO, PAGE, QSA, whole
from engine_pools import MODEL, WrongKvError, extend_chain
from engine_scheduler import token_at
from engine_simulation import Traffic
from sglang.srt.managers.schedule_batch import Req
from test_oracle_fetches import PAGES, Engine
from test_oracle_store import BOTH, PAGED, PROMPT, STATES, WINDOW, damage, flip_a_bit

from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.peers.fetch_results import FetchEnd
from sglang_ext.engine.resume import FIELD
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.patches.adapter.migration.migration import Migration
from sglang_ext.protocol.agent import Fetch, FetchSpan, Park, Parked, Source, Unpark, Watch

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

ANSWER_TOKENS = 60
BEFORE = 37
"""Tokens of the answer at the first scheduler."""
GRIDS = [each for each in SCENARIOS if each.kind.grid]
"""None with SGLang 0.5.22."""


class KeptReplies(Replies):
    """The replies to a router."""

    epoch = b"e" * 16

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def reply_to_move(self, message: Any) -> None:
        self.sent.append(message)


class MovingEngine(Engine):
    """With the parts of SGLang's scheduler and of `hooks.migration` that moves use."""

    def __init__(self, scenario: HybridScenario, number: int, sizes: Sizes) -> None:
        super().__init__(scenario, number, sizes)
        self.replies = KeptReplies()
        self.rank.cache.join(self.rank.cache.planners, replies=self.replies)
        scheduler: Any = self.rank.scheduler
        self._queue = scheduler._enqueue
        scheduler._enqueue = self._enqueue
        scheduler._add_request_to_queue = lambda req: self._enqueue([req])
        scheduler.enable_overlap = scenario.settings.overlap
        scheduler.process_batch_result = scheduler._process
        scheduler.spec_algorithm = SimpleNamespace(is_none=lambda: True)
        scheduler.model_config = SimpleNamespace(vocab_size=MODEL.vocab_size)
        scheduler.batch_result_processor = SimpleNamespace(_maybe_update_reasoning_tokens=lambda *_: None)
        scheduler.output_streamer = SimpleNamespace(stream_output=lambda *_: None)
        scheduler.grammar_manager = SimpleNamespace(grammar_queue=[])
        self._ticket = ""

    @property
    def migration(self) -> Migration:
        found = self.rank.cache.migration
        assert isinstance(found, Migration)
        return found

    def _enqueue(self, reqs: list[Req]) -> None:
        for req in reqs:
            if self._ticket:
                req.sampling_params.custom_params = {FIELD: self._ticket}
                self.migration.target.received(
                    SimpleNamespace(rid=req.rid, sampling_params=req.sampling_params)
                )
                self._ticket = ""
            self.migration.target.queued(req)
        self._queue(reqs)

    def begin(self, prompt: list[int], tokens: int = BEFORE, **options: Any) -> Req:
        """A request that has answered so many tokens."""
        req = self.rank.scheduler.submit(prompt, new_tokens=ANSWER_TOKENS, **options)
        self.passes_until(lambda: len(req.output_ids) >= tokens, "its answer")
        return req

    def park(self, req: Req) -> Parked:
        """Stop a request, and have it offered."""
        assert self.migration.takes_command(Park("move", req.rid), 0.0)
        return self.parked()

    def parked(self) -> Parked:
        """The reply about a request that was to be stopped."""

        def replied() -> list[Parked]:
            return [each for each in self.replies.sent if isinstance(each, Parked)]

        self.passes_until(lambda: bool(replied()), "the reply")
        (parked,) = replied()
        self.replies.sent.clear()
        return parked

    def take(self, owner: MovingEngine, parked: Parked, req: Req) -> Req:
        """Go on with a request of another scheduler, as its router asks."""
        assert parked.resume is not None
        span = FetchSpan(Source((owner.exchange.address,), parked.export), len(parked.tokens) // TOKEN_BYTES)
        fetch = Fetch(
            parked.id,
            parked.tokens,
            (span,),
            extra_key=parked.extra_key,
            cache_salt=parked.cache_salt,
            wait_s=30.0,
        )
        self.exchange.peers.takes_command(fetch, 0.0)
        scheduler = self.rank.scheduler
        self._ticket = "0" * 32
        rid = f"r{scheduler._count + 1}"
        assert self.migration.takes_command(
            Watch(parked.id, ticket=self._ticket, rid=rid, resume=parked.resume), 0.0
        )
        own, salt = owner.rank.scheduler.tenant_of(req)
        prompt, new_tokens = list(req.origin_input_ids), req.sampling_params.max_new_tokens
        assert new_tokens is not None
        return scheduler.submit(prompt, new_tokens=new_tokens, extra_key=own, salt=salt)


Pair = tuple[MovingEngine, MovingEngine]
ALMOST_PAGES = PAGES[:-20]
"""The answer ends its last page."""
PROMPTS = {
    "window": (WINDOW, PROMPT),
    "window, page 16": (PAGED, PROMPT),
    "window, overlap": (HybridScenario("", WINDOW.kind, window_tokens=200, settings=OVERLAP), PROMPT),
    "states": (STATES, PROMPT),
    "window and states": (BOTH, PROMPT),
    **{each.name: (each, PROMPT) for each in GRIDS},
    "compressed": (whole(COMPRESSED), ALMOST_PAGES),
    "low-ratio": (whole(LOW_RATIO), ALMOST_PAGES),
    "grouped": (whole(GROUPED), ALMOST_PAGES),
    "qsa": (whole(QSA), ALMOST_PAGES),
}
"""A scenario of each kind of model, with a prompt."""
SHORT = ("window, page 16", "window and states", "compressed", "grouped", "qsa")
"""Those of the short form."""
MODELS = pytest.mark.parametrize(
    ("scenario", "prompt"),
    [
        pytest.param(*each, id=name, marks=() if name in SHORT else pytest.mark.long)
        for name, each in PROMPTS.items()
    ],
)


@pytest.fixture
def pair(scenario: HybridScenario) -> Iterator[Pair]:
    room = {"full": 120, "other": 60} if scenario.kind.page == PAGE else {"full": 1200, "other": 800}
    with ExitStack() as stack:
        pair = []
        for number in range(2):
            pair.append(MovingEngine(scenario, number, Sizes(**room)))
            stack.callback(pair[-1].close)
        yield pair[0], pair[1]


def answer_to(req: Req) -> list[int]:
    """The undisturbed answer."""
    start = len(req.origin_input_ids)
    return [token_at(req, start + at) for at in range(ANSWER_TOKENS)]


def kept_tokens(scenario: HybridScenario, parked: Parked) -> int:
    """How much of a request the tree takes over: whole pages, and with states on a grid up to a state."""
    step = max(scenario.kind.grid, scenario.kind.page)
    return len(parked.tokens) // TOKEN_BYTES // step * step


@MODELS
def test_a_request_goes_on_at_another_scheduler(
    pair: Pair, scenario: HybridScenario, prompt: list[int]
) -> None:
    """The second scheduler computes no token again."""
    owner, reader = pair
    req = owner.begin(prompt)
    parked = owner.park(req)
    assert not parked.why
    taken = reader.take(owner, parked, req)
    both_pass(owner, reader, taken)
    assert reader.exchange.fetches.counters.ends[FetchEnd.DONE] == 1
    assert taken.output_ids == array("q", answer_to(req))
    kept = kept_tokens(scenario, parked)
    assert reader.rank.scheduler.loaded == kept > len(prompt)
    assert taken.cached_tokens == req.cached_tokens
    assert [type(each).__name__ for each in reader.replies.sent] == ["Running"]
    owner.migration.takes_command(Unpark("move", stay=False), 0.0)
    assert owner.migration.counts == {"parked": 1, "left": 1}
    assert reader.migration.counts == {"arrived": 1}
    for engine in pair:
        engine.rank.finish()


def both_pass(owner: MovingEngine, reader: MovingEngine, taken: Req) -> None:
    """Let both schedulers pass until a request has ended."""

    def once() -> bool:
        owner.rank.step()
        return taken.finished() and reader.rank.scheduler.idle

    reader.passes_until(once, "the end of the request")


@MODELS
def test_one_wrong_bit_of_any_component_is_seen(
    pair: Pair, scenario: HybridScenario, prompt: list[int]
) -> None:
    """A twin of the test above."""
    owner, reader = pair
    req = owner.begin(prompt)
    assert owner.migration.takes_command(Park("move", req.rid), 0.0)
    owner.rank.settle()
    for part in owner.store.parts.values():
        damage(owner.rank, part.component.name, flip_a_bit)
    owner.rank.below.check = lambda rank: None  # the reader is to notice it
    taken = reader.take(owner, owner.parked(), req)
    with pytest.raises(WrongKvError):
        both_pass(owner, reader, taken)


@pytest.mark.parametrize(
    ("scenario", "damaged"),
    [(PAGED, ""), (PAGED, "stale window row"), (BOTH, "stale window row"), (BOTH, "state a token late")],
)
def test_a_stale_row_or_a_late_state_is_seen(pair: Pair, scenario: HybridScenario, damaged: str) -> None:
    """More twins: when the request is stopped, the last row of its window is that of an earlier token, or its
    state has one token more, as after a pass whose token does not count."""
    owner, reader = pair
    req = owner.begin(PROMPT)
    scheduler, pools = owner.rank.scheduler, owner.rank.pools
    tokens = (req.origin_input_ids + req.output_ids)[:-1]
    chain = list(scheduler._served[req].chain)
    assert len(chain) == len(tokens)
    if damaged:
        owner.rank.look_inside = False  # the reader is to notice it
        owner.rank._check_owners = lambda component, owned: None
    if damaged == "stale window row":
        last = len(tokens) // scenario.kind.page * scenario.kind.page - 1
        slots = pools.requests.req_to_token[req.kv.req_pool_idx, last : last + 1].numpy()
        for layer in range(pools.oracles[SWA].layers):
            rows = pools.window_rows(slots.astype(np.int64))
            pools.oracles[SWA].write(rows, np.array(chain[last - 3 : last - 2], np.uint64), layer)
    elif damaged:
        extend_chain(chain, scheduler._served[req].namespace, req.output_ids[-1:])
        for layer in range(pools.oracles[MAMBA].layers):
            rows = np.array([int(req.kv.mamba_pool_idx)])
            pools.oracles[MAMBA].write(rows, np.array(chain[-1:], np.uint64), layer)
    taken = reader.take(owner, owner.park(req), req)
    with pytest.raises(WrongKvError) if damaged else nullcontext():
        both_pass(owner, reader, taken)


@MODELS
def test_a_request_that_stays_goes_on_from_hbm(
    pair: Pair, scenario: HybridScenario, prompt: list[int]
) -> None:
    owner, _ = pair
    req = owner.begin(prompt)
    parked = owner.park(req)
    before = owner.rank.scheduler.computed
    owner.migration.takes_command(Unpark("move", stay=True), 0.0)
    owner.rank.run_out()
    assert req.output_ids == array("q", answer_to(req))
    tokens = len(parked.tokens) // TOKEN_BYTES + 1
    assert owner.rank.scheduler.computed - before == tokens - kept_tokens(scenario, parked)
    assert owner.migration.counts == {"parked": 1, "stayed": 1}
    owner.rank.finish()


@pytest.mark.parametrize("scenario", [BOTH], ids=str)
def test_after_new_weights_all_is_computed_again(pair: Pair) -> None:
    """A request has KV of the weights with which it began, which nothing else may use."""
    owner, reader = pair
    req = owner.begin(PROMPT)
    owner.rank.scheduler.change_weights()
    taken = reader.take(owner, owner.park(req), req)
    both_pass(owner, reader, taken)
    assert reader.rank.scheduler.loaded == 0
    assert taken.output_ids == array("q", answer_to(req))


def move_requests(pair: Pair, scenario: HybridScenario, *, seed: int, steps: int) -> int:
    """Traffic at both, and in every fifth pass one of the running requests is moved, or stopped and left.

    Returns how many have arrived.
    """
    owner, reader = pair
    traffic = [Traffic(scenario, seed + number, scenario.stretch) for number in range(2)]
    for step in range(steps):
        for engine, each in zip((owner, reader), traffic, strict=True):
            each.act(engine.rank.scheduler)
            engine.rank.step()
        running = [req for req in owner.rank.scheduler.running.reqs if not req.finished()]
        if step % 5 == 4 and running:
            req = traffic[0].random.choice(running)
            moves = traffic[0].random.random() < 0.7
            parked = owner.park(req)
            if not parked.why:
                if moves:
                    reader.take(owner, parked, req)
                    reader.rank.step()
                owner.migration.takes_command(Unpark("move", stay=not moves), 0.0)
            owner, reader = reader, owner
            traffic.reverse()

    def once() -> bool:
        owner.rank.step()  # a request of the other may wait for its export
        return owner.rank.scheduler.idle and reader.rank.scheduler.idle

    reader.passes_until(once, "the end of all requests")
    for engine in pair:
        engine.rank.finish()
    return sum(engine.migration.counts["arrived"] for engine in pair)


@pytest.mark.parametrize("scenario", [PAGED, BOTH], ids=str)
def test_every_row_is_right_when_requests_move(pair: Pair, scenario: HybridScenario) -> None:
    assert move_requests(pair, scenario, seed=3, steps=80)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scenario", [*SCENARIOS, COMPRESSED, GROUPED, QSA], ids=str)
def test_every_row_is_right_when_requests_move_for_long(
    pair: Pair, scenario: HybridScenario, seed: int
) -> None:
    assert move_requests(pair, scenario, seed=100 + seed, steps=150)
