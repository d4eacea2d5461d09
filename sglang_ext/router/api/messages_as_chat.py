"""Anthropic's messages as OpenAI's chats, and the answers back.

SGLang's ``/v1/messages`` takes no salt, so a tenant's message goes to the workers as the chat request that
SGLang would make of it (``entrypoints/anthropic/serving.py``), with the salt, and its answer is turned back
here as SGLang turns it. Without tenants, ``/v1/messages`` passes through untouched.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import orjson

from sglang_ext.router.api.sse import DONE, EventSplitter, event, parsed
from sglang_ext.router.api.validation import Json

CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}
_SERVER_TOOLS = ("web_search_", "computer_", "bash_", "text_editor_")
_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 408: "request_timeout_error", 413: "request_too_large", 429: "rate_limit_error",
    503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def error_of(status: int, message: str) -> Json:
    """An error in Anthropic's form."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def is_server_tool(tool: Json) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(_SERVER_TOOLS)


def blocks_of(content: Any) -> list[Json]:
    return content if isinstance(content, list) else []


# -- requests ----------------------------------------------------------------------------------------


def to_chat(payload: Json, *, in_front: bool = False) -> Json:
    """The body of ``/v1/chat/completions`` that stands for one of ``/v1/messages``.

    Args:
        payload: has passed ``check_conversation``; it is not changed.
        in_front: system messages are put as one in front, with ``system``.
    """
    messages: list[Json] = []
    system = payload.get("system")
    parts = [system] if isinstance(system, str) and system.strip() else []
    parts += [block["text"] for block in blocks_of(system) if block["type"] == "text" and block["text"]]
    said = payload["messages"]
    if in_front:
        found = (_system_text(message["content"]) for message in said if message["role"] == "system")
        parts += [text for text in found if text]
        said = [message for message in said if message["role"] != "system"]
    if parts:
        messages.append({"role": "system", "content": "\n".join(parts)})
    for message in said:
        _add_message(message, messages)
    chat: Json = {"model": payload["model"], "messages": messages}
    for name, theirs in _PASSED.items():
        if payload.get(name) is not None:
            chat[theirs] = payload[name]
    tools = [_tool(tool) for tool in payload.get("tools") or () if not is_server_tool(tool)]
    if tools:
        chat["tools"] = tools
        chat["tool_choice"] = "auto"
    _add_reasoning(payload, chat)
    choice = payload.get("tool_choice")
    if choice is not None:
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
        kind = CHOICES[choice["type"]]
        chat["tool_choice"] = (
            {"type": "function", "function": {"name": choice.get("name")}} if kind == "tool" else kind
        )
    return chat


_PASSED = {
    "max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "stop_sequences": "stop", "stream": "stream",
}  # fmt: skip


def _system_text(content: Any) -> str:
    blocks = [content] if isinstance(content, str) else [b["text"] for b in content if b["type"] == "text"]
    return "\n".join(filter(None, map(str.strip, blocks)))


