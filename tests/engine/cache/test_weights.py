"""Weights that are updated in place: whatever is on its way then keeps the name of the weights that computed
it, or is dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine_movers import until
from engine_pools import PoolKind, WrongKvError
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, all_of_dram
from engine_simulation import on_disk_only as prompt_on_disk_only

from sglang_ext.engine.weights import Weights
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.testing.tiers import MemoryTier, WrappedTier
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead, Outcome, Put

pytestmark = pytest.mark.usefixtures("sglang_config")

LAYERS = 4
SCENARIO = Scenario(
    "weights",
    kind=PoolKind(layers=LAYERS),
    hbm_tokens=320,
    dram_blocks=60,
    disk_blocks=4000,
    threaded=True,
    settings=Settings(chunk=None),
)
STREAMS = dataclasses.replace(SCENARIO, stream=True)
PROMPT = [n % 4 for n in range(101)]
QUESTION = [*PROMPT, 1, 2, 3]
BLOCKS = 25


class DropsNothing(GlobalRadixCache):
    """The twin: blocks in flight when the weights change still arrive."""

    def drop_in_flight(self) -> None:
        pass


class Gated(WrappedTier):
    """Once it is shut, layers from some layer on are read when the weights have begun to change."""

    def __init__(self, inner: BlockTier) -> None:
        super().__init__(inner)
        self.opens: Callable[[], bool] = lambda: True
        self.from_layer = 0
        self.reached = False

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        if layer >= self.from_layer and not self.opens():
            self.reached = True
            until(self.opens, "the weights to change")
        return super().get_layer(get, layer, memory, ids)


@contextmanager
def on_disk_only(
    scenario: Scenario, cache_class: type[GlobalRadixCache] = GlobalRadixCache
) -> Iterator[tuple[Rank, Gated]]:
    """A rank that has ``PROMPT`` on disk and nowhere else, behind a gate that is open."""
    gates: list[Gated] = []

    def gated(tier: BlockTier) -> BlockTier:
        gates.append(Gated(tier))
        return gates[0]

    with prompt_on_disk_only(scenario, PROMPT, disk_class=gated, cache_class=cache_class) as rank:
        try:
            yield rank, gates[0]
        finally:
            gates[0].opens = lambda: True


def finish(rank: Rank) -> None:
    while not rank.scheduler.idle:
        rank.scheduler.step()
        rank.check()


def shut(rank: Rank, gate: Gated, from_layer: int) -> None:
    gate.from_layer, gate.reached = from_layer, False
    gate.opens = lambda: rank.weights.generation > 0


def test_a_promotion_under_way_is_dropped() -> None:
    with on_disk_only(SCENARIO) as (rank, gate):
        assert rank.promotions is not None
        shut(rank, gate, 0)
        req = rank.scheduler.submit(QUESTION, new_tokens=3)
        rank.ranks.each_pass()
        until(lambda: gate.reached, "the read to begin")
        before = rank.promotions.counters.promoted
        rank.scheduler.change_weights()
        assert not rank.promotions.reads.open
        finish(rank)
        assert rank.promotions.counters.promoted == before
        assert rank.scheduler.disk_tokens == 0
        assert req.cached_tokens == 0
        assert len(req.output_ids) == 3


def admitted_by_its_first_layer(rank: Rank, gate: Gated) -> Any:
    """A request whose lowest layer is in, and the others are not."""
    assert rank.promotions is not None
    shut(rank, gate, 1)
    req = rank.scheduler.submit(QUESTION, new_tokens=3)
    handle = req.cache_request_handle

    def may_start() -> bool:
        rank.ranks.each_pass()
        return gate.reached and rank.moves.blocks_to_stream(handle, 0) == BLOCKS

    until(may_start, "the lowest layer")
    return req


def test_a_request_that_would_stream_old_kv_computes() -> None:
    with on_disk_only(STREAMS) as (rank, gate):
        assert rank.promotions is not None
        req = admitted_by_its_first_layer(rank, gate)
        rank.scheduler.change_weights()
        finish(rank)
        assert rank.promotions.counters.streamed == 0
        assert rank.scheduler.disk_tokens == 0
        assert req.cached_tokens == 0
        assert len(req.output_ids) == 3


def test_streaming_on_would_be_seen() -> None:
    """The twin."""
    with on_disk_only(STREAMS, DropsNothing) as (rank, gate):
        admitted_by_its_first_layer(rank, gate)
        rank.scheduler.change_weights()
        with pytest.raises(WrongKvError):
            finish(rank)


@contextmanager
def found_straight(cache_class: type[GlobalRadixCache] = GlobalRadixCache) -> Iterator[tuple[Rank, Any]]:
    """A request that may take its blocks from disk straight to HBM: DRAM has no room."""
    with on_disk_only(STREAMS, cache_class) as (rank, _):
        assert rank.tier is not None
        assert rank.promotions is not None
        taken = all_of_dram(rank)
        req = rank.scheduler.submit(QUESTION, new_tokens=3)
        rank.ranks.each_pass()
        assert rank.moves.blocks_to_stream(req.cache_request_handle, 0) == BLOCKS
        yield rank, req
        taken.abort()


def test_a_straight_load_of_old_kv_does_not_begin() -> None:
    with found_straight() as (rank, req):
        assert rank.promotions is not None
        rank.scheduler.change_weights()
        assert not any(node.locks for node in rank.tree.nodes())
        finish(rank)
        assert rank.promotions.counters.direct == 0
        assert req.cached_tokens == 0


def test_a_straight_load_that_began_would_be_seen() -> None:
    """The twin."""
    with found_straight(DropsNothing) as (rank, _):
        rank.scheduler.change_weights()
        with pytest.raises(WrongKvError):
            finish(rank)


def test_while_weights_change_nothing_is_looked_for_on_disk() -> None:
    with on_disk_only(STREAMS) as (rank, _):
        rank.scheduler.begin_to_change_weights()
        req = rank.serve(QUESTION)
        assert req.cached_tokens == rank.scheduler.disk_tokens == 0
        rank.cache.weights_changed()
        assert rank.serve(QUESTION).cached_tokens == 0


@contextmanager
def restarted(
    before: Callable[[Rank], None],
    cache_class: type[GlobalRadixCache] = GlobalRadixCache,
    tier_class: Callable[[BlockTier], BlockTier] | None = None,
) -> Iterator[Rank]:
    """A rank with the weights of the first start, over the disk that another one has left."""
    disk = MemoryTier(Rank.layout_of(SCENARIO), 4000)
    first = Rank(SCENARIO, disk_class=lambda _: (tier_class or Keeps)(disk), cache_class=cache_class)
    try:
        before(first)
        first.settle()
    finally:
        first.close()
    second = Rank(SCENARIO, disk_class=lambda _: Keeps(disk))
    try:
        yield second
    finally:
        second.close()


class Keeps(WrappedTier):
    """Stays when a rank ends, as a directory does."""

    def close(self) -> None:
        pass


class WritesLate(Keeps):
    """Writes a layer when its gate is open."""

    def __init__(self, inner: BlockTier) -> None:
        super().__init__(inner)
        self.opens: Callable[[], bool] = lambda: True
        self.reached = False

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        if not self.opens():
            self.reached = True
            until(self.opens, "the weights to change")
        return super().put_layer(put, layer, memory, ids)


def updated_while_it_decodes(rank: Rank) -> None:
    rank.scheduler.submit(PROMPT, new_tokens=24)
    for _ in range(6):
        rank.scheduler.step()
    rank.settle()
    rank.scheduler.change_weights()
    finish(rank)


def test_what_new_weights_computed_is_not_on_disk_under_the_old_ones_name() -> None:
    """A request ran through the update. After a restart with the old weights, only blocks that the old
    weights computed are found."""
    with restarted(updated_while_it_decodes) as rank:
        answer = rank.serve(PROMPT, new_tokens=24)
        assert rank.scheduler.disk_tokens == BLOCKS * 4
        rank.serve([*PROMPT, *answer.output_ids, 3, 1])
        assert len(answer.output_ids) == 24


def test_what_is_written_after_the_change_keeps_the_name_of_what_computed_it() -> None:
    """Write-behind: the old weights' blocks reach the disk when the new ones are in use, beside theirs."""
    made: list[WritesLate] = []

    def late(tier: BlockTier) -> BlockTier:
        made.append(WritesLate(tier))
        return made[0]

    def before(rank: Rank) -> None:
        made[0].opens = lambda: rank.weights.generation > 0
        rank.scheduler.submit(PROMPT, new_tokens=1)
        until(lambda: rank.scheduler.step() or made[0].reached, "a write to begin")
        rank.scheduler.change_weights()
        rank.serve(PROMPT)

    with restarted(before, tier_class=late) as rank:
        rank.serve(PROMPT)
        assert rank.scheduler.disk_tokens == BLOCKS * 4


