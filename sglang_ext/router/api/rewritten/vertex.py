"""Vertex AI's ``/vertex_generate``: a batch of prompts, with one set of parameters of ``/generate``."""

from __future__ import annotations

from typing import Any, Final

from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.dialect import Translation, fields
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.rewritten import RewrittenDialect
from sglang_ext.router.api.validation import Json, check_object, wrong
from sglang_ext.router.http.types import JSON_TYPE, RequestRefused

_PROMPTS: Final = ("text", "input_ids", "input_embeds")
"""Where instances have their prompts: the first of these that the first instance has counts for all."""


class Predictions:
    """Puts the answers of a batch under ``predictions``; streams pass as they are. A ``Translation``."""

    def whole(self, status: int, body: bytes) -> bytes:
        """An answer in one piece."""
        return b'{"predictions":' + body + b"}" if status == 200 else body

    def feed(self, chunk: bytes) -> bytes:
        """The next piece of a stream."""
        return chunk


class VertexGenerate(RewrittenDialect):
    """``/vertex_generate``, as ``/generate``."""

    path = "/vertex_generate"
    summary = "Vertex AI's form of SGLang's own generation"
    prompt_field = "instances"
    own_fields = fields("instances parameters")
    admitted_as = GENERATE

    def answer_at_once(self, payload: Json, limits: Limits) -> tuple[str, bytes] | None:
        return (JSON_TYPE, b"[]") if payload.get("instances") == [] else None

    def rewritten(self, payload: Json, limits: Limits) -> Json:
        instances = _instances(payload)
        check_object(payload, "parameters")
        parameters = payload.get("parameters") or {}
        body: Json = {}
        for name in _PROMPTS:
            if instances[0].get(name):
                body[name] = [instance.get(name) for instance in instances]
                break
        images = [one["image_data"] for one in instances if one.get("image_data") is not None]
        if images:
            body["image_data"] = images
        if twice := sorted(body.keys() & parameters.keys()):
            raise RequestRefused(
                f"parameters.{twice[0]}: {twice[0]} is in instances already",
                param=f"parameters.{twice[0]}",
                code="invalid_value",
            )
        return body | parameters

    def answers(self, payload: Json, limits: Limits) -> Translation:
        return Predictions()

    @property
    def schema(self) -> Json:
        instance = schemas.record({"text": schemas.FULL_TEXT, "input_ids": schemas.TOKENS})
        generate = GENERATE.schema["properties"]
        parameters = schemas.record({name: generate[name] for name in ("sampling_params", "stream")})
        parameters["type"] = ["object", "null"]
        return schemas.record(
            {"instances": {"type": "array", "items": instance}, "parameters": parameters}, "instances"
        )


VERTEX = VertexGenerate()


def _instances(payload: Json) -> list[Json]:
    value: Any = payload.get("instances")
    if type(value) is not list or not value:
        raise wrong("instances", "an array of objects", value)
    for index, instance in enumerate(value):
        if type(instance) is not dict:
            raise wrong(f"instances[{index}]", "an object", instance)
    return value
