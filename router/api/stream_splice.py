"""Where a stream goes on at another instance: what the client has of it is left out, and nothing else.

The other instance makes the answer from its beginning. Texts are compared by characters: what stands at the
seam may be half a word, and where a character is cut in two, the instances hold it back until it is whole.
What does not begin as the client's part does is no continuation, and refused.
"""

from __future__ import annotations

from typing import Any

import orjson

from sglang_ext.errors import PeerError
from sglang_ext.router.api.sse import EventSplitter
from sglang_ext.router.api.usage import DONE, Form, StreamReader

_TEXTS = ("content", "reasoning_content", "text")


class NoContinuation(PeerError):
    """The other instance's answer is not the one that the client has the beginning of."""


def obstacle(reader: StreamReader) -> str:
    """Why a stream cannot be gone on with, from what was sent of it; empty when it can."""
    if reader.too_long:
        return "too much of the answer was sent"
    if reader.form is not Form.NATIVE:
        return ""
    if (last := _parsed(reader.last)) is None:
        return ""
    ids, meta = last.get("output_ids"), last.get("meta_info")
    told = meta.get("completion_tokens") if isinstance(meta, dict) else None
    if reader.native_events > 1 and isinstance(ids, list) and len(ids) != told:
        return "the server streams increments (--incremental-streaming-output)"
    return "" if reader.native_events > 1 else "again"


class StreamSplice:
    """Takes the other instance's stream, and gives what the client lacks.

    Args:
        reader: has read what the client has, which are whole events.
    """

    def __init__(self, reader: StreamReader) -> None:
        self._native = reader.form is Form.NATIVE
        self._splitter = EventSplitter()
        self._left: dict[tuple[int, str], str] = {}
        self._last = _parsed(reader.last) if self._native else None
        self._created: Any = None
        self._begun = False
        for data in reader.events:
            if (event := _parsed(data)) is not None:
                self._begun = True
                self._created = event.get("created", self._created)
                for key, text in _texts(event):
                    self._left[key] = self._left.get(key, "") + text

    def feed(self, chunk: bytes) -> bytes:
        """The next piece of the other stream; returns whole events.

        Raises:
            NoContinuation: it is another answer.
        """
        out = []
        for data in self._splitter.feed(chunk):
            kept = data if data == DONE else self._native_event(data) if self._native else self._event(data)
            if kept is not None:
                out.append(b"data: " + kept + b"\n\n")
        return b"".join(out)

    def check_end(self) -> None:
        """The other stream has ended.

        Raises:
            NoContinuation: before it had what the client has.
        """
        if any(self._left.values()) or self._last is not None:
            raise NoContinuation("the answer of the other instance ends before the client's part of it")

    def _native_event(self, data: bytes) -> bytes | None:
        event, last = _parsed(data), self._last
        if event is None or last is None or "meta_info" not in event:
            return data
        ids, before = event.get("output_ids") or [], last.get("output_ids") or []
        if len(ids) < len(before):
            return None
        if ids[: len(before)] != before or not str(event.get("text", "")).startswith(last.get("text", "")):
            raise NoContinuation("the other instance goes on with another answer")
        finished = event["meta_info"].get("finish_reason") is not None
        if len(ids) == len(before) and not finished:
            return None
        self._last = None
        return data

    def _event(self, data: bytes) -> bytes | None:
        event = _parsed(data)
        if event is None:
            return data
        choices = event.get("choices")
        says = not choices
        for choice in choices or ():
            part = choice.get("delta") if isinstance(choice.get("delta"), dict) else choice
            for name in _TEXTS:
                if isinstance(text := part.get(name), str):
                    part[name] = self._cut((choice.get("index", 0), name), text)
                    says = says or bool(part[name])
            says = says or choice.get("finish_reason") is not None or bool(part.get("tool_calls"))
        if self._begun and not says:
            return None
        if self._created is not None and "created" in event:
            event["created"] = self._created
        return orjson.dumps(event)

    def _cut(self, key: tuple[int, str], text: str) -> str:
        left = self._left.get(key, "")
        size = min(len(left), len(text))
        if text[:size] != left[:size]:
            raise NoContinuation("the other instance goes on with another answer")
        self._left[key] = left[size:]
        return text[size:]


def _texts(event: dict[str, Any]) -> list[tuple[tuple[int, str], str]]:
    found = []
    for choice in event.get("choices") or ():
        part = choice.get("delta") if isinstance(choice.get("delta"), dict) else choice
        for name in _TEXTS:
            if isinstance(text := part.get(name), str):
                found.append(((choice.get("index", 0), name), text))
    return found


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None
