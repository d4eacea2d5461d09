"""Choose the next layer and request to read: no I/O, no threads, no clock.

Requests compute layer by layer, so they always wait for their lowest missing layer. Reads are
therefore ordered lowest layer first across all requests, then by the request's priority, then by arrival
(Symphony, section 3.3: priority-based K,V cache). Order alone would let a stream of new requests hold back
the upper layers of an old one for ever; so a request that arrived `patience` reads earlier counts one layer
lower.

How much is read at once is a number of bytes, not of workers: one large read or many small ones keep a disk
equally busy.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

Request = Hashable

AHEAD = -(1 << 30)
"""The priority of loads that no forward pass waits for yet: they are read when no other load is waiting."""


class ByteBudget:
    """Bytes in flight, bounded. A single request larger than the whole budget goes alone."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"a budget of {limit} bytes lets nothing pass")
        self.limit = limit
        self.used = 0
        self.holders = 0

    def fits(self, nbytes: int) -> bool:
        """Whether `nbytes` may be taken now."""
        return self.holders == 0 or self.used + nbytes <= self.limit

    def take(self, nbytes: int) -> None:
        if not self.fits(nbytes):
            raise ValueError(f"{nbytes} bytes do not fit: {self!r}")
        self.used += nbytes
        self.holders += 1

    def give(self, nbytes: int) -> None:
        if self.holders < 1 or nbytes > self.used:
            raise ValueError(f"{nbytes} bytes were not taken: {self!r}")
        self.used -= nbytes
        self.holders -= 1

    def __repr__(self) -> str:
        return f"<ByteBudget {self.used}/{self.limit} bytes, {self.holders} holders>"


@dataclass(frozen=True, slots=True)
class LayerTask:
    """One layer of one request, to be read now."""

    request: Request
    layer: int
    nbytes: int


@dataclass(slots=True)
class _Waiting:
    request: Request
    sizes: tuple[int, ...]
    priority: int
    arrival: int
    handicap: int
    next_layer: int = 0
    in_flight: int = 0
    cancelled: bool = False
    version: int = 0
    """Entries of the heap with another version are out of date."""

    @property
    def open(self) -> bool:
        """Whether there is a layer left to start."""
        return not self.cancelled and self.next_layer < len(self.sizes)


@dataclass(order=True, slots=True)
class _Entry:
    key: tuple[bool, int, int, int]
    version: int
    waiting: _Waiting = field(compare=False)


