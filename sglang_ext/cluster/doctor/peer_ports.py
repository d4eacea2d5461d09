"""Ports of ``sglang-ext doctor --peer``: this end's, held open, and attempts to reach others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

from sglang_ext.addresses import bracketed, split_port
from sglang_ext.cluster.doctor.peer import Trouble, TroubleError
from sglang_ext.cluster.doctor.peer_messages import MOST_PORTS

REACH_S: Final = 2.0
"""Seconds for one port."""
AT_A_TIME: Final = 64
"""Ports tried at a time: with all of `MOST_PORTS` silent they take 8 s."""
GREETING_BYTES: Final = 64
"""ZeroMQ's greeting: a signature, the protocol's version, and the name of the mechanism for keys."""
_SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"


def sample(ports: Sequence[int], most: int = MOST_PORTS) -> tuple[int, ...]:
    """So many of some ports at most, the first and the last among them, the others spread evenly."""
    if len(ports) <= most:
        return tuple(ports)
    return tuple(ports[at * (len(ports) - 1) // (most - 1)] for at in range(most))


def hold(host: str, ports: Iterable[int], stack: contextlib.ExitStack) -> tuple[int, ...]:
    """Listen on those ports that are free (0 is any) until the stack is closed; returns them. The kernel
    answers connections, this process takes none.
    """
    held: list[int] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports:
        with contextlib.suppress(OSError):
            door = stack.enter_context(socket.create_server((host, port), family=family, backlog=128))
            held.append(int(door.getsockname()[1]))
    return tuple(held)


@contextlib.asynccontextmanager
async def connected(
    host: str, port: int, seconds: float
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, for as long as the block runs.

    Raises:
        TroubleError: there is none within so many seconds.
    """
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(host, port)
    except socket.gaierror:
        raise TroubleError(Trouble.NAME, f"{host} cannot be looked up") from None
    except TimeoutError:
        raise TroubleError(Trouble.UNREACHED, f"nothing came back in {seconds:g} s") from None
    except OSError as error:
        kind = Trouble.CLOSED if isinstance(error, ConnectionRefusedError) else Trouble.UNREACHED
        # The event loop's own text is about its call.
        text = os.strerror(error.errno) if error.errno else error.strerror or str(error)
        raise TroubleError(kind, text) from None
    try:
        yield reader, writer
    finally:
        # This end closes first, so that no server's port is left in TIME_WAIT on the other machine.
        writer.transport.abort()


async def reach(addresses: Sequence[str]) -> dict[str, str]:
    """Connect to each HOST:PORT; returns the reasons of those that take no connection."""
    turns = asyncio.Semaphore(AT_A_TIME)

    async def one(address: str) -> str:
        host, port = split_port(address)
        try:
            async with turns, connected(host, int(port), REACH_S):
                return ""
        except TroubleError as error:
            return error.message[:500]
        except (ValueError, OverflowError):
            return "it is no address"

    reasons = await asyncio.gather(*map(one, addresses))
    return {address: reason for address, reason in zip(addresses, reasons, strict=True) if reason}


async def reach_ports(host: str, ports: Sequence[int]) -> dict[int, str]:
    """The same of ports of one host."""
    places = {f"{bracketed(host)}:{port}": port for port in ports}
    return {places[place]: why for place, why in (await reach(list(places))).items()}


async def greet(host: str, port: int, seconds: float) -> tuple[str, str]:
    """Begin ZeroMQ's greeting with a port.

    Returns:
        This end's address on the way there, and the other end's mechanism, ``NULL`` or ``CURVE``; empty where
        another program listens.

    Raises:
        TroubleError: the port takes no connection.
    """
    theirs = b""
    async with connected(host, port, seconds) as (reader, writer):
        source = str(writer.get_extra_info("sockname")[0])
        # By the version, the other end sends its whole greeting. A mechanism unlike its own would end that.
        writer.write(_SIGNATURE + b"\x03\x00")
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async with asyncio.timeout(seconds):
                theirs = await reader.readexactly(GREETING_BYTES)
    if not theirs or (theirs[0], theirs[9]) != (_SIGNATURE[0], _SIGNATURE[9]):
        return source, ""
    return source, theirs[12:32].rstrip(b"\0").decode("ascii", "replace")
