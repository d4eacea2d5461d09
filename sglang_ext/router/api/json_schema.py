"""Pieces of JSON schemas, from which HTTP APIs describe their bodies for ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sglang_ext.router.api.validation import MAX_NAME_CHARACTERS, RANGES, Json

TEXT: Final[Json] = {"type": "string"}
FULL_TEXT: Final[Json] = TEXT | {"minLength": 1}
BOOL: Final[Json] = {"type": ["boolean", "null"]}
NUMBER: Final[Json] = {"type": ["number", "null"]}
TOKEN: Final[Json] = {"type": "integer", "minimum": 0}
TOKENS: Final[Json] = {"type": "array", "items": TOKEN, "minItems": 1}
OBJECT: Final[Json] = {"type": "object"}
MAYBE_TEXT: Final[Json] = {"type": ["string", "null"]}
NAME: Final[Json] = MAYBE_TEXT | {"maxLength": MAX_NAME_CHARACTERS}
MAYBE_OBJECT: Final[Json] = {"type": ["object", "null"]}


def whole(least: int | None = None, most: int | None = None, *, null: bool = True) -> Json:
    """An integer."""
    schema: Json = {"type": ["integer", "null"] if null else "integer"}
    if least is not None:
        schema["minimum"] = least
    if most is not None:
        schema["maximum"] = most
    return schema


def strings(*, null: bool = True) -> Json:
    """A string, or an array of them."""
    return {"type": ["string", "array", *(["null"] if null else [])], "items": TEXT}


def several(items: Json, *, null: bool = False) -> Json:
    """An array: of one at least, or, where it may be null, of any length."""
    return {"type": ["array", "null"], "items": items} if null else {
        "type": "array", "minItems": 1, "items": items,
    }  # fmt: skip


def record(properties: Json, *required: str) -> Json:
    """An object."""
    return {"type": "object", "properties": properties, "required": list(required)}


_KINDS: dict[str, Json] = {
    "number": NUMBER, "boolean": BOOL, "string": MAYBE_TEXT, "strings": strings(), "object": MAYBE_OBJECT,
    "name": NAME,
    "patterns": strings(), "stops": several({"type": "integer"}, null=True),
}  # fmt: skip


def fields(kinds: Mapping[str, str]) -> Json:
    """Properties of the kinds that ``validation.check_fields`` checks."""
    return {name: _KINDS[kind] if kind in _KINDS else whole(*RANGES[kind]) for name, kind in kinds.items()}


_NAME: Json = {
    "type": ["string", "array", "null"],
    "items": TEXT | {"maxLength": MAX_NAME_CHARACTERS},
    "maxLength": MAX_NAME_CHARACTERS,
}
ROUTING: Final[Json] = {
    "rid": _NAME | {"description": "What the request is called; /abort_request takes it."},
    "extra_key": _NAME | {"description": "Prompts with different keys share no KV."},
    "cache_salt": _NAME
    | {"description": "As extra_key. Set by the router for tenants, who must not send it."},
    "priority": whole() | {"description": "Larger goes first. At most the API key's own."},
}
"""Fields for the identity and the priority of a request."""
DOCUMENTS: Final[Json] = {
    "document_ids": {"type": ["array", "null"], "items": TEXT, "description": "/v1/documents"}
}
"""The field that names documents."""
_PART: Json = record({"type": TEXT, "text": TEXT}, "type")
CONTENT: Final[Json] = {"type": ["string", "array", "null"], "items": _PART}
"""Of a message: a text, or parts."""
