"""The stream checker over the real cache, tiers and mover: no race in any of SGLang's loops."""

from __future__ import annotations

import pytest
import torch
from fake_cuda import FakeCuda
from stream_engine import FAST, LOOPS, SLOW, Loop, StreamRank, serve, stream_rank

from sglang_ext.engine.movers.cuda_mover import CudaMover

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
    """What DRAM holds after random orders. Each pass compares the rows that it reads with the oracle's."""
    found = set()
    for seed in range(orders):
        cuda.replay(seed)
        assert rank.arena is not None
        found.add(rank.arena.blocks.tobytes())
    return found
