"""Pull, on decode's side: a request's KV is read from the pages that prefill has leased."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sglang_ext.clock import Clock
from sglang_ext.disagg.handover import LEASE_SECONDS, READ_SECONDS, RENEW_SECONDS, Event, moving_seconds
from sglang_ext.engine.forward_fence import until_passed
from sglang_ext.engine.pd.landing import Landing, after_skip
from sglang_ext.engine.pd.messages import Ready, Weights
from sglang_ext.engine.pd.peers import PrefillPeer
from sglang_ext.engine.pd.receiving_handover import ReceivingHandover


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
            async with self._landing.filling(wanted) as (pool, blocks):
                peer.instance.transfer(name, offers, pool, blocks)
                try:
                    async with peer.instance.keeping(offers, LEASE_SECONDS):
                        seconds = moving_seconds(READ_SECONDS, self._landing.nbytes(wanted))
                        await peer.instance.finish(name, seconds)
                except BaseException:
                    await peer.instance.drop(name)
                    raise
            reading = [at for at, each in enumerate(ready) if each.offer is not None]
        handover.logprobs = self._landing.keep(wanted, ready[0])
        peer.done(handover.number, self._epoch, [at for at in range(len(ready)) if at not in reading])
