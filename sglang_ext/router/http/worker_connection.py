"""One connection to a worker: requests out, one at a time, and answers back.

A connection is idle, or carries one exchange from ``send`` until its answer has been read or abandoned.
Bytes that arrive on an idle connection close it, since they could be taken for the answer to the next
request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from sglang_ext.errors import SglangExtError
from sglang_ext.router.http.messages import NAMES, add_header, header_name
from sglang_ext.router.http.types import HOP_BY_HOP, ConnectionLost

BUFFERED_BYTES = 1 << 18
"""Bytes of an answer that wait for their reader before the worker is not read any further."""
MAX_HEAD_BYTES = 1 << 18
JOINED_BYTES = 1 << 14
"""Longer bodies are written beside their head instead of being copied behind it."""


class _StopReading(Exception):
    """Raised out of the parser's callbacks once nothing more is to be parsed."""


class WorkerConnection(asyncio.Protocol):
    """The router's end of one connection.

    Args:
        origin: the worker's URL, for texts.
        on_closed: told when the connection has ended.
    """

    __slots__ = (
        "_chunked",
        "_failure",
        "_head_bytes",
        "_head_only",
        "_loop",
        "_on_closed",
        "_origin",
        "_parser",
        "_paused",
        "_pieces",
        "_size",
        "_to_the_end",
        "_waiter",
        "answering",
        "closed",
        "complete",
        "headers",
        "idle_since",
        "received",
        "reusable",
        "status",
        "transport",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        origin: str,
        on_closed: Callable[[WorkerConnection], None],
    ) -> None:
        self._loop = loop
        self._origin = origin
        self._on_closed = on_closed
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._paused = False
        self._head_bytes = 0
        self._head_only = False
        self._chunked = False
        self._to_the_end = False
        """The body ends with the connection."""
        self._failure: SglangExtError | None = None
        self.answering = False
        """The head of the answer has arrived."""
        self.complete = True
        """The whole answer has; True while idle."""
        self.reusable = False
        self.received = False
        """Anything of the answer has arrived."""
        self.closed = False
        self.status = 0
        self.headers: dict[str, str] = {}
        self.idle_since = 0.0
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)  # until the connection is made

    # -- one exchange -----------------------------------------------------------------------------

    def send(self, head: bytes, body: bytes, *, head_only: bool) -> None:
        """Begin an exchange.

        Args:
            head_only: the request is HEAD: its answer has no body, whatever its headers announce.
        """
        self.complete = self.answering = self.received = self._to_the_end = self._chunked = False
        self.reusable = False
        self._head_only = head_only
        self._failure = None
        self._head_bytes = 0
        self.headers = {}
        if len(body) <= JOINED_BYTES:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    async def arrival(self) -> None:
        """Wait until there is something new: the head, a piece of the body, or the end.

        Raises:
            SglangExtError: why there will be nothing more.
        """
        self._raise_failure()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
        if not self._pieces:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def take(self) -> bytes:
        """The bytes of the body that have arrived since the last call."""
        pieces = self._pieces
        if not pieces:
            return b""
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        pieces.clear()
        self._size = 0
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        return data

    def fail(self, failure: SglangExtError) -> None:
        """End the exchange and the connection."""
        if not self.complete and self._failure is None:
            self._failure = failure
        self.reusable = False
        self.transport.abort()
        self._wake()

    def interrupt(self, failure: SglangExtError) -> None:
        """End the exchange for its reader with ``failure``, and discard unread pieces, even of a complete
        answer."""
        self._pieces.clear()
        self._size = 0
        self.complete = False
        self.fail(failure)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.complete:
            self.reusable = False
            self.transport.abort()
            return
        self.received = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # Bytes behind a complete answer are ignored; the connection is not reused.
            if not self.complete:
                self.fail(ConnectionLost(f"{self._origin} does not answer in HTTP/1.1: {error}"))
            self.reusable = False
        if not self.answering:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.complete:
                self.fail(ConnectionLost(f"{self._origin} answers with a head without an end"))
        if self._size > BUFFERED_BYTES and not self._paused and not self.complete:
            self._paused = True
            self.transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        if self.answering and self._to_the_end:
            self.complete = True
        # Returning None closes the transport.

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.reusable = False
        if not self.complete and self._failure is None:
            if self.answering and self._to_the_end and exc is None:
                self.complete = True
            else:
                what = "broke off its answer" if self.answering else "closed the connection"
                self._failure = ConnectionLost(f"{self._origin} {what}{f': {exc}' if exc else ''}")
        self._wake()
        self._on_closed(self)

    # -- the parser's callbacks -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.complete:  # bytes behind the answer
            self.reusable = False
            self.transport.abort()
            raise _StopReading

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.answering:
            key = NAMES.get(name)
            if key is None:
                key = header_name(name)
            if key == "transfer-encoding":
                self._chunked = True
            elif key not in HOP_BY_HOP:
                if key not in self.headers:
                    self.headers[key] = value.decode("latin-1")
                else:
                    add_header(self.headers, key, value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        parser = self._parser
        status = parser.get_status_code()
        if status < 200:
            self.headers = {}
            return
        self.status = status
        self.answering = True
        bodiless = self._head_only or status in (204, 304)
        keep = parser.should_keep_alive()
        self._to_the_end = not (self._chunked or bodiless or "content-length" in self.headers)
        if bodiless:
            # The parser expects a body where headers speak of one.
            self.complete = True
            self.reusable = keep and not self._head_only
        else:
            self.reusable = keep

    def on_body(self, piece: bytes) -> None:
        if not self.complete:
            self._pieces.append(piece)
            self._size += len(piece)

    def on_message_complete(self) -> None:
        if self.answering:
            self.complete = True

    def __repr__(self) -> str:
        what = "closed" if self.closed else "idle" if self.complete else "busy"
        return f"WorkerConnection({self._origin}, {what})"
