"""The way back to the client for one request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from sglang_ext.errors import InternalError
from sglang_ext.router.http.messages import LAST_CHUNK, answer_head, chunk, has_body
from sglang_ext.router.http.types import ClientGone, Responder

JOINED_BYTES = 1 << 14
"""Longer bodies are written beside their head instead of being copied behind it."""


class ClientSide(Protocol):
    """The part of the client's connection that an answer uses."""

    transport: asyncio.Transport
    gone: bool
    """The client has closed the connection."""

    @property
    def date(self) -> str: ...

    @property
    def drain(self) -> asyncio.Future[None] | None: ...


class HttpResponder(Responder):
    """Writes one answer to a connection.

    Args:
        head_only: the request was HEAD: the body is counted and not sent.
        chunks: the client supports chunked bodies (HTTP/1.1); for others the connection's end is the end.
        keep: the connection may stay open afterwards.
    """

    __slots__ = ("_chunks", "_connection", "_has_body", "_head_only", "_started", "finished", "keep")

    def __init__(self, connection: ClientSide, *, head_only: bool, chunks: bool, keep: bool) -> None:
        self._connection = connection
        self._head_only = head_only
        self._chunks = chunks
        self._has_body = True
        self._started = False
        self.keep = keep
        self.finished = False

    @property
    def started(self) -> bool:
        return self._started

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self._begin(headers)
        head = answer_head(
            status, headers, date=self._connection.date, length=len(body), chunked=False, keep=self.keep
        )
        self._started = self.finished = True
        transport = self._connection.transport
        if not body or self._head_only or not has_body(status):
            transport.write(head)
        elif len(body) <= JOINED_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        if self._connection.drain is not None:
            await self._drained()

    async def start(self, status: int, headers: Mapping[str, str], data: bytes = b"") -> None:
        self._begin(headers)
        self._has_body = has_body(status) and not self._head_only
        self.keep = self.keep and (self._chunks or not has_body(status))
        head = answer_head(
            status, headers, date=self._connection.date, length=None, chunked=self._chunks, keep=self.keep
        )
        self._started = True
        if data and self._has_body:
            head += chunk(data) if self._chunks else data
        self._connection.transport.write(head)
        if self._connection.drain is not None:
            await self._drained()

    async def write(self, data: bytes) -> None:
        connection = self._connection
        if connection.gone:
            raise ClientGone("the client closed the connection")
        if not data or not self._has_body:
            return
        connection.transport.write(chunk(data) if self._chunks else data)
        if connection.drain is not None:
            await self._drained()

    async def finish(self) -> None:
        if self._connection.gone:
            raise ClientGone("the client closed the connection")
        self.finished = True
        if self._has_body and self._chunks:
            self._connection.transport.write(LAST_CHUNK)
        if self._connection.drain is not None:
            await self._drained()

    def cut(self) -> None:
        self._connection.transport.abort()

    def _begin(self, headers: Mapping[str, str]) -> None:
        if self._started:
            raise InternalError("the request has been answered already")
        if self._connection.gone:
            raise ClientGone("the client closed the connection")
        if headers.get("connection") == "close":
            self.keep = False

    async def _drained(self) -> None:
        """Wait until the client reads again, if it does not."""
        drain = self._connection.drain
        if drain is not None:
            # Others may wait too (never here: answers go one by one), and a cancelled waiter must not end
            # the future that resume_writing sets.
            await asyncio.shield(drain)
            if self._connection.gone:
                raise ClientGone("the client closed the connection")
