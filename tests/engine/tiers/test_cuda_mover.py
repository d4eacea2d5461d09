"""The CUDA mover's device code, run on the CPU: the arithmetic of layouts and runs.

Streams and events need a GPU: `tests/gpu`.
"""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from sglang_ext.engine.movers.layer_copies import (
    copy_within,
    gather_blocks,
    runs_of_blocks,
    scatter_layer,
    word_of,
    word_rows,
)
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import BlockLayout, Geometry
from sglang_ext.patches.adapter.building import mover_for
from sglang_ext.patches.adapter.hbm import pool_geometry
from sglang_ext.tiered_store.copy import PoolCopier
from sglang_ext.tiered_store.dram.arena import DramArena

BLOCK_TOKENS = 4
SLOTS = 64


def pool(layers: int, planes_per_layer: int, seed: int) -> list[list[torch.Tensor]]:
    torch.manual_seed(seed)
    shape = (SLOTS, 2, 8) if planes_per_layer == 2 else (SLOTS, 1, 24)
    return [[torch.randn(shape) for _ in range(planes_per_layer)] for _ in range(layers)]


def geometry_of(planes: list[list[torch.Tensor]]) -> Geometry:
    return pool_geometry(
        planes,
        block_tokens=BLOCK_TOKENS,
        page_tokens=1,
        first_layer=0,
        model_layers=len(planes),
        tp_rank=0,
        tp_size=1,
        model_kv_heads=2,
    )


@pytest.mark.parametrize("word", [torch.int64, torch.int16, torch.uint8])
@pytest.mark.parametrize("planes_per_layer", [2, 1], ids=["mha", "mla"])
def test_gather_and_scatter_agree_with_the_host_copier(planes_per_layer: int, word: torch.dtype) -> None:
    planes = pool(3, planes_per_layer, seed=1)
    geometry = geometry_of(planes)
    layout = geometry.layout
    slots = torch.from_numpy(np.random.default_rng(2).permutation(SLOTS)[: 5 * BLOCK_TOKENS])
    with DramArena(layout, 64 * layout.block_bytes, shared=False, pin=False) as arena:
        blocks = arena.alloc(5)
        assert blocks is not None
        copier = PoolCopier(geometry, arena)
        plan = copier.plan(slots.numpy(), blocks)
        copier.gather(plan, 0, layout.n_layers)
        rows = [[word_rows(plane, word) for plane in layer] for layer in planes]
        staging = gather_blocks(rows, layout, slots, layout.block_bytes)
        assert np.array_equal(staging.numpy(), arena.blocks[blocks])

        restored = [[torch.zeros_like(plane) for plane in layer] for layer in planes]
        for layer in range(layout.n_layers):
            start, stop = layout.layer_offsets[layer : layer + 2]
            scatter_layer(
                [word_rows(plane, word) for plane in restored[layer]], layout, staging[:, start:stop], slots
            )
        for before, after in zip(planes, restored, strict=True):
            for a, b in zip(before, after, strict=True):
                assert torch.equal(a[slots], b[slots])
                untouched = torch.ones(SLOTS, dtype=torch.bool)
                untouched[slots] = False
                assert not b[untouched].any()


@pytest.mark.parametrize("planes_per_layer", [2, 1], ids=["mha", "mla"])
def test_a_layer_in_other_planes_and_back_agrees_with_the_host_copier(planes_per_layer: int) -> None:
    """The copies that fill the region of layers, and those that take from it at admission."""
    planes = pool(3, planes_per_layer, seed=4)
    geometry = geometry_of(planes)
    layout = geometry.layout
    order = torch.from_numpy(np.random.default_rng(5).permutation(SLOTS))
    home, strip, target = (order[i * 20 : (i + 1) * 20] for i in range(3))
    with DramArena(layout, 64 * layout.block_bytes, shared=False, pin=False) as arena:
        blocks = arena.alloc(5)
        assert blocks is not None
        copier = PoolCopier(geometry, arena)
        copier.gather(copier.plan(home.numpy(), blocks), 0, layout.n_layers)
        twin = [[word_rows(plane.clone(), torch.int64) for plane in layer] for layer in planes]
        copier.scatter_to(copier.plan(strip.numpy(), blocks), 1, 2)
        copier.move_within(copier.plan_within(strip.numpy(), target.numpy()), 2, 1)
        start, stop = layout.layer_offsets[1:3]
        staging = torch.from_numpy(arena.blocks[blocks])[:, start:stop]
        scatter_layer(twin[2], layout, staging, strip)
        copy_within(twin[2], twin[1], strip, target)
        for layer, other in zip(planes, twin, strict=True):
            for plane, same in zip(layer, other, strict=True):
                assert torch.equal(word_rows(plane, torch.int64), same)
        for plane in planes[1]:
            assert torch.equal(plane[target], plane[home])


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([], []),
        ([7], [(0, 7, 1)]),
        ([3, 4, 5], [(0, 3, 3)]),
        ([5, 4, 3], [(0, 5, 1), (1, 4, 1), (2, 3, 1)]),
        ([1, 2, 9, 10, 11, 0], [(0, 1, 2), (2, 9, 3), (5, 0, 1)]),
    ],
)
def test_neighbouring_blocks_are_one_run(blocks: list[int], runs: list[tuple[int, int, int]]) -> None:
    assert list(runs_of_blocks(np.array(blocks, dtype=np.int64))) == runs


@pytest.mark.parametrize(
    ("row_bytes", "block_bytes", "word"),
    [
        ((64, 64), 512, torch.int64),
        ((1152, 132), 5136, torch.int32),
        ((64, 64), 518, torch.int16),
        ((33,), 132, torch.uint8),
    ],
)
def test_the_widest_word_divides_all_rows_and_blocks(
    row_bytes: tuple[int, ...], block_bytes: int, word: torch.dtype
) -> None:
    assert word_of(BlockLayout(layers=(row_bytes,), block_tokens=4), block_bytes) == word


def test_pools_on_devices_without_a_mover_are_refused_by_the_name_of_the_flag() -> None:
    planes = [[torch.empty((SLOTS, 2, 8), device="meta")]]
    with pytest.raises(ConfigError, match="does not support KV pools on meta") as refusal:
        mover_for(*(Mock() for _ in range(2)), planes, Mock())
    assert refusal.value.field == "--kv-dram-size"
