"""The client side of HTTP: connections to workers, kept alive. Independent of routing.

When a worker closes a kept-alive connection just as a request is written to it, the router cannot determine
whether the worker has seen the request. To avoid this, idle connections are closed before the worker
closes them, and an idle connection is checked before it is used. If it happens all the same, ``GET`` and
``HEAD`` are sent again on a new connection; other methods raise ``ConnectionLost``, since the request may
have crashed the worker.
"""

from __future__ import annotations

import asyncio
import errno
import math
import select
import ssl
import time
from collections import deque
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from sglang_ext.errors import InternalError, SglangExtError
from sglang_ext.router.http.messages import request_head
from sglang_ext.router.http.types import (
    ConnectFailed,
    ConnectionLost,
    NoFilesLeft,
    RequestTimeout,
    Upstream,
    UpstreamResponse,
)
from sglang_ext.router.http.worker_connection import WorkerConnection

KEEP_ALIVE_S = 3.0
"""Idle connections are closed after this time, before the worker closes them (SGLang's uvicorn: 5 s)."""
LOOK_AFTER_S = 0.05
"""A connection that was idle for longer is looked at before it is used."""
OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of connecting that are caused by this side."""
REPEATABLE = frozenset({"GET", "HEAD"})
SLICES = 10
"""Parts of the time to connect; each turn of the event loop uses up at most one. Without them, a process that
was not scheduled could time out before it sees an established connection, although the worker is healthy."""


class HttpUpstream(Upstream):
    """Workers over HTTP/1.1.

    Args:
        connect_timeout_s: seconds to establish a connection.
        tls: for workers with ``https`` URLs; called in a thread, for each of them once.
    """

    def __init__(
        self,
        connect_timeout_s: float = 2.0,
        *,
        tls: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._make_tls = tls
        self._pools: dict[str, _Pool] = {}

    async def open(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> UpstreamResponse:
        slash = url.find("/", 8)  # behind https://
        origin, target = (url, "/") if slash < 0 else (url[:slash], url[slash:])
        pool = self._pools.get(origin) or await self._new_pool(origin)
        head = request_head(method, target, pool.host_header, headers or {}, len(body))
        started = pool.loop.time() if timeout_s is not None else 0.0
        connection = pool.take()
        kept = connection is not None
        while True:
            if connection is None:
                connection = await self._connect(pool, origin, timeout_s)
            response = _Response(connection, pool, url)
            try:
                connection.send(head, body, head_only=method == "HEAD")
                if timeout_s is not None:
                    pool.deadlines.set(response, started + timeout_s, timeout_s)
                while not connection.answering:
                    await connection.arrival()
                response.begin()
                return response
            except ConnectionLost:
                response.close()
                if not kept or connection.received or method not in REPEATABLE:
                    raise
            except BaseException:
                response.close()
                raise
            connection, kept = None, False

    async def _connect(self, pool: _Pool, origin: str, timeout_s: float | None) -> WorkerConnection:
        limit, hurried = self._connect_timeout_s, False
        if timeout_s is not None and timeout_s < limit:
            limit, hurried = timeout_s, True
        connecting = asyncio.ensure_future(self._connected(pool))
        try:
            for _ in range(SLICES):
                if not connecting.done():
                    await asyncio.wait((connecting,), timeout=limit / SLICES)
            if connecting.done():
                return connecting.result()
        except OSError as error:  # ssl.SSLError is one
            if error.errno in OURS:
                # Not ConnectFailed: the worker may be healthy and must not count as dead.
                raise NoFilesLeft(f"no connection to {origin} can be made now: {error}") from error
            raise ConnectFailed(f"cannot connect to {origin}: {error}") from error
        except asyncio.CancelledError:
            _give_up(connecting)
            raise
        _give_up(connecting)
        if hurried:
            raise RequestTimeout(f"{origin} did not answer within {limit} s")
        raise ConnectFailed(f"cannot connect to {origin} within {limit} s")

    async def _connected(self, pool: _Pool) -> WorkerConnection:
        """A new connection; where files are lacking for it, the idle ones of all workers make room."""
        try:
            return await pool.connect()
        except OSError as error:
            if error.errno not in OURS or not self._drop_idle():
                raise
        await asyncio.sleep(0)  # closed transports end in the next turn of the loop
        return await pool.connect()

    def _drop_idle(self) -> bool:
        """Close all idle connections; whether there were any."""
        idle = [connection for pool in self._pools.values() for connection in pool.idle]
        for connection in idle:
            connection.transport.abort()
        return bool(idle)

    async def _new_pool(self, origin: str) -> _Pool:
        parts = urlsplit(origin)
        tls = await asyncio.to_thread(self._make_tls) if parts.scheme == "https" else None
        pool = _Pool(asyncio.get_running_loop(), origin, parts.hostname or "", parts.port, tls)
        return self._pools.setdefault(origin, pool)

    async def close(self) -> None:
        connections = [connection for pool in self._pools.values() for connection in pool.connections]
        for connection in connections:
            connection.transport.abort()
        # Closed transports end in the next turn of the loop.
        while self.open_connections:  # noqa: ASYNC110
            await asyncio.sleep(0)
        for pool in self._pools.values():
            pool.deadlines.close()
        self._pools.clear()

    @property
    def open_connections(self) -> int:
        """Connections to workers, idle ones included."""
        return sum(len(pool.connections) for pool in self._pools.values())

    def __repr__(self) -> str:
        idle = sum(len(pool.idle) for pool in self._pools.values())
        return f"HttpUpstream({len(self._pools)} workers, {self.open_connections} connections, {idle} idle)"


class _Pool:
    """The connections to one worker. The last one used is the first to be used again."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        origin: str,
        host: str,
        port: int | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.loop = loop
        self._origin = origin
        self._host = host
        self._port = port or (443 if tls else 80)
        self._tls = tls
        self.host_header = origin.partition("://")[2]
        self.idle: deque[WorkerConnection] = deque()
        """Oldest first."""
        self.connections: set[WorkerConnection] = set()
        self.deadlines = Deadlines(loop)

    async def connect(self) -> WorkerConnection:
        """A new connection. TCP_NODELAY is set by the event loop."""
        _, connection = await self.loop.create_connection(
            lambda: WorkerConnection(self.loop, self._origin, self._ended),
            self._host,
            self._port,
            ssl=self._tls,
        )
        self.connections.add(connection)
        return connection

    def take(self) -> WorkerConnection | None:
        """An idle connection that can be used, if there is one."""
        idle = self.idle
        while idle:
            connection = idle.pop()
            age = time.monotonic() - connection.idle_since
            if age > KEEP_ALIVE_S:
                # Those before it are older.
                for old in (connection, *idle):
                    old.transport.abort()
                idle.clear()
                return None
            if connection.closed or connection.transport.is_closing():
                continue
            if age > LOOK_AFTER_S and self._tls is None and _readable(connection.transport):
                connection.transport.abort()
                continue
            return connection
        return None

    def give(self, connection: WorkerConnection) -> None:
        """Take a connection back whose answer has been read."""
        now = connection.idle_since = time.monotonic()
        idle = self.idle
        while idle and now - idle[0].idle_since > KEEP_ALIVE_S:
            idle.popleft().transport.abort()
        idle.append(connection)

    def _ended(self, connection: WorkerConnection) -> None:
        self.connections.discard(connection)
        if connection in self.idle:
            self.idle.remove(connection)


