"""The stream checker over models with windows and states: SGLang's own tree, our store below it, a mover for
each component.

States are those at the ends of chunks and requests (``no_buffer``), with which SGLang runs without overlap.
"""

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

WINDOWS = [HybridKind(window=12), HybridKind(window=12, page=4)]
STATES = [HybridKind(states=14), HybridKind(window=12, states=24)]
NORMAL, GRAPHS = LOOPS[0], LOOPS[2]
RUNS = [
    *((kind, loop) for kind in WINDOWS for loop in LOOPS[:3]),
    *((kind, NORMAL) for kind in STATES),
]
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
@pytest.mark.parametrize(("kind", "loop"), RUNS, ids=str)
def test_all_accesses_are_ordered(kind: HybridKind, loop: Loop, pace: float) -> None:
    with stream_hybrid(loop, kind, pace=pace) as (rank, cuda):
        serve(rank)
        assert rank.below is not None
        assert rank.below.store.counters.saved > 20
        assert rank.scheduler.loaded or pace == SLOW
        assert not cuda.trace.races, [str(race) for race in cuda.trace.races.values()]
        replayed(cuda, 1)


@pytest.mark.parametrize(
    ("kind", "loop"), [*((each, GRAPHS) for each in WINDOWS), *((each, NORMAL) for each in STATES)], ids=str
)
def test_copies_that_do_not_follow_passes_are_noticed(
    kind: HybridKind, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin. Without overlap, passes are on the scheduler's own stream."""

    def follow_less(self: CudaMover, stream: torch.cuda.Stream, slots: torch.Tensor) -> None:
        if loop.overlap:
            stream.wait_stream(torch.cuda.current_stream(slots.device))
        slots.record_stream(stream)

    monkeypatch.setattr(CudaMover, "_follow_engine", follow_less)
    with stream_hybrid(loop, kind, pace=FAST) as (rank, cuda):
        with suppress(WrongKvError):  # a pass has read a copy that was made too early
            serve(rank)
        assert cuda.trace.races
