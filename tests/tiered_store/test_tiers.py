"""Every tier passes the conformance suite; the test tiers misbehave as they promise."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.geometry import BlockLayout
from sglang_ext.testing.blocks import (
    LAYOUT,
    NAMESPACE,
    contents,
    get_all,
    prefix_keys,
    put_all,
    read_all,
)
from sglang_ext.testing.tier_contract import CAPACITY, DurableTierContract, TierContract
from sglang_ext.testing.tiers import FaultyTier, GatedTier, MemoryTier, SlowTier, WrappedTier
from sglang_ext.tiered_store.chain import TierChain
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.loading.layer_cache import LayerCache
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Outcome

pytestmark = pytest.mark.slow


class TestMemoryTier(TierContract):
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        return MemoryTier(layout, capacity)


class TestWrappedTier(TierContract):
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        return WrappedTier(FaultyTier(MemoryTier(layout, capacity), seed=0, rate=0.0))


class TestLayerCache(TierContract):
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        return LayerCache(MemoryTier(layout, capacity), capacity * layout.block_bytes, layout.n_layers)


class TestSmallLayerCache(TierContract):
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        return LayerCache(MemoryTier(layout, capacity), 3 * layout.layer_bytes(0), 1)


class TestTierChain(TierContract):
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        return TierChain([MemoryTier(layout, capacity), MemoryTier(layout, capacity)])


class TestDurableTierChain(DurableTierContract):
    def open_tier(self, layout: BlockLayout, capacity: int, tmp_path: Path) -> BlockTier:
        limit = capacity * (16 << 10)
        disks = [DiskTier(DiskConfig(tmp_path / name, limit), layout) for name in ("near", "far")]
        return TierChain([MemoryTier(layout, 3), *disks])


# --- the test tiers themselves ---


@pytest.mark.parametrize("seed", range(5))
def test_faults_are_misses_with_a_reason_and_never_wrong_bytes(seed: int) -> None:
    tier = FaultyTier(MemoryTier(LAYOUT, CAPACITY), seed=seed, rate=0.25)
    outcomes = set()
    for round_ in range(60):
        keys = prefix_keys(round_ % 4, 5)
        outcomes.add(put_all(tier, NAMESPACE, keys))
        get = tier.prepare_get(NAMESPACE, keys)
        count, blocks, outcome = read_all(tier, get)
        tier.complete_get(get)
        outcomes.add(outcome)
        for row, key in zip(blocks[:count], keys, strict=False):
            assert np.array_equal(row, contents(LAYOUT, NAMESPACE, key))
    assert set(tier.faults) == {"prepare_put", "put_layer", "complete_puts", "prepare_get", "get_layer"}
    assert {Outcome.DONE, Outcome.FULL, Outcome.IO_ERROR, Outcome.DAMAGED} <= outcomes
    tier.rate = 0.0
    assert put_all(tier, NAMESPACE, prefix_keys(9, 5)) is Outcome.DONE
    assert get_all(tier, NAMESPACE, prefix_keys(9, 5)) == 5


def test_a_slow_tier_takes_the_configured_time() -> None:
    pauses: list[float] = []
    tier = SlowTier(MemoryTier(LAYOUT, 9), latency=1.0, seconds_per_block=0.5, pause=pauses.append)
    put_all(tier, NAMESPACE, prefix_keys(1, 4))
    get_all(tier, NAMESPACE, prefix_keys(1, 4))
    assert pauses == [3.0, 3.0, 3.0, 1.0, 3.0, 3.0, 3.0]


def test_gated_tier_places_a_drop_inside_a_read() -> None:
    tier = GatedTier(MemoryTier(LAYOUT, 9))
    keys = prefix_keys(1, 4)
    put_all(tier, NAMESPACE, keys)
    counts: list[int] = []
    tier.close_gate("get_layer")
    thread = threading.Thread(target=lambda: counts.append(get_all(tier, NAMESPACE, keys)))
    thread.start()
    tier.wait_until_stopped("get_layer")
    assert tier.clear() == 4
    put_all(tier, NAMESPACE, prefix_keys(2, 5))  # takes every block that is free
    tier.open_gate("get_layer")
    thread.join(timeout=30)
    assert counts == [4]
    tier.close()


def test_block_memory_refuses_rows_of_another_size() -> None:
    blocks = np.zeros((2, LAYOUT.block_bytes), dtype=np.uint8)
    with pytest.raises(ValueError, match="layer 0"):
        BlockMemory(LAYOUT, [blocks, blocks, blocks])
    with pytest.raises(ValueError, match="2 layer arrays"):
        BlockMemory(LAYOUT, [blocks, blocks])
    memory = BlockMemory.of_blocks(LAYOUT, blocks)
    with pytest.raises(ValueError, match="outside"):
        memory.vectors(0, np.array([2]))
    assert memory.vectors(1, np.array([1])).tolist() == [
        [blocks.ctypes.data + LAYOUT.block_bytes + LAYOUT.layer_offsets[1], LAYOUT.layer_bytes(1)]
    ]
