"""State shared by the connections of one server: limits, clock, and the open connections."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from email.utils import formatdate
from typing import Protocol

import orjson

from sglang_ext.clock import Clock
from sglang_ext.router.http.body import BodyBudget
from sglang_ext.router.http.messages import answer_head
from sglang_ext.router.http.types import Handler, Request, RequestRefused

RETRY_AFTER_S = 1
ALWAYS_ADMITTED = frozenset({"/health", "/ready", "/metrics"})
"""Answered at any load: monitoring must be able to see that the router is busy."""


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Limits of the HTTP server for clients, in seconds and bytes."""

    max_body_bytes: int = 512 << 20
    max_total_body_bytes: int = 2 << 30
    """Of all requests that are being read, wait or are being answered."""
    max_head_bytes: int = 1 << 16
    max_connections: int = 16_384
    max_concurrent_requests: int = 4096
    more_refused: int = 256
    """Connections beyond ``max_connections`` that get a 503 at any time; further ones are only closed."""
    open_files: int | None = None
    """How many files may be open (``ulimit -n``), where that is why the limits are lower than configured."""
    idle_timeout_s: float = 75.0
    """Between requests."""
    head_timeout_s: float = 10.0
    """For the whole head of a request, from its first byte."""
    body_grace_s: float = 30.0
    """For the whole body, extended at ``body_bytes_per_s`` for the bytes received."""
    body_bytes_per_s: float = 8192.0
    stall_timeout_s: float = 120.0
    """Without a byte read by a client that has an answer coming."""


class Connection(Protocol):
    """A connection, as far as the server uses it."""

    def sweep(self, now: float) -> None: ...

    def close_if_idle(self) -> None: ...

    def cancel(self) -> asyncio.Task[None] | None: ...


class ServerState:
    """Counters, and a clock that is read now and then instead of for every request.

    Args:
        clock: seconds.
        loop: the event loop it all runs on.
    """

    def __init__(
        self, handler: Handler, limits: HttpLimits, clock: Clock, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.handler = handler
        self.limits = limits
        self.loop = loop
        self._clock = clock
        self.bodies = BodyBudget(limits.max_total_body_bytes)
        self.connections: set[Connection] = set()
        self.active = 0
        """Requests being answered."""
        self.refused_connections = 0
        self.refused_requests = 0
        self.stopping = False
        """Answers that are under way are the last of their connections."""
        self.now = 0.0
        self.date = ""
        self.tick()

    def tick(self) -> None:
        """Read the clock."""
        self.now = self._clock.monotonic()
        self.date = formatdate(self._clock.wall(), usegmt=True)

    def enter(self, connection: Connection, transport: asyncio.Transport) -> bytes | None:
        """Count a connection in. Returns the answer to one too many."""
        self.connections.add(connection)
        allowed = self.limits.max_connections
        if len(self.connections) <= allowed:
            return None
        self.refused_connections += 1
        if len(self.connections) > allowed + self.limits.more_refused:
            transport.abort()
            return b""
        refused = _busy(
            503,
            f"all {allowed} connections are taken ({self._bound('--max-concurrent-requests connections')})",
        )
        body = orjson.dumps(refused.payload())
        return (
            answer_head(503, refused.headers, date=self.date, length=len(body), chunked=False, keep=False)
            + body
        )

    def leave(self, connection: Connection) -> None:
        """Count a connection out."""
        self.connections.discard(connection)

    def admit(self, request: Request) -> RequestRefused | None:
        """Whether one more request may be answered now."""
        allowed = self.limits.max_concurrent_requests
        if self.active < allowed or request.path in ALWAYS_ADMITTED:
            return None
        self.refused_requests += 1
        status = 429 if self.limits.open_files is None else 503
        why = self._bound("--max-concurrent-requests")
        return _busy(status, f"{allowed} requests are being answered already ({why})")

    def _bound(self, flag: str) -> str:
        """The origin of a limit: a flag, or the process's limit of open files."""
        files = self.limits.open_files
        return flag if files is None else f"only {files} files may be open: raise ulimit -n"


def _busy(status: int, message: str) -> RequestRefused:
    return RequestRefused(
        message,
        status=status,
        kind="server_error" if status == 503 else "rate_limit_error",
        code="too_many_requests" if status == 429 else "too_many_connections",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )
