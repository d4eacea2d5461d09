"""Copies between a GPU's pool and the pinned DRAM arena, against one plain copy of as many bytes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from benchmarks.lib.common import SEED, Options, Report, paired
from sglang_ext.engine.movers.cuda_mover import CudaMover
from sglang_ext.patches.adapter.hbm import pool_geometry
from sglang_ext.tiered_store.dram.arena import DramArena

LAYERS, HEADS, HEAD_DIM = 32, 8, 128
"""A model of 8 billion parameters with grouped queries: 128 KiB of KV per token in bfloat16."""
TOKENS = 8192
BLOCK_TOKENS = (16, 64)


def measure_gpu(options: Options, report: Report) -> None:
    """Rows by size and order of the arena's blocks, and `gpu_load_vs_copy` and `gpu_write_vs_copy` of
    neighbouring blocks of 16 tokens: 1 is as fast as a plain copy. `plain_…`: without the kernel.
    `host_ms`: for how long the scheduler's thread is kept.
    """
    if not torch.cuda.is_available():
        report.note("part gpu left out: this machine has no GPU")
        return
    slots = 2 * TOKENS
    planes = [
        [torch.randn(slots, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in "kv"]
        for _ in range(LAYERS)
    ]
    for block_tokens in BLOCK_TOKENS:
        layout = pool_geometry(
            planes,
            block_tokens=block_tokens,
            page_tokens=1,
            first_layer=0,
            model_layers=LAYERS,
            tp_rank=0,
            tp_size=1,
            model_kv_heads=HEADS,
        ).layout
        count = TOKENS // block_tokens
        with DramArena(layout, 2 * count * (layout.block_bytes + 8), name="benchmark") as arena:
            found = arena.alloc(arena.n_blocks)
            assert found is not None
            orders = {"in order": np.sort(found)[:count]}
            orders["scattered"] = np.random.default_rng(SEED).permutation(found)[:count]
            for order, blocks in orders.items():
                _measure(options, report, planes, arena, f"blocks of {block_tokens}, {order}", blocks)
    first = next(row for row in report.rows if row["case"] == f"blocks of {BLOCK_TOKENS[0]}, in order")
    for way in ("load", "write"):
        report.summary[f"gpu_{way}_vs_copy"] = first[f"{way}_vs_copy"]


def _measure(
    options: Options,
    report: Report,
    planes: list[list[torch.Tensor]],
    arena: DramArena,
    case: str,
    blocks: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> None:
    nbytes = len(blocks) * arena.layout.block_bytes
    there = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    here = torch.from_numpy(arena.blocks).view(-1)[:nbytes]
    mover, plain = (CudaMover(planes, arena, torch.cuda.Stream()) for _ in range(2))
    plain.without_kernel("for the benchmark")
    slots = torch.randperm(planes[0][0].shape[0], device="cuda")[:TOKENS]
    kept: dict[str, list[float]] = {}

    def whole(way: str, begin: Callable[[], object]) -> None:
        start = time.perf_counter()
        begin()
        kept.setdefault(way, []).append(time.perf_counter() - start)
        torch.cuda.synchronize()

    legs = {
        "load": lambda: mover.load(slots, blocks),
        "write": lambda: mover.write(slots, blocks),
        "plain load": lambda: plain.load(slots, blocks),
        "plain write": lambda: plain.write(slots, blocks),
        "copy in": lambda: there.copy_(here, non_blocking=True),
        "copy out": lambda: here.copy_(there, non_blocking=True),
    }
    times = paired(
        {way: partial(whole, way, begin) for way, begin in legs.items()},
        rounds=options.rounds(15, quick=5),
        warmup=2,
    )
    mover.settle()
    start = time.perf_counter()
    first = mover.load(slots, blocks)
    mover.wait_layer(first, 0)
    torch.cuda.current_stream().synchronize()
    first_layer = time.perf_counter() - start
    mover.close()
    plain.close()
    if mover.blocks_without_kernel:
        report.note(f"{case}: the kernel could not be used; all rows are those of plain copies")
    report.add(
        case,
        load_gb_s=nbytes / times.median("load") / 1e9,
        load_vs_copy=times.ratio("copy in", "load"),
        load_host_ms=1000 * float(np.median(kept["load"])),
        first_layer_ms=1000 * first_layer,
        write_gb_s=nbytes / times.median("write") / 1e9,
        write_vs_copy=times.ratio("copy out", "write"),
        write_host_ms=1000 * float(np.median(kept["write"])),
        plain_load_vs_copy=times.ratio("copy in", "plain load"),
        plain_load_host_ms=1000 * float(np.median(kept["plain load"])),
        plain_write_vs_copy=times.ratio("copy out", "plain write"),
        plain_write_host_ms=1000 * float(np.median(kept["plain write"])),
        copy_gb_s=nbytes / times.median("copy in") / 1e9,
    )
