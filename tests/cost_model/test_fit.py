"""Least squares with non-negative coefficients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cost_model.fit import non_negative, relative_errors


@given(
    coefficients=st.lists(st.sampled_from([0.0, 1e-9, 3e-5, 0.2, 7.0]), min_size=1, max_size=4).filter(any),
    seed=st.integers(0, 1000),
)
def test_known_coefficients_are_recovered(coefficients, seed) -> None:
    columns = np.random.default_rng(seed).uniform(0.1, 5.0, (12, len(coefficients)))
    seconds = columns @ np.array(coefficients)
    found = non_negative(columns, seconds)
    assert columns @ found == pytest.approx(seconds, rel=1e-6)
    assert np.all(found >= 0)


def test_columns_of_very_different_size_are_fitted_alike() -> None:
    tokens = np.array([16.0, 256.0, 1024.0, 4096.0, 30_000.0])
    columns = np.stack([np.ones(5), tokens, tokens**2], axis=1)
    found = non_negative(columns, columns @ np.array([1e-3, 2e-5, 3e-10]))
    assert found == pytest.approx([1e-3, 2e-5, 3e-10], rel=1e-4)


def test_what_would_be_negative_is_nothing() -> None:
    x = np.array([1.0, 2.0, 3.0, 4.0])
    found = non_negative(np.stack([np.ones(4), x], axis=1), 10.0 - x)
    assert found[1] == 0
    assert found[0] > 0


def test_no_other_non_negative_solution_is_nearer() -> None:
    chance = np.random.default_rng(3)
    columns, seconds = chance.normal(size=(20, 4)), chance.uniform(0.5, 2.0, 20)

    def error(coefficients):
        return np.linalg.norm(columns @ coefficients - seconds)

    ours = error(non_negative(columns, seconds, relative=False))
    others = np.abs(chance.normal(size=(5000, 4)))
    assert all(ours <= error(other) + 1e-12 for other in others)


def test_relative_errors_count() -> None:
    """Of a millisecond and a hundred seconds, both are hit as well."""
    x = np.array([1.0, 1e5])
    found = non_negative(x[:, None], np.array([1e-3, 110.0]))
    assert relative_errors(x * found, [1e-3, 110.0]) == pytest.approx([0.05, 0.05], abs=0.01)


@pytest.mark.parametrize(
    ("columns", "seconds", "why"),
    [
        pytest.param([[1.0], [2.0]], [1.0], "do not fit", id="shapes that do not fit"),
        pytest.param(np.empty((0, 2)), [], "do not fit", id="nothing measured"),
        pytest.param([[1.0]], [0.0], "not positive", id="no time at all"),
        pytest.param([[1.0]], [-1.0], "not positive", id="less than no time"),
        pytest.param([[1.0]], [float("nan")], "not positive", id="not a number"),
        pytest.param([[float("inf")]], [1.0], "not positive", id="infinite"),
        pytest.param([[1.0] * 13], [1.0], "more than 12", id="too many coefficients"),
    ],
)
def test_what_cannot_be_fitted_is_refused(columns, seconds, why) -> None:
    with pytest.raises(ValueError, match=why):
        non_negative(columns, seconds)
