"""Both ends of ``sglang-ext doctor --peer``: the caller, which asks, and the listener, which answers.

A listener serves one caller at a time, after the caller has proven to have the key; it reveals nothing to
others. Messages, ports, bytes, connections and times are bounded, regardless of the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Final, TypeVar

from sglang_ext.addresses import SystemNetwork, bracketed, place
from sglang_ext.cluster.doctor.peer import Seen
from sglang_ext.cluster.doctor.peer_probe import (
    Doors,
    Reading,
    accept,
    connect,
    knock_end,
    reach_all,
    reason_of,
    sample,
    send_stream,
    take_stream,
)
from sglang_ext.cluster.doctor.peer_wire import (
    Answer,
    Chosen,
    End,
    Knock,
    Knocked,
    Meet,
    Offer,
    Offered,
    Open,
    Ping,
    Pong,
    Pull,
    Push,
    Reach,
    Reached,
    ReadMine,
    Refused,
    Took,
    Trouble,
    TroubleError,
    Wire,
)
from sglang_ext.cluster_key import ClusterKey
from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError, SglangExtError
from sglang_ext.tasks import Tasks

CONNECT_S: Final = 5.0
GREETING_S: Final = 5.0
"""Seconds for connecting, and for proving to have the key."""
SESSION_S: Final = 120.0
"""Seconds for one caller."""
MOST_CALLERS: Final = 16
"""Connections at a time; one more is closed."""
PINGS: Final = 5

T = TypeVar("T")


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


@dataclass
class _Server:
    """The server whose address the doctor derives: as servers would start here."""

    host: str
    port: int = 1


class _This:
    """This end in one session: its address and its open ports, then its memory."""

    def __init__(self, own: Own, sock: socket.socket) -> None:
        """Raises TroubleError where no address is found."""
        self._own = own
        other: str = sock.getpeername()[0]
        server = _Server("::" if ":" in other else "0.0.0.0")
        config = KvConfig(
            router=f"http://{bracketed(other)}:1",
            announce_host=own.announce,
            cluster_key_file=None if own.key is None else "/given",
        )
        try:
            announced = place(config, server, SystemNetwork()).announce_host or ""
        except ConfigError as error:
            raise TroubleError(Trouble.ADDRESS, error.message) from None
        self._bind = announced if own.key is None else server.host
        tried = sample(own.ports)
        others = [port for port in own.services if port not in own.ports]
        self._doors: Doors | None = Doors(self._bind, (*tried, *others))
        is_open = set(self._doors.ports)
        services = {port: port in is_open for port in others}
        ports = tuple(port for port in self._doors.ports if port not in services)
        self.end = End(
            socket.gethostname()[:255],
            announced,
            other,
            own.kv_ports or "",
            ports,
            len(tried) - len(ports),
            len(own.ports) - len(tried),
            services,
            self._doors.ticket,
            self._doors.answer,
        )
        self._reading: Reading | None = None

    async def reading(self) -> Reading:
        """This end's memory. Its transport needs one of the ports, which are closed from here on."""
        if self._reading is None:
            await self._close_doors()
            self._reading = await _blocking(lambda: Reading(self._bind, (*self._own.ports, 0)))
        return self._reading

    async def close(self) -> None:
        await self._close_doors()
        if self._reading is not None:
            await _blocking(self._reading.close)

    async def _close_doors(self) -> None:
        if self._doors is not None:
            await self._doors.close()
            self._doors = None


