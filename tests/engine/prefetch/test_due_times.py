"""When announced KV begins to move to HBM."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.engine.prefetch.due_times import FIRST_RATE, LEAST_LEAD_S, MoveRate, latest_starts
from sglang_ext.engine.ranks import Ranks


def test_each_begins_as_late_as_it_is_in_time() -> None:
    assert latest_starts([(10.0, 2.0)]) == [8.0]
    assert latest_starts([(10.0, 2.0), (20.0, 2.0)]) == [8.0, 18.0]
    assert latest_starts([(20.0, 2.0), (19.0, 3.0)]) == [18.0, 15.0]
    assert latest_starts([(10.0, 2.0), (10.0, 2.0)]) in ([6.0, 8.0], [8.0, 6.0])
    assert latest_starts([]) == []


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20))))
def test_what_moves_one_after_the_other_is_in_time(jobs: list[tuple[int, int]]) -> None:
    starts = latest_starts([(float(earliest), float(seconds)) for earliest, seconds in jobs])
    for start, (earliest, seconds) in zip(starts, jobs, strict=True):
        assert start + seconds <= earliest
    in_order = sorted((start, start + seconds) for start, (_, seconds) in zip(starts, jobs, strict=True))
    assert all(end <= start for (_, end), (start, _) in pairwise(in_order))


def test_the_rate_is_learnt_with_a_margin() -> None:
    ranks = Ranks()
    rate = MoveRate(ranks)
    ranks.each_pass()
    assert rate.seconds(FIRST_RATE) == pytest.approx(LEAST_LEAD_S + 1.0)
    for _ in range(50):
        rate.observe(1000, 1.0)
        rate.observe(0, 1.0)
        ranks.each_pass()
    steady = rate.seconds(1000) - LEAST_LEAD_S
    assert 1.0 <= steady < 1.1
    for seconds in (0.5, 1.5) * 25:
        rate.observe(1000, seconds)
    ranks.each_pass()
    assert rate.seconds(1000) - LEAST_LEAD_S > 1.5, "a rate that varies gets a margin"


def test_the_slowest_rank_counts() -> None:
    ranks = Ranks(lambda numbers: [*numbers[:2], *(min(each, 500) for each in numbers[2:])])
    rate = MoveRate(ranks)

    class Reason:
        def propose(self) -> list[int]:
            return [1000]

        def act(self, agreed: object) -> None:
            pass

    ranks.add(Reason())
    rate.observe(10_000, 1.0)
    ranks.each_pass()
    assert rate.seconds(1000) == pytest.approx(LEAST_LEAD_S + 2.0)
