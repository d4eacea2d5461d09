"""HTTP/1.1 as bytes: heads of answers and requests, chunks, and checks of a request's head.

Pure: bytes and values in, bytes and verdicts out. The grammar itself is llhttp's (``httptools``); this module
adds further requirements of RFC 9110 and 9112, and refuses requests whose end two parsers could place
differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final
from urllib.parse import unquote

from sglang_ext.errors import InternalError
from sglang_ext.router.http.types import JSON_TYPE, RequestRefused

REASONS: dict[int, str] = {status.value: status.phrase for status in HTTPStatus}

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"

HTTP2_REFUSAL = bytes.fromhex("000000 04 00 00000000  000008 07 00 00000000 00000000 0000000d")
"""The frames that send an HTTP/2 client back to HTTP/1.1: empty SETTINGS, GOAWAY (HTTP_1_1_REQUIRED)."""

_WRITTEN_HERE = frozenset({"content-length", "transfer-encoding", "connection", "date"})
"""Headers of answers that are not taken from the handler: this connection's business."""
_WITHOUT_BODY = frozenset({204, 304})

NAMES: Final[dict[bytes, str]] = {}
"""Header names as clients write them -> lower case. Bounded; most requests use the same few. Readers look
here first, as a call for each header of each message costs more than the look."""
_MAX_NAMES = 1024
_TARGETS: dict[bytes, tuple[str, str]] = {}
"""Target as in the request line -> (its origin form, its decoded path). Bounded as well."""
_MAX_TARGETS = 256
_MAX_TARGET_BYTES = 256


def header_name(raw: bytes) -> str:
    """A header's name in lower case."""
    name = NAMES.get(raw)
    if name is None:
        name = raw.decode("latin-1").lower()
        if len(NAMES) < _MAX_NAMES:
            NAMES[raw] = name
    return name


def add_header(headers: dict[str, str], name: str, value: str) -> bool:
    """Enter a header. Returns whether it may be there twice: lists are joined (RFC 9110, section 5.3)."""
    before = headers.get(name)
    if before is None:
        headers[name] = value
        return True
    headers[name] = f"{before}{'; ' if name == 'cookie' else ', '}{value}"
    return name not in ("host", "content-length", "transfer-encoding", "expect")


# -- requests, as they come --------------------------------------------------------------------------


def check_head(version: str, method: str, target: str, headers: Mapping[str, str]) -> RequestRefused | None:
    """Check a request's head whose grammar is valid; returns the refusal, or None.

    If two parsers disagree on the end of a body, one request can hide in another's body (request smuggling).
    So every ambiguous body length is refused, and the connection is closed.
    """
    if not version.startswith("1."):
        return refusal(505, f"HTTP/{version} is not spoken here; use HTTP/1.1", "http_version_not_supported")
    coding = headers.get("transfer-encoding")
    if coding is not None:
        if version == "1.0" or "content-length" in headers:
            return refusal(400, "the length of the body is stated in two ways", "bad_request")
        if coding.strip().lower() != "chunked":
            return refusal(501, f"Transfer-Encoding {coding!r} is not known; use chunked", "not_implemented")
    if "host" not in headers and version != "1.0":
        return refusal(400, "there is no Host header", "bad_request")
    expect = headers.get("expect")
    if expect is not None and expect.lower() != "100-continue":
        return refusal(417, f"nothing is known of the expectation {expect!r}", "expectation_failed")
    if method == "CONNECT":
        return refusal(405, "this is not a tunnel", "method_not_allowed")
    if not target.startswith("/") and "://" not in target and target != "*":
        return refusal(400, "the request target is neither a path nor a URL", "bad_request")
    return None


def refusal(status: int, message: str, code: str) -> RequestRefused:
    """A refusal after which nothing more can be read from the connection."""
    return RequestRefused(message, status=status, code=code, headers={"connection": "close"})


