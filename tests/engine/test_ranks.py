"""The agreement between ranks: numbers that each rank measures ride along with those of the parts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sglang_ext.engine.ranks import Ranks
from sglang_ext.errors import OutOfStepError


class Decides:
    """A part that has numbers to compare, or none."""

    def __init__(self) -> None:
        self.proposes: list[int] = []
        self.agreed: list[int] = []

    def propose(self) -> Sequence[int]:
        return self.proposes

    def act(self, agreed: Sequence[int]) -> None:
        self.agreed = list(agreed)


def beside(*others: int) -> Ranks:
    """A rank beside another one, whose numbers these are."""
    return Ranks(lambda mine: [*mine[:2], *map(min, mine[2:], [*others, *mine[2 + len(others) :]])])


def test_the_least_of_any_rank_counts_for_parts_and_measured_numbers() -> None:
    ranks, part = beside(3, 9, -1), Decides()
    ranks.add(part)
    measured = ranks.measure("losses", lambda: (0,))
    part.proposes = [5, 8]
    assert measured.numbers is None
    ranks.each_pass()
    assert (part.agreed, measured.numbers, measured.fresh) == ([3, 8], (-1,), True)


def test_measured_numbers_alone_are_compared_only_when_asked_for() -> None:
    ranks, part = beside(), Decides()
    ranks.add(part)
    measured = ranks.measure("speed", lambda: (7,))
    ranks.each_pass()
    assert (ranks.vectors, measured.numbers, measured.fresh) == (0, None, False)
    measured.ask()
    ranks.each_pass()
    assert (ranks.vectors, measured.numbers, measured.fresh) == (1, (7,), True)
    ranks.each_pass()
    assert (ranks.vectors, measured.numbers, measured.fresh) == (1, (7,), False)


def test_one_rank_has_its_own_numbers_in_every_pass() -> None:
    ranks, numbers = Ranks(), iter([(1,), (2,)])
    measured = ranks.measure("speed", lambda: next(numbers))
    for expected in (1, 2):
        ranks.each_pass()
        assert (measured.numbers, measured.fresh) == ((expected,), True)


def test_ranks_that_measure_other_things_are_out_of_step() -> None:
    steps: list[int] = []

    def least(mine: Sequence[int]) -> Sequence[int]:
        steps.append(mine[0])
        return mine if len(steps) == 1 else [min(steps), -max(steps), *mine[2:]]

    first, second = Ranks(least, check=True), Ranks(least, check=True)
    first.measure("speed", lambda: (1,))
    second.measure("losses", lambda: (1,))
    first.each_pass()
    with pytest.raises(OutOfStepError, match="losses"):
        second.each_pass()
