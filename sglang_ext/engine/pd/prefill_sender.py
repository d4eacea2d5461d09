"""Prefill's side of hand-overs: rooms of one rank, who may read what, and when the request's slots are free.

`disagg.handover` is the table; this applies it. The scheduler's thread calls `open`, `complete`, `abort` and
`forget`, and looks at `Room.state`; all else is called on the transfer thread's event loop. A request's slots
are the engine's as long as its room is `Giving.COMPLETE` or `OFFERED`; its pages are sealed as long as a
decode rank has a lease on them, and opened before the room ends: so nobody takes later bytes for these.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

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
    moving_seconds,
)
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.leases import LeaseEnd
from sglang_ext.disagg.transfer.staging import Staging
from sglang_ext.engine.pd.leases import LeaseBook
from sglang_ext.engine.pd.messages import MAX_ROOM, Join, Meet, Push, Ready, Weights, alike
from sglang_ext.engine.pd.pushing import Writing
from sglang_ext.errors import SglangExtError
from sglang_ext.stages import NO_STAGES, StageTimes

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PARKED = 4096
"""Decode ranks that may wait for rooms that this rank has not heard of yet."""


@dataclass(slots=True, eq=False)
class Reader:
    """A decode rank in a room, by one connection: when that is over, decode has given the request up, however
    soon it connects again."""

    session: bytes
    reads: bool
    weights: Weights
    """With which it will go on."""
    target: Push | None = None
    """Where to write; None where it reads, or has no pages yet."""
    writing: Writing | None = None
    """Once its pages are claimed; None where it lacks none."""
    claimed: bool = False
    lease: int = 0
    book: LeaseBook | None = None
    """Of the lease: of the engine's pages, or of those in staging."""
    done: bool = False
    answer: asyncio.Future[Ready] | None = None


@dataclass(slots=True, eq=False)
class Room:
    """One request. pages: of the whole prompt; metadata: its row; both set by `complete`. read: whether
    decode reads it, whatever --kv-transfer-mode says. weights: with which it is computed; None before that.
    """

    number: int
    state: Giving
    since: float
    read: bool
    reason: str = ""
    weights: Weights | None = None
    pages: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    metadata: bytes = b""
    stages: StageTimes = NO_STAGES
    readers: dict[bytes, Reader] = field(default_factory=dict)
    expected: int = 0
    writing: asyncio.Task[None] | None = None
    staged: Ids | None = None
    """Where the pages are packed, block by page (aggregated)."""
    packing: asyncio.Task[None] | None = None
    packed: bool = False
    released_at: float = 0.0


