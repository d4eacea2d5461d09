"""Waiting for a place when every instance has as many requests as it may have.

``Line`` decides who is next: by a policy (``--queue-policy``; larger priority first), then who came first.
``Admission`` is the small asynchronous part around it. Places are counted for the fleet as a whole: with
places for ``n`` requests on each of ``m`` instances and less than ``n * m`` requests admitted, at least one
instance has room.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sglang_ext.clock import Clock
from sglang_ext.errors import InternalError, UserError
from sglang_ext.own_functions import SortKey, order_named
from sglang_ext.router.telemetry.observability import RouterMetrics

RECHECK_S = 0.25
"""Interval at which waiting requests check whether the fleet has grown; an ended request wakes them at
once."""


MOST_GONE = 64
"""Tickets of requests that have left that a line keeps beside those of twice as many that wait."""


class QueueFull(UserError):
    """As many requests wait as may, and this one is not more important than any of them."""


class QueueTimeout(UserError):
    """A request has waited as long as it may."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that waits, as a policy for the order in the line sees it."""

    priority: int = 0
    """As the request or its key says, 0 without."""
    prompt_tokens: int = 0
    """Of all its prompts; characters where the router has no tokenizer for the model."""
    tenant: str | None = None
    """Tenant; ``None`` without a key file."""
    streams: bool = False


def by_priority(request: Waiting) -> SortKey:
    """Larger priority first."""
    return (-request.priority,)


def shortest_first(request: Waiting) -> SortKey:
    """Larger priority first, then the shorter prompt: the least waiting in sum. Long ones may wait long."""
    return (-request.priority, request.prompt_tokens)


QUEUE_POLICIES: dict[str, Callable[[Waiting], SortKey]] = {
    "priority": by_priority,
    "shortest-first": shortest_first,
}


def queue_policy_named(name: str) -> Callable[[Waiting], SortKey]:
    """The order of that name, or one's own by ``package.module:function``.

    Raises:
        ConfigError: there is none.
    """
    return order_named(name, QUEUE_POLICIES, "(request) -> tuple of numbers", field="--queue-policy")


@dataclass(order=True, slots=True)
class Ticket:
    """One place in the line."""

    rank: tuple[SortKey, int]
    """(the policy's key, arrival): smaller goes first."""
    gone: bool = field(default=False, compare=False)
    """It has left the line: admitted, displaced, or its client went away."""
    displaced: bool = field(default=False, compare=False)
    """A request of higher priority took its place in a full line."""
    wake: asyncio.Future[None] | None = field(default=None, compare=False)


class Line:
    """The waiting requests in their order. Pure: no clock, no I/O.

    Args:
        size: most requests that wait.
        order: sort key; the smallest goes first.
    """

    def __init__(self, size: int, order: Callable[[Waiting], SortKey] = by_priority) -> None:
        self.size = size
        self._order = order
        self._heap: list[Ticket] = []
        self._arrivals = itertools.count()
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def join(self, request: Waiting) -> tuple[Ticket, Ticket | None]:
        """Stand in line. Returns (the ticket, who was displaced for it or ``None``).

        Raises:
            QueueFull: the line is full of requests that are at least as important.
        """
        ticket = Ticket((self._order(request), next(self._arrivals)))
        displaced = None
        if self._waiting >= self.size:
            last = max((t for t in self._heap if not t.gone), default=None)
            if last is None or last.rank[0] <= ticket.rank[0]:
                raise QueueFull(f"{self._waiting} requests wait already", field="--queue-size")
            self.leave(last)
            last.displaced = True
            displaced = last
        heapq.heappush(self._heap, ticket)
        self._waiting += 1
        return ticket, displaced

    def leave(self, ticket: Ticket) -> None:
        """Give the place up; a second time changes nothing."""
        if ticket.gone:
            return
        ticket.gone = True
        self._waiting -= 1
        if len(self._heap) > 2 * self._waiting + MOST_GONE:
            self._heap = [each for each in self._heap if not each.gone]
            heapq.heapify(self._heap)

    def next(self) -> Ticket | None:
        """Remove and return the first request in line; ``None`` for an empty line."""
        while self._heap:
            ticket = heapq.heappop(self._heap)
            if not ticket.gone:
                self.leave(ticket)
                return ticket
        return None

    def check(self) -> None:
        """Verify the count.

        Raises:
            InternalError: it is wrong.
        """
        there = sum(not ticket.gone for ticket in self._heap)
        if there != self._waiting:
            raise InternalError(f"{there} tickets in the line, {self._waiting} counted")


