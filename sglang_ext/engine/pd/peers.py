"""Decode's connections to prefill servers: found by bootstrap address, made once, remade after a death."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_ext.disagg.errors import (
    PeerGoneError,
    PeerProtocolError,
    RefusedError,
    SessionEndedError,
    TransferDeadlineError,
    TransferError,
)
from sglang_ext.disagg.handover import CONNECT_SECONDS, LEASE_SECONDS
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transfer.link import Link
from sglang_ext.engine.pd.messages import (
    PROTOCOL,
    Abort,
    Done,
    Join,
    Lookup,
    Meet,
    Ok,
    Push,
    RankInfo,
    Ready,
    Return,
    Returned,
    Topology,
    Weights,
    other_protocol,
)
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.protocol.cluster import dp_rank_of, server_of
from sglang_ext.protocol.compatibility import in_words, setting_differences
from sglang_ext.tasks import Tasks
from sglang_ext.wire import pack_ids

log = logging.getLogger(__name__)

LOOKUP_SECONDS = 2.0
RETRY_SECONDS = 0.2
WATCH_SECONDS = 0.25


@dataclass(frozen=True)
class Local:
    """This rank. metadata_bytes: of a row of SGLang's metadata buffers. settings: of the model, by name.
    components: of a model with windows or states, how the blocks of each pool lie; none for other models."""

    rank: int
    ranks: int
    page_tokens: int
    metadata_bytes: int
    mode: str = "pull"
    layout: str = "blocks"
    settings: Mapping[str, str] = field(default_factory=dict)
    components: Mapping[str, str] = field(default_factory=dict)

    @property
    def beside(self) -> tuple[str, ...]:
        """The pools from which hand-overs move blocks beside the pages."""
        return tuple(name for name in self.components if name != HBM_POOL)


class PrefillPeer:
    """One connected prefill server."""

    def __init__(self, ranks: Sequence[RankInfo], instance: Instance, local: Local) -> None:
        self.ranks = tuple(ranks)
        self.instance = instance
        self._local = local
        pools = (HBM_POOL, *local.beside)
        self._needed = {part.rank for pool in pools for part in instance.plan(pool, pool).ranks}

    def __repr__(self) -> str:
        return f"<PrefillPeer {self.instance!r}>"

    @property
    def gone(self) -> bool:
        """Whether the connection is gone, and has to be made again."""
        return self.instance.gone

    def gives(self, offer: Offer, pool: str) -> bool:
        """Whether this rank reads an offer's bytes into a pool of its own: a rank offers blocks of all pools,
        and this rank may read a pool from another rank that has the same."""
        parts = self.instance.plan(pool, offer.pool).ranks
        return any(self.instance.links[part.rank].who.rank == offer.rank for part in parts)

    async def join(self, handover: int, epoch: bytes, weights: Weights) -> list[Ready]:
        """Take part in a hand-over at every rank; returns when all have computed it, with our `weights`.

        Raises:
            RefusedError: a rank has no such hand-over, or has lost it; no rank waits for us then.
            SessionEndedError: a rank has ended our connection before; join by another one.
            PeerGoneError.
        """
        local = self._local
        return await self._ready(
            handover,
            epoch,
            [
                Join(handover, epoch, link.session, local.rank, local.ranks, at in self._needed, weights)
                for at, link in enumerate(self.instance.links)
            ],
        )

    async def meet(self, handover: int, epoch: bytes, weights: Weights) -> None:
        """Take part, at every rank, in a hand-over whose KV will be pushed; `weights` are ours.

        Raises:
            RefusedError, SessionEndedError, PeerGoneError: as `join`; no rank waits for us then.
        """
        links, ranks = self.instance.links, self._local.ranks
        answers = await asyncio.gather(
            *(link.ask_for(Ok, Meet(handover, epoch, link.session, ranks, weights), None) for link in links),
            return_exceptions=True,
        )
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            # Another decode server may have been first elsewhere: neither is to wait for the other.
            met = [link for link, answer in zip(links, answers, strict=True) if isinstance(answer, Ok)]
            rejoins = isinstance(errors[0], SessionEndedError)
            await _abort(met, Abort(handover, epoch, str(errors[0])[:500], rejoins))
            raise errors[0]

    @property
    def writers(self) -> int:
        """How many ranks fill a page of ours between them, when KV is pushed."""
        return len(self._needed)

    async def push(
        self, handover: int, epoch: bytes, control: str, pages: bytes, skip: int, pool: str
    ) -> list[Ready]:
        """Have pages of a pool of ours filled, in a hand-over that was met; returns when they are, by all
        ranks that have a part of them.

        Raises:
            RefusedError, PeerGoneError: as `join`; ranks may still write until their grants are revoked.
        """
        nothing = pack_ids(np.empty(0, np.int64))
        return await self._ready(
            handover,
            epoch,
            [
                Push(handover, epoch, control, pages if at in self._needed else nothing, skip, pool)
                for at in range(len(self.ranks))
            ],
        )

    async def _ready(self, handover: int, epoch: bytes, messages: Sequence[Join | Push]) -> list[Ready]:
        """Ask each rank; returns when all have answered, or raises the first error. When one rank refuses,
        the hand-over is over at the others too: they get an `Abort`. The refusing rank gets none, since it
        may have another's request by that number.
        """
        offers: list[Offer] = []

        async def ask_for_offers(link: Link, message: Join | Push) -> Ready:
            ready = await link.ask_for(Ready, message, None)
            offers.extend(ready.offers)
            return ready

        asks = [
            asyncio.ensure_future(ask_for_offers(link, message))
            for link, message in zip(self.instance.links, messages, strict=True)
        ]
        try:
            # A rank may answer long before another: the first stage of a pipeline before the last one.
            async with self.instance.keeping(offers, LEASE_SECONDS):
                return await asyncio.gather(*asks)
        except BaseException as error:
            for ask in asks:
                ask.cancel()
            answers = await asyncio.gather(*asks, return_exceptions=True)
            rejoins = isinstance(error, SessionEndedError)
            if rejoins or isinstance(error, RefusedError):
                links = zip(self.instance.links, answers, strict=True)
                joined = [link for link, answer in links if not isinstance(answer, RefusedError)]
                await _abort(joined, Abort(handover, epoch, str(error)[:500], rejoins))
            raise

    def done(self, handover: int, epoch: bytes, ranks: Sequence[int]) -> None:
        """Send `Done` for a hand-over to some ranks, without waiting for their answers."""
        for at in ranks:
            link = self.instance.links[at]
            link.spawn(link.ask(Done(handover, epoch), LOOKUP_SECONDS))

    async def give_back(self, message: Return, seconds: float) -> Returned:
        """Offer this rank's part of a request's KV; returns when it has been read, or is not wanted.

        Raises:
            RefusedError, TransferDeadlineError, PeerGoneError: it may have been read.
        """
        answer = await self.instance.links[0].ask(message, seconds)
        if not isinstance(answer, Returned):
            raise PeerProtocolError("a prefill rank answers a return with something else")
        return answer

    async def abort(self, handover: int, epoch: bytes, reason: str) -> None:
        """Send an `Abort` to every rank: the request is over here."""
        await _abort(self.instance.links, Abort(handover, epoch, reason[:500]))

    async def ended(self) -> None:
        """Return when it is gone, or disconnected."""
        while not self.instance.gone:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(WATCH_SECONDS)


async def _abort(links: Sequence[Link], message: Abort) -> None:
    """Send an `Abort` to some ranks; a rank that does not answer delays no other."""

    async def say(link: Link) -> None:
        with contextlib.suppress(TransferError):
            await link.ask(message, LOOKUP_SECONDS)

    await asyncio.gather(*(say(link) for link in links))


class PrefillPeers:
    """Prefill servers by bootstrap address, see `protocol.cluster.bootstrap_of_replica`."""

    def __init__(self, endpoint: Endpoint, local: Local) -> None:
        self._endpoint = endpoint
        self._local = local
        self._peers: dict[str, PrefillPeer] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._watches = Tasks()
        self.connects: Counter[str] = Counter()
        """Connections that were made, by why: `ahead` of requests, or for a `request` that waited for it."""

    def __repr__(self) -> str:
        return f"<PrefillPeers {', '.join(self._peers) or 'none'}>"

    @property
    def connected(self) -> tuple[PrefillPeer, ...]:
        """Connected servers, as far as is known."""
        return tuple(peer for peer in self._peers.values() if not peer.gone)

    def known(self, address: str) -> PrefillPeer | None:
        """The server behind an address, if it is connected. From any thread."""
        peer = self._peers.get(address)
        return None if peer is None or peer.gone else peer

    async def get(self, address: str, seconds: float | None = None, why: str = "request") -> PrefillPeer:
        """The server behind a bootstrap address, which is connected if it is not; why: see `connects`.

        Raises:
            RefusedError: it does not fit this one. TransferError: it is not reached within `seconds`, or
                CONNECT_SECONDS.
        """
        seconds = CONNECT_SECONDS if seconds is None else seconds
        known = self._peers.get(address)
        if known is not None and not known.gone:
            return known
        async with self._locks.setdefault(address, asyncio.Lock()):
            known = self._peers.get(address)
            if known is not None and not known.gone:
                return known
            if known is not None:
                await self._retire(address, known)
            try:
                async with asyncio.timeout(seconds):
                    peer = self._peers[address] = await self._connect(address)
            except TimeoutError:
                raise PeerGoneError(
                    f"no prefill server answers at {address} within {seconds:.0f} s"
                ) from None
            self.connects[why] += 1
            self._watches.start(self._watching(address, peer), name="kv-pd-watch")
            return peer

    async def close(self) -> None:
        """Disconnect from all."""
        peers, self._peers = list(self._peers.values()), {}
        await asyncio.gather(*(peer.instance.close() for peer in peers))
        # A connection that is being closed already is not broken off.
        await asyncio.gather(*self._watches, return_exceptions=True)

    async def _watching(self, address: str, peer: PrefillPeer) -> None:
        """Disconnect from a server that was given up. If it only stood still, it ends our hand-overs as soon
        as it goes on, and not only after it has missed us for a while.
        """
        await peer.ended()
        async with self._locks[address]:
            if self._peers.get(address) is peer:
                await self._retire(address, peer)

    async def _retire(self, address: str, peer: PrefillPeer) -> None:
        del self._peers[address]
        await peer.instance.close()

    async def _connect(self, address: str) -> PrefillPeer:
        ranks = await self._lookup(address)
        require_fit(ranks, self._local)
        instance = await self._endpoint.connect([rank.endpoint for rank in ranks])
        try:
            return PrefillPeer(ranks, instance, self._local)
        except BaseException:
            await instance.close()
            raise

    async def _lookup(self, address: str) -> tuple[RankInfo, ...]:
        """The ranks behind a bootstrap port; asks until the port answers and all ranks have registered."""
        client, lookup = self._endpoint.client(server_of(address)), Lookup(dp_rank_of(address) or 0)
        try:
            while True:
                try:
                    answer = await client.ask(lookup, LOOKUP_SECONDS)
                except TransferDeadlineError:
                    continue  # it stands still, or the question was lost with its connection
                except RefusedError as error:
                    if error.reason != "incomplete":
                        raise
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                if not isinstance(answer, Topology) or not answer.ranks:
                    raise PeerProtocolError(f"{address} does not answer with its ranks")
                return answer.ranks
        finally:
            await client.close()


def require_fit(ranks: Sequence[RankInfo], local: Local) -> None:
    """Raises:
    RefusedError: these ranks and a local one cannot hand requests over; the message names the difference.
    """
    first = ranks[0]
    if first.protocol != PROTOCOL:
        raise RefusedError("version", other_protocol(first.protocol))
    if first.page_tokens != local.page_tokens:
        raise RefusedError(
            "page_size",
            f"pages of {first.page_tokens} tokens there, {local.page_tokens} here; set --page-size alike",
        )
    if first.mode != local.mode:
        raise RefusedError("mode", f"{first.mode} there, {local.mode} here; set --kv-transfer-mode alike")
    if first.layout != local.layout:
        raise RefusedError(
            "layout",
            f"{first.layout} there, {local.layout} here; set --kv-transfer-layout alike",
        )
    if differing := setting_differences(first.settings, local.settings):
        values = in_words(differing, "there", "here")
        raise RefusedError(
            "settings",
            f"the models' settings differ: {values}; start both with one model, and with one "
            "--json-model-override-args",
        )
    if differing := setting_differences(first.components, local.components):
        values = in_words(differing, "there", "here")
        raise RefusedError(
            "components",
            f"the memory of windows or states differs: {values}; start both with one model and one "
            "--page-size, and with one --tp-size where ranks do not share all of it by heads",
        )
    if first.metadata_bytes != local.metadata_bytes:
        raise RefusedError("metadata", "the metadata rows differ; run one release, with the same model")
