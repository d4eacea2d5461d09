"""KV that streams from disk in front of the forward pass, alone and under a fault of the disk."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from engine_movers import until
from engine_pools import PoolKind, WrongKvError
from engine_scheduler import Settings
from engine_simulation import LateLayers, Rank, Scenario, all_of_dram
from engine_simulation import on_disk_only as prompt_on_disk_only
from sglang.srt.managers.schedule_batch import Req

from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.testing.tiers import WrappedTier
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead, Outcome

pytestmark = pytest.mark.usefixtures("sglang_config")

LAYERS = 4
ALONE = Scenario(
    "alone",
    kind=PoolKind(layers=LAYERS),
    hbm_tokens=320,
    dram_blocks=60,
    disk_blocks=4000,
    threaded=True,
    stream=True,
    settings=Settings(chunk=None),
)
PROMPT = [n % 4 for n in range(101)]
BLOCKS = 25


class LoosesALayer(WrappedTier):
    """From some layer on, the thirteenth block of a read does not verify.

    Such a layer comes once a pass streams: a busy machine would read it before the pass begins, and then the
    request would not stream.
    """

    def __init__(self, inner: BlockTier, layer: int) -> None:
        super().__init__(inner)
        self._layer = layer
        self._streams = threading.Event()

    def watch(self, promotions: Promotions) -> None:
        """Learn when a pass begins to stream, which is not left to measured speeds."""
        promotions.policy.may_start = lambda *_: True  # type: ignore[method-assign]
        load = promotions.reads.load

        def streaming(*arguments: Any) -> None:
            self._streams.set()
            load(*arguments)

        promotions.reads.load = streaming  # type: ignore[method-assign]

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        if layer >= self._layer:
            assert self._streams.wait(60), "no pass streams"
        read = super().get_layer(get, layer, memory, ids)
        if layer >= self._layer and len(ids) > BLOCKS // 2:
            for rows in memory.rows(layer, ids)[BLOCKS // 2 :]:
                rows[:] = 0xEE
            get.blocks = min(get.blocks, BLOCKS // 2)
            return LayerRead(get.blocks, Outcome.DAMAGED)
        return read


@contextmanager
def on_disk_only(
    scenario: Scenario = ALONE, disk: Callable[[BlockTier], BlockTier] = lambda tier: tier
) -> Iterator[Rank]:
    """A rank that has ``PROMPT`` on disk and nowhere else."""
    made: list[BlockTier] = []

    def keep(tier: BlockTier) -> BlockTier:
        made.append(disk(tier))
        return made[-1]

    with prompt_on_disk_only(scenario, PROMPT, disk_class=keep) as rank:
        for tier in made:
            if isinstance(tier, LoosesALayer) and rank.promotions is not None:
                tier.watch(rank.promotions)
        yield rank


def test_the_forward_pass_starts_before_all_layers_are_in() -> None:
    with on_disk_only() as rank:
        assert rank.promotions is not None
        rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
        assert rank.promotions.counters.streamed == BLOCKS
        assert rank.promotions.counters.promoted == BLOCKS
        assert rank.scheduler.disk_tokens == BLOCKS * 4
        assert rank.scheduler.restarted == 0


def test_nothing_streams_to_a_request_with_embeddings_of_its_own() -> None:
    """Its tokens are on disk, with the KV of the model's embeddings."""
    with on_disk_only() as rank:
        assert rank.promotions is not None
        rank.serve([*PROMPT, 1, 2, 3], new_tokens=3, private=True)
        assert rank.promotions.counters.streamed == rank.promotions.counters.promoted == 0
        assert rank.scheduler.disk_tokens == 0


def test_without_streaming_it_waits_for_all_of_them() -> None:
    with on_disk_only(dataclasses.replace(ALONE, stream=False), LateLayers) as rank:
        assert rank.promotions is not None
        rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
        assert rank.promotions.counters.streamed == 0
        assert rank.promotions.counters.promoted == BLOCKS


