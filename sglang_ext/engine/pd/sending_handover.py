"""One hand-over on prefill's side: the decode ranks that take part, and the time when its slots are free.

`disagg.handover` is the table; `SendingHandover` applies it. A request's slots are the engine's as long as
its hand-over is `SenderState.COMPLETE`, `OFFERED` or `WRITING`; its pages are sealed as long as a decode rank
has a lease on them, and opened before the hand-over ends: so no reader takes later bytes for these.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

from sglang_ext.clock import Clock
from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.handover import FACTS, JOIN_SECONDS, Event, SenderState, after, moving_seconds
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.leases import Ended, LeaseEnd
from sglang_ext.disagg.transfer.staging import Staging
from sglang_ext.engine.pd.landing import PoolRows
from sglang_ext.engine.pd.messages import Join, Meet, Push, Ready, Weights, alike
from sglang_ext.engine.pd.offering import Offering, Reader, Readers
from sglang_ext.engine.pd.pushing import Filling, Writing
from sglang_ext.errors import SglangExtError
from sglang_ext.tasks import Tasks

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SendingRank:
    """A prefill rank, as its hand-overs use it."""

    endpoint: Endpoint
    """Leases pages to decode ranks."""
    clock: Clock
    loop: asyncio.AbstractEventLoop
    connected: Callable[[bytes], bool]
    """Whether a session of a decode rank lives."""
    wake: Callable[[], None]
    """Called when a hand-over has moved."""
    claim: Callable[[int, Push], Awaitable[Writing | None]]
    """Makes a decode rank's pages ours to write (push); None when it lacks none."""
    pushes: bool
    staging: Staging | None
    """Where requests are packed before they are read; None: they are read from the engine's pages."""
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Of all hand-overs of the rank."""
    stopping: Tasks = field(default_factory=Tasks)
    """Writings that are being given up."""
    ends: Counter[str] = field(default_factory=Counter)
    """Hand-overs that have ended, by how: `released`, or the event by which they were lost."""


class SendingHandover:
    """One request.

    Args:
        read: whether decode reads it, whatever --kv-transfer-mode is.
    """

    def __init__(self, number: int, rank: SendingRank, *, read: bool) -> None:
        self.number = number
        self.state = SenderState.COMPUTING
        self.since = rank.clock.monotonic()
        """When it came into its state."""
        self.reason = ""
        """Why it was lost."""
        self.weights: Weights | None = None
        """The weights with which it is computed; None before that."""
        self.readers = Readers()
        self._rank = rank
        self._lock = rank.lock
        self._read = read
        self._offering = Offering(f"{number:x}", rank.endpoint, rank.lock, rank.staging if read else None)
        self._filling = Filling(rank.stopping)

    def __repr__(self) -> str:
        return f"<SendingHandover {self.number:x} {self.state.value} readers={len(self.readers)}>"

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return FACTS[self.state].end

    # -- the scheduler's thread -------------------------------------------------------------------------

    def computed_with(self, weights: Weights) -> None:
        """KV is about to be computed with these weights, or with those that were noted before: give it up if
        a decode rank has others."""
        with self._lock:
            ours = self.weights = self.weights or weights
        theirs = self.readers.others_than(ours)
        if theirs or not ours:
            self.give_up(unlike(ours, theirs[0] if theirs else ""), Event.FAULT)

    def complete(self, pages: Ids, ready: Ready, beside: tuple[PoolRows, ...] = ()) -> None:
        """The KV of the whole prompt is in `pages`, and other state of it in blocks of other pools; all stay
        as they are until this has ended. ready: for decode, without a lease."""
        with self._lock:
            if self.over:
                return
            self._offering.computed(pages, beside, ready)
            self._move(Event.COMPUTED)
            if self._filling.named:
                self._move(Event.WRITE)
                fails = partial(self.give_up, event=Event.FAULT)
                self._rank.loop.call_soon_threadsafe(self._filling.begin, pages, self._filled, fails)
            elif self._offering.to_be_packed:
                begin, lives = self._offering.begin_packing, lambda: not self.over
                self._rank.loop.call_soon_threadsafe(begin, lives, self._offer)
            else:
                self._offer()

    def granted(self) -> int | None:
        """How many pages decode has already, once every decode rank has named the pages to fill."""
        with self._lock:
            return self._filling.granted(self.readers.expected)

    def give_up(self, reason: str, event: Event = Event.ABORT) -> None:
        """End it without KV, if it has not ended; its pages are open when this returns. From any thread."""
        with self._lock:
            if self.over:
                return
            for reader in self.readers.values():
                reader.withdraw(self._rank.endpoint)
                reader.refuse(reason)
            if self._filling.writings:
                writings = list(self._filling.writings)
                self._rank.loop.call_soon_threadsafe(self._filling.stop, writings)
            self.reason = reason
            # Last: from here on the engine may give the slots to others.
            self._move(event)
            self._rank.ends[event.value] += 1
        self._rank.wake()

    # -- the event loop ---------------------------------------------------------------------------------

    def join(self, message: Join, weights: Weights) -> asyncio.Future[Ready]:
        """A decode rank takes part, and reads. weights: this rank's. Under the lock.

        Returns:
            The answer to the decode rank, once the request is computed.

        Raises:
            RefusedError: it has ended, or has no place for the decode rank.
        """
        reader = self._admit(message, weights, reads=message.reads)
        answer = reader.expect(self._rank.loop)
        if self.state is SenderState.COMPUTING:
            self._move(Event.JOINED)
        elif not self._offering.to_be_packed:
            self._offer(reader)
        return answer

    def meet(self, message: Meet, weights: Weights) -> None:
        """A decode rank takes part, and will name pages to be filled. weights: this rank's. Under the lock.

        Raises:
            RefusedError: as `join`.
        """
        if self.state is not SenderState.COMPUTING and not self.over:
            raise RefusedError("handover", "the request is computed already; set --kv-transfer-mode alike")
        self._admit(message, weights, reads=False)
        self._move(Event.JOINED)

    async def push(self, message: Push) -> Ready:
        """A decode rank that takes part names pages to be filled; returns when they are.

        Raises:
            RefusedError: it does not take part, or the request has ended; the text gives the reason.
        """
        with self._lock:
            reader = self.readers.part_of(message.reader, self.number)
            if self.over:
                raise RefusedError("handover", self.reason or "the request is over")
            if self.state is not SenderState.COMPUTING or self._filling.named_by(message.reader):
                raise RefusedError("handover", "its pages are named already")
            self._filling.name(message.reader, message.skip)
            answer = reader.expect(self._rank.loop)
        try:
            writing = await self._rank.claim(self.number, message)
        except SglangExtError as error:
            self.give_up(f"decode's pages cannot be written: {error}", Event.FAULT)
            raise
        with self._lock:
            self._filling.claimed(writing)
            if writing is not None and FACTS[self.state].end:
                self._filling.stop([writing])
        self._rank.wake()
        return await answer

    def writings(self) -> list[Writing]:
        """The pages of decode that are being filled."""
        return [] if self.over else list(self._filling.writings)

    def done(self, epoch: bytes) -> None:
        """A decode rank needs nothing more. Under the lock.

        Raises:
            RefusedError: it has no part in this.
        """
        reader = self.readers.part_of(epoch, self.number)
        reader.done = True
        reader.withdraw(self._rank.endpoint)
        self._release_if_all_done()

    def leave(self, epoch: bytes) -> bool:
        """A decode rank takes its part back; False where pages of it may be written already. Under the
        lock."""
        reader = self.readers.get(epoch)
        if reader is None:
            return True
        if self._filling.named_by(epoch) or self.state is SenderState.WRITING:
            return False
        del self.readers[epoch]
        reader.withdraw(self._rank.endpoint)
        reader.refuse("it was left")
        self._move(Event.LEFT)
        return True

    def lease_ended(self, ended: Ended) -> None:
        """A lease of this hand-over is over, and its pages are open. Ignores leases that were withdrawn
        here. Under the lock."""
        reader = self.readers.get(ended.lease.reader or b"")
        if reader is None or reader.offers.pop(ended.lease.number, None) is None:
            return
        if ended.how is LeaseEnd.COMPLETED:
            reader.done = not reader.offers
            self._release_if_all_done()
            return
        event = Event.PEER_DEAD if ended.how is LeaseEnd.READER_DEAD else Event.FAULT
        self.give_up(f"a decode rank did not take the KV: {ended.how.value}", event)

    def end_if_overdue(self) -> None:
        """End it when its time is over, or the session of a decode rank."""
        waited = self._rank.clock.monotonic() - self.since
        readers, facts = list(self.readers.values()), FACTS[self.state]
        if any(not reader.done and not self._rank.connected(reader.session) for reader in readers):
            self.give_up("the decode server is gone", Event.PEER_DEAD)
        elif not self._read and self.state is SenderState.COMPUTING and not readers:
            if waited > JOIN_SECONDS:
                text = f"no decode server takes part in this request within {JOIN_SECONDS:.0f} s"
                self.give_up(text, Event.FAULT)
        elif (limit := facts.seconds) is not None:
            if self.state is SenderState.WRITING:
                limit = moving_seconds(limit, self._offering.nbytes)
            if waited > limit:
                text = f"no decode server has asked for this request within {limit:.0f} s"
                self.give_up(text, facts.on_deadline)

    # -- inside, under the lock -------------------------------------------------------------------------

    def _admit(self, message: Join | Meet, weights: Weights, *, reads: bool) -> Reader:
        """Let a decode rank take part. One with other weights ends the hand-over: no other decode server will
        come for it."""
        if self.over:
            raise RefusedError("handover", self.reason or "the request is over")
        ours = weights if self.weights is None else self.weights
        if not alike(ours, message.weights):
            text = unlike(ours, message.weights)
            log.warning("hand-over %d is given up: %s", self.number, text)
            self.give_up(text, Event.FAULT)
            raise RefusedError("weights", text)
        return self.readers.admit(message, reads=reads)

    def _offer(self, joined: Reader | None = None) -> None:
        """Answer a decode rank, or all that have joined."""
        for reader in (joined,) if joined is not None else self.readers.values():
            if reader.answer is not None:
                self._move(Event.JOINED)
                self._offering.offer(reader)

    def _filled(self) -> None:
        """Every decode rank's pages are filled. On the event loop, without the lock."""
        with self._lock:
            if self.over:
                return
            for reader in self.readers.values():
                reader.done = True
                reader.answer_with(self._offering.ready)
            self._release_if_all_done()

    def _release_if_all_done(self) -> None:
        if not self.over and self.readers.done:
            self._move(Event.RELEASE)
            self._rank.ends["released"] += 1
            self._rank.wake()

    def _move(self, event: Event) -> None:
        state = after(self.state, event)
        assert isinstance(state, SenderState)
        if state is not self.state:
            self.state, self.since = state, self._rank.clock.monotonic()
        if self.over:
            self._offering.give_back()


def unlike(prefill: Weights, decode: Weights) -> str:
    """The error text, for both sides, of weights that differ."""

    def name(weights: Weights) -> str:
        return weights[:12] or "being changed"

    return (
        f"the weights differ (prefill {name(prefill)}, decode {name(decode)}): start both with one "
        "checkpoint, and update both to the same weights"
    )
