"""The few words in which the router speaks of HTTP.

Everything between ``server.py`` and ``upstream.py`` uses these types only, so that the HTTP machinery can
be exchanged without touching routing, validation or relaying.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from sglang_ext.errors import DeadlineError, PeerError, SglangExtError, UserError

JSON_TYPE = "application/json"
EVENT_STREAM_TYPE = "text/event-stream"

HOP_BY_HOP = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
    "trailer", "transfer-encoding", "upgrade",
})  # fmt: skip
"""Headers that concern one connection and are never passed on (RFC 9110, section 7.6.1)."""


class Request(msgspec.Struct, frozen=True):
    """A request, read to its end."""

    method: str
    path: str
    """Decoded, without the query; the key of route lookups."""
    target: str
    """Path and query as in the request line, forwarded unchanged."""
    headers: Mapping[str, str] = {}
    """Names in lower case."""
    body: bytes = b""
    client: str = ""
    """The client's address; empty for a Unix socket."""

    @property
    def query(self) -> str:
        """The query as in the request line."""
        return self.target.partition("?")[2]


class Responder(Protocol):
    """Where the answer to one request goes.

    Either ``send`` once, or ``start``, any number of ``write`` and ``finish``. Writing waits while the
    client does not read. When the client goes away, the handler's task is cancelled, or the call that
    was writing raises ``ClientGone``.
    """

    @property
    def started(self) -> bool:
        """Whether the client has been sent anything; if so, nothing can be retried."""

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer completely."""

    async def start(self, status: int, headers: Mapping[str, str], data: bytes = b"") -> None:
        """Send status and headers of an answer that follows in pieces, and ``data``, its first piece, with
        them."""

    async def write(self, data: bytes) -> None:
        """Send a piece at once."""

    async def finish(self) -> None:
        """End an answer that was started."""

    def cut(self) -> None:
        """Close the connection in mid-answer, so that the client sees that it is incomplete."""


class Handler(Protocol):
    """Answers requests. Each call runs in a task of its own."""

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer a request."""

    def turn_away(self, request: Request) -> RequestRefused | None:
        """The refusal of a request whose body need not be read or unpacked; None to read it. Called for large
        bodies before they arrive, while the body of ``request`` is empty, and for compressed bodies."""

    async def refuse(self, request: Request, responder: Responder, refused: RequestRefused) -> None:
        """Answer a request that could not be read or is one too many. Of one whose head could not be
        read, method and path are empty."""


class UpstreamResponse(Protocol):
    """A worker's answer, whose head has arrived."""

    status: int
    headers: Mapping[str, str]
    """End-to-end headers, names in lower case."""

    async def piece(self) -> bytes:
        """The next piece of the body; empty at its end.

        Raises:
            ConnectionLost: the worker went away before the end.
        """

    def arrived(self) -> bytes | None:
        """The whole body, if all of it is there and none of it was read."""

    async def read(self) -> bytes:
        """The whole body; raises as ``piece`` does."""

    def interrupt(self, error: SglangExtError) -> None:
        """Raise ``error`` from the next ``piece``, in place of the unread rest of the body."""

    def close(self) -> None:
        """Give the connection back if the body was read to its end, else close it, on which SGLang
        aborts the request."""


class Upstream(Protocol):
    """How workers are reached."""

    async def open(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> UpstreamResponse:
        """Send a request and wait for the head of the answer. Cancelling it closes the connection.

        Args:
            timeout_s: seconds for the whole exchange, the body included.

        Raises:
            ConnectFailed: there is no connection; the worker has seen nothing of the request.
            ConnectionLost: the worker went away; it may have worked on the request.
            DeadlineError: ``timeout_s`` is over.
        """

    async def close(self) -> None:
        """Close every connection."""


class ConnectFailed(PeerError):
    """No connection to the worker: the request was not sent."""

    @property
    def refused(self) -> bool:
        """Whether the worker's host refused the connection; otherwise the network may have failed."""
        return isinstance(self.__cause__, ConnectionRefusedError)


class ConnectionLost(PeerError):
    """The connection ended before the answer did."""


class ClientGone(PeerError):
    """The client closed its connection before the answer was complete."""


class RequestTimeout(DeadlineError):
    """The worker did not answer within the time that was allowed."""


class NoFilesLeft(RequestTimeout):
    """This process lacks files or memory for a connection; the worker may be healthy."""


class RequestRefused(UserError):
    """A request that is answered with an error of ours, in OpenAI's form.

    Args:
        param: the field that is wrong.
        code: a word for programs.
        kind: OpenAI's ``type``.
        headers: sent with the answer.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = dict(headers or {})

    def payload(self) -> dict[str, object]:
        """The body of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
