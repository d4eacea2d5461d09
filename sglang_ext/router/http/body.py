"""Bodies of requests: collected with a limit, and unpacked if they are compressed."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator, Mapping

from sglang_ext.router.http.messages import refusal, too_large
from sglang_ext.router.http.types import RequestRefused

SLICE_BYTES = 1 << 18
"""Bytes of an unpacked piece, and the most that are unpacked on the event loop."""
BATCH_BYTES = 1 << 22
"""Unpacked by a thread before the event loop looks at it."""
PACKED_BYTES = 1 << 14
"""Given to zlib at a time."""
RETRY_AFTER_S = 1

_WINDOWS: Mapping[str, int] = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Content codings and zlib's ``wbits`` for them."""


class BodyBudget:
    """Memory for the bodies of all requests that are being read, wait or are being answered.

    Args:
        limit: bytes.
    """

    __slots__ = ("limit", "used")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, size: int) -> bool:
        """Charge ``size`` bytes; returns False, without a charge, if they exceed the limit."""
        if self.used + size > self.limit:
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """Release ``size`` bytes."""
        self.used -= size

    def __repr__(self) -> str:
        return f"BodyBudget({self.used} of {self.limit} bytes)"


class BodyBuffer:
    """The pieces of one body.

    Args:
        max_bytes: longer bodies are refused.
        budget: charged for the received bytes, until ``drop`` or until the taker of the body releases them.
    """

    __slots__ = ("_budget", "_held", "_max_bytes", "_pieces", "size")

    def __init__(self, max_bytes: int, budget: BodyBudget) -> None:
        self._max_bytes = max_bytes
        self._budget = budget
        self._pieces: list[bytes] = []
        self._held = 0
        self.size = 0

    def add(self, piece: bytes) -> RequestRefused | None:
        """Take a piece; returns the refusal when it was too much."""
        self.size += len(piece)
        if self.size > self._max_bytes:
            return too_large(self._max_bytes)
        if not self._budget.take(len(piece)):
            return overfull(self._budget)
        self._held += len(piece)
        self._pieces.append(piece)
        return None

    def take(self) -> bytes:
        """The whole body; its length is the taker's to give back to the budget."""
        pieces, self._held = self._pieces, 0
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def drop(self) -> None:
        """Discard the received bytes."""
        self._budget.give(self._held)
        self._held = 0
        self._pieces.clear()


def packing(headers: Mapping[str, str]) -> str | None:
    """The content coding of a body; ``None`` when it is plain."""
    coding = headers.get("content-encoding")
    if coding is None:
        return None
    coding = coding.strip().lower()
    return None if coding in ("", "identity") else coding


async def unpack(body: bytes, coding: str, max_bytes: int, budget: BodyBudget) -> bytes:
    """The body behind a content coding, in time linear in both lengths.

    A small body is unpacked here; the rest of a larger one in threads, ``BATCH_BYTES`` at a time, so that at
    most this much work remains after the client disconnects.

    Args:
        budget: charged for the length of the returned body; the caller releases it.

    Raises:
        RequestRefused: the coding is unknown, the body does not have it, is too long when unpacked, or there
            is no memory for it. The budget is not charged then.
    """
    pieces = _unpacked_pieces(body, coding)
    found: list[bytes] = []
    size = 0
    try:
        batch = _next_pieces(pieces, SLICE_BYTES)
        while batch:
            length = sum(map(len, batch))
            if size + length > max_bytes:
                raise too_large(max_bytes)
            if not budget.take(length):
                raise overfull(budget)
            size += length
            found += batch
            batch = await asyncio.to_thread(_next_pieces, pieces, BATCH_BYTES) if size >= SLICE_BYTES else []
        return b"".join(found)
    except zlib.error as error:
        budget.give(size)
        raise _damaged(coding, str(error)) from None
    except BaseException:
        budget.give(size)
        raise


def _next_pieces(pieces: Iterator[bytes], least: int) -> list[bytes]:
    """The next pieces, of at least ``least`` bytes together; fewer only at the end."""
    found: list[bytes] = []
    for piece in pieces:
        found.append(piece)
        least -= len(piece)
        if least <= 0:
            break
    return found


def _unpacked_pieces(body: bytes, coding: str) -> Iterator[bytes]:
    """The unpacked body, in non-empty pieces of at most ``SLICE_BYTES``.

    zlib gets only ``PACKED_BYTES`` at a time: when a piece is full, zlib copies its unconsumed input, and
    copying the whole rest for each piece would take quadratic time.
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
    view = memoryview(body)
    at = 0
    while at < len(view) and not unpacker.eof:
        rest: bytes | memoryview = view[at : at + PACKED_BYTES]
        at += len(rest)
        while rest and not unpacker.eof:
            if piece := unpacker.decompress(rest, SLICE_BYTES):
                yield piece
            rest = unpacker.unconsumed_tail
    if last := unpacker.flush():
        yield last
    if not unpacker.eof or unpacker.unused_data or at < len(view):
        raise _damaged(coding, "it does not end where it should")


def _has_zlib_header(body: bytes) -> bool:
    return len(body) >= 2 and body[0] & 0x0F == 8 and (body[0] << 8 | body[1]) % 31 == 0


def _damaged(coding: str, why: str) -> RequestRefused:
    return refusal(400, f"the request body is not valid {coding}: {why}", "invalid_encoding")


def overfull(budget: BodyBudget) -> RequestRefused:
    """There is no memory for one more body now."""
    return RequestRefused(
        f"the bodies of all requests together may take {budget.limit} bytes (--memory-limits bodies); "
        "try again when others are answered",
        status=503,
        kind="server_error",
        code="bodies_full",
        headers={"connection": "close", "retry-after": str(RETRY_AFTER_S)},
    )
