"""Anthropic's ``/v1/messages``: what a body must look like, and the conversation that SGLang makes of it.

SGLang 0.5.21 turns the body into one of ``/v1/chat/completions`` (``entrypoints/anthropic/serving.py``) and
serves that. The same is done here, so that a conversation has the same tokens whichever way it comes, and
prompts are routed as well as chat's. What depends on the server's reasoning parser is not repeated: such
requests are matched by their text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from sglang_ext.router.api.validation import (
    Chat,
    Endpoint,
    Job,
    Json,
    Limits,
    PromptInput,
    check_strings,
    take_bool,
    take_int,
    take_number,
    take_objects,
    take_string,
    wrong,
)
from sglang_ext.router.http.types import RequestRefused

ROLES = ("user", "assistant", "system")
BLOCKS = frozenset({
    "text", "image", "tool_use", "tool_result", "tool_reference", "search_result", "thinking",
    "redacted_thinking",
})  # fmt: skip
_SERVER_TOOLS = ("web_search_", "computer_", "bash_", "text_editor_")
_CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "tool"}

_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


def speaks_anthropic(path: str) -> bool:
    """Whether errors at this path have Anthropic's form."""
    return path.startswith(Endpoint.MESSAGES.value)


def error_body(refused: RequestRefused) -> Json:
    """An error of ours in Anthropic's form."""
    kind = _ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": refused.message}}


def parse_messages(payload: Json, limits: Limits) -> Job:
    """Check the body of ``/v1/messages``.

    Raises:
        RequestRefused: it must not reach a worker, or the worker would refuse it.
    """
    check_conversation(payload)
    stream = take_bool(payload, "stream")
    max_new = take_int(payload, "max_tokens", least=1)
    if max_new is None:
        raise RequestRefused("max_tokens is missing", param="max_tokens", code="missing")
    for name in ("temperature", "top_p"):
        take_number(payload, name)
    take_int(payload, "top_k")
    check_strings(payload, "stop_sequences")
    if type(payload.get("stop_sequences")) is str:
        raise wrong("stop_sequences", "an array of strings", payload["stop_sequences"])
    adapter = payload["model"].partition(":")[2].strip() or None
    chat = to_chat(payload)
    prompt = PromptInput(
        chat=Chat(chat),
        opaque=depends_on_parser(payload),
        namespace=(adapter, None, None),
        max_new_tokens=max_new,
    )
    return Job(Endpoint.MESSAGES, stream, (prompt,))


def check_conversation(payload: Json) -> None:
    """Check what ``/v1/messages`` and its ``count_tokens`` have in common.

    Raises:
        RequestRefused: names the field.
    """
    if not take_string(payload, "model"):
        raise RequestRefused("model is missing", param="model", code="missing")
    for index, message in enumerate(take_objects(payload, "messages", "an array of messages")):
        field = f"messages[{index}]"
        if message.get("role") not in ROLES:
            raise RequestRefused(
                f"{field}.role must be one of {', '.join(ROLES)}", param=f"{field}.role", code="invalid_value"
            )
        _check_content(message.get("content"), f"{field}.content")
    if payload.get("system") is not None:
        _check_content(payload["system"], "system")
    _check_tools(payload)


def _check_content(content: Any, field: str) -> None:
    if type(content) is str:
        return
    if type(content) is not list:
        raise wrong(field, "a string or an array of blocks", content)
    for index, block in enumerate(content):
        where = f"{field}[{index}]"
        if type(block) is not dict:
            raise wrong(where, "an object", block)
        kind = block.get("type")
        if type(kind) is not str or kind not in BLOCKS:
            raise RequestRefused(
                f"{where}.type must be one of {', '.join(sorted(BLOCKS))}",
                param=f"{where}.type",
                code="invalid_value",
            )
        if kind == "redacted_thinking":
            raise RequestRefused(
                f"{where}: redacted_thinking cannot be read by this server, as it was not written by it",
                param=where,
                code="invalid_value",
            )
        for name in _REQUIRED.get(kind, ()):
            if type(block.get(name)) is not str:
                raise wrong(f"{where}.{name}", "a string", block.get(name))
        if kind == "tool_use" and type(block.get("input", {})) is not dict:
            raise wrong(f"{where}.input", "an object", block["input"])
        if kind == "tool_result" and block.get("content") is not None:
            _check_content(block["content"], f"{where}.content")


_REQUIRED = {"text": ("text",), "tool_use": ("id", "name"), "thinking": ("thinking",)}


