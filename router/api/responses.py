"""OpenAI's ``/v1/responses``: what a body must look like, and the conversation that SGLang makes of it.

As with ``anthropic``, the conversation is made as SGLang 0.5.21 makes it
(``entrypoints/openai/serving_responses.py``), so that prompts are routed as well as chat's. A response that
goes on from an earlier one (``previous_response_id``) belongs to the instance that keeps that one.
"""

from __future__ import annotations

from typing import Any

import orjson

from sglang_ext.router.api.validation import (
    Chat,
    Endpoint,
    Job,
    Json,
    Limits,
    PromptInput,
    check_sampling,
    namespaces,
    take_bool,
    take_int,
    take_objects,
    take_string,
    wrong,
)
from sglang_ext.router.http.types import RequestRefused

DEVELOPER_LABEL = "Developer instructions:"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MESSAGE = (None, "message")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")


def parse_responses(payload: Json, limits: Limits) -> Job:
    """Check the body of ``/v1/responses``.

    Raises:
        RequestRefused: it must not reach a worker, or the worker would refuse it.
    """
    check_sampling(payload, limits)
    stream = take_bool(payload, "stream")
    for name in ("store", "parallel_tool_calls"):
        take_bool(payload, name)
    background = take_bool(payload, "background")
    take_int(payload, "max_output_tokens", least=1)
    take_int(payload, "top_logprobs", least=0, most=limits.vocab_size)
    model = take_string(payload, "model")
    take_string(payload, "instructions")
    previous = take_string(payload, "previous_response_id")
    for name in ("reasoning", "text", "metadata", "chat_template_kwargs"):
        if payload.get(name) is not None and type(payload[name]) is not dict:
            raise wrong(name, "an object", payload[name])
    for name in ("extra_key", "cache_salt", "session_id"):
        take_string(payload, name)
    _check_input(payload)
    _check_tools(payload)
    adapter = model.partition(":")[2].strip() or None if model else None
    (space,) = namespaces(payload, 1, adapter)
    prompt = PromptInput(
        chat=Chat(to_chat(payload)),
        opaque=previous is not None or not _renders_here(payload),
        namespace=space,
    )
    return Job(
        Endpoint.RESPONSES, stream, (prompt,), background=background and not stream, pinned_to=previous
    )


def _check_input(payload: Json) -> None:
    if type(payload.get("input")) is str:
        return
    for index, item in enumerate(take_objects(payload, "input", "a string or an array of items")):
        where = f"input[{index}]"
        kind = item.get("type")
        if kind is not None and type(kind) is not str:
            raise wrong(f"{where}.type", "a string", kind)
        if kind in _MESSAGE and (type(item.get("role")) is not str or item["role"] not in ROLES):
            raise RequestRefused(
                f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role", code="invalid_value"
            )
        if kind in _MESSAGE:
            _check_content(item.get("content"), f"{where}.content")


def _check_content(content: Any, field: str) -> None:
    if content is None or type(content) is str:
        return
    if type(content) is not list:
        raise wrong(field, "a string or an array of parts", content)
    for index, part in enumerate(content):
        where = f"{field}[{index}]"
        if type(part) is not dict:
            raise wrong(where, "an object", part)
        if part.get("type") in _TEXTS and type(part.get("text")) is not str:
            raise wrong(f"{where}.text", "a string", part.get("text"))


_TEXTS = ("input_text", "output_text", "text")


def _check_tools(payload: Json) -> None:
    tools = payload.get("tools")
    if tools is not None and type(tools) is not list:
        raise wrong("tools", "an array of tools", tools)
    for index, tool in enumerate(tools or ()):
        if type(tool) is not dict:
            raise wrong(f"tools[{index}]", "an object", tool)
        if tool.get("type") == "function" and type(tool.get("name")) is not str:
            raise wrong(f"tools[{index}].name", "a string", tool.get("name"))


def _renders_here(payload: Json) -> bool:
    """Whether nothing in it is left to the server: encrypted reasoning, custom tools, media."""
    if any(tool.get("type") == "custom" for tool in payload.get("tools") or ()):
        return False
    items = payload["input"] if isinstance(payload["input"], list) else []
    for item in items:
        kind = item.get("type")
        if kind in _CALLS[1:] or kind == "reasoning" or kind not in (*_MESSAGE, *_CALLS, *_OUTPUTS):
            return False
        parts = item.get("content")
        if isinstance(parts, list) and any(part.get("type") not in _TEXTS for part in parts):
            return False
    return True


# -- the conversation that SGLang makes of it -----------------------------------------------------


