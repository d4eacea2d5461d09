"""Least squares with coefficients that cannot be negative, for fits of a few coefficients."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MOST_COLUMNS = 12
"""2^12 small systems are solved in a fraction of a second; more columns would be another algorithm."""


def non_negative(columns: npt.ArrayLike, seconds: npt.ArrayLike, *, relative: bool = True) -> Array:
    """The coefficients, none negative, with which the columns' sum is nearest to the seconds.

    With so few columns, the best of all subsets of columns whose plain solution is non-negative is the exact
    answer: at the optimum, whichever coefficients are positive solve the unconstrained problem of theirs.

    Args:
        columns: shape (measurements, coefficients).
        seconds: shape (measurements,), all positive.
        relative: weigh each measurement by 1 / seconds, so that relative errors count. Otherwise the longest
            prompts would decide alone.

    Returns:
        shape (coefficients,).

    Raises:
        ValueError: shapes that do not fit, no measurement, or seconds that are not positive.
    """
    matrix = np.atleast_2d(np.asarray(columns, np.float64))
    target = np.asarray(seconds, np.float64)
    if target.ndim != 1 or matrix.shape[0] != target.size or not target.size:
        raise ValueError(f"{matrix.shape} columns do not fit {target.shape} measurements")
    if matrix.shape[1] > MOST_COLUMNS:
        raise ValueError(f"{matrix.shape[1]} coefficients are more than {MOST_COLUMNS}")
    if not np.all(np.isfinite(target)) or np.any(target <= 0) or not np.all(np.isfinite(matrix)):
        raise ValueError("a measurement is not positive and finite")
    if relative:
        matrix = matrix / target[:, None]
        target = np.ones_like(target)
    # Columns are brought to one size: counts of tokens and of their squares differ by many powers of ten.
    size = np.linalg.norm(matrix, axis=0)
    size[size == 0] = 1.0
    scaled = matrix / size
    best = np.zeros(matrix.shape[1])
    smallest = float(np.linalg.norm(target))
    for count in range(1, matrix.shape[1] + 1):
        for chosen in itertools.combinations(range(matrix.shape[1]), count):
            part = scaled[:, chosen]
            solution, *_ = np.linalg.lstsq(part, target, rcond=None)
            if np.any(solution < 0):
                continue
            rest = float(np.linalg.norm(part @ solution - target))
            # Of two that fit equally well, the one with fewer coefficients, which comes first.
            if rest < smallest * (1 - 1e-9):
                smallest = rest
                best = np.zeros(matrix.shape[1])
                best[list(chosen)] = solution
    coefficients: Array = best / size
    return coefficients


def relative_errors(predicted: npt.ArrayLike, seconds: npt.ArrayLike) -> Array:
    """|predicted - measured| / measured, one per measurement."""
    measured = np.asarray(seconds, np.float64)
    errors: Array = np.abs(np.asarray(predicted, np.float64) - measured) / measured
    return errors
