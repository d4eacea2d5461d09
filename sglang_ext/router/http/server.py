"""The server side of HTTP: listens, and hands each connection to a protocol of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import resource
import socket
import ssl
from collections.abc import Sequence
from typing import Any

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.errors import InternalError
from sglang_ext.router.http.connection import ClientConnection
from sglang_ext.router.http.state import HttpLimits, ServerState
from sglang_ext.router.http.types import Handler
from sglang_ext.tasks import Rounds

logger = logging.getLogger("router.http")

SHUTDOWN_GRACE_S = 1.0
"""Default time for running requests to end at shutdown."""
SWEEP_INTERVAL_S = 0.5
"""Between two looks at every connection's clocks."""
BACKLOG = 2048
LEAST_BACKLOG = 16
BACKLOG_SHARE = 16
"""With a low limit of open files, the backlog is the limit divided by this: they are accepted at once."""
HANDSHAKE_TIMEOUT_S = 10.0
OTHER_FILES = 256
"""Open files of a router other than connections of clients and connections for their requests."""
OTHER_SHARE = 5
"""With a low limit of open files, the limit divided by this is reserved for such files."""


class HttpServer:
    """Listens on one address or several until stopped.

    Args:
        limits: of what clients may do.
        tls: with it, HTTPS is spoken, and nothing else.
        clock: seconds.
        grace_s: how long running requests may take to end when the server stops; then they are cut.
    """

    def __init__(
        self,
        handler: Handler,
        limits: HttpLimits,
        *,
        tls: ssl.SSLContext | None = None,
        clock: Clock | None = None,
        rounds: Rounds | None = None,
        grace_s: float = SHUTDOWN_GRACE_S,
    ) -> None:
        self._handler = handler
        self._limits = limits
        self._tls = tls
        self._clock = clock or SystemClock()
        self._rounds = rounds or Rounds(self._clock)
        self._grace_s = grace_s
        self._hurried = False
        self._servers: list[asyncio.Server] = []
        self._sweeping: asyncio.Task[None] | None = None
        self._state: ServerState | None = None
        self.port = 0
        """The port it listens on, once started; the latest, of several."""

    @property
    def state(self) -> ServerState:
        """Counters and connections, once started."""
        if self._state is None:
            raise InternalError("the HTTP server was not started")
        return self._state

    async def start(self, host: str, port: int, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen; a further call adds an address.

        Args:
            host, port: where to listen, unless there are sockets.
            sockets: bound sockets to accept connections from. Another process may hold them, too; a
                connection waits in the socket's backlog until a process accepts it.

        Raises:
            OSError: the address is taken or not ours.
        """
        loop = asyncio.get_running_loop()
        if self._state is None:
            self._state = ServerState(self._handler, self._limits, self._clock, loop)
            self._sweeping = self._rounds.start("connections", self._sweep)
        state, files = self._state, self._limits.open_files
        places: list[dict[str, Any]] = [{"sock": each} for each in sockets]
        for place in places or [{"host": host, "port": port, "reuse_address": True}]:
            server = await loop.create_server(
                lambda: ClientConnection(state),
                backlog=BACKLOG if files is None else max(LEAST_BACKLOG, files // BACKLOG_SHARE),
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_TIMEOUT_S,
                **place,
            )
            self._servers.append(server)
            self.port = server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening, wait up to ``grace_s`` for running requests to end, and cancel the rest."""
        if self._state is None or self._state.stopping:
            return
        servers, self._servers = self._servers, []
        for server in servers:
            server.close()
        state = self._state
        state.stopping = True
        for connection in list(state.connections):
            connection.close_if_idle()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s):
                while state.active and not self._hurried:  # noqa: ASYNC110 - on the way out
                    await asyncio.sleep(0.01)
        tasks = [task for connection in list(state.connections) if (task := connection.cancel()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        while state.connections:  # noqa: ASYNC110 - each ends in the next turn of the loop
            await asyncio.sleep(0)
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.gather(self._sweeping, return_exceptions=True)
        for server in servers:
            await server.wait_closed()

    def hurry(self) -> None:
        """Have ``stop`` wait for nothing any more."""
        self._hurried = True

    async def _sweep(self) -> float:
        self.sweep()
        return SWEEP_INTERVAL_S

    def sweep(self) -> None:
        """Look at the clocks of all connections."""
        state = self.state
        state.tick()
        for connection in list(state.connections):
            connection.sweep(state.now)

    def check(self) -> None:
        """Verify the counters.

        Raises:
            InternalError: one of them is impossible.
        """
        if self._state is not None and self._state.active < 0:
            raise InternalError(f"{self._state.active} requests are being answered")
        if self._state is not None:
            state = self._state
            idle = not state.connections and not state.active
            if state.bodies.used < 0 or (idle and state.bodies.used):
                raise InternalError(f"bodies without a request are held: {state.bodies}")

    def __repr__(self) -> str:
        if self._state is None:
            return "HttpServer(not started)"
        state = self._state
        return f"HttpServer({len(state.connections)} connections, {state.active} active, {state.bodies})"


def raise_file_limit(limits: HttpLimits) -> int | None:
    """Let this process have as many open files as ``limits`` need, or as it may; returns how many that is,
    None for any number."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _files_for(limits)
    if most != resource.RLIM_INFINITY:
        wanted = min(wanted, most)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
        soft = wanted
    return None if soft == resource.RLIM_INFINITY else soft


def limits_within(limits: HttpLimits, files: int | None) -> HttpLimits:
    """The limits, lowered to what so many open files serve: none is lacking to answer a client, if only with
    a 503. A request takes a file for its client and one for its worker; most of the rest is for clients that
    get a 503, because a connection that is not accepted is reset.

    Args:
        files: see ``raise_file_limit``.
    """
    if files is None or files >= _files_for(limits):
        return limits
    spare = files - min(OTHER_FILES, files // OTHER_SHARE)
    requests = max(1, min(limits.max_concurrent_requests, spare // 4))
    refused = max(1, min(limits.more_refused, (spare - requests) // 4))
    connections = max(1, min(limits.max_connections, spare - requests - refused))
    logger.warning(
        "only %d files may be open (ulimit -n): at most %d connections and %d requests at a time",
        files,
        connections,
        requests,
    )
    return dataclasses.replace(
        limits,
        max_connections=connections,
        max_concurrent_requests=requests,
        more_refused=refused,
        open_files=files,
    )


def _files_for(limits: HttpLimits) -> int:
    return limits.max_connections + limits.more_refused + limits.max_concurrent_requests + OTHER_FILES
