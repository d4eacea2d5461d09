"""A queue that tenants share fairly by bytes.

Each item gets a start tag (`clock.FairClock`), and the item with the least one comes first. So tenants take
turns by bytes, a tenant that had nothing queued waits for no backlog of another's, and the items of one
tenant come in the order in which they were pushed. The item with the greatest start tag would come last: it
gives way where there is no room. That is the newest one of the tenant with the most queued before it.

No I/O and no locks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from sglang_ext.clock import FairClock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Queued(Generic[T]):
    start: float
    number: int
    nbytes: int
    item: T

    @property
    def place(self) -> tuple[float, int]:
        """Orders the queue: by start tag, of equal ones the item that was pushed first."""
        return self.start, self.number


class FairQueue(Generic[T]):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._clock = FairClock()
        self._lines: dict[Hashable, deque[_Queued[T]]] = {}
        """The items of each tenant that has any, the oldest first."""
        self._pushed = 0
        self.nbytes = 0
        """Of all items."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __repr__(self) -> str:
        return f"FairQueue({len(self)} items of {len(self._lines)} tenants, {self.nbytes} bytes)"

    def push(self, owner: Hashable, nbytes: int, item: T) -> None:
        """Append an item to those of its tenant."""
        start = self._clock.start(owner, nbytes)
        self._lines.setdefault(owner, deque()).append(_Queued(start, self._pushed, nbytes, item))
        self._pushed += 1
        self.nbytes += nbytes

    @property
    def first(self) -> T:
        """The item that `pop` returns next. The queue is not empty."""
        return self._lines[self._next_owner()][0].item

    def pop(self) -> T:
        """Take the item whose turn it is. The queue is not empty."""
        owner = self._next_owner()
        line = self._lines[owner]
        queued = line.popleft()
        if not line:
            del self._lines[owner]
        self._clock.advance(queued.start)
        self._rest()
        self.nbytes -= queued.nbytes
        return queued.item

    def _rest(self) -> None:
        if not self._lines:
            self._clock.rest()

    def _next_owner(self) -> Hashable:
        return min(self._lines, key=lambda owner: self._lines[owner][0].place)

    def make_room(self, owner: Hashable, nbytes: int, most: int) -> list[T] | None:
        """Take items that come after a new item of ``nbytes`` bytes, the last one first, until it fits.

        Args:
            owner: the new item's tenant. None of its own items are taken: they come before the new one.
            most: bytes that the queue may have with the new item.

        Returns:
            The items that were taken; None where taking them would not make enough room, and none were.
        """
        start = self._clock.look(owner)
        taken: dict[Hashable, int] = dict.fromkeys(self._lines, 0)
        size, order = self.nbytes, list[Hashable]()
        while size + nbytes > most:
            ends = {
                name: line[-1 - taken[name]] for name, line in self._lines.items() if taken[name] < len(line)
            }
            last = max(ends, key=lambda name: ends[name].place, default=None)
            if last is None or ends[last].start <= start:
                return None
            taken[last] += 1
            size -= ends[last].nbytes
            order.append(last)
        return [self._take_newest(name) for name in order]

    def _take_newest(self, owner: Hashable) -> T:
        line = self._lines[owner]
        queued = line.pop()
        if not line:
            del self._lines[owner]
        self._clock.take_back(owner, queued.start)
        self._rest()
        self.nbytes -= queued.nbytes
        return queued.item

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming the violated invariant."""
        if any(not line for line in self._lines.values()):
            raise AssertionError("a tenant without items has a line")
        if self.nbytes != sum(queued.nbytes for line in self._lines.values() for queued in line):
            raise AssertionError(f"{self.nbytes} bytes are counted, which is not the sum of the items")
        if not self._lines and self._clock.owners:
            raise AssertionError("an empty queue remembers tenants")
        for owner, line in self._lines.items():
            places = [queued.place for queued in line]
            if places != sorted(places):
                raise AssertionError(f"items of {owner!r} are out of order")
