"""Pull, on decode's side: a request's KV is read from the pages that prefill has leased, and its rows in
other pools from their blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

from sglang_ext.clock import Clock
from sglang_ext.disagg.errors import PeerProtocolError
from sglang_ext.disagg.handover import LEASE_SECONDS, READ_SECONDS, RENEW_SECONDS, Event, moving_seconds
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transfer.staging import STAGING
from sglang_ext.engine.forward_fence import until_passed
from sglang_ext.engine.pd.landing import Landing, PoolRows, Wanted, after_skip
from sglang_ext.engine.pd.messages import Ready, Weights
from sglang_ext.engine.pd.peers import PrefillPeer
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.tasks import at_last

_Read: TypeAlias = tuple[list[Offer], PoolRows]
"""Offers of one pool, one of each rank, and where their blocks land."""


class Reading:
    """How a decode rank gets KV that it reads. epoch: the rank's."""

    def __init__(self, landing: Landing, epoch: bytes, clock: Clock) -> None:
        self._landing = landing
        self._epoch = epoch
        self._clock = clock

    async def take_part(
        self, handover: ReceivingHandover, peer: PrefillPeer, weights: Weights
    ) -> list[Ready]:
        """Send `Join`; returns when prefill has computed the request."""
        handover.moved(Event.JOINED)
        return await peer.join(handover.number, self._epoch, weights)

    async def receive(self, handover: ReceivingHandover, peer: PrefillPeer, ready: Sequence[Ready]) -> None:
        """Wait for slots, and read the KV into them."""
        handover.moved(Event.OFFER)
        offered = self._clock.monotonic()
        await self._asked(handover, peer, ready)
        started = self._clock.monotonic()
        handover.stages, handover.waited = ready[0].stages, started - offered
        await self._read(handover, peer, ready)
        handover.seconds = self._clock.monotonic() - started

    async def _asked(self, handover: ReceivingHandover, peer: PrefillPeer, ready: Sequence[Ready]) -> None:
        """Wait until the engine has slots; meanwhile the KV stays leased."""
        while True:
            try:
                async with asyncio.timeout(RENEW_SECONDS):
                    await handover.asked.wait()
                    return
            except TimeoutError:
                await peer.instance.keep([offer for each in ready for offer in each.offers], LEASE_SECONDS)

    async def _read(self, handover: ReceivingHandover, peer: PrefillPeer, ready: Sequence[Ready]) -> None:
        wanted = handover.wanted
        assert wanted is not None
        offers = [offer for each in ready for offer in each.offers]
        pages = [offer for offer in offers if offer.pool in (HBM_POOL, STAGING)]
        pages = [after_skip(offer, wanted.skip, wanted.pages.size) for offer in pages]
        beside = _beside(offers, wanted)
        await until_passed(wanted.passed)
        read: set[tuple[int, int]] = set()
        if (wanted.pages.size and pages) or beside:
            async with self._landing.filling(wanted) as (pool, blocks):
                reads = [*beside, (pages, PoolRows(pool, blocks))] if blocks.size and pages else beside
                await self._moved(handover, peer, reads, self._landing.nbytes(wanted))
            read = {
                (offer.rank, offer.lease) for of, to in reads for offer in of if peer.gives(offer, to.pool)
            }
        handover.logprobs = self._landing.keep(wanted, ready[0])
        # COMPLETE of all of a rank's leases says the same.
        rest = [
            at
            for at, each in enumerate(ready)
            if not each.offers or any((offer.rank, offer.lease) not in read for offer in each.offers)
        ]
        peer.done(handover.number, self._epoch, rest)

    async def _moved(
        self, handover: ReceivingHandover, peer: PrefillPeer, reads: Sequence[_Read], nbytes: int
    ) -> None:
        """Read all at once; returns when every byte is in place, and nothing writes there when it raises."""
        instance, names = peer.instance, [f"{handover.number:x} {to.pool}" for _, to in reads]
        try:
            for name, (offers, to) in zip(names, reads, strict=True):
                instance.transfer(name, offers, to.pool, to.rows)
            async with instance.keeping([offer for offers, _ in reads for offer in offers], LEASE_SECONDS):
                for name in names:
                    await instance.finish(name, moving_seconds(READ_SECONDS, nbytes))
        except BaseException:
            await at_last(_dropped(instance, names))
            raise


def _beside(offers: Sequence[Offer], wanted: Wanted) -> list[_Read]:
    """The offers of other pools than the pages', with their place here.

    Raises:
        PeerProtocolError: another pool is offered than there is a place for, or less or more of it.
    """
    theirs = {offer.pool for offer in offers} - {HBM_POOL, STAGING}
    if theirs != {each.pool for each in wanted.beside}:
        raise PeerProtocolError(
            f"prefill hands over {sorted(theirs)} beside the pages, decode has other room"
        )
    return [
        ([after_skip(offer, 0, each.rows.size) for offer in offers if offer.pool == each.pool], each)
        for each in wanted.beside
    ]


async def _dropped(instance: Instance, names: Sequence[str]) -> None:
    await asyncio.gather(*(instance.drop(name) for name in names))
