"""Ollama's ``/api/chat`` and ``/api/generate``, as SGLang serves them (``entrypoints/ollama``).

A prompt goes to workers as ``/generate``, a conversation as ``/v1/chat/completions`` with the defaults of
``/generate``, which is what SGLang samples Ollama's requests with. Like SGLang, both ignore ``format``,
``think``, ``keep_alive``, ``template``, ``suffix``, ``context`` and ``raw``. Unlike SGLang they refuse
pictures, which it drops, and a stream has the last piece of its text, which SGLang 0.5.23 leaves out.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from datetime import UTC, datetime
from typing import Any, Final

import orjson

from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.chat import CHAT
from sglang_ext.router.api.dialect import Translation, fields
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.rewritten import RewrittenDialect
from sglang_ext.router.api.sse import DONE, EventSplitter, parsed
from sglang_ext.router.api.validation import (
    Json,
    check_fields,
    check_object,
    coerced_bool,
    kinds,
    take_objects,
    take_string,
    wrong,
)
from sglang_ext.router.http.types import JSON_TYPE, RequestRefused

STREAM_TYPE: Final = "application/x-ndjson"
MAX_NEW_TOKENS: Final = 2048
"""SGLang's own default for Ollama's requests."""
_OPTIONS = kinds(
    number="temperature top_p presence_penalty frequency_penalty",
    integer="top_k",
    seed="seed",
    positive="num_predict",
    strings="stop",
)
"""Options that SGLang heeds. It ignores all others."""
_SAMPLED: Final[Json] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Defaults of ``/generate``. Those of ``/v1/chat/completions`` may be the model's own."""
_COUNTS: Final = ("load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration")


class OllamaDialect(RewrittenDialect):
    """The common part of both APIs."""

    stream_type = STREAM_TYPE

    def error(self, refused: RequestRefused) -> Json:
        return {"error": refused.message}

    def broken_off(self, message: str) -> bytes:
        return _line({"error": message})

    @abstractmethod
    def said(self, text: str) -> Json:
        """The part of an answer that has its text."""

    def answers(self, payload: Json, limits: Limits) -> Translation:
        return OllamaAnswer(self, limits.served_name)

    def answer(self, model: str, text: str, *, started_ns: int | None, prompt: Any, output: Any) -> Json:
        """A whole answer, with every field that SGLang's has.

        Args:
            started_ns: when the request came, by the monotonic clock; None where it took no time.
            prompt, output: numbers of tokens.
        """
        took = None if started_ns is None else time.monotonic_ns() - started_ns
        known = {"prompt_eval_count": prompt, "eval_count": output}
        counts = {name: known.get(name) for name in _COUNTS}
        return {**self.piece(model, text, done=True), "total_duration": took, **counts}

    def piece(self, model: str, text: str, *, done: bool) -> Json:
        """A line of a stream."""
        reason = "stop" if done else None
        return {"model": model, "created_at": _now(), **self.said(text), "done": done, "done_reason": reason}


class OllamaAnswer:
    """Translates one answer of ``/generate`` or ``/v1/chat/completions``. A ``Translation``.

    Args:
        dialect: of the client.
        model: its name in the answer.
    """

    def __init__(self, dialect: OllamaDialect, model: str) -> None:
        self._dialect = dialect
        self._model = model
        self._started_ns = time.monotonic_ns()
        self._splitter = EventSplitter()
        self._text = ""
        """Of an answer whose events have the whole text so far."""
        self._failed = False

    def whole(self, status: int, body: bytes) -> bytes:
        """An answer in one piece."""
        answer = parsed(body)
        if status != 200 or not isinstance(answer, dict):
            return orjson.dumps({"error": _message(answer)})
        if "meta_info" in answer:
            text, usage = answer.get("text") or "", answer["meta_info"]
        else:
            text, usage = answer["choices"][0]["message"].get("content") or "", answer.get("usage") or {}
        counts = {"prompt": usage.get("prompt_tokens"), "output": usage.get("completion_tokens")}
        return orjson.dumps(self._dialect.answer(self._model, text, started_ns=self._started_ns, **counts))

    def feed(self, chunk: bytes) -> bytes:
        """The lines that a piece of a stream amounts to."""
        out = []
        for data in self._splitter.feed(chunk):
            if data == DONE:
                if not self._failed:
                    out.append(_line(self._dialect.piece(self._model, "", done=True)))
            elif isinstance(event := parsed(data), dict):
                if event.get("error"):
                    self._failed = True
                    out.append(_line({"error": _message(event)}))
                elif text := self._new_text(event):
                    out.append(_line(self._dialect.piece(self._model, text, done=False)))
        return b"".join(out)

    def _new_text(self, event: Json) -> str:
        if "meta_info" not in event:
            choices = event.get("choices")
            return (choices[0].get("delta") or {}).get("content") or "" if choices else ""
        text: str = event.get("text") or ""
        ids, reported = event.get("output_ids"), event["meta_info"].get("completion_tokens")
        if isinstance(ids, list) and len(ids) != reported:
            return text  # the server streams increments (--incremental-streaming-output)
        new, self._text = text[len(self._text) :], text
        return new


