"""Requests out of bytes, however the bytes are cut. No I/O: bytes in, requests and refusals out.

The grammar is llhttp's, in its strict form. This module adds rules for sizes, duplicate headers, offers of
other protocols, and HTTP/2.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable

import httptools
import msgspec

from sglang_ext.router.http.body import BodyBudget, BodyBuffer, overfull
from sglang_ext.router.http.messages import (
    NAMES,
    add_header,
    check_head,
    drop_named,
    header_name,
    refusal,
    target_and_path,
    too_large,
)
from sglang_ext.router.http.types import Request, RequestRefused

logger = logging.getLogger("router.http")

LARGE_BYTES = 1 << 16
"""Bodies above it, and those of unknown length, are read only if the server is willing to."""
MAX_OVERHEAD = 16
"""Bytes on the wire per byte of a body, beyond the size of two heads: chunks of one byte need 6."""


class Phase(enum.Enum):
    """The part of a request that is being read."""

    IDLE = enum.auto()
    """Nothing: a request has ended, or none has begun."""
    HEAD = enum.auto()
    BODY = enum.auto()
    DEAF = enum.auto()
    """Nothing more, ever: a request was refused, or announced that it is the last."""


class Parsed(msgspec.Struct):
    """A request and how it is to be answered."""

    request: Request
    refused: RequestRefused | None
    """Why it is not to be handled; of one whose head is incomplete, the request is empty."""
    head_only: bool
    """It was HEAD."""
    chunks: bool
    """Its client supports chunked bodies."""
    keep: bool
    """The connection stays open after the answer, as far as the client is concerned."""


class _StopReading(Exception):
    """Raised out of the parser's callbacks once nothing more is to be parsed."""


