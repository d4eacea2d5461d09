"""Rates: a bucket of tokens that fills up over time, of which each use takes some."""

from __future__ import annotations


class TokenBucket:
    """Lets through ``rate`` per second on average, and ``burst`` at once. No clock of its own.

    Args:
        rate: per second; must be positive.
        burst: at once; must be positive.
        now: seconds, of any clock that does not go back. It starts full.
    """

    __slots__ = ("_filled", "_then", "burst", "rate")

    def __init__(self, rate: float, burst: float, now: float) -> None:
        if rate <= 0 or burst <= 0:
            raise ValueError(f"rate and burst must be positive, not {rate} and {burst}")
        self.rate = rate
        self.burst = burst
        self._filled = float(burst)
        self._then = now

    def take(self, now: float, amount: float = 1.0) -> float:
        """Take ``amount`` if it is there. Returns 0, or the seconds after which it would be.

        An amount above ``burst`` is let through by a full bucket and paid for later: else it never would be.
        """
        self._fill(now)
        needed = min(amount, self.burst)
        # Rounding must not turn the second that was promised into another refusal.
        if self._filled + 1e-9 * self.burst >= needed:
            self._filled -= amount
            return 0.0
        return (needed - self._filled) / self.rate

    def wait(self, now: float, amount: float = 1.0) -> float:
        """Seconds after which ``amount`` would be there; nothing is taken."""
        self._fill(now)
        return max(0.0, (min(amount, self.burst) - self._filled) / self.rate)

    def charge(self, now: float, amount: float) -> None:
        """Take an amount that was already used, whether it is there or not; later uses wait for the debt."""
        self._fill(now)
        self._filled -= amount

    def level(self, now: float) -> float:
        """The level of the bucket; negative for a debt."""
        self._fill(now)
        return self._filled

    def lower(self, now: float, level: float) -> None:
        """Take out the excess above a level."""
        self._fill(now)
        self._filled = min(self._filled, level)

    def _fill(self, now: float) -> None:
        self._filled = min(self.burst, self._filled + self.rate * max(0.0, now - self._then))
        self._then = max(self._then, now)

    def give_back(self, amount: float = 1.0) -> None:
        """Put back an amount that was taken and not used."""
        self._filled = min(self.burst, self._filled + amount)

    def __repr__(self) -> str:
        return f"TokenBucket({self._filled:.1f} of {self.burst} at {self.rate}/s)"
