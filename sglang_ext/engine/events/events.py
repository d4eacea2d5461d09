"""From the scheduler's thread to the agent's: changes in the tiers, and whole snapshots of them.

The scheduler's part is a list append per change, and one queue entry per pass in which anything changed. All
else (numbering, encoding, sending) is the agent's, in its own thread. When the agent does not keep up, events
are counted and dropped, never waited for: readers then see that numbers are missing and ask for a snapshot.

A snapshot walks the tree in the scheduler's thread, which alone may read it: so many runs per pass, and more
while the server is idle. Threads of the tiers below memory publish those tiers' changes, from their indexes.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from sglang_ext.engine.planners import Planner
from sglang_ext.protocol.agent import FromAgent, NamesRemoved, NamesStored, PlacementEvent
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.radix_global.sync.events import PlacementLog, Tenant, Walk
from sglang_ext.radix_global.sync.runs import packed
from sglang_ext.tiers import Tier

QUEUE_ENTRIES: Final = 20_000
"""Entries that wait for the agent; with so many waiting, new events are dropped."""
PART_RUNS: Final = 256
PART_BYTES: Final = 256 << 10
"""Limits of a snapshot's part per pass, which takes under a millisecond."""
IDLE_SECONDS: Final = 0.02
"""Time for snapshots in a pass that has nothing else to do."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Events of one pass, or of one change below memory, and when they were made."""

    events: Sequence[PlacementEvent]
    at: float


@dataclass(frozen=True, slots=True)
class LeftOut:
    """So many events were dropped here."""

    events: int


@dataclass(frozen=True, slots=True)
class Began:
    """A snapshot begins here."""

    number: int


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a snapshot, as of here."""

    number: int
    events: Sequence[PlacementEvent]


@dataclass(frozen=True, slots=True)
class Ended:
    """A snapshot's walk over the tree has come to its end."""

    number: int


Entry: TypeAlias = Changed | LeftOut | Began | Part | Ended


class EntryQueue:
    """Entries that wait for the agent, and messages that it sends to routers. From any thread; the agent's
    takes.

    Args:
        now: seconds, monotonic.
        limit: entries that may wait.
    """

    def __init__(self, now: Callable[[], float], limit: int) -> None:
        self._now = now
        self._limit = limit
        self._entries: deque[Entry] = deque()
        self._lost = 0
        self._woken = False
        self.wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there is something to take."""
        self.dropped = 0
        """Events dropped since the start."""
        self._posted: deque[tuple[bytes, FromAgent]] = deque()
        self.closed = False

    def names_changed(self, tier: Tier, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Publish the names of blocks that a tier has now, and of blocks that it no longer has; after the
        fact.
        """
        events: list[PlacementEvent] = [NamesStored(tier.level, names) for names in packed(stored)]
        events += [NamesRemoved(tier.level, names) for names in packed(removed)]
        if events:
            self.changed(events)

    def changed(self, events: Sequence[PlacementEvent]) -> None:
        """Queue the events of a change, unless too many entries wait."""
        if len(self._entries) >= self._limit:
            # Reported with the next entry that finds room, or when all have been taken.
            self._lost += len(events)
            self.dropped += len(events)
            return
        if self._lost:
            lost, self._lost = self._lost, 0
            self.put(LeftOut(lost))
        self.put(Changed(events, self._now()))

    def put(self, entry: Entry) -> None:
        """Queue an entry."""
        self._entries.append(entry)
        if not self._woken:
            self._woken = True
            self.wake()

    def wake(self) -> None:
        """Wake the agent, though no entry may have come."""
        if not self.closed:
            os.eventfd_write(self.wakeup, 1)

    def post(self, reader: bytes, message: FromAgent) -> None:
        """Send a router a message that does not concern the index."""
        self._posted.append((reader, message))
        self.wake()

    def take(self) -> list[Entry]:
        """Return the entries that have come since the last call, in order."""
        self._woken = False
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wakeup)
        entries: list[Entry] = []
        while self._entries:
            entries.append(self._entries.popleft())
        if self._lost:
            lost, self._lost = self._lost, 0
            entries.append(LeftOut(lost))
        return entries

    def take_posted(self) -> Iterator[tuple[bytes, FromAgent]]:
        """Yield the posted messages, in order."""
        while self._posted:
            yield self._posted.popleft()

    def close(self) -> None:
        """Take nothing more. The agent's thread has ended."""
        self.closed = True
        os.close(self.wakeup)

    def __repr__(self) -> str:
        return f"EntryQueue(waiting={len(self._entries)}, dropped={self.dropped})"


