"""From answers of ``/v1/chat/completions`` to those of ``/v1/messages``.

SGLang's ``/v1/messages`` takes no salt, so a tenant's message goes to the workers as the chat request that
SGLang would make of it, with the salt, and its answer is turned back here as SGLang turns it
(``entrypoints/anthropic/serving.py``). Without tenants, ``/v1/messages`` passes through untouched.
"""

from __future__ import annotations

import uuid
from typing import Any

import orjson

from sglang_ext.router.api.sse import EventSplitter
from sglang_ext.router.api.validation import Json

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 408: "request_timeout_error", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class AnthropicAnswer:
    """Translates one answer; for a stream, piece by piece.

    Args:
        model: what the client named.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"msg_{uuid.uuid4().hex}"
        self._splitter = EventSplitter()
        self._started = False
        self._index = -1
        self._open: str | None = None
        self._stop: str | None = None
        self._usage: Json = {}

    def whole(self, status: int, body: bytes) -> bytes:
        """An answer in one piece."""
        try:
            answer = orjson.loads(body)
        except orjson.JSONDecodeError:
            answer = None
        if status != 200 or not isinstance(answer, dict):
            return orjson.dumps(self._error(status, answer))
        choice = (answer.get("choices") or [{}])[0]
        message = choice.get("message") or {}
        content: list[Json] = []
        if message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": message["reasoning_content"]})
        if message.get("content"):
            content.append({"type": "text", "text": message["content"]})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            content.append(
                {
                    "type": "tool_use",
                    "id": call["id"],
                    "name": function["name"],
                    "input": _arguments(function.get("arguments")),
                }
            )
        return orjson.dumps(
            {
                **self._message(answer.get("model") or self._model),
                "content": content or [{"type": "text", "text": ""}],
                "stop_reason": _STOPS.get(choice.get("finish_reason") or "stop", "end_turn"),
                "usage": _usage(answer.get("usage"), output=True),
            }
        )

    def feed(self, chunk: bytes) -> bytes:
        """The events that a piece of a chat stream amounts to."""
        out = bytearray()
        for data in self._splitter.feed(chunk):
            if data == b"[DONE]":
                self._finish(out)
                continue
            try:
                event = orjson.loads(data)
            except orjson.JSONDecodeError:
                continue
            if isinstance(event, dict):
                self._take(event, out)
        return bytes(out)

    def broken(self, message: str) -> bytes:
        """The event that ends a stream whose worker went away."""
        return _event({"type": "error", "error": {"type": "api_error", "message": message}})

    # -- events -----------------------------------------------------------------------------------

    def _take(self, event: Json, out: bytearray) -> None:
        if event.get("error"):
            out += _event(self._error(500, event))
            return
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            self._stop = choice.get("finish_reason") or self._stop
            says = delta.get("reasoning_content") or delta.get("tool_calls") or delta.get("content")
            if says or self._stop or self._usage:
                self._start(out)
            if delta.get("reasoning_content"):
                self._block("thinking", {"type": "thinking", "thinking": ""}, out)
                self._delta({"type": "thinking_delta", "thinking": delta["reasoning_content"]}, out)
            for call in delta.get("tool_calls") or ():
                self._call(call, out)
            if delta.get("content"):
                self._block("text", {"type": "text", "text": ""}, out)
                self._delta({"type": "text_delta", "text": delta["content"]}, out)

    def _start(self, out: bytearray) -> None:
        if self._started:
            return
        self._started = True
        usage = {**_usage(self._usage, output=False), "output_tokens": 0}
        message = {**self._message(self._model), "content": [], "usage": usage}
        out += _event({"type": "message_start", "message": message})

    def _call(self, call: Json, out: bytearray) -> None:
        function = call.get("function") or {}
        if function.get("name"):
            block = {
                "type": "tool_use",
                "id": call.get("id") or f"toolu_{uuid.uuid4().hex}",
                "name": function["name"],
                "input": {},
            }
            self._block("tool_use", block, out, anew=True)
        if function.get("arguments") and self._open == "tool_use":
            self._delta({"type": "input_json_delta", "partial_json": function["arguments"]}, out)

    def _block(self, kind: str, block: Json, out: bytearray, *, anew: bool = False) -> None:
        if self._open == kind and not anew:
            return
        self._close(out)
        self._index += 1
        self._open = kind
        out += _event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: Json, out: bytearray) -> None:
        out += _event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self, out: bytearray) -> None:
        if self._open is not None:
            out += _event({"type": "content_block_stop", "index": self._index})
            self._open = None

    def _finish(self, out: bytearray) -> None:
        self._start(out)
        self._close(out)
        out += _event(
            {
                "type": "message_delta",
                "delta": {"stop_reason": _STOPS.get(self._stop or "stop", "end_turn")},
                "usage": {"output_tokens": self._usage.get("completion_tokens") or 0},
            }
        )
        out += _event({"type": "message_stop"})

    def _message(self, model: str) -> Json:
        return {"id": self._id, "type": "message", "role": "assistant", "model": model}

    def _error(self, status: int, answer: Any) -> Json:
        error = answer.get("error", answer) if isinstance(answer, dict) else answer
        message = error.get("message") if isinstance(error, dict) else error
        if status >= 500 or not isinstance(message, str):
            message = "Internal server error" if status >= 500 else "Request failed"
        return {"type": "error", "error": {"type": _KINDS.get(status, "api_error"), "message": message}}


def _usage(usage: Any, *, output: bool) -> Json:
    """Anthropic's usage: what was cached is not part of ``input_tokens``."""
    usage = usage if isinstance(usage, dict) else {}
    prompt = usage.get("prompt_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    told: Json = {"input_tokens": max(prompt - cached, 0)}
    if cached:
        told["cache_read_input_tokens"] = cached
    if output:
        told["output_tokens"] = usage.get("completion_tokens") or 0
    return told


def _arguments(text: Any) -> Json:
    try:
        value = orjson.loads(text)
    except (orjson.JSONDecodeError, TypeError):
        return {}
    return value if isinstance(value, dict) else {}


def _event(event: Json) -> bytes:
    return b"event: " + str(event["type"]).encode() + b"\ndata: " + orjson.dumps(event) + b"\n\n"
