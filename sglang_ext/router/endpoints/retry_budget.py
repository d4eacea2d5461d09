"""The budget of retries: how often requests may be sent to another instance. No clock, no I/O."""

from __future__ import annotations

from sglang_ext.errors import InternalError

BUDGET_WINDOW_S = 10.0
BUDGET_RESERVE = 10
"""Retries that a quiet router may make in a window, whatever the share says."""


class RetryBudget:
    """How many requests may be sent to another instance: a share of those there are.

    A fleet in which everything fails is thus asked at most ``1 + share`` times as often as clients ask. The
    window has two halves, of which the older one is forgotten at once; requests that are still under way
    count in each half.

    Args:
        share: retries per request.
        reserve: retries allowed whatever the share says.
    """

    __slots__ = (
        "_half_since",
        "_half_window_s",
        "_older",
        "_older_retries",
        "_requests",
        "_retries",
        "_running",
        "reserve",
        "share",
    )  # fmt: skip

    def __init__(
        self, share: float, *, reserve: int = BUDGET_RESERVE, window_s: float = BUDGET_WINDOW_S
    ) -> None:
        self.share = share
        self.reserve = reserve
        self._half_window_s = window_s / 2
        self._half_since = 0.0
        self._running = 0
        self._requests = 0
        self._retries = 0
        self._older = 0
        self._older_retries = 0

    def begin(self, now: float) -> None:
        """A request of a client has come."""
        self._turn(now)
        self._running += 1
        self._requests += 1

    def end(self) -> None:
        """It has ended."""
        self._running -= 1
        if self._running < 0:
            raise InternalError("more requests ended than began")

    def spend(self, now: float) -> bool:
        """Whether one more retry is allowed; if so, it is counted."""
        self._turn(now)
        retries = self._retries + self._older_retries
        if retries >= self.reserve + self.share * (self._requests + self._older):
            return False
        self._retries += 1
        return True

    def _turn(self, now: float) -> None:
        passed = now - self._half_since
        if passed < self._half_window_s:
            return
        within = passed < 2 * self._half_window_s
        # Those under way are counted in the new half, so the older one keeps only those that have ended.
        self._older = max(0, self._requests - self._running) if within else 0
        self._older_retries = self._retries if within else 0
        self._requests = self._running
        self._retries = 0
        self._half_since = now

    def __repr__(self) -> str:
        return (
            f"RetryBudget({self.share}, requests={self._requests + self._older}, "
            f"retries={self._retries + self._older_retries})"
        )
