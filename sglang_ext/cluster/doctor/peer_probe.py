"""Tests of two doctors between their machines: ports, a stream, and reading each other's memory."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from sglang_ext.addresses import bracketed, split_port
from sglang_ext.cluster.doctor.peer_wire import (
    MOST_PORTS,
    Answer,
    Chosen,
    End,
    Memory,
    Took,
    Trouble,
    TroubleError,
    Wire,
)
from sglang_ext.disagg.errors import TransferError
from sglang_ext.disagg.generations import HEADER_BYTES, header
from sglang_ext.disagg.memory import RegionTable, SharedMemory
from sglang_ext.disagg.transfer.connecting import offers_of, open_first
from sglang_ext.disagg.transfer.verify import header_runs
from sglang_ext.disagg.transports import (
    CancelToken,
    Channel,
    PeerInfo,
    Served,
    TransportName,
    host_identity,
)
from sglang_ext.disagg.transports.rails import NOWHERE, Place
from sglang_ext.disagg.transports.select import make_transports

KNOCK_S: Final = 2.0
"""Seconds for one port."""
KNOCKS: Final = 64
"""Ports knocked at a time: with all of `MOST_PORTS` silent they take 8 s."""
STREAM_BYTES: Final = 256 << 20
STREAM_S: Final = 1.0
CHUNK: Final = 256 << 10
MEMORY_S: Final = 5.0
"""Seconds for one read of a few bytes."""


def sample(ports: Sequence[int], most: int = MOST_PORTS) -> tuple[int, ...]:
    """So many of some ports at most, the first and the last among them, the others spread evenly."""
    if len(ports) <= most:
        return tuple(ports)
    return tuple(ports[at * (len(ports) - 1) // (most - 1)] for at in range(most))


class Doors:
    """This end's ports, open for a while: a peer that sends the ticket there receives the answer."""

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        """host: to bind to. ports: to try; 0 is any. Ports that are in use are left alone, and counted."""
        self.ticket, self.answer = secrets.token_bytes(16), secrets.token_bytes(16)
        self.taken = 0
        self._sockets: list[socket.socket] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for port in ports:
            try:
                self._sockets.append(socket.create_server((host, port), family=family, backlog=8))
            except OSError:
                self.taken += 1
        self._tasks = [asyncio.create_task(self._answer(door)) for door in self._sockets]

    @property
    def ports(self) -> tuple[int, ...]:
        return tuple(door.getsockname()[1] for door in self._sockets)

    async def _answer(self, door: socket.socket) -> None:
        """One after the other: a stranger blocks one port for as long as a knock may take at most."""
        loop = asyncio.get_running_loop()
        door.setblocking(False)
        while True:
            sock = await accept(door)
            with sock, contextlib.suppress(OSError, TroubleError):
                async with asyncio.timeout(KNOCK_S):
                    wire = Wire(sock, None)
                    if hmac.compare_digest(await wire.take(16), self.ticket):
                        await wire.put(self.answer)
                        # The knocking end closes first, so that no server's port is left in TIME_WAIT on this
                        # machine.
                        await loop.sock_recv(sock, 1)

    async def close(self) -> None:
        """Give the ports back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for door in self._sockets:
            door.close()


async def accept(door: socket.socket) -> socket.socket:
    """The next connection. The event loop's own `sock_accept` loses an accepted one when it is cancelled."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0)  # However many wait, others have their turns.
    while True:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            sock, _ = door.accept()
            sock.setblocking(False)
            return sock
        is_ready = asyncio.Event()
        loop.add_reader(door, is_ready.set)
        try:
            await is_ready.wait()
        finally:
            loop.remove_reader(door)


async def connect(host: str, port: int, seconds: float) -> socket.socket:
    """A connected socket that does not block.

    Raises:
        OSError: there is none; TimeoutError when nothing comes back.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(seconds):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            sock.close()
            raise
        return sock


async def knock_all(host: str, ports: Sequence[int], ticket: bytes, answer: bytes) -> dict[int, str]:
    """Why each port of the other end's did not answer as it should; not those that did."""
    turns = asyncio.Semaphore(KNOCKS)

    async def one(port: int) -> str:
        async with turns:
            return await _knock(host, port, ticket, answer)

    reasons = await asyncio.gather(*map(one, ports))
    return {port: reason for port, reason in zip(ports, reasons, strict=True) if reason}


async def reach_all(addresses: Sequence[str]) -> dict[str, str]:
    """Why each address, ``HOST:PORT``, takes no connection; not those that do."""

    async def one(address: str) -> str:
        host, port = split_port(address)
        try:
            (await connect(host, int(port), KNOCK_S)).close()
        except socket.gaierror:
            return f"{host} cannot be looked up"
        except TimeoutError:
            return f"nothing came back in {KNOCK_S:.0f} s"
        except (OSError, ValueError, OverflowError) as error:
            return reason_of(error) if isinstance(error, OSError) else "it is no address"
        return ""

    reasons = await asyncio.gather(*map(one, addresses))
    return {address: reason for address, reason in zip(addresses, reasons, strict=True) if reason}


async def knock_end(end: End) -> dict[int, str]:
    """Why each port of an end was not reached. For a port that is in use there, a connection is enough."""
    doors = [*end.ports, *(port for port, is_open in end.services.items() if is_open)]
    failed = await knock_all(end.announced, doors, end.ticket, end.answer)
    places = {
        f"{bracketed(end.announced)}:{port}": port for port, is_open in end.services.items() if not is_open
    }
    return failed | {places[place]: why for place, why in (await reach_all(list(places))).items()}


