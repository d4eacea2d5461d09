"""Prefill's side of a rank's hand-overs: the decode ranks that read its pages, and the time when a
request's slots are free.

`disagg.handover` is the table; this applies it. The scheduler's thread calls `open`, `complete`, `abort` and
`forget`, and looks at `SendingHandover.state`; all else is called on the transfer thread's event loop. A
request's slots are the engine's as long as its hand-over is `SenderState.COMPLETE` or `OFFERED`; its pages
are sealed as long as a decode rank has a lease on them, and opened before the hand-over ends: so no reader
takes later bytes for these.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
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
    SenderState,
    after,
    moving_seconds,
)
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.leases import LeaseEnd
from sglang_ext.disagg.transfer.staging import Staging
from sglang_ext.engine.pd.leases import LeaseBook
from sglang_ext.engine.pd.messages import MAX_NUMBER, Join, Meet, Push, Ready, Weights, alike
from sglang_ext.engine.pd.prompt_logprobs import PromptLogprobs
from sglang_ext.engine.pd.pushing import Writing
from sglang_ext.errors import SglangExtError
from sglang_ext.stages import NO_STAGES, StageTimes
from sglang_ext.tasks import Tasks

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_PARKED = 4096
"""Decode ranks that may wait for hand-overs that this rank has not opened yet."""


@dataclass(slots=True, eq=False)
class Reader:
    """A decode rank in a hand-over, by one connection: when that is over, decode has given the request up,
    however soon it connects again."""

    session: bytes
    reads: bool
    weights: Weights
    """The weights with which decode will go on."""
    target: Push | None = None
    """Where to write; None where it reads, or has no pages yet."""
    writing: Writing | None = None
    """Set once its pages are claimed; None where it lacks none, or others of prefill's ranks fill them."""
    claimed: bool = False
    lease: int = 0
    book: LeaseBook | None = None
    """Of the lease: of the engine's pages, or of those in staging."""
    done: bool = False
    answer: asyncio.Future[Ready] | None = None


@dataclass(slots=True, eq=False)
class SendingHandover:
    """One request. pages: of the whole prompt; metadata: its row; both set by `complete`. read: whether
    decode reads it, whatever --kv-transfer-mode is. weights: with which it is computed; None before that.
    """

    number: int
    state: SenderState
    since: float
    read: bool
    reason: str = ""
    weights: Weights | None = None
    pages: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    metadata: bytes = b""
    stages: StageTimes = NO_STAGES
    logprobs: PromptLogprobs | None = None
    readers: dict[bytes, Reader] = field(default_factory=dict)
    expected: int = 0
    writing: asyncio.Task[None] | None = None
    staged: Ids | None = None
    """Where the pages are packed, block by page (aggregated)."""
    packing: asyncio.Task[None] | None = None
    packed: bool = False
    released_at: float = 0.0


