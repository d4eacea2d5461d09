"""One prompt computed by two instances at once: real links, pools and schedulers, two threads, no model."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from engine_movers import until
from engine_pools import PoolKind, WrongKvError
from engine_scheduler import Settings, SimulatedScheduler
from peer_rig import BLOCK, SCENARIO, MakeServer, Server, prompt, silent
from sglang.srt.managers.schedule_batch import Req

from sglang_ext.engine.peers.computed_spans import ComputedSpans
from sglang_ext.engine.peers.export import layer_name
from sglang_ext.engine.peers.fetch_results import FetchEnd
from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import Export, Fetch, FetchSpan, Source
from sglang_ext.wire import unpack_ids

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

LAYERS = 4
SPLIT = dataclasses.replace(
    SCENARIO, name="two that split", kind=PoolKind(layers=LAYERS), threaded=True, hbm_tokens=400
)
FIRST = 20
"""Blocks of the first span."""
ALL = 32


class Host:
    """A simulated scheduler, with the interface that span computation uses."""

    def __init__(self, scheduler: SimulatedScheduler) -> None:
        self._scheduler = scheduler
        self.requests: list[Req] = []
        self.takes = True

    def start(self, name: str, tokens: list[int], extra_key: str | None, salt: str | None) -> Req | None:
        if not self.takes:
            return None
        self.requests.append(self._scheduler.submit(tokens, new_tokens=1, extra_key=extra_key, salt=salt))
        return self.requests[-1]

    def watch(self, written: Callable[[int], None]) -> int:
        self._scheduler.layer_written = written
        return LAYERS


@dataclasses.dataclass
class Split:
    """Two servers; the first computes a span for the other."""

    first: Server
    second: Server
    host: Host
    tokens: list[int]

    def ask(self, *, blocks: int = FIRST, wait_s: float = 20.0, ttl_s: float = 20.0) -> None:
        """Send both servers a router's messages."""
        key = encode_tokens(self.tokens)[: blocks * BLOCK * 4]
        self.first.receive(Export("export", key, ttl_s=ttl_s, compute=True))
        span = FetchSpan(Source((self.first.link.address,), "export"), blocks * BLOCK, computed=True)
        self.second.receive(Fetch("r1", key, (span,), wait_s=wait_s))

    @contextmanager
    def stepping(self, layer_gate: Callable[[int], None] = lambda layer: None) -> Iterator[None]:
        """The first one's scheduler, in a thread of its own. layer_gate: called after each layer."""
        scheduler, end, errors = self.first.rank.scheduler, threading.Event(), []
        written = scheduler.layer_written

        def gated(layer: int) -> None:
            written(layer)
            layer_gate(layer)

        scheduler.layer_written = gated

        def run() -> None:
            try:
                while not end.is_set():
                    scheduler.step()
                    end.wait(0.001)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        thread = threading.Thread(target=run, name="the first server")
        thread.start()
        try:
            yield
            until(lambda: bool(errors) or not self.busy, "the exports to end")
        finally:
            end.set()
            thread.join()
        if errors:
            raise errors[0]
        self.first.rank.check()

    @property
    def spans(self) -> ComputedSpans:
        """Of the first server."""
        spans = self.first.rank.cache.find(ComputedSpans)
        assert spans is not None
        return spans

    @property
    def busy(self) -> bool:
        """Whether the first server computes or exports."""
        spans = self.first.rank.cache.find(ComputedSpans)
        return (spans is not None and spans.busy) or self.first.peers.busy

    def ended(self) -> dict[FetchEnd, int]:
        return dict(self.second.peers.fetches.counters.ends)


@pytest.fixture
def split(make_server: MakeServer) -> Split:
    first, second = make_server(SPLIT), make_server(SPLIT)
    host = Host(first.rank.scheduler)
    first.compute_spans(host)
    return Split(first, second, host, prompt(1, ALL))