class PlacementFeed(Planner):
    """See the module's docstring.

    Args:
        tree: of this rank, empty.
        holders: of the tiers in memory, whose changes are published.
        weights_name: the version of a generation of weights, as names of blocks have it.
        now: seconds, monotonic.
        limit: entries that may wait for the agent.
    """

    def __init__(
        self,
        tree: RadixTree,
        holders: Sequence[Holder],
        weights_name: Callable[[int], str] = str,
        *,
        now: Callable[[], float] = time.monotonic,
        limit: int = QUEUE_ENTRIES,
    ) -> None:
        self.log = PlacementLog(tree, {holder: holder.tier.bit for holder in holders}, self._tenant_of)
        self._weights = 0
        self._weights_name = weights_name
        self._now = now
        self.queue = EntryQueue(now, limit)
        self._asked: deque[int] = deque()
        self._walks: dict[int, Walk] = {}
        self._held_up: set[int] = set()
        self._unwanted: set[int] = set()

    def _tenant_of(self, namespace: Any) -> Tenant | None:
        weights, extra_key, cache_salt = namespace
        return (extra_key, cache_salt) if weights == self._weights else None

    # -- the scheduler's thread -----------------------------------------------------------------

    def publish(self, *, idle: bool = False) -> None:
        """Once per pass: queue the pass's changes for the agent, and go on with snapshots."""
        if self.queue.closed:
            return
        events = self.log.take()
        if events:
            self.queue.changed(events)
        if self._asked or self._walks:
            self._snapshots(IDLE_SECONDS if idle else 0.0)

    def each_pass(self) -> None:
        self.publish()

    def idle_pass(self) -> None:
        self.publish(idle=True)

    def weights_changed(self, generation: int) -> None:
        self._weights = generation
        self.before_clear()

    def check(self) -> None:
        self.log.check()

    def before_clear(self) -> None:
        """Publish that no block in memory will match any more.

        Called before anything is taken out of the tree. Published at once: a server that is paused has no
        passes.
        """
        if self.queue.closed:
            return
        self.log.clear(self._weights_name(self._weights))
        self.publish()

    def _snapshots(self, seconds: float) -> None:
        while self._asked:
            number = self._asked.popleft()
            self._walks[number] = self.log.walk()
            self.queue.put(Began(number))
        until = self._now() + seconds
        while self._walks:
            for number, walk in list(self._walks.items()):
                if number in self._unwanted:
                    self._unwanted.discard(number)
                    self._forget(number, walk)
                elif number not in self._held_up:
                    self._some(number, walk)
            if self._now() >= until or self._held_up.issuperset(self._walks):
                return
        self._unwanted.clear()

    def _some(self, number: int, walk: Walk) -> None:
        part = walk.part(PART_RUNS, PART_BYTES)
        if part:
            self.queue.put(Part(number, part))
        if walk.over:
            self.queue.put(Ended(number))
            self._forget(number, walk)

    def _forget(self, number: int, walk: Walk) -> None:
        self.log.ended(walk)
        del self._walks[number]

    @property
    def busy(self) -> bool:
        """Whether a snapshot is under way, which goes on with each pass."""
        return not self.queue.closed and bool(self._asked or self._walks)

    # -- the agent's thread ---------------------------------------------------------------------

    def snapshot(self, number: int) -> None:
        """Ask for a snapshot; it begins with the scheduler's next pass."""
        self._asked.append(number)

    def no_snapshot(self, number: int) -> None:
        """Drop the rest of a snapshot: no reader waits for it."""
        self._unwanted.add(number)

    def hold_up(self, number: int, *, full: bool) -> None:
        """Whether the reader of a snapshot cannot take more for now."""
        if full:
            self._held_up.add(number)
        else:
            self._held_up.discard(number)

    def close(self) -> None:
        """Publish nothing more. In the scheduler's thread; the agent's has ended."""
        if self.queue.closed:
            return
        self.log.close()
        self.queue.close()

    def __repr__(self) -> str:
        return f"PlacementFeed({self.log!r}, {self.queue!r})"
