"""The OpenAI endpoints: what a body must look like before it is sent to a worker.

Any model name is accepted, as SGLang does; ``base:adapter`` names a LoRA adapter.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.router.api.validation import (
    Chat,
    Endpoint,
    Job,
    Json,
    Limits,
    PromptInput,
    check_ids,
    check_sampling,
    namespaces,
    take_bool,
    take_choices,
    take_int,
    take_objects,
    take_string,
    wrong,
)
from sglang_ext.router.http.types import RequestRefused

ROLES = ("system", "user", "assistant", "tool", "function", "developer", "latest_reminder")
COMPLETION_MAX_TOKENS = 16
"""``max_tokens`` of ``/v1/completions`` when it is absent."""


def parse_chat(payload: Json, limits: Limits) -> Job:
    """Check the body of ``/v1/chat/completions``.

    Raises:
        RequestRefused: it must not reach a worker, or the worker would refuse it.
    """
    adapter = _adapter(payload)
    stream, choices = _common(payload, limits)
    take_bool(payload, "logprobs")
    take_int(payload, "top_logprobs", least=0, most=limits.vocab_size)
    for index, message in enumerate(take_objects(payload, "messages", "an array of messages")):
        _check_message(message, f"messages[{index}]")
    # SGLang takes 0 as absent.
    max_new = take_int(payload, "max_completion_tokens", least=0) or take_int(payload, "max_tokens", least=0)
    (space,) = namespaces(payload, 1, adapter)
    if payload.get("input_ids") is not None:
        ids = check_ids(payload["input_ids"], "input_ids", limits.vocab_size)
        if not ids:
            raise RequestRefused("input_ids is empty", param="input_ids", code="empty_prompt")
        prompt = PromptInput(ids=ids, namespace=space, max_new_tokens=max_new or None)
    else:
        prompt = PromptInput(chat=Chat(payload), namespace=space, max_new_tokens=max_new or None)
    return Job(Endpoint.CHAT, stream, (prompt,), choices)


def parse_completion(payload: Json, limits: Limits) -> Job:
    """Check the body of ``/v1/completions``.

    Raises:
        RequestRefused: it must not reach a worker, or the worker would refuse it.
    """
    adapter = _adapter(payload)
    stream, choices = _common(payload, limits)
    take_int(payload, "logprobs", least=0, most=limits.vocab_size)
    max_new = take_int(payload, "max_tokens", least=1)
    if max_new is None:
        max_new = COMPLETION_MAX_TOKENS
    prompts = _prompts(payload.get("prompt"), limits)
    spaces = namespaces(payload, len(prompts), adapter)
    return Job(
        Endpoint.COMPLETIONS,
        stream,
        tuple(
            PromptInput(ids=p.ids, text=p.text, namespace=space, max_new_tokens=max_new)
            for p, space in zip(prompts, spaces, strict=True)
        ),
        choices,
        echoes=take_bool(payload, "echo"),
    )


def _adapter(payload: Json) -> str | None:
    """The adapter in ``base-model:adapter``."""
    model = take_string(payload, "model")
    if model is None and "model" in payload:
        raise wrong("model", "a string", None)
    return model.partition(":")[2].strip() or None if model else None


def _common(payload: Json, limits: Limits) -> tuple[bool, int]:
    """(whether to stream, answers per prompt)."""
    check_sampling(payload, limits)
    return take_bool(payload, "stream"), take_choices(payload)


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
    if content is None and role == "user":
        raise wrong(f"{field}.content", "a string or an array of parts", None)
    if content is None or type(content) is str:
        return
    if type(content) is not list:
        raise wrong(f"{field}.content", "a string or an array of parts", content)
    for index, part in enumerate(content):
        where = f"{field}.content[{index}]"
        if type(part) is not dict:
            raise wrong(where, "an object", part)
        if type(part.get("type")) is not str:
            raise wrong(f"{where}.type", "a string", part.get("type"))
        if part["type"] == "text" and type(part.get("text")) is not str:
            raise wrong(f"{where}.text", "a string", part.get("text"))


def _prompts(value: Any, limits: Limits) -> list[PromptInput]:
    if type(value) is str:
        if not value:
            raise RequestRefused("prompt is empty", param="prompt", code="empty_prompt")
        return [PromptInput(text=value)]
    if type(value) is not list:
        raise wrong("prompt", "a string, or an array of strings, of token ids, or of arrays of them", value)
    if not value:
        raise RequestRefused("prompt is empty", param="prompt", code="empty_prompt")
    if type(value[0]) is int:
        return [PromptInput(ids=check_ids(value, "prompt", limits.vocab_size))]
    prompts = []
    for index, item in enumerate(value):
        where = f"prompt[{index}]"
        if type(item) is not type(value[0]) or type(item) not in (str, list):
            kinds: dict[type, str] = {str: "a string", list: "an array of token ids"}
            raise wrong(where, kinds.get(type(value[0]), "a string or an array of token ids"), item)
        if not item:
            raise RequestRefused(f"{where} is empty", param=where, code="empty_prompt")
        if type(item) is str:
            prompts.append(PromptInput(text=item))
        else:
            prompts.append(PromptInput(ids=check_ids(item, where, limits.vocab_size)))
    return prompts