def _add_reasoning(payload: Json, chat: Json) -> None:
    """Whether to think, and how hard. SGLang knows its model's switch; here the common ones are set."""
    kwargs: Json = {}
    thinking = payload.get("thinking")
    if isinstance(thinking, dict):
        enabled = thinking.get("type") != "disabled"
        kwargs |= {"thinking": enabled, "enable_thinking": enabled}
    output = payload.get("output_config")
    form = output.get("format") if isinstance(output, dict) else None
    if isinstance(form, dict):
        schema = {"name": "response", "schema": form.get("schema"), "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    effort = output.get("effort") if isinstance(output, dict) else None
    if effort is not None:
        # Not the field of a chat, by which SGLang switches reasoning on.
        kwargs["reasoning_effort"] = "max" if effort == "xhigh" else effort
    if kwargs:
        chat["chat_template_kwargs"] = kwargs


def _tool(tool: Json) -> Json:
    schema = tool["input_schema"]
    return {
        "type": "function",
        **({} if tool.get("defer_loading") is None else {"defer_loading": tool["defer_loading"]}),
        "function": {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": schema if "type" in schema else {**schema, "type": "object"},
            "strict": bool(tool.get("strict")),
        },
    }


def _add_message(message: Json, messages: list[Json]) -> None:
    role, content = message["role"], message["content"]
    if isinstance(content, str):
        messages.append({"role": role, "content": content})
        return
    parts: list[Json] = []
    calls: list[Json] = []
    for block in content:
        adder = _ADDERS.get(block["type"])
        if adder is not None:
            adder(block, parts)
        elif block["type"] == "tool_use":
            arguments = orjson.dumps(block.get("input") or {}).decode()
            calls.append(
                {
                    "id": block["id"],
                    "type": "function",
                    "function": {"name": block["name"], "arguments": arguments},
                }
            )
        elif block["type"] == "tool_result" and role == "user":
            if parts:
                messages.append({"role": role, "content": _plain(parts)})
                parts = []
            name = block.get("tool_use_id") or block.get("id") or ""
            messages += ({"role": "tool", "tool_call_id": name, "content": each} for each in _results(block))
        elif block["type"] == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {_result_text(block)}"})
    if not parts and not calls and role == "user":
        return
    message = {"role": role}
    thoughts = [b["thinking"] for b in content if b["type"] == "thinking" and b["thinking"]]
    if thoughts and role == "assistant":
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts or not calls:
        message["content"] = _plain(parts) if parts else ""
    messages.append(message)


def _plain(parts: list[Json]) -> Any:
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _add_text(block: Json, parts: list[Json]) -> None:
    parts.append({"type": "text", "text": block["text"]})


def _add_image(block: Json, parts: list[Json]) -> None:
    source = block.get("source")
    if not isinstance(source, dict):
        return
    url = source.get("url")
    if source.get("type") == "base64":
        data = source.get("data")
        url = f"data:{source.get('media_type', 'image/png')};base64,{data}" if data else None
    if url:
        parts.append({"type": "image_url", "image_url": {"url": url}})


def _add_search_result(block: Json, parts: list[Json]) -> None:
    lines = [f"Title: {block['title']}"] if block.get("title") else []
    source = block.get("source")
    if isinstance(source, dict):
        source = source.get("url") or source.get("text")
    if source:
        lines.append(f"Source: {source}")
    content = block.get("content")
    texts = [
        part["text"]
        for part in (content if isinstance(content, list) else ())
        if isinstance(part, dict) and part.get("type") == "text" and part.get("text")
    ]
    if texts:
        lines.append("Content: " + "\n".join(texts))
    if lines:
        parts.append({"type": "text", "text": "\n".join(lines)})


_ADDERS: dict[str, Callable[[Json, list[Json]], None]] = {
    "text": _add_text,
    "image": _add_image,
    "search_result": _add_search_result,
}


def _add_reference(block: Json, parts: list[Json]) -> None:
    if name := block.get("tool_name") or block.get("name"):
        parts.append({"type": "tool_reference", "name": name})


def _result_parts(block: Json) -> list[Json]:
    parts: list[Json] = []
    for inner in blocks_of(block.get("content")):
        adder = _add_reference if inner["type"] == "tool_reference" else _ADDERS.get(inner["type"])
        if adder is not None and not (inner["type"] == "text" and not inner["text"]):
            adder(inner, parts)
    return parts


def _results(block: Json) -> list[Any]:
    """The answer of a tool, as the contents of ``tool`` messages. References to tools have messages of their
    own, as templates look for them at the beginning of one."""
    content = block.get("content")
    if not isinstance(content, list):
        return [content or ""]
    groups: list[list[Json]] = []
    for part in _result_parts(block):
        if not groups or (groups[-1][0]["type"] == "tool_reference") != (part["type"] == "tool_reference"):
            groups.append([])
        groups[-1].append(part)
    return [_plain(group) for group in groups] or [""]


def _result_text(block: Json) -> str:
    content = block.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in _result_parts(block) if part["type"] == "text")
    return content or ""


# -- answers -----------------------------------------------------------------------------------------


class MessageAnswer:
    """Translates one answer; for a stream, piece by piece.

    Args:
        model: the name that the client used.
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
        answer = parsed(body)
        if status != 200 or not isinstance(answer, dict):
            return orjson.dumps(_error(status, answer))
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
            if data == DONE:
                self._finish(out)
            elif isinstance(reported := parsed(data), dict):
                self._take(reported, out)
        return bytes(out)

    # -- events -----------------------------------------------------------------------------------

    def _take(self, reported: Json, out: bytearray) -> None:
        if reported.get("error"):
            out += _event(_error(500, reported))
            return
        if isinstance(reported.get("usage"), dict):
            self._usage = reported["usage"]
        for choice in reported.get("choices") or ():
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


def _error(status: int, answer: Any) -> Json:
    """A worker's error, without the cause in its server."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    message = error.get("message") if isinstance(error, dict) else error
    if status >= 500 or not isinstance(message, str):
        message = "Internal server error" if status >= 500 else "Request failed"
    return error_of(status, message)


def _usage(usage: Any, *, output: bool) -> Json:
    """Anthropic's usage: cached tokens are not part of ``input_tokens``."""
    usage = usage if isinstance(usage, dict) else {}
    prompt = usage.get("prompt_tokens") or 0
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reported: Json = {"input_tokens": max(prompt - cached, 0)}
    if cached:
        reported["cache_read_input_tokens"] = cached
    if output:
        reported["output_tokens"] = usage.get("completion_tokens") or 0
    return reported


def _arguments(text: Any) -> Json:
    value = parsed(text) if isinstance(text, str | bytes) else None
    return value if isinstance(value, dict) else {}


def _event(reported: Json) -> bytes:
    return event(reported, str(reported["type"]))
