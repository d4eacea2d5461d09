"""Two ranks of one instance, each in its own thread, that meet where real ones have a collective."""

from __future__ import annotations

import threading
from typing import Any

from engine_movers import DEADLINE_S

RANKS = 2


class DriftedApart(AssertionError):
    """The ranks no longer have the same tree, or no longer make the same calls."""


class Together:
    """The ranks' common operations: agree on the smallest number, and compare their views."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(RANKS, timeout=DEADLINE_S)
        self._said: list[Any] = [None] * RANKS

    def everyone(self, rank: int, what: Any) -> list[Any]:
        """Each rank's value at the same point of its program."""
        self._said[rank] = what
        try:
            self._barrier.wait()
            said = list(self._said)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise DriftedApart("the ranks do not make the same calls") from None
        return said

    def give_up(self) -> None:
        self._barrier.abort()
