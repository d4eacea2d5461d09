"""Anthropic's ``/v1/messages``.

SGLang turns a body into one of ``/v1/chat/completions`` and serves that. The same is done here
(``messages_as_chat``), so that a conversation has the same tokens whichever way it comes, and prompts are
routed as well as chat's. Requests that depend on the server's reasoning parser are not translated: they are
matched by their text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.chat import CHAT
from sglang_ext.router.api.dialect import (
    Diagnosis,
    DiagnosisAsked,
    Dialect,
    Part,
    Question,
    Translation,
    fields,
)
from sglang_ext.router.api.job import Chat, Job, PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.messages_as_chat import (
    CHOICES,
    MessageAnswer,
    blocks_of,
    error_of,
    is_server_tool,
    to_chat,
)
from sglang_ext.router.api.prompts import adapter_of
from sglang_ext.router.api.sse import event
from sglang_ext.router.api.usage import Usage, count
from sglang_ext.router.api.validation import (
    Json,
    check_fields,
    kinds,
    take_objects,
    take_parts,
    take_string,
    wrong,
)
from sglang_ext.router.http.types import RequestRefused

ROLES = ("user", "assistant", "system")
BLOCKS = frozenset({
    "text", "image", "tool_use", "tool_result", "tool_reference", "search_result", "thinking",
    "redacted_thinking",
})  # fmt: skip


_CHANGED = {
    Part.MODEL: "model_changed",
    Part.SYSTEM: "system_changed",
    Part.TOOLS: "tools_changed",
    Part.MESSAGES: "messages_changed",
}


_BODY = kinds(
    positive="max_tokens",
    number="temperature top_p",
    integer="top_k",
    boolean="stream",
    strings="stop_sequences",
)


class Messages(Dialect):
    """``/v1/messages``: a conversation, sent to workers as a chat where it cannot say all."""

    path = "/v1/messages"
    summary = "Anthropic messages"
    prompt_field = "messages"
    own_fields = fields("system stop_sequences output_config betas")
    parts_in = ("messages", "system")
    instructions_in = ("system",)
    messages_in = ("messages",)
    known_by = (fields("messages system"),)
    via = CHAT
    marks_beginnings = b"cache_control"

    def parse(self, payload: Json, limits: Limits) -> Job:
        check_conversation(payload)
        check_fields(payload, _BODY, limits)
        if payload.get("max_tokens") is None:
            raise RequestRefused("max_tokens is missing", param="max_tokens", code="missing")
        if type(payload.get("stop_sequences")) is str:
            raise wrong("stop_sequences", "an array of strings", payload["stop_sequences"])
        prompt = PromptInput(
            chat=_chat_of(payload),
            opaque=any(_is_opaque(b) for said in payload["messages"] for b in blocks_of(said["content"])),
            namespace=(adapter_of(payload["model"]), None, None),
            max_new_tokens=payload["max_tokens"],
        )
        return Job(bool(payload.get("stream")), (prompt,))

    def translate(self, job: Job, fields: Json, in_place: bool) -> tuple[bytes, Translation]:
        chat = job.prompts[0].chat
        assert chat is not None
        body = {**chat.seen(in_place), **fields}
        if job.stream:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return orjson.dumps(body), MessageAnswer(chat.payload["model"])

    def only_warms(self, payload: Json) -> bool:
        return type(payload.get("max_tokens")) is int and payload["max_tokens"] == 0

    def expected(self, payload: Json, limits: Limits) -> Job:
        return super().expected({**payload, "max_tokens": 1}, limits)

    def read(self, usage: Usage, answer: Any, choices: int) -> None:
        if isinstance(answer, dict) and isinstance(answer.get("message"), dict):
            answer = answer["message"]  # of an event
        if not isinstance(answer, dict) or not isinstance(reported := answer.get("usage"), dict):
            return
        cached = count(reported.get("cache_read_input_tokens"))
        if (fresh := count(reported.get("input_tokens"))) is not None:
            usage.prompt_tokens = fresh + (cached or 0)
            usage.cached_tokens = cached
        if (output := count(reported.get("output_tokens"))) is not None:
            usage.completion_tokens = output

    def texts(self, answers: Sequence[Any]) -> Mapping[int, str]:
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

    def empty_answer(self, name: str, model: Any, prompt: int, cached: int) -> Json:
        return {
            "id": f"msg_{name}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": "max_tokens",
            "stop_sequence": None,
            "usage": {
                "input_tokens": prompt - cached,
                "cache_read_input_tokens": cached,
                "cache_creation_input_tokens": 0,
                "output_tokens": 0,
            },
        }

    def empty_events(self, answer: Json) -> Iterator[bytes]:
        delta = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
        for reported in (
            {"type": "message_start", "message": {**answer, "stop_reason": None}},
            {"type": "message_delta", "delta": delta, "usage": answer["usage"]},
            {"type": "message_stop"},
        ):
            yield event(reported, str(reported["type"]))

    def beginnings(self, payload: Json) -> list[Chat]:
        found: list[Json] = []
        system, messages = blocks_of(payload.get("system")), payload["messages"]
        other = {**payload, "messages": _OTHER_MESSAGES}
        if any(map(_is_marked, payload.get("tools") or ())):
            found.append({**other, "system": None})
        found += [
            {**other, "system": system[: at + 1]} for at, block in enumerate(system) if _is_marked(block)
        ]
        for index, message in enumerate(messages):
            content = blocks_of(message["content"])
            ends = len(content) - 1 if index == len(messages) - 1 else len(content)
            for at in range(ends):
                if _is_marked(content[at]):
                    begun = {**message, "content": content[: at + 1]}
                    found.append({**payload, "messages": [*messages[:index], begun]})
        return [_chat_of(begun) for begun in found]

    def asks_diagnosis(self, payload: Json) -> DiagnosisAsked | None:
        asked = payload.get("diagnostics")
        if not isinstance(asked, dict):
            return None
        name = asked.get("previous_message_id")
        if name is not None and type(name) is not str:
            raise wrong("diagnostics.previous_message_id", "a string or null", name)
        return DiagnosisAsked(name)

    def diagnosis(self, found: Diagnosis | None) -> Json:
        if found is None or (found.known and found.part is None):
            return {"diagnostics": None}
        if not found.known:
            reason: Json = {"type": "previous_message_not_found"}
        elif found.part in _CHANGED:
            reason = {"type": _CHANGED[found.part], "cache_missed_input_tokens": found.missed}
        else:
            reason = {"type": "unavailable"}
        return {"diagnostics": {"cache_miss_reason": reason}}

    def error(self, refused: RequestRefused) -> Json:
        return error_of(refused.status, refused.message)

    def broken_off(self, message: str) -> bytes:
        return event(error_of(502, message), "error")

    @property
    def questions(self) -> tuple[Question, ...]:
        schema = schemas.record(_conversation_schema(), "model", "messages")
        path = self.path + "/count_tokens"
        return (Question(path, "Tokens of an Anthropic message", check_conversation, schema),)

    @property
    def schema(self) -> Json:
        return schemas.record(
            {
                **schemas.fields(_BODY),
                **_conversation_schema(),
                "max_tokens": schemas.whole(1, null=False),
                "stop_sequences": schemas.several(schemas.TEXT, null=True),
            },
            "model",
            "messages",
            "max_tokens",
        )


MESSAGES = Messages()


def _conversation_schema() -> Json:
    block = schemas.record({"type": {"enum": sorted(BLOCKS)}, "text": schemas.TEXT}, "type")
    content: Json = {"type": ["string", "array"], "items": block}
    message = schemas.record({"role": {"enum": list(ROLES)}, "content": content}, "role", "content")
    tool = schemas.record({"name": schemas.TEXT, "input_schema": schemas.OBJECT}, "name")
    return {
        "model": schemas.FULL_TEXT,
        "messages": schemas.several(message),
        "system": {"type": ["string", "array", "null"], "items": block},
        "tools": schemas.several(tool, null=True),
    }


_OTHER_MESSAGES = [{"role": "user", "content": "."}]
"""Of a conversation that has no more in common than tools and system prompt."""


def _is_marked(block: Json) -> bool:
    return isinstance(block.get("cache_control"), dict)


# -- checks of bodies ----------------------------------------------------------------------------------


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
    for where, block in take_parts(content, field, "blocks"):
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
    for index, tool in enumerate(take_objects(payload, "tools", "an array of tools", needed=False)):
        where = f"tools[{index}]"
        if type(tool.get("name")) is not str:
            raise wrong(f"{where}.name", "a string", tool.get("name"))
        if not is_server_tool(tool) and type(tool.get("input_schema")) is not dict:
            raise wrong(f"{where}.input_schema", "an object", tool.get("input_schema"))
    choice = payload.get("tool_choice")
    kind = choice.get("type") if type(choice) is dict else None
    if choice is not None and (type(kind) is not str or kind not in CHOICES):
        raise wrong("tool_choice", "an object whose type is auto, any, tool or none", choice)


def _chat_of(payload: Json) -> Chat:
    """The conversation, in both forms if there are system messages in the midst of it."""
    inline = any(message["role"] == "system" for message in payload["messages"])
    return Chat(
        to_chat(payload),
        to_chat(payload, in_front=True) if inline else None,
        long_in_place=True,
        by_parser=True,
    )


def _is_opaque(block: Json) -> bool:
    """Whether the server alone knows the tokens of a block."""
    if block["type"] == "tool_result":
        return any(_is_opaque(inner) for inner in blocks_of(block.get("content")))
    return block["type"] in ("redacted_thinking", "tool_reference")
