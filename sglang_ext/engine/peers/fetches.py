"""Reads the missing KV of a prompt from peers' DRAM into ours (MemServe, equation 2; KVDirect, 4.1).

A fetch is of one or several spans of a prompt, each of a peer. It asks all of them for their exports. Span by
span, it reserves DRAM blocks for the KV that is missing then, has them read and verified, and puts them into
the tree, from where the request loads them like any other DRAM hit; they go on to disk like KV computed here.
A request whose message allows it may wait for its fetch, for a time; others go first. The failure of a span
is counted by its reason, blocks that came before it stay, and the next span is to bring the missing ones:
every peer exports from the prompt's start. The forward pass computes the blocks that no peer brings.

A span that a peer is still computing comes layer by layer (``computed_spans``). Its request is admitted once
the first layer is in, and the others stream through DRAM to its slots in front of the forward pass. Those
slots are the request's own until the pass has ended and every layer has verified; if one has not, the whole
batch is thrown away and runs again (``patches/hooks/restarts.py``).

All methods run in the scheduler's thread. Every rank reads its part from the peer's same rank, and takes each
step once all can.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.engine.peers.fetch_link import Job
from sglang_ext.engine.ranks import NOT_YET, Ranks
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.mempool.store import Incoming, Refusal, Reservation, Use
from sglang_ext.radix_global import RadixTree
from sglang_ext.tiers import Tier

logger = logging.getLogger(__name__)

MOST_FETCHES: Final = 16
SHARE: Final = 4
"""At most ``1 / SHARE`` of DRAM is reserved for KV from peers at a time."""
MOST_RESULTS: Final = 1000
"""Limit on results that wait for ``take_results``."""


class Reads(Protocol):
    """The methods of ``fetch_link.FetchLink`` that fetching uses."""

    def ask(self, address: str, export: str, seconds: float, *, layered: bool = False) -> Job: ...

    def read(self, job: Job, start: int, ids: BlockIds) -> None: ...

    def wait(self, job: Job) -> bool: ...

    def drop(self, job: Job) -> None: ...

    def cancel(self, job: Job) -> None: ...

    def decline(self, address: str, export: str, *, layered: bool = False) -> None: ...


class FetchEnd(enum.Enum):
    """How a fetch ended."""

    DONE = "done"
    NEEDLESS = "needless"
    """There was nothing to fetch: it is here, or the peer has no more."""
    JOINED = "joined"
    """Another fetch of the same prompt was under way already."""
    BUSY = "busy"
    """Too many were under way."""
    NO_ROOM = "no_room"
    LATE = "late"
    STALE = "stale"
    """The peer's blocks changed while they were read."""
    REFUSED = "refused"
    """The peer is of another namespace, or exports nothing."""
    TOO_SLOW = "too_slow"
    """The peer would read it from its disk, which takes longer than the fetch may take."""
    GONE = "gone"
    """The peer died, or cannot be reached."""
    CANCELLED = "cancelled"

    @classmethod
    def of(cls, why: str) -> FetchEnd:
        """The end that a job's ``why`` names; ``GONE`` for any other word."""
        return next((end for end in cls if end.value == why), cls.GONE)


@dataclass
class FetchCounters:
    """Since the start."""

    fetched_blocks: int = 0
    not_waited: int = 0
    """Requests that went on without the fetched KV, because the fetch took too long."""
    fetch_streamed: int = 0
    """Of the blocks fetched, those that a peer computed while our forward pass waited for its layers."""
    ends: Counter[FetchEnd] = field(default_factory=Counter)


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


@dataclass(frozen=True, slots=True)
class SpanResult:
    """The end of a span: tokens that came, and seconds since it was begun, without those for connecting."""

    how: FetchEnd
    tokens: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The end of a fetch. how: of its last span that was begun."""

    id: str
    ahead: bool
    how: FetchEnd
    spans: tuple[SpanResult, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that came."""
        return sum(span.tokens for span in self.spans)


@dataclass(eq=False)
class _Fetch:
    wish: Wish
    jobs: list[Job]
    """One for each span."""
    wait_until: float | None
    began: float
    span_began: float
    reservation: Reservation | None = None
    """The blocks of DRAM that are being filled."""
    results: list[SpanResult] = field(default_factory=list)
    """Of the spans that have ended."""
    may_start: bool = False
    """Its first layer is in on every rank."""
    streams_to: Hashable = None
    """The request that was admitted then."""
    incoming: Incoming | None = None
    """The transfer to HBM that its forward pass reads from; the blocks must not be released before it has
    ended.
    """

    @property
    def span(self) -> SpanWish:
        """The span that is being read now."""
        return self.wish.spans[len(self.results)]

    @property
    def job(self) -> Job:
        """The job that reads it."""
        return self.jobs[len(self.results)]


