"""The stream checker over the real cache, tiers and mover: no race in any of SGLang's loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda
from stream_drill import Drill
from stream_engine import FAST, LAYERS, LOOPS, SLOW, Loop, StreamRank, serve, stream_rank

from sglang_ext.engine.movers.cuda_mover import CudaMover
from sglang_ext.engine.movers.mover import Near
from sglang_ext.radix_global import Node

pytestmark = pytest.mark.usefixtures("sglang_config")

AHEAD = {"prefetch": 0.5, "hbm_tokens": 140}
"""Hints bring KV to HBM ahead of requests."""


@pytest.mark.parametrize("pace", [SLOW, FAST])
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_all_accesses_are_ordered_and_random_orders_give_the_same_kv(loop: Loop, pace: float) -> None:
    with stream_rank(loop, pace=pace, **(AHEAD if pace == FAST else {})) as (rank, cuda):
        serve(rank, 3, 50)
        assert rank.scheduler.loaded_tokens > 0
        assert rank.tier is not None
        assert rank.tier.copies.counters.written > 10
        assert bool(rank.tier.copies.counters.prefetched) is (pace == FAST)
        assert not cuda.trace.races, [str(race) for race in cuda.trace.races.values()]
        assert len(outcomes(rank, cuda, 2)) == 1


def test_a_write_that_follows_the_scheduler_alone_reads_the_last_token_too_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The twin, as the mover once was: a request's last token is in its last block, and is being computed."""

    def follow_the_scheduler(self: CudaMover, stream: torch.cuda.Stream, slots: torch.Tensor) -> None:
        stream.wait_stream(torch.cuda.current_stream(slots.device))
        slots.record_stream(stream)

    monkeypatch.setattr(CudaMover, "_follow_engine", follow_the_scheduler)
    with stream_rank(LOOPS[2]) as (rank, cuda):
        serve(rank, 3, 50)
        assert cuda.trace.races
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


@pytest.mark.parametrize("room", [True, False], ids=["room", "short"])
@pytest.mark.parametrize("loop", LOOPS, ids=str)
def test_the_host_waits_for_the_device_only_where_memory_is_short(loop: Loop, room: bool) -> None:
    with stream_rank(loop, pace=SLOW, **({"hbm_tokens": 4000, "rows": 30} if room else {})) as (rank, cuda):
        serve(rank, 3, 30)
        ours = {site for site in cuda.trace.synchronizations if site.startswith("ours: ")}
        assert ours <= (set() if room else WAITS)
        assert bool(ours) is not room


def test_a_request_is_one_write_however_many_nodes_it_has() -> None:
    """Prompts part one after the other while DRAM is not written; then the longest is copied."""
    with stream_rank(LOOPS[1], pace=FAST, hbm_tokens=400) as (rank, cuda):
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
        assert cuda.launches.count("index_select") == 2 * LAYERS
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


@pytest.mark.parametrize("layers", [1, 2])
def test_layers_with_the_same_near_blocks_share_an_upload(layers: int) -> None:
    drill = Drill(1.0)
    with drill.started():
        blocks, positions = np.array([3, 4, 9, 2]), np.array([0, 2])
        near = [Near(layer, 2, drill.slots(84, 2), positions) for layer in range(layers)]
        drill.mover.load(drill.slots(30, 4), blocks, near=near)
        assert drill.cuda.launches.count("_to_copy") == 2
        assert not drill.cuda.trace.synchronizations
