"""One client's connection: bytes in, answers back in the order of their requests.

Each state of the connection has a timeout:

    no byte received yet              head_timeout_s, then the connection is closed
    idle between two requests         idle_timeout_s, then the connection is closed
    part of a request's head is in    head_timeout_s, then 408
    part of its body is in            body_grace_s and a least rate, then 408
    the client does not read          stall_timeout_s, then the connection is aborted
    after the last answer             LINGER_S, then the connection is closed; input until then is
                                      discarded, so that the client can read that answer

Pipelined requests wait for the answer before them; beyond ``MAX_WAITING`` the connection is
not read any further. Each request is answered in a task of its own, which is cancelled when the client
disconnects. A client that closes only its sending side counts as disconnected: the server cannot distinguish
the two, and work for a disconnected client must end at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from typing import cast

from sglang_ext.addresses import client_network
from sglang_ext.router.http.body import packing, unpack
from sglang_ext.router.http.messages import CONTINUE, HTTP2_REFUSAL, refusal
from sglang_ext.router.http.reader import Parsed, Phase, RequestReader
from sglang_ext.router.http.responder import HttpResponder
from sglang_ext.router.http.state import ServerState
from sglang_ext.router.http.types import Handler, Request, RequestRefused

logger = logging.getLogger("router.http")

LINGER_S = 2.0
MAX_WAITING = 32
"""Requests of one connection that may wait for the answer to an earlier one."""
MAX_WAITING_BYTES = 1 << 16
WRITE_BUFFER_BYTES = 1 << 18
"""Bytes that a client may leave unread before writing to it waits."""


class ClientConnection(asyncio.Protocol):
    """The server's end of one connection.

    Args:
        state: shared by all connections of the server.
    """

    __slots__ = (
        "_drain", "_fresh", "_held", "_paused", "_reader", "_responder", "_since", "_state", "_stopped_since",
        "_task", "_waiting", "_waiting_bytes", "gone", "transport",
    )  # fmt: skip

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._reader = RequestReader(
            state.limits.max_head_bytes, state.limits.max_body_bytes, state.bodies, state.handler.turn_away
        )
        self._since = state.now
        """When the reader's phase began."""
        self._fresh = True
        """No byte has been received."""
        self._waiting: deque[Parsed] = deque()
        self._waiting_bytes = 0
        self._paused = False
        """Nothing is read, because too much waits."""
        self._task: asyncio.Task[None] | None = None
        self._held = 0
        """Bytes of the body of the request that is being answered."""
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
        peer = transport.get_extra_info("peername")
        self._reader.client = client_network(str(peer[0])) if isinstance(peer, tuple) else ""
        one_too_many = self._state.enter(self, self.transport)
        if one_too_many is not None:
            self.transport.write(one_too_many)
            self._hang_up()

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        before = reader.phase
        self._fresh = False
        found = reader.feed(data)
        for parsed in found:
            self._arrived(parsed)
        if found or reader.phase is not before:
            self._since = self._state.now
        if reader.expects:
            self._say_continue()
        if reader.speaks_http2 and before is not Phase.DEAF:
            self._refuse_http2()

    def _refuse_http2(self) -> None:
        if self._task is not None:
            self.transport.abort()
            return
        self.transport.write(HTTP2_REFUSAL)
        self._hang_up()

    def eof_received(self) -> None:
        self._leave()  # returning None closes the transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._state.leave(self)

    def _leave(self) -> None:
        self.gone = True
        self._reader.abandon()
        self._state.bodies.give(sum([len(parsed.request.body) for parsed in self._waiting]))
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

    # -- requests ---------------------------------------------------------------------------------

    def _arrived(self, parsed: Parsed) -> None:
        if self._task is None and not self._waiting:
            self._begin(parsed)
            return
        self._waiting.append(parsed)
        self._waiting_bytes += len(parsed.request.body)
        too_much = len(self._waiting) >= MAX_WAITING or self._waiting_bytes >= MAX_WAITING_BYTES
        if too_much and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _begin(self, parsed: Parsed) -> None:
        state, request = self._state, parsed.request
        responder = HttpResponder(
            self, head_only=parsed.head_only, chunks=parsed.chunks, keep=parsed.keep and not state.stopping
        )
        refused = parsed.refused or state.admit(request)
        coding = packing(request.headers)
        if refused is None and coding is not None:
            refused = state.handler.turn_away(request)  # nothing is unpacked for a client without a key
        if refused is not None:
            coroutine = state.handler.refuse(request, responder, refused)
        elif coding is not None:
            coroutine = _unpacked(state.handler, request, responder, coding, state)
        else:
            coroutine = state.handler.handle(request, responder)
        self._responder = responder
        self._held = len(request.body)
        state.active += 1
        self._task = state.loop.create_task(coroutine)
        self._task.add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._state.active -= 1
        self._state.bodies.give(self._held)
        self._held = 0
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
            parsed = self._waiting.popleft()
            self._waiting_bytes -= len(parsed.request.body)
            self._begin(parsed)
        else:
            self._free()

    def _free(self) -> None:
        """Resume reading when every received request is answered."""
        if self._paused:
            self._paused = False
            self._since = self._state.now
            self.transport.resume_reading()
        elif self._reader.phase is Phase.IDLE:
            self._since = self._state.now
        self._say_continue()

    def _say_continue(self) -> None:
        """Send ``100 Continue``, if the client waits for it and has every earlier answer."""
        reader = self._reader
        if reader.expects and self._task is None and not self._waiting:
            reader.expects = False
            if not reader.body_size:
                self.transport.write(CONTINUE)

    # -- ends -------------------------------------------------------------------------------------

    def _hang_up(self) -> None:
        """Close once the client has read the written bytes. Closing with unread input would reset the
        connection, and the client could lose the answer."""
        self._reader.phase = Phase.DEAF
        self._since = self._state.now
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    def close_if_idle(self) -> None:
        """Close now, or after the answer that is under way."""
        if self._task is None:
            self.transport.close()
        elif self._responder is not None and not self._responder.started:
            self._responder.keep = False

    def sweep(self, now: float) -> None:
        """Look at the clocks."""
        limits, phase = self._state.limits, self._reader.phase
        waited = now - self._since
        if self._drain is not None and now - self._stopped_since > limits.stall_timeout_s:
            self.transport.abort()
        elif phase is Phase.DEAF:
            # After an abort, the kernel still sends its own buffer, but the transport's buffer is lost.
            unsent = self.transport.get_write_buffer_size() > 0
            if self._task is None and waited > (limits.stall_timeout_s if unsent else LINGER_S):
                self.transport.abort()
        elif phase is Phase.IDLE:
            allowed = limits.head_timeout_s if self._fresh else limits.idle_timeout_s
            if self._task is None and waited > allowed:
                self.transport.close()
        elif not self._paused and waited > self._allowed():
            late = refusal(408, "the request did not come in time", "request_timeout")
            self._since = now
            self._arrived(self._reader.refuse(late))

    def _allowed(self) -> float:
        limits = self._state.limits
        if self._reader.phase is Phase.HEAD:
            return limits.head_timeout_s
        return limits.body_grace_s + self._reader.body_size / limits.body_bytes_per_s

    def cancel(self) -> asyncio.Task[None] | None:
        """End the request that is being answered, and the connection; returns the task that ends."""
        task = self._task
        if task is not None:
            task.cancel()
        # Before Python 3.11.4, a TLS transport that has closed already cannot be aborted.
        with contextlib.suppress(AttributeError):
            self.transport.abort()
        return task

    def __repr__(self) -> str:
        busy = "answering" if self._task is not None else "free"
        return f"ClientConnection({self._reader.phase.name}, {busy}, waiting={len(self._waiting)})"


async def _unpacked(
    handler: Handler, request: Request, responder: HttpResponder, coding: str, state: ServerState
) -> None:
    """Answer a request with a compressed body."""
    refusal: RequestRefused | None = None
    body = b""
    try:
        body = await unpack(request.body, coding, state.limits.max_body_bytes, state.bodies)
    except RequestRefused as refused:
        refusal = refused.with_traceback(None)  # the traceback keeps this frame and its body alive
    if refusal is not None:
        await handler.refuse(request, responder, refusal)
        return
    plain = Request(request.method, request.path, request.target, request.headers, body, request.client)
    try:
        await handler.handle(plain, responder)
    finally:
        state.bodies.give(len(body))