class Fetches:
    """See the module's docstring.

    Args:
        tree: the rank's tree.
        tier: DRAM.
        link: reads.
        ranks: agree on the blocks offered and read, and on the requests that wait no longer.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        tree: RadixTree,
        tier: DramTier,
        link: Reads,
        ranks: Ranks,
        *,
        clock: Clock | None = None,
    ) -> None:
        self._tree = tree
        self._tier = tier
        self._link = link
        self._clock = clock or SystemClock()
        self._ranks = ranks
        self._step = tree.block_size * TOKEN_BYTES
        self._active: list[_Fetch] = []
        self._results: deque[FetchResult] = deque(maxlen=MOST_RESULTS)
        self.counters = FetchCounters()
        ranks.add(self)

    # -- asking -------------------------------------------------------------------------------------

    def begin(self, wish: Wish) -> None:
        """Start to fetch, unless there is nothing to do or too much is done already."""
        for other in self._active:
            if other.wish.namespace == wish.namespace and other.wish.key.startswith(wish.key):
                # A request waits for that instead.
                other.wait_until = wish.wait_until if other.wait_until is None else other.wait_until
                self._decline(wish, FetchEnd.JOINED)
                return
        whole = len(wish.key) // self._step
        if not whole or self._tree.match(wish.namespace, wish.key).blocks >= whole:
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
        self._active.append(_Fetch(wish, jobs, wish.wait_until, now, now))

    def _decline(self, wish: Wish, how: FetchEnd) -> None:
        """Begin nothing, and let the peers release their exports, which would otherwise stay locked there
        until they expire.
        """
        for span in wish.spans:
            self._link.decline(span.address, span.export, layered=span.layered)
        self._tell(wish.id, wish.ahead, how)
        wish.then()

    def refuse(self, id: str, *, ahead: bool) -> None:
        """Report the fetch of a message as refused, where its peer cannot serve this instance."""
        self._tell(id, ahead, FetchEnd.REFUSED)

    def waits(self, namespace: Hashable, key: bytes) -> bool:
        """Whether a request with this prompt is to wait for a fetch."""
        whole = key[: len(key) // self._step * self._step]
        return bool(whole) and any(
            fetch.wait_until is not None
            and fetch.wish.namespace == namespace
            and (fetch.wish.key.startswith(whole) or whole.startswith(fetch.wish.key))
            for fetch in self._active
        )

    # -- in front of the forward pass -----------------------------------------------------------------

    def starts(self, handle: Hashable, namespace: Hashable, key: bytes) -> bool:
        """Whether a waiting request may begin, because its missing KV arrives ahead of its forward pass."""
        for fetch in self._active:
            fits = fetch.wish.namespace == namespace and key.startswith(fetch.wish.key)
            if fetch.may_start and fits and fetch.streams_to in (None, handle):
                fetch.streams_to = handle
                return True
        return False

    def release(self, handle: Hashable) -> None:
        """The request has been admitted or is gone."""
        for fetch in self._active:
            if fetch.streams_to == handle and fetch.incoming is None:
                fetch.streams_to = None

    def blocks_to_stream(self, handle: Hashable, in_memory: int) -> int:
        """How many blocks the request may take as found after the ``in_memory`` blocks that the tree has."""
        fetch = self._streaming_to(handle)
        reservation = None if fetch is None else fetch.reservation
        return 0 if reservation is None or reservation.start != in_memory else reservation.blocks

    def stream(self, handle: Hashable, slots: Any) -> None:
        """Let the blocks of ``blocks_to_stream`` of a request go on to slots as they come."""
        fetch = self._streaming_to(handle)
        assert fetch is not None
        assert fetch.reservation is not None
        store = self._tier.store
        fetch.incoming = store.transfer(
            Tier.HBM, fetch.reservation.blocks * self._tree.block_size, fetch.span.address
        )
        self._tier.copies.load(slots, fetch.reservation.places, fetch.job)

    def _streaming_to(self, handle: Hashable) -> _Fetch | None:
        return next((fetch for fetch in self._active if fetch.streams_to == handle), None)

    def streams_hold(self) -> bool:
        """After a forward pass: whether all KV that streamed into it arrived and verified, on every rank."""
        streams = [fetch for fetch in self._active if fetch.incoming is not None]
        if not streams:
            return True
        whole = self._ranks.at_once([int(self._link.wait(fetch.job)) for fetch in streams])
        for fetch, held in zip(streams, whole, strict=True):
            reservation = fetch.reservation
            assert reservation is not None
            assert fetch.incoming is not None
            fetch.incoming.end()
            fetch.incoming, fetch.streams_to = None, None
            if held:
                self.counters.fetch_streamed += reservation.blocks
            # The tree has the blocks before the request inserts them, and need not copy them again.
            self._land(fetch, reservation, reservation.blocks if held else 0)
        return all(whole)

    # -- going on -----------------------------------------------------------------------------------

    def propose(self) -> Sequence[int]:
        """Of each fetch, whether its request has waited long enough, the blocks of its next step, and whether
        its first layer is in."""
        now, said = self._clock.monotonic(), []
        for fetch in self._active:
            came = fetch.job.offered if fetch.reservation is None else fetch.job.read
            said += [
                int(fetch.wait_until is not None and now > fetch.wait_until),
                NOT_YET if came is None else came,
                int(fetch.reservation is not None and fetch.job.layers_in > 0),
            ]
        return said

    def act(self, agreed: Sequence[int]) -> None:
        """Take the next step of each fetch that can on every rank."""
        said = zip(agreed[::3], agreed[1::3], agreed[2::3], strict=True)
        for fetch, (late, blocks, starts) in zip(list(self._active), said, strict=False):
            if fetch.incoming is not None:
                continue  # its pass has not run yet
            fetch.may_start = bool(starts)
            if late:
                fetch.wait_until = None
                self.counters.not_waited += 1
            if blocks == NOT_YET:
                continue
            if fetch.reservation is None:
                self._take(fetch, blocks)
            else:
                self._land(fetch, fetch.reservation, blocks)

    def _take(self, fetch: _Fetch, offered: int) -> None:
        """The peer has answered with its offer: reserve DRAM for the missing blocks, and read them."""
        wish, job = fetch.wish, fetch.job
        key = wish.key[: min(max(0, offered), fetch.span.blocks) * self._step]
        if wish.for_others and key:
            key = key[: self._tier.room_for_others(wish.namespace, key) * self._step]
            if not key:
                self._link.drop(job)
                self._span_over(fetch, FetchEnd.NO_ROOM)
                return
        reservation = self._tier.store.reserve(
            Tier.DRAM,
            wish.namespace,
            key,
            Use.FETCH,
            share=SHARE,
            lose=fetch.wait_until is not None and not wish.for_others,
            source=fetch.span.address,
        )
        if isinstance(reservation, Refusal):
            self._link.drop(job)
            known = reservation is Refusal.KNOWN
            how = FetchEnd.of(job.why or "needless") if known else _REFUSED[reservation]
            # Without memory here, no other span can come either.
            self._span_over(fetch, how, go_on=known)
            return
        fetch.reservation = reservation
        self._link.read(job, reservation.start, reservation.places)

    def _land(self, fetch: _Fetch, reservation: Reservation, read: int) -> None:
        """Insert the blocks if they have verified on every rank, else discard them; end the span."""
        came = 0
        whole = read == reservation.blocks
        wish = fetch.wish
        if not whole:
            reservation.abort()
        elif (done := reservation.commit(onward=not wish.for_others)) is not None:
            came = done.fresh
            self.counters.fetched_blocks += came
            if wish.for_others:
                start, end = reservation.start + done.held, reservation.start + reservation.blocks
                self._tier.spilled.add(wish.namespace, wish.key[: end * self._step], start, came)
        fetch.reservation, fetch.may_start, fetch.streams_to = None, False, None
        self._span_over(fetch, FetchEnd.DONE if whole else FetchEnd.of(fetch.job.why), came, go_on=True)

    def _span_over(self, fetch: _Fetch, how: FetchEnd, blocks: int = 0, *, go_on: bool = False) -> None:
        """A span has ended, however: begin the next span with missing blocks (`go_on`), or end the fetch."""
        now = self._clock.monotonic()
        # All peers are connected to at the beginning, while the first spans come.
        connected = fetch.began + fetch.job.connecting_s
        seconds = max(0.0, now - max(fetch.span_began, connected))
        fetch.results.append(SpanResult(how, blocks * self._tree.block_size, seconds))
        fetch.span_began = now
        held = self._tree.match(fetch.wish.namespace, fetch.wish.key).blocks
        while go_on and len(fetch.results) < len(fetch.jobs):
            if fetch.span.blocks > held:
                return
            self._link.drop(fetch.job)
            fetch.results.append(SpanResult(FetchEnd.NEEDLESS, 0, 0.0))
        for job in fetch.jobs[len(fetch.results) :]:
            self._link.drop(job)
        self._active.remove(fetch)
        self._tell(fetch.wish.id, fetch.wish.ahead, how, tuple(fetch.results))
        fetch.wish.then()

    def _tell(self, id: str, ahead: bool, how: FetchEnd, spans: tuple[SpanResult, ...] = ()) -> None:
        self.counters.ends[how] += 1
        self._results.append(FetchResult(id, ahead, how, spans))

    def counts(self) -> dict[str, int]:
        """All counters, by name."""
        ends = {end.value: self.counters.ends[end] for end in FetchEnd}
        return {
            "fetched_blocks": self.counters.fetched_blocks,
            "not_waited": self.counters.not_waited,
            "fetch_streamed": self.counters.fetch_streamed,
            **ends,
        }

    def take_results(self) -> list[FetchResult]:
        """Return the fetches that have ended since the last call, in that order."""
        results = list(self._results)
        self._results.clear()
        return results

    # -- whole --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Give up every fetch. When this returns, nothing writes to DRAM for one."""
        for fetch in list(self._active):
            for job in fetch.jobs[len(fetch.results) :]:
                self._link.cancel(job)
            if fetch.incoming is not None:
                fetch.incoming.end()
            if fetch.reservation is not None:
                fetch.reservation.abort()
            self._span_over(fetch, FetchEnd.CANCELLED)

    @property
    def busy(self) -> bool:
        return bool(self._active)

    def __repr__(self) -> str:
        return f"Fetches(active={len(self._active)}, {self.counters})"
