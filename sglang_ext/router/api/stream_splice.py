"""Where a stream goes on at another instance: what the client has of it is left out, and nothing else.

The other instance makes the answer from its beginning. What does not begin as the client's part does is no
continuation, and refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from sglang_ext.errors import PeerError
from sglang_ext.router.api.sse import DONE, EventSplitter, parsed
from sglang_ext.router.api.usage import StreamReader


class NoContinuation(PeerError):
    """The other instance's answer is not the one that the client has the beginning of."""


class StreamSplice(ABC):
    """Takes the other instance's stream, and gives what the client lacks.

    Args:
        reader: has read what the client has, which are whole events.
    """

    def __init__(self, reader: StreamReader) -> None:
        self._splitter = EventSplitter()

    @staticmethod
    def obstacle(reader: StreamReader) -> str:
        """Why a stream cannot be gone on with, from what was sent of it; empty when it can, ``again`` when it
        can be soon."""
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
        """What the client lacks of an event; None of one that it has.

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
            NoContinuation: before it had what the client has.
        """
        if not self.complete:
            raise NoContinuation("the answer of the other instance ends before the client's part of it")


def another_answer() -> NoContinuation:
    """What is raised where the other instance says something else."""
    return NoContinuation("the other instance goes on with another answer")
