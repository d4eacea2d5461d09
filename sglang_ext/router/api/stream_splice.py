"""Continues a stream at another instance: exactly the part that the client has is left out.

The other instance generates the answer from its beginning. An answer that does not begin with the client's
part is no continuation, and is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from sglang_ext.errors import PeerError
from sglang_ext.router.api.sse import DONE, EventSplitter, parsed
from sglang_ext.router.api.usage import StreamReader


class NoContinuation(PeerError):
    """The other instance's answer does not begin with the client's part."""


class StreamSplice(ABC):
    """Takes the other instance's stream, and returns the part that the client lacks.

    Args:
        reader: has read the client's part, which is made of whole events.
    """

    def __init__(self, reader: StreamReader) -> None:
        self._splitter = EventSplitter()

    @staticmethod
    def obstacle(reader: StreamReader) -> str:
        """Why a stream cannot be continued after the part that was sent; empty if it can, ``again`` if it can
        be soon."""
        return "too much of the answer was sent" if reader.too_long else ""

    def feed(self, chunk: bytes) -> bytes:
        """The next piece of the other stream; returns whole events.

        Raises:
            NoContinuation: it is another answer.
        """
        out = []
        for data in self._splitter.feed(chunk):
            event = None if data == DONE else parsed(data)
            kept = self.kept(event, data) if isinstance(event, dict) else data
            if kept is not None:
                out.append(b"data: " + kept + b"\n\n")
        return b"".join(out)

    @abstractmethod
    def kept(self, event: dict[str, Any], data: bytes) -> bytes | None:
        """The part of an event that the client lacks; None if it has the event.

        Args:
            data: the event as it came.
        """

    @property
    @abstractmethod
    def complete(self) -> bool:
        """Whether all that the client has has come."""

    def check_end(self) -> None:
        """The other stream has ended.

        Raises:
            NoContinuation: it is shorter than the client's part.
        """
        if not self.complete:
            raise NoContinuation("the answer of the other instance ends before the client's part of it")


def another_answer() -> NoContinuation:
    """The error for an answer that differs from the client's part."""
    return NoContinuation("the other instance goes on with another answer")
