"""The twins of the simulation: caches with one fault each, which it must detect."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_pools import PoolKind, WrongKvError
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, run
from engine_verifying import VerifyingScheduler
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
)

from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.mover import LaterLayers, LayerGate
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.patches.adapter.request_rows import RequestRows
from sglang_ext.radix_global import Node
from sglang_ext.testing.tiers import WrappedTier
from sglang_ext.tiered_store.tier import BlockMemory, Get, Ids, LayerRead

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

BUSY = Scenario(
    "busy",
    hbm_tokens=256,
    dram_blocks=250,
    memory=40,
    settings=Settings(overlap=True, new_token_ratio=0.05),
)
PAGED = Scenario(
    "paged",
    kind=PoolKind("mla", 16, layers=3, start_layer=2),
    block=16,
    hbm_tokens=480,
    dram_blocks=60,
    memory=30,
    settings=Settings(chunk=48, new_token_ratio=0.05),
)


INDEXED = Scenario(
    "indexed",
    kind=PoolKind("dsa", 64, layers=3),
    block=64,
    hbm_tokens=64 * 8,
    dram_blocks=40,
    memory=20,
    settings=Settings(chunk=128, new_token_ratio=0.05),
)
INDEXED_DRAFT = replace(
    INDEXED,
    kind=PoolKind("dsa", 64, layers=3, draft_layers=1, algorithm="EAGLE"),
    make_scheduler=VerifyingScheduler,
)
DRAFTED = Scenario("drafted", kind=PoolKind(draft_layers=2), hbm_tokens=256, dram_blocks=250, memory=40)
ON_DISK = Scenario("on disk", hbm_tokens=256, dram_blocks=70, disk_blocks=4000, memory=60)


class ForgetsToLock(GlobalRadixCache):
    def inc_lock_ref(self, node: Node) -> IncLockRefResult:
        return IncLockRefResult(delta=0)

    def dec_lock_ref(self, node: Node, params: DecLockRefParams | None = None) -> DecLockRefResult:
        return DecLockRefResult(delta=0)


def with_rows(rows_class: type[RequestRows]) -> type[GlobalRadixCache]:
    """A cache whose requests' rows have a fault."""

    class Cache(GlobalRadixCache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.rows = rows_class(self, self.req_to_token_pool)

    Cache.__name__ = rows_class.__name__
    return Cache


class KeepsDuplicates(RequestRows):
    def keep(self, req: Any, tokens: Any) -> tuple[Node, int] | None:
        with_free = self._cache.token_to_kv_pool_allocator
        self._cache.token_to_kv_pool_allocator = _FreesNothing()
        try:
            return super().keep(req, tokens)
        finally:
            self._cache.token_to_kv_pool_allocator = with_free


class _FreesNothing:
    def free_segment(self, slots: Any, *, start_pos: int) -> None:
        pass


class FreesTooMuch(RequestRows):
    """Takes blocks that the tree owned before for the request's own."""

    def keep(self, req: Any, tokens: Any) -> tuple[Node, int] | None:
        req.kv.cache_protected_len = max(0, req.kv.cache_protected_len - self._cache.block_size)
        return super().keep(req, tokens)


class GoesOnWithFreedSlots(RequestRows):
    """Frees a request's duplicates, and leaves them in its row."""

    def keep_computed(self, req: Any, tokens: Any) -> Node | None:
        row = self._table.req_to_token[req.kv.req_pool_idx]
        before = row.clone()
        node = super().keep_computed(req, tokens)
        row[:] = before
        return node


class IgnoresWeights(GlobalRadixCache):
    def weights_changing(self) -> None:
        pass

    def weights_changed(self) -> None:
        pass


class IgnoresTenants(GlobalRadixCache):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.namespace = lambda extra_key, cache_salt: (self.weights.generation, extra_key)


class FollowsNewWeights(RequestRows):
    """Files the KV of a request that started before the change under the new weights."""

    def namespace_of(self, req: Any) -> Hashable:
        return (self._cache.weights.generation, req.extra_key, req.cache_salt)


class WaitsForTheLoadBefore(GlobalRadixCache):
    def ready_to_load_host_cache(self) -> int:
        return max(-1, super().ready_to_load_host_cache() - 1)


class DoesNotWaitForWrites(GlobalRadixCache):
    """Evicts blocks that are being copied without waiting for the copy."""

    def evict(self, params: EvictParams) -> EvictResult:
        assert self.dram is not None
        mover = self.dram.copies.mover
        mover.wait_writes, wait = _nothing, mover.wait_writes  # type: ignore[method-assign]
        try:
            return super().evict(params)
        finally:
            mover.wait_writes = wait  # type: ignore[method-assign]


def _nothing(count: int) -> None:
    pass


class NeverWaits(LayerGate):
    def set_consumer(self, ticket: int) -> None:
        pass


class WaitsForTheLayerBefore(LayerGate):
    def wait_until(self, layer: int) -> None:
        if layer > 0:
            super().wait_until(layer - 1)


class ForgetsTheDraftsLayers(LayerGate):
    """Has the draft model wait for the layers of the model."""

    def behind(self, layers: int) -> LaterLayers:
        return super().behind(0)


class CountsEarly(Copies):
    """Takes a write for complete when it is submitted."""

    def act(self, agreed: Sequence[int]) -> None:
        super().act((self.writes_ended + len(self._writes.pending), *agreed[1:]) if agreed else ())


class LoadsInTheWrongOrder(DramTier):
    """Takes blocks for each other. Tokens inside one SGLang itself sees, from 0.5.22 on."""

    def load(self, what: list[Node], places: Any, landed: Callable[[], None] | None = None) -> None:
        super().load(what, places, landed)
        if landed is None:
            for node in what:
                slots = node.placements[self._hbm]
                slots[:] = np.flip(slots.reshape(node.blocks, -1), 0).reshape(-1)


class LyingDisk(WrappedTier):
    """Hands over one wrong bit and reports success."""

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        read = super().get_layer(get, layer, memory, ids)
        if read.blocks:
            memory.rows(layer, ids)[0][0] ^= np.uint8(1)
        return read


class MixesUpBlocks(WrappedTier):
    """Hands over the blocks of a prefix in another order."""

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        return super().get_layer(get, layer, memory, np.roll(ids, 1))


TWINS: list[tuple[dict[str, Any], Scenario, type[AssertionError]]] = [
    ({"cache_class": ForgetsToLock}, BUSY, AssertionError),
    ({"cache_class": with_rows(KeepsDuplicates)}, BUSY, AssertionError),
    ({"cache_class": with_rows(FreesTooMuch)}, PAGED, AssertionError),
    ({"cache_class": with_rows(GoesOnWithFreedSlots)}, BUSY, AssertionError),
    ({"cache_class": IgnoresWeights}, BUSY, WrongKvError),
    ({"cache_class": IgnoresTenants}, PAGED, WrongKvError),
    ({"cache_class": with_rows(FollowsNewWeights)}, BUSY, AssertionError),
    ({"cache_class": WaitsForTheLoadBefore}, BUSY, WrongKvError),
    ({"cache_class": DoesNotWaitForWrites}, PAGED, WrongKvError),
    ({"gate_class": NeverWaits}, BUSY, WrongKvError),
    ({"gate_class": WaitsForTheLayerBefore}, PAGED, WrongKvError),
    ({"gate_class": ForgetsTheDraftsLayers}, DRAFTED, WrongKvError),
    ({"copies_class": CountsEarly}, BUSY, WrongKvError),
    ({"tier_class": LoadsInTheWrongOrder}, PAGED, WrongKvError),
    ({"disk_class": LyingDisk}, ON_DISK, WrongKvError),
    ({"disk_class": MixesUpBlocks}, ON_DISK, WrongKvError),
]


def survives(rank: Rank, seed: int, error: type[AssertionError], **how: Any) -> bool:
    try:
        run(rank, seed, 250, **how)
    except error:
        return False
    finally:
        rank.close()
    return True


@pytest.mark.parametrize(
    ("classes", "scenario", "error"), TWINS, ids=[next(iter(twin[0].values())).__name__ for twin in TWINS]
)
def test_a_faulty_cache_is_found_out(
    classes: dict[str, Any], scenario: Scenario, error: type[AssertionError]
) -> None:
    for seed in range(4):
        if not survives(Rank(scenario, pace=None, **classes), seed, error):
            return
    pytest.fail("four runs did not notice")


class FlipsBits:
    """Damages one bit, now and then, in a block that only DRAM has, or in one plane of it."""

    def __init__(self, seed: int, plane: int | None = None) -> None:
        self._random = random.Random(seed)
        self._plane = plane
        self.flipped = 0

    def __call__(self, rank: Rank, step: int) -> None:
        alone = [
            node
            for node in rank.tree.nodes()
            if list(node.placements) == [rank.dram_holder] and not node.locks
        ]
        if not alone:
            return
        assert rank.arena is not None
        blocks = self._random.choice(alone).placements[rank.dram_holder]
        block = rank.arena.blocks[int(self._random.choice(list(blocks)))]
        if self._plane is not None:
            offsets = rank.arena.layout.plane_offsets
            block = block[offsets[self._plane] : offsets[self._plane + 1]]
        block[self._random.randrange(len(block))] ^= np.uint8(1 << self._random.randrange(8))
        self.flipped += 1


@pytest.mark.parametrize(
    "look_inside", [True, False], ids=["by looking into DRAM", "by a forward pass alone"]
)
@pytest.mark.parametrize(
    ("scenario", "plane"),
    [(BUSY, None), (INDEXED, 1), (DRAFTED, 7), (INDEXED_DRAFT, 6)],
    ids=["anywhere", "in index keys", "in the draft's KV", "in the draft's index keys"],
)
def test_one_wrong_bit_in_dram_is_seen(scenario: Scenario, plane: int | None, look_inside: bool) -> None:
    for seed in range(4):
        rank = Rank(scenario, pace=random.Random(seed))
        rank.look_inside = look_inside
        flips = FlipsBits(seed, plane)
        if not survives(rank, seed, WrongKvError, after_step=flips):
            assert flips.flipped > 0
            return
    pytest.fail("four runs did not notice")


def test_without_a_fault_the_same_runs_pass() -> None:
    for scenario in (BUSY, PAGED, ON_DISK, INDEXED, INDEXED_DRAFT, DRAFTED):
        assert survives(Rank(scenario), 0, AssertionError)
