"""An HTTP server with a handler that tests hold at any moment, and raw connections to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.router.http.server import HttpServer
from sglang_ext.router.http.state import HttpLimits
from sglang_ext.router.http.types import Request, RequestRefused, Responder
from sglang_ext.tasks import Rounds
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.waiting import until
from tests.support.servers.workers import Gate

CLIENT_TIMEOUT_S = 10.0

GET = b"GET /x?y=1 HTTP/1.1\r\nHost: h\r\n\r\n"
CLOSE = b"GET /last HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"


def post(path: str, body: bytes, *headers: str) -> bytes:
    """A request with a body of known length."""
    lines = [f"POST {path} HTTP/1.1", "Host: h", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def chunked(path: str, *pieces: bytes, trailers: bytes = b"") -> bytes:
    """A request with its body in chunks."""
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces) + b"0\r\n" + trailers + b"\r\n"


@dataclass
class Echo:
    """Answers with the request's own contents. Paths make it do otherwise: ``/gate...`` waits at the gate
    first, ``/stream/N`` answers in N pieces of one letter, ``/big/N`` with N bytes in pieces of 64 KiB,
    ``/cut`` cuts its answer, ``/fail`` raises."""

    gate: Gate = field(default_factory=Gate)
    requests: list[Request] = field(default_factory=list)
    refused: list[RequestRefused] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    """Requests with large bodies."""
    cancelled: int = 0
    written: int = 0
    """Bytes of ``/big`` that the connection has taken."""
    present: int = 0

    async def handle(self, request: Request, responder: Responder) -> None:
        self.requests.append(request)
        self.present += 1
        try:
            await self._answer(request, responder)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.present -= 1

    async def _answer(self, request: Request, responder: Responder) -> None:
        if request.path.startswith("/gate"):
            await self.gate.wait()
        kind, _, count = request.path.lstrip("/").partition("/")
        if kind == "fail":
            raise ZeroDivisionError("on purpose")
        if kind == "stream":
            await responder.start(200, {"content-type": "text/plain"})
            for number in range(int(count)):
                await responder.write(b"abcdefghij"[number % 10 : number % 10 + 1])
            await responder.finish()
        elif kind == "held-stream":
            await responder.start(200, {"content-type": "text/plain"})
            await responder.write(b"first")
            await self.gate.wait()
            await responder.write(b"last")
            await responder.finish()
        elif kind == "big":
            await responder.start(200, {})
            left = int(count)
            while left:
                piece = bytes(min(left, 65536))
                await responder.write(piece)
                self.written += len(piece)
                left -= len(piece)
            await responder.finish()
        elif kind == "cut":
            await responder.start(200, {})
            await responder.write(b"half")
            responder.cut()
        elif kind == "nothing":
            await responder.send(204, {}, b"")
        else:
            body = b"%s %s %d" % (
                request.method.encode(),
                request.target.encode("latin-1"),
                len(request.body),
            )
            await responder.send(200, {"content-type": "text/plain"}, body)

    def turn_away(self, request: Request) -> RequestRefused | None:
        self.asked.append(request)
        return RequestRefused("not you", status=401) if request.path == "/unwanted" else None

    async def refuse(self, request: Request, responder: Responder, refused: RequestRefused) -> None:
        self.refused.append(refused)
        await responder.send(refused.status, refused.headers, refused.message.encode())


class Wire:
    """A client's raw end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def dribble(self, data: bytes) -> None:
        """Send byte by byte, each in a segment of its own as far as the loop allows."""
        for index in range(len(data)):
            self.writer.write(data[index : index + 1])
            await asyncio.sleep(0)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read one answer: status, headers, body."""
        async with asyncio.timeout(CLIENT_TIMEOUT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            line, *lines = head.strip().split("\r\n")
            headers = {name: value.strip() for name, _, value in (text.partition(":") for text in lines)}
            status = int(line.split()[1])
            if "content-length" in headers:
                return status, headers, await self.reader.readexactly(int(headers["content-length"]))
            if headers.get("transfer-encoding") == "chunked":
                return status, headers, await self._chunks()
            if status in (100, 204, 304):
                return status, headers, b""
            return status, headers, await self.reader.read()

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)
        return body

    async def ended(self) -> bytes:
        """Read to the end of the connection."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                return await self.reader.read()
        return b""

    def reset(self) -> None:
        """Go away as a killed process does."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


@dataclass
class Rig:
    """A server under test, and all clients connected to it."""

    server: HttpServer
    echo: Echo
    clock: FakeClock
    wires: list[Wire] = field(default_factory=list)

    async def connect(self, **options: Any) -> Wire:
        wire = Wire(*await asyncio.open_connection("127.0.0.1", self.server.port, **options))
        self.wires.append(wire)
        return wire

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition without a notification."""
        await until(condition, CLIENT_TIMEOUT_S)

    async def until_empty(self) -> None:
        """Wait until no connection and no request is left."""
        await self.until(lambda: not self.server.state.connections and not self.server.state.active)
        assert self.echo.present == 0

    def later(self, seconds: float) -> None:
        """Move time on, and let the server look at its connections."""
        self.clock.advance(seconds)
        self.server.sweep()


@contextlib.asynccontextmanager
async def running(limits: HttpLimits | None = None, **options: Any) -> AsyncIterator[Rig]:
    """A server while the block runs; afterwards nothing of it may be left."""
    echo, clock = Echo(), FakeClock()
    rounds = Rounds(clock)
    server = HttpServer(echo, limits or HttpLimits(), clock=clock, rounds=rounds, **options)
    await server.start("127.0.0.1", 0)
    rig = Rig(server, echo, clock)
    try:
        yield rig
        server.check()
    finally:
        echo.gate.open()
        for wire in rig.wires:
            await wire.close()
        await server.stop()
    assert not rounds.failures
    assert not server.state.connections
    assert server.state.active == 0
    server.check()
    assert echo.present == 0
