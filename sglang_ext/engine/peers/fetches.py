"""Reads the missing KV of a prompt from peers' DRAM into ours (MemServe, equation 2; KVDirect, 4.1).

A fetch is of one or several spans of a prompt, each of a peer. It asks all of them for their exports. Span by
span, it reserves DRAM blocks for the KV that is missing then, has them read and verified, and puts them into
the tree, from where the request loads them like any other DRAM hit; they go on to disk like KV computed here.
A request whose message allows it may wait for its fetch, for a time; others go first. The failure of a span
is counted by its reason, blocks that came before it stay, and the next span is to bring the missing ones:
every peer exports from the prompt's start. The forward pass computes the blocks that no peer brings.

A span that a peer is still computing comes layer by layer. Its request is admitted once
the first layer is in, and the others stream through DRAM to its slots in front of the forward pass. Those
slots are the request's own until the pass has ended and every layer has verified; if one has not, the whole
batch is thrown away and runs again (``patches/hooks/restarts.py``).

All methods run in the scheduler's thread. Every rank reads its part from the peer's same rank, and takes each
step once all can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.engine.moves.move import Move, MovePlanner, State
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.moves.sources import FromPeer
from sglang_ext.engine.peers.fetch_results import FetchEnd, FetchResults, SpanResult
from sglang_ext.engine.ranks import NOT_YET
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.mempool.ledger import Committed, Use
from sglang_ext.mempool.store import Refusal, Store
from sglang_ext.tiers import Tier

MOST_FETCHES: Final = 16
SHARE: Final = 4
"""At most ``1 / SHARE`` of DRAM is reserved for KV from peers at a time."""


Job: TypeAlias = Any
"""A read as its link keeps it: ``fetch_link.Job``, or an object of another link with these fields."""


class Reads(Protocol):
    """The methods of ``fetch_link.FetchLink`` that fetching uses."""

    def ask(self, address: str, export: str, seconds: float, *, layered: bool = False) -> Job: ...

    def read(self, job: Job, start: int, ids: BlockIds) -> None: ...

    def wait(self, job: Job) -> bool: ...

    def drop(self, job: Job) -> None: ...

    def cancel(self, job: Job) -> None: ...

    def decline(self, address: str, export: str, *, layered: bool = False) -> None: ...


_REFUSED: Final = {
    Refusal.BUDGET: FetchEnd.BUSY,
    Refusal.NO_PARENT: FetchEnd.NO_ROOM,
    Refusal.NO_ROOM: FetchEnd.NO_ROOM,
}


@dataclass(frozen=True)
class SpanWish:
    """Up to the leading `blocks` blocks of a prompt, from the peer at an address that exports them. layered:
    the peer is computing them now.
    """

    address: str
    export: str
    blocks: int
    layered: bool = False


@dataclass(frozen=True)
class Wish:
    """A prompt's KV to fetch. key: encoded, whole blocks. spans: in order. wait_until: of the request, on
    this rank's clock; None when no request waits. then: called when the fetch has ended, however. id: of the
    message that asks for it; ahead: it was a hint. for_others: it is kept for the instance that has it.
    """

    namespace: Hashable
    key: bytes
    spans: tuple[SpanWish, ...]
    seconds: float
    wait_until: float | None = None
    then: Callable[[], None] = lambda: None
    id: str = ""
    ahead: bool = False
    for_others: bool = False


@dataclass(eq=False)
class Fetching:
    wish: Wish
    jobs: list[Job]
    """One for each span."""
    wait_until: float | None
    began: float
    span_began: float
    results: list[SpanResult] = field(default_factory=list)
    """Of the spans that have ended."""

    @property
    def span(self) -> SpanWish:
        """The span that is being read now."""
        return self.wish.spans[len(self.results)]

    @property
    def job(self) -> Job:
        """The job that reads it."""
        return self.jobs[len(self.results)]


@dataclass(eq=False, kw_only=True)
class FetchedSpan(Move):
    """A span on its way. may_start: its first layer is in on every rank."""

    fetch: Fetching
    may_start: bool = False

    def wait_until(self, until: float | None) -> None:
        """The request of the fetch waits until then, on this rank's clock; None for no request."""
        self.fetch.wait_until = until
        self.deadline = math.inf if until is None else until


