"""Takes the ids of generated tokens out of answers that were asked for them on the side.

SGLang puts them last into ``sglext``, an object at the end of an answer, or in an event of its own at the end
of a stream. All else passes byte for byte.
"""

from __future__ import annotations

import re

_HOLDER = b'"sglext"'
_IDS = rb'"output_ids"\s*:\s*\[\s*(?:\[[\d,\s]*\]\s*,?\s*)*\]'
_ALONE = re.compile(rb',\s*"sglext"\s*:\s*\{\s*' + _IDS + rb"\s*\}")
_AMONG = re.compile(rb",\s*" + _IDS + rb"|" + _IDS + rb"\s*,?")
_EMPTY = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_USAGE = re.compile(rb'"usage"\s*:\s*\{')
_END = b"\n\n"


def without_ids(answer: bytes) -> bytes:
    """An answer, or an event of a stream, without the ids. In a text, the quotes would be escaped."""
    at = answer.rfind(_HOLDER)
    if at < 0:
        return answer
    found = _ALONE.search(answer, max(0, answer.rfind(b",", 0, at)))
    if found is None:
        found = _AMONG.search(answer, at)
    return answer if found is None else answer[: found.start()] + answer[found.end() :]


class IdsFilter:
    """Takes them out of a stream, and the event with it if that has nothing else. An event that is not
    complete is held back until it is."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take the next piece; return the bytes to pass on, of it and of earlier pieces."""
        chunk = self._held + chunk
        end = chunk.rfind(_END) + len(_END) if _END in chunk else 0
        chunk, self._held = chunk[:end], chunk[end:]
        if _HOLDER not in chunk:
            return chunk
        events = [_cut(event) for event in chunk.split(_END)]
        return _END.join([event for event in events if event is not None])

    def end(self) -> bytes:
        """The bytes that are still held back, after the last piece."""
        held, self._held = self._held, b""
        return held


def _cut(event: bytes) -> bytes | None:
    cut = without_ids(event)
    if cut is event or _HOLDER in cut or _EMPTY.search(cut) is None or _USAGE.search(cut) is not None:
        return cut
    return None
