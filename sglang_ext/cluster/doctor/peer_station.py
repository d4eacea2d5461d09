"""One end of ``sglang-ext doctor --peer``: an endpoint as a server here would start it, and ports beside it.

Stations read from each other by CONNECT, TRANSFER and COMPLETE, once over each transport.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_ext.addresses import SystemNetwork, bracketed, place, split_port
from sglang_ext.cluster.doctor.peer_messages import (
    MESSAGES,
    MOST_BLOCKS,
    VERSION,
    End,
    Examine,
    Examined,
    Hail,
    Publish,
    Published,
)
from sglang_ext.cluster.doctor.peer_ports import hold, reach, reach_ports, sample
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.config import KvConfig
from sglang_ext.disagg.errors import (
    PeerProtocolError,
    RefusedError,
    TransferError,
    TransportUnavailableError,
)
from sglang_ext.disagg.memory import SharedMemory
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.pools import MemoryRange, PoolSpec
from sglang_ext.disagg.transports import TransportName
from sglang_ext.disagg.transports.tcp import TcpTransport
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import mla_geometry

READ_S: Final = 60.0
"""Seconds for one read."""
MEASURE_S: Final = 0.5
"""Seconds for one transport in one direction, where something is read in them."""
BLOCK_BYTES: Final = 1 << 20
POOL: Final = "doctor"


@dataclass(frozen=True)
class Own:
    """Settings of an end.

    services: ports beside those of `kv_ports`. reach: addresses that both ends need, ``HOST:PORT``; a
        caller's only. wall: seconds since the epoch.
    """

    key: ClusterKey | None = None
    kv_ports: str | None = None
    announce: str | None = None
    services: tuple[int, ...] = ()
    reach: tuple[str, ...] = ()
    wall: Callable[[], float] = time.time

    @property
    def ports(self) -> tuple[int, ...]:
        """All of the range; 0 is any."""
        return KvConfig(ports=self.kv_ports).port_range

    def announced(self, host: str, other: str) -> str:
        """The address that servers here announce which listen at `host`, and whose routers are at `other`.

        Raises:
            RefusedError: none is found.
        """
        config = KvConfig(
            router=f"http://{bracketed(other)}:1",
            announce_host=self.announce,
            cluster_key_file=None if self.key is None else "/given",
        )
        try:
            return place(config, _Server(host), SystemNetwork()).announce_host or ""
        except ConfigError as error:
            raise RefusedError("address", error.message) from None


@dataclass
class _Server:
    """The server whose address the doctor derives: as servers would start here."""

    host: str
    port: int = 1


class Station:
    """See the top of this file. Made by `open_station`.

    host: at which it listens. held: ports held open. memory: blocks that the other end reads, and as many to
        read into. say: called with one line for each caller.
    """

    def __init__(
        self,
        own: Own,
        host: str,
        held: tuple[int, ...],
        memory: SharedMemory,
        endpoint: Endpoint,
        say: Callable[[str], None],
    ) -> None:
        self.endpoint = endpoint
        self.blocks: npt.NDArray[np.uint8] = memory.array.reshape(-1, BLOCK_BYTES)
        self._own = own
        self._host = host
        self._held = held
        self._say = say
        self._sums = tuple(zlib.crc32(block) for block in self.blocks[:MOST_BLOCKS])
        self._requests = itertools.count()
        self._turn = asyncio.Lock()
        endpoint.serve((Hail, Examine, Publish), self._answer)

    def end(self, source: str, other: str) -> End:
        """This end, for one at the address `other`. source: its address on the way there.

        Raises:
            RefusedError: it finds no address to announce.
        """
        own = self._own
        announced = own.announced(self._host, other)
        control = int(split_port(self.endpoint.address)[1])
        tcp = self.endpoint.transports[TransportName.TCP]
        assert isinstance(tcp, TcpTransport)
        tried = sample(own.ports)
        services = tuple(port for port in own.services if port not in own.ports)
        mine = [port for port in (control, tcp.port) if port in tried]
        ports = tuple(sorted((*mine, *(port for port in self._held if port not in services))))
        return End(
            host=socket.gethostname()[:255],
            source=source,
            announced=announced,
            control=f"{bracketed(announced)}:{control}",
            epoch=self.endpoint.epoch,
            wall=own.wall(),
            asked=own.kv_ports or "",
            ports=ports,
            taken=len(tried) - len(ports),
            left_out=len(own.ports) - len(tried),
            services=services,
            in_use=tuple(port for port in services if port not in self._held),
        )

    async def examine(self, end: End, addresses: tuple[str, ...]) -> Examined:
        """Examine the way to another end, and to addresses."""
        failed = await reach_ports(end.announced, (*end.ports, *end.services))
        unreached = await reach(addresses)
        speeds, reasons = await self._measure(end)
        return Examined(failed, unreached, speeds, reasons)

    async def _measure(self, end: End) -> tuple[dict[str, float], dict[str, str]]:
        """Read from an end over each transport; returns the speeds, and the reasons of the others."""
        if why := await reach([end.control]):
            return {}, {"connection": why[end.control]}
        speeds: dict[str, float] = {}
        reasons: dict[str, str] = {}
        for name, transport in self.endpoint.transports.items():
            try:
                unavailable = await asyncio.to_thread(transport.unavailable)
                if unavailable is not None:
                    raise TransportUnavailableError(unavailable)
                speeds[name] = await self._speed(end, name)
            except TransferError as error:
                # A reason stands behind the name of its transport, once or twice.
                reasons[name] = str(error).rpartition(f"{name}: ")[2][:500]
        return speeds, reasons

    async def _speed(self, end: End, name: TransportName) -> float:
        """Bytes per second of the fastest of a few reads, each twice as large as the one before.

        Raises:
            TransferError: nothing can be read.
        """
        instance = await self.endpoint.connect([end.control], only=(name,))
        try:
            link, count, fastest = instance.links[0], 1, 0.0
            if link.who.epoch != end.epoch:
                raise PeerProtocolError(f"another member, {link.who.instance}, answers at {end.control}")
            until = time.monotonic() + MEASURE_S
            while True:
                request = f"{self.endpoint.epoch.hex()} {next(self._requests)}"
                published = await link.ask_for(Published, Publish(request, count), READ_S)
                blocks = np.arange(MOST_BLOCKS, MOST_BLOCKS + count)
                start = time.monotonic()
                instance.transfer(request, (published.offer,), POOL, blocks)
                await instance.complete(request, READ_S)
                took = max(time.monotonic() - start, 1e-6)
                if tuple(zlib.crc32(self.blocks[block]) for block in blocks) != published.sums:
                    raise PeerProtocolError("the bytes that were read are not those that lie there")
                fastest, count = max(fastest, count * BLOCK_BYTES / took), min(2 * count, MOST_BLOCKS)
                if time.monotonic() > until:
                    return fastest
        finally:
            await instance.close()

    async def _answer(self, identity: bytes, message: Hail | Examine | Publish) -> End | Examined | Published:
        match message:
            case Hail(number, release, source):
                if number != VERSION:
                    text = f"release {release} speaks version {number}, {version('sglang-ext')} {VERSION}"
                    self._say(f"{source}: refused: {text}")
                    raise RefusedError("version", text)
                return self.end(SystemNetwork().route(source) or self._host, source)
            case Examine(end, addresses):
                async with self._turn:  # two at a time would spoil each other's figures
                    self._say(f"{end.host} at {end.announced}: begun")
                    examined = await self.examine(end, addresses)
                    self._say(f"{end.host} at {end.announced}: done")
                return examined
            case Publish(request, blocks):
                offer = self.endpoint.publish(POOL, request, np.arange(blocks))
                return Published(offer, self._sums[:blocks])


@contextlib.asynccontextmanager
async def open_station(
    own: Own, host: str, port: int = 0, say: Callable[[str], None] = lambda line: None
) -> AsyncIterator[Station]:
    """A station for as long as the block runs.

    host: to listen at. port: of its endpoint; 0 for the first free one of its range, or else any.

    Raises:
        OSError, ZMQError: it cannot listen.
    """
    memory = SharedMemory(2 * MOST_BLOCKS * BLOCK_BYTES, POOL)
    memory.array[: memory.nbytes // 2] = np.frombuffer(os.urandom(memory.nbytes // 2), np.uint8)
    geometry = mla_geometry(
        addresses=(memory.address,),
        slots=2 * MOST_BLOCKS,
        latent_dim=BLOCK_BYTES // 2,
        dtype="float16",
        block_tokens=1,
    )
    ranges = (MemoryRange(memory.address, memory.nbytes, fd=memory.fd, keep=memory),)
    pool = PoolSpec.of_geometry(POOL, geometry, ranges, lease_budget=MOST_BLOCKS, borrowed=False)
    config = EndpointConfig(
        socket.gethostname()[:255],
        f"doctor {VERSION}",
        bind=f"{bracketed(host)}:{port}" if port else bracketed(host),
        ports=(*own.ports, 0),
        keys=own.key,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(memory.close)
        endpoint = await Endpoint.start(config, (pool,), messages=MESSAGES)
        stack.push_async_callback(endpoint.close)
        endpoint.pools[POOL].seal(np.arange(MOST_BLOCKS))
        doors = stack.enter_context(contextlib.ExitStack())
        held = hold(host, (*sample(own.ports), *own.services), doors)
        yield Station(own, host, held, memory, endpoint, say)
