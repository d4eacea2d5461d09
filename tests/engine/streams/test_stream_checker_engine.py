"""The stream checker over the real cache, tiers and mover: no race in any of SGLang's loops."""

from __future__ import annotations

import logging
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_pools import PoolKind, WrongKvError
from fake_cuda import DEVICE, FakeCuda, FakeEvent
from stream_drill import LAYERS as DRILL_LAYERS
from stream_drill import Drill
from stream_engine import (
    BLOCK,
    FAST,
    GRAPHS,
    HEADS,
    LAYERS,
    LOOPS,
    OVERLAP,
    PLAIN,
    SLOW,
    WIDTH,
    Loop,
    StreamRank,
    serve,
    stream_rank,
)

from sglang_ext.engine.forward_fence import ForwardFence
from sglang_ext.engine.movers import cuda_mover, layer_copies
from sglang_ext.engine.movers.cuda_mover import CudaMover
from sglang_ext.engine.movers.mover import Near
from sglang_ext.engine.pd.returns.reservations import Blocks
from sglang_ext.radix_global import Node

pytestmark = pytest.mark.usefixtures("sglang_config")

AHEAD = {"prefetch": 0.5, "hbm_tokens": 140}
"""Hints bring KV to HBM ahead of requests."""
KINDS = {
    PLAIN: 6,
    PoolKind(page=4, layers=LAYERS): 3,
    PoolKind("mla", 4, LAYERS): 3,
}
"""With seeds whose traffic loads in all loops."""


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("pace", [SLOW, FAST])
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_all_accesses_are_ordered_and_random_orders_give_the_same_kv(
    loop: Loop, pace: float, kind: PoolKind
) -> None:
    with stream_rank(loop, pace=pace, kind=kind, **(AHEAD if pace == FAST else {})) as (rank, cuda):
        serve(rank, KINDS[kind], 50)
        assert rank.scheduler.loaded_tokens > 0
        assert rank.tier is not None
        assert rank.tier.copies.counters.written > 10
        if kind.page == 1 or pace == SLOW:
            assert bool(rank.tier.copies.counters.prefetched) is (pace == FAST)
        assert not cuda.trace.races, [str(race) for race in cuda.trace.races.values()]
        assert len(outcomes(rank, cuda, 2)) == 1


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_write_that_follows_the_scheduler_alone_reads_the_last_token_too_early(
    kind: PoolKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin, as the mover once was: a request's last token is in its last block, and is being computed."""

    def follow_the_scheduler(self: CudaMover, stream: torch.cuda.Stream, slots: torch.Tensor) -> None:
        stream.wait_stream(torch.cuda.current_stream(slots.device))
        slots.record_stream(stream)

    monkeypatch.setattr(CudaMover, "_follow_engine", follow_the_scheduler)
    with stream_rank(GRAPHS, kind=kind) as (rank, cuda):
        serve(rank, 3, 50)
        assert cuda.trace.races
        with suppress(WrongKvError):  # a pass has read a block that was written too early
            assert len(outcomes(rank, cuda, 12)) > 1


def outcomes(rank: StreamRank, cuda: FakeCuda, orders: int) -> set[bytes]:
    """The contents of DRAM after random orders. Each pass compares its rows with the oracle's."""
    found = set()
    for seed in range(orders):
        cuda.replay(seed)
        assert rank.arena is not None
        found.add(rank.arena.blocks.tobytes())
    return found


WAITS = {"ours: cuda_mover.py:wait_writes", "ours: cuda_mover.py:settle"}
"""HBM is short, and the blocks that it may evict are being copied."""


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("room", [True, False], ids=["room", "short"])
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_the_host_waits_for_the_device_only_where_memory_is_short(loop: Loop, room: bool, page: int) -> None:
    sizes = {"hbm_tokens": 4000, "rows": 30} if room else {}
    with stream_rank(loop, pace=SLOW, kind=PoolKind(page=page, layers=LAYERS), **sizes) as (rank, cuda):
        serve(rank, 3, 30)
        ours = {site for site in cuda.trace.synchronizations if site.startswith("ours: ")}
        assert ours <= (set() if room else WAITS)
        assert bool(ours) is not room


def test_a_request_is_one_write_however_many_nodes_it_has() -> None:
    """Prompts part one after the other while DRAM is not written; then the longest is copied."""
    with stream_rank(OVERLAP, pace=FAST, hbm_tokens=400) as (rank, cuda):
        down = rank.write_down
        assert down is not None
        down._enabled = False
        for tail in range(4):
            prompt = [7] * 8 * (tail + 1) + [tail] * 9
            rank.serve(prompt)
        end = max(rank.tree.nodes(), key=lambda node: (depth(node), node.blocks))
        assert depth(end) > 3
        cuda.launches.clear()
        down.to_dram(end, always=True)
        assert len(rank.cache.dram.copies._writes.pending) == 1
        assert cuda.launches.count("copy_rows") == 1
        rank.settle()
        assert all(rank.dram_holder in node.placements for node in path(end))


def path(node: Node) -> list[Node]:
    found = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found


def depth(node: Node) -> int:
    return len(path(node))


@pytest.mark.parametrize("asks", [True, False], ids=["as-built", "twin"])
def test_the_pages_of_a_return_are_read_without_waiting(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeCuda(pace=0.0).installed() as cuda:
        cache: Any = SimpleNamespace(hbm=None, block_size=4, page_size=2)
        slots = [torch.arange(first, first + 8, device=DEVICE) for first in (16, 4)]
        if not asks:
            monkeypatch.setattr(FakeEvent, "query", lambda event: True)
        pages = Blocks(cache).reading(slots, ForwardFence(torch.cuda, ()))
        del slots
        if asks:
            assert pages() is None
            cuda.synchronize()
            cuda.trace.synchronizations.clear()
        found = pages()
        assert found is not None
        assert found.tolist() == [8, 9, 10, 11, 2, 3, 4, 5]
        assert not cuda.trace.synchronizations
        assert bool(cuda.trace.races) is not asks


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_with_the_same_near_blocks_share_an_upload(layers: int) -> None:
    drill = Drill(1.0)
    with drill.started():
        blocks, positions = np.array([3, 4, 9, 2]), np.array([0, 2])
        near = [Near(layer, 2, drill.slots(84, 2), positions) for layer in range(layers)]
        drill.mover.load(drill.slots(30, 4), blocks, near=near)
        # The blocks, those that are not near, and the positions of both in the load.
        assert drill.cuda.launches.count("_to_copy") == 4
        assert not drill.cuda.trace.synchronizations


@pytest.mark.parametrize("blocks", [[3, 4, 5, 6, 7, 8], [3, 9, 4, 17, 2, 12]], ids=["in-order", "scattered"])
def test_a_load_is_a_launch_for_each_layer_however_its_blocks_lie(blocks: list[int]) -> None:
    drill = Drill(0.0)
    with drill.started():
        slots = drill.slots(30, 6)
        drill.cuda.launches.clear()
        drill.mover.load(slots, np.array(blocks))
        assert drill.cuda.launches == ["_to_copy", *["copy_rows"] * DRILL_LAYERS]
        drill.mover.bring(slots, np.array(blocks))
        drill.mover.fill(slots, np.array(blocks), 1, 2)
        assert drill.cuda.launches.count("copy_rows") == 2 * DRILL_LAYERS + 1
        assert not drill.cuda.trace.synchronizations


def test_a_write_gathers_all_planes_at_once_and_transfers_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_copies, "STAGING_BYTES", 4 * BLOCK * DRILL_LAYERS * 2 * HEADS * WIDTH * 4)
    drill = Drill(0.0)
    with drill.started():
        slots = drill.slots(30, 6)
        drill.cuda.launches.clear()
        drill.mover.write(slots, np.array([3, 4, 9, 10, 12, 13]))
        # A step has four blocks.
        step = ["copy_rows", "copy_", "copy_"]
        assert drill.cuda.launches == [*step, "copy_rows", "copy_"]
        assert not drill.cuda.trace.synchronizations


def test_staging_is_bounded_without_the_kernel_too(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = BLOCK * 2 * HEADS * WIDTH * 4
    monkeypatch.setattr(layer_copies, "STAGING_BYTES", 2 * layer)
    drill = Drill(0.0, kernel=False)
    with drill.started():
        drill.mover.load(drill.slots(30, 5), np.array([3, 9, 4, 17, 2]))
        sizes = {memory.nbytes for memory in drill.cuda._memories if memory.name.startswith("empty")}
        assert max(sizes) == 2 * layer
        assert drill.mover.blocks_without_kernel == 5


def test_a_kernel_that_fails_in_a_load_leaves_the_rest_to_plain_copies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    drill = Drill(1.0)
    # Whatever other tests have set for logs.
    with drill.started(), caplog.at_level(logging.WARNING, logger=cuda_mover.__name__):
        drill.compute(drill.rows(0, 6), 10.0)
        blocks = np.array([3, 4, 9, 2, 17, 18])
        drill.mover.write(drill.slots(0, 6), blocks)
        drill.mover.wait_writes(1)
        launch, left = drill.mover._kernels._launch, [2]

        def fails_later(of: Any) -> None:
            if not left[0]:
                raise RuntimeError("out of resources")
            left[0] -= 1
            launch(of)

        drill.mover._kernels._launch = fails_later
        ticket = drill.mover.load(drill.slots(30, 6), blocks)
        drill.attend(drill.rows(30, 6), 10.0, ticket)
        assert not drill.cuda.trace.races
        assert drill.mover.blocks_without_kernel == 6
        assert "out of resources" in caplog.text
