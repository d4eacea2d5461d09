"""Threads that several owners share fairly, by the length of what each has to be done.

Start-time fair queueing (Goyal, Vin and Cheng, 1996), a deficit round robin that need not go round: the work
of each owner stands on a line of its own, on which it begins where the one before it ends, and what begins
first is done first. An owner that had nothing to be done begins at the present: it waits for no backlog of
others. Long work leaves one thread to what is short.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")

LONG = 1 << 18
"""From this size on work is long: about a quarter of a second of tokenizing."""
MOST_OWNERS = 1024
"""Owners whose place is remembered, before those that are behind the present are dropped."""


@dataclass(order=True, slots=True)
class _Work:
    """One thing to be done."""

    start: float
    """Where it begins on its owner's line."""
    number: int
    is_long: bool = field(compare=False)
    call: Callable[[], Any] = field(compare=False)
    spent: Callable[[float], object] = field(compare=False)
    done: asyncio.Future[Any] = field(compare=False)
    """Cancelled when nobody waits for it any more."""
    seconds: float = field(default=0.0, compare=False)
    """That it took."""

    def do(self) -> Any:
        """In a thread."""
        began = time.perf_counter()
        try:
            return self.call()
        finally:
            self.seconds = time.perf_counter() - began


class FairPool:
    """A pool of threads. For one event loop.

    Args:
        threads: how many work at a time.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self.threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._short: list[_Work] = []
        self._long: list[_Work] = []
        self._numbers = itertools.count()
        self._ends: dict[str, float] = {}
        """Where the last work of each owner ends on its line."""
        self._now = 0.0
        """Where what was begun last begins on its line."""
        self.running = 0
        self._running_long = 0

    async def run(
        self,
        owner: str,
        size: int,
        call: Callable[[], T],
        spent: Callable[[float], object] = lambda seconds: None,
    ) -> T:
        """Call something in a thread; what it returns or raises.

        Args:
            owner: whose turn it takes.
            size: about how long it takes, in bytes or characters.
            spent: called with the seconds that it took a thread, also where it raised, or where the caller
                was cancelled meanwhile.
        """
        start = max(self._now, self._ends.get(owner, 0.0))
        self._ends[owner] = start + max(1, size)
        if len(self._ends) > MOST_OWNERS:
            self._ends = {name: end for name, end in self._ends.items() if end > self._now}
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        work = _Work(start, next(self._numbers), size >= LONG, call, spent, done)
        heapq.heappush(self._long if work.is_long else self._short, work)
        self._begin()
        return await done

    def _begin(self) -> None:
        """Have free threads do what is next."""
        loop = asyncio.get_running_loop()
        while self.running < self.threads and (work := self._next()) is not None:
            self._now = max(self._now, work.start)
            self.running += 1
            self._running_long += work.is_long
            loop.run_in_executor(self._pool, work.do).add_done_callback(functools.partial(self._ended, work))

    def _next(self) -> _Work | None:
        """What begins first of what may begin, and is still waited for."""
        has_room = self._running_long < max(1, self.threads - 1)
        while lines := [line for line in (self._short, self._long if has_room else []) if line]:
            work = heapq.heappop(min(lines, key=lambda line: line[0]))
            if not work.done.done():
                return work
        return None

    def _ended(self, work: _Work, ended: asyncio.Future[Any]) -> None:
        self.running -= 1
        self._running_long -= work.is_long
        work.spent(work.seconds)
        error = None if ended.cancelled() else ended.exception()
        if not work.done.done():
            if ended.cancelled():
                work.done.cancel()
            elif error is not None:
                work.done.set_exception(error)
            else:
                work.done.set_result(ended.result())
        self._begin()

    def close(self) -> None:
        """End the threads. What has not begun is cancelled."""
        for work in (*self._short, *self._long):
            work.done.cancel()
        self._short.clear()
        self._long.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __repr__(self) -> str:
        waiting = len(self._short) + len(self._long)
        return f"FairPool({self.running} of {self.threads} threads, {waiting} waiting)"
