"""The common part of OpenAI's chat completions and completions: their answers are lists of choices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import orjson

from sglang_ext.keys import encode_tokens
from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.prompts import adapter_of
from sglang_ext.router.api.sse import parsed
from sglang_ext.router.api.stream_splice import StreamSplice, another_answer
from sglang_ext.router.api.usage import StreamReader, Usage, count
from sglang_ext.router.api.validation import Json, check_fields, wrong

_TEXTS = ("content", "reasoning_content", "text")


class Splice(StreamSplice):
    """For events that have the new part of each choice.

    Texts are compared by characters: the streams may meet within a word. An instance holds a character that
    is cut in two back until it is whole.
    """

    def __init__(self, reader: StreamReader) -> None:
        super().__init__(reader)
        self._left: dict[tuple[int, str], str] = {}
        self._created: Any = None
        self._begun = False
        for data in reader.events:
            if isinstance(event := parsed(data), dict):
                self._begun = True
                self._created = event.get("created", self._created)
                for choice, part in _parts(event):
                    for name in _TEXTS:
                        if isinstance(text := part.get(name), str):
                            key = choice.get("index", 0), name
                            self._left[key] = self._left.get(key, "") + text

    def kept(self, event: Json, data: bytes) -> bytes | None:
        says = not event.get("choices")
        for choice, part in _parts(event):
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

    @property
    def complete(self) -> bool:
        return not any(self._left.values())

    def _cut(self, key: tuple[int, str], text: str) -> str:
        left = self._left.get(key, "")
        size = min(len(left), len(text))
        if text[:size] != left[:size]:
            raise another_answer()
        self._left[key] = left[size:]
        return text[size:]


def _parts(event: Json) -> Iterator[tuple[Json, Json]]:
    """(choice, the object that holds its text) of an event."""
    for choice in event.get("choices") or ():
        yield choice, choice["delta"] if isinstance(choice.get("delta"), dict) else choice


class OpenAiDialect(Dialect):
    """An API whose answers are lists of choices."""

    asks_tiers = "return_cached_tokens_details"
    tells_tiers = (b'"sglext":{', b'"choices":[]')
    splice = Splice
    answer_object: ClassVar[str]
    """The ``object`` of answers."""
    id_prefix: ClassVar[str]
    kinds: ClassVar[Mapping[str, str]]
    """Of the fields of a body that are checked: see ``validation.kinds``."""

    def checked(self, payload: Json, limits: Limits) -> str | None:
        """Check a body's plain fields; returns the LoRA adapter that is asked for. Any model's name will do,
        as for SGLang."""
        if "model" in payload and payload["model"] is None:
            raise wrong("model", "a string", None)
        check_fields(payload, self.kinds, limits)
        return adapter_of(payload.get("model"))

    def read(self, usage: Usage, answer: Any, choices: int) -> None:
        if not isinstance(answer, dict):
            return
        if isinstance(reported := answer.get("usage"), dict):
            usage.prompt_tokens = count(reported.get("prompt_tokens"))
            usage.completion_tokens = count(reported.get("completion_tokens"))
            # SGLang leaves the details out without --enable-cache-report, and when nothing was cached.
            if isinstance(details := reported.get("prompt_tokens_details"), dict):
                usage.cached_tokens = count(details.get("cached_tokens"))
        for choice in choices_of(answer):
            if isinstance(meta := choice.get("meta_info"), dict):
                usage.cached_tokens = count(meta.get("cached_tokens"))
        if isinstance(extension := answer.get("sglext"), dict):
            usage.add_tiers(extension.get("cached_tokens_details"))
            if usage.tiers and usage.cached_tokens is None:
                usage.cached_tokens = sum(usage.tiers.values())
            ids = extension.get("output_ids")
            if choices == 1 and isinstance(ids, list) and len(ids) == 1 and isinstance(ids[0], list):
                with contextlib.suppress(ValueError, TypeError, OverflowError):
                    usage.output_keys = {0: encode_tokens(ids[0])}

    def texts(self, answers: Sequence[Any]) -> Mapping[int, str]:
        # Choices with tool calls or reasoning are left out: their text lacks parts of the generated one.
        texts: dict[int, str] = {}
        mixed: set[int] = set()
        for answer in answers:
            for choice in choices_of(answer):
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

    def empty_answer(self, name: str, model: Any, prompt: int, cached: int) -> Json:
        return {
            "id": f"{self.id_prefix}-{name}",
            "object": self.answer_object,
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, **self.empty_choice(), "finish_reason": "length", "logprobs": None}],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": 0,
                "total_tokens": prompt,
                "prompt_tokens_details": {"cached_tokens": cached},
            },
        }

    def empty_choice(self) -> Json:
        """The fields of a choice without text."""
        raise NotImplementedError


def choices_of(answer: Any) -> list[Json]:
    """The choices of an answer, or of an event of a stream. It may be any JSON."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    return [choice for choice in choices if isinstance(choice, dict)] if isinstance(choices, list) else []
