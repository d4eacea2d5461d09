"""What an answer says of tokens: read from a copy of the bytes that pass, never delaying them.

Everything here is best effort: an answer that cannot be read is passed on all the same, and counted as
saying nothing.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import orjson

from sglang_ext.keys import encode_tokens
from sglang_ext.router.api.sse import EventSplitter
from sglang_ext.router.api.validation import Endpoint

DONE = b"[DONE]"
MAX_TEXT_BYTES = 1 << 20
"""Events of a stream that are kept to learn what was generated."""
_SAYS_FINISHED = re.compile(rb'"finish_reason"\s*:\s*\{')
_SAYS_USAGE = re.compile(rb'"(usage|sglext)"\s*:\s*\{')
_ID = re.compile(rb'"id"\s*:\s*"([\x21\x23-\x5b\x5d-\x7e]{1,200})"')
_TIERS = {"device": "hbm", "host": "dram", "storage": "disk"}


class Form(enum.Enum):
    """Whose form an answer has."""

    NATIVE = enum.auto()
    """``/generate``: every event of a stream carries the whole answer so far, or the new part."""
    OPENAI = enum.auto()
    RESPONSES = enum.auto()
    ANTHROPIC = enum.auto()


FORMS = {
    Endpoint.GENERATE: Form.NATIVE,
    Endpoint.CHAT: Form.OPENAI,
    Endpoint.COMPLETIONS: Form.OPENAI,
    Endpoint.RESPONSES: Form.RESPONSES,
    Endpoint.MESSAGES: Form.ANTHROPIC,
}


class Usage(msgspec.Struct):
    """Tokens of one request; for a batch, of all its prompts."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    tiers: dict[str, int] = {}
    """Tier (hbm, dram, disk) -> cached tokens that were found there, where the worker tells."""
    response_id: str | None = None
    """Of ``/v1/responses``: the name under which the worker keeps the answer."""
    output_keys: dict[int, bytes] = {}
    """Index of the prompt -> its generated tokens, encoded; where there is one choice per prompt."""
    output_texts: dict[int, str] = {}
    """Index of the prompt -> what was generated, where only its text is told."""

    def add_native(self, answer: Any, index: int, choices: int) -> None:
        """Take in one element of a ``/generate`` answer: choice ``index % choices`` of its prompt."""
        if not isinstance(answer, dict) or not isinstance(meta := answer.get("meta_info"), dict):
            return
        self.completion_tokens = _sum(self.completion_tokens, meta.get("completion_tokens"))
        if index % choices == 0:
            self.prompt_tokens = _sum(self.prompt_tokens, meta.get("prompt_tokens"))
            self.cached_tokens = _sum(self.cached_tokens, meta.get("cached_tokens"))
            self._add_tiers(meta.get("cached_tokens_details"))
        ids = answer.get("output_ids")
        # With --incremental-streaming-output an event has the latest ids only, which are no prefix.
        if choices == 1 and isinstance(ids, list) and ids and len(ids) == meta.get("completion_tokens"):
            try:
                self.output_keys[index] = encode_tokens(ids)
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
        if isinstance(extension := answer.get("sglext"), dict):
            self._add_tiers(extension.get("cached_tokens_details"))
            if self.tiers and self.cached_tokens is None:
                self.cached_tokens = sum(self.tiers.values())

    def add_responses(self, answer: Any) -> None:
        """Take in a response, or the event of a stream that carries one."""
        if isinstance(answer, dict) and isinstance(answer.get("response"), dict):
            answer = answer["response"]
        if not isinstance(answer, dict):
            return
        if isinstance(name := answer.get("id"), str) and answer.get("object") == "response":
            self.response_id = name
        if isinstance(usage := answer.get("usage"), dict):
            self.prompt_tokens = _count(usage.get("input_tokens"))
            self.completion_tokens = _count(usage.get("output_tokens"))
            if isinstance(details := usage.get("input_tokens_details"), dict):
                # Without --enable-cache-report this is always 0, which says nothing.
                self.cached_tokens = _count(details.get("cached_tokens")) or None

    def add_anthropic(self, answer: Any) -> None:
        """Take in a message, or an event of a stream that carries usage."""
        if isinstance(answer, dict) and isinstance(answer.get("message"), dict):
            answer = answer["message"]
        if not isinstance(answer, dict) or not isinstance(usage := answer.get("usage"), dict):
            return
        cached = _count(usage.get("cache_read_input_tokens"))
        if (fresh := _count(usage.get("input_tokens"))) is not None:
            self.prompt_tokens = fresh + (cached or 0)
            self.cached_tokens = cached
        if (output := _count(usage.get("output_tokens"))) is not None:
            self.completion_tokens = output

    def _add_tiers(self, details: Any) -> None:
        if not isinstance(details, dict):
            return
        for theirs, tier in _TIERS.items():
            if tokens := _count(details.get(theirs)):
                self.tiers[tier] = self.tiers.get(tier, 0) + tokens


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


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None


class _StreamedChoice(msgspec.Struct):
    delta: _Delta
    index: int = 0


class _ChatEvent(msgspec.Struct):
    choices: list[_StreamedChoice]


_CHAT_EVENTS = msgspec.json.Decoder(list[_ChatEvent])


