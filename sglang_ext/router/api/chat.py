"""OpenAI's ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.dialect import fields
from sglang_ext.router.api.job import Chat, Job, PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.openai import OpenAiDialect
from sglang_ext.router.api.prompts import namespaces
from sglang_ext.router.api.sse import event
from sglang_ext.router.api.validation import SAMPLING, Json, check_ids, kinds, take_objects, take_parts, wrong
from sglang_ext.router.http.types import RequestRefused

ROLES = ("system", "user", "assistant", "tool", "function", "developer", "latest_reminder")


class _Delta(msgspec.Struct):
    content: str | None = None
    tool_calls: list[Any] | None = None
    reasoning_content: str | None = None


class _StreamedChoice(msgspec.Struct):
    delta: _Delta
    index: int = 0


class _Event(msgspec.Struct):
    choices: list[_StreamedChoice]


_EVENTS = msgspec.json.Decoder(list[_Event])


class ChatCompletions(OpenAiDialect):
    """``/v1/chat/completions``: a conversation."""

    path = "/v1/chat/completions"
    summary = "OpenAI chat completions"
    prompt_field = "messages"
    own_fields = fields(
        """continue_final_message task max_completion_tokens reasoning_effort stream_reasoning
        separate_reasoning return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext"""
    )
    parts_in = messages_in = ("messages",)
    known_by = (fields("messages"),)
    hint_fields: ClassVar[tuple[str, ...]] = ("messages",)
    document_fields: ClassVar[Mapping[str, str]] = {"messages": "messages", "input_ids": "input_ids"}
    asks_ids, takes_ids = "return_output_ids_in_sglext", "input_ids"
    answer_object = "chat.completion"
    id_prefix = "chatcmpl"
    kinds = SAMPLING | kinds(
        string="model",
        count="max_tokens max_completion_tokens",
        boolean="stream logprobs",
        top="top_logprobs",
        object="stream_options chat_template_kwargs response_format",
    )

    def parse(self, payload: Json, limits: Limits) -> Job:
        adapter = self.checked(payload, limits)
        for index, message in enumerate(take_objects(payload, "messages", "an array of messages")):
            _check_message(message, f"messages[{index}]")
        choice = payload.get("tool_choice")
        if isinstance(choice, dict) and not isinstance(choice.get("function"), dict):
            raise wrong(
                "tool_choice.function", "an object with the name of a function", choice.get("function")
            )
        # SGLang takes 0 as absent.
        max_new = payload.get("max_completion_tokens") or payload.get("max_tokens") or None
        (space,) = namespaces(payload, 1, adapter)
        if payload.get("input_ids") is not None:
            ids = check_ids(payload["input_ids"], "input_ids", limits.vocab_size)
            if not ids:
                raise RequestRefused("input_ids is empty", param="input_ids", code="empty_prompt")
            prompt = PromptInput(ids=ids, namespace=space, max_new_tokens=max_new)
        else:
            prompt = PromptInput(chat=Chat(payload), namespace=space, max_new_tokens=max_new)
        return Job(bool(payload.get("stream")), (prompt,), payload.get("n") or 1)

    def streamed_texts(self, events: Sequence[bytes]) -> Mapping[int, str]:
        # All events are read at once.
        texts: dict[int, list[str]] = {}
        mixed: set[int] = set()
        try:
            read = _EVENTS.decode(b"[" + b",".join(events) + b"]")
        except msgspec.MsgspecError:
            return super().streamed_texts(events)
        for one in read:
            for choice in one.choices:
                delta = choice.delta
                if delta.tool_calls or delta.reasoning_content:
                    mixed.add(choice.index)
                if delta.content:
                    texts.setdefault(choice.index, []).append(delta.content)
        return {index: "".join(pieces) for index, pieces in texts.items() if index not in mixed}

    def empty_choice(self) -> Json:
        return {"message": {"role": "assistant", "content": ""}}

    def empty_events(self, answer: Json) -> Iterator[bytes]:
        (choice,) = answer["choices"]
        delta = {"index": 0, "delta": choice["message"], "finish_reason": choice["finish_reason"]}
        yield event({**answer, "object": "chat.completion.chunk", "choices": [delta]})
        yield event(None)

    @property
    def schema(self) -> Json:
        message = schemas.record(
            {"role": {"enum": list(ROLES)}, "content": schemas.CONTENT}, "role", "content"
        )
        function = schemas.record({"name": schemas.TEXT}, "name")
        tool = schemas.record({"type": {"const": "function"}, "function": function}, "function")
        return schemas.record(
            {
                **schemas.fields(self.kinds),
                **schemas.ROUTING,
                **schemas.DOCUMENTS,
                "messages": schemas.several(message),
                "tools": schemas.several(tool, null=True),
            },
            "messages",
        )


CHAT = ChatCompletions()


class Invocations(ChatCompletions):
    """``/invocations``: the same, where SageMaker sends it."""

    path = "/invocations"
    summary = "SageMaker's name of OpenAI chat completions"
    hint_fields = ()


INVOCATIONS = Invocations()


def _check_message(message: Json, field: str) -> None:
    role = message.get("role")
    if type(role) is not str:
        raise wrong(f"{field}.role", "a string", role)
    # SGLang is lenient about the case of every role but "user".
    if role != "user" and (role.lower() not in ROLES or role.lower() == "user"):
        raise RequestRefused(
            f"{field}.role is {role[:40]!r}; it must be one of {', '.join(ROLES)}",
            param=f"{field}.role",
            code="invalid_value",
        )
    content = message.get("content")
    if content is None and role != "user":
        return
    for where, part in take_parts(content, f"{field}.content"):
        if type(part.get("type")) is not str:
            raise wrong(f"{where}.type", "a string", part.get("type"))
        if part["type"] == "text" and type(part.get("text")) is not str:
            raise wrong(f"{where}.text", "a string", part.get("text"))
