"""Two ranks of one instance: each its own scheduler thread, pools and mover, and one tree."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from engine_movers import DEADLINE_S
from engine_pools import PoolKind
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, Traffic, finish

pytestmark = pytest.mark.usefixtures("sglang_config")

RANKS = 2


class DriftedApart(AssertionError):
    """The ranks no longer have the same tree, or no longer make the same calls."""


class Together:
    """What ranks do together: agree on the smallest number, and compare what they see."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=DEADLINE_S)
        self._said: list[Any] = [None] * RANKS

    def everyone(self, rank: int, what: Any) -> list[Any]:
        """What every rank says at the same point of its program."""
        self._said[rank] = what
        try:
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise DriftedApart("the ranks do not make the same calls") from None
        return said

    def give_up(self) -> None:
        self._barrier.abort()


class RankThread(threading.Thread):
    """One rank's scheduler process."""

    def __init__(
        self, number: int, together: Together, make: Callable[[int], Rank], seed: int, steps: int
    ) -> None:
        super().__init__(name=f"rank {number}")
        self._number = number
        self._together = together
        self._make = make
        self._seed = seed
        self._steps = steps
        self.error: BaseException | None = None
        self.loaded = 0
        self.evicted = 0
        self.start()

    def run(self) -> None:
        rank = self._make(self._number)
        try:
            self._serve(rank)
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.error = error
            self._together.give_up()
        finally:
            rank.close()

    def _serve(self, rank: Rank) -> None:
        traffic = Traffic(rank.scenario, self._seed)
        for step in range(self._steps):
            traffic.act(rank.scheduler)
            rank.scheduler.step()
            rank.check()
            seen = (rank.picture(), rank.pools.free_slots().tolist())
            pictures = self._together.everyone(self._number, seen)
            if pictures[0] != pictures[1]:
                raise DriftedApart(f"the ranks have different trees after step {step}")
        self.loaded = rank.scheduler.loaded_tokens
        self.evicted = rank.tier.counters.evicted if rank.tier is not None else 0
        finish(rank)


def serve(
    scenario: Scenario, seed: int, steps: int, *, min_over_ranks: bool = True, threaded: bool = False
) -> list[RankThread]:
    """Serve the same traffic on all ranks; rank 0 copies when it has to, rank 1 at random or in a thread."""
    together = Together()

    def make(number: int) -> Rank:
        def least(value: int) -> int:
            return min(together.everyone(number, value))

        own = scenario
        if threaded and number == 1:
            own = Scenario(**{**scenario.__dict__, "threaded": True})
        pace = random.Random(1000 + number) if number == 1 else None
        return Rank(own, pace=pace, min_over_ranks=least if min_over_ranks else int)

    ranks = [RankThread(number, together, make, seed, steps) for number in range(RANKS)]
    for rank in ranks:
        rank.join(timeout=300)
        assert not rank.is_alive()
    errors = [rank.error for rank in ranks if rank.error is not None]
    for error in errors:
        if not isinstance(error, DriftedApart):
            raise error
    if errors:
        raise errors[0]
    return ranks


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
    Scenario("disks of their own", hbm_tokens=256, dram_blocks=70, disk_blocks=2000, memory=60),
    Scenario("brought ahead", hbm_tokens=256, dram_blocks=70, disk_blocks=2000, memory=60, prefetch=0.3),
]


@pytest.mark.parametrize("threaded", [False, True], ids=["late and random", "late and the real mover"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_ranks_keep_equal_trees(scenario: Scenario, threaded: bool) -> None:
    ranks = serve(scenario, seed=3, steps=120, threaded=threaded)
    assert ranks[0].loaded == ranks[1].loaded > 0
    assert ranks[0].evicted == ranks[1].evicted > 0


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
            serve(SCENARIOS[0], seed, steps=150, min_over_ranks=False)
        except DriftedApart:
            return
    pytest.fail("three runs did not notice")
