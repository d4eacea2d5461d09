"""What an answer says of tokens: read from a copy of the bytes that pass, never delaying them.

Everything here is best effort: an answer that cannot be read is passed on all the same, and counted as
saying nothing.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from router.sse import EventSplitter
from sglang_ext.keys import encode_tokens

DONE = b"[DONE]"
MAX_TEXT_BYTES = 1 << 20
"""Events of a stream that are kept to learn what was generated."""
_SAYS_FINISHED = re.compile(rb'"finish_reason"\s*:\s*\{')
_SAYS_USAGE = re.compile(rb'"usage"\s*:\s*\{')


@dataclass(slots=True)
class Usage:
    """Tokens of one request; for a batch, of all its prompts."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    output_keys: dict[int, bytes] = field(default_factory=dict)
    """Index of the prompt -> its generated tokens, encoded; where there is one choice per prompt."""
    output_texts: dict[int, str] = field(default_factory=dict)
    """Index of the prompt -> what was generated, where only its text is told."""

    def add_native(self, answer: Any, index: int, choices: int) -> None:
        """Take in one element of a ``/generate`` answer: choice ``index % choices`` of its prompt."""
        if not isinstance(answer, dict) or not isinstance(meta := answer.get("meta_info"), dict):
            return
        self.completion_tokens = _sum(self.completion_tokens, meta.get("completion_tokens"))
        if index % choices == 0:
            self.prompt_tokens = _sum(self.prompt_tokens, meta.get("prompt_tokens"))
            self.cached_tokens = _sum(self.cached_tokens, meta.get("cached_tokens"))
        ids = answer.get("output_ids")
        # With --incremental-streaming-output an event has the latest ids only, which are no prefix.
        if choices == 1 and isinstance(ids, list) and ids and len(ids) == meta.get("completion_tokens"):
            try:
                self.output_keys[index] = encode_tokens(array("q", ids))
            except (TypeError, ValueError, OverflowError):
                return

    def add_openai(self, answer: Any) -> None:
        """Take in an OpenAI answer, or the event of a stream that carries the usage."""
        if not isinstance(answer, dict):
            return
        if isinstance(usage := answer.get("usage"), dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"))
            self.completion_tokens = _count(usage.get("completion_tokens"))
            # SGLang leaves the details out without --enable-cache-report, and when nothing was cached.
            if isinstance(details := usage.get("prompt_tokens_details"), dict):
                self.cached_tokens = _count(details.get("cached_tokens"))
        for choice in _choices(answer):
            if isinstance(meta := choice.get("meta_info"), dict):
                self.cached_tokens = _count(meta.get("cached_tokens"))


def _choices(answer: Any) -> list[dict[str, Any]]:
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []


def texts_of(answers: Iterable[Any]) -> dict[int, str]:
    """What OpenAI answers say was generated, by choice; for a stream, of all its events together.

    Choices with tool calls or reasoning are left out: their text is not what the model generated.
    """
    texts: dict[int, str] = {}
    mixed: set[int] = set()
    for answer in answers:
        for choice in _choices(answer):
            index = choice.get("index", 0)
            part = choice.get("message") or choice.get("delta") or choice
            if type(index) is not int or not isinstance(part, dict):
                continue
            if part.get("tool_calls") or part.get("reasoning_content"):
                mixed.add(index)
            text = part.get("content") if part is not choice else part.get("text")
            if isinstance(text, str) and text:
                texts[index] = texts.get(index, "") + text
    return {index: text for index, text in texts.items() if index not in mixed}


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _sum(total: int | None, value: Any) -> int | None:
    count = _count(value)
    return total if count is None else (total or 0) + count


def read_answer(body: bytes, *, native: bool, choices: int) -> Usage:
    """The usage that a complete JSON answer states.

    Args:
        native: whether it answers ``/generate``.
        choices: answers per prompt (``n``); a batch lists all choices of a prompt one after another.
    """
    usage = Usage()
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return usage
    if not native:
        usage.add_openai(answer)
        if choices == 1:
            usage.output_texts = texts_of([answer])
        return usage
    for index, element in enumerate(answer if isinstance(answer, list) else [answer]):
        usage.add_native(element, index, choices)
    return usage


class StreamReader:
    """Reads the usage of a stream from its pieces. Only events that matter are parsed.

    Args:
        native: whether the stream answers ``/generate``, whose every event carries the whole answer so
            far (or, with incremental output, the new part).
        choices: answers per prompt.
    """

    def __init__(self, *, native: bool, choices: int) -> None:
        self._native = native
        self._choices = choices
        self._splitter = EventSplitter()
        self._events: list[bytes] = []
        self._size = 0
        self.usage = Usage()
        self.done = False
        """The stream announced its end; a connection that closes before that was broken off."""

    @property
    def in_event(self) -> bool:
        """Whether the stream stands in the middle of an event."""
        return self._splitter.in_event

    def feed(self, chunk: bytes) -> None:
        """Take the next piece."""
        for data in self._splitter.feed(chunk):
            if data == DONE:
                self.done = True
                continue
            if not self._native and self._size <= MAX_TEXT_BYTES:
                self._events.append(data)
                self._size += len(data)
            if (_SAYS_FINISHED if self._native else _SAYS_USAGE).search(data):
                self._read(data)

    def output_texts(self) -> dict[int, str]:
        """What was generated, by choice, where only its text is told; nothing of very long answers.

        Parses every event, so it is called off the event loop, when the stream has ended.
        """
        if self._choices != 1 or self._size > MAX_TEXT_BYTES:
            return {}
        events = []
        for data in self._events:
            try:
                events.append(orjson.loads(data))
            except orjson.JSONDecodeError:
                return {}
        return texts_of(events)

    def _read(self, data: bytes) -> None:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if not self._native:
            self.usage.add_openai(event)
            return
        index = event.get("index", 0) if isinstance(event, dict) else 0
        self.usage.add_native(event, index if type(index) is int else 0, self._choices)