def too_large(limit: int) -> RequestRefused:
    """The body is longer than allowed."""
    return refusal(
        413, f"the request body is larger than {limit} bytes (--max-payload-bytes)", "request_too_large"
    )


def origin_form(target: str) -> str:
    """Path and query of a target that may be a whole URL (RFC 9112, section 3.2.2), without a fragment."""
    if not target.startswith("/"):
        _, _, rest = target.partition("://")
        slash = rest.find("/")
        target = rest[slash:] if slash >= 0 else "/"
    return target.partition("#")[0] if "#" in target else target


def decoded_path(target: str) -> str:
    """The path of a target in origin form, decoded."""
    path = target.partition("?")[0] if "?" in target else target
    return unquote(path) if "%" in path else path


def target_and_path(raw: bytes) -> tuple[str, str]:
    """The target of a request line in origin form, and its path, decoded."""
    found = _TARGETS.get(raw)
    if found is None:
        target = origin_form(raw.decode("latin-1"))
        found = target, decoded_path(target)
        if len(_TARGETS) < _MAX_TARGETS and len(raw) <= _MAX_TARGET_BYTES:
            _TARGETS[raw] = found
    return found


def drop_named(headers: dict[str, str]) -> None:
    """Take out the headers that ``Connection`` names: they were for this connection only."""
    for token in headers.get("connection", "").split(","):
        name = token.strip().lower()
        if name not in ("", "close", "keep-alive", "host", "content-length", "transfer-encoding"):
            headers.pop(name, None)


# -- answers, as they go -----------------------------------------------------------------------------


def answer_head(
    status: int, headers: Mapping[str, str], *, date: str, length: int | None, chunked: bool, keep: bool
) -> bytes:
    """Status line and headers of an answer.

    Args:
        date: for the Date header.
        length: bytes of the body; None if unknown.
        chunked: the body follows in chunks.
        keep: the connection stays open after the answer.
    """
    if not _WRITTEN_HERE.isdisjoint(headers):
        headers = {name: value for name, value in headers.items() if name not in _WRITTEN_HERE}
    text, lines = f"HTTP/1.1 {status} {REASONS.get(status, 'Unknown')}\r\n{_lines(headers)}", len(headers) + 2
    if status not in _WITHOUT_BODY:
        if "content-type" not in headers:
            text, lines = f"{text}content-type: {JSON_TYPE}\r\n", lines + 1
        if length is not None:
            text, lines = f"{text}content-length: {length}\r\n", lines + 1
        elif chunked:
            text, lines = f"{text}transfer-encoding: chunked\r\n", lines + 1
    if keep:
        return _head(f"{text}date: {date}\r\n", lines)
    return _head(f"{text}date: {date}\r\nconnection: close\r\n", lines + 1)


def has_body(status: int) -> bool:
    """Whether an answer with this status may have a body."""
    return status >= 200 and status not in _WITHOUT_BODY


def chunk(data: bytes) -> bytes:
    """One chunk of a body; ``data`` is not empty, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


# -- requests, as they go ----------------------------------------------------------------------------


def request_head(method: str, target: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    """Request line and headers of a request to a worker.

    Args:
        host: of the worker, with its port.
        length: bytes of the body.
    """
    if " " in target:
        raise InternalError(f"a request target with a space: {target!r}")
    text, lines = f"{method} {target} HTTP/1.1\r\nhost: {host}\r\n{_lines(headers)}", len(headers) + 2
    if length or method not in ("GET", "HEAD"):
        return _head(f"{text}content-length: {length}\r\n", lines + 1)
    return _head(text, lines)


def _lines(headers: Mapping[str, str]) -> str:
    """Headers as lines."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()])


def _head(text: str, lines: int) -> bytes:
    """The encoded head, which must have ``lines`` lines."""
    # A line break in a value would let its author inject a header or an answer.
    if text.count("\n") != lines or text.count("\r") != lines or "\0" in text:
        raise InternalError(f"a header with a line break: {text!r}")
    return (text + "\r\n").encode("latin-1", "replace")
