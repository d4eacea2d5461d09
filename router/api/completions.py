"""OpenAI's ``/v1/completions``."""

from __future__ import annotations

from typing import Any

from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.dialect import fields
from sglang_ext.router.api.openai import OpenAiDialect
from sglang_ext.router.api.validation import (
    SAMPLING,
    Job,
    Json,
    Limits,
    PromptInput,
    check_ids,
    kinds,
    namespaces,
    wrong,
)
from sglang_ext.router.http.types import RequestRefused

DEFAULT_MAX_TOKENS = 16
"""``max_tokens`` when it is absent."""


class Completions(OpenAiDialect):
    """``/v1/completions``: prompts as texts or token ids, one or many."""

    path = "/v1/completions"
    summary = "OpenAI completions"
    prompt_field = "prompt"
    own_fields = fields("prompt suffix echo best_of json_schema")
    hint_fields = ("prompt",)
    answer_object = "text_completion"
    id_prefix = "cmpl"
    kinds = SAMPLING | kinds(
        string="model", positive="max_tokens", boolean="stream echo", top="logprobs", object="stream_options"
    )

    def parse(self, payload: Json, limits: Limits) -> Job:
        adapter = self.checked(payload, limits)
        max_new = payload.get("max_tokens") or DEFAULT_MAX_TOKENS
        prompts, is_batch = _prompts(payload.get("prompt"), limits)
        spaces = namespaces(payload, len(prompts), adapter)
        return Job(
            bool(payload.get("stream")),
            tuple(
                PromptInput(ids=p.ids, text=p.text, namespace=space, max_new_tokens=max_new)
                for p, space in zip(prompts, spaces, strict=True)
            ),
            payload.get("n") or 1,
            batch=is_batch,
            echoes=bool(payload.get("echo")),
        )

    def empty_choice(self) -> Json:
        return {"text": ""}

    @property
    def schema(self) -> Json:
        prompt: Json = {
            "anyOf": [
                schemas.FULL_TEXT,
                schemas.several(schemas.FULL_TEXT),
                schemas.TOKENS,
                schemas.several(schemas.TOKENS),
            ]
        }
        return schemas.record({**schemas.fields(self.kinds), **schemas.ROUTING, "prompt": prompt}, "prompt")


COMPLETIONS = Completions()


def _prompts(value: Any, limits: Limits) -> tuple[list[PromptInput], bool]:
    """The prompts, and whether they are a batch."""
    if type(value) is str:
        if not value:
            raise RequestRefused("prompt is empty", param="prompt", code="empty_prompt")
        return [PromptInput(text=value)], False
    if type(value) is not list:
        raise wrong("prompt", "a string, or an array of strings, of token ids, or of arrays of them", value)
    if not value:
        raise RequestRefused("prompt is empty", param="prompt", code="empty_prompt")
    if type(value[0]) is int:
        return [PromptInput(ids=check_ids(value, "prompt", limits.vocab_size))], False
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
    return prompts, True