def behind(second: Server, passes: int = 1) -> Callable[[int], None]:
    """A gate for the first server: in that pass of its, it does not go on from a layer before the second has
    been there, which cannot be before that layer has come."""
    reached = [threading.Event() for _ in range(LAYERS)]
    second.rank.scheduler.layer_written = lambda layer: reached[layer].set()
    begun = itertools.count(1)
    number = 0

    def gate(layer: int) -> None:
        nonlocal number
        number = next(begun) if layer == 0 else number
        # The last layer is exported when the pass has ended.
        if number == passes and layer < LAYERS - 1:
            assert reached[layer].wait(20), f"layer {layer} is not computed behind this one"

    return gate


def test_the_second_runs_while_the_first_computes(split: Split) -> None:
    """Each waits for the other."""
    split.ask()
    req = split.second.rank.scheduler.submit(split.tokens, new_tokens=2)
    with split.stepping(behind(split.second)):
        split.second.finish(req)
    assert req.cached_tokens == FIRST * BLOCK
    assert split.ended() == {FetchEnd.DONE: 1}
    counters = split.second.peers.fetches.counters
    assert (counters.fetched_blocks, counters.fetch_streamed) == (FIRST, FIRST)
    assert split.spans.counters.span_computed == FIRST
    assert split.first.in_dram(split.tokens) == FIRST * BLOCK
    assert split.second.rank.scheduler.restarted == 0
    split.second.settle()
    assert split.second.in_dram(split.tokens) == ALL * BLOCK
    # Other requests can use the received KV.
    again = split.second.finish(split.second.rank.scheduler.submit(split.tokens, new_tokens=1))
    assert again.cached_tokens == ALL * BLOCK
    split.first.link.endpoint.check()


def test_a_damaged_byte_of_the_last_layer_is_a_wrong_answer(split: Split) -> None:
    """The twin of the test above: the second server computes with the received KV."""
    arena, link = split.first.rank.arena, split.second.link
    assert arena is not None
    read = link._read

    async def damaged(job: Any, name: str, offer: Any, *rest: Any) -> None:
        if name == layer_name("export", LAYERS - 1):
            arena.blocks[unpack_ids(offer.blocks)[7], -1] ^= 1
        await read(job, name, offer, *rest)

    link._read = damaged  # type: ignore[method-assign]
    split.first.rank.look_inside = False
    split.ask()
    req = split.second.rank.scheduler.submit(split.tokens, new_tokens=2)
    with split.stepping(), pytest.raises(WrongKvError):
        split.second.finish(req)


@pytest.mark.parametrize("chunk", [8 * BLOCK, 12 * BLOCK])
def test_chunks_and_what_each_has_already(make_server: MakeServer, chunk: int) -> None:
    """The first span takes several passes, and so does the rest; each has some of it."""
    scenario = dataclasses.replace(SPLIT, settings=Settings(chunk=chunk, new_token_ratio=0.05))
    first, second = make_server(scenario), make_server(scenario)
    first.compute_spans(host := Host(first.rank.scheduler))
    split = Split(first, second, host, prompt(1, ALL))
    first.serve(split.tokens[: 5 * BLOCK])
    second.serve(split.tokens[: 3 * BLOCK])
    split.ask()
    req = second.rank.scheduler.submit(split.tokens, new_tokens=2)
    with split.stepping(behind(second, passes=2)):
        split.second.finish(req)
    assert req.cached_tokens == FIRST * BLOCK
    assert split.second.peers.fetches.counters.fetch_streamed == FIRST - 3
    assert split.ended() == {FetchEnd.DONE: 1}