class Admission:
    """Lets requests through while there are places.

    Args:
        capacity: places in the fleet now; infinite when there is no limit.
        clock: seconds.
        size: most requests that wait.
        patience_s: how long one waits.
        order: sort key; the smallest goes first.
    """

    def __init__(
        self,
        capacity: Callable[[], float],
        clock: Clock,
        *,
        size: int = 1024,
        patience_s: float = 30.0,
        order: Callable[[Waiting], SortKey] = by_priority,
    ) -> None:
        self._capacity = capacity
        self._clock = clock
        self._patience_s = patience_s
        self.line = Line(size, order)
        self.admitted = 0
        """Requests that have a place."""

    def measure(self, metrics: RouterMetrics) -> None:
        """Show who waits and who has a place."""
        waiting = metrics.gauge("queue_waiting")
        admitted = metrics.gauge("admitted")

        def refresh() -> None:
            waiting.set(len(self.line))
            admitted.set(self.admitted)

        metrics.refreshing.subscribe(refresh)

    def enter(self) -> bool:
        """Take a place if one is free and no request waits. The caller frees it with ``leave``."""
        if len(self.line) or self.admitted >= self._capacity():
            return False
        self.admitted += 1
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold one more place while the block runs, free or not: for work that continues after the request
        that had waited for its place is answered."""
        self.admitted += 1
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Give a place back."""
        self.admitted -= 1
        if len(self.line):
            self._grant()

    async def wait(self, request: Waiting) -> float:
        """Stand in line for a place; returns the seconds that took, with the place taken.

        Raises:
            QueueFull, QueueTimeout: there is none.
        """
        since = self._clock.monotonic()
        ticket, displaced = self.line.join(request)
        ticket.wake = asyncio.get_running_loop().create_future()
        if displaced is not None and displaced.wake is not None and not displaced.wake.done():
            displaced.wake.set_result(None)
        try:
            while True:
                self._grant()
                remaining = self._patience_s - (self._clock.monotonic() - since)
                await self._until(ticket.wake, min(RECHECK_S, remaining))
                if ticket.displaced:
                    raise QueueFull("more important requests have taken the places in the line")
                if ticket.wake.done():
                    return self._clock.monotonic() - since
                if remaining <= 0:
                    raise QueueTimeout(f"no instance had room within {self._patience_s:g} s")
        except BaseException:
            if ticket.gone and not ticket.displaced:  # granted in the very moment in which it gave up
                self.admitted -= 1
            self.line.leave(ticket)
            self._grant()
            raise

    async def _until(self, wake: asyncio.Future[None], seconds: float) -> None:
        timer = asyncio.ensure_future(self._clock.sleep(max(0.0, seconds)))
        try:
            await asyncio.wait({wake, timer}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    def _grant(self) -> None:
        """Give free places to the next requests in line."""
        while len(self.line) and self.admitted < self._capacity():
            ticket = self.line.next()
            if ticket is None:
                return
            self.admitted += 1
            if ticket.wake is not None and not ticket.wake.done():
                ticket.wake.set_result(None)

    def check(self) -> None:
        """Verify the counters.

        Raises:
            InternalError: one of them is impossible.
        """
        self.line.check()
        if self.admitted < 0:
            raise InternalError(f"{self.admitted} requests admitted")

    def __repr__(self) -> str:
        capacity = self._capacity()
        most = "any" if math.isinf(capacity) else str(int(capacity))
        return f"Admission({self.admitted} of {most}, waiting={len(self.line)} of {self.line.size})"
