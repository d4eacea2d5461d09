"""Bodies of requests: collected with a limit, unpacked where they came compressed."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping

from router.exchange import RequestRefused
from router.http_messages import refusal, too_large

SLICE_BYTES = 1 << 18
"""Unpacked at once; in between, others get a turn."""

_WINDOWS: Mapping[str, int] = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Content codings and zlib's ``wbits`` for them."""


class BodyBuffer:
    """The pieces of one body.

    Args:
        max_bytes: longer bodies are refused.
    """

    __slots__ = ("_max_bytes", "_pieces", "size")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []
        self.size = 0

    def add(self, piece: bytes) -> RequestRefused | None:
        """Take a piece; returns the refusal when it was too much."""
        self.size += len(piece)
        if self.size > self._max_bytes:
            self._pieces.clear()
            return too_large(self._max_bytes)
        self._pieces.append(piece)
        return None

    def take(self) -> bytes:
        """The whole body."""
        pieces = self._pieces
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def packing(headers: Mapping[str, str]) -> str | None:
    """The content coding of a body; ``None`` when it is plain."""
    coding = headers.get("content-encoding")
    if coding is None:
        return None
    coding = coding.strip().lower()
    return None if coding in ("", "identity") else coding


async def unpack(body: bytes, coding: str, max_bytes: int) -> bytes:
    """The body behind a content coding.

    Raises:
        RequestRefused: the coding is not known, the body is not of it, or it is too long when unpacked.
    """
    window = _WINDOWS.get(coding)
    if window is None:
        raise RequestRefused(
            f"Content-Encoding {coding!r} is not known; send gzip, deflate or nothing",
            status=415,
            code="unsupported_content_encoding",
        )
    if coding == "deflate" and not _has_zlib_header(body):
        window = -window  # RFC 9110, section 8.4.1.2: some send deflate without the header
    unpacker = zlib.decompressobj(wbits=window)
    pieces: list[bytes] = []
    size = 0
    rest = body
    try:
        while rest and not unpacker.eof:
            piece = unpacker.decompress(rest, SLICE_BYTES)
            rest = unpacker.unconsumed_tail
            size += len(piece)
            if size > max_bytes:
                raise too_large(max_bytes)
            pieces.append(piece)
            if rest:
                await asyncio.sleep(0)
        pieces.append(unpacker.flush())
    except zlib.error as error:
        raise _damaged(coding, str(error)) from None
    if not unpacker.eof or unpacker.unused_data:
        raise _damaged(coding, "it does not end where it should")
    if size + len(pieces[-1]) > max_bytes:
        raise too_large(max_bytes)
    return b"".join(pieces)


def _has_zlib_header(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0


def _damaged(coding: str, why: str) -> RequestRefused:
    return refusal(400, f"the request body is not valid {coding}: {why}", "invalid_encoding")
