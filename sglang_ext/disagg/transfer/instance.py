"""A connected peer instance: all of its ranks that this rank needs, and transfers in terms of blocks.

offers = one per rank, as the owner published them
instance.transfer(request, offers, "hbm", blocks)        TRANSFER; may be called per layer
await instance.complete(request, timeout)                COMPLETE: bytes in place, verified, lease released
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sglang_ext.disagg import reshard
from sglang_ext.disagg.errors import (
    PeerGoneError,
    PeerProtocolError,
    RangeError,
    RefusedError,
    StaleReadError,
    TransferError,
)
from sglang_ext.disagg.memory import RegionTable
from sglang_ext.disagg.messages import (
    Completed,
    Offer,
    Renew,
    Want,
)
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.tensors import PoolMeta
from sglang_ext.disagg.transfer.link import Link, Outcome
from sglang_ext.disagg.transfer.verify import Expect
from sglang_ext.wire import WireError, unpack_ids

log = logging.getLogger(__name__)

T = TypeVar("T")

RENEWALS = 10
"""Times that a lease is renewed in the time that it lives."""


@dataclass(slots=True)
class _Reading:
    """A request under way: the links that it uses, and the leases to release."""

    links: dict[int, Offer] = field(default_factory=dict)
    leases: set[tuple[int, int]] = field(default_factory=set)


class Instance:
    """All connected ranks of one peer instance, in rank order.

    replica: this rank's index, which spreads reads over ranks that hold the same bytes.
    """

    def __init__(
        self,
        links: Sequence[Link],
        pools: dict[str, PoolMeta],
        regions: RegionTable,
        replica: int,
        on_close: Callable[[Instance], None],
        use: str = "",
    ) -> None:
        self.use = use
        """The use that its bytes are counted under."""
        self.links = tuple(links)
        self._pools = pools
        self._regions = regions
        self._replica = replica
        self._plans: dict[tuple[str, str], reshard.Plan] = {}
        self._readings: dict[str, _Reading] = {}
        self._on_close = on_close

    def __repr__(self) -> str:
        return f"<Instance {self.name} ranks={len(self.links)} requests={len(self._readings)}>"

    @property
    def name(self) -> str:
        """The peer instance's id."""
        return self.links[0].who.instance

    @property
    def gone(self) -> bool:
        """Whether a rank is gone, so that the instance has to be connected again."""
        return any(link.peer.gone is not None for link in self.links)

    def plan(self, local: str, remote: str) -> reshard.Plan:
        """The part of the peer's pool `remote` that this rank's pool `local` takes; decided once.

        Raises:
            RefusedError: the pools do not match. PeerProtocolError: the peer's metadata make no sense.
        """
        found = self._plans.get((local, remote))
        if found is None:
            mine = self._pools[local].namespace
            for theirs in [link.pools[remote] for link in self.links if remote in link.pools]:
                if local == remote and theirs.namespace != mine:
                    raise RefusedError(
                        "namespace", f"the KV in {remote!r} is of {theirs.namespace!r} there, {mine!r} here"
                    )
            found = self._plans[local, remote] = reshard.plan(
                self._pools[local],
                self._regions.locate,
                [link.pools.get(remote) for link in self.links],
                [link.locate for link in self.links],
                self._replica,
            )
        return found

    async def offer(self, rank: int, request: str, pool: str, seconds: float = 5.0) -> Offer:
        """Ask a rank for the blocks that it has published for a request.

        Raises:
            RefusedError: nothing, or no longer.
        """
        link = self.links[rank]
        return await link.ask_for(Offer, Want(link.session, request, pool), seconds)

    def transfer(
        self,
        request: str,
        offers: Sequence[Offer],
        pool: str,
        blocks: Ids,
        layers: Sequence[int] | None = None,
    ) -> None:
        """TRANSFER: read the offered blocks into `blocks` of our `pool`.

        offers: of the ranks that the plan needs, one each, for the same tokens. layers: of the whole model,
        for by-layer hand-over; None for all. Returns at once; `complete` or `landed` waits.

        Raises:
            RangeError, RefusedError, PeerGoneError: nothing was queued.
        """
        by_rank = {o.rank: o for o in offers}
        plan = self.plan(pool, offers[0].pool) if offers else reshard.Plan(())
        prepared = []
        for part in plan.ranks:
            link, offer = self.links[part.rank], by_rank.get(self.links[part.rank].who.rank)
            if offer is None:
                raise RangeError(f"no offer of rank {link.who.rank}, which holds part of these blocks")
            if offer.epoch != link.who.epoch:
                raise PeerGoneError(f"the offer is of another epoch of {offer.instance} than the connection")
            if offer.pool != offers[0].pool:
                # Each rank chooses from which pool it offers; the bytes of a rank are the same in all.
                found = self.plan(pool, offer.pool).rank(part.rank)
                if found is None:
                    raise RangeError(f"rank {link.who.rank} holds no part of these blocks in {offer.pool!r}")
                part = found
            meta = link.pools[offer.pool]
            try:
                remote = unpack_ids(offer.blocks, meta.blocks)
                generations = unpack_ids(offer.generations)
            except WireError as error:
                raise PeerProtocolError(str(error)) from None
            if generations.size != remote.size:
                raise PeerProtocolError("the offer has not one generation per block")
            runs = part.runs(remote, blocks, layers, link.peer.queue.coalescing)
            prepared.append((part.rank, link, offer, runs, Expect(meta.generations, remote, generations)))
        reading = self._readings.setdefault(request, _Reading())
        for rank, link, offer, runs, expect in prepared:
            fresh = rank not in reading.links
            link.peer.transfer(request, runs, expect=expect if fresh else None)
            reading.links[rank] = offer
            reading.leases.add((rank, offer.lease))

    async def landed(self, request: str, seconds: float) -> None:
        """Return when every byte of the request is in place and verified. The leases stay.

        Raises:
            StaleReadError, TransferDeadlineError, PeerGoneError, PeerProtocolError: discard the bytes;
            nothing writes to the blocks any more.
        """
        reading = self._readings.pop(request, None)
        if reading is None:
            return
        await self._wait(request, reading, seconds)

    async def complete(self, request: str, seconds: float) -> Outcome:
        """COMPLETE: as `finish`, and wait for the acknowledgements."""
        # Shielded: a caller that stops waiting for the acknowledgement has the bytes, and the owner gets its
        # COMPLETE.
        outcomes = await asyncio.gather(*(asyncio.shield(a) for a in await self.finish(request, seconds)))
        for worse in (Outcome.UNACKNOWLEDGED, Outcome.LEASE_OVER):
            if worse in outcomes:
                return worse
        return Outcome.RELEASED if outcomes else Outcome.LEASE_OVER

    async def finish(self, request: str, seconds: float) -> list[asyncio.Task[Outcome]]:
        """As `landed`, then release the leases: COMPLETE is on its way when this returns. A caller that wants
        the bytes need not wait for its acknowledgements, which take a round trip.

        The leases are released also when the bytes have to be discarded.
        """
        reading = self._readings.pop(request, None)
        if reading is None:
            return []
        try:
            await self._wait(request, reading, seconds)
        except BaseException:
            self._release(request, reading)
            raise
        return [
            self.links[r].start(self.links[r].complete(request, lease, False, seconds))
            for r, lease in sorted(reading.leases)
        ]

    async def drop(self, request: str) -> None:
        """Give up a request that will have no COMPLETE; returns when nothing writes to its blocks any
        more.
        """
        reading = self._readings.pop(request, None)
        if reading is not None:
            await asyncio.gather(*(self.links[rank].peer.drop(request) for rank in reading.links))
            self._release(request, reading)

    async def renew(self, offer: Offer, seconds: float) -> bool:
        """Keep an offer's lease for another `seconds`; False when it is over."""
        link = next((x for x in self.links if x.who.rank == offer.rank), None)
        if link is None:
            return False
        reply = await link.ask(Renew(link.session, offer.lease, int(seconds * 1000)), seconds)
        return isinstance(reply, Completed) and reply.released

    async def keep(self, offers: Sequence[Offer], seconds: float) -> None:
        """Keep the leases of offers for another `seconds`.

        Raises:
            StaleReadError: one is over. TransferError: its owner does not answer.
        """
        for offer in offers:
            if not await self.renew(offer, seconds):
                raise StaleReadError(offer.request, 1, 1)

    @contextlib.asynccontextmanager
    async def keeping(self, offers: Sequence[Offer], seconds: float) -> AsyncIterator[None]:
        """Keep leases while the block runs, `seconds` at a time: a long read takes longer than they live."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(seconds / RENEWALS)
                # A lease that is over, or a peer that is gone, is found out by the read.
                with contextlib.suppress(TransferError):
                    await self.keep(offers, seconds)

        task = asyncio.create_task(renew(), name="kv-renew")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        """Disconnect from every rank."""
        await asyncio.gather(*(link.close() for link in self.links))
        self._on_close(self)

    def check(self) -> None:
        """Verify the state of every rank's connection."""
        for link in self.links:
            link.peer.check()

    async def _wait(self, request: str, reading: _Reading, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        peers = [self.links[rank].peer for rank in reading.links]
        if len(peers) == 1:
            await peers[0].landed(request, deadline)
            return
        waits = [asyncio.ensure_future(p.landed(request, deadline)) for p in peers]
        try:
            await asyncio.gather(*waits)
        except BaseException:
            for wait in waits:
                wait.cancel()
            await _settle(waits)
            raise

    def _release(self, request: str, reading: _Reading) -> None:
        for rank, lease in sorted(reading.leases):
            link = self.links[rank]
            if link.peer.gone is None:
                link.spawn(link.complete(request, lease, True, 5.0))


async def _settle(waits: Sequence[asyncio.Future[None]]) -> None:
    """Wait for all, however often we are cancelled meanwhile: their local ranges are in use until then."""
    while pending := [w for w in waits if not w.done()]:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait(pending)