class OllamaChat(OllamaDialect):
    """``/api/chat``: a conversation."""

    path = "/api/chat"
    summary = "Ollama's chats"
    prompt_field = "messages"
    messages_in = ("messages",)
    own_fields = fields("options format keep_alive think")
    admitted_as = CHAT

    def rewritten(self, payload: Json, limits: Limits) -> Json:
        _check(payload)
        messages = []
        for index, message in enumerate(take_objects(payload, "messages", "an array of messages")):
            field = f"messages[{index}]"
            for name in ("role", "content"):
                if type(message.get(name)) is not str:
                    raise wrong(f"{field}.{name}", "a string", message.get(name))
            _check_pictures(message, field + ".")
            messages.append({"role": message["role"], "content": message["content"]})
        stream = _streams(payload)
        options = _options(payload, limits)
        return {
            "model": limits.served_name,
            "messages": messages,
            "stream": stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
            "separate_reasoning": False,  # SGLang's answer has all generated text, thoughts included
            "max_tokens": options.pop("num_predict", MAX_NEW_TOKENS),
            **_SAMPLED,
            **options,
        }

    def said(self, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "images": None}}

    @property
    def schema(self) -> Json:
        message = schemas.record({"role": schemas.FULL_TEXT, "content": schemas.TEXT}, "role", "content")
        return schemas.record({**_SCHEMA, "messages": schemas.several(message)}, "model", "messages")


class OllamaGenerate(OllamaDialect):
    """``/api/generate``: a prompt, without the model's chat template."""

    path = "/api/generate"
    summary = "Ollama's completions"
    prompt_field = "prompt"
    instructions_in = ("system",)
    own_fields = fields("prompt system options format keep_alive think suffix template context raw images")
    admitted_as = GENERATE

    def answer_at_once(self, payload: Json, limits: Limits) -> tuple[str, bytes] | None:
        """An empty prompt, with which Ollama's own program looks whether the model is there."""
        if _prompt(payload).strip():
            return None
        _check(payload)
        answer = self.answer(limits.served_name, "", started_ns=None, prompt=None, output=None)
        if _streams(payload):
            return STREAM_TYPE, _line(answer)
        return JSON_TYPE, orjson.dumps(answer)

    def rewritten(self, payload: Json, limits: Limits) -> Json:
        _check(payload)
        _check_pictures(payload, "")
        options = _options(payload, limits)
        sampling = {"max_new_tokens": options.pop("num_predict", MAX_NEW_TOKENS)}
        if "seed" in options:
            sampling["sampling_seed"] = options.pop("seed")
        return {
            "text": _prompt(payload),
            "stream": _streams(payload),
            "sampling_params": sampling | options,
        }

    def said(self, text: str) -> Json:
        return {"response": text}

    def answer(self, model: str, text: str, *, started_ns: int | None, prompt: Any, output: Any) -> Json:
        answer = super().answer(model, text, started_ns=started_ns, prompt=prompt, output=output)
        return answer | {"context": None}

    @property
    def schema(self) -> Json:
        texts = {"prompt": schemas.TEXT, "system": schemas.MAYBE_TEXT}
        return schemas.record({**_SCHEMA, **texts}, "model", "prompt")


OLLAMA_CHAT = OllamaChat()
OLLAMA_GENERATE = OllamaGenerate()

_SCHEMA: Final[Json] = {
    "model": schemas.TEXT,
    "stream": {"type": "boolean", "default": True},
    "options": schemas.record(schemas.fields(_OPTIONS)) | {"type": ["object", "null"]},
}


# -- checks of bodies ----------------------------------------------------------------------------------


def _check(payload: Json) -> None:
    """Check what both APIs have. Any model's name will do, as for SGLang, which answers with its own."""
    if take_string(payload, "model") is None:
        raise RequestRefused("model is missing", param="model", code="missing")


def _streams(payload: Json) -> bool:
    """Whether the answer is a stream: unlike in other APIs, that is the default."""
    value = coerced_bool(payload.get("stream", True))
    if type(value) is not bool:
        raise wrong("stream", "a boolean", value)
    return value


def _prompt(payload: Json) -> str:
    prompt = payload.get("prompt")
    if type(prompt) is not str:
        raise wrong("prompt", "a string", prompt)
    system = take_string(payload, "system")
    return f"{system}\n\n{prompt}" if system else prompt


def _options(payload: Json, limits: Limits) -> Json:
    """The sampling options, under Ollama's names; null counts as absent."""
    check_object(payload, "options")
    options = {name: value for name, value in (payload.get("options") or {}).items() if value is not None}
    check_fields(options, _OPTIONS, limits, "options.", coerces=False)
    return {name: options[name] for name in _OPTIONS if name in options}


def _check_pictures(holder: Json, prefix: str) -> None:
    if holder.get("images"):
        raise RequestRefused(
            f"{prefix}images: SGLang takes no pictures in Ollama's form; send them to /v1/chat/completions",
            param=prefix + "images",
            code="unsupported_parameter",
        )


# -- answers ------------------------------------------------------------------------------------------


def _line(value: Json) -> bytes:
    return orjson.dumps(value) + b"\n"


def _now() -> str:
    """The time as SGLang writes it, to the millisecond."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _message(answer: Any) -> str:
    """The text of a worker's error."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) else "the worker failed"
