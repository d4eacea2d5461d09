"""Time as an argument: whatever waits or expires is given a clock, so that tests need not sleep. And the
virtual time of queues that are shared fairly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Hashable
from typing import Final, Protocol


class Clock(Protocol):
    """A source of time. ``sglang_ext.testing.fakes.FakeClock`` is moved by hand."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back."""

    def wall(self) -> float:
        """Seconds since the epoch, for people and for other machines."""

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` by ``monotonic``."""


class SystemClock:
    """The machine's time."""

    # The functions themselves, not methods around them: a request reads the time more than ten times.
    monotonic = staticmethod(time.monotonic)
    wall = staticmethod(time.time)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


MOST_OWNERS: Final = 1024
"""Owners whose finish tags a `FairClock` keeps, before it drops those in the past."""


class FairClock:
    """Virtual time of a queue that owners share fairly.

    Start-time fair queueing (Goyal, Vin and Cheng, 1996): each item gets a start tag, the finish tag of the
    item before it of the same owner, and the item with the least start tag is served next. An owner that was
    idle starts at the current virtual time, so it waits for no backlog of others.
    """

    def __init__(self) -> None:
        self._ends: dict[Hashable, float] = {}
        """Finish tag of each owner's last item."""
        self.now = 0.0
        """Virtual time: the start tag of the item that was served last."""

    def look(self, owner: Hashable) -> float:
        """The start tag that the owner's next item would get."""
        return max(self.now, self._ends.get(owner, 0.0))

    def start(self, owner: Hashable, size: int) -> float:
        """The start tag of an item that is queued now."""
        start = self.look(owner)
        self._ends[owner] = start + max(1, size)
        if len(self._ends) > MOST_OWNERS:
            self._ends = {name: end for name, end in self._ends.items() if end > self.now}
        return start

    def advance(self, start: float) -> None:
        """The item with this start tag is served now."""
        self.now = max(self.now, start)

    def take_back(self, owner: Hashable, start: float) -> None:
        """The owner's last item, which has this start tag, leaves the queue without being served."""
        self._ends[owner] = start

    def rest(self) -> None:
        """Nothing is queued any more: all owners start alike, and none is remembered."""
        self._ends.clear()

    @property
    def owners(self) -> int:
        """Owners whose last item is remembered."""
        return len(self._ends)

    def __repr__(self) -> str:
        return f"FairClock(now={self.now:g}, owners={len(self._ends)})"