def test_nothing_streams_that_is_to_be_complete_first() -> None:
    """``--kv-disk-io auto,admission=complete``, where streaming is possible."""
    with on_disk_only(dataclasses.replace(ALONE, admission="complete"), LateLayers) as rank:
        assert rank.promotions is not None
        rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
        assert rank.promotions.counters.streamed == 0
        assert rank.promotions.counters.promoted == BLOCKS
        assert rank.scheduler.disk_tokens == BLOCKS * 4


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("layer", [1, LAYERS - 1])
def test_a_damaged_layer_runs_the_batch_again(layer: int, overlap: bool) -> None:
    scenario = dataclasses.replace(ALONE, settings=Settings(chunk=None, overlap=overlap))
    with on_disk_only(scenario, lambda tier: LoosesALayer(tier, layer)) as rank:
        assert rank.promotions is not None
        first = rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
        assert rank.scheduler.restarted == 1
        assert rank.promotions.counters.streamed == 0
        assert rank.promotions.counters.read_failed > 0
        # Verified blocks have been kept, and the answer equals a computed one.
        assert rank.promotions.counters.promoted >= BLOCKS // 2
        second = rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
        assert first.output_ids == second.output_ids
        assert len(first.output_ids) == 3


def test_others_in_the_batch_run_again_too_and_lose_nothing() -> None:
    with on_disk_only(disk=lambda tier: LoosesALayer(tier, 2)) as rank:
        assert rank.promotions is not None
        reading = rank.scheduler.submit([*PROMPT, 1, 2, 3], new_tokens=3)
        until(lambda: rank.promotions.ready(reading.cache_request_handle) or step(rank), "the first layer")
        other = rank.scheduler.submit([3] * 40, new_tokens=5)
        while not rank.scheduler.idle:
            step(rank)
        assert rank.scheduler.restarted >= 1
        assert len(reading.output_ids) == 3
        assert len(other.output_ids) == 5


def step(rank: Rank) -> bool:
    rank.scheduler.step()
    rank.check()
    return False


def test_a_chunk_of_a_prompt_that_streams_can_be_thrown_away() -> None:
    scenario = dataclasses.replace(ALONE, settings=Settings(chunk=32))
    with on_disk_only(scenario, lambda tier: LoosesALayer(tier, 2)) as rank:
        req = rank.serve([*PROMPT, *([1, 2, 3, 3] * 20)], new_tokens=3)
        assert rank.scheduler.restarted == 1
        assert len(req.output_ids) == 3


def test_a_request_whose_stream_has_failed_waits_for_all_layers_the_next_time() -> None:
    with on_disk_only(disk=lambda tier: LoosesALayer(tier, 1)) as rank:
        rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
        # Half of it was kept; the other half is still on disk and fails again, without a restart.
        assert rank.scheduler.restarted == 1


@contextmanager
def no_room_in_dram(rank: Rank) -> Iterator[None]:
    """Another owner has reserved all of DRAM."""
    taken = all_of_dram(rank)
    yield
    taken.abort()


def test_without_room_in_dram_it_comes_straight_to_hbm() -> None:
    with on_disk_only() as rank, no_room_in_dram(rank):
        assert rank.promotions is not None
        rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
        assert rank.promotions.counters.direct == BLOCKS
        assert rank.promotions.counters.promoted == rank.promotions.counters.no_room == 0
        assert rank.scheduler.disk_tokens == BLOCKS * 4
        # It is in HBM now like anything that was computed.
        loaded = rank.scheduler.loaded_tokens
        rank.serve([*PROMPT, 1, 2, 3])
        assert rank.scheduler.loaded_tokens == loaded
        assert rank.promotions.counters.direct == BLOCKS


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_damaged_layer_on_the_straight_way_runs_the_batch_again(layer: int) -> None:
    with on_disk_only(disk=lambda tier: LoosesALayer(tier, layer)) as rank, no_room_in_dram(rank):
        assert rank.promotions is not None
        req = rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
        assert rank.scheduler.restarted == 1
        assert len(req.output_ids) == 3
        assert rank.promotions.counters.direct == 0
        assert rank.promotions.counters.no_room == BLOCKS  # the second time


