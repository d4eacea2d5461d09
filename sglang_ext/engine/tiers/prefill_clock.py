"""How long the server's own prefill batches take, for the decision to load or to recompute."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.tiers.load_policy import PrefillCost

_MOST_IN_FLIGHT = 8
_SMOOTHING = 0.1
"""Weight of the newest request."""


class PrefillClock:
    """Times prefill batches from the start of their forward pass to their result.

    Args:
        cost: learns from them.
        clock: seconds, monotonic.
    """

    def __init__(self, cost: PrefillCost, clock: Clock | None = None) -> None:
        self._cost = cost
        self._clock = clock or SystemClock()
        self._in_flight: deque[tuple[float, int, float] | None] = deque(maxlen=_MOST_IN_FLIGHT)
        self._last_end = 0.0
        self.new_tokens: float | None = None
        """That requests compute behind what was cached, of late, alike on all ranks; None before any."""

    def begins(self, lengths: Sequence[tuple[int, int]], *, loads: bool) -> None:
        """A batch was formed and is about to run.

        Args:
            lengths: of each request, the tokens to compute and those before them.
            loads: it waits for KV from a lower tier, so its time says nothing about computing.
        """
        for new, before in lengths:
            if before:
                known = self.new_tokens
                self.new_tokens = float(new) if known is None else known + _SMOOTHING * (new - known)
        tokens = sum(new for new, _ in lengths)
        pairs = sum(new * (before + new / 2) for new, before in lengths)
        self._in_flight.append(None if loads else (self._clock.monotonic(), tokens, pairs))

    def ended(self) -> None:
        """The result of the oldest batch is there."""
        if not self._in_flight:
            return
        batch = self._in_flight.popleft()
        now = self._clock.monotonic()
        if batch is not None:
            begun, tokens, pairs = batch
            # With overlap, a batch is formed while the one before still runs.
            self._cost.observe(tokens, pairs, now - max(begun, self._last_end))
        self._last_end = now