def to_chat(payload: Json) -> Json:
    """The body of ``/v1/chat/completions`` with the same prompt.

    Args:
        payload: has been checked; it is not changed.
    """
    messages: list[Json] = []
    if payload.get("instructions"):
        messages.append({"role": "system", "content": payload["instructions"]})
    value = payload["input"]
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value
    for item in items:
        message = _message(item)
        if message is not None:
            messages.append(message)
    chat: Json = {"messages": _system_first(_merged(messages))}
    tools = [_tool(tool) for tool in payload.get("tools") or () if tool.get("type") == "function"]
    choice = payload.get("tool_choice")
    if tools:
        chat["tools"] = tools
        chat["tool_choice"] = _tool_choice(choice)
    effort = (payload.get("reasoning") or {}).get("effort")
    if effort is not None:
        chat["reasoning_effort"] = effort
    if payload.get("chat_template_kwargs") is not None:
        chat["chat_template_kwargs"] = payload["chat_template_kwargs"]
    return chat


def _tool(tool: Json) -> Json:
    return {
        "type": "function",
        "function": {
            "name": tool.get("name"),
            "description": tool.get("description"),
            "parameters": tool.get("parameters"),
            "strict": tool.get("strict", False),
        },
    }


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice if isinstance(choice, str) else "auto"
    name = choice.get("name") or (choice.get("function") or {}).get("name")
    if choice.get("type") == "function" and name:
        return {"type": "function", "function": {"name": name}}
    return "auto"


def _message(item: Json) -> Json | None:
    kind = item.get("type")
    if kind == "function_call":
        return _call(item)
    if kind in _OUTPUTS:
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _output(item.get("output"))}
    if kind not in _MESSAGE:
        return None
    message = {
        name: value
        for name, value in item.items()
        if value is not None and name not in ("id", "status", "type")
    }
    if message["role"] == "developer":
        message |= {"role": "system", "content": _labelled(message.get("content"))}
    if isinstance(message.get("content"), list):
        message["content"] = [_part(part) for part in message["content"]]
    return message


def _call(item: Json) -> Json:
    arguments = item.get("arguments")
    if isinstance(arguments, str):
        try:
            valid = isinstance(orjson.loads(arguments), dict)
        except orjson.JSONDecodeError:
            valid = False
        arguments = arguments if valid else "{}"
    else:
        arguments = orjson.dumps(arguments).decode() if isinstance(arguments, dict) else "{}"
    function = {"name": item.get("name"), "arguments": arguments}
    call = {"id": item.get("call_id") or item.get("id"), "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _output(value: Any) -> Any:
    if isinstance(value, list):
        return "".join(str(part.get("text", "")) for part in value if isinstance(part, dict))
    return "" if value is None else value


def _labelled(content: Any) -> Any:
    if isinstance(content, str):
        return f"{DEVELOPER_LABEL}\n{content}"
    if not isinstance(content, list):
        return content
    for index, part in enumerate(content):
        if isinstance(part.get("text"), str):
            labelled = {**part, "text": f"{DEVELOPER_LABEL}\n{part['text']}"}
            return [*content[:index], labelled, *content[index + 1 :]]
    return [{"type": "input_text", "text": DEVELOPER_LABEL}, *content]


def _part(part: Json) -> Json:
    return {"type": "text", "text": part.get("text", "")} if part.get("type") in _TEXTS else part


def _merged(messages: list[Json]) -> list[Json]:
    """Runs of assistant messages as one: a turn is a message and its calls."""
    merged: list[Json] = []
    for message in messages:
        last = merged[-1] if merged else {}
        if (
            message["role"] != "assistant"
            or last.get("role") != "assistant"
            or last.get("phase") != message.get("phase")
        ):
            merged.append(message)
            continue
        last = merged[-1] = dict(last)
        content = message.get("content")
        if content not in (None, ""):
            last["content"] = _joined(last.get("content"), content)
        if message.get("tool_calls"):
            last["tool_calls"] = [*(last.get("tool_calls") or ()), *message["tool_calls"]]
    return merged


def _joined(before: Any, after: Any) -> Any:
    if before in (None, ""):
        return after
    if isinstance(before, str) and isinstance(after, str):
        return f"{before}\n\n{after}"
    return [*_as_parts(before), *_as_parts(after)]


def _as_parts(content: Any) -> list[Json]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def _system_first(messages: list[Json]) -> list[Json]:
    """All system messages as one, in front."""
    chunks: list[str] = []
    others: list[Json] = []
    for message in messages:
        if message["role"] != "system":
            others.append(message)
            continue
        content = message.get("content")
        if isinstance(content, str):
            chunks.append(content)
        elif isinstance(content, list):
            chunks += [part["text"] for part in content if isinstance(part.get("text"), str)]
    return [{"role": "system", "content": "\n\n".join(chunks)}, *others] if chunks else others
