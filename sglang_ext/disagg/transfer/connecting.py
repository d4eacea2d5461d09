"""CONNECT from the reader's side: the handshake with one rank, and the choice of a transport."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping

from zmq.asyncio import Context

from sglang_ext.addresses import host_of
from sglang_ext.disagg.errors import (
    PeerGoneError,
    PeerProtocolError,
    RefusedError,
    TransferError,
    TransportUnavailableError,
)
from sglang_ext.disagg.generations import HEADER_BYTES, header
from sglang_ext.disagg.memory import RegionTable, SharedMemory
from sglang_ext.disagg.messages import VERSION, Bye, Connect, Connected, Identity
from sglang_ext.disagg.tensors import PoolMeta, dtypes, pool_strided
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.control import ControlClient, Messages
from sglang_ext.disagg.transfer.link import Link
from sglang_ext.disagg.transfer.peer import Peer
from sglang_ext.disagg.transfer.verify import Scratch, header_runs
from sglang_ext.disagg.transports import CancelToken, Channel, PeerInfo, Transport, TransportName
from sglang_ext.disagg.transports.select import NO_TRANSPORT, by_side, way_out


class Connector:
    """Makes the connections of one endpoint.

    identity: the endpoint's description in CONNECT. control, scratch: its region 0, and the places in it
    where headers and counters land. pools: its own, whose dtypes a peer's pools of the same names must have.
    messages: the other messages, besides transfers', of a connection.
    """

    def __init__(
        self,
        context: Context,
        config: EndpointConfig,
        identity: Callable[[], Identity],
        regions: RegionTable,
        control: SharedMemory,
        scratch: Scratch,
        pools: Mapping[str, PoolMeta],
        transports: Mapping[TransportName, Transport],
        messages: Messages,
    ) -> None:
        self._context = context
        self._messages = messages
        self._config = config
        self._identity = identity
        self._regions = regions
        self._control = control
        self._scratch = scratch
        self._metas = pools
        self._transports = transports

    async def connect(self, address: str, only: Collection[TransportName] = ()) -> Link:
        """CONNECT to one rank. only: the transports to offer; empty for all.

        Raises:
            RefusedError, TransportUnavailableError, PeerGoneError, TransferDeadlineError, PeerProtocolError
        """
        holder: list[Link] = []
        client = ControlClient(
            self._context,
            address,
            self._config.keys,
            lambda m: holder[0].unasked(m) if holder else None,
            self._messages,
        )
        try:
            link = await self._handshake(address, client, only)
        except BaseException:
            await client.close()
            raise
        holder.append(link)
        return link

    async def _handshake(self, address: str, client: ControlClient, only: Collection[TransportName]) -> Link:
        offers, reasons = offers_of({n: t for n, t in self._transports.items() if not only or n in only})
        try:
            try:
                reply = await client.ask(
                    Connect(self._identity(), {str(n): o for n, o in offers.items()}),
                    self._config.connect_timeout,
                )
            except RefusedError as error:
                raise self._with_own_reasons(error, reasons, offers) from None
            if not isinstance(reply, Connected):
                raise PeerProtocolError(f"expected CONNECTED, got {type(reply).__name__}")
            self._agree(reply.who)
            who = reply.who
            info = PeerInfo(who.instance, who.epoch, who.host, host_of(address), who.pid, who.regions)
            opening = asyncio.create_task(asyncio.to_thread(self._open, info, reply, offers, reasons))
            try:
                channel = await asyncio.shield(opening)
            except BaseException:
                # If this was cancelled, the thread goes on, and the channel that it opens has no user.
                await asyncio.wait([opening])
                if opening.exception() is None:
                    opening.result().close()
                with contextlib.suppress(TransferError):
                    await client.ask(Bye(reply.session), self._config.connect_timeout)
                raise
        except BaseException:
            for name, offer in offers.items():
                self._transports[name].withdraw(offer)
            raise
        for name, offer in offers.items():
            if name != channel.name:
                self._transports[name].withdraw(offer)
        patience = self._config.patience(near=who.host == self._identity().host)
        peer = Peer(
            info,
            channel,
            self._regions,
            self._scratch,
            piece_bytes=self._config.piece_bytes,
            coalescing=self._config.coalescing,
            inline_bytes=self._config.inline_bytes,
        )
        return Link(who, reply.session, client, peer, self._config.heartbeat, patience)

    def _agree(self, who: Identity) -> None:
        if who.version != VERSION:
            raise RefusedError("version", f"protocol {who.version} there, {VERSION} here; run one release")
        if who.namespace != self._config.namespace:
            raise RefusedError("namespace", f"{who.namespace!r} there, {self._config.namespace!r} here")
        if not who.regions or who.regions[0].nbytes < HEADER_BYTES:
            raise PeerProtocolError("the peer describes no control region")
        for theirs in who.pools:
            try:
                found = dtypes(pool_strided(theirs))
            except ValueError as error:
                raise PeerProtocolError(f"the peer's pool {theirs.name}: {error}") from None
            mine = self._metas.get(theirs.name)
            if mine is not None and dtypes(pool_strided(mine)) != found:
                raise RefusedError(
                    "dtype", f"pool {theirs.name} is {found} there; set --kv-cache-dtype alike"
                )

    def _open(
        self,
        info: PeerInfo,
        reply: Connected,
        offers: Mapping[TransportName, bytes],
        reasons: dict[TransportName, str],
    ) -> Channel:
        """The first transport, in order of preference, by which the owner's header can really be read."""

        def read(channel: Channel) -> bytes:
            with self._scratch.slot() as at:
                channel.read(0, header_runs(at), CancelToken())
                return self._control.array[at : at + HEADER_BYTES].tobytes()

        channel = open_first(self._transports, info, reply.session, offers, reply.transports, reasons, read)
        if channel is not None:
            return channel
        own = {name: reason for name, reason in reasons.items() if name not in reply.reasons}
        raise TransportUnavailableError(
            f"no transport carries KV from {info.instance} to {self._config.instance}"
            f"{by_side(info.instance, reply.reasons)}{by_side(self._config.instance, own)}",
            hint=way_out([*self._regions.metas(), *info.regions]),
        )

    def _with_own_reasons(
        self,
        error: RefusedError,
        reasons: Mapping[TransportName, str],
        offers: Mapping[TransportName, bytes],
    ) -> RefusedError:
        """An owner's refusal; where it has no use for the transports offered, with the reasons of this side
        against the others."""
        own = {name: reason for name, reason in reasons.items() if name not in offers}
        if error.reason != NO_TRANSPORT or not own:
            return error
        text = error.message.removeprefix(f"{NO_TRANSPORT}: ")
        return RefusedError(NO_TRANSPORT, text + by_side(self._config.instance, own))


