"""The token bucket, against a simulation of its promise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.router.tenancy.rate import TokenBucket


def test_lets_a_burst_through_and_then_the_rate() -> None:
    bucket = TokenBucket(10.0, 3, 0.0)
    assert [bucket.take(0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert bucket.take(0.0) == pytest.approx(0.1)
    assert bucket.take(0.1) == 0.0
    assert bucket.take(0.1) > 0.0


def test_what_exceeds_the_burst_is_paid_for_afterwards() -> None:
    bucket = TokenBucket(10.0, 5, 0.0)
    assert bucket.take(0.0, 20.0) == 0.0
    assert bucket.take(1.0) == pytest.approx(0.6)
    assert bucket.take(1.6) == 0.0


def test_what_is_given_back_can_be_taken_again() -> None:
    bucket = TokenBucket(1.0, 2, 0.0)
    assert bucket.take(0.0, 2.0) == 0.0
    bucket.give_back(1.0)
    assert bucket.take(0.0) == 0.0
    bucket.give_back(99.0)
    assert bucket.take(0.0, 2.0) == 0.0
    assert bucket.take(0.0) > 0.0


@pytest.mark.parametrize(("rate", "burst"), [(0.0, 1), (1.0, 0), (-1.0, 1)])
def test_refuses_what_lets_nothing_through(rate: float, burst: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        TokenBucket(rate, burst, 0.0)


@given(
    rate=st.floats(0.1, 1000.0),
    burst=st.integers(1, 100),
    steps=st.lists(st.tuples(st.floats(-1.0, 10.0), st.floats(0.01, 100.0)), max_size=100),
)
def test_never_more_than_burst_and_rate_allow(
    rate: float, burst: int, steps: list[tuple[float, float]]
) -> None:
    bucket = TokenBucket(rate, burst, 0.0)
    now = latest = taken = 0.0
    for wait, amount in steps:
        now += wait
        latest = max(latest, now)
        amount = min(amount, float(burst))
        retry = bucket.take(now, amount)
        assert retry >= 0.0
        if retry == 0.0:
            taken += amount
        assert taken <= (burst + rate * latest) * (1 + 1e-6)
        if retry > 0.0:
            # Waiting as long as was said is enough, and half of it is not.
            assert bucket.take(latest + retry / 2, amount) > 0.0
            now = latest = latest + retry
            assert bucket.take(now, amount) == 0.0
            taken += amount
