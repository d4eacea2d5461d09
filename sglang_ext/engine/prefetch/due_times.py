"""When KV of announced prompts begins to move to HBM: as late as it is still there when its request may come.

A hint may say that its request does not come before some time. Until shortly before it, HBM is of more use to
others (Symphony, section 3.3). How long before is learnt from the prefetches so far: seconds per byte, and
how much these vary.

Pure decisions. Times are rank 0's, as they come with its commands. The ranks compare their measured rates,
and the slowest counts, so that all ranks begin in the same pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sglang_ext.engine.ranks import Ranks

LEAST_LEAD_S: Final = 0.1
"""Time that any prefetch takes, whatever its length: some passes of the scheduler's loop."""
FIRST_RATE: Final = 128 << 20
"""Bytes per second that are expected before any prefetch was measured; a host copies far faster."""
_SMOOTHING: Final = 0.2
"""Weight of the newest prefetch."""
_DEVIATIONS: Final = 4.0
"""The margin, in mean deviations of the measured rates, as TCP sets its time-outs (RFC 6298)."""


class MoveRate:
    """Bytes per second at which prefetches move KV to HBM, with a margin."""

    def __init__(self, ranks: Ranks) -> None:
        self._mean: float | None = None
        self._deviation = 0.0
        self._agreed = ranks.measure("move rate", self._measure)

    def observe(self, nbytes: int, seconds: float) -> None:
        """A prefetch has brought so many bytes, in so many seconds from its first piece on."""
        if nbytes <= 0 or seconds <= 0:
            return
        took = seconds / nbytes
        if self._mean is None:
            self._mean, self._deviation = took, took / 2
            return
        self._deviation += _SMOOTHING * (abs(took - self._mean) - self._deviation)
        self._mean += _SMOOTHING * (took - self._mean)

    def _measure(self) -> Sequence[int]:
        if self._mean is None:
            return (FIRST_RATE,)
        return (max(1, int(1 / (self._mean + _DEVIATIONS * self._deviation))),)

    @property
    def bytes_per_second(self) -> int:
        """The rate of the slowest rank."""
        return FIRST_RATE if self._agreed.numbers is None else self._agreed.numbers[0]

    def seconds(self, nbytes: int) -> float:
        """To move so many bytes, margin included."""
        return LEAST_LEAD_S + nbytes / self.bytes_per_second

    def __repr__(self) -> str:
        return f"MoveRate({self.bytes_per_second} bytes/s)"


def latest_starts(jobs: Sequence[tuple[float, float]]) -> list[float]:
    """The latest starts of jobs that run one after the other, so that all end in time.

    Args:
        jobs: of each, when its request may come, and the seconds that moving it takes.
    """
    starts = [0.0] * len(jobs)
    free = float("inf")
    # From the last backwards: each ends when its request may come, or when the one after it has to begin.
    for number in sorted(range(len(jobs)), key=lambda number: jobs[number][0], reverse=True):
        earliest, seconds = jobs[number]
        starts[number] = free = min(earliest, free) - seconds
    return starts
