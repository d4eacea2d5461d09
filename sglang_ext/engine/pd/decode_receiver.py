"""Decode's side of hand-overs: rooms of one rank. `disagg.handover` is the table; this applies it.

The scheduler's thread calls `open`, `read`, `abort` and `settle`, and looks at `TakingRoom.state`; the rest
is one task per room on the transfer thread's event loop. Slots and metadata row that `read` names are used
until the room has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from sglang_ext.clock import Clock
from sglang_ext.disagg.errors import (
    PeerGoneError,
    PeerProtocolError,
    RefusedError,
)
from sglang_ext.disagg.handover import (
    FACTS,
    LEASE_SECONDS,
    READ_SECONDS,
    RENEW_SECONDS,
    Event,
    Taking,
    after,
    moving_seconds,
)
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.staging import STAGING, Staging
from sglang_ext.engine.forward_fence import Passed, nothing_runs, until_passed
from sglang_ext.engine.pd.leases import POOL
from sglang_ext.engine.pd.messages import Ready, Weights
from sglang_ext.engine.pd.peers import PrefillPeer, PrefillPeers
from sglang_ext.errors import SglangExtError
from sglang_ext.stages import NO_STAGES, StageTimes
from sglang_ext.wire import pack_ids, unpack_ids

SETTLE_SECONDS = 30.0


class MetadataRows(Protocol):
    """SGLang's metadata buffers."""

    def write(self, row: int, metadata: bytes) -> None:
        """Fill a row; raises ValueError when the size is wrong."""


@dataclass(frozen=True)
class Wanted:
    """What the engine has set aside. pages: ours, for the prompt after `skip` pages. passed: whether the
    forward passes have ended that may still store a former request's KV there.
    """

    pages: Ids
    skip: int
    row: int
    passed: Passed = nothing_runs


@dataclass(slots=True, eq=False)
class TakingRoom:
    """One request. read: whether its KV is read, or written by the other side. `stopped` is set when nothing
    uses its slots any more, and will not.
    """

    address: str
    number: int
    read: bool = True
    state: Taking = Taking.JOINING
    reason: str = ""
    wanted: Wanted | None = None
    asked: asyncio.Event | None = None
    task: asyncio.Task[None] | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0
    """How long the read took."""
    waited: float = 0.0
    """How long the KV could be read and had no slots."""
    stages: StageTimes = NO_STAGES
    """What the request took before, as prefill tells."""
    claimed: bool = False
    """Whether a peer may be writing to its pages (push)."""
    unclaimed: asyncio.Event | None = None


class Claims:
    """Pages that prefill ranks may write (push): an `owner.Receiver` for pages that were named beforehand."""

    def __init__(self) -> None:
        self._rooms: dict[str, tuple[TakingRoom, str, Ids]] = {}
        self._over: set[str] = set()
        self._revoke: Callable[[str], Awaitable[None]] | None = None

    def granted_by(self, revoke: Callable[[str], Awaitable[None]]) -> None:
        """The endpoint is there, which grants claims: how it ends the grants of one (`Owner.revoke`)."""
        self._revoke = revoke

    def add(self, name: str, room: TakingRoom, pool: str, blocks: Ids) -> None:
        """From now on a prefill rank may claim these blocks for a room, under this name."""
        room.unclaimed = asyncio.Event()
        self._rooms[name] = room, pool, blocks

    async def remove(self, name: str) -> None:
        """Nobody may claim them any more; returns when who has claimed them writes no more."""
        room, _, _ = self._rooms[name]
        self._over.add(name)
        try:
            if room.claimed and self._revoke is not None:
                await self._revoke(name)
            while room.claimed:
                assert room.unclaimed is not None
                await room.unclaimed.wait()
        finally:
            self._over.discard(name)
            del self._rooms[name]

    async def allocate(self, pool: str, count: int, request: str, private: bytes) -> Ids:
        raise RefusedError("blocks", "name the pages: SGLang allocates them here")

    async def claim(self, pool: str, blocks: Ids, request: str, private: bytes) -> float:
        """Until the room ends: prefill may compute for longer than any fixed time."""
        known = self._rooms.get(request) if request not in self._over else None
        if known is None or known[1] != pool or not np.array_equal(known[2], blocks):
            raise RefusedError("blocks", f"no such pages were set aside for {request!r}")
        known[0].claimed = True
        return math.inf

    async def insert(
        self, pool: str, blocks: Ids, tokens: bytes, flags: int, request: str, private: bytes
    ) -> bool:
        self._unclaim(request)
        return False

    async def discard(self, pool: str, blocks: Ids, request: str) -> None:
        self._unclaim(request)

    def _unclaim(self, name: str) -> None:
        known = self._rooms.get(name)
        if known is not None and known[0].unclaimed is not None:
            known[0].claimed = False
            known[0].unclaimed.set()