class FetchPlanner(MovePlanner):
    """The part of fetching that is alike for all models: asking peers, and going from span to span.

    Args:
        block_tokens: tokens of a block.
    """

    def __init__(self, link: Reads, moves: Moves, block_tokens: int) -> None:
        self._link = link
        self._clock = moves.clock
        self._moves = moves
        self._block_tokens = block_tokens
        self._step = block_tokens * TOKEN_BYTES
        self._active: dict[Fetching, FetchedSpan] = {}
        """Each fetch under way, with its current span."""
        self.results = FetchResults()
        self.counters = self.results.counters

    def _held(self, wish: Wish) -> int:
        """Leading blocks of a prompt that need not be fetched."""
        raise NotImplementedError

    def _new_span(self, fetch: Fetching) -> FetchedSpan:
        """A move for the next span of a fetch."""
        return FetchedSpan(planner=self, fetch=fetch, whole=True, onward=not fetch.wish.for_others)

    # -- asking -------------------------------------------------------------------------------------

    def begin(self, wish: Wish) -> None:
        """Start to fetch, unless there is nothing to do or too much is done already."""
        for other, span in self._active.items():
            if other.wish.namespace == wish.namespace and other.wish.key.startswith(wish.key):
                # A request waits for that instead.
                if other.wait_until is None:
                    span.wait_until(wish.wait_until)
                self._decline(wish, FetchEnd.JOINED)
                return
        if self._held(wish) >= len(wish.key) // self._step:
            self._decline(wish, FetchEnd.NEEDLESS)
            return
        if len(self._active) >= MOST_FETCHES:
            self._decline(wish, FetchEnd.BUSY)
            return
        jobs = [
            self._link.ask(span.address, span.export, wish.seconds, layered=span.layered)
            for span in wish.spans
        ]
        now = self._clock.monotonic()
        self._begin_span(Fetching(wish, jobs, wish.wait_until, now, now))

    def _begin_span(self, fetch: Fetching) -> None:
        span = self._active[fetch] = self._new_span(fetch)
        span.wait_until(fetch.wait_until)
        self._moves.want(span)

    def _decline(self, wish: Wish, how: FetchEnd) -> None:
        """Begin nothing, and let the peers release their exports, which would otherwise stay locked there
        until they expire.
        """
        for span in wish.spans:
            self._link.decline(span.address, span.export, layered=span.layered)
        self.results.add(wish.id, wish.ahead, how)
        wish.then()

    def waits(self, namespace: Hashable, key: bytes) -> bool:
        """Whether a request with this prompt is to wait for a fetch."""
        whole = key[: len(key) // self._step * self._step]
        return bool(whole) and any(
            fetch.wait_until is not None
            and fetch.wish.namespace == namespace
            and (fetch.wish.key.startswith(whole) or whole.startswith(fetch.wish.key))
            for fetch in self._active
        )

    def admitted(self, namespace: Hashable, key: bytes) -> None:
        """A request with this prompt, which could wait for a fetch, is admitted or is gone."""

    # -- going on -----------------------------------------------------------------------------------

    def late(self, move: FetchedSpan) -> None:
        """The request waits no longer; the fetch goes on for the next one."""
        move.fetch.wait_until = None
        self.counters.not_waited += 1

    def _refused(self, move: FetchedSpan, how: FetchEnd, *, go_on: bool = False) -> None:
        """There is nothing to read of a span, or no memory for it."""
        self._link.drop(move.fetch.job)
        self._moves.cancel(move)
        self._span_over(move.fetch, how, go_on=go_on)

    def _span_over(self, fetch: Fetching, how: FetchEnd, blocks: int = 0, *, go_on: bool = False) -> None:
        """A span has ended, however: begin the next span with missing blocks (`go_on`), or end the fetch."""
        now = self._clock.monotonic()
        # All peers are connected to at the beginning, while the first spans come.
        connected = fetch.began + fetch.job.connecting_s
        seconds = max(0.0, now - max(fetch.span_began, connected))
        fetch.results.append(SpanResult(how, blocks * self._block_tokens, seconds))
        fetch.span_began = now
        held = self._held(fetch.wish)
        while go_on and len(fetch.results) < len(fetch.jobs):
            if fetch.span.blocks > held:
                self._begin_span(fetch)
                return
            self._link.drop(fetch.job)
            fetch.results.append(SpanResult(FetchEnd.NEEDLESS, 0, 0.0))
        for job in fetch.jobs[len(fetch.results) :]:
            self._link.drop(job)
        del self._active[fetch]
        self.results.add(fetch.wish.id, fetch.wish.ahead, how, tuple(fetch.results))
        fetch.wish.then()

    # -- whole --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give up every fetch. When this returns, nothing writes to DRAM for one."""
        for fetch, span in list(self._active.items()):
            for job in fetch.jobs[len(fetch.results) :]:
                self._link.cancel(job)
            self._link.drop(fetch.job)
            self._moves.cancel(span)
            self._span_over(fetch, FetchEnd.CANCELLED)

    @property
    def busy(self) -> bool:
        return bool(self._active)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(active={len(self._active)}, {self.counters})"


class Fetches(FetchPlanner):
    """See the module's docstring."""

    def __init__(self, store: Store, tier: DramTier, link: Reads, moves: Moves) -> None:
        super().__init__(link, moves, store.tree.block_size)
        self._store = store
        self._tree = store.tree
        self._tier = tier

    def _held(self, wish: Wish) -> int:
        return self._tree.match(wish.namespace, wish.key).blocks

    # -- in front of the forward pass -----------------------------------------------------------------

    def starts(self, handle: Hashable, namespace: Hashable, key: bytes) -> bool:
        """Whether a waiting request may begin, because its missing KV arrives ahead of its forward pass."""
        for fetch, span in self._active.items():
            fits = fetch.wish.namespace == namespace and key.startswith(fetch.wish.key)
            if span.may_start and fits and span.streams_to in (None, handle):
                self._moves.admit(span, handle)
                return True
        return False

    def release(self, handle: Hashable) -> None:
        """The request has been admitted or is gone."""
        if any(span.streams_to == handle for span in self._active.values()):
            self._moves.release(handle)

    def stream(self, move: FetchedSpan, slots: Any) -> None:
        reservation = move.reservation
        assert reservation is not None
        move.may_start = False
        self._store.transfer()
        self._tier.copies.load(slots, reservation.places, move.fetch.job)

    # -- going on -----------------------------------------------------------------------------------

    def offer(self, move: FetchedSpan) -> Sequence[int]:
        """The blocks that the peer exports."""
        offered = move.fetch.job.offered
        return (NOT_YET if offered is None else offered,)

    def offered(self, move: FetchedSpan, agreed: Sequence[int]) -> None:
        if agreed[0] != NOT_YET:
            self._reserve(move, move.fetch, agreed[0])

    def may_start(self, move: FetchedSpan) -> bool:
        return True

    def started(self, move: FetchedSpan) -> None:
        move.may_start = True

    def _reserve(self, move: FetchedSpan, fetch: Fetching, offered: int) -> None:
        """The peer has answered with its offer: reserve DRAM for the missing blocks, and read them."""
        wish, job = fetch.wish, fetch.job
        key = wish.key[: min(max(0, offered), fetch.span.blocks) * self._step]
        if wish.for_others and key:
            fits = sum(guests.room_for(wish.namespace, key) for guests in self._tier.guests)
            key = key[: fits * self._step]
            if not key:
                self._refused(move, FetchEnd.NO_ROOM)
                return
        reservation = self._store.reserve(
            Tier.DRAM,
            wish.namespace,
            key,
            Use.FETCH,
            share=SHARE,
            lose=fetch.wait_until is not None and not wish.for_others,
        )
        if isinstance(reservation, Refusal):
            known = reservation is Refusal.KNOWN
            how = FetchEnd.of(job.why or "needless") if known else _REFUSED[reservation]
            # Without memory here, no other span can come either.
            self._refused(move, how, go_on=known)
            return
        self._link.read(job, reservation.start, reservation.places)
        wait, cancel = partial(self._link.wait, job), partial(self._link.cancel, job)
        self._moves.fill(move, reservation, FromPeer(job, reservation.blocks, wait, cancel))

    def ended(self, move: FetchedSpan, blocks: int, done: Committed | None) -> None:
        """Count the blocks that are in DRAM, if they have verified on every rank, and end the span."""
        if move.state is State.CANCELLED:
            return
        fetch, wish, came = move.fetch, move.fetch.wish, 0
        whole = move.state is State.LANDED
        if whole and move.streamed:
            self.counters.fetch_streamed += blocks
        if done is not None:
            came = done.fresh
            self.counters.fetched_blocks += came
            if wish.for_others:
                start, end = move.start + done.held, move.start + blocks
                for guests in self._tier.guests:
                    guests.add(wish.namespace, wish.key[: end * self._step], start, came)
        self._span_over(fetch, FetchEnd.DONE if whole else FetchEnd.of(fetch.job.why), came, go_on=True)
