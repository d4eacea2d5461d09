"""An event loop whose time is virtual: where it would wait for a timer, its time leaps to it.

Nothing else ends a wait: there are no sockets and no threads in a simulation, so a loop without a timer would
wait forever, and says so instead.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from typing import Final

from sglang_ext.errors import InternalError

EPOCH_S: Final = 1_700_000_000.0
"""Wall time at the start of a simulation; the same in each run."""


class _Leaping(selectors.SelectSelector):
    """Has the loop's time leap over each wait."""

    def __init__(self, leap: Callable[[float], None]) -> None:
        super().__init__()
        self._leap = leap

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise InternalError("the simulation waits for something that no timer brings")
        if timeout > 0:
            self._leap(timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module's docstring. Time begins at 0."""

    def __init__(self) -> None:
        self._virtual_s = 0.0
        super().__init__(_Leaping(self._leap))

    def time(self) -> float:
        return self._virtual_s

    def _leap(self, seconds: float) -> None:
        self._virtual_s += seconds


class VirtualClock:
    """A ``sglang_ext.clock.Clock`` over a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.monotonic = loop.time

    def wall(self) -> float:
        return EPOCH_S + self.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
