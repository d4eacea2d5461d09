"""Push, on decode's side: prefill ranks write a request's KV into pages that decode has set aside for it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_ext.disagg.errors import PeerGoneError, RefusedError
from sglang_ext.disagg.handover import RENEW_SECONDS, Event
from sglang_ext.disagg.runs import Ids
from sglang_ext.engine.forward_fence import until_passed
from sglang_ext.engine.pd.landing import Landing, Wanted
from sglang_ext.engine.pd.messages import Ready, Weights
from sglang_ext.engine.pd.peers import PrefillPeer
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.tasks import at_last
from sglang_ext.wire import pack_ids


@dataclass(slots=True, eq=False)
class Claimable:
    """Pages that prefill ranks may write. unclaimed: how many ranks may still claim them."""

    pool: str
    blocks: Ids
    unclaimed: int
    writers: int = 0
    """Ranks that have claimed them, and may be writing."""
    free: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last of these has ended."""


class Claims:
    """Pages that prefill ranks may write (push): an `owner.Receiver` for pages that were named beforehand.

    Where prefill has more ranks than decode, each of several fills its heads of every page, by a grant of its
    own. The pages are free when all of them write no more.
    """

    def __init__(self, revoke: Callable[[str], Awaitable[None]]) -> None:
        """revoke: ends the grants of a name (`Owner.revoke`)."""
        self._named: dict[str, Claimable] = {}
        self._over: set[str] = set()
        self._revoke = revoke

    def add(self, name: str, pool: str, blocks: Ids, writers: int) -> None:
        """From now on so many prefill ranks may claim these blocks under this name."""
        self._named[name] = Claimable(pool, blocks, writers)

    def writers(self, name: str) -> int:
        """How many prefill ranks may be writing to the pages of this name."""
        return self._named[name].writers if name in self._named else 0

    async def remove(self, name: str) -> None:
        """Close the pages to new claims; returns when all ranks that have claimed them write no more."""
        known = self._named[name]
        self._over.add(name)
        try:
            if known.writers:
                await self._revoke(name)
            while known.writers:
                await known.free.wait()
        finally:
            self._over.discard(name)
            del self._named[name]

    async def claim(self, pool: str, blocks: Ids, request: str) -> float:
        """Grant pages until the hand-over ends: prefill may compute for longer than any fixed time."""
        known = self._named.get(request) if request not in self._over else None
        if known is None or known.pool != pool or not np.array_equal(known.blocks, blocks):
            raise RefusedError("blocks", f"no such pages were set aside for {request!r}")
        if not known.unclaimed:
            raise RefusedError("blocks", f"all who fill the pages of {request!r} have claimed them already")
        known.unclaimed -= 1
        known.writers += 1
        known.free.clear()
        return math.inf

    async def filled(self, pool: str, blocks: Ids, request: str) -> None:
        self._unclaim(request)

    async def discard(self, pool: str, blocks: Ids, request: str) -> None:
        self._unclaim(request)

    def _unclaim(self, name: str) -> None:
        known = self._named.get(name)
        if known is None:
            return
        known.writers -= 1
        if not known.writers:
            known.free.set()


class Granting:
    """How a decode rank gets KV that prefill writes.

    Args:
        claims: where prefill ranks claim pages.
        control: the address of our endpoint.
    """

    def __init__(self, landing: Landing, epoch: bytes, claims: Claims, control: str) -> None:
        self._landing = landing
        self._epoch = epoch
        self._claims = claims
        self._control = control

    async def take_part(
        self, handover: ReceivingHandover, peer: PrefillPeer, weights: Weights
    ) -> list[Ready]:
        """Send `Meet`; returns when prefill has answered it."""
        await peer.meet(handover.number, self._epoch, weights)
        handover.moved(Event.JOINED)
        return []

    async def receive(self, handover: ReceivingHandover, peer: PrefillPeer, _: Sequence[Ready]) -> None:
        """Wait for slots, name them to prefill, and return when they are filled."""
        while not handover.asked.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_SECONDS):
                    await handover.asked.wait()
            if peer.gone:
                raise PeerGoneError("the prefill server is gone")
        wanted = handover.wanted
        assert wanted is not None
        await until_passed(wanted.passed)
        async with self._landing.filling(wanted) as (pool, blocks):
            ready, *_ = await self._written(handover, wanted, peer, pool, blocks)
        handover.stages = ready.stages
        handover.logprobs = self._landing.keep(wanted, ready)

    async def _written(
        self, handover: ReceivingHandover, wanted: Wanted, peer: PrefillPeer, pool: str, blocks: Ids
    ) -> list[Ready]:
        """Have prefill fill blocks of ours; no rank writes to them when this returns or raises."""
        name, number = f"{handover.number:x}", handover.number
        self._claims.add(name, pool, blocks, peer.writers)
        try:
            ready = await peer.push(number, self._epoch, self._control, pack_ids(blocks), wanted.skip, pool)
        except BaseException as error:
            # It has failed, but its slots are in use until no rank writes there any more.
            handover.stops(error)
            removing = asyncio.ensure_future(at_last(self._claims.remove(name)))
            # Where one of several refuses, the others have taken us for theirs.
            if not peer.gone and (len(peer.ranks) > 1 or not isinstance(error, RefusedError)):
                await peer.abort(number, self._epoch, str(error) or "given up")
            await at_last(_wait_for(removing))
            raise
        await at_last(self._claims.remove(name))
        return ready


async def _wait_for(task: asyncio.Future[None]) -> None:
    await task
