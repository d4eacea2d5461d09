"""Stand-ins for the outside world that tests move by hand."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time


class FakeClock:
    """A ``sglang_ext.clock.Clock`` that stands still until ``advance`` is called.

    Sleepers wake in the order of their deadlines; the event loop gets a turn after each, so that a loop
    which sleeps again within the advanced span is woken again within it.
    """

    def __init__(self, start: float = 1000.0, wall: float = 1_700_000_000.0) -> None:
        self._now = start
        self._wall_offset = wall - start
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def monotonic(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    @property
    def sleepers(self) -> int:
        """Coroutines now waiting in ``sleep``."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(seconds, 0.0), next(self._order), future))
        await future

    def advance(self, seconds: float) -> None:
        """Move time on without giving the event loop a turn; sleepers that are due wake at its next."""
        if seconds < 0:
            raise ValueError(f"time does not go back; advance({seconds})")
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)

    async def pass_time(self, seconds: float, turns: int = 20) -> None:
        """Move time on from deadline to deadline, with ``turns`` turns of the event loop at each."""
        end = self._now + seconds
        while True:
            due = min((deadline for deadline, _, future in self._sleepers if not future.done()), default=end)
            if due > end:
                break
            self.advance(max(due - self._now, 0.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            if due >= end:
                break
        self.advance(end - self._now)
        for _ in range(turns):
            await asyncio.sleep(0)

    def __repr__(self) -> str:
        return f"FakeClock(monotonic={self._now:.3f}, sleepers={self.sleepers})"


class Stopwatch:
    """Seconds by the real clock, less those in which this process got no core.

    For upper limits in tests of deadlines: on a busy machine, a process without a core may observe an event
    seconds after it happened. A thread that does nothing but sleep finds out for how long it was not woken.

        with Stopwatch() as watch:
            ...
        assert watch.seconds < 3.0
    """

    PAUSE_S = 0.02
    ALLOWED_S = 0.02
    """A wake-up later than this shows that the process had no core."""

    def __init__(self) -> None:
        self._stopped_still = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="stopwatch")
        self._began = self._ended = 0.0

    def __enter__(self) -> Stopwatch:
        self._began = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = time.monotonic()
        self._over.set()
        self._thread.join()

    @property
    def seconds(self) -> float:
        """Up to now, or to the end of the block."""
        return (self._ended or time.monotonic()) - self._began - self._stopped_still

    def _look(self) -> None:
        before = time.monotonic()
        over = False
        while not over:
            over = self._over.wait(self.PAUSE_S)
            now = time.monotonic()
            late = now - before - self.PAUSE_S
            if late > self.ALLOWED_S:
                self._stopped_still += late
            before = now

    def __repr__(self) -> str:
        return f"Stopwatch({self.seconds:.3f} s, and {self._stopped_still:.3f} s without a core)"