def _check_tools(payload: Json) -> None:
    tools = payload.get("tools")
    if tools is not None and type(tools) is not list:
        raise wrong("tools", "an array of tools", tools)
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        if type(tool) is not dict:
            raise wrong(where, "an object", tool)
        if type(tool.get("name")) is not str:
            raise wrong(f"{where}.name", "a string", tool.get("name"))
        if not _is_server_tool(tool) and type(tool.get("input_schema")) is not dict:
            raise wrong(f"{where}.input_schema", "an object", tool.get("input_schema"))
    choice = payload.get("tool_choice")
    kind = choice.get("type") if type(choice) is dict else None
    if choice is not None and (type(kind) is not str or kind not in _CHOICES):
        raise wrong("tool_choice", "an object whose type is auto, any, tool or none", choice)


def _is_server_tool(tool: Json) -> bool:
    kind = tool.get("type")
    return isinstance(kind, str) and kind.startswith(_SERVER_TOOLS)


def depends_on_parser(payload: Json) -> bool:
    """Whether the tokens depend on the server's reasoning parser, or on what else only it knows."""
    if payload.get("thinking") is not None or payload.get("output_config") is not None:
        return True
    return any(
        message["role"] == "system" or any(_is_opaque(block) for block in _blocks(message["content"]))
        for message in payload["messages"]
    )


def _is_opaque(block: Json) -> bool:
    if block["type"] == "tool_result":
        return any(_is_opaque(inner) for inner in _blocks(block.get("content")))
    return block["type"] in ("image", "thinking", "redacted_thinking", "tool_reference")


def _blocks(content: Any) -> list[Json]:
    return content if isinstance(content, list) else []


# -- the conversation that SGLang makes of it -----------------------------------------------------


def to_chat(payload: Json) -> Json:
    """The body of ``/v1/chat/completions`` that stands for one of ``/v1/messages``.

    Args:
        payload: has passed ``check_conversation``; it is not changed.
    """
    messages: list[Json] = []
    system = payload.get("system")
    parts = [system] if isinstance(system, str) and system.strip() else []
    parts += [block["text"] for block in _blocks(system) if block["type"] == "text" and block["text"]]
    if parts:
        messages.append({"role": "system", "content": "\n".join(parts)})
    for message in payload["messages"]:
        _add_message(message, messages)
    chat: Json = {"model": payload["model"], "messages": messages}
    for name, theirs in _PASSED.items():
        if payload.get(name) is not None:
            chat[theirs] = payload[name]
    tools = [_tool(tool) for tool in payload.get("tools") or () if not _is_server_tool(tool)]
    if tools:
        chat["tools"] = tools
        chat["tool_choice"] = "auto"
    _add_reasoning(payload, chat)
    choice = payload.get("tool_choice")
    if choice is not None:
        kind = _CHOICES[choice["type"]]
        chat["tool_choice"] = (
            {"type": "function", "function": {"name": choice.get("name")}} if kind == "tool" else kind
        )
    return chat


_PASSED = {
    "max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "stop_sequences": "stop", "stream": "stream",
}  # fmt: skip


def _add_reasoning(payload: Json, chat: Json) -> None:
    """Whether to think, and how hard. SGLang knows its model's switch; here the common ones are set."""
    thinking = payload.get("thinking")
    if isinstance(thinking, dict):
        enabled = thinking.get("type") != "disabled"
        chat["chat_template_kwargs"] = {"thinking": enabled, "enable_thinking": enabled}
    output = payload.get("output_config")
    effort = output.get("effort") if isinstance(output, dict) else None
    if effort is not None:
        chat["reasoning_effort"] = "max" if effort == "xhigh" else effort


def _tool(tool: Json) -> Json:
    schema = tool["input_schema"]
    return {
        "type": "function",
        **({} if tool.get("defer_loading") is None else {"defer_loading": tool["defer_loading"]}),
        "function": {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": schema if "type" in schema else {**schema, "type": "object"},
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
            messages.append({"role": "tool", "tool_call_id": name, "content": _result(block)})
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


def _result_parts(block: Json) -> list[Json]:
    parts: list[Json] = []
    for inner in _blocks(block.get("content")):
        adder = _ADDERS.get(inner["type"])
        if adder is not None and not (inner["type"] == "text" and not inner["text"]):
            adder(inner, parts)
    return parts


def _result(block: Json) -> Any:
    """What a tool answered, as the content of a ``tool`` message."""
    content = block.get("content")
    if isinstance(content, list):
        parts = _result_parts(block)
        return _plain(parts) if parts else ""
    return content or ""


def _result_text(block: Json) -> str:
    content = block.get("content")
    if isinstance(content, list):
        return "\n".join(part["text"] for part in _result_parts(block) if part["type"] == "text")
    return content or ""
