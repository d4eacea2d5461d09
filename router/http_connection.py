"""One client's connection: bytes in, requests out, answers back in their order.

A connection is in one of these phases, and each has its clock:

    IDLE   nothing of a request has come      idle_timeout_s, then it is closed
    HEAD   part of a request's head has       head_timeout_s, then 408
    BODY   part of its body has               body_grace_s and a least rate, then 408
    DEAF   nothing more will be read: it was refused or announced its end; what still comes is thrown
           away until the client is through, so that it can read the answer (LINGER_S)

Requests that come before the answer to the one before them wait; beyond ``MAX_WAITING`` the connection is
not read any further. Each request is answered in a task of its own, which is cancelled when the client
goes away. A client that closes its sending side only is taken to have gone away: nobody can tell the two
apart, and work for nobody must end at once.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from typing import cast

import httptools

from router.exchange import Handler, Request, RequestRefused
from router.http_body import BodyBuffer, packing, unpack
from router.http_messages import (
    CONTINUE,
    HTTP2_REFUSAL,
    add_header,
    check_head,
    decoded_path,
    drop_named,
    header_name,
    origin_form,
    refusal,
    too_large,
)
from router.http_responder import HttpResponder
from router.http_state import ServerState

logger = logging.getLogger("router.http")

LINGER_S = 2.0
MAX_WAITING = 32
"""Requests of one connection that may wait for the answer to an earlier one."""
MAX_WAITING_BYTES = 1 << 16
MAX_OVERHEAD = 16
"""Bytes on the wire per byte of a body, beyond the size of a head: chunks of one byte need 6."""
WRITE_BUFFER_BYTES = 1 << 18
"""Bytes that a client may leave unread before writing to it waits."""


class Phase(enum.Enum):
    """Where a connection is; see above."""

    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()
    DEAF = enum.auto()


class _StopReading(Exception):
    """Raised out of the parser's callbacks once nothing more is to be parsed."""


