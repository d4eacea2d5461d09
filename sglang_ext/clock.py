"""Time as an argument: whatever waits or expires is given a clock, so that tests need not sleep."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What the package may ask of time. ``sglang_ext.testing.fakes.FakeClock`` is moved by hand."""

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
