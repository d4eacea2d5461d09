"""Observed fetch times count, within bounds, and fade."""

from __future__ import annotations

import pytest

from sglang_ext.router.placing.transfer_times import BOUND, HALF_LIFE_S, PRIOR_S, TransferTimes


def test_nothing_observed_changes_nothing() -> None:
    assert TransferTimes().factor("a", 1.0) == 1.0


def test_what_was_observed_counts_more_than_the_prior_the_more_there_is_of_it() -> None:
    times = TransferTimes()
    factors = []
    for _ in range(50):
        times.observe("a", PRIOR_S, 3 * PRIOR_S, 0.0)
        factors.append(times.factor("a", 0.0))
    assert factors == sorted(factors)
    assert factors[0] == pytest.approx(2.0)
    assert factors[-1] == pytest.approx(3.0, rel=0.05)
    assert times.factor("b", 0.0) == 1.0


def test_it_fades() -> None:
    times = TransferTimes()
    times.observe("a", PRIOR_S, 100 * PRIOR_S, 0.0)
    after = [times.factor("a", n * HALF_LIFE_S) for n in range(20)]
    assert after == sorted(after, reverse=True)
    assert after[0] > 50
    assert after[1] == pytest.approx((1 + 50) / 1.5)
    assert after[-1] == pytest.approx(1.0, abs=0.01)
    # And the newer of two counts more.
    times.observe("a", PRIOR_S, PRIOR_S, 30 * HALF_LIFE_S)
    assert times.factor("a", 30 * HALF_LIFE_S) == pytest.approx(1.0, abs=0.01)


def test_it_is_bounded_and_forgotten() -> None:
    times = TransferTimes()
    times.observe("a", 1.0, 1e9, 0.0)
    times.observe("b", 1e9, 0.0, 0.0)
    assert times.factor("a", 0.0) == BOUND
    assert times.factor("b", 0.0) == 1 / BOUND
    times.forget("a")
    assert times.factor("a", 0.0) == 1.0
    times.clear()
    assert times.factor("b", 0.0) == 1.0
