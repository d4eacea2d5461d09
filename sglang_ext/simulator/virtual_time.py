"""An event loop whose time is virtual: where it would wait for a timer, its time leaps to it.

Nothing else ends a wait: there are no sockets and no threads in a simulation, so a loop without a timer would
wait forever, and says so instead. An exception of a callback ends the simulation.

asyncio's own loop compares the timers of its heap in Python, and asks a selector in each round. Here the heap
has tuples. Calls of one moment run in the order in which they were asked for.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, Final, TypeVarTuple

from sglang_ext.errors import InternalError

Ts = TypeVarTuple("Ts")
EPOCH_S: Final = 1_700_000_000.0
"""Wall time at the start of a simulation; the same in each run."""


class Call(asyncio.TimerHandle):
    """A call that is due, now or later. Of its base, it sets the fields that a simulation needs."""

    __slots__ = ()
    _when: float
    _callback: Callable[..., object] | None
    _args: tuple[Any, ...]
    _context: Context | None  # None: the context in which the loop runs

    def __init__(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> None:
        self._when, self._callback, self._args, self._context = when, callback, args, context

    def __repr__(self) -> str:
        return f"Call({self._callback}, {self._when})"

    def cancel(self) -> None:
        self._callback, self._args = None, ()

    def cancelled(self) -> bool:
        return self._callback is None


class VirtualLoop(asyncio.SelectorEventLoop):
    """See the module's docstring. Time begins at 0."""

    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._due: deque[Call] = deque()
        self._timers: list[tuple[float, int, Call]] = []
        """A heap: when, a number, and the call."""
        self._timed = 0

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Call:
        call = Call(self._now, callback, args, context)
        self._due.append(call)
        return call

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> Call:
        self._timed += 1
        call = Call(when, callback, args, context)
        heappush(self._timers, (when, self._timed, call))
        return call

    def call_later(
        self,
        delay: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> Call:
        # As ``call_at``, which most calls of a simulation go through by way of here.
        when = self._now + delay
        self._timed += 1
        call = Call(when, callback, args, context)
        heappush(self._timers, (when, self._timed, call))
        return call

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> Call:
        raise InternalError("a simulation has one thread")

    def _run_once(self) -> None:
        """All rounds, until the loop is stopped: the hook of asyncio's ``run_forever`` for one of them."""
        due, timers = self._due, self._timers
        while not self._stopping:
            if due:
                call = due.popleft()
            elif timers:
                when, _, call = heappop(timers)
                if call._callback is None:
                    continue
                if when > self._now:
                    self._now = when
            else:
                raise InternalError("the simulation waits for something that no timer brings")
            callback = call._callback
            if callback is None:
                continue
            if call._context is None:
                callback(*call._args)
            else:
                call._context.run(callback, *call._args)


class VirtualClock:
    """A ``sglang_ext.clock.Clock`` over a loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.monotonic = loop.time

    def wall(self) -> float:
        return EPOCH_S + self.monotonic()

    async def sleep(self, seconds: float) -> None:
        now = self.monotonic()
        if seconds > 0.0 and now + seconds == now:
            # Rounded away, the wait would not bring its end nearer, and its caller would wait without end.
            seconds = math.ulp(now)
        await asyncio.sleep(seconds)