async def _blocking(work: Callable[[], T]) -> T:
    """Run blocking work of a few seconds in a thread; returns when it has ended, cancelled or not."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


def call(host: str, port: int, own: Own) -> Seen:
    """Test the way to a listener and back. Errors are in the result."""
    return asyncio.run(_call(host, port, own))


async def _call(host: str, port: int, own: Own) -> Seen:
    seen = Seen(f"{bracketed(host)}:{port}", own.key is not None)
    try:
        with await _reach(host, port) as sock:
            wire = Wire(sock, own.key)
            try:
                async with asyncio.timeout(GREETING_S):
                    await wire.greet(_release())
            except TimeoutError:
                raise TroubleError(
                    Trouble.NOT_OURS, f"another program listens, which sent nothing for {GREETING_S:.0f} s"
                ) from None
            except TroubleError as error:
                if error.kind is not Trouble.ENDED:
                    raise
                raise TroubleError(
                    Trouble.NOT_OURS, f"another program listens, and {error.message}"
                ) from None
            await _examine(wire, own, seen)
    except TroubleError as error:
        seen.trouble = error
    except (SglangExtError, OSError) as error:  # at this end
        seen.trouble = TroubleError(Trouble.ENDED, str(error))
    return seen


async def _reach(host: str, port: int) -> socket.socket:
    try:
        return await connect(host, port, CONNECT_S)
    except socket.gaierror:
        raise TroubleError(Trouble.NAME, f"{host} cannot be looked up here") from None
    except ConnectionRefusedError:
        raise TroubleError(Trouble.CLOSED, f"port {port} is closed: the connection is refused") from None
    except TimeoutError:
        raise TroubleError(Trouble.UNREACHED, f"nothing came back in {CONNECT_S:.0f} s") from None
    except OSError as error:
        raise TroubleError(Trouble.UNREACHED, reason_of(error)) from None


async def _examine(wire: Wire, own: Own, seen: Seen) -> None:
    seen.doing = "the look at the clocks"
    for _ in range(PINGS):
        start, before = time.monotonic(), own.wall()
        there = (await wire.ask(Ping(), Pong)).wall
        took = time.monotonic() - start
        if seen.rtt is None or took < seen.rtt:
            seen.rtt, seen.ahead = took, there - (before + took / 2)
    seen.doing = "the look at the addresses"
    this = _This(own, wire.sock)
    try:
        seen.ours = this.end
        seen.theirs = theirs = await wire.ask(Meet(this.end), End)
        seen.failed_there = await knock_end(theirs)
        seen.failed_here = (await wire.ask(Knock(), Knocked)).failed
        if own.reach:
            seen.reach = own.reach
            seen.unreached_here = await reach_all(own.reach)
            seen.unreached_there = (await wire.ask(Reach(own.reach), Reached)).failed
        seen.doing = "the measuring of bandwidth"
        await wire.send(Push())
        await send_stream(wire)
        seen.there = await wire.receive(Took)
        await wire.send(Pull())
        seen.here = await take_stream(wire)
        seen.doing = "the choice of a transport"
        mine = await this.reading()
        answer = await wire.ask(ReadMine(await _blocking(mine.offers)), Answer)
        seen.reads_theirs = await _blocking(lambda: mine.open(answer, theirs.announced))
        offered = await wire.ask(Offer(), Offered)
        seen.reads_ours = await wire.ask(Open(await _blocking(lambda: mine.accept(offered.offers))), Chosen)
    finally:
        await this.close()


def listen(host: str, port: int, own: Own, seconds: float, say: Callable[[str], None]) -> None:
    """Serve callers for so long, or until Ctrl-C. say: called with one line for each.

    Raises:
        ConfigError: the address cannot be listened at.
    """
    listener = Listener(host, port, own, say)
    say(f"Listening at {listener.address} for {seconds:g} s, or until Ctrl-C")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(listener.serve(seconds))


class Listener:
    """See the top of this file. port: 0 is any."""

    def __init__(self, host: str, port: int, own: Own, say: Callable[[str], None]) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=MOST_CALLERS)
        except OSError as error:
            at = f"{bracketed(host)}:{port}"
            raise ConfigError(f"cannot listen at {at}: {error.strerror}", field="--listen") from None
        self._socket.setblocking(False)
        self._own = own
        self._say = say
        self._turn = asyncio.Lock()

    @property
    def address(self) -> str:
        """HOST:PORT."""
        host, port = self._socket.getsockname()[:2]
        return f"{bracketed(host)}:{port}"

    async def serve(self, seconds: float) -> None:
        """Serve callers for so long."""
        callers = Tasks()
        try:
            async with asyncio.timeout(seconds):
                while True:
                    sock = await accept(self._socket)
                    if len(callers) < MOST_CALLERS:
                        callers.start(self._admit(sock))
                    else:
                        sock.close()
        except TimeoutError:
            pass
        finally:
            self._socket.close()
            await callers.cancel()

    async def _admit(self, sock: socket.socket) -> None:
        with sock:
            try:
                host, port = sock.getpeername()[:2]
            except OSError:  # gone already
                return
            who = f"{bracketed(host)}:{port}"
            wire = Wire(sock, self._own.key)
            try:
                async with asyncio.timeout(GREETING_S):
                    await wire.welcome(_release())
                await self._take_turn()
            except (TroubleError, TimeoutError) as error:
                self._say(f"{who}: refused: {str(error) or 'it said nothing'}")
                if isinstance(error, TroubleError) and error.kind is Trouble.BUSY:
                    await self._refuse(wire, error)
                return
            try:
                async with asyncio.timeout(SESSION_S):
                    await _answer(wire, self._own)
                self._say(f"{who}: done")
            except TimeoutError:
                self._say(f"{who}: not done in {SESSION_S:.0f} s")
            except (SglangExtError, OSError) as error:
                self._say(f"{who}: {error}")
                await self._refuse(wire, error)
            finally:
                self._turn.release()

    async def _take_turn(self) -> None:
        """One whose caller is gone may be about to end: that is waited for."""
        try:
            async with asyncio.timeout(GREETING_S):
                await self._turn.acquire()
        except TimeoutError:
            raise TroubleError(Trouble.BUSY, "the listener serves another caller") from None

    async def _refuse(self, wire: Wire, error: Exception) -> None:
        kind = error.kind if isinstance(error, TroubleError) else Trouble.ENDED
        with contextlib.suppress(TroubleError):
            await wire.send(Refused(kind, str(error)[:500]))


async def _answer(wire: Wire, own: Own) -> None:
    """Serve one caller, until it closes the connection after it has all it wants."""
    this: _This | None = None
    other: End | None = None
    is_done = False
    try:
        while True:
            try:
                message = await wire.next()
            except TroubleError as error:
                if is_done and error.kind is Trouble.ENDED:
                    return
                raise
            match message:
                case Ping():
                    await wire.send(Pong(own.wall()))
                case Meet(end) if this is None:
                    this, other = _This(own, wire.sock), end
                    await wire.send(this.end)
                case Knock() if other is not None:
                    failed = await knock_end(other)
                    await wire.send(Knocked({port: why[:500] for port, why in failed.items()}))
                case Reach(addresses) if other is not None:
                    unreached = await reach_all(addresses)
                    await wire.send(Reached({place: why[:500] for place, why in unreached.items()}))
                case Push():
                    await wire.send(await take_stream(wire))
                case Pull():
                    await send_stream(wire)
                case ReadMine(offers) if this is not None:
                    mine = await this.reading()
                    await wire.send(await _blocking(partial(mine.accept, offers)))
                case Offer() if this is not None:
                    mine = await this.reading()
                    await wire.send(Offered(await _blocking(mine.offers)))
                case Open(answer) if this is not None and other is not None:
                    mine, at = await this.reading(), other.announced
                    await wire.send(await _blocking(partial(mine.open, answer, at)))
                    is_done = True
                case _:
                    raise TroubleError(Trouble.NOT_OURS, f"{type(message).__name__} is out of turn")
    finally:
        if this is not None:
            await this.close()


def _release() -> str:
    return version("sglang-ext")