async def _knock(host: str, port: int, ticket: bytes, answer: bytes) -> str:
    try:
        with await connect(host, port, KNOCK_S) as sock:
            wire = Wire(sock, None)
            async with asyncio.timeout(KNOCK_S):
                await wire.put(ticket)
                told = await wire.take(len(answer))
            return "" if hmac.compare_digest(told, answer) else "another program answers there"
    except TimeoutError:
        return f"nothing came back in {KNOCK_S:.0f} s"
    except TroubleError:
        return "another program answers there"
    except OSError as error:
        return reason_of(error)


def reason_of(error: OSError) -> str:
    """As the system says it: the event loop's own text is about its call."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)


async def send_stream(wire: Wire) -> None:
    """Send as much as fits in `STREAM_S`, at most `STREAM_BYTES`: chunks, each after a byte 1, and a final
    byte 0.
    """
    chunk = b"\x01" + os.urandom(CHUNK)
    end = time.monotonic() + STREAM_S
    for _ in range(STREAM_BYTES // CHUNK):
        await wire.put(chunk)
        if time.monotonic() >= end:
            break
    await wire.put(b"\x00")


async def take_stream(wire: Wire) -> Took:
    """Receive the stream of `send_stream`; the time counts from the first byte to the last.

    Raises:
        TroubleError: more comes than was agreed on.
    """
    memory = memoryview(bytearray(CHUNK + 1))
    chunks = 0
    await wire.fill(memory[:1])
    start = time.monotonic()
    while memory[0]:
        chunks += 1
        if chunks > STREAM_BYTES // CHUNK:
            raise TroubleError(Trouble.NOT_OURS, "the stream is longer than was agreed on")
        await wire.fill(memory[1:])
        await wire.fill(memory[:1])
    return Took(chunks * CHUNK, max(time.monotonic() - start, 1e-6))


@dataclass(frozen=True)
class _Config:
    bind: str
    ports: tuple[int, ...]
    transports: tuple[TransportName, ...] = ()
    lanes: int = 1
    rank: int = 0
    place: Place = NOWHERE
    rdma_devices: tuple[str, ...] = ()


class Reading:
    """A few bytes of host memory at this end, the transports by which the other end may read them, and those
    by which this end reads the other's: the steps of servers that connect. Its calls block for seconds at
    most.
    """

    def __init__(self, host: str, ports: Sequence[int]) -> None:
        self._epoch = secrets.token_bytes(16)
        self._session = secrets.token_bytes(16)
        self._memory = SharedMemory(2 * HEADER_BYTES, "doctor")
        self._memory.array[:HEADER_BYTES] = np.frombuffer(header(self._epoch), np.uint8)
        self._regions = RegionTable()
        self._regions.add(
            self._memory.address, self._memory.nbytes, fd=self._memory.fd, keep=self._memory
        )  # fmt: skip
        self._served: list[Served] = []
        try:
            self._transports = make_transports(_Config(host, tuple(ports)), self._regions)
        except BaseException:
            self._memory.close()
            raise
        self._offers: dict[TransportName, bytes] = {}
        self._reasons: dict[TransportName, str] = {}

    def offers(self) -> dict[str, bytes]:
        """To read the other end's memory, by transport."""
        self._offers, self._reasons = offers_of(self._transports)
        return {str(name): offer for name, offer in self._offers.items()}

    def accept(self, offers: Mapping[str, bytes]) -> Answer:
        """The answer to the other end's offers."""
        answers: dict[str, bytes] = {}
        reasons: dict[str, str] = {}
        for name, transport in self._transports.items():
            if name not in offers:
                continue
            try:
                answers[name], served = transport.accept(
                    self._session, offers[name], np.zeros(1, np.int64)
                )  # fmt: skip
                self._served.append(served)
            except TransferError as error:
                reasons[name] = str(error)[:500]
        memory = Memory(self._epoch, host_identity(), os.getpid(), self._session, self._regions.metas())
        return Answer(memory, answers, reasons)

    def open(self, answer: Answer, address: str) -> Chosen:
        """The first transport by which the other end's bytes are really read, and why none before it."""
        memory = answer.memory
        info = PeerInfo("peer", memory.epoch, memory.host, address, memory.pid, memory.regions)
        self._reasons |= {
            name: answer.reasons[name] for name in TransportName if name in answer.reasons
        }  # fmt: skip
        channel = open_first(
            self._transports, info, memory.session, self._offers, answer.answers, self._reasons, self._read
        )
        for name, offer in self._offers.items():
            if channel is None or name != channel.name:
                self._transports[name].withdraw(offer)
        chosen = None if channel is None else channel.name
        if channel is not None:
            channel.close()
        before = list(_before(chosen))
        return Chosen(
            chosen or "", {name: self._reasons[name][:500] for name in before if name in self._reasons}
        )

    def _read(self, channel: Channel) -> bytes:
        token = CancelToken()
        late = threading.Timer(MEMORY_S, token.cancel)
        late.start()
        try:
            channel.read(0, header_runs(HEADER_BYTES), token)
        finally:
            late.cancel()
            late.join()
        return self._memory.array[HEADER_BYTES:].tobytes()

    def close(self) -> None:
        """End all of it."""
        for served in self._served:
            served.close()
        for transport in self._transports.values():
            transport.close()
        self._memory.close()


def _before(chosen: TransportName | None) -> Iterator[TransportName]:
    for name in TransportName:
        if name == chosen:
            return
        yield name
