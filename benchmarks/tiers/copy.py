"""Copies between the engine's pool and the DRAM arena, against a plain memory copy of the same scattered
blocks.
"""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from functools import partial
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from benchmarks.lib.common import SEED, Options, Report, paired
from sglang_ext.geometry import Geometry, mha_geometry
from sglang_ext.tiered_store.copy import PoolCopier, warmup
from sglang_ext.tiered_store.dram.arena import DramArena

BLOCK_TOKENS = 16
HEAD_DIM = 64
ITEM_BYTES = 2
PLANE_BYTES = (4 << 10, 8 << 10, 32 << 10, 256 << 10)
"""Bytes of one plane of a block: its contiguous part in the pool."""

Bytes = npt.NDArray[np.uint8]

_libc_memcpy = numba.types.ExternalFunction(
    "memcpy", numba.types.uintp(numba.types.uintp, numba.types.uintp, numba.types.uintp)
)


@numba.njit("void(uint64[::1], uint64[::1], uint64)", nogil=True)
def plain_copy(targets, sources, nbytes):  # type: ignore[no-untyped-def]
    """libc's memcpy, block by block: the plain copy that ours is measured against."""
    for i in range(targets.shape[0]):
        _libc_memcpy(targets[i], sources[i], nbytes)


def touched(nbytes: int) -> Bytes:
    """Private memory on huge pages, every page of it written once."""
    mapping = mmap.mmap(-1, nbytes + (2 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    array: Bytes = np.frombuffer(mapping, dtype=np.uint8)
    array = array[-array.ctypes.data % (2 << 20) :][:nbytes]
    array[:] = 1
    return array


class Pool:
    """An engine's pool in host memory: K and V tensors of each layer, and an arena of the same size."""

    def __init__(self, plane_bytes: int, total: int) -> None:
        heads = plane_bytes // (BLOCK_TOKENS * HEAD_DIM * ITEM_BYTES)
        self.layers = max(2, min(16, total // plane_bytes // 64))
        self.blocks = total // (2 * self.layers * plane_bytes)
        slots = self.blocks * BLOCK_TOKENS
        self.planes = [touched(self.blocks * plane_bytes) for _ in range(2 * self.layers)]
        self.geometry: Geometry = mha_geometry(
            k_addresses=tuple(p.ctypes.data for p in self.planes[0::2]),
            v_addresses=tuple(p.ctypes.data for p in self.planes[1::2]),
            slots=slots,
            heads=heads,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
            block_tokens=BLOCK_TOKENS,
        )
        self.plane_bytes = plane_bytes
        layout = self.geometry.layout
        self.arena = DramArena(layout, self.blocks * (layout.block_bytes + 8) + 8, name="benchmark")
        self.nbytes = self.blocks * layout.block_bytes
        random = np.random.default_rng(SEED)
        self.pool_blocks = random.permutation(self.blocks)
        self.arena_blocks = random.permutation(self.blocks)
        slots_of = self.pool_blocks[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
        self.copier = PoolCopier(self.geometry, self.arena)
        self.plan = self.copier.plan(slots_of.ravel(), self.arena_blocks)

    def addresses(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """Addresses in the pool and in the arena of every (plane, block), in the order of our own copy."""
        layout = self.geometry.layout
        pool = [np.int64(p.ctypes.data) + self.pool_blocks * self.plane_bytes for p in self.planes]
        arena = [
            np.int64(self.arena.address) + self.arena_blocks * layout.block_bytes + offset
            for offset in layout.plane_offsets[:-1]
        ]
        return np.concatenate(pool).astype(np.uint64), np.concatenate(arena).astype(np.uint64)

    def slices(self, *, to_arena: bool) -> Callable[[], None]:
        """A Python loop over memoryview slices."""
        size, layout = self.plane_bytes, self.geometry.layout
        arena = self.arena.blocks.reshape(-1).data
        pairs: list[tuple[Any, Any]] = []
        for plane, offset in zip(self.planes, layout.plane_offsets, strict=False):
            view = plane.data
            for p, a in zip(self.pool_blocks.tolist(), self.arena_blocks.tolist(), strict=True):
                start = a * layout.block_bytes + offset
                pair = (arena[start : start + size], view[p * size : (p + 1) * size])
                pairs.append(pair if to_arena else pair[::-1])

        def run() -> None:
            for target, source in pairs:
                target[:] = source

        return run

    def fancy(self, *, to_arena: bool) -> Callable[[], None]:
        """numpy's indexing with arrays."""
        rows = [plane.reshape(self.blocks, self.plane_bytes) for plane in self.planes]
        offsets = self.geometry.layout.plane_offsets
        parts = [self.arena.blocks[:, offsets[i] : offsets[i + 1]] for i in range(len(rows))]

        def run() -> None:
            for plane, part in zip(rows, parts, strict=True):
                if to_arena:
                    part[self.arena_blocks] = plane[self.pool_blocks]
                else:
                    plane[self.pool_blocks] = part[self.arena_blocks]

        return run

    def close(self) -> None:
        self.arena.close()


def measure_copies(options: Options, report: Report) -> None:
    """Rows for each plane size, and `dram_to_hbm_vs_copy` and `hbm_to_dram_vs_copy`: 1 is as fast as
    memcpy.
    """
    warmup()
    total = options.pick(512, quick=128, tiny=16) << 20
    ratios: dict[str, list[float]] = {"dram_to_hbm": [], "hbm_to_dram": []}
    for plane_bytes in PLANE_BYTES:
        pool = Pool(plane_bytes, total)
        layers = pool.layers
        in_pool, in_arena = pool.addresses()
        legs: dict[str, Callable[[], Any]] = {
            "dram_to_hbm": partial(pool.copier.scatter, pool.plan, 0, layers),
            "hbm_to_dram": partial(pool.copier.gather, pool.plan, 0, layers),
            "dram_to_hbm memcpy": partial(plain_copy, in_pool, in_arena, plane_bytes),
            "hbm_to_dram memcpy": partial(plain_copy, in_arena, in_pool, plane_bytes),
            "dram_to_hbm slices": pool.slices(to_arena=False),
            "hbm_to_dram slices": pool.slices(to_arena=True),
            "dram_to_hbm numpy": pool.fancy(to_arena=False),
            "hbm_to_dram numpy": pool.fancy(to_arena=True),
        }
        times = paired(legs, rounds=options.rounds(15, quick=5), deadline=options.pick(60, quick=8, tiny=1))
        for way, found in ratios.items():
            ratio = times.ratio(f"{way} memcpy", way)
            found.append(ratio)
            report.add(
                f"{way} {plane_bytes >> 10} KiB",
                ours_gb_s=pool.nbytes / times.median(way) / 1e9,
                memcpy_gb_s=pool.nbytes / times.median(f"{way} memcpy") / 1e9,
                python_slices_gb_s=pool.nbytes / times.median(f"{way} slices") / 1e9,
                numpy_index_gb_s=pool.nbytes / times.median(f"{way} numpy") / 1e9,
                ours_vs_memcpy=ratio,
                p99_ms=1000 * times.p(way, 99),
            )
        del legs, in_pool, in_arena
        pool.close()
        del pool
        gc.collect()
    for way, found in ratios.items():
        report.summary[f"{way}_vs_copy"] = float(np.median(found))
