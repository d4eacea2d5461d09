"""Two ranks of one instance: each its own scheduler thread, pools and mover, and one tree.

They compare numbers at most once in a pass, and once more when something has streamed into its forward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
from engine_pools import PoolKind
from engine_ranks import DriftedApart, TooManyComparisons, serve
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario

from sglang_ext.engine.ranks import Part, Ranks
from sglang_ext.engine.retraction import Retraction, Running, Verdict, Wanting, weigh
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.errors import OutOfStepError
from sglang_ext.testing.tiers import WrappedTier
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]


class LateLayers(WrappedTier):
    """Brings the lowest layer at once, and every other one when a pass streams or `PASSES` passes have begun
    since: in the scheduler's own time, however long a pass takes on a busy machine. It is a part of the rank,
    and so its pass hooks are called.
    """

    PASSES = 40
    IDLE_S = 10.0
    """Seconds without a pass after which the scheduler is waiting for reads, or has ended."""

    def __init__(self, inner: BlockTier) -> None:
        super().__init__(inner)
        self._state = threading.Condition()
        self._begun = 0
        self._streams = False

    def watch(self, promotions: Promotions) -> None:
        """Learn when a pass begins to stream."""
        load = promotions.reads.load

        def streaming(*arguments: Any) -> None:
            with self._state:
                self._streams = True
                self._state.notify_all()
            load(*arguments)

        promotions.reads.load = streaming  # type: ignore[method-assign]

    def propose(self) -> Sequence[int]:
        with self._state:
            self._begun += 1
            self._streams = False
            self._state.notify_all()
        return ()

    def act(self, agreed: Sequence[int]) -> None:
        pass

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        with self._state:
            last = self._begun + self.PASSES
            while layer and not self._streams and self._begun < last and self._state.wait(self.IDLE_S):
                pass
        return super().get_layer(get, layer, memory, ids)


class Eager:
    """A part that cannot wait for the vector."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def propose(self) -> Sequence[int]:
        return [1]

    def act(self, agreed: Sequence[int]) -> None:
        self._ranks.at_once([1])


class Silent:
    """A part that proposes numbers on one rank only."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def propose(self) -> Sequence[int]:
        return [1] * self._rank

    def act(self, agreed: Sequence[int]) -> None:
        pass


class Other(Silent):
    """Another part that proposes as many."""


SCENARIOS = [
    Scenario(
        "page 1, overlap",
        hbm_tokens=256,
        dram_blocks=90,
        memory=40,
        settings=Settings(overlap=True, new_token_ratio=0.05),
    ),
    Scenario(
        "page 16",
        kind=PoolKind("mla", 16, layers=3),
        block=16,
        hbm_tokens=480,
        dram_blocks=40,
        memory=30,
        settings=Settings(chunk=48, policy="lpm"),
    ),
    Scenario(
        "index keys, a draft with them",
        kind=PoolKind("dsa", 64, layers=3, draft_layers=1),
        block=64,
        hbm_tokens=64 * 16,
        dram_blocks=20,
        disk_blocks=400,
        memory=30,
        stretch=4,
        settings=Settings(chunk=128, new_token_ratio=0.05),
    ),
    Scenario("disks of their own", hbm_tokens=256, dram_blocks=70, disk_blocks=2000, memory=60),
    Scenario(
        "brought ahead, layers too",
        kind=PoolKind(layers=4),
        hbm_tokens=256,
        dram_blocks=70,
        disk_blocks=2000,
        memory=60,
        prefetch=0.6,
        layers=1 << 30,
    ),
]


@pytest.mark.parametrize("threaded", [False, True], ids=["late and random", "late and the real mover"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_ranks_keep_equal_trees(scenario: Scenario, threaded: bool) -> None:
    ranks = serve(scenario, seed=3, steps=120, threaded=threaded)
    assert ranks[0].loaded == ranks[1].loaded > 0
    assert ranks[0].evicted == ranks[1].evicted > 0
    assert ranks[0].compared == ranks[1].compared > 50


def test_ranks_keep_equal_trees_while_blocks_stream_from_disk() -> None:
    """The one question that cannot wait for the next pass: whether the streamed KV was good."""
    scenario = Scenario(
        "streams",
        hbm_tokens=256,
        dram_blocks=30,
        disk_blocks=4000,
        memory=60,
        threaded=True,
        stream=True,
    )
    disks: dict[str, LateLayers] = {}

    def disk(inner: BlockTier) -> BlockTier:
        return disks.setdefault(threading.current_thread().name, LateLayers(inner))

    def watched(rank: Rank, number: int) -> Part:
        assert rank.promotions is not None
        late = disks[f"rank {number}"]
        late.watch(rank.promotions)
        return late

    streamed = 0
    for seed in (3, 1, 4):  # whether a load is late enough to stream is left to chance
        disks.clear()
        ranks = serve(scenario, seed=seed, steps=150, disk=disk, also=watched)
        assert ranks[0].streamed == ranks[1].streamed
        streamed += ranks[0].streamed
    assert streamed > 0


RETRACTING = Scenario(
    "retraction",
    hbm_tokens=256,
    dram_blocks=100,
    memory=30,
    settings=Settings(preemption=True, retract_wait=0.02, max_running=3),
)
"""A step takes a rank as long as it does, so each alone would decide otherwise."""


def test_ranks_retract_the_same_requests() -> None:
    ranks = serve(RETRACTING, seed=1, steps=200)
    assert ranks[0].retracted == ranks[1].retracted > 0


def test_ranks_that_go_by_their_own_steps_drift_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_itself(self: Retraction, want: Wanting, running: Sequence[Running], threshold: int) -> Verdict:
        slow = threading.current_thread().name == "rank 1"
        return weigh(want, running, step_s=1.0 if slow else 0.0, wait_s=self.wait_s, threshold=threshold)

    monkeypatch.setattr(Retraction, "judge", by_itself)
    with pytest.raises(DriftedApart):
        serve(RETRACTING, seed=1, steps=200)


def test_a_second_comparison_in_a_pass_is_found() -> None:
    """The twin of the count in `_step`."""
    with pytest.raises(TooManyComparisons, match="2 times, 0 of them"):
        serve(SCENARIOS[0], seed=3, steps=5, also=lambda rank, number: Eager(rank.ranks))


def test_ranks_out_of_step_say_so() -> None:
    """One rank has a decision pending that the other does not have."""
    with pytest.raises(OutOfStepError, match="out of step: in pass"):
        serve(SCENARIOS[0], seed=3, steps=120, also=lambda rank, number: Silent(number), check=True)


def test_ranks_that_added_their_parts_in_different_orders_say_so() -> None:
    """As many numbers at each place of the vector, but for different parts."""
    with pytest.raises(OutOfStepError, match="out of step: in pass"):
        serve(
            SCENARIOS[0], seed=3, steps=120, also=lambda rank, number: (Silent, Other)[number](1), check=True
        )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_ranks_keep_equal_trees_for_long(scenario: Scenario, seed: int) -> None:
    ranks = serve(scenario, seed=10 + seed, steps=600, threaded=seed % 2 == 0)
    assert ranks[0].loaded == ranks[1].loaded > 0


def test_ranks_that_do_not_agree_drift_apart() -> None:
    """The twin: each rank believes its own mover."""
    for seed in range(3):
        try:
            serve(SCENARIOS[0], seed, steps=150, agree=False)
        except DriftedApart:
            return
    pytest.fail("three runs did not notice")