class PrefillSender:
    """All hand-overs of one prefill rank.

    book: leases the pages. loop: where the other methods are called. connected: whether a session of a decode
        rank lives. wake: called when a hand-over has moved.
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
        connected: Callable[[bytes], bool],
        wake: Callable[[], None] = lambda: None,
        claim: Callable[[int, Push], Awaitable[Writing | None]] | None = None,
        pushes: bool = False,
        staging: tuple[Staging, LeaseBook] | None = None,
        page_bytes: int = 0,
    ) -> None:
        self._page_bytes = page_bytes
        self.weights: Weights = ""
        """The weights with which this rank computes. Set by `weights_changed`."""
        self._pushes = pushes
        self._staging = staging
        self._claim = claim
        self._book = book
        self._clock = clock
        self._loop = loop
        self._connected = connected
        self._wake = wake
        self._lock = book.lock
        self._handovers: dict[int, SendingHandover] = {}
        self._parked: dict[int, list[tuple[bytes, asyncio.Future[None]]]] = {}
        """By hand-over: the decode ranks that wait for it, by their epochs."""
        self._given_up: dict[int, tuple[str, float]] = {}
        """Hand-overs that all waiting decode ranks have aborted: the reason, and since when."""
        self._stopping = Tasks()
        self.ends: Counter[str] = Counter()
        """Hand-overs that have ended, by how: `released`, or the event by which they were lost."""

    def __repr__(self) -> str:
        return f"<PrefillSender handovers={len(self._handovers)} {self._book!r} parked={len(self._parked)}>"

    @property
    def live(self) -> int:
        """Hand-overs that have not ended."""
        with self._lock:
            return sum(not FACTS[handover.state].end for handover in self._handovers.values())

    # -- the scheduler's thread -----------------------------------------------------------------

    def open(self, number: int, *, read: bool = False) -> SendingHandover:
        """A request has come.

        Args:
            read: its KV is read also where servers push: a request that leaves a decode server is complete.

        Raises:
            RefusedError: there is such a hand-over already, or the number is none (SGLang takes 0 for no
                bootstrap_room).
        """
        if not 1 <= number <= MAX_NUMBER:
            raise RefusedError("handover", f"bootstrap_room {number} is not within 1 to {MAX_NUMBER}")
        with self._lock:
            known = self._handovers.get(number)
            if known is not None and not FACTS[known.state].end:
                raise RefusedError("handover", f"hand-over {number} is in use by another request")
            handover = self._handovers[number] = SendingHandover(
                number, SenderState.COMPUTING, self._clock.monotonic(), read or not self._pushes
            )
            waiting = self._parked.pop(number, [])
            reason, _ = self._given_up.pop(number, ("", 0.0))
        for _, future in waiting:
            self._loop.call_soon_threadsafe(_settle, future, None)
        if reason:
            self._lose(handover, Event.PEER_ABORT, reason)
        return handover

    def computing(self, handover: SendingHandover) -> None:
        """KV of a request is about to be computed, after any cached KV of the same weights was found."""
        with self._lock:
            handover.weights = handover.weights or self.weights
        self._compare(handover)

    def weights_changed(self, weights: Weights) -> None:
        """From now on this rank computes with these; KV of others, or of both, is not handed over."""
        with self._lock:
            self.weights = weights
            stale = [
                handover for handover in self._handovers.values() if handover.weights not in (None, weights)
            ]
        for handover in stale:
            self._lose(
                handover, Event.FAULT, "the weights of the prefill server were changed during the hand-over"
            )

    def complete(
        self,
        handover: SendingHandover,
        pages: Ids,
        metadata: bytes,
        stages: StageTimes = NO_STAGES,
        logprobs: PromptLogprobs | None = None,
    ) -> None:
        """The KV of the whole prompt is in `pages`, which stay as they are until the hand-over has ended.

        Args:
            stages: how long the request took up to here; sent to decode.
            logprobs: of the prompt, for decode's answer.
        """
        self.computing(handover)
        with self._lock:
            if FACTS[handover.state].end:
                return
            handover.pages, handover.metadata, handover.stages = np.asarray(pages, np.int64), metadata, stages
            handover.logprobs = logprobs
            self._move(handover, Event.COMPUTED)
            if any(reader.target is not None for reader in handover.readers.values()):
                self._move(handover, Event.WRITE)
                self._loop.call_soon_threadsafe(self._begin_writing, handover)
            elif self._packs(handover):
                self._loop.call_soon_threadsafe(self._begin_packing, handover)
            else:
                self._offer_all(handover)

    def abort(self, handover: SendingHandover, reason: str) -> None:
        """The engine gives the request up; its pages are open when this returns."""
        self._lose(handover, Event.ABORT, reason)

    def forget(self, handover: SendingHandover) -> None:
        """The engine is done with the request. A lost hand-over answers late decode ranks for a while
        (`tick`)."""
        self.abort(handover, "the request is over")
        with self._lock:
            if handover.state is SenderState.RELEASED and self._handovers.get(handover.number) is handover:
                del self._handovers[handover.number]

    # -- the event loop ---------------------------------------------------------------------------

    async def join(self, message: Join) -> Ready:
        """A decode rank takes part; returns when the request is computed.

        Raises:
            RefusedError: there is no such hand-over, or it ended without KV; the text gives the reason. Or,
                with the reason `session`, its connection is over, and it may take part by another one.
        """
        handover = await self._appears(message)
        with self._lock:
            if FACTS[handover.state].end:
                raise RefusedError("handover", handover.reason or "the request is over")
            self._require_alike(handover, message.weights)
            _require_place(handover, message)
            handover.expected = message.ranks
            reader = handover.readers[message.reader] = Reader(
                message.session, message.reads, message.weights
            )
            if handover.state is not SenderState.COMPUTING and not self._packs(handover):
                return self._offer(handover, message.reader, reader)
            if handover.state is SenderState.COMPUTING:
                self._move(handover, Event.JOINED)
            reader.answer = self._loop.create_future()
        return await reader.answer

    async def meet(self, message: Meet) -> None:
        """A decode rank takes part, and will name pages to be filled.

        Raises:
            RefusedError: as `join`.
        """
        handover = await self._appears(message)
        with self._lock:
            if FACTS[handover.state].end:
                raise RefusedError("handover", handover.reason or "the request is over")
            if handover.state is not SenderState.COMPUTING:
                raise RefusedError(
                    "handover", "the request is computed already; set --kv-transfer-mode alike"
                )
            self._require_alike(handover, message.weights)
            _require_place(handover, message)
            handover.expected = message.ranks
            handover.readers[message.reader] = Reader(message.session, False, message.weights)
            self._move(handover, Event.JOINED)

    async def push(self, message: Push) -> Ready:
        """A decode rank that takes part names pages to be filled; returns when they are.

        Raises:
            RefusedError: it does not take part, or the request has ended; the text gives the reason.
        """
        with self._lock:
            handover, reader = self._part_of(message.handover, message.reader)
            if FACTS[handover.state].end:
                raise RefusedError("handover", handover.reason or "the request is over")
            if handover.state is not SenderState.COMPUTING or reader.target is not None:
                raise RefusedError("handover", "its pages are named already")
            reader.target = message
            reader.answer = self._loop.create_future()
        assert self._claim is not None
        try:
            writing = await self._claim(message.handover, message)
        except SglangExtError as error:
            self._lose(handover, Event.FAULT, f"decode's pages cannot be written: {error}")
            raise
        with self._lock:
            reader.writing, reader.claimed = writing, True
            if FACTS[handover.state].end and writing is not None:
                self._stop(handover, writing)
        self._wake()
        return await reader.answer

    def granted(self, handover: SendingHandover) -> int | None:
        """How many pages decode has already, once every decode rank has named the pages to fill."""
        with self._lock:
            claimed = sum(reader.claimed for reader in handover.readers.values())
            if not handover.expected or claimed < handover.expected:
                return None
            return min((r.target.skip for r in handover.readers.values() if r.target is not None), default=0)

    def done(self, number: int, epoch: bytes) -> None:
        """A decode rank needs nothing more.

        Raises:
            RefusedError: it has no part in such a hand-over.
        """
        with self._lock:
            handover, reader = self._part_of(number, epoch)
            reader.done = True
            if reader.lease:
                self._withdraw(reader)
            self._release_if_all_done(handover)

    def peer_aborts(self, number: int, epoch: bytes, reason: str, rejoins: bool = False) -> None:
        """The request is over on decode, perhaps before it could join; or one of its ranks takes its part
        back, and rejoins by another connection.

        Raises:
            RefusedError: there is no such hand-over, or other decode ranks have it.
        """
        with self._lock:
            handover = self._handovers.get(number)
            reason = f"decode gave the request up: {reason}"
            if handover is None and self._leaves_parked(number, epoch, reason, rejoins):
                return
            if handover is None or (handover.readers and epoch not in handover.readers):
                raise RefusedError("handover", f"hand-over {number} is unknown here")
            if rejoins and self._leaves(handover, epoch):
                return
        self._lose(handover, Event.PEER_ABORT, reason)

    def _leaves(self, handover: SendingHandover, epoch: bytes) -> bool:
        """A decode rank has no part in a hand-over any more; False where pages of it may be written already.
        Under the lock."""
        reader = handover.readers.get(epoch)
        if reader is None:
            return True
        if reader.target is not None or handover.state is SenderState.WRITING:
            return False
        del handover.readers[epoch]
        if reader.lease:
            self._withdraw(reader)
        if reader.answer is not None:
            self._loop.call_soon_threadsafe(_fail, reader.answer, RefusedError("handover", "it was left"))
        self._move(handover, Event.LEFT)
        return True

    def _leaves_parked(self, number: int, epoch: bytes, reason: str, rejoins: bool) -> bool:
        """A decode rank may wait for a hand-over no longer, which is over with the last of them that does not
        rejoin. Returns whether it waited. Under the lock."""
        parked = self._parked.get(number, [])
        left = [each for each in parked if each[0] != epoch]
        if len(left) == len(parked):
            return False
        for reader, future in parked:
            if reader == epoch:
                _fail(future, RefusedError("handover", reason))
        if left:
            self._parked[number] = left
        else:
            del self._parked[number]
            if not rejoins:
                self._given_up[number] = reason, self._clock.monotonic()
        return True

    def _lease_ended(self, handover: SendingHandover, reader: Reader, how: LeaseEnd) -> None:
        """A lease is over, and its pages are open. Under the lock."""
        reader.lease = 0
        if how is LeaseEnd.COMPLETED:
            reader.done = True
            self._release_if_all_done(handover)
            return
        event = Event.PEER_DEAD if how is LeaseEnd.READER_DEAD else Event.FAULT
        self._lose(handover, event, f"a decode rank did not take the KV: {how.value}")

    def tick(self) -> None:
        """End hand-overs that are overdue, and those in which a decode rank's session is over."""
        now = self._clock.monotonic()
        with self._lock:
            for handover in [r for r in self._handovers.values() if FACTS[r.state].end]:
                if now - handover.since > JOIN_SECONDS:
                    del self._handovers[handover.number]
            for number in [n for n, (_, since) in self._given_up.items() if now - since > JOIN_SECONDS]:
                del self._given_up[number]
            handovers = [r for r in self._handovers.values() if not FACTS[r.state].end]
        for handover in handovers:
            readers = list(handover.readers.values())
            if any(not reader.done and not self._connected(reader.session) for reader in readers):
                self._lose(handover, Event.PEER_DEAD, "the decode server is gone")
                continue
            if not handover.read and handover.state is SenderState.COMPUTING and not handover.readers:
                if now - handover.since > JOIN_SECONDS:
                    self._lose(
                        handover,
                        Event.FAULT,
                        f"no decode server takes part in this request within {JOIN_SECONDS:.0f} s",
                    )
                continue
            limit = FACTS[handover.state].seconds
            if limit is not None and handover.state is SenderState.WRITING:
                limit = moving_seconds(limit, handover.pages.size * self._page_bytes)
            if limit is not None and now - handover.since > limit:
                self._lose(
                    handover,
                    FACTS[handover.state].on_deadline,
                    f"no decode server has asked for this request within {limit:.0f} s",
                )

    # -- inside -----------------------------------------------------------------------------------

    def _require_alike(self, handover: SendingHandover, theirs: Weights) -> None:
        """Have a request fail whose decode server has other weights: no other one will come for it.

        Raises:
            RefusedError: it has.
        """
        ours = self.weights if handover.weights is None else handover.weights
        if not alike(ours, theirs):
            text = unlike(ours, theirs)
            log.warning("hand-over %d is given up: %s", handover.number, text)
            self._lose(handover, Event.FAULT, text)
            raise RefusedError("weights", text)

    def _compare(self, handover: SendingHandover) -> None:
        """The weights of a request are known now: give it up if its decode ranks have others."""
        ours = handover.weights or ""
        readers = list(handover.readers.values())
        theirs = [reader.weights for reader in readers if not alike(ours, reader.weights)]
        if theirs or not ours:
            self._lose(handover, Event.FAULT, unlike(ours, theirs[0] if theirs else ""))

    def _require_connected(self, message: Join | Meet) -> None:
        """Raises:
        RefusedError: `session`, as for whatever else is asked in a session that is over.
        """
        if not self._connected(message.session):
            raise RefusedError("session", "this session is over; connect again")

    async def _appears(self, message: Join | Meet) -> SendingHandover:
        """The hand-over that a message names, once its request has come: decode may send the message first.
        Its session lives.
        """
        self._require_connected(message)
        number = message.handover
        with self._lock:
            handover = self._handovers.get(number)
            if handover is not None:
                return handover
            if len(self._parked) + len(self._given_up) >= MAX_PARKED:
                raise RefusedError(
                    "handover", f"hand-over {number} is unknown, and too many others are waited for"
                )
            future: asyncio.Future[None] = self._loop.create_future()
            self._parked.setdefault(number, []).append((message.reader, future))
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                await future
        except TimeoutError:
            raise RefusedError("handover", f"hand-over {number} is unknown here") from None
        finally:
            with self._lock:
                left = [each for each in self._parked.pop(number, []) if each[1] is not future]
                if left:
                    self._parked[number] = left
        with self._lock:
            handover = self._handovers.get(number)
        if handover is None:
            raise RefusedError("handover", f"hand-over {number} is over")
        self._require_connected(message)
        return handover

    def _part_of(self, number: int, epoch: bytes) -> tuple[SendingHandover, Reader]:
        handover = self._handovers.get(number)
        reader = handover.readers.get(epoch) if handover is not None else None
        if handover is None or reader is None:
            raise RefusedError("handover", f"hand-over {number} is unknown here")
        return handover, reader

    def _offer(self, handover: SendingHandover, epoch: bytes, reader: Reader) -> Ready:
        """The answer to a decode rank; leases the pages to it. Under the lock."""
        self._move(handover, Event.JOINED)
        offer = None
        if reader.reads and handover.pages.size:
            pages, reader.book = handover.pages, self._book
            if handover.staged is not None and self._staging is not None:
                pages, reader.book = handover.staged, self._staging[1]
            offer = reader.book.lease(
                f"{handover.number:x}",
                pages,
                LEASE_SECONDS,
                epoch,
                lambda how: self._lease_ended(handover, reader, how),
            )
            reader.lease = offer.lease
        return Ready(offer, handover.metadata, handover.stages, handover.logprobs)

    def _offer_all(self, handover: SendingHandover) -> None:
        """Answer those that have joined. Under the lock."""
        for epoch, reader in handover.readers.items():
            if reader.answer is not None:
                self._loop.call_soon_threadsafe(_settle, reader.answer, self._offer(handover, epoch, reader))

    def _packs(self, handover: SendingHandover) -> bool:
        """Whether a hand-over is to be packed first, and has not been yet. Under the lock."""
        wanted = self._staging is not None and handover.read and handover.pages.size > 0
        return wanted and not handover.packed

    def _begin_packing(self, handover: SendingHandover) -> None:
        handover.packing = asyncio.create_task(self._pack(handover))

    async def _pack(self, handover: SendingHandover) -> None:
        """Pack a request's pages into staging, if there is room, then offer them."""
        assert self._staging is not None
        staging, _ = self._staging
        blocks = staging.take(handover.pages.size)
        try:
            if blocks is not None:
                await staging.pack(handover.pages, blocks)
                with self._lock:
                    if not FACTS[handover.state].end:
                        handover.staged, blocks = blocks, None
        finally:
            if blocks is not None:
                staging.give(blocks)
            with self._lock:
                handover.packed = True
                if not FACTS[handover.state].end:
                    self._offer_all(handover)

    def _stop(self, handover: SendingHandover, writing: Writing) -> None:
        if handover.writing is not None:
            handover.writing.cancel()
        self._stopping.start(writing.stop())

    def writings(self, handover: SendingHandover) -> list[Writing]:
        """The pages of decode that are being filled for a hand-over. On the event loop."""
        if FACTS[handover.state].end:
            return []
        return [reader.writing for reader in handover.readers.values() if reader.writing is not None]

    def _begin_writing(self, handover: SendingHandover) -> None:
        handover.writing = asyncio.create_task(self._fill(handover))

    async def _fill(self, handover: SendingHandover) -> None:
        """Write to every decode rank, then answer each with `Ready`."""
        try:
            for reader in list(handover.readers.values()):
                if reader.writing is not None:
                    await reader.writing.finish(handover.pages)
        except SglangExtError as error:
            self._lose(handover, Event.FAULT, f"writing to decode failed: {error}")
            return
        with self._lock:
            if FACTS[handover.state].end:
                return
            for reader in handover.readers.values():
                reader.done = True
                if reader.answer is not None:
                    ready = Ready(None, handover.metadata, handover.stages, handover.logprobs)
                    _settle(reader.answer, ready)
            self._release_if_all_done(handover)

    def _withdraw(self, reader: Reader) -> None:
        lease, reader.lease = reader.lease, 0
        assert reader.book is not None
        reader.book.withdraw(lease)

    def _release_if_all_done(self, handover: SendingHandover) -> None:
        if FACTS[handover.state].end or len(handover.readers) < handover.expected:
            return
        if all(reader.done for reader in handover.readers.values()):
            handover.released_at = self._clock.monotonic()
            self._move(handover, Event.RELEASE)
            self.ends["released"] += 1
            self._wake()

    def _lose(self, handover: SendingHandover, event: Event, reason: str) -> None:
        with self._lock:
            if FACTS[handover.state].end:
                return
            for reader in handover.readers.values():
                if reader.lease:
                    self._withdraw(reader)
                if reader.answer is not None:
                    error = RefusedError("handover", reason)
                    self._loop.call_soon_threadsafe(_fail, reader.answer, error)
                if reader.writing is not None:
                    self._loop.call_soon_threadsafe(self._stop, handover, reader.writing)
            handover.reason = reason
            # Last: from here on the engine may give the slots to others.
            self._move(handover, event)
            self.ends[event.value] += 1
        self._wake()

    def _move(self, handover: SendingHandover, event: Event) -> None:
        state = after(handover.state, event)
        assert isinstance(state, SenderState)
        if state is not handover.state:
            handover.state, handover.since = state, self._clock.monotonic()
        if FACTS[state].end and handover.staged is not None and self._staging is not None:
            self._staging[0].give(handover.staged)
            handover.staged = None

    def check(self) -> None:
        """Verify that leases belong to live hand-overs, and the book's invariants."""
        with self._lock:
            self._book.check()
            for handover in self._handovers.values():
                for reader in handover.readers.values():
                    assert not (reader.lease and FACTS[handover.state].end), (
                        "a lease of a hand-over that is over"
                    )


def _require_place(handover: SendingHandover, message: Join | Meet) -> None:
    """Raises:
    RefusedError: all ranks that take part have joined already, or another number of ranks takes part.
    """
    other = handover.expected not in (0, message.ranks)
    if other or message.reader in handover.readers or len(handover.readers) == message.ranks:
        raise RefusedError("handover", "another decode server takes part in this hand-over")


def unlike(prefill: Weights, decode: Weights) -> str:
    """The error text, for both sides, of weights that differ."""

    def name(weights: Weights) -> str:
        return weights[:12] or "being changed"

    return (
        f"the weights differ (prefill {name(prefill)}, decode {name(decode)}): start both with one "
        "checkpoint, and update both to the same weights"
    )


def _settle(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
