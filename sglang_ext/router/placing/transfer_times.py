"""Observed times of fetches: the ratio of measured to expected time, by source instance.

A profile's bandwidth was measured on another day, and the default one is an order of magnitude; and the time
until a source exports depends on its running batch. So reports of fetches correct the cost model's
``transfer(y, y')`` (MemServe, section 5.3). Failed fetches count with the time they cost.

Observations fade: the router does not fetch from slow sources, so no new observation would show that a source
has become fast again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sglang_ext.router.policies.outlook import Numbers

HALF_LIFE_S = 20.0
"""Observations lose half their weight in this time."""
PRIOR_S = 0.01
"""Expected seconds of fetching that are taken to have been observed, and to have taken as long, at any time:
about one prompt's."""
BOUND = 256.0
"""The factor stays within 1/256 … 256."""


@dataclass(slots=True)
class _Observed:
    expected_s: float
    took_s: float
    at: float


class TransferTimes:
    """See the module's docstring. Times are seconds; ``now`` is monotonic."""

    def __init__(self) -> None:
        self._observed: dict[str, _Observed] = {}

    def observe(self, source: str, expected_s: float, took_s: float, now: float) -> None:
        """A fetch has ended.

        Args:
            source: the instance that was read from.
            expected_s: by the cost model, uncorrected.
            took_s: observed time; of a failed fetch, the time lost.
        """
        before = self._observed.get(source)
        left = 0.0 if before is None else _left(before, now)
        self._observed[source] = _Observed(
            expected_s + left * (before.expected_s if before else 0.0),
            took_s + left * (before.took_s if before else 0.0),
            now,
        )

    def factor(self, source: str, now: float) -> float:
        """The factor for expected times of fetches from ``source``."""
        observed = self._observed.get(source)
        if observed is None:
            return 1.0
        left = _left(observed, now)
        factor = (PRIOR_S + left * observed.took_s) / (PRIOR_S + left * observed.expected_s)
        return min(BOUND, max(1 / BOUND, factor))

    def observed(self, source: str) -> tuple[float, float, float] | None:
        """The arguments of ``factors`` for a source: when it was last observed, the observed and the expected
        time; None for a source that was never observed."""
        found = self._observed.get(source)
        return None if found is None else (found.at, found.took_s, found.expected_s)

    def __bool__(self) -> bool:
        """Whether any source was observed."""
        return bool(self._observed)

    def forget(self, source: str) -> None:
        """It was started anew, or is gone."""
        self._observed.pop(source, None)

    def clear(self) -> None:
        """Nothing observed holds any more."""
        self._observed.clear()

    def __repr__(self) -> str:
        return f"TransferTimes({', '.join(self._observed)})"


def _left(observed: _Observed, now: float) -> float:
    return math.exp2(-max(0.0, now - observed.at) / HALF_LIFE_S)


def factors(observed: Numbers, now: float) -> Numbers:
    """``TransferTimes.factor`` of many sources.

    Args:
        observed: shape (3, n): ``TransferTimes.observed`` of each; the time is -inf without an observation.
    """
    at, took_s, expected_s = observed
    if at.max(initial=-math.inf) == -math.inf:
        return np.ones(len(at))
    left = np.exp2(np.maximum(now - at, 0) / -HALF_LIFE_S)
    ratio = (PRIOR_S + left * took_s) / (PRIOR_S + left * expected_s)
    found: Numbers = np.clip(ratio, 1 / BOUND, BOUND)
    return found