class GivingRooms:
    """All rooms of one prefill rank.

    book: leases the pages. loop: where the other methods are called. wake: called when a room has moved.
    claim: makes a decode rank's pages ours to write (push); None when it lacks none.
    staging: where requests are packed before they are read, with the book of its leases; None: they are
        read from the engine's pages.
    page_bytes: of this rank's part of a page.
    """

    def __init__(
        self,
        book: LeaseBook,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None] = lambda: None,
        claim: Callable[[int, Push], Awaitable[Writing | None]] | None = None,
        pushes: bool = False,
        staging: tuple[Staging, LeaseBook] | None = None,
        page_bytes: int = 0,
    ) -> None:
        self._page_bytes = page_bytes
        self.weights: Weights = ""
        """With which is computed here. Set by `weights_changed`."""
        self._pushes = pushes
        self._staging = staging
        self._claim = claim
        self._book = book
        self._clock = clock
        self._loop = loop
        self._wake = wake
        self._lock = book.lock
        self._rooms: dict[int, Room] = {}
        self._parked: dict[int, list[asyncio.Future[None]]] = {}
        self._stopping: set[asyncio.Future[None]] = set()
        self.ends: Counter[str] = Counter()
        """Rooms that have ended, by how: `released`, or the event by which they were lost."""

    def __repr__(self) -> str:
        return f"<GivingRooms rooms={len(self._rooms)} {self._book!r} parked={len(self._parked)}>"

    @property
    def live(self) -> int:
        """Rooms that have not ended."""
        with self._lock:
            return sum(not FACTS[room.state].end for room in self._rooms.values())

    # -- the scheduler's thread -----------------------------------------------------------------

    def open(self, number: int, *, read: bool = False) -> Room:
        """A request has come.

        Args:
            read: it is read also where servers push: what leaves a decode server is complete.

        Raises:
            RefusedError: there is such a room already, or the number is none (SGLang takes 0 for no room).
        """
        if not 1 <= number <= MAX_ROOM:
            raise RefusedError("room", f"bootstrap_room {number} is not within 1 to {MAX_ROOM}")
        with self._lock:
            known = self._rooms.get(number)
            if known is not None and not FACTS[known.state].end:
                raise RefusedError("room", f"room {number} is in use by another request")
            room = self._rooms[number] = Room(
                number, Giving.COMPUTING, self._clock.monotonic(), read or not self._pushes
            )
            waiting = self._parked.pop(number, [])
        for future in waiting:
            self._loop.call_soon_threadsafe(_settle, future, None)
        return room

    def computing(self, room: Room) -> None:
        """KV of a request is about to be computed, after what may have been found of its weights."""
        with self._lock:
            room.weights = room.weights or self.weights
        self._compare(room)

    def weights_changed(self, weights: Weights) -> None:
        """From now on is computed with these. KV of others is not handed over any more, nor such of both."""
        with self._lock:
            self.weights = weights
            stale = [room for room in self._rooms.values() if room.weights not in (None, weights)]
        for room in stale:
            self._lose(
                room, Event.FAULT, "the weights of the prefill server were changed during the hand-over"
            )

    def complete(
        self,
        room: Room,
        pages: Ids,
        metadata: bytes,
        stages: StageTimes = NO_STAGES,
    ) -> None:
        """The KV of the whole prompt is in `pages`, which stay as they are until the room has ended.

        Args:
            stages: how long the request took up to here; decode is told.
        """
        self.computing(room)
        with self._lock:
            if FACTS[room.state].end:
                return
            room.pages, room.metadata, room.stages = np.asarray(pages, np.int64), metadata, stages
            self._move(room, Event.COMPUTED)
            if any(reader.target is not None for reader in room.readers.values()):
                self._move(room, Event.WRITE)
                self._loop.call_soon_threadsafe(self._begin_writing, room)
            elif self._packs(room):
                self._loop.call_soon_threadsafe(self._begin_packing, room)
            else:
                self._offer_all(room)

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
            self._require_alike(room, message.weights)
            known = room.readers.get(message.reader)
            if known is not None or (room.expected and room.expected != message.ranks):
                raise RefusedError("room", "another decode server takes part in this room")
            room.expected = message.ranks
            reader = room.readers[message.reader] = Reader(message.session, message.reads, message.weights)
            if room.state is not Giving.COMPUTING and not self._packs(room):
                return self._offer(room, message.reader, reader)
            if room.state is Giving.COMPUTING:
                self._move(room, Event.JOINED)
            reader.answer = self._loop.create_future()
        return await reader.answer

    async def meet(self, message: Meet) -> None:
        """A decode rank takes part, and will name pages to be filled.

        Raises:
            RefusedError: as `join`.
        """
        room = await self._appears(message.room)
        with self._lock:
            if FACTS[room.state].end:
                raise RefusedError("room", room.reason or "the request is over")
            if room.state is not Giving.COMPUTING:
                raise RefusedError("room", "the request is computed already; set --kv-transfer-mode alike")
            self._require_alike(room, message.weights)
            if message.reader in room.readers or room.expected not in (0, message.readers):
                raise RefusedError("room", "another decode server takes part in this room")
            if len(room.readers) == message.readers:
                raise RefusedError("room", "another decode server takes part in this room")
            room.expected = message.readers
            room.readers[message.reader] = Reader(message.session, False, message.weights)
            self._move(room, Event.JOINED)

    async def push(self, message: Push) -> Ready:
        """A decode rank that takes part names pages to be filled; returns when they are.

        Raises:
            RefusedError: it does not take part, or the request has ended; the text says why.
        """
        with self._lock:
            room, reader = self._part_of(message.room, message.reader)
            if FACTS[room.state].end:
                raise RefusedError("room", room.reason or "the request is over")
            if room.state is not Giving.COMPUTING or reader.target is not None:
                raise RefusedError("room", "its pages are named already")
            reader.target = message
            reader.answer = self._loop.create_future()
        assert self._claim is not None
        try:
            writing = await self._claim(message.room, message)
        except SglangExtError as error:
            self._lose(room, Event.FAULT, f"decode's pages cannot be written: {error}")
            raise
        with self._lock:
            reader.writing, reader.claimed = writing, True
            if FACTS[room.state].end and writing is not None:
                self._stop(room, writing)
        self._wake()
        return await reader.answer

    def granted(self, room: Room) -> int | None:
        """How many pages decode has already, once every decode rank has named the pages to fill."""
        with self._lock:
            claimed = sum(reader.claimed for reader in room.readers.values())
            if not room.expected or claimed < room.expected:
                return None
            return min((r.target.skip for r in room.readers.values() if r.target is not None), default=0)

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

    def _lease_ended(self, room: Room, reader: Reader, how: LeaseEnd) -> None:
        """A lease is over, and its pages are open. Under the lock."""
        reader.lease = 0
        if how is LeaseEnd.COMPLETED:
            reader.done = True
            self._release_if_all_done(room)
            return
        event = Event.PEER_DEAD if how is LeaseEnd.READER_DEAD else Event.FAULT
        self._lose(room, event, f"a decode rank did not take the KV: {how.value}")

    def tick(self, connected: Iterable[bytes]) -> None:
        """End what is overdue. connected: sessions of the decode ranks that live."""
        now, live = self._clock.monotonic(), set(connected)
        with self._lock:
            for room in [r for r in self._rooms.values() if FACTS[r.state].end]:
                if now - room.since > JOIN_SECONDS:
                    del self._rooms[room.number]
            rooms = [r for r in self._rooms.values() if not FACTS[r.state].end]
        for room in rooms:
            if any(not reader.done and reader.session not in live for reader in list(room.readers.values())):
                self._lose(room, Event.PEER_DEAD, "the decode server is gone")
                continue
            if not room.read and room.state is Giving.COMPUTING and not room.readers:
                if now - room.since > JOIN_SECONDS:
                    self._lose(
                        room,
                        Event.FAULT,
                        f"no decode server takes part in this request within {JOIN_SECONDS:.0f} s",
                    )
                continue
            limit = FACTS[room.state].seconds
            if limit is not None and room.state is Giving.WRITING:
                limit = moving_seconds(limit, room.pages.size * self._page_bytes)
            if limit is not None and now - room.since > limit:
                self._lose(
                    room,
                    FACTS[room.state].on_deadline,
                    f"no decode server has asked for this request within {limit:.0f} s",
                )

    # -- inside -----------------------------------------------------------------------------------

    def _require_alike(self, room: Room, theirs: Weights) -> None:
        """Have a request fail whose decode server has other weights: no other one will come for it.

        Raises:
            RefusedError: it has.
        """
        ours = self.weights if room.weights is None else room.weights
        if not alike(ours, theirs):
            text = unlike(ours, theirs)
            log.warning("room %d is given up: %s", room.number, text)
            self._lose(room, Event.FAULT, text)
            raise RefusedError("weights", text)

    def _compare(self, room: Room) -> None:
        """The weights of a request are known now: give it up if those who take part have others."""
        ours = room.weights or ""
        theirs = [reader.weights for reader in room.readers.values() if not alike(ours, reader.weights)]
        if theirs or not ours:
            self._lose(room, Event.FAULT, unlike(ours, theirs[0] if theirs else ""))

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
            pages, reader.book = room.pages, self._book
            if room.staged is not None and self._staging is not None:
                pages, reader.book = room.staged, self._staging[1]
            offer = reader.book.lease(
                f"{room.number:x}",
                pages,
                LEASE_SECONDS,
                epoch,
                lambda how: self._lease_ended(room, reader, how),
            )
            reader.lease = offer.lease
        return Ready(offer, room.metadata, room.stages)

    def _offer_all(self, room: Room) -> None:
        """Answer those that have joined. Under the lock."""
        for epoch, reader in room.readers.items():
            if reader.answer is not None:
                self._loop.call_soon_threadsafe(_settle, reader.answer, self._offer(room, epoch, reader))

    def _packs(self, room: Room) -> bool:
        """Whether a room is to be packed first, and has not been yet. Under the lock."""
        wanted = self._staging is not None and room.read and room.pages.size > 0
        return wanted and not room.packed

    def _begin_packing(self, room: Room) -> None:
        room.packing = asyncio.create_task(self._pack(room))

    async def _pack(self, room: Room) -> None:
        """Bring a request's pages side by side, if there is room for that, then offer them."""
        assert self._staging is not None
        staging, _ = self._staging
        blocks = staging.take(room.pages.size)
        try:
            if blocks is not None:
                await staging.pack(room.pages, blocks)
                with self._lock:
                    if not FACTS[room.state].end:
                        room.staged, blocks = blocks, None
        finally:
            if blocks is not None:
                staging.give(blocks)
            with self._lock:
                room.packed = True
                if not FACTS[room.state].end:
                    self._offer_all(room)

    def _stop(self, room: Room, writing: Writing) -> None:
        if room.writing is not None:
            room.writing.cancel()
        task = asyncio.ensure_future(writing.stop())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    def writings(self, room: Room) -> list[Writing]:
        """What is being filled for a room. On the event loop."""
        if FACTS[room.state].end:
            return []
        return [reader.writing for reader in room.readers.values() if reader.writing is not None]

    def _begin_writing(self, room: Room) -> None:
        room.writing = asyncio.create_task(self._fill(room))

    async def _fill(self, room: Room) -> None:
        """Write to every decode rank, then tell them."""
        try:
            for reader in list(room.readers.values()):
                if reader.writing is not None:
                    await reader.writing.finish(room.pages)
        except SglangExtError as error:
            self._lose(room, Event.FAULT, f"writing to decode failed: {error}")
            return
        with self._lock:
            if FACTS[room.state].end:
                return
            for reader in room.readers.values():
                reader.done = True
                if reader.answer is not None:
                    _settle(reader.answer, Ready(None, room.metadata, room.stages))
            self._release_if_all_done(room)

    def _withdraw(self, reader: Reader) -> None:
        lease, reader.lease = reader.lease, 0
        assert reader.book is not None
        reader.book.withdraw(lease)

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
                if reader.writing is not None:
                    self._loop.call_soon_threadsafe(self._stop, room, reader.writing)
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
        if FACTS[state].end and room.staged is not None and self._staging is not None:
            self._staging[0].give(room.staged)
            room.staged = None

    def check(self) -> None:
        """Verify that leases belong to live rooms, and the book's invariants."""
        with self._lock:
            self._book.check()
            for room in self._rooms.values():
                for reader in room.readers.values():
                    assert not (reader.lease and FACTS[room.state].end), "a lease of a room that is over"


def unlike(prefill: Weights, decode: Weights) -> str:
    """What is told on both sides of weights that differ."""

    def name(weights: Weights) -> str:
        return weights[:12] or "being changed"

    return (
        f"the weights differ (prefill {name(prefill)}, decode {name(decode)}): start both with one "
        "checkpoint, and update both to the same weights"
    )


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Ready], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
