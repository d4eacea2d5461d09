"""Every field of every API of a server, with numbers at the borders of its types and with each JSON type.

The fields come from the server's own description (``/openapi.json``) and from the source of SGLang's sampling
parameters, so that a field of a newer SGLang is tried without being listed here. Listed are the routes that
only an operator may use, because they change the server on purpose.
"""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext.patches.contract.places import folder_of

Json = dict[str, Any]

OPERATORS = (
    *("weight", "lora", "memory", "profile", "expert_distribution", "hicache", "corpus", "elastic", "trace"),
    *("internal_state", "remote_instance", "slow_down", "pd_role", "configure", "freeze", "flush", "pause"),
    *("continue_generation", "session", "scale", "dumper", "audio"),
)
"""Parts of the paths of routes that are no client's."""
TOKENS = 2
"""Generated for each request."""
SECONDS = 120.0
"""Longest time for one answer, on a busy machine."""
EDGES = (
    *(-(2**63) - 1, -(2**63), -(2**31) - 1, -(2**31), -1, 0, 1),
    *(2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64),
    *(-1e300, -0.0, 5e-324, 0.5, 1e39, 1e300),
)
RAW = ("NaN", "Infinity", "1e400")
"""Numbers that are no JSON, or no float."""
OTHERS = (
    *(None, True, "", "8", "((", 1.5, 7, [], [1], ["x"], [[-1]], [None], {}),
    *({"a": 1}, {"1": 2}, [{"a": 1}]),
)
"""A value of each JSON type, some of which a field may take."""
PROMPT = "The librarian reads a book."
SAMPLING: Json = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
OPENAI: Json = {"temperature": 0, "max_tokens": TOKENS}
BASES: Mapping[str, Json] = {
    "/generate": {"text": PROMPT, "sampling_params": SAMPLING},
    "/encode": {"text": PROMPT},
    "/classify": {"text": PROMPT},
    "/v1/completions": {"prompt": PROMPT, **OPENAI},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}], **OPENAI},
    "/invocations": {"messages": [{"role": "user", "content": PROMPT}], **OPENAI},
    "/v1/responses": {"input": PROMPT, "temperature": 0, "max_output_tokens": TOKENS},
    "/v1/messages": {"model": "m", "messages": [{"role": "user", "content": PROMPT}], **OPENAI},
    "/v1/tokenize": {"prompt": PROMPT},
    "/vertex_generate": {"instances": [{"text": PROMPT}], "parameters": {"sampling_params": SAMPLING}},
    "/api/generate": {"model": "m", "prompt": PROMPT, "options": {"num_predict": TOKENS}, "stream": False},
    "/api/chat": {
        "model": "m",
        "messages": [{"role": "user", "content": PROMPT}],
        "options": {"num_predict": TOKENS},
        "stream": False,
    },
    "/v1/score": {"query": PROMPT, "items": ["a"], "label_token_ids": [5]},
}
"""A right body where the least that the schema asks for would not be one, or would generate for long."""


@dataclass(frozen=True)
class Case:
    """One request: a right body in which one field has another value."""

    path: str
    field: str
    body: bytes

    def __str__(self) -> str:
        return f"{self.path} {self.field}: {self.body[:300].decode()}"


def cases(description: Json) -> list[Case]:
    """All requests for a server with this ``/openapi.json``."""
    schemas = description["components"]["schemas"]
    found: dict[Case, None] = {}
    for path, methods in description["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema")
        if schema is None or any(part in path for part in OPERATORS):
            continue
        schema = _resolved(schema, schemas)
        base = BASES.get(path) or _least(schema, schemas)
        for field, places in _fields(schema, schemas):
            found.update(dict.fromkeys(_with(path, base, field, places)))
        if "sampling_params" in schema["properties"]:
            for name in sampling_fields():
                found.update(dict.fromkeys(_with(path, base, ("sampling_params", name), True)))
    return list(found)


def sampling_fields() -> list[str]:
    """The names of SGLang's sampling parameters, read from its source."""
    tree = ast.parse((folder_of("sglang") / "srt/sampling/sampling_params.py").read_text("utf-8"))
    (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams")
    return [
        node.target.id
        for node in kind.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]


def _resolved(schema: Json, schemas: Json) -> Json:
    while "$ref" in schema:
        schema = schemas[schema["$ref"].rpartition("/")[2]]
    return schema


def _forms(schema: Json, schemas: Json) -> list[Json]:
    """The alternatives of a schema."""
    schema = _resolved(schema, schemas)
    parts = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    return [form for part in parts for form in _forms(part, schemas)] or [schema]


def _fields(schema: Json, schemas: Json) -> Iterator[tuple[tuple[str, ...], bool]]:
    """(names, whether a number may stand there) of each field, and of those of objects in it."""
    for name, value in schema["properties"].items():
        forms = _forms(value, schemas)
        kinds = {form.get("type") for form in [*forms, *(_item(form, schemas) for form in forms)]}
        # A field without a type takes anything.
        yield (name,), bool(kinds & {"integer", "number", None})
        for form in forms:
            for inner in form.get("properties", {}):
                yield (name, inner), True


def _item(form: Json, schemas: Json) -> Json:
    return _resolved(form["items"], schemas) if isinstance(form.get("items"), dict) else {"type": "none"}


def _least(schema: Json, schemas: Json) -> Any:
    """The least value of a schema: an object has only its required properties."""
    form = _forms(schema, schemas)[0]
    if "const" in form or "enum" in form:
        return form.get("const", form.get("enum", [None])[0])
    kind = form.get("type")
    if kind == "object":
        inner = form.get("properties", {})
        return {name: _least(inner.get(name, {}), schemas) for name in form.get("required", ())}
    if kind == "array":
        return [_least(form.get("items", {}), schemas)]
    return {"integer": 1, "number": 1.0, "boolean": False, "null": None}.get(kind, PROMPT)


def _with(path: str, base: Json, names: tuple[str, ...], numbers: bool) -> Iterator[Case]:
    mark = "@@"
    values = [json.dumps(value) for value in OTHERS]
    if numbers:
        values += [json.dumps(edge) for edge in EDGES] + [json.dumps([edge]) for edge in EDGES] + list(RAW)
        values += [json.dumps({"5": edge}) for edge in EDGES if names[-1] == "logit_bias"]
    body: Json = json.loads(json.dumps(base))
    at = body
    for name in names[:-1]:
        inner = at.get(name)
        at[name] = inner if isinstance(inner, dict) else {}
        at = at[name]
    at[names[-1]] = mark
    text = json.dumps(body)
    for value in values:
        yield Case(path, ".".join(names), text.replace(f'"{mark}"', value).encode())


def sample(found: list[Case], count: int, seed: int) -> list[Case]:
    """Some of them, each field once before any twice."""
    rng = random.Random(seed)
    shuffled = rng.sample(found, len(found))
    seen: set[tuple[str, str]] = set()
    first, rest = [], []
    for case in shuffled:
        key = case.path, case.field
        (rest if key in seen else first).append(case)
        seen.add(key)
    return [*first, *rest][:count]