def streamed_texts(events: Sequence[bytes]) -> dict[int, str]:
    """As ``texts_of``, of the events of a stream of chat, which are read at once.

    Raises:
        msgspec.MsgspecError: one of them is of another form.
    """
    texts: dict[int, list[str]] = {}
    mixed: set[int] = set()
    for event in _CHAT_EVENTS.decode(b"[" + b",".join(events) + b"]"):
        for choice in event.choices:
            delta = choice.delta
            if delta.tool_calls or delta.reasoning_content:
                mixed.add(choice.index)
            if delta.content:
                texts.setdefault(choice.index, []).append(delta.content)
    return {index: "".join(pieces) for index, pieces in texts.items() if index not in mixed}


def anthropic_text(answers: Iterable[Any]) -> dict[int, str]:
    """As ``texts_of``, for messages and their streams: ``{0: text}``, or nothing of what is not all text."""
    text = ""
    for answer in answers:
        if not isinstance(answer, dict):
            continue
        blocks = answer.get("content") or [answer.get("content_block") or answer.get("delta")]
        for block in blocks if isinstance(blocks, list) else ():
            if not isinstance(block, dict):
                continue
            if block.get("type") not in (None, "text", "text_delta"):
                return {}
            if isinstance(part := block.get("text"), str):
                text += part
    return {0: text} if text else {}


def responses_text(answers: Iterable[Any]) -> dict[int, str]:
    """As ``texts_of``, for responses; of a stream, the last event has the whole."""
    for answer in reversed(list(answers)):
        response = answer.get("response", answer) if isinstance(answer, dict) else None
        output = response.get("output") if isinstance(response, dict) else None
        if not isinstance(output, list) or not output:
            continue
        text = ""
        for item in output:
            if not isinstance(item, dict) or item.get("type") != "message":
                return {}
            parts = item.get("content")
            for part in parts if isinstance(parts, list) else ():
                text += part.get("text", "") if isinstance(part, dict) else ""
        return {0: text} if text else {}
    return {}


_TEXTS = {Form.OPENAI: texts_of, Form.ANTHROPIC: anthropic_text, Form.RESPONSES: responses_text}


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _sum(total: int | None, value: Any) -> int | None:
    count = _count(value)
    return total if count is None else (total or 0) + count


def answer_id(data: bytes) -> str | None:
    """The first ``id`` in an answer, or in the beginning of a stream: that of the answer itself, which in all
    forms stands before those of its parts. In a text, the quotes would be escaped."""
    found = _ID.search(data)
    return None if found is None else found[1].decode("ascii")


def read_answer(body: bytes, *, form: Form, choices: int) -> Usage:
    """The usage that a complete JSON answer states.

    Args:
        form: whose form it has.
        choices: answers per prompt (``n``); a batch lists all choices of a prompt one after another.
    """
    usage = Usage()
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return usage
    if form is Form.NATIVE:
        for index, element in enumerate(answer if isinstance(answer, list) else [answer]):
            usage.add_native(element, index, choices)
        return usage
    _ADDERS[form](usage, answer)
    if choices == 1:
        usage.output_texts = _TEXTS[form]([answer])
    return usage


_ADDERS = {
    Form.OPENAI: Usage.add_openai,
    Form.ANTHROPIC: Usage.add_anthropic,
    Form.RESPONSES: Usage.add_responses,
}


class StreamReader:
    """Reads the usage of a stream from its pieces. Only events that matter are parsed.

    Args:
        form: whose form the stream has.
        choices: answers per prompt.
    """

    def __init__(self, *, form: Form, choices: int) -> None:
        self.form = self._form = form
        self._choices = choices
        self.last = b""
        """The last event of ``/generate``, which has the whole answer so far."""
        self.native_events = 0
        self._splitter = EventSplitter()
        self._events: list[bytes] = []
        self._size = 0
        self.usage = Usage()
        self.done = False
        """The stream announced its end; a connection that closes before that was broken off."""

    @property
    def kept_bytes(self) -> int:
        """What ``output_texts`` has to look at."""
        return self._size

    @property
    def events(self) -> list[bytes]:
        """All events so far, but of ``/generate``; not of answers that are ``too_long``."""
        return self._events

    @property
    def too_long(self) -> bool:
        """Whether events were left out."""
        return self._size > MAX_TEXT_BYTES

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
            if self._form is Form.NATIVE:
                self.last = data
                self.native_events += 1
            elif self._size <= MAX_TEXT_BYTES:
                self._events.append(data)
                self._size += len(data)
            if (_SAYS_FINISHED if self._form is Form.NATIVE else _SAYS_USAGE).search(data):
                self._take(self.usage, data)

    def first(self, chunk: bytes) -> Usage:
        """What the first piece says already, so that it can be told in the head of the answer; ``feed`` is
        still to be called with it."""
        usage = Usage()
        for data in EventSplitter().feed(chunk)[:1]:
            if self._form is Form.NATIVE or _SAYS_USAGE.search(data):
                self._take(usage, data)
        return usage

    def output_texts(self) -> dict[int, str]:
        """What was generated, by choice, where only its text is told; nothing of very long answers.

        Parses every event, so it is called off the event loop, when the stream has ended.
        """
        if self._choices != 1 or self._size > MAX_TEXT_BYTES or self._form is Form.NATIVE:
            return {}
        if self._form is Form.OPENAI:
            with contextlib.suppress(msgspec.MsgspecError):
                return streamed_texts(self._events)
        events = []
        for data in self._events:
            try:
                events.append(orjson.loads(data))
            except orjson.JSONDecodeError:
                return {}
        return _TEXTS[self._form](events)

    def _take(self, usage: Usage, data: bytes) -> None:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return
        if self._form is not Form.NATIVE:
            _ADDERS[self._form](usage, event)
            return
        index = event.get("index", 0) if isinstance(event, dict) else 0
        usage.add_native(event, index if type(index) is int else 0, self._choices)