class ClientConnection(asyncio.Protocol):
    """The server's end of one connection.

    Args:
        state: what all connections of the server share.
    """

    __slots__ = (
        "_body", "_drain", "_expects", "_headers", "_keep", "_method", "_parser", "_phase", "_raw",
        "_reading", "_replaying", "_responder", "_since", "_state", "_stopped_since", "_target", "_task",
        "_upgrading", "_version", "_waiting", "_waiting_bytes", "gone", "transport",
    )  # fmt: skip

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._parser = httptools.HttpRequestParser(self)
        self._phase = Phase.IDLE
        self._since = state.now
        """When the phase began."""
        self._raw = 0
        """Bytes since the message began, as they came."""
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body = BodyBuffer(state.limits.max_body_bytes)
        self._method = "GET"
        self._version = "1.1"
        self._keep = True
        self._expects = False
        self._upgrading = False
        self._replaying = False
        self._waiting: deque[tuple[Request, HttpResponder, RequestRefused | None]] = deque()
        self._waiting_bytes = 0
        self._reading = True
        self._task: asyncio.Task[None] | None = None
        self._responder: HttpResponder | None = None
        self._drain: asyncio.Future[None] | None = None
        self._stopped_since = 0.0
        """When the client stopped reading."""
        self.gone = False
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)  # until the connection is made

    # -- the connection ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        refusal = self._state.enter(self, self.transport)
        if refusal is not None:
            self._enter_phase(Phase.DEAF)
            self.transport.write(refusal)
            self._hang_up()

    def data_received(self, data: bytes) -> None:
        if self._phase is Phase.DEAF:
            return
        if self._phase is Phase.IDLE:
            self._enter_phase(Phase.HEAD)
        self._raw += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._after_upgrade(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._stopped(error)
        if self._phase is Phase.HEAD and self._raw > self._state.limits.max_head_bytes:
            self._refuse(self._head_too_large())
        elif (
            self._phase is Phase.BODY
            and self._raw > self._state.limits.max_head_bytes * 2 + MAX_OVERHEAD * self._body.size
        ):
            self._refuse(refusal(400, "the body's chunks are mostly not body", "bad_request"))

    def eof_received(self) -> None:
        # Returning None closes the transport.
        self._leave()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._state.leave(self)

    def _leave(self) -> None:
        self.gone = True
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        if self._drain is None and not self.gone:
            self._drain = self._state.loop.create_future()
            self._stopped_since = self._state.now

    def resume_writing(self) -> None:
        drain, self._drain = self._drain, None
        if drain is not None and not drain.done():
            drain.set_result(None)

    @property
    def drain(self) -> asyncio.Future[None] | None:
        """Done when the client reads again; ``None`` while it does."""
        return self._drain

    @property
    def date(self) -> str:
        """For the Date header."""
        return self._state.date

    # -- what the parser finds --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        self._enter_phase(Phase.HEAD)
        self._target = b""
        self._headers = {}
        self._expects = False

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._replaying or self._phase is not Phase.HEAD:
            return  # a trailer, which nobody here asks for
        if not add_header(self._headers, header_name(name), value.decode("latin-1")):
            self._refuse(refusal(400, f"{header_name(name)} is there twice", "bad_request"))
            raise _StopReading

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        headers = self._headers
        self._method = self._parser.get_method().decode("latin-1")
        self._version = self._parser.get_http_version()
        self._keep = self._version == "1.1" and self._parser.should_keep_alive()
        self._upgrading = self._parser.should_upgrade()
        self._body = BodyBuffer(self._state.limits.max_body_bytes)
        self._enter_phase(Phase.BODY)
        refused = self._judge(headers)
        if refused is not None:
            self._refuse(refused)
            raise _StopReading
        if "connection" in headers:
            drop_named(headers)
        if "expect" in headers and self._version != "1.0":
            self._expects = True
            self._say_continue()

    def _judge(self, headers: dict[str, str]) -> RequestRefused | None:
        size = len(self._target) + sum([len(name) + len(value) + 4 for name, value in headers.items()])
        if size > self._state.limits.max_head_bytes:
            return self._head_too_large()
        refused = check_head(self._version, self._method, self._target.decode("latin-1"), headers)
        if refused is not None:
            return refused
        length = headers.get("content-length")
        if length is not None and int(length) > self._state.limits.max_body_bytes:
            return too_large(self._state.limits.max_body_bytes)
        return None

    def on_body(self, piece: bytes) -> None:
        refused = self._body.add(piece)
        if refused is not None:
            self._refuse(refused)
            raise _StopReading

    def on_message_complete(self) -> None:
        if self._upgrading:
            return  # only the parser thinks so; see _after_upgrade
        request = self._request(self._body.take())
        head_only = self._method == "HEAD"
        responder = HttpResponder(self, head_only=head_only, chunks=self._version != "1.0", keep=self._keep)
        self._raw = 0
        self._expects = False
        self._enter_phase(Phase.IDLE if self._keep else Phase.DEAF)
        self._arrived(request, responder, None)

    def _after_upgrade(self, rest: memoryview) -> None:
        """Go on after a head that offers another protocol, which the parser took for an accepted offer,
        forgetting the body. A new parser is told the body's length again, and what follows."""
        while True:
            self._upgrading = False
            self._parser = httptools.HttpRequestParser(self)
            if self._phase is not Phase.BODY:
                return
            length, coding = int(self._headers.get("content-length", 0)), "transfer-encoding" in self._headers
            if length or coding:
                framing = "transfer-encoding: chunked" if coding else f"content-length: {length}"
                self._replaying = True
                self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode())
                self._replaying = False
            else:
                self.on_message_complete()
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._stopped(error)
                return

    def _stopped(self, error: httptools.HttpParserError) -> None:
        """The parser will not go on."""
        if self._phase is Phase.DEAF:
            return  # by our own doing, or behind a request that announced the end
        if isinstance(error, httptools.HttpParserCallbackError):
            logger.error("an error of the router while reading a request", exc_info=error)
            self.transport.abort()
            return
        if self._parser.get_method() == b"PRI":
            self._enter_phase(Phase.DEAF)
            self.transport.write(HTTP2_REFUSAL)
            self._hang_up()
            return
        self._refuse(refusal(400, f"the request is not HTTP/1.1: {error}", "bad_request"))

    # -- requests ---------------------------------------------------------------------------------

    def _request(self, body: bytes) -> Request:
        target = origin_form(self._target.decode("latin-1"))
        # HEAD is GET whose body stays here, which who answers need not know.
        method = "GET" if self._method == "HEAD" else self._method
        return Request(method, decoded_path(target), target, self._headers, body)

    def _refuse(self, refused: RequestRefused) -> None:
        """Answer what is being read with an error, after what came before it, and read no more."""
        head_only = self._phase is Phase.BODY and self._method == "HEAD"
        request = self._request(b"") if self._phase is Phase.BODY else Request("", "", "")
        self._enter_phase(Phase.DEAF)
        self._body = BodyBuffer(0)
        responder = HttpResponder(self, head_only=head_only, chunks=False, keep=False)
        self._arrived(request, responder, refused)

    def _head_too_large(self) -> RequestRefused:
        limit = self._state.limits.max_head_bytes
        return refusal(431, f"the head of the request is larger than {limit} bytes", "head_too_large")

    def _arrived(self, request: Request, responder: HttpResponder, refused: RequestRefused | None) -> None:
        if self._task is None and not self._waiting:
            self._begin(request, responder, refused)
            return
        self._waiting.append((request, responder, refused))
        self._waiting_bytes += len(request.body)
        if self._reading and (len(self._waiting) >= MAX_WAITING or self._waiting_bytes >= MAX_WAITING_BYTES):
            self._reading = False
            self.transport.pause_reading()

    def _begin(self, request: Request, responder: HttpResponder, refused: RequestRefused | None) -> None:
        handler = self._state.handler
        refused = refused or self._state.admit(request)
        coding = packing(request.headers)
        if refused is not None:
            coroutine = handler.refuse(request, responder, refused)
        elif coding is not None:
            limit = self._state.limits.max_body_bytes
            coroutine = _unpacked(handler, request, responder, coding, limit)
        else:
            coroutine = handler.handle(request, responder)
        self._responder = responder
        self._state.active += 1
        self._task = self._state.loop.create_task(coroutine)
        self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._state.active -= 1
        self._task = None
        responder, self._responder = self._responder, None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.error("a request was not answered", exc_info=error)
        if self.gone or responder is None:
            return
        if not responder.finished:
            self.transport.abort()
        elif not responder.keep or self._state.stopping:
            self._hang_up()
        elif self._waiting:
            request, following, refused = self._waiting.popleft()
            self._waiting_bytes -= len(request.body)
            self._begin(request, following, refused)
        else:
            self._idle_again()

    def _idle_again(self) -> None:
        if self._phase is Phase.DEAF:
            self._hang_up()
            return
        if self._phase is Phase.IDLE:
            self._since = self._state.now
        if not self._reading:
            self._reading = True
            self._since = self._state.now
            self.transport.resume_reading()
        self._say_continue()

    def _say_continue(self) -> None:
        """Ask for the body, if the client waits for that and has every earlier answer."""
        if self._expects and self._task is None and not self._waiting and not self._body.size:
            self._expects = False
            self.transport.write(CONTINUE)

    # -- ends -------------------------------------------------------------------------------------

    def _enter_phase(self, phase: Phase) -> None:
        self._phase = phase
        self._since = self._state.now

    def _hang_up(self) -> None:
        """Close once the client has read what was written. Closing with unread input would reset the
        connection, and could take the answer with it."""
        self._enter_phase(Phase.DEAF)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def close_if_idle(self) -> None:
        """Close unless a request is being answered; after that, if one is."""
        if self._task is None:
            self.transport.close()
        elif self._responder is not None and not self._responder.started:
            self._responder.keep = False

    def sweep(self, now: float) -> None:
        """Look at the clocks."""
        limits = self._state.limits
        waited = now - self._since
        if self._drain is not None and now - self._stopped_since > limits.stall_timeout_s:
            self.transport.abort()
        elif self._phase is Phase.DEAF:
            # What the system has taken to send is sent after an abort too; what waits here is not.
            unsent = self.transport.get_write_buffer_size() > 0
            if self._task is None and waited > (limits.stall_timeout_s if unsent else LINGER_S):
                self.transport.abort()
        elif self._phase is Phase.IDLE:
            if self._task is None and waited > limits.idle_timeout_s:
                self.transport.close()
        elif self._reading and waited > self._allowed():
            self._refuse(refusal(408, "the request did not come in time", "request_timeout"))

    def _allowed(self) -> float:
        limits = self._state.limits
        if self._phase is Phase.HEAD:
            return limits.head_timeout_s
        return limits.body_grace_s + self._body.size / limits.body_bytes_per_s

    def cancel(self) -> asyncio.Task[None] | None:
        """End the request that is being answered, and the connection; returns the task that ends."""
        task = self._task
        if task is not None:
            task.cancel()
        self.transport.abort()
        return task

    def __repr__(self) -> str:
        busy = "answering" if self._task is not None else "free"
        return f"ClientConnection({self._phase.name}, {busy}, waiting={len(self._waiting)})"


async def _unpacked(
    handler: Handler, request: Request, responder: HttpResponder, coding: str, limit: int
) -> None:
    """Answer a request whose body came compressed."""
    try:
        body = await unpack(request.body, coding, limit)
    except RequestRefused as refused:
        await handler.refuse(request, responder, refused)
        return
    plain = Request(request.method, request.path, request.target, request.headers, body)
    await handler.handle(plain, responder)
