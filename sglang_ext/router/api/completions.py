"""OpenAI's ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.dialect import fields
from sglang_ext.router.api.job import Job, PromptInput
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.openai import OpenAiDialect
from sglang_ext.router.api.prompts import namespaces, take_prompts
from sglang_ext.router.api.validation import SAMPLING, Json, kinds

_PROMPT = "a string, or an array of strings, of token ids, or of arrays of them"
DEFAULT_MAX_TOKENS = 16
"""``max_tokens`` when it is absent."""


class Completions(OpenAiDialect):
    """``/v1/completions``: prompts as texts or token ids, one or many."""

    path = "/v1/completions"
    summary = "OpenAI completions"
    prompt_field = "prompt"
    known_by = (fields("prompt"),)
    own_fields = fields("prompt suffix echo best_of json_schema")
    hint_fields = ("prompt",)
    document_fields: ClassVar[Mapping[str, str]] = {"text": "prompt", "input_ids": "prompt"}
    answer_object = "text_completion"
    id_prefix = "cmpl"
    kinds = SAMPLING | kinds(
        string="model", positive="max_tokens", boolean="stream echo", top="logprobs", object="stream_options"
    )

    def parse(self, payload: Json, limits: Limits) -> Job:
        adapter = self.checked(payload, limits)
        max_new = payload.get("max_tokens") or DEFAULT_MAX_TOKENS
        prompts, is_batch = take_prompts(payload.get("prompt"), "prompt", _PROMPT, limits)
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
        return schemas.record(
            {**schemas.fields(self.kinds), **schemas.ROUTING, **schemas.DOCUMENTS, "prompt": prompt}, "prompt"
        )


COMPLETIONS = Completions()
