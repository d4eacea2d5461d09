"""Server-sent events, read from a stream of bytes that is cut anywhere. Bytes in, events out; no I/O."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"[DONE]"
MAX_EVENT_BYTES = 1 << 24
"""Longer events are skipped: they are looked at only to count tokens."""


def event(value: Any, name: str = "") -> bytes:
    """An event as it is sent; of None, the end mark of a stream."""
    named = b"event: " + name.encode() + b"\n" if name else b""
    return named + b"data: " + (DONE if value is None else orjson.dumps(value)) + b"\n\n"


def parsed(data: bytes | str) -> Any:
    """The JSON object of an event or an answer; None if it has none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


class EventSplitter:
    """Finds the ``data`` of each event (WHATWG HTML, section 9.2.6). Other fields are ignored.

    Lines end with LF, CR LF or CR; an event ends with an empty line, and its data lines are joined by LF.
    An event that the end of the stream cuts off is not an event.
    """

    __slots__ = ("_after_cr", "_between", "_data", "_line", "_size", "_skipping")

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._after_cr = False
        self._skipping = False
        self._between = True
        """Nothing of an event has come since the last one ended."""

    @property
    def in_event(self) -> bool:
        """Whether part of an event has arrived whose end has not."""
        return bool(self._line) or bool(self._data) or self._skipping

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take the next piece of the stream; return the data of every event that it completes."""
        if (
            self._between
            and chunk.startswith(b"data: ")
            and chunk.endswith(b"\n\n")
            and len(chunk) <= MAX_EVENT_BYTES
            and b"\r" not in chunk
        ):
            events = chunk[6:-2].split(b"\n\ndata: ")
            if chunk.count(b"\n") == 2 * len(events):
                return events  # nearly always: workers send whole events of one line
        events = []
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk.startswith(b"\n"):
                chunk = chunk[1:]
        if b"\r" in chunk:
            self._after_cr = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *complete, rest = chunk.split(b"\n")
        for line in complete:
            if self._line:
                self._line += line
                line = bytes(self._line)
                self._line.clear()
            self._end_line(line, events)
        self._line += rest
        if len(self._line) + self._size > MAX_EVENT_BYTES:
            self._skip()
        self._between = not (self._line or self._data or self._after_cr or self._skipping)
        return events

    def _end_line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data and not self._skipping:
                events.append(b"\n".join(self._data))
            self._data.clear()
            self._size = 0
            self._skipping = False
        elif not self._skipping and line.startswith(b"data") and line[4:5] in (b":", b""):
            value = line[5:]
            self._data.append(value[1:] if value.startswith(b" ") else value)
            self._size += len(value)
            if self._size > MAX_EVENT_BYTES:
                self._skip()

    def _skip(self) -> None:
        self._skipping = True
        self._data.clear()
        self._size = 0
        # The rest of the line must not look like an empty line when it ends.
        self._line[:] = b":"


class EventFilter:
    """Takes events out of a stream that was asked for them on the side; all else passes byte for byte.

    An event that is not complete is held back until it is.

    Args:
        marks: an event with all of these in it is taken out.
    """

    __slots__ = ("_held", "_marks")

    def __init__(self, *marks: bytes) -> None:
        self._marks = marks
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take the next piece; return the bytes to pass on, of it and of earlier pieces."""
        if self._held:
            chunk = self._held + chunk
            self._held = b""
        if not chunk.endswith(b"\n\n"):
            end = chunk.rfind(b"\n\n") + 2 if b"\n\n" in chunk else 0
            chunk, self._held = chunk[:end], chunk[end:]
        if self._marks[0] not in chunk:
            return chunk
        events = chunk.split(b"\n\n")
        return b"\n\n".join(event for event in events if not all(mark in event for mark in self._marks))

    def end(self) -> bytes:
        """The bytes that are still held back, after the last piece."""
        held, self._held = self._held, b""
        return held
