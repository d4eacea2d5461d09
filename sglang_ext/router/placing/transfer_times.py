"""What fetching takes, as it was observed: measured over expected time, by the instance that is read from.

A bandwidth from a profile is another day's, one from the defaults an order of magnitude; and how long a
holder takes until it exports depends on what it computes. So what instances tell of their fetches corrects
the cost model's ``transfer(y, y')`` (MemServe, section 5.3). Fetches in vain count with the time that was
lost.

What was observed fades: nobody is fetched from whose fetches took too long, and so nothing would ever show
that they do not any more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HALF_LIFE_S = 20.0
"""After so long, what was observed counts half."""
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
            source: who was read from.
            expected_s: what the cost model says, uncorrected.
            took_s: what it took, or what was waited in vain.
        """
        before = self._observed.get(source)
        left = 0.0 if before is None else _left(before, now)
        self._observed[source] = _Observed(
            expected_s + left * (before.expected_s if before else 0.0),
            took_s + left * (before.took_s if before else 0.0),
            now,
        )

    def factor(self, source: str, now: float) -> float:
        """What the expected time of a fetch from ``source`` is to be multiplied with."""
        observed = self._observed.get(source)
        if observed is None:
            return 1.0
        left = _left(observed, now)
        factor = (PRIOR_S + left * observed.took_s) / (PRIOR_S + left * observed.expected_s)
        return min(BOUND, max(1 / BOUND, factor))

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
