"""A thread pool that owners share fairly, by the size of their work.

Each item gets a start tag (`clock.FairClock`), and the pool runs the item with the least one, so an owner
waits for no backlog of others. Long items leave one thread free for short ones.
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

from sglang_ext.clock import FairClock

T = TypeVar("T")

LONG = 1 << 14
"""From this size on work is long: about 20 ms of tokenizing."""


@dataclass(order=True, slots=True)
class _Work:
    """An item in the queue."""

    start: float
    """Start tag."""
    number: int
    is_long: bool = field(compare=False)
    call: Callable[[], Any] = field(compare=False)
    spent: Callable[[float], object] = field(compare=False)
    done: asyncio.Future[Any] = field(compare=False)
    """The caller's result; cancelled with the caller."""
    seconds: float = field(default=0.0, compare=False)
    """Thread time it took."""

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
        self._clock = FairClock()
        self.running = 0
        self._running_long = 0

    async def run(
        self,
        owner: str,
        size: int,
        call: Callable[[], T],
        spent: Callable[[float], object] = lambda seconds: None,
    ) -> T:
        """Run a call in a thread of the pool; returns its result, or raises its error.

        Args:
            owner: the tenant or address whose share it uses.
            size: about how long it takes, in bytes or characters.
            spent: called with the seconds that it took a thread, also where it raised, or where the caller
                was cancelled meanwhile.
        """
        start = self._clock.start(owner, size)
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        work = _Work(start, next(self._numbers), size >= LONG, call, spent, done)
        heapq.heappush(self._long if work.is_long else self._short, work)
        self._begin()
        return await done

    def _begin(self) -> None:
        """Start queued items on free threads."""
        loop = asyncio.get_running_loop()
        while self.running < self.threads and (work := self._next()) is not None:
            self._clock.advance(work.start)
            self.running += 1
            self._running_long += work.is_long
            loop.run_in_executor(self._pool, work.do).add_done_callback(functools.partial(self._ended, work))

    def _next(self) -> _Work | None:
        """Pop the item with the least start tag whose caller still waits; None when none may start."""
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
        if not (self.running or self._short or self._long):
            self._clock.rest()

    def close(self) -> None:
        """End the threads, and cancel queued items."""
        for work in (*self._short, *self._long):
            work.done.cancel()
        self._short.clear()
        self._long.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __repr__(self) -> str:
        waiting = len(self._short) + len(self._long)
        return f"FairPool({self.running} of {self.threads} threads, {waiting} waiting)"