def test_the_first_dies_in_mid_span(make_server: MakeServer) -> None:
    """The pass that waits for its layers ends, is thrown away, and all is computed."""
    first, second = make_server(SPLIT), make_server(SPLIT, dead_after=1.0)
    first.compute_spans(host := Host(first.rank.scheduler))
    split = Split(first, second, host, prompt(1, ALL))
    came = threading.Event()
    second.rank.scheduler.layer_written = lambda layer: came.set()
    with ExitStack() as death:

        def gate(layer: int) -> None:
            if layer == 1:
                assert came.wait(20), "the second does not compute"
                death.enter_context(silent(first))
                until(lambda: bool(second.peers.fetches.counters.ends), "the second to notice")
                death.close()

        split.ask(wait_s=30.0, ttl_s=8.0)
        req = second.rank.scheduler.submit(split.tokens, new_tokens=2)
        with split.stepping(gate):
            second.finish(req)
    assert split.ended() == {FetchEnd.GONE: 1}
    assert (req.cached_tokens, second.rank.scheduler.restarted) == (0, 1)
    assert second.peers.fetches.counters.fetch_streamed == 0


def test_what_the_first_throws_away_is_thrown_away_by_the_second(split: Split) -> None:
    """The KV that streamed into the first server's pass was damaged, as it finds out at the pass's end."""
    moves, holds = split.first.rank.moves, iter([False])
    hold = moves.streams_hold
    moves.streams_hold = lambda: next(holds, True) and hold()  # type: ignore[method-assign]
    came = threading.Event()
    split.second.rank.scheduler.layer_written = lambda layer: came.set()

    def gate(layer: int) -> None:
        if layer == 1:
            assert came.wait(20), "the second does not compute"

    split.ask(ttl_s=3.0)
    req = split.second.rank.scheduler.submit(split.tokens, new_tokens=2)
    with split.stepping(gate):
        split.second.finish(req)
    assert split.ended() == {FetchEnd.STALE: 1}
    assert (req.cached_tokens, split.second.rank.scheduler.restarted) == (0, 1)
    assert split.first.rank.scheduler.restarted == 1
    assert split.spans.counters.span_failed == FIRST


def test_a_span_that_is_not_taken_is_computed_by_the_second(split: Split) -> None:
    split.host.takes = False
    split.ask()
    req = split.second.rank.scheduler.submit(split.tokens, new_tokens=2)
    with split.stepping():
        split.second.finish(req)
    assert split.ended() == {FetchEnd.NEEDLESS: 1}
    assert req.cached_tokens == 0
    assert split.spans.counters.span_failed == FIRST


def test_a_server_that_computes_no_spans_answers_at_once(make_server: MakeServer) -> None:
    first, second = make_server(SPLIT), make_server(SPLIT)
    split = Split(first, second, Host(first.rank.scheduler), prompt(1, ALL))
    split.ask()
    req = second.rank.scheduler.submit(split.tokens, new_tokens=2)
    with split.stepping():
        second.finish(req)
    assert split.ended() == {FetchEnd.NEEDLESS: 1}
    assert req.cached_tokens == 0


def test_a_request_waits_no_longer_than_it_may_for_a_busy_first(split: Split) -> None:
    split.ask(wait_s=0.2, ttl_s=3.0)
    req = split.second.rank.scheduler.submit(split.tokens, new_tokens=2)
    split.second.finish(req)
    assert req.cached_tokens == 0
    counters = split.second.peers.fetches.counters
    assert counters.not_waited + counters.ends[FetchEnd.LATE] >= 1
    with split.stepping():
        pass


def test_no_room_for_a_span_is_no_span(make_server: MakeServer) -> None:
    few = dataclasses.replace(SPLIT, dram_blocks=4 * (FIRST - 1))
    first, second = make_server(few), make_server(SPLIT)
    first.compute_spans(host := Host(first.rank.scheduler))
    split = Split(first, second, host, prompt(1, ALL))
    split.ask()
    req = second.rank.scheduler.submit(split.tokens, new_tokens=2)
    with split.stepping():
        second.finish(req)
    assert split.ended() == {FetchEnd.NEEDLESS: 1}
    assert req.cached_tokens == 0


def test_a_flush_forgets_spans_that_wait(split: Split) -> None:
    split.ask()
    split.first.rank.scheduler.abort(split.host.requests[0])
    assert split.busy
    assert split.first.rank.scheduler.flush()
    assert not split.busy
