"""OpenAI's ``/v1/responses``, and the conversation that SGLang makes of a body.

As with ``messages``, the conversation is made as SGLang makes it
(``entrypoints/openai/serving_responses.py``), so that prompts are routed as well as chat's. A response that
goes on from an earlier one (``previous_response_id``) belongs to the instance that keeps that one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.dialect import Diagnosis, DiagnosisAsked, Dialect, Part, fields
from sglang_ext.router.api.job import Chat, Job, PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.prompts import adapter_of, namespaces
from sglang_ext.router.api.sse import event, parsed
from sglang_ext.router.api.usage import Usage, count
from sglang_ext.router.api.validation import (
    SAMPLING,
    Json,
    check_fields,
    kinds,
    take_objects,
    take_parts,
    wrong,
)
from sglang_ext.router.http.types import RequestRefused

DEVELOPER_LABEL = "Developer instructions:"
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_MESSAGE = (None, "message")
_CALLS = ("function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_TEXTS = ("input_text", "output_text", "text")
_CHANGED = {
    Part.MODEL: "model_changed",
    Part.TOOLS: "tools_changed",
    Part.EFFORT: "reasoning_effort_changed",
}


_BODY = SAMPLING | kinds(
    string="model instructions extra_key cache_salt",
    name="previous_response_id session_id",
    positive="max_output_tokens",
    top="top_logprobs",
    boolean="stream store parallel_tool_calls background",
    object="reasoning text metadata chat_template_kwargs",
)


class Responses(Dialect):
    """``/v1/responses``: a conversation whose answer is kept, so that the next one can name it."""

    path = "/v1/responses"
    summary = "OpenAI responses"
    prompt_field = "input"
    own_fields = fields(
        """instructions max_output_tokens previous_response_id include store service_tier truncation
        max_tool_calls"""
    )
    parts_in = messages_in = ("input",)
    instructions_in = ("instructions",)
    known_by = (fields("input"),)
    takes_default_model = False
    keeps_answers = True

    def parse(self, payload: Json, limits: Limits) -> Job:
        check_fields(payload, _BODY, limits)
        _check_input(payload)
        _check_tools(payload)
        previous = payload.get("previous_response_id")
        stream = bool(payload.get("stream"))
        (space,) = namespaces(payload, 1, adapter_of(payload.get("model")))
        prompt = PromptInput(
            chat=_chat_of(payload),
            opaque=previous is not None or not _renders_here(payload),
            namespace=space,
        )
        background = bool(payload.get("background")) and not stream
        return Job(stream, (prompt,), background=background, pinned_to=previous)

    def read(self, usage: Usage, answer: Any, choices: int) -> None:
        if isinstance(answer, dict) and isinstance(answer.get("response"), dict):
            answer = answer["response"]  # of an event
        if not isinstance(answer, dict):
            return
        if isinstance(name := answer.get("id"), str) and answer.get("object") == "response":
            usage.response_id = name
        if isinstance(reported := answer.get("usage"), dict):
            usage.prompt_tokens = count(reported.get("input_tokens"))
            usage.completion_tokens = count(reported.get("output_tokens"))
            if isinstance(details := reported.get("input_tokens_details"), dict):
                # Without --enable-cache-report this is always 0, which says nothing.
                usage.cached_tokens = count(details.get("cached_tokens")) or None

    def texts(self, answers: Sequence[Any]) -> Mapping[int, str]:
        for answer in reversed(answers):  # of a stream, the last event has the whole
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

    def still_runs(self, answer: Any) -> bool:
        return isinstance(answer, dict) and answer.get("status") in ("queued", "in_progress")

    def empty_answer(self, name: str, model: Any, prompt: int, cached: int) -> Json:
        return {
            "id": f"resp_{name}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "completed",
            "model": model,
            "output": [],
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": cached},
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt,
            },
        }

    def empty_events(self, answer: Json) -> Iterator[bytes]:
        steps = ("response.created", {**answer, "status": "in_progress"}), ("response.completed", answer)
        for number, (name, response) in enumerate(steps):
            yield event({"type": name, "sequence_number": number, "response": response}, name)

    def asks_diagnosis(self, payload: Json) -> DiagnosisAsked | None:
        options = payload.get("prompt_cache_options")
        name = options.get("comparison_response_id") if isinstance(options, dict) else None
        if name is not None and type(name) is not str:
            raise wrong("prompt_cache_options.comparison_response_id", "a string or null", name)
        # Any response may be named by a later request.
        return DiagnosisAsked(name, answered=name is not None, by_message=False)

    def diagnosis(self, found: Diagnosis | None) -> Json:
        if found is None:
            return {}
        result: Json = {"type": "cache_hit"}
        if not found.known:
            result = {"type": "comparison_response_not_found"}
        elif found.part is Part.UNKNOWN:
            result = {"type": "unavailable"}
        elif found.part is not None:
            result = {
                "type": "cache_miss",
                "reason": _CHANGED.get(found.part, "input_changed"),
                "cache_missed_tokens": found.missed,
                "comparison_reusable_tokens": found.reusable,
            }
        return {"prompt_cache_diagnostics": result}

    @property
    def schema(self) -> Json:
        item = schemas.record({"type": schemas.TEXT, "role": schemas.TEXT, "content": schemas.CONTENT})
        return schemas.record(
            {
                **schemas.fields(_BODY),
                "input": {"type": ["string", "array"], "items": item, "minItems": 1},
                "tools": schemas.several(schemas.OBJECT, null=True),
            },
            "input",
        )


RESPONSES = Responses()


# -- checks of bodies ----------------------------------------------------------------------------------


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
        if kind in _MESSAGE and item.get("content") is not None:
            for part_field, part in take_parts(item["content"], f"{where}.content"):
                if part.get("type") in _TEXTS and type(part.get("text")) is not str:
                    raise wrong(f"{part_field}.text", "a string", part.get("text"))


def _check_tools(payload: Json) -> None:
    for index, tool in enumerate(take_objects(payload, "tools", "an array of tools", needed=False)):
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


def _chat_of(payload: Json) -> Chat:
    """The conversation, and as it is with its system messages in front."""
    chat = to_chat(payload)
    return Chat(chat, {**chat, "messages": system_first(chat["messages"])})


def system_first(messages: list[Json]) -> list[Json]:
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


def to_chat(payload: Json) -> Json:
    """The body of ``/v1/chat/completions`` with the same prompt, system messages in their places.

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
    chat: Json = {"messages": _merged(messages)}
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
    function = choice.get("function")
    name = choice.get("name") or (function.get("name") if isinstance(function, dict) else None)
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
        arguments = arguments if isinstance(parsed(arguments), dict) else "{}"
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