def offers_of(
    transports: Mapping[TransportName, Transport],
) -> tuple[dict[TransportName, bytes], dict[TransportName, str]]:
    """A reader's offers, by transport, and the reasons why it cannot use the others."""
    offers: dict[TransportName, bytes] = {}
    reasons: dict[TransportName, str] = {}
    for name, transport in transports.items():
        reason = transport.unavailable()
        try:
            if reason is None:
                offers[name] = transport.offer()
        except TransferError as error:
            reason = str(error)
        reasons[name] = reason or "not offered by the owner"
    return offers, reasons


def open_first(
    transports: Mapping[TransportName, Transport],
    info: PeerInfo,
    session: bytes,
    offers: Mapping[TransportName, bytes],
    answers: Mapping[str, bytes],
    reasons: dict[TransportName, str],
    read: Callable[[Channel], bytes],
) -> Channel | None:
    """The first transport, in order of preference, by which the owner's header can really be read; None
    where there is none.

    reasons: receives the reasons why earlier transports failed. read: the header, by a channel.
    """
    for name, transport in transports.items():
        if name not in offers or name not in answers:
            continue
        channel: Channel | None = None
        try:
            channel = transport.open(info, session, offers[name], answers[name])
            if read(channel) != header(info.epoch):
                raise PeerGoneError("the memory that was read is not the peer's")
            return channel
        except TransferError as error:
            reasons[name] = str(error)
            if channel is not None:
                channel.close()
    return None
