"""Copies between pool planes and arena blocks, against numpy indexing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.geometry import Geometry, Plane, PlaneKind, Shard
from sglang_ext.tiered_store.copy import PoolCopier, warmup
from sglang_ext.tiered_store.dram.arena import DramArena

pytestmark = pytest.mark.slow

SLOTS = 96


class Pool:
    """A pool of K and V planes in numpy, with rows `pad` bytes further apart than they are long."""

    def __init__(self, layers: int, k_row: int, v_row: int, block_tokens: int, pad: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.planes: list[np.ndarray] = []
        described: list[Plane] = []
        for layer in range(layers):
            for kind, row in ((PlaneKind.K, k_row), (PlaneKind.V, v_row)):
                memory = random.integers(0, 256, (SLOTS, row + pad), dtype=np.uint8)
                self.planes.append(memory)
                address = memory.ctypes.data
                described.append(
                    Plane(layer, kind, address, ("T", "D"), (SLOTS, row), (row + pad, 1), "uint8")
                )
        self.rows = [p.row_bytes for p in described]
        shard = Shard(0, layers, 0, 1, layers, 1)
        self.geometry = Geometry(tuple(described), shard, block_tokens)

    def row(self, plane: int, slot: int) -> bytes:
        return self.planes[plane][slot, : self.rows[plane]].tobytes()


@settings(max_examples=60, deadline=None)
@given(
    layers=st.integers(1, 3),
    k_row=st.sampled_from([1, 24, 64, 200, 1024]),
    v_row=st.sampled_from([8, 64, 130]),
    block_tokens=st.sampled_from([1, 4, 16]),
    pad=st.sampled_from([0, 0, 56]),
    contiguous=st.booleans(),
    data=st.data(),
)
def test_gather_and_scatter_move_exactly_the_rows(
    layers: int, k_row: int, v_row: int, block_tokens: int, pad: int, contiguous: bool, data: st.DataObject
) -> None:
    pool = Pool(layers, k_row, v_row, block_tokens, pad, seed=1)
    layout = pool.geometry.layout
    with DramArena(layout, 6 * (layout.block_bytes + 8) + 8, touch=False, pin=False) as arena:
        arena.blocks[:] = 0xEE
        count = data.draw(st.integers(0, min(5, SLOTS // block_tokens)), "blocks")
        seed = data.draw(st.integers(0, 99), "seed")
        random = np.random.default_rng(seed)
        blocks = random.permutation(6)[:count]
        if contiguous:
            starts = random.permutation(SLOTS // block_tokens)[:count] * block_tokens
            slots = (starts[:, None] + np.arange(block_tokens)).ravel()
        else:
            slots = random.permutation(SLOTS)[: count * block_tokens]
        copier = PoolCopier(pool.geometry, arena)
        plan = copier.plan(slots, blocks)
        if contiguous and count:
            assert len(plan.runs) == count
        assert plan.tokens == count * block_tokens

        moved = sum(copier.gather(plan, layer) for layer in range(layers))
        assert moved == count * layout.block_bytes
        expected = np.full_like(arena.blocks, 0xEE)
        for i, block in enumerate(blocks):
            for plane, (offset, row) in enumerate(zip(layout.plane_offsets, pool.rows, strict=False)):
                for t in range(block_tokens):
                    start = offset + t * row
                    expected[block, start : start + row] = np.frombuffer(
                        pool.row(plane, int(slots[i * block_tokens + t])), np.uint8
                    )
        np.testing.assert_array_equal(arena.blocks, expected)

        before = [plane.copy() for plane in pool.planes]
        for plane in pool.planes:
            plane[slots, : k_row + pad + v_row] ^= 0xFF
        damaged = [plane.copy() for plane in pool.planes]
        assert copier.scatter(plan, 0, layers) == count * layout.block_bytes
        for plane, old, bad, row in zip(pool.planes, before, damaged, pool.rows, strict=True):
            np.testing.assert_array_equal(plane[:, :row], old[:, :row])
            np.testing.assert_array_equal(plane[:, row:], bad[:, row:])  # the gap between rows is not ours


def test_one_layer_touches_no_other() -> None:
    pool = Pool(3, 64, 64, 4, 0, seed=2)
    layout = pool.geometry.layout
    with DramArena(layout, 4 * (layout.block_bytes + 8) + 8) as arena:
        copier = PoolCopier(pool.geometry, arena)
        plan = copier.plan(np.arange(8), [2, 0])
        copier.gather(plan, 1)
        touched = [arena.layer(i).any() for i in range(3)]
        assert touched == [False, True, False]
        assert not arena.blocks[[1, 3]].any()


def test_layers_are_scattered_from_a_staging_buffer() -> None:
    pool = Pool(3, 64, 24, 4, 8, seed=6)
    layout = pool.geometry.layout
    slots = np.random.default_rng(0).permutation(SLOTS)[:20]
    with DramArena(layout, 8 * (layout.block_bytes + 8) + 8) as arena:
        copier = PoolCopier(pool.geometry, arena)
        copier.gather(copier.plan(slots, np.arange(5)), 0, 3)
        before = [plane.copy() for plane in pool.planes]
        for plane, row in zip(pool.planes, pool.rows, strict=True):
            plane[slots, :row] = 0
        plan = copier.plan_staging(slots)
        for layer in (2, 0, 1):
            rows = np.ascontiguousarray(arena.layer(layer)[:6])
            assert copier.scatter_staging(plan, layer, rows) == 20 * sum(layout.layers[layer])
        for plane, old in zip(pool.planes, before, strict=True):
            np.testing.assert_array_equal(plane, old)
        for bad in (rows[:4], rows[:, :8], rows.astype(np.int8), rows[::2]):
            with pytest.raises(ValueError, match="staging rows"):
                copier.scatter_staging(plan, 1, bad)
        with pytest.raises(ValueError, match="whole blocks"):
            copier.plan_staging(slots[:3])
        with pytest.raises(ValueError, match="outside"):
            copier.plan_staging([SLOTS, 1, 2, 3])
        with pytest.raises(ValueError, match="layer 3"):
            copier.scatter_staging(plan, 3, rows)


def test_split_plans_together_move_everything() -> None:
    pool = Pool(2, 64, 64, 4, 0, seed=3)
    layout = pool.geometry.layout
    with DramArena(layout, 9 * (layout.block_bytes + 8) + 8) as arena:
        copier = PoolCopier(pool.geometry, arena)
        plan = copier.plan(np.random.default_rng(0).permutation(SLOTS)[:32], np.arange(8))
        threads = [threading.Thread(target=copier.gather, args=(part, 0, 2)) for part in plan.split(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        together = arena.blocks.copy()
        arena.blocks[:] = 0
        copier.gather(plan, 0, 2)
        np.testing.assert_array_equal(arena.blocks, together)


@pytest.mark.parametrize(
    ("slots", "blocks"),
    [
        ([-1, 0, 1, 2], [0]),
        ([0, 1, 2, SLOTS], [0]),
        ([0, 1, 2, 3], [4]),
        ([0, 1, 2, 3], [-1]),
        ([0, 1, 2], [0]),
        ([0, 1, 2, 3], [0, 1]),
    ],
)
def test_ranges_are_checked_before_anything_is_copied(slots: list[int], blocks: list[int]) -> None:
    pool = Pool(1, 64, 64, 4, 0, seed=4)
    layout = pool.geometry.layout
    with DramArena(layout, 4 * (layout.block_bytes + 8) + 8) as arena:
        copier = PoolCopier(pool.geometry, arena)
        with pytest.raises(ValueError, match=r"outside|do not fill"):
            copier.plan(slots, blocks)
        plan = copier.plan([0, 1, 2, 3], [0])
        with pytest.raises(ValueError, match="layers"):
            copier.gather(plan, 0, 2)
    with pytest.raises(ValueError, match="closed"):
        copier.gather(plan, 0)


def test_a_pool_of_another_layout_is_refused() -> None:
    pool, other = Pool(1, 64, 64, 4, 0, seed=5), Pool(1, 64, 32, 4, 0, seed=5)
    with (
        DramArena(pool.geometry.layout, 1 << 16) as arena,
        pytest.raises(ValueError, match="are not the arena's"),
    ):
        PoolCopier(other.geometry, arena)


def test_copies_run_without_the_gil() -> None:
    """Two threads that copy at once overlap: one is inside its copy while the other runs Python."""
    warmup()
    pool = Pool(4, 256 << 10, 256 << 10, 16, 0, seed=7)
    layout = pool.geometry.layout
    with DramArena(layout, 6 * (layout.block_bytes + 8) + 8) as arena:
        copier = PoolCopier(pool.geometry, arena)
        plan = copier.plan(np.arange(SLOTS), np.arange(6))
        done = threading.Event()
        ticks = 0

        def copy() -> None:
            copier.gather(plan, 0, 4)
            done.set()

        thread = threading.Thread(target=copy)
        thread.start()
        while not done.is_set():
            ticks += 1
        thread.join(timeout=30)
    assert ticks > 1000  # with the GIL held, the interpreter would not have run once in between


IMPORT = """
import time, sys
start = time.perf_counter()
from sglang_ext.tiered_store import copy
assert "numba" not in sys.modules
copy.warmup()
import numpy as np
from sglang_ext.geometry import Geometry, Plane, PlaneKind, Shard
from sglang_ext.tiered_store.dram.arena import DramArena
rows = np.arange(8, dtype=np.uint8).reshape(4, 2)
plane = Plane(0, PlaneKind.LATENT, rows.ctypes.data, ("T", "D"), (4, 2), (2, 1), "uint8")
geometry = Geometry((plane,), Shard(0, 1, 0, 1, 1, 1), 4)
arena = DramArena(geometry.layout, 64)
copier = copy.PoolCopier(geometry, arena)
copier.gather(copier.plan([3, 2, 1, 0], [0]), 0)
assert arena.blocks[0].tolist() == [6, 7, 4, 5, 2, 3, 0, 1]
arena.close()
print("ok")
"""


def test_kernels_compile_where_no_cache_can_be_written(tmp_path: Path) -> None:
    """numba raises where it finds no directory for its cache; the copies must work all the same."""
    package = tmp_path / "sglang_ext"
    root = Path(__file__).resolve().parents[2] / "sglang_ext"
    shutil.copytree(root, package, ignore=shutil.ignore_patterns("__pycache__", "engine", "patches"))
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory would have to be")
    (package / "tiered_store" / "__pycache__").write_text("the same, for the cache beside the source")
    places = ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME")
    environment = os.environ | dict.fromkeys(places, str(blocked))
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ok\n"
    assert "NUMBA_CACHE_DIR" in done.stderr