def _give_up(connecting: asyncio.Task[WorkerConnection]) -> None:
    """End a connection that is being made, or has just been made."""

    def close(ended: asyncio.Task[WorkerConnection]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            ended.result().transport.abort()

    connecting.cancel()
    connecting.add_done_callback(close)


def _readable(transport: asyncio.Transport) -> bool:
    """Whether something waits to be read: on an idle connection, its end."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


class Deadlines:
    """Until when answers have to be complete: one timer for all that are open, which rarely fires."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: dict[_Response, tuple[float, float]] = {}
        """Answer -> (moment of the loop's time, seconds that it had)."""
        self._due = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def set(self, response: _Response, moment: float, timeout_s: float) -> None:
        """Have an answer expire, unless it is dropped before."""
        self._open[response] = moment, timeout_s
        if moment < self._due:
            self._wait_until(moment)

    def drop(self, response: _Response) -> None:
        """It is not waited for any more."""
        self._open.pop(response, None)

    def close(self) -> None:
        """End."""
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _wait_until(self, moment: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._due = moment
        self._timer = self._loop.call_at(moment, self._look)

    def _look(self) -> None:
        self._timer, due, self._due = None, self._due, math.inf
        # The loop may call a little early by its own reckoning.
        now = max(due, self._loop.time())
        for response, (moment, timeout_s) in list(self._open.items()):
            if moment <= now:
                del self._open[response]
                response.expire(timeout_s)
        if self._open:
            self._wait_until(min(moment for moment, _ in self._open.values()))


class _Response(UpstreamResponse):
    __slots__ = ("_connection", "_pool", "_url", "headers", "status")

    def __init__(self, connection: WorkerConnection, pool: _Pool, url: str) -> None:
        self._connection: WorkerConnection | None = connection
        self._pool = pool
        self._url = url
        self.status = 0
        self.headers: Mapping[str, str] = {}

    def begin(self) -> None:
        """Take status and headers from the arrived head."""
        connection = self._open()
        self.status, self.headers = connection.status, connection.headers

    def expire(self, timeout_s: float) -> None:
        """Its time is over."""
        if self._connection is not None:
            self._connection.fail(
                RequestTimeout(f"{self._url} did not finish its answer within {timeout_s} s")
            )

    def _open(self) -> WorkerConnection:
        if self._connection is None:
            raise InternalError(f"the answer of {self._url} was closed already")
        return self._connection

    async def piece(self) -> bytes:
        connection = self._open()
        while not (data := connection.take()) and not connection.complete:
            await connection.arrival()
        return data

    def arrived(self) -> bytes | None:
        connection = self._open()
        return connection.take() if connection.complete else None

    async def read(self) -> bytes:
        connection = self._open()
        pieces = []
        while not connection.complete:
            pieces.append(connection.take())
            await connection.arrival()
        last = connection.take()
        return b"".join([*pieces, last]) if pieces else last

    def interrupt(self, error: SglangExtError) -> None:
        if self._connection is not None:
            self._connection.interrupt(error)

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._pool.deadlines.drop(self)
        if connection.complete and connection.reusable:
            connection.take()
            self._pool.give(connection)
        else:
            connection.transport.abort()
