"""Two stages of a pipeline: each its own scheduler thread, pools and mover, and one tree, at different times.

The second stage begins a step when the first has ended it, and the first goes on meanwhile, as far as the
agreement lets it. Their trees are compared step by step.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from engine_movers import DEADLINE_S
from engine_pools import PoolKind
from engine_ranks import DriftedApart
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, Traffic, finish

from sglang_ext.engine.ranks import Later
from sglang_ext.errors import InternalError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang_config")]

STAGES = 2
PASSES = 2
"""Batches under way in a pipeline of two stages."""


class Pipeline:
    """The lines between the stages: numbers that are being compared, and the ends of steps."""

    def __init__(self) -> None:
        self._state = threading.Condition()
        self._numbers: list[list[list[int]]] = [[] for _ in range(STAGES)]
        self._pictures: list[list[Any]] = [[] for _ in range(STAGES)]
        self._broken = False
        self.most_ahead = 0
        """Steps that the first stage was ahead of the second."""

    def give_up(self) -> None:
        with self._state:
            self._broken = True
            self._state.notify_all()

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        if not self._state.wait_for(lambda: ready() or self._broken, DEADLINE_S) or self._broken:
            raise DriftedApart("the stages do not make the same calls")

    def begin(self, stage: int, numbers: Sequence[int]) -> Callable[[], Sequence[int]]:
        with self._state:
            self._numbers[stage].append(list(numbers))
            at = len(self._numbers[stage]) - 1
            self._state.notify_all()

        def result() -> Sequence[int]:
            with self._state:
                self._wait_for(lambda: all(len(each) > at for each in self._numbers))
                return [min(each) for each in zip(*(each[at] for each in self._numbers), strict=True)]

        return result

    def may_begin(self, stage: int, step: int) -> None:
        """The second stage waits for the requests of the step, which the first sends on at its end."""
        if stage > 0:
            with self._state:
                self._wait_for(lambda: len(self._pictures[stage - 1]) > step)

    def ended(self, stage: int, picture: Any) -> None:
        with self._state:
            self._pictures[stage].append(picture)
            first, second = map(len, self._pictures)
            self.most_ahead = max(self.most_ahead, first - second)
            self._state.notify_all()

    def compare(self) -> None:
        for step, (first, second) in enumerate(zip(*self._pictures, strict=True)):
            if first != second:
                raise DriftedApart(f"the stages have different trees after step {step}")


class Stage(threading.Thread):
    """One stage's scheduler process."""

    def __init__(self, number: int, pipeline: Pipeline, make: Callable[[int], Rank], seed: int, steps: int):
        super().__init__(name=f"stage {number}")
        self._number, self._pipeline, self._make = number, pipeline, make
        self._seed, self._steps = seed, steps
        self.error: BaseException | None = None
        self.loaded = self.evicted = self.vectors = 0
        self.start()

    def run(self) -> None:
        rank = self._make(self._number)
        try:
            traffic = Traffic(rank.scenario, self._seed)
            for step in range(self._steps):
                self._pipeline.may_begin(self._number, step)
                traffic.act(rank.scheduler)
                rank.scheduler.step()
                rank.check()
                self._pipeline.ended(self._number, (rank.picture(), rank.pools.free_slots().tolist()))
            self.loaded = rank.scheduler.loaded_tokens
            self.evicted = rank.tier.evicted if rank.tier is not None else 0
            self.vectors = rank.ranks.vectors
            finish(rank)
        except BaseException as error:  # noqa: BLE001 - raised again by the test
            self.error = error
            self._pipeline.give_up()
        finally:
            rank.close()


def serve(scenario: Scenario, seed: int, steps: int, *, agree: bool = True) -> tuple[list[Stage], Pipeline]:
    """Serve the same traffic on both stages; the first copies when it has to, the second in a thread."""
    pipeline = Pipeline()

    def make(number: int) -> Rank:
        own = replace(scenario, threaded=number == 1)
        begin = lambda numbers: pipeline.begin(number, numbers)  # noqa: E731
        later = Later(begin, PASSES)
        least = lambda numbers: begin(numbers)()  # noqa: E731
        pace = random.Random(1000 + number)
        return Rank(own, pace=pace, least=least if agree else None, later=later if agree else None)

    stages = [Stage(number, pipeline, make, seed, steps) for number in range(STAGES)]
    for stage in stages:
        stage.join(timeout=300)
        assert not stage.is_alive()
    errors = [stage.error for stage in stages if stage.error is not None]
    for error in errors:
        if not isinstance(error, DriftedApart):  # the other stage raises it when one gives up
            raise error
    if errors:
        raise errors[0]
    pipeline.compare()
    return stages, pipeline


SCENARIOS = [
    Scenario("page 1", hbm_tokens=256, dram_blocks=90, memory=40, settings=Settings(new_token_ratio=0.05)),
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
    Scenario(
        "brought ahead", hbm_tokens=256, dram_blocks=70, disk_blocks=2000, memory=60, prefetch=0.6, layers=0
    ),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_stages_keep_equal_trees(scenario: Scenario) -> None:
    (first, second), pipeline = serve(scenario, seed=3, steps=150)
    assert first.loaded == second.loaded > 0
    assert first.evicted == second.evicted > 0
    assert first.vectors == second.vectors > 30
    assert pipeline.most_ahead > 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scenario", SCENARIOS, ids=str)
def test_stages_keep_equal_trees_for_long(scenario: Scenario, seed: int) -> None:
    (first, second), _ = serve(scenario, seed=10 + seed, steps=600)
    assert first.loaded == second.loaded > 0


def test_stages_that_do_not_agree_drift_apart() -> None:
    """The twin: each stage acts when its own mover has copied."""
    for seed in range(3):
        try:
            serve(SCENARIOS[0], seed, steps=150, agree=False)
        except DriftedApart:
            return
    pytest.fail("three runs did not notice")


def test_stages_cannot_wait_for_each_other_in_a_pass() -> None:
    from sglang_ext.engine.ranks import Ranks

    ranks = Ranks(lambda numbers: numbers, later=Later(lambda numbers: lambda: numbers, PASSES))
    assert ranks.at_once([7]) == [7]
    ranks.each_pass()
    with pytest.raises(InternalError, match="pipeline"):
        ranks.at_once([7])