class Breaks(WrappedTier):
    """From some layer on, reads raise an error that no tier may raise."""

    def __init__(self, inner: BlockTier, layer: int) -> None:
        super().__init__(inner)
        self._layer = layer

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        if layer >= self._layer:
            raise ZeroDivisionError("placed by the test")
        return super().get_layer(get, layer, memory, ids)


def is_whole(rank: Rank, answer: Req) -> bool:
    """The answer is that of a rank without a disk, and nothing is left locked or reading."""
    assert rank.promotions is not None
    rank.settle()  # DRAM stays locked until the disk has it
    assert not rank.promotions.reads.open
    assert not any(node.locks for node in rank.tree.nodes())
    again = rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
    return len(answer.output_ids) == 3 and answer.output_ids == again.output_ids


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("layer", [0, 1, LAYERS - 1])
def test_a_fault_that_is_not_the_disks_is_a_miss_too(
    layer: int, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    scenario = dataclasses.replace(ALONE, stream=stream)
    with on_disk_only(scenario, lambda tier: Breaks(tier, layer)) as rank:
        assert rank.promotions is not None
        answer = rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
        assert "in a way that is not the disk's" in caplog.text
        assert "ZeroDivisionError: placed by the test" in caplog.text
        assert rank.promotions.counters.read_failed >= BLOCKS
        assert rank.promotions.counters.promoted == rank.promotions.counters.streamed == 0
        assert is_whole(rank, answer)


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
def test_a_fault_that_is_not_the_disks_on_the_straight_way(
    layer: int, caplog: pytest.LogCaptureFixture
) -> None:
    with on_disk_only(disk=lambda tier: Breaks(tier, layer)) as rank, no_room_in_dram(rank):
        assert rank.promotions is not None
        answer = rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
        assert rank.scheduler.restarted == 1
        assert "ZeroDivisionError: placed by the test" in caplog.text
        assert (rank.promotions.counters.direct, rank.promotions.counters.read_failed) == (0, BLOCKS)
        assert len(answer.output_ids) == 3


def test_a_flush_survives_a_fault_that_is_not_the_disks(caplog: pytest.LogCaptureFixture) -> None:
    with on_disk_only(disk=lambda tier: Breaks(tier, 0)) as rank:
        assert rank.promotions is not None
        assert rank.tier is not None
        req = rank.scheduler.submit([*PROMPT, 1, 2, 3], new_tokens=3)
        rank.ranks.each_pass()
        (promotion,) = rank.promotions.reads.open
        until(lambda: promotion.load.over, "the end of the load")
        used = rank.tier.used_blocks
        rank.promotions.drop_in_flight()
        assert "in a way that is not the disk's" in caplog.text
        assert rank.tier.used_blocks == used - BLOCKS
        assert not any(node.locks for node in rank.tree.nodes())
        while not rank.scheduler.idle:
            step(rank)
        assert len(req.output_ids) == 3


def test_a_request_that_goes_away_leaves_nothing_pinned() -> None:
    with on_disk_only() as rank, no_room_in_dram(rank):
        assert rank.promotions is not None
        req = rank.scheduler.submit([*PROMPT, 1, 2, 3], new_tokens=3)
        rank.ranks.each_pass()
        assert rank.moves.blocks_to_stream(req.cache_request_handle, 0) == BLOCKS
        rank.scheduler.abort(req)
        assert rank.moves.blocks_to_stream(req.cache_request_handle, 0) == 0
        assert not any(node.locks for node in rank.tree.nodes())
        rank.check()


def test_a_cache_that_does_not_look_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: the forward pass reads the damaged bytes."""
    with on_disk_only(disk=lambda tier: LoosesALayer(tier, 1)) as rank:
        monkeypatch.setattr(rank.cache, "streams_hold", lambda: True)
        with pytest.raises(WrongKvError):
            rank.serve([*PROMPT, 1, 2, 3], new_tokens=3)