class LayerQueue:
    """Requests that wait for layers, and the reads under way for them.

    Args:
        budget: most bytes in flight.
        patience: reads started between two arrivals for which the later one counts one layer higher.
        at_once: most layers of one request that are read at the same time. Reading its upper layers beside
            its lowest one makes that come later, and a medium whose bandwidth one layer fills gains nothing.

    The caller locks, if it has threads.
    """

    def __init__(self, budget: int, *, patience: int = 64, at_once: int = 1) -> None:
        if patience < 1 or at_once < 1:
            raise ValueError(f"patience is {patience} and at_once {at_once}; both must be at least 1")
        self.budget = ByteBudget(budget)
        self.patience = patience
        self.at_once = at_once
        self.started = 0
        self._requests: dict[Request, _Waiting] = {}
        self._heap: list[_Entry] = []
        self._arrivals = itertools.count()

    def add(self, request: Request, sizes: Sequence[int], *, priority: int = 0) -> None:
        """Add a request.

        Args:
            sizes: bytes of each of its layers, lowest first; 0 where a layer has nothing to read.
            priority: larger goes first among equal layers; ``AHEAD`` after everything else.

        Raises:
            ValueError: the request is here already, or has no layers.
        """
        if request in self._requests:
            raise ValueError(f"request {request!r} is in the queue already")
        if not sizes or min(sizes) < 0:
            raise ValueError(f"request {request!r}: layer sizes {sizes} are empty or negative")
        handicap = self.started // self.patience
        waiting = _Waiting(request, tuple(sizes), priority, next(self._arrivals), handicap)
        self._requests[request] = waiting
        self._push(waiting)

    def start(self) -> LayerTask | None:
        """The next layer to read, now in flight; None when nothing waits or the budget is used up.

        A smaller layer never overtakes the next one, or a large layer might wait for ever.
        """
        waiting = self._head()
        if waiting is None:
            return None
        nbytes = waiting.sizes[waiting.next_layer]
        if not self.budget.fits(nbytes):
            return None
        heapq.heappop(self._heap)
        self.budget.take(nbytes)
        task = LayerTask(waiting.request, waiting.next_layer, nbytes)
        waiting.next_layer += 1
        waiting.in_flight += 1
        self.started += 1
        if waiting.in_flight < self.at_once:
            self._push(waiting)
        return task

    def finish(self, task: LayerTask) -> bool:
        """Note that a task has been read, or has failed. Whether its request is complete or gone with it."""
        waiting = self._requests.get(task.request)
        if waiting is None or not waiting.in_flight:
            raise ValueError(f"{task} is not in flight")
        self.budget.give(task.nbytes)
        waiting.in_flight -= 1
        if not waiting.open:
            if not waiting.in_flight:
                del self._requests[task.request]
                return True
        elif waiting.in_flight == self.at_once - 1:
            self._push(waiting)
        return False

    def cancel(self, request: Request) -> bool:
        """Start nothing more for a request. Whether it is gone; if not, it goes with its last task in
        flight.
        """
        waiting = self._requests.get(request)
        if waiting is None:
            return True
        waiting.cancelled = True
        waiting.version += 1
        if not waiting.in_flight:
            del self._requests[request]
            return True
        return False

    def set_priority(self, request: Request, priority: int) -> None:
        """Change a request's priority; nothing happens when it is not waiting any more."""
        waiting = self._requests.get(request)
        if waiting is None or not waiting.open:
            return
        waiting.priority = priority
        waiting.version += 1
        if waiting.in_flight < self.at_once:
            self._push(waiting)

    @property
    def waiting_bytes(self) -> int:
        """Bytes of layers not started, without read-ahead, which gives way to other loads."""
        waiting = (w for w in self._requests.values() if not w.cancelled and w.priority != AHEAD)
        return sum(sum(w.sizes[w.next_layer :]) for w in waiting)

    def bytes_left(self, request: Request) -> int:
        """Bytes of a request's layers that have not been started; 0 for an unknown request."""
        waiting = self._requests.get(request)
        return 0 if waiting is None or waiting.cancelled else sum(waiting.sizes[waiting.next_layer :])

    def __len__(self) -> int:
        """Requests that wait or have tasks in flight."""
        return len(self._requests)

    def _push(self, waiting: _Waiting) -> None:
        if not waiting.open:
            return
        ahead = waiting.priority == AHEAD
        key = (ahead, waiting.next_layer + waiting.handicap, -waiting.priority, waiting.arrival)
        heapq.heappush(self._heap, _Entry(key, waiting.version, waiting))

    def _head(self) -> _Waiting | None:
        while self._heap:
            entry = self._heap[0]
            if entry.version == entry.waiting.version and not entry.waiting.cancelled:
                return entry.waiting
            heapq.heappop(self._heap)
        return None

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming the violated invariant."""
        in_flight = sum(w.in_flight for w in self._requests.values())
        if in_flight != self.budget.holders:
            raise AssertionError(f"{in_flight} tasks in flight, {self.budget.holders} hold budget")
        queued = [e.waiting for e in self._heap if e.version == e.waiting.version and not e.waiting.cancelled]
        if len({id(w) for w in queued}) != len(queued):
            raise AssertionError("a request is in the heap twice")
        if any(w.in_flight > self.at_once for w in self._requests.values()):
            raise AssertionError("more layers of a request are in flight than may be")
        free = [w for w in self._requests.values() if w.open and w.in_flight < self.at_once]
        if {id(w) for w in queued} != {id(w) for w in free}:
            raise AssertionError("the heap does not hold the requests that wait")
        for waiting in self._requests.values():
            done = waiting.cancelled or waiting.next_layer == len(waiting.sizes)
            if done and not waiting.in_flight:
                raise AssertionError(f"request {waiting.request!r} is complete and still here")

    def __repr__(self) -> str:
        return f"<LayerQueue {len(self)} requests, {self.waiting_bytes} bytes waiting, {self.budget!r}>"
