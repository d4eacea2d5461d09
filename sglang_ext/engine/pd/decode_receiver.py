"""Decode's side of a rank's hand-overs. `disagg.handover` is the table; this applies it.

The scheduler's thread calls `open`, `read`, `abort` and `settle`, and looks at `ReceivingHandover.state`; the
rest is one task per hand-over on the transfer thread's event loop. Slots and metadata row that `read` names
are used until the hand-over has ended.
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
    SessionEndedError,
)
from sglang_ext.disagg.handover import (
    FACTS,
    LEASE_SECONDS,
    READ_SECONDS,
    RENEW_SECONDS,
    Event,
    ReceiverState,
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
from sglang_ext.engine.pd.prompt_logprobs import PromptLogprobs, require_sound
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
    """The slots and the row that the engine has set aside. pages: ours, for the prompt after `skip` pages.
    passed: whether the forward passes have ended that may still store a former request's KV there.
    """

    pages: Ids
    skip: int
    row: int
    passed: Passed = nothing_runs


@dataclass(slots=True, eq=False)
class ReceivingHandover:
    """One request. read: whether its KV is read, or written by the other side. `stopped` is set when nothing
    uses its slots any more, and will not.
    """

    address: str
    number: int
    read: bool = True
    state: ReceiverState = ReceiverState.JOINING
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
    """The request's times at prefill, as received with `Ready`."""
    logprobs: PromptLogprobs | None = None
    """Of the prompt, as prefill has computed them."""
    writers: int = 0
    """Peers that may be writing to its pages (push)."""
    unclaimed: asyncio.Event | None = None
    """Set once the last of them has ended."""


@dataclass(slots=True, eq=False)
class Claimable:
    """Pages of a hand-over that prefill ranks may write. unclaimed: how many ranks may still claim them."""

    handover: ReceivingHandover
    pool: str
    blocks: Ids
    unclaimed: int


class Claims:
    """Pages that prefill ranks may write (push): an `owner.Receiver` for pages that were named beforehand.

    Where prefill has more ranks than decode, each of several fills its heads of every page, by a grant of its
    own. The pages are free when all of them write no more.
    """

    def __init__(self) -> None:
        self._handovers: dict[str, Claimable] = {}
        self._over: set[str] = set()
        self._revoke: Callable[[str], Awaitable[None]] | None = None

    def granted_by(self, revoke: Callable[[str], Awaitable[None]]) -> None:
        """Set how the endpoint ends the grants of a claim (`Owner.revoke`), once there is one."""
        self._revoke = revoke

    def add(self, name: str, handover: ReceivingHandover, pool: str, blocks: Ids, writers: int) -> None:
        """From now on so many prefill ranks may claim these blocks for a hand-over, under this name."""
        handover.unclaimed = asyncio.Event()
        self._handovers[name] = Claimable(handover, pool, blocks, writers)

    async def remove(self, name: str) -> None:
        """Close the pages to new claims; returns when all ranks that have claimed them write no more."""
        handover = self._handovers[name].handover
        self._over.add(name)
        try:
            if handover.writers and self._revoke is not None:
                await self._revoke(name)
            while handover.writers:
                assert handover.unclaimed is not None
                await handover.unclaimed.wait()
        finally:
            self._over.discard(name)
            del self._handovers[name]

    async def claim(self, pool: str, blocks: Ids, request: str) -> float:
        """Grant pages until the hand-over ends: prefill may compute for longer than any fixed time."""
        known = self._handovers.get(request) if request not in self._over else None
        if known is None or known.pool != pool or not np.array_equal(known.blocks, blocks):
            raise RefusedError("blocks", f"no such pages were set aside for {request!r}")
        if not known.unclaimed:
            raise RefusedError("blocks", f"all who fill the pages of {request!r} have claimed them already")
        known.unclaimed -= 1
        known.handover.writers += 1
        assert known.handover.unclaimed is not None
        known.handover.unclaimed.clear()
        return math.inf

    async def filled(self, pool: str, blocks: Ids, request: str) -> None:
        self._unclaim(request)

    async def discard(self, pool: str, blocks: Ids, request: str) -> None:
        self._unclaim(request)

    def _unclaim(self, name: str) -> None:
        known = self._handovers.get(name)
        if known is None or known.handover.unclaimed is None:
            return
        known.handover.writers -= 1
        if not known.handover.writers:
            known.handover.unclaimed.set()


