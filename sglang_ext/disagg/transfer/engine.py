"""One-sided KV transfer between ranks: CONNECT, TRANSFER, COMPLETE (KVDirect, section 4).

    owner                                           reader
    endpoint = await Endpoint.start(config, pools)  endpoint = await Endpoint.start(config, pools)
    pool.open(blocks); ...write...; pool.seal(blocks)
    offer = endpoint.publish("hbm", request, blocks, ttl) ──(any way)──> offer
                                                    peer = await endpoint.connect([address of each rank])
                                                    peer.transfer(request, [offer], "hbm", my_blocks)
                                                    await peer.complete(request, seconds)
    on_ended(pool, ended): the blocks are free

An endpoint is one rank: it serves its pools and reads into them. It belongs to the event loop that started
it; `publish` and the calls of `OwnedPool` may come from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import os
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from zmq.asyncio import Context

from sglang_ext.addresses import bracketed, split_port
from sglang_ext.clock import Clock, SystemClock
from sglang_ext.disagg import runs
from sglang_ext.disagg.errors import (
    PeerGoneError,
    RangeError,
    RefusedError,
)
from sglang_ext.disagg.generations import HEADER_BYTES, header
from sglang_ext.disagg.memory import RegionTable, SharedMemory
from sglang_ext.disagg.messages import (
    VERSION,
    Identity,
    Offer,
    Reply,
    Request,
)
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.tensors import pool_strided
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.connecting import Connector
from sglang_ext.disagg.transfer.control import TRANSFERS, ControlClient, ControlServer, Handler, Messages
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.disagg.transfer.leases import Ended
from sglang_ext.disagg.transfer.link import Link
from sglang_ext.disagg.transfer.owner import Owner
from sglang_ext.disagg.transfer.peer_state import PeerStats
from sglang_ext.disagg.transfer.pools import OwnedPool, PoolSpec, counters_bytes
from sglang_ext.disagg.transfer.sessions import Receiver
from sglang_ext.disagg.transfer.verify import Scratch
from sglang_ext.disagg.transports import (
    TransportName,
    host_identity,
)
from sglang_ext.disagg.transports.pinned import StagedTransport
from sglang_ext.disagg.transports.rails import Rail
from sglang_ext.disagg.transports.select import make_transports, require_transport
from sglang_ext.disagg.transports.verbs import VerbsTransport
from sglang_ext.tasks import Tasks
from sglang_ext.wire import pack_ids

log = logging.getLogger(__name__)


class Endpoint:
    """One rank's end of every transfer. Made by `start`."""

    def __init__(
        self,
        config: EndpointConfig,
        pools: Sequence[PoolSpec],
        clock: Clock,
        on_ended: Callable[[str, Ended], None],
        messages: Messages,
    ) -> None:
        self.config = config
        self._messages = messages
        self._handlers: dict[type, Handler] = {}
        self.epoch = secrets.token_bytes(16)
        self._clock = clock
        self._on_ended = on_ended
        self._host = host_identity()
        self.regions = RegionTable()
        tables = HEADER_BYTES + counters_bytes(pools)
        first = tables + -tables % 64
        self._control = SharedMemory(first + Scratch.nbytes(config.verifications), "kv-control")
        self._scratch = Scratch(first, config.verifications)
        self._control.array[:HEADER_BYTES] = np.frombuffer(header(self.epoch), np.uint8)
        self.regions.add(self._control.address, self._control.nbytes, fd=self._control.fd, keep=self._control)
        self.pools: Mapping[str, OwnedPool] = self._add_pools(pools)
        self._metas = {name: p.meta for name, p in self.pools.items()}
        runs.warm()
        # Transports may fail to listen: make them before there is anything to close.
        self.transports = make_transports(config, self.regions)
        self._context = Context()
        self._connector = Connector(
            self._context,
            config,
            self.identity,
            self.regions,
            self._control,
            self._scratch,
            self._metas,
            self.transports,
            messages,
        )
        self.instances: list[Instance] = []
        self._left: dict[tuple[str, TransportName], PeerStats] = {}
        self._reached: dict[tuple[str, ...], Instance] = {}
        self._reaching: dict[tuple[str, ...], asyncio.Lock] = {}
        self._owner = Owner(
            self.identity,
            self.pools,
            self.transports,
            clock,
            dead_after=config.dead_after,
            patience=lambda reader: config.patience(near=reader.host == self._host),
            grant_ttl=config.grant_ttl,
            notify=self._notify,
            on_ended=on_ended,
        )
        self._server: ControlServer | None = None
        self._tasks = Tasks()
        self._connecting = Tasks()
        self._ticking: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def start(
        cls,
        config: EndpointConfig,
        pools: Sequence[PoolSpec],
        *,
        clock: Clock | None = None,
        on_ended: Callable[[str, Ended], None] = lambda pool, ended: None,
        receiver: Receiver | None = None,
        messages: Messages = TRANSFERS,
    ) -> Endpoint:
        """Register the pools and begin to serve.

        on_ended: called for each lease that ended, with the blocks that it freed; on the event loop.
        receiver: grants memory that peers may write; None refuses them.
        messages: those of transfers, and others that are asked on the same connections (`serve`).

        Raises:
            ConfigError: it would listen beyond loopback without a key.
            RangeError: a tensor is not inside the registered memory.
            TransportUnavailableError: this host, or the memory of the pools, excludes every transport.
        """
        self = cls(config, pools, clock or SystemClock(), on_ended, messages)
        try:
            self._server = ControlServer(
                self._context, config.bind, config.keys, self._answer, messages, config.ports
            )
        except BaseException:
            await self.close()
            raise
        self._owner.let_write(receiver)
        # Opens devices and registers memory now, off the event loop, rather than when the first peer waits.
        reasons = {n: await asyncio.to_thread(t.unavailable) for n, t in self.transports.items()}
        try:
            require_transport(reasons, self.regions)
        except BaseException:
            await self.close()
            raise
        self._ticking = self._tasks.start(self._tick())
        return self

    def __repr__(self) -> str:
        return (
            f"<Endpoint {self.config.instance}/{self.config.rank} {self.address} {self._owner!r} "
            f"instances={len(self.instances)}>"
        )

    @property
    def address(self) -> str:
        """host:port of the control plane, for peers' `connect`."""
        if self._server is None:
            return ""
        host, port = split_port(self._server.address)
        return f"{bracketed(self.config.announce or host)}:{port}"

    @property
    def owner(self) -> Owner:
        """Sessions, leases and grants of connected readers."""
        return self._owner

    def serve(self, kinds: tuple[type, ...], handler: Handler | None) -> None:
        """Set the handler of messages other than transfers', by their kinds; None refuses them again."""
        for kind in kinds:
            if handler is None:
                self._handlers.pop(kind, None)
            else:
                self._handlers[kind] = handler

    def client(self, address: str) -> ControlClient:
        """A client for requests to a peer that need not be connected. The caller closes it."""
        return ControlClient(self._context, address, self.config.keys, messages=self._messages)

    def identity(self) -> Identity:
        """This rank's description in CONNECT."""
        return Identity(
            VERSION,
            self.config.instance,
            self.config.rank,
            self.epoch,
            self.config.namespace,
            self._host,
            os.getpid(),
            self.address,
            self.regions.metas(),
            tuple(self._metas.values()),
        )

    def publish(
        self,
        pool: str,
        request: str,
        blocks: Ids,
        ttl: float | None = None,
        reader: bytes | None = None,
        names: bytes = b"",
    ) -> Offer:
        """Lease sealed blocks to any reader (or only to the reader of an epoch). Thread-safe. names: see
        `Offer`.

        Raises:
            RangeError: a block is open or unknown. RefusedError: the pool's lease budget is spent.
        """
        ttl = self.config.lease_ttl if ttl is None else ttl
        lease, generations = self.pools[pool].lease(request, blocks, ttl, reader, names)
        return Offer(
            self.config.instance,
            self.config.rank,
            self.epoch,
            pool,
            request,
            lease,
            pack_ids(blocks),
            pack_ids(generations),
            int(ttl * 1000),
            names,
        )

    def expect(self, pool: str, request: str, seconds: float) -> None:
        """Answer peers that request these blocks with a time, in seconds, to ask again. Thread-safe."""
        self.pools[pool].expect(request, seconds)

    def give_up(self, pool: str, request: str, seconds: float) -> None:
        """For so many seconds, answer peers that ask for a request that no blocks will come. Thread-safe."""
        self.pools[pool].give_up(request, seconds)

    def withdraw(self, pool: str, lease: int) -> bool:
        """Take a lease back, if it still lives: its blocks are free once no other lease holds them."""
        ended = self.pools[pool].withdraw(lease)
        if ended is not None:
            self._on_ended(pool, ended)
        return ended is not None

    async def connect(
        self, addresses: Sequence[str], use: str = "", only: Collection[TransportName] = ()
    ) -> Instance:
        """CONNECT to every rank of an instance, in rank order. use: the use that its bytes are counted under.
        only: the transports to offer; empty for all.

        Raises:
            RefusedError: another namespace, dtype or version, by name. TransportUnavailableError: with the
            reason of each transport. PeerGoneError: also where this endpoint is closed meanwhile.
            TransferDeadlineError, PeerProtocolError.
        """
        if self._closed:
            raise PeerGoneError("this endpoint has been closed")
        # `close` ends the connections under way: a connection made behind its back would never be ended.
        task = self._connecting.start(self._connect(addresses, use, only))
        try:
            return await task
        except asyncio.CancelledError:
            # `close` cancelled the connection, unless our own task was cancelled.
            asked = asyncio.current_task()
            if task.cancelled() and asked is not None and not asked.cancelling():
                raise PeerGoneError("this endpoint has been closed") from None
            raise

    async def _connect(self, addresses: Sequence[str], use: str, only: Collection[TransportName]) -> Instance:
        links: list[Link] = []
        try:
            for address in addresses:
                links.append(await self._connector.connect(address, only))
            instance = Instance(links, self._metas, self.regions, self.config.rank, self._disconnected, use)
            for name in self._metas:
                if any(name in link.pools for link in links) and len(links) == len(addresses):
                    with contextlib.suppress(RefusedError):
                        instance.plan(name, name)
        except BaseException:
            await asyncio.gather(*(link.close() for link in links))
            raise
        self.instances.append(instance)
        return instance

    async def reach(self, *addresses: str, use: str = "") -> Instance:
        """The connection to ranks of an instance: made once (see `connect`), and again when it broke.

        A peer that does not answer delays no connection to the others.
        """
        key = (use, *addresses)
        async with self._reaching.setdefault(key, asyncio.Lock()):
            known = self._reached.get(key)
            if known is not None and not known.gone:
                return known
            if known is not None:
                await known.close()
            self._reached[key] = fresh = await self.connect(addresses, use)
            return fresh

    def doubt(self, instance: Callable[[str], bool]) -> None:
        """Another process reported instances dead; `instance` selects them by name. The verdict stays ours: a
        peer of them that is silent for one heartbeat from now on is gone, instead of for `dead_after`; a peer
        that answers goes on.

        On the event loop.
        """
        for link in [link for each in self.instances for link in each.links]:
            if instance(link.who.instance):
                link.doubt()
        self._owner.doubt(instance, self.config.heartbeat)

    @property
    def rail(self) -> Rail | None:
        """The RDMA adapter in use, and why it is that one. From any thread."""
        verbs = self.transports.get(TransportName.VERBS)
        if isinstance(verbs, StagedTransport):
            verbs = verbs.carrier
        return verbs.rail if isinstance(verbs, VerbsTransport) else None

    def totals(self, use: str = "") -> dict[TransportName, PeerStats]:
        """Counts of a use since the endpoint was started, by transport, also of peers that left. From any
        thread."""
        totals = {name: dataclasses.replace(s) for (of, name), s in list(self._left.items()) if of == use}
        for link in [link for each in list(self.instances) if each.use == use for link in each.links]:
            totals.setdefault(link.peer.channel.name, PeerStats()).add(link.peer.stats)
        return totals

    async def leave(self) -> None:
        """Disconnect from all peers, and end their leases; a peer that connects again is served."""
        for instance in list(self.instances):
            await instance.close()
        await self._owner.close()

    async def close(self) -> None:
        """Disconnect from everyone, end all leases, release everything."""
        if self._closed:
            return
        self._closed = True
        await self._connecting.cancel()
        await self.leave()
        if self._ticking is not None:
            self._ticking.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.close()
        for transport in self.transports.values():
            await asyncio.to_thread(transport.close)
        self._context.destroy(linger=0)
        self._control.close()

    def check(self) -> None:
        """Verify every part's invariants."""
        self.regions.check()
        self._owner.check()
        for instance in self.instances:
            instance.check()

    def _add_pools(self, specs: Sequence[PoolSpec]) -> dict[str, OwnedPool]:
        if len({s.name for s in specs}) != len(specs):
            raise RangeError("two pools have the same name")
        known: set[tuple[int, int]] = set()
        for spec in specs:
            for m in spec.memory:
                if (m.address, m.nbytes) not in known:
                    known.add((m.address, m.nbytes))
                    self.regions.add(
                        m.address, m.nbytes, kind=m.kind, fd=m.fd, fd_offset=m.fd_offset, keep=m.keep
                    )
        pools: dict[str, OwnedPool] = {}
        at = HEADER_BYTES
        numbers = itertools.count(1)
        for spec in specs:
            meta = spec.meta(at)
            for s in pool_strided(meta):
                self.regions.locate(s.address, s.span)
            counters = self._control.array[at : at + spec.blocks * 8].view(np.int64)
            pools[spec.name] = OwnedPool(spec, meta, counters, self._clock, numbers)
            at += spec.blocks * 8
        return pools

    async def _answer(self, identity: bytes, message: Any) -> Any:
        if isinstance(message, Request):
            return await self._owner.handle(identity, message)
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RefusedError("service", f"no part here answers {type(message).__name__}")
        return await handler(identity, message)

    def _disconnected(self, instance: Instance) -> None:
        if instance in self.instances:
            self.instances.remove(instance)
            for link in instance.links:
                counted = self._left.setdefault((instance.use, link.peer.channel.name), PeerStats())
                counted.add(link.peer.stats)
        for key in [k for k, v in self._reached.items() if v is instance]:
            del self._reached[key]

    def _notify(self, identity: bytes, message: Reply) -> None:
        if self._server is not None:
            self._tasks.start(self._server.notify(identity, message))

    async def _tick(self) -> None:
        while True:
            try:
                await self._owner.tick()
            except Exception:
                # Leases must go on expiring whatever one of them does.
                log.exception("a lease or grant could not be ended")
            for peer in [link.peer for instance in self.instances for link in instance.links]:
                if peer.gone is not None and not peer.closed:
                    # A mapping of a dead owner's memory would keep all of it allocated.
                    self._tasks.start(peer.close())
            await self._clock.sleep(min(0.25, self.config.heartbeat))