class TakingRooms:
    """All rooms of one decode rank."""

    def __init__(
        self,
        peers: PrefillPeers,
        epoch: bytes,
        rows: MetadataRows,
        clock: Clock,
        loop: asyncio.AbstractEventLoop,
        wake: Callable[[], None] = lambda: None,
        pushed: tuple[Claims, str] | None = None,
        staging: Staging | None = None,
        page_bytes: int = 0,
    ) -> None:
        """pushed: with push, where peers claim pages, and our endpoint's address. staging: where aggregated
        requests arrive. page_bytes: of this rank's part of a page.
        """
        self._page_bytes = page_bytes
        self.weights: Weights = ""
        """With which requests will go on here. Set by the scheduler's thread."""
        self._pushed = pushed
        self._staging = staging
        self._peers = peers
        self._epoch = epoch
        self._rows = rows
        self._clock = clock
        self._loop = loop
        self._wake = wake
        self._lock = threading.Lock()
        self._live: set[TakingRoom] = set()
        self.ends: Counter[str] = Counter()
        """Rooms that have ended, by how: `held`, or the event by which they failed."""

    def __repr__(self) -> str:
        return f"<TakingRooms live={len(self._live)}>"

    @property
    def live(self) -> int:
        """Rooms that have a task."""
        return len(self._live)

    # -- the scheduler's thread -----------------------------------------------------------------

    def open(self, address: str, number: int, *, read: bool = False) -> TakingRoom:
        """A request has come, whose prefill server is found at a bootstrap address.

        Args:
            read: its KV is read also where servers push: it comes from another decode server.
        """
        room = TakingRoom(address, number, read or self._pushed is None)
        self._loop.call_soon_threadsafe(self._start, room)
        return room

    def read(self, room: TakingRoom, wanted: Wanted) -> None:
        """Slots and row are set aside: have them filled. The room is `Taking.READY`, or `WAITING` where the
        other side writes.
        """
        with self._lock:
            if room.state is not (Taking.READY if room.read else Taking.WAITING):
                return
            room.wanted = wanted
            self._move(room, Event.ALLOCATED)
            asked = room.asked
        assert asked is not None
        self._loop.call_soon_threadsafe(asked.set)

    def abort(self, room: TakingRoom, reason: str) -> None:
        """The engine gives the request up; its slots are free once the state says so."""
        with self._lock:
            if FACTS[room.state].end:
                return
            room.reason = room.reason or reason
            self._move(room, Event.ABORT)
        self._loop.call_soon_threadsafe(self._cancel, room)

    def weights_changed(self, weights: Weights) -> None:
        """From now on requests go on with these: what is on its way is KV of others."""
        self.weights = weights
        for room in list(self._live):
            self.abort(room, "the weights of the decode server were changed during the hand-over")

    def settle(self, room: TakingRoom) -> None:
        """Return when nothing of ours uses the room's slots any more; give it up if it has not ended."""
        with self._lock:
            busy = FACTS[room.state].pins and not FACTS[room.state].end
        self.abort(room, "another rank has lost the request")
        if busy and not room.stopped.wait(SETTLE_SECONDS):
            raise RuntimeError(f"room {room.number}: a read did not stop within {SETTLE_SECONDS:.0f} s")

    # -- the event loop ---------------------------------------------------------------------------

    async def close(self) -> None:
        """End all rooms."""
        tasks = [room.task for room in self._live if room.task is not None]
        for room in list(self._live):
            self.abort(room, "the server stops")
            self._cancel(room)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, room: TakingRoom) -> None:
        if FACTS[room.state].end:
            room.stopped.set()
            return
        room.asked = asyncio.Event()
        self._live.add(room)
        room.task = asyncio.create_task(self._run(room))
        # Also when it is cancelled before its first step.
        room.task.add_done_callback(lambda _: self._leave(room))

    def _leave(self, room: TakingRoom) -> None:
        self._live.discard(room)
        room.stopped.set()
        self._wake()

    def _cancel(self, room: TakingRoom) -> None:
        if room.task is not None:
            room.task.cancel()

    async def _run(self, room: TakingRoom) -> None:
        peer: PrefillPeer | None = None
        refused = False
        try:
            peer = await self._peers.get(room.address)
            if not room.read:
                await peer.meet(room.number, self._epoch, self.weights)
            self._moved(room, Event.JOINED)
            if room.read:
                ready = await peer.join(room.number, self._epoch, self.weights)
                self._moved(room, Event.OFFER)
                offered = self._clock.monotonic()
                await self._asked(room, peer, ready)
                started = self._clock.monotonic()
                room.stages, room.waited = ready[0].stages, started - offered
                await self._read(room, peer, ready)
                room.seconds = self._clock.monotonic() - started
            else:
                assert self._pushed is not None
                await self._let_write(room, peer, *self._pushed)
            self._moved(room, Event.ARRIVED)
            self.ends["held"] += 1
        except asyncio.CancelledError:
            self._ends(room, Event.ABORT, "aborted")
        except PeerGoneError as error:
            self._ends(room, Event.PEER_DEAD, str(error))
        except SglangExtError as error:
            refused = isinstance(error, RefusedError)
            self._ends(room, Event.FAULT, str(error))
        except Exception as error:  # noqa: BLE001 - a room that ends silently would keep its slots
            self._ends(room, Event.FAULT, f"{type(error).__name__}: {error}")
        finally:
            self._leave(room)
        # A room that refused us may be another request's: leave it alone.
        if room.state is Taking.FAILED and not refused and peer is not None and not peer.gone:
            await peer.abort(room.number, self._epoch, room.reason)

    async def _let_write(self, room: TakingRoom, peer: PrefillPeer, claims: Claims, control: str) -> None:
        """Push: wait for slots, name them to prefill, and return when they are filled."""
        assert room.asked is not None
        while not room.asked.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await room.asked.wait()
            if peer.gone:
                raise PeerGoneError("the prefill server is gone")
        wanted = room.wanted
        assert wanted is not None
        await until_passed(wanted.passed)
        with self._staged(wanted) as staged:
            into = (POOL, wanted.pages) if staged is None else (STAGING, staged)
            ready = await self._claimed(room, peer, claims, control, *into)
            if staged is not None and self._staging is not None:
                await self._staging.unpack(staged, wanted.pages)
        room.stages = ready.stages
        self._rows.write(wanted.row, ready.metadata)

    @contextlib.contextmanager
    def _staged(self, wanted: Wanted) -> Iterator[Ids | None]:
        """Blocks of staging for what is wanted, while the block runs; None where it is not used, or full."""
        staged = self._staging.take(wanted.pages.size) if self._staging is not None else None
        try:
            yield staged
        finally:
            if staged is not None and self._staging is not None:
                self._staging.give(staged)

    async def _claimed(
        self, room: TakingRoom, peer: PrefillPeer, claims: Claims, control: str, pool: str, blocks: Ids
    ) -> Ready:
        """Have blocks of ours filled by prefill; nothing writes to them when this returns or raises."""
        wanted = room.wanted
        assert wanted is not None
        name = f"{room.number:x}"
        claims.add(name, room, pool, blocks)
        try:
            (ready,) = await peer.push(room.number, self._epoch, control, pack_ids(blocks), wanted.skip, pool)
        except BaseException as error:
            # It has failed, but its slots are in use until nobody writes there.
            self._stops(room, error)
            removing = asyncio.ensure_future(_at_last(claims.remove(name)))
            if not isinstance(error, RefusedError) and not peer.gone:
                await peer.abort(room.number, self._epoch, "given up")
            await _at_last(_wait_for(removing))
            raise
        await _at_last(claims.remove(name))
        return ready

    async def _asked(self, room: TakingRoom, peer: PrefillPeer, ready: Sequence[Ready]) -> None:
        """Wait until the engine has slots; meanwhile the KV stays leased."""
        assert room.asked is not None
        while True:
            try:
                async with asyncio.timeout(RENEW_SECONDS):
                    await room.asked.wait()
                    return
            except TimeoutError:
                offers = [each.offer for each in ready if each.offer is not None]
                await peer.instance.keep(offers, LEASE_SECONDS)

    async def _read(self, room: TakingRoom, peer: PrefillPeer, ready: Sequence[Ready]) -> None:
        wanted = room.wanted
        assert wanted is not None
        name = f"{room.number:x}"
        offers = [after_skip(each.offer, wanted) for each in ready if each.offer is not None]
        reading: list[int] = []
        await until_passed(wanted.passed)
        if wanted.pages.size and offers:
            with self._staged(wanted) as staged:
                into = (POOL, wanted.pages) if staged is None else (STAGING, staged)
                peer.instance.transfer(name, offers, *into)
                try:
                    async with peer.instance.keeping(offers, LEASE_SECONDS):
                        nbytes = wanted.pages.size * self._page_bytes
                        await peer.instance.complete(name, moving_seconds(READ_SECONDS, nbytes))
                except BaseException:
                    await peer.instance.drop(name)
                    raise
                if staged is not None and self._staging is not None:
                    await self._staging.unpack(staged, wanted.pages)
            reading = [at for at, each in enumerate(ready) if each.offer is not None]
        self._rows.write(wanted.row, ready[0].metadata)
        rest = [at for at in range(len(ready)) if at not in reading]
        if rest:
            await peer.done(room.number, self._epoch, rest)

    def _moved(self, room: TakingRoom, event: Event) -> None:
        """Move on; a room that was given up meanwhile ends as a cancelled one."""
        with self._lock:
            if FACTS[room.state].end or room.state is Taking.STOPPING:
                raise asyncio.CancelledError
            self._move(room, event)
        self._wake()

    def _stops(self, room: TakingRoom, error: BaseException) -> None:
        with self._lock:
            if not FACTS[room.state].end:
                room.reason = room.reason or str(error)
                self._move(room, Event.PEER_DEAD if isinstance(error, PeerGoneError) else Event.FAULT)

    def _ends(self, room: TakingRoom, event: Event, reason: str) -> None:
        with self._lock:
            self.ends[event.value] += 1
            room.reason = room.reason or reason
            self._move(room, event)
            if room.state is Taking.STOPPING:
                self._move(room, Event.STOPPED)

    @staticmethod
    def _move(room: TakingRoom, event: Event) -> None:
        state = after(room.state, event)
        assert isinstance(state, Taking)
        room.state = state


async def _wait_for(task: asyncio.Future[None]) -> None:
    await task


async def _at_last(work: Coroutine[Any, Any, None]) -> None:
    """Run something to its end, however often we are cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)


def after_skip(offer: Offer, wanted: Wanted) -> Offer:
    """The offer without what decode has already.

    Raises:
        PeerProtocolError: what remains does not match what was set aside; the two sides saw other prompts.
    """
    blocks, generations = unpack_ids(offer.blocks), unpack_ids(offer.generations)
    if blocks.size - wanted.skip != wanted.pages.size or generations.size != blocks.size:
        raise PeerProtocolError(
            f"prefill has {blocks.size} pages, decode {wanted.skip} and room for {wanted.pages.size}"
        )
    return msgspec.structs.replace(
        offer, blocks=pack_ids(blocks[wanted.skip :]), generations=pack_ids(generations[wanted.skip :])
    )


def pages_of(indices: object) -> Ids:
    """SGLang's page indices as block ids."""
    return np.asarray(indices, np.int64)