class RequestReader:
    """Reads the requests of one connection.

    Args:
        max_head_bytes, max_body_bytes: longer ones are refused.
        budget: memory for bodies, charged for the length of each body that was read. The request's handler
            releases it.
        turn_away: asked about large bodies, by their head: see ``exchange.Handler``.
    """

    __slots__ = (
        "_body", "_budget", "_found", "_headers", "_keep", "_max_body_bytes", "_max_head_bytes", "_method",
        "_parser", "_raw", "_replaying", "_target", "_turn_away", "_upgrading", "_version", "client",
        "expects", "phase", "speaks_http2",
    )  # fmt: skip

    def __init__(
        self,
        max_head_bytes: int,
        max_body_bytes: int,
        budget: BodyBudget,
        turn_away: Callable[[Request], RequestRefused | None] = lambda request: None,
    ) -> None:
        self._turn_away = turn_away
        self._budget = budget
        self._max_head_bytes = max_head_bytes
        self._max_body_bytes = max_body_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._found: list[Parsed] = []
        self._raw = 0
        """Received bytes since the message began."""
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body = BodyBuffer(max_body_bytes, budget)
        self._method = "GET"
        self._version = "1.1"
        self._keep = True
        self._upgrading = False
        self._replaying = False
        self.client = ""
        """The client's address."""
        self.phase = Phase.IDLE
        self.expects = False
        """The client waits for ``100 Continue`` before it sends the body."""
        self.speaks_http2 = False
        """It began with HTTP/2's preface; nothing more will be read."""

    @property
    def body_size(self) -> int:
        """Received bytes of the present body."""
        return self._body.size

    def feed(self, data: bytes) -> list[Parsed]:
        """Take the next bytes; return the requests that they complete, in their order."""
        if self.phase is Phase.DEAF:
            return []
        if self.phase is Phase.IDLE:
            self.phase = Phase.HEAD
        self._raw += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._after_upgrade(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._stopped(error)
        if self.phase is Phase.HEAD:
            if self._raw > self._max_head_bytes:
                self._refuse(self._head_too_large())
        elif (
            self.phase is Phase.BODY and self._raw > self._max_head_bytes * 2 + MAX_OVERHEAD * self.body_size
        ):
            self._refuse(refusal(400, "the body's chunks are mostly not body", "bad_request"))
        found = self._found
        if found:
            self._found = []
        return found

    def _refuse(self, refused: RequestRefused) -> None:
        self._found.append(self.refuse(refused))

    def refuse(self, refused: RequestRefused) -> Parsed:
        """Refuse the request that is being read, and all input after it."""
        in_body = self.phase is Phase.BODY
        parsed = Parsed(
            self._request(b"") if in_body else Request("", "", ""),
            refused,
            head_only=in_body and self._method == "HEAD",
            chunks=False,
            keep=False,
        )
        self.abandon()
        return parsed

    def abandon(self) -> None:
        """Stop reading, and discard the received part of a body."""
        self.phase = Phase.DEAF
        self._body.drop()
        self.expects = False

    # -- the parser's callbacks -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        self.phase = Phase.HEAD
        self._target = b""
        self._headers = {}

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.phase is not Phase.HEAD:
            return  # a trailer: not supported, so ignored
        headers, key = self._headers, NAMES.get(name)
        if key is None:
            key = header_name(name)
        if key not in headers:
            headers[key] = value.decode("latin-1")
        elif not add_header(headers, key, value.decode("latin-1")):
            self._refuse(refusal(400, f"{key} is there twice", "bad_request"))
            raise _StopReading

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        parser, headers = self._parser, self._headers
        self._method = parser.get_method().decode("latin-1")
        self._version = parser.get_http_version()
        self._keep = self._version == "1.1" and parser.should_keep_alive()
        self._upgrading = parser.should_upgrade()
        self._body = BodyBuffer(self._max_body_bytes, self._budget)
        self.phase = Phase.BODY
        refused = self._judge() or self._unwanted()
        if refused is not None:
            self._refuse(refused)
            raise _StopReading
        if "connection" in headers:
            drop_named(headers)
        self.expects = "expect" in headers and self._version == "1.1"

    def _judge(self) -> RequestRefused | None:
        headers = self._headers
        if self._raw > self._max_head_bytes:  # `_raw` includes body bytes
            size = len(self._target) + sum([len(name) + len(value) + 4 for name, value in headers.items()])
            if size > self._max_head_bytes:
                return self._head_too_large()
        refused = check_head(self._version, self._method, self._target.decode("latin-1"), headers)
        if refused is not None:
            return refused
        length = headers.get("content-length")
        if length is not None and int(length) > self._max_body_bytes:
            return too_large(self._max_body_bytes)
        if length is not None and self._budget.used + int(length) > self._budget.limit:
            return overfull(self._budget)
        return None

    def _unwanted(self) -> RequestRefused | None:
        headers = self._headers
        known = int(headers.get("content-length", 0))
        if known <= LARGE_BYTES and "transfer-encoding" not in headers and "expect" not in headers:
            return None
        return self._turn_away(self._request(b""))

    def _head_too_large(self) -> RequestRefused:
        return refusal(
            431,
            f"the head of the request is larger than {self._max_head_bytes} bytes "
            "(--memory-limits request-head)",
            "head_too_large",
        )

    def on_body(self, piece: bytes) -> None:
        refused = self._body.add(piece)
        if refused is not None:
            self._refuse(refused)
            raise _StopReading

    def on_message_complete(self) -> None:
        if self._upgrading:
            return  # only the parser thinks so; see _after_upgrade
        self._found.append(
            Parsed(
                self._request(self._body.take()),
                None,
                head_only=self._method == "HEAD",
                chunks=self._version == "1.1",
                keep=self._keep,
            )
        )
        self._raw = 0
        self.expects = False
        self.phase = Phase.IDLE if self._keep else Phase.DEAF

    def _request(self, body: bytes) -> Request:
        target, path = target_and_path(self._target)
        # Handlers see HEAD as GET; the connection leaves out the body of the answer.
        method = "GET" if self._method == "HEAD" else self._method
        return Request(method, path, target, self._headers, body, self.client)

    def _after_upgrade(self, rest: memoryview) -> None:
        """Continue behind a head that offers another protocol: the parser treats the offer as accepted, and
        so skips the body."""
        while self._resumed():
            try:
                self._parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            except httptools.HttpParserError as error:
                self._stopped(error)
                return

    def _resumed(self) -> bool:
        """Give a new parser the length of the body. Returns whether more input may follow the head."""
        self._upgrading = False
        self._parser = httptools.HttpRequestParser(self)
        length, coded = int(self._headers.get("content-length", 0)), "transfer-encoding" in self._headers
        if not length and not coded:
            self.on_message_complete()
            return self._keep
        framing = "transfer-encoding: chunked" if coded else f"content-length: {length}"
        self._replaying = True
        self._parser.feed_data(f"POST / HTTP/1.1\r\n{framing}\r\n\r\n".encode())
        self._replaying = False
        return True

    def _stopped(self, error: httptools.HttpParserError) -> None:
        """The parser will not go on."""
        if self.phase is Phase.DEAF:
            return  # by our own doing, or behind a request that announced the end
        if isinstance(error, httptools.HttpParserCallbackError):
            logger.error("an error of the router while reading a request", exc_info=error)
            self._refuse(refusal(500, "internal error of the router while reading", "internal_error"))
        elif self._parser.get_method() == b"PRI":
            self.speaks_http2 = True
            self.phase = Phase.DEAF
        else:
            self._refuse(refusal(400, f"the request is not HTTP/1.1: {error}", "bad_request"))

    def __repr__(self) -> str:
        return f"RequestReader({self.phase.name}, body={self.body_size})"
