"""The stream checker over models with windows and states: SGLang's own tree, our store below it, a mover for
each component.

SGLang keeps states on a grid (``extra_buffer``): each pass writes them beside its own, and the tree takes
their slots. Or it keeps those at the ends of chunks and requests (``no_buffer``), which the scheduler's
stream copies: it refuses to do so with overlap.
"""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from engine_hybrid_pools import HybridKind
from engine_hybrids import KEEPS_ON_A_GRID
from engine_pools import WrongKvError
from engine_simulation import Traffic
from fake_cuda import FakeCuda
from stream_engine import EARLY, FAST, GRAPHS, NORMAL, OVERLAP, SLOW, Loop
from stream_hybrids import StreamHybridRank, stream_hybrid

from sglang_ext.engine.movers.cuda_mover import CudaMover

pytestmark = pytest.mark.usefixtures("sglang_config")

SIZES = {
    HybridKind(window=12): 130,
    HybridKind(window=12, page=4): 110,
    HybridKind(states=40, grid=8): 130,
    HybridKind(window=16, states=40, grid=8, page=8): 160,
}
"""With slots for whose lack requests load in all loops."""
OVERLAPPED = [kind for kind in SIZES if KEEPS_ON_A_GRID or not kind.grid]
ENDS = [HybridKind(states=14), HybridKind(window=12, states=24)]
RUNS = [
    *((kind, loop) for kind in OVERLAPPED for loop in (NORMAL, GRAPHS, EARLY)),
    *((kind, NORMAL) for kind in ENDS),
]
SEED = 3


def serve(rank: StreamHybridRank, seed: int = SEED, steps: int = 40) -> None:
    traffic = Traffic(rank.scenario, seed, rank.scenario.stretch)
    for _ in range(steps):
        traffic.act(rank.scheduler)
        rank.scheduler.step()


def replayed(cuda: FakeCuda, orders: int) -> None:
    """Each pass compares its rows with the oracle's."""
    for seed in range(orders):
        cuda.replay(seed)


@pytest.mark.parametrize("pace", [SLOW, FAST])
@pytest.mark.parametrize(("kind", "loop"), RUNS, ids=str)
def test_all_accesses_are_ordered(kind: HybridKind, loop: Loop, pace: float) -> None:
    with stream_hybrid(loop, kind, pace=pace, hbm_tokens=SIZES.get(kind, 130)) as (rank, cuda):
        serve(rank)
        assert rank.below is not None
        assert rank.below.store.counters.saved > 20
        assert rank.scheduler.loaded or pace == SLOW
        assert not cuda.trace.races, [str(race) for race in cuda.trace.races.values()]
        replayed(cuda, 1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", OVERLAPPED, ids=str)
def test_all_accesses_are_ordered_for_long(kind: HybridKind, seed: int) -> None:
    for loop in (NORMAL, OVERLAP, GRAPHS, EARLY):
        with stream_hybrid(loop, kind, pace=0.3, seed=seed, hbm_tokens=SIZES[kind]) as (rank, cuda):
            serve(rank, 100 + seed, 100)
            assert not cuda.trace.races, [str(race) for race in cuda.trace.races.values()]
            replayed(cuda, 1)


@pytest.mark.parametrize(
    ("kind", "loop"), [*((each, EARLY) for each in OVERLAPPED), *((each, NORMAL) for each in ENDS)], ids=str
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
    with stream_hybrid(loop, kind, pace=FAST, hbm_tokens=SIZES.get(kind, 130)) as (rank, cuda):
        with suppress(WrongKvError):  # a pass has read a copy that was made too early
            serve(rank)
        assert cuda.trace.races


@pytest.mark.parametrize("kind", [each for each in OVERLAPPED if each.grid and each.page > 1], ids=str)
def test_a_kept_state_that_is_copied_beside_its_pass_is_noticed(
    kind: HybridKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin of the component of states alone: its copies follow the scheduler's stream and no pass."""
    follow = CudaMover._follow_engine

    def follow_less(self: CudaMover, stream: torch.cuda.Stream, slots: torch.Tensor) -> None:
        if self._layout.block_tokens > 1:
            follow(self, stream, slots)
            return
        stream.wait_stream(torch.cuda.current_stream(slots.device))
        slots.record_stream(stream)

    monkeypatch.setattr(CudaMover, "_follow_engine", follow_less)
    with stream_hybrid(EARLY, kind, pace=FAST, hbm_tokens=SIZES[kind]) as (rank, cuda):
        with suppress(WrongKvError):
            serve(rank)
        races = [str(race) for race in cuda.trace.races.values()]
        assert any("pass, MAMBA" in race for race in races), races
        assert not any("pass, FULL" in race or "pass, SWA" in race for race in races)


def test_states_at_the_ends_of_chunks_race_with_a_graph() -> None:
    """Why SGLang refuses them with overlap: its scheduler copies a state that the pass still writes."""
    with stream_hybrid(GRAPHS, ENDS[0], pace=FAST) as (rank, cuda):
        with suppress(WrongKvError):
            serve(rank)
        races = [str(race) for race in cuda.trace.races.values()]
        assert races
        assert all("pass, MAMBA" in race and "on scheduler" in race for race in races)
