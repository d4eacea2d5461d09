"""Prefill's side of hand-overs: rooms of one rank, who may read what, and when the request's slots are free.

`disagg.handover` is the table; this applies it. The scheduler's thread calls `open`, `complete`, `abort` and
`forget`, and looks at `Room.state`; all else is called on the transfer thread's event loop. A request's slots
are the engine's as long as its room is `Giving.COMPLETE` or `OFFERED`; its pages are sealed as long as a
decode rank has a lease on them, and opened before the room ends: so nobody takes later bytes for these.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from sglang_ext.clock import Clock
from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import (
    FACTS,
    JOIN_SECONDS,
    LEASE_SECONDS,
    Event,
    Giving,
    after,
)
from sglang_ext.disagg.leases import Ended, LeaseEnd
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.pools import OwnedPool
from sglang_ext.disagg.runs import Ids
from sglang_ext.engine.pd_messages import MAX_ROOM, Join, Ready

T = TypeVar("T")

POOL = "hbm"
MAX_PARKED = 4096
"""Decode ranks that may wait for rooms that this rank has not heard of yet."""


class Publisher(Protocol):
    """What is needed of an `Endpoint`."""

    def publish(self, pool: str, request: str, blocks: Ids, ttl: float | None, reader: bytes | None) -> Offer:
        """Lease sealed blocks."""

    def withdraw(self, pool: str, lease: int) -> bool:
        """End a lease; `GivingRooms.lease_ended` is called before this returns."""


@dataclass(slots=True, eq=False)
class Reader:
    """A decode rank in a room."""

    reads: bool
    lease: int = 0
    done: bool = False
    answer: asyncio.Future[Ready] | None = None


@dataclass(slots=True, eq=False)
class Room:
    """One request. pages: of the whole prompt; metadata: its row; both set by `complete`."""

    number: int
    state: Giving
    since: float
    reason: str = ""
    pages: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    metadata: bytes = b""
    readers: dict[bytes, Reader] = field(default_factory=dict)
    expected: int = 0
    released_at: float = 0.0


class GivingRooms:
    """All rooms of one prefill rank.

    pool: the pages, whose generations this opens and seals. loop: where the other methods are called.
    wake: called when a room may have ended.
    """

    def __init__(
        self,
        pool: OwnedPool,
        publisher: Publisher,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._pool = pool
        self._publisher = publisher
        self._clock = clock
        self._loop = loop
        self._wake = wake
        self._lock = threading.RLock()
        self._rooms: dict[int, Room] = {}
        self._leases: dict[int, tuple[Room, bytes]] = {}
        self._parked: dict[int, list[asyncio.Future[None]]] = {}
        self.ends: Counter[str] = Counter()
        """Rooms that have ended, by how: `released`, or the event by which they were lost."""

    def __repr__(self) -> str:
        return f"<GivingRooms rooms={len(self._rooms)} leases={len(self._leases)} parked={len(self._parked)}>"

    @property
    def live(self) -> int:
        """Rooms that have not ended."""
        with self._lock:
            return sum(not FACTS[room.state].end for room in self._rooms.values())

    # -- the scheduler's thread -----------------------------------------------------------------

    def open(self, number: int) -> Room:
        """A request has come.

        Raises:
            RefusedError: there is such a room already, or the number is none (SGLang takes 0 for no room).
        """
        if not 1 <= number <= MAX_ROOM:
            raise RefusedError("room", f"bootstrap_room {number} is not within 1 to {MAX_ROOM}")
        with self._lock:
            known = self._rooms.get(number)
            if known is not None and not FACTS[known.state].end:
                raise RefusedError("room", f"room {number} is in use by another request")
            room = self._rooms[number] = Room(number, Giving.COMPUTING, self._clock.monotonic())
            waiting = self._parked.pop(number, [])
        for future in waiting:
            self._loop.call_soon_threadsafe(_settle, future, None)
        return room

    def complete(self, room: Room, pages: Ids, metadata: bytes) -> None:
        """The KV of the whole prompt is in `pages`, which stay as they are until the room has ended."""
        with self._lock:
            if FACTS[room.state].end:
                return
            room.pages, room.metadata = np.asarray(pages, np.int64), metadata
            self._move(room, Event.COMPUTED)
            for epoch, reader in room.readers.items():
                if reader.answer is not None:
                    self._loop.call_soon_threadsafe(_settle, reader.answer, self._offer(room, epoch, reader))

    def abort(self, room: Room, reason: str) -> None:
        """The engine gives the request up; its pages are open when this returns."""
        self._lose(room, Event.ABORT, reason)

    def forget(self, room: Room) -> None:
        """The engine is done with the request. A lost room answers late decode ranks for a while (`tick`)."""
        self.abort(room, "the request is over")
        with self._lock:
            if room.state is Giving.RELEASED and self._rooms.get(room.number) is room:
                del self._rooms[room.number]

    # -- the event loop ---------------------------------------------------------------------------

    async def join(self, message: Join) -> Ready:
        """A decode rank takes part; returns when the request is computed.

        Raises:
            RefusedError: there is no such room, or it ended without KV; the text says why.
        """
        room = await self._appears(message.room)
        with self._lock:
            if FACTS[room.state].end:
                raise RefusedError("room", room.reason or "the request is over")
            known = room.readers.get(message.reader)
            if known is not None or (room.expected and room.expected != message.ranks):
                raise RefusedError("room", "another decode server takes part in this room")
            room.expected = message.ranks
            reader = room.readers[message.reader] = Reader(message.reads)
            if room.state is not Giving.COMPUTING:
                return self._offer(room, message.reader, reader)
            self._move(room, Event.JOINED)
            reader.answer = self._loop.create_future()
        return await reader.answer

    def done(self, number: int, epoch: bytes) -> None:
        """A decode rank needs nothing more.

        Raises:
            RefusedError: it has no part in such a room.
        """
        with self._lock:
            room, reader = self._part_of(number, epoch)
            reader.done = True
            if reader.lease:
                self._withdraw(reader)
            self._release_if_all_done(room)

    def peer_aborts(self, number: int, epoch: bytes, reason: str) -> None:
        """The request is over on decode, perhaps before it could join.

        Raises:
            RefusedError: there is no such room, or other decode ranks have it.
        """
        with self._lock:
            room = self._rooms.get(number)
            if room is None or (room.readers and epoch not in room.readers):
                raise RefusedError("room", f"room {number} is unknown here")
        self._lose(room, Event.PEER_ABORT, f"decode gave the request up: {reason}")

    def lease_ended(self, ended: Ended) -> None:
        """A lease is over: open what nobody reads any more, and move its room."""
        with self._lock:
            freed = ended.freed[self._pool.may_reuse(ended.freed) & self._pool.is_sealed(ended.freed)]
            self._pool.open(freed)
            room, epoch = self._leases.pop(ended.lease.number, (None, b""))
            if room is None or ended.how is LeaseEnd.WITHDRAWN:
                return
            reader = room.readers[epoch]
            reader.lease = 0
            if ended.how is LeaseEnd.COMPLETED:
                reader.done = True
                self._release_if_all_done(room)
                return
        event = Event.PEER_DEAD if ended.how is LeaseEnd.READER_DEAD else Event.FAULT
        self._lose(room, event, f"a decode rank did not take the KV: {ended.how.value}")

    def tick(self, connected: Iterable[bytes]) -> None:
        """End what is overdue. connected: epochs of the decode ranks that live."""
        now, live = self._clock.monotonic(), set(connected)
        with self._lock:
            for room in [r for r in self._rooms.values() if FACTS[r.state].end]:
                if now - room.since > JOIN_SECONDS:
                    del self._rooms[room.number]
            rooms = [r for r in self._rooms.values() if not FACTS[r.state].end]
        for room in rooms:
            dead = [e for e, r in list(room.readers.items()) if not r.done and e not in live]
            if dead:
                self._lose(room, Event.PEER_DEAD, "the decode server is gone")
                continue
            limit = FACTS[room.state].seconds
            if limit is not None and now - room.since > limit:
                self._lose(
                    room,
                    FACTS[room.state].on_deadline,
                    f"no decode server has asked for this request within {limit:.0f} s",
                )

    # -- inside -----------------------------------------------------------------------------------

    async def _appears(self, number: int) -> Room:
        """The room; decode may hear of a request before prefill does."""
        with self._lock:
            room = self._rooms.get(number)
            if room is not None:
                return room
            if len(self._parked) >= MAX_PARKED:
                raise RefusedError("room", f"room {number} is unknown, and too many others are waited for")
            future: asyncio.Future[None] = self._loop.create_future()
            self._parked.setdefault(number, []).append(future)
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                await future
        except TimeoutError:
            raise RefusedError("room", f"room {number} is unknown here") from None
        finally:
            with self._lock:
                left = [f for f in self._parked.pop(number, []) if f is not future]
                if left:
                    self._parked[number] = left
        with self._lock:
            room = self._rooms.get(number)
        if room is None:
            raise RefusedError("room", f"room {number} is over")
        return room

    def _part_of(self, number: int, epoch: bytes) -> tuple[Room, Reader]:
        room = self._rooms.get(number)
        reader = room.readers.get(epoch) if room is not None else None
        if room is None or reader is None:
            raise RefusedError("room", f"room {number} is unknown here")
        return room, reader

    def _offer(self, room: Room, epoch: bytes, reader: Reader) -> Ready:
        """What a decode rank is told; leases the pages to it. Under the lock."""
        self._move(room, Event.JOINED)
        offer = None
        if reader.reads and room.pages.size:
            opened = ~self._pool.is_sealed(room.pages)
            self._pool.seal(room.pages[opened])
            offer = self._publisher.publish(POOL, f"{room.number:x}", room.pages, LEASE_SECONDS, epoch)
            reader.lease = offer.lease
            self._leases[offer.lease] = (room, epoch)
        return Ready(offer, room.metadata)

    def _withdraw(self, reader: Reader) -> None:
        lease, reader.lease = reader.lease, 0
        self._publisher.withdraw(POOL, lease)
        self._leases.pop(lease, None)

    def _release_if_all_done(self, room: Room) -> None:
        if FACTS[room.state].end or len(room.readers) < room.expected:
            return
        if all(reader.done for reader in room.readers.values()):
            room.released_at = self._clock.monotonic()
            self._move(room, Event.RELEASE)
            self.ends["released"] += 1
            self._wake()

    def _lose(self, room: Room, event: Event, reason: str) -> None:
        with self._lock:
            if FACTS[room.state].end:
                return
            for reader in room.readers.values():
                if reader.lease:
                    self._withdraw(reader)
                if reader.answer is not None:
                    error = RefusedError("room", reason)
                    self._loop.call_soon_threadsafe(_fail, reader.answer, error)
            room.reason = reason
            # Last: from here on the engine may give the slots to others.
            self._move(room, event)
            self.ends[event.value] += 1
        self._wake()

    def _move(self, room: Room, event: Event) -> None:
        state = after(room.state, event)
        assert isinstance(state, Giving)
        if state is not room.state:
            room.state, room.since = state, self._clock.monotonic()

    def check(self) -> None:
        """Verify that exactly the leased pages are sealed, and that leases belong to live rooms."""
        with self._lock:
            for lease, (room, epoch) in self._leases.items():
                assert room.readers[epoch].lease == lease, f"lease {lease} is not its reader's"
                assert not FACTS[room.state].end, f"lease {lease} of a room that is over"
            every = np.arange(self._pool.blocks)
            sealed = self._pool.is_sealed(every)
            assert not (sealed & self._pool.may_reuse(every)).any(), "a page is sealed without a lease"


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Ready], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