class DecodeReceiver:
    """All hand-overs of one decode rank."""

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
        """The weights with which requests will go on here. Set by the scheduler's thread."""
        self._pushed = pushed
        self._staging = staging
        self._peers = peers
        self._epoch = epoch
        self._rows = rows
        self._clock = clock
        self._loop = loop
        self._wake = wake
        self._lock = threading.Lock()
        self._live: set[ReceivingHandover] = set()
        self.ends: Counter[str] = Counter()
        """Hand-overs that have ended, by how: `held`, or the event by which they failed."""

    def __repr__(self) -> str:
        return f"<DecodeReceiver live={len(self._live)}>"

    @property
    def live(self) -> int:
        """Hand-overs that have a task."""
        return len(self._live)

    # -- the scheduler's thread -----------------------------------------------------------------

    def open(self, address: str, number: int, *, read: bool = False) -> ReceivingHandover:
        """A request has come, whose prefill server is found at a bootstrap address.

        Args:
            read: its KV is read also where servers push: it comes from another decode server.
        """
        handover = ReceivingHandover(address, number, read or self._pushed is None)
        self._loop.call_soon_threadsafe(self._start, handover)
        return handover

    def read(self, handover: ReceivingHandover, wanted: Wanted) -> None:
        """Slots and row are set aside: have them filled. The hand-over is `ReceiverState.READY`, or `WAITING`
        where the other side writes.
        """
        with self._lock:
            if handover.state is not (ReceiverState.READY if handover.read else ReceiverState.WAITING):
                return
            handover.wanted = wanted
            self._move(handover, Event.ALLOCATED)
            asked = handover.asked
        assert asked is not None
        self._loop.call_soon_threadsafe(asked.set)

    def abort(self, handover: ReceivingHandover, reason: str) -> None:
        """The engine gives the request up; its slots are free once the hand-over has ended."""
        with self._lock:
            if FACTS[handover.state].end:
                return
            handover.reason = handover.reason or reason
            self._move(handover, Event.ABORT)
        self._loop.call_soon_threadsafe(self._cancel, handover)

    def weights_changed(self, weights: Weights) -> None:
        """From now on requests go on with these weights; KV of others that is on its way is given up."""
        self.weights = weights
        for handover in list(self._live):
            self.abort(handover, "the weights of the decode server were changed during the hand-over")

    def settle(self, handover: ReceivingHandover) -> None:
        """Return when nothing of ours uses the hand-over's slots any more; give it up if it has not ended."""
        with self._lock:
            busy = FACTS[handover.state].pins and not FACTS[handover.state].end
        self.abort(handover, "another rank has lost the request")
        if busy and not handover.stopped.wait(SETTLE_SECONDS):
            raise RuntimeError(
                f"hand-over {handover.number}: a read did not stop within {SETTLE_SECONDS:.0f} s"
            )

    # -- the event loop ---------------------------------------------------------------------------

    async def close(self) -> None:
        """End all hand-overs."""
        tasks = [handover.task for handover in self._live if handover.task is not None]
        for handover in list(self._live):
            self.abort(handover, "the server stops")
            self._cancel(handover)
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, handover: ReceivingHandover) -> None:
        if FACTS[handover.state].end:
            handover.stopped.set()
            return
        handover.asked = asyncio.Event()
        self._live.add(handover)
        handover.task = asyncio.create_task(self._run(handover))
        # Also when it is cancelled before its first step.
        handover.task.add_done_callback(lambda _: self._leave(handover))

    def _leave(self, handover: ReceivingHandover) -> None:
        self._live.discard(handover)
        handover.stopped.set()
        self._wake()

    def _cancel(self, handover: ReceivingHandover) -> None:
        if handover.task is not None:
            handover.task.cancel()

    async def _run(self, handover: ReceivingHandover) -> None:
        peer: PrefillPeer | None = None
        refused = False
        try:
            peer = await self._peers.get(handover.address)
            try:
                ready = await self._take_part(handover, peer)
            except SessionEndedError:
                # While we stood still prefill took us for dead, which we had not noticed when we asked.
                peer = await self._peers.get(handover.address)
                ready = await self._take_part(handover, peer)
            if handover.read:
                self._moved(handover, Event.OFFER)
                offered = self._clock.monotonic()
                await self._asked(handover, peer, ready)
                started = self._clock.monotonic()
                handover.stages, handover.waited = ready[0].stages, started - offered
                await self._read(handover, peer, ready)
                handover.seconds = self._clock.monotonic() - started
            else:
                assert self._pushed is not None
                await self._let_write(handover, peer, *self._pushed)
            self._moved(handover, Event.ARRIVED)
            self.ends["held"] += 1
        except asyncio.CancelledError:
            self._ends(handover, Event.ABORT, "aborted")
        except PeerGoneError as error:
            self._ends(handover, Event.PEER_DEAD, str(error))
        except SglangExtError as error:
            refused = isinstance(error, RefusedError)
            self._ends(handover, Event.FAULT, str(error))
        except Exception as error:  # noqa: BLE001 - a hand-over that ends silently would keep its slots
            self._ends(handover, Event.FAULT, f"{type(error).__name__}: {error}")
        finally:
            self._leave(handover)
        # A hand-over that refused us may be another request's: leave it alone.
        if handover.state is ReceiverState.FAILED and not refused and peer is not None and not peer.gone:
            await peer.abort(handover.number, self._epoch, handover.reason)

    async def _take_part(self, handover: ReceivingHandover, peer: PrefillPeer) -> list[Ready]:
        """Send `Join`, or `Meet` where prefill writes; returns when prefill has answered it."""
        if not handover.read:
            await peer.meet(handover.number, self._epoch, self.weights)
        self._moved(handover, Event.JOINED)
        if not handover.read:
            return []
        return await peer.join(handover.number, self._epoch, self.weights)

    async def _let_write(
        self, handover: ReceivingHandover, peer: PrefillPeer, claims: Claims, control: str
    ) -> None:
        """Push: wait for slots, name them to prefill, and return when they are filled."""
        assert handover.asked is not None
        while not handover.asked.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await handover.asked.wait()
            if peer.gone:
                raise PeerGoneError("the prefill server is gone")
        wanted = handover.wanted
        assert wanted is not None
        await until_passed(wanted.passed)
        with self._staged(wanted) as staged:
            into = (POOL, wanted.pages) if staged is None else (STAGING, staged)
            ready, *_ = await self._claimed(handover, peer, claims, control, *into)
            if staged is not None and self._staging is not None:
                await self._staging.unpack(staged, wanted.pages)
        handover.stages = ready.stages
        self._keep(handover, wanted, ready)

    @contextlib.contextmanager
    def _staged(self, wanted: Wanted) -> Iterator[Ids | None]:
        """Blocks of staging for the wanted pages, while the block runs; None where staging is not used, or is
        full.
        """
        staged = self._staging.take(wanted.pages.size) if self._staging is not None else None
        try:
            yield staged
        finally:
            if staged is not None and self._staging is not None:
                self._staging.give(staged)

    async def _claimed(
        self,
        handover: ReceivingHandover,
        peer: PrefillPeer,
        claims: Claims,
        control: str,
        pool: str,
        blocks: Ids,
    ) -> list[Ready]:
        """Have prefill fill blocks of ours; no rank writes to them when this returns or raises."""
        wanted = handover.wanted
        assert wanted is not None
        name = f"{handover.number:x}"
        claims.add(name, handover, pool, blocks, peer.writers)
        try:
            ready = await peer.push(
                handover.number, self._epoch, control, pack_ids(blocks), wanted.skip, pool
            )
        except BaseException as error:
            # It has failed, but its slots are in use until no rank writes there any more.
            self._stops(handover, error)
            removing = asyncio.ensure_future(_at_last(claims.remove(name)))
            # Where one of several refuses, the others have taken us for theirs.
            if not peer.gone and (len(peer.ranks) > 1 or not isinstance(error, RefusedError)):
                await peer.abort(handover.number, self._epoch, str(error) or "given up")
            await _at_last(_wait_for(removing))
            raise
        await _at_last(claims.remove(name))
        return ready

    async def _asked(self, handover: ReceivingHandover, peer: PrefillPeer, ready: Sequence[Ready]) -> None:
        """Wait until the engine has slots; meanwhile the KV stays leased."""
        assert handover.asked is not None
        while True:
            try:
                async with asyncio.timeout(RENEW_SECONDS):
                    await handover.asked.wait()
                    return
            except TimeoutError:
                offers = [each.offer for each in ready if each.offer is not None]
                await peer.instance.keep(offers, LEASE_SECONDS)

    async def _read(self, handover: ReceivingHandover, peer: PrefillPeer, ready: Sequence[Ready]) -> None:
        wanted = handover.wanted
        assert wanted is not None
        name = f"{handover.number:x}"
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
                        await peer.instance.finish(name, moving_seconds(READ_SECONDS, nbytes))
                except BaseException:
                    await peer.instance.drop(name)
                    raise
                if staged is not None and self._staging is not None:
                    await self._staging.unpack(staged, wanted.pages)
            reading = [at for at, each in enumerate(ready) if each.offer is not None]
        self._keep(handover, wanted, ready[0])
        peer.done(handover.number, self._epoch, [at for at in range(len(ready)) if at not in reading])

    def _keep(self, handover: ReceivingHandover, wanted: Wanted, ready: Ready) -> None:
        """Keep the results that prefill's first rank has computed beside the KV."""
        if ready.logprobs is not None:
            require_sound(ready.logprobs)
        handover.logprobs = ready.logprobs
        self._rows.write(wanted.row, ready.metadata)

    def _moved(self, handover: ReceivingHandover, event: Event) -> None:
        """Move on; a hand-over that was given up meanwhile ends as a cancelled one."""
        with self._lock:
            if FACTS[handover.state].end or handover.state is ReceiverState.STOPPING:
                raise asyncio.CancelledError
            self._move(handover, event)
        self._wake()

    def _stops(self, handover: ReceivingHandover, error: BaseException) -> None:
        with self._lock:
            if not FACTS[handover.state].end:
                handover.reason = handover.reason or str(error)
                self._move(handover, Event.PEER_DEAD if isinstance(error, PeerGoneError) else Event.FAULT)

    def _ends(self, handover: ReceivingHandover, event: Event, reason: str) -> None:
        with self._lock:
            self.ends[event.value] += 1
            handover.reason = handover.reason or reason
            self._move(handover, event)
            if handover.state is ReceiverState.STOPPING:
                self._move(handover, Event.STOPPED)

    @staticmethod
    def _move(handover: ReceivingHandover, event: Event) -> None:
        state = after(handover.state, event)
        assert isinstance(state, ReceiverState)
        handover.state = state


async def _wait_for(task: asyncio.Future[None]) -> None:
    await task


async def _at_last(work: Coroutine[Any, Any, None]) -> None:
    """Run something to its end, however often we are cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)


def after_skip(offer: Offer, wanted: Wanted) -> Offer:
    """The offer without the pages that decode has already.

    Raises:
        PeerProtocolError: the remaining pages do not match the slots set aside; the two sides saw other
            prompts.
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
