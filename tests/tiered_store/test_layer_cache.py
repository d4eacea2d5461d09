"""The layer cache above a tier: it serves the lowest layers without a read, and never a damaged one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, OTHER, get_all, prefix_keys, put_all
from sglang_ext.testing.tiers import MemoryTier
from sglang_ext.tiered_store.loading.layer_cache import LayerCache
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead, Outcome
from sglang_ext.tiered_store.wrapped import WrappedTier

LAYERS = 2


class Reads(WrappedTier):
    """Counts the layers that are read below, and may fail."""

    def __init__(self, inner: BlockTier) -> None:
        super().__init__(inner)
        self.layers: list[int] = []
        self.spoil: Callable[[int, BlockMemory, Ids], LayerRead | None] = lambda *_: None

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        self.layers.append(layer)
        read = super().get_layer(get, layer, memory, ids)
        return self.spoil(layer, memory, ids) or read


def cache(blocks: int, capacity: int = 64) -> tuple[LayerCache, Reads]:
    below = Reads(MemoryTier(LAYOUT, capacity))
    size = sum(LAYOUT.layer_bytes(i) for i in range(LAYERS))
    return LayerCache(below, blocks * size, LAYERS), below


def upper() -> list[int]:
    return list(range(LAYERS, LAYOUT.n_layers))


def test_what_was_put_is_read_below_from_its_upper_layers_only() -> None:
    tier, below = cache(8)
    put_all(tier, NAMESPACE, prefix_keys(0, 5))
    assert get_all(tier, NAMESPACE, prefix_keys(0, 5)) == 5
    assert below.layers == upper()
    assert tier.stats().extra["layer_cache_hits"] == 5 * LAYERS
    tier.check()


def test_what_was_read_is_kept() -> None:
    below = Reads(MemoryTier(LAYOUT, 64))
    put_all(below, NAMESPACE, prefix_keys(0, 5))
    tier = LayerCache(below, 8 * sum(LAYOUT.layer_bytes(i) for i in range(LAYERS)), LAYERS)
    assert get_all(tier, NAMESPACE, prefix_keys(0, 5)) == 5
    assert below.layers == list(range(LAYOUT.n_layers))
    below.layers.clear()
    assert get_all(tier, NAMESPACE, prefix_keys(0, 4)) == 4
    assert below.layers == upper()


def test_the_least_recently_used_goes_first_and_a_part_is_no_hit() -> None:
    tier, below = cache(8)
    put_all(tier, NAMESPACE, prefix_keys(0, 4))
    put_all(tier, NAMESPACE, prefix_keys(1, 4))
    get_all(tier, NAMESPACE, prefix_keys(0, 4))
    put_all(tier, NAMESPACE, prefix_keys(2, 2))  # two of the second prefix go
    below.layers.clear()
    assert get_all(tier, NAMESPACE, prefix_keys(0, 4)) == 4
    assert below.layers == upper()
    below.layers.clear()
    assert get_all(tier, NAMESPACE, prefix_keys(1, 4)) == 4
    assert below.layers == list(range(LAYOUT.n_layers))
    tier.check()


def test_a_prefix_longer_than_the_cache_keeps_its_beginning() -> None:
    tier, below = cache(3)
    put_all(tier, NAMESPACE, prefix_keys(0, 6))
    below.layers.clear()
    assert get_all(tier, NAMESPACE, prefix_keys(0, 3)) == 3
    assert below.layers == upper()
    assert get_all(tier, NAMESPACE, prefix_keys(0, 6)) == 6
    tier.check()


def test_a_namespace_has_copies_of_its_own() -> None:
    tier, _ = cache(16)
    put_all(tier, NAMESPACE, prefix_keys(0, 3))
    put_all(tier, OTHER, prefix_keys(0, 3))
    assert get_all(tier, OTHER, prefix_keys(0, 3)) == 3  # compares the bytes
    assert get_all(tier, NAMESPACE, prefix_keys(0, 3)) == 3
    tier.clear(OTHER)
    assert tier.stats().extra["layer_cache_blocks"] == 3
    assert tier.match(OTHER, prefix_keys(0, 3)) == 0
    tier.drop(NAMESPACE, prefix_keys(0, 3)[1:])
    assert tier.stats().extra["layer_cache_blocks"] == 1
    tier.check()


def test_what_does_not_verify_below_is_not_kept() -> None:
    below = Reads(MemoryTier(LAYOUT, 64))
    put_all(below, NAMESPACE, prefix_keys(0, 4))
    tier = LayerCache(below, 8 * sum(LAYOUT.layer_bytes(i) for i in range(LAYERS)), LAYERS)

    def damaged(layer: int, memory: BlockMemory, ids: Ids) -> LayerRead | None:
        for row in memory.rows(layer, ids)[2:]:
            row[:] = 0xEE
        return LayerRead(2, Outcome.DAMAGED)

    below.spoil = damaged
    memory = BlockMemory.of_blocks(LAYOUT, np.zeros((4, LAYOUT.block_bytes), np.uint8))
    get = tier.prepare_get(NAMESPACE, prefix_keys(0, 4))
    assert tier.get_layer(get, 0, memory, np.arange(4)).blocks == 2
    tier.complete_get(get)
    assert tier.stats().extra["layer_cache_blocks"] == 2
    below.spoil = lambda *_: None
    assert get_all(tier, NAMESPACE, prefix_keys(0, 4)) == 4


def test_a_wrong_copy_is_seen() -> None:
    """The twin: the bytes above do come from the cache."""
    tier, _ = cache(8)
    put_all(tier, NAMESPACE, prefix_keys(0, 3))
    tier._store[0, 0] ^= 1
    with pytest.raises(AssertionError):
        get_all(tier, NAMESPACE, prefix_keys(0, 3))


@pytest.mark.parametrize(
    ("nbytes", "layers", "field"),
    [(1, 1, "--kv-layer-cache-size"), (1 << 20, 99, "--kv-layer-cache-size layers")],
)
def test_a_size_that_cannot_work_is_refused(nbytes: int, layers: int, field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LayerCache(MemoryTier(LAYOUT, 4), nbytes, layers)
    assert refused.value.field == field
