"""The stream checker over a model with windows: SGLang's own tree, our store below it, a mover for each
component."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from engine_hybrid_pools import HybridKind
from engine_pools import WrongKvError
from engine_simulation import Traffic
from fake_cuda import FakeCuda
from stream_engine import FAST, LOOPS, SLOW, Loop
from stream_hybrids import StreamHybridRank, stream_hybrid

from sglang_ext.engine.movers.cuda_mover import CudaMover

pytestmark = pytest.mark.usefixtures("sglang_config")

KINDS = [HybridKind(window=12), HybridKind(window=12, page=4)]
SEED = 3


def serve(rank: StreamHybridRank) -> None:
    traffic = Traffic(rank.scenario, SEED, rank.scenario.stretch)
    for _ in range(40):
        traffic.act(rank.scheduler)
        rank.scheduler.step()


def replayed(cuda: FakeCuda, orders: int) -> None:
    """Each pass compares its rows with the oracle's."""
    for seed in range(orders):
        cuda.replay(seed)


@pytest.mark.parametrize("pace", [SLOW, FAST])
@pytest.mark.parametrize("loop", LOOPS[:3], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_all_accesses_are_ordered(kind: HybridKind, loop: Loop, pace: float) -> None:
    with stream_hybrid(loop, kind, pace=pace) as (rank, cuda):
        serve(rank)
        assert rank.below is not None
        assert rank.below.store.counters.saved > 20
        assert rank.scheduler.loaded or pace == SLOW
        assert not cuda.trace.races, [str(race) for race in cuda.trace.races.values()]
        replayed(cuda, 1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_write_that_follows_the_scheduler_alone_is_noticed(
    kind: HybridKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin."""

    def follow_the_scheduler(self: CudaMover, stream: torch.cuda.Stream, slots: torch.Tensor) -> None:
        stream.wait_stream(torch.cuda.current_stream(slots.device))
        slots.record_stream(stream)

    monkeypatch.setattr(CudaMover, "_follow_engine", follow_the_scheduler)
    with stream_hybrid(LOOPS[2], kind, pace=FAST) as (rank, cuda):
        with suppress(WrongKvError):  # a pass has read what was saved too early
            serve(rank)
        assert cuda.trace.races