class KeepsTheFirstName(GlobalRadixCache):
    """The twin: a request's KV goes where it was matched, whatever computed it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rows.namespace_of = lambda req: (0, req.extra_key, req.cache_salt)  # type: ignore[method-assign]


def test_new_kv_under_the_old_name_would_be_seen() -> None:
    def update(rank: Rank) -> None:
        rank.look_inside = False  # it would be seen at once
        updated_while_it_decodes(rank)

    with restarted(update, KeepsTheFirstName) as rank, pytest.raises(WrongKvError):
        rank.serve([*PROMPT, *answer_of(rank), 3, 1])


def answer_of(rank: Rank) -> list[int]:
    """The model's answer to ``PROMPT``, whose KV no rank keeps."""
    with_nothing = Rank(SCENARIO)
    try:
        return list(with_nothing.serve(PROMPT, new_tokens=24).output_ids)
    finally:
        with_nothing.close()


def test_weights_that_come_back_find_their_kv_on_disk() -> None:
    """Weights are identified by their content, not by the number of changes."""
    with on_disk_only(SCENARIO) as (rank, _):
        rank.scheduler.change_weights()
        rank.serve(QUESTION)
        assert rank.scheduler.disk_tokens == 0
        rank.settle()
        rank.scheduler.weights = -2  # the next ones are the first ones again
        rank.scheduler.change_weights()
        assert rank.weights.version(rank.weights.generation) == "weights"


def test_what_weights_are_is_read_once_they_stand_still() -> None:
    now = iter(["v1", "v0"])
    weights = Weights("v0", lambda: next(now))
    assert weights.as_started
    weights.begin()
    assert (weights.as_started, weights.version(weights.generation)) == (False, None)
    weights.settle()
    assert (weights.as_started, weights.version(weights.generation)) == (False, "v1")
    weights.begin()
    weights.settle()
    assert (weights.as_started, weights.version(weights.generation)) == (True, "v0")
    assert weights.generation == 4


def test_weights_that_cannot_be_read_are_like_no_others(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> str:
        raise RuntimeError("out of memory")

    weights = Weights("v0", fails)
    weights.begin()
    weights.settle()
    assert not weights.as_started
    assert weights.version(weights.generation) is None
    assert "cannot be read" in caplog.text


def test_without_a_digest_changed_weights_are_never_those_of_the_start() -> None:
    weights = Weights()
    assert weights.as_started
    weights.begin()
    weights.settle()
    assert not weights.as_started
