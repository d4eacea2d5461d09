"""How long the server's own prefill batches take, for the decision to load or to recompute."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.tiers.load_policy import PrefillCost

_MOST_IN_FLIGHT = 8
_MOST_AT_ONCE = 8
"""Batches that are timed together."""
_SMOOTHING = 0.1
"""Weight of the newest request."""


class PrefillClock(Planner):
    """Times prefill batches from the start of their forward pass to their result.

    With overlap, a batch is formed before the result of the one before is processed: while that one runs on a
    GPU, and after it has run on a CPU, where both results then come at once. So batches that overlap are
    timed together, from the first one's start to the last one's result.
    """

    def __init__(self, cost: PrefillCost, clock: Clock | None = None) -> None:
        self._cost = cost
        self._clock = clock or SystemClock()
        self._in_flight: deque[tuple[int, float] | None] = deque(maxlen=_MOST_IN_FLIGHT)
        self._ended: list[tuple[int, float] | None] = []
        """The ended batches among those that are timed together."""
        self._begun = 0.0
        self.new_tokens: float | None = None
        """Running average of the tokens that requests with a cached prefix compute behind it, alike on all
        ranks; None before the first such request.
        """

    def prefill_begins(self, lengths: Sequence[tuple[int, int]], *, loads: bool) -> None:
        """A batch was formed and is about to run.

        Args:
            lengths: of each request, the tokens to compute and those before them.
            loads: the batch waits for KV from a lower tier, so its time does not measure computing.
        """
        for new, before in lengths:
            if before:
                known = self.new_tokens
                self.new_tokens = float(new) if known is None else known + _SMOOTHING * (new - known)
        tokens = sum(new for new, _ in lengths)
        pairs = sum(new * (before + new / 2) for new, before in lengths)
        if not self._in_flight:
            self._begun = self._clock.monotonic()
        self._in_flight.append(None if loads else (tokens, pairs))

    def prefill_ended(self) -> None:
        """The result of the oldest batch is there."""
        if not self._in_flight:
            return
        self._ended.append(self._in_flight.popleft())
        if self._in_flight and len(self._ended) < _MOST_AT_ONCE:
            return
        now = self._clock.monotonic()
        measured = [batch for batch in self._ended if batch is not None]
        if len(measured) == len(self._ended):
            tokens = sum(tokens for tokens, _ in measured)
            self._cost.observe(tokens, sum(pairs for _, pairs in measured), now - self._begun)
        self._ended.clear()
        self._begun = now
