"""The description of the API that ``/openapi.json`` serves (OpenAPI 3.1).

It describes the fields that the router itself checks; other fields are allowed as additional properties.
The tests send requests made from it (schemathesis) at a router, and compare it with the table of endpoints.
"""

from __future__ import annotations

from sglang_ext.router.api import documents
from sglang_ext.router.api import json_schema as schemas
from sglang_ext.router.api.dialect import DIALECTS
from sglang_ext.router.api.job import MAX_SESSION_CHARS
from sglang_ext.router.api.json_schema import TEXT
from sglang_ext.router.api.validation import Json
from sglang_ext.router.endpoints.server_routes import ROWS, How, ServerRoute

VERSION = "1"

_ERROR = schemas.record(
    {
        "error": schemas.record(
            {
                "message": TEXT,
                "type": TEXT,
                "param": schemas.MAYBE_TEXT,
                "code": {"type": ["string", "integer", "null"]},
            },
            "message",
        )
    },
    "error",
)
_HEADERS: Json = {
    name: {"schema": TEXT, "description": text}
    for name, text in {
        "x-request-id": "The request's id: yours, if you sent one; /explain/{request_id} takes it.",
        "x-kv-instance": "The instance that answered.",
        "x-kv-hints": "The answers to actions in kv_hints: accepted, clipped, deferred, completed, rejected.",
        "x-kv-repaired": "Rules that have repaired the prompt, with commas between them.",
        "x-kv-cached-tokens": "Prompt tokens that were cached, where that is known before the answer ends.",
        "x-kv-matched-tokens": "Prompt tokens that the router believed to be cached there.",
        "x-kv-route-reason": "Why this instance was chosen.",
    }.items()
}
_QUERY = schemas.record(
    {
        "model": schemas.MAYBE_TEXT,
        "token_ids": {"type": "array", "items": schemas.TOKEN},
        "block_size": {"type": ["integer", "null"], "minimum": 1, "maximum": 1 << 20},
        "instance_id": schemas.MAYBE_TEXT,
        "tenant_id": schemas.MAYBE_TEXT,
        "lora_name": schemas.MAYBE_TEXT,
        "cache_salt": schemas.MAYBE_TEXT,
    },
    "token_ids",
)
_OPENED = schemas.record(
    {
        "capacity_of_str_len": schemas.whole(0, null=False),
        "session_id": {"type": ["string", "null"], "minLength": 1, "maxLength": MAX_SESSION_CHARS},
        "timeout": schemas.NUMBER,
    },
    "capacity_of_str_len",
)
_CLOSED = schemas.record({"session_id": schemas.FULL_TEXT}, "session_id")
_REFUSALS = {
    "400": "The request is wrong; the error names the field.",
    "401": "A key is missing or wrong.",
    "404": "There is no such thing here.",
    "413": "The body is too large.",
    "429": "The key's limit is reached; see Retry-After.",
    "502": "The instance went away while it worked on the request.",
    "503": "No instance can take the request now; see Retry-After.",
    "504": "The instance did not answer in time.",
}


def _answers(*, streams: str = "", plain: bool = False) -> Json:
    content: Json = {"application/json": {"schema": {}}}
    if streams:
        content[streams] = {"schema": TEXT}
    if plain:
        content = {"text/plain": {"schema": TEXT}}
    good: Json = {"description": "The answer.", "headers": _HEADERS, "content": content}
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": {}}}}
        for status, text in _REFUSALS.items()
    }
    return {"200": good, **errors}


def _post(schema: Json, summary: str, *, streams: str = "") -> Json:
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"summary": summary, "requestBody": body, "responses": _answers(streams=streams)}}


def _put(schema: Json, summary: str, *, parameter: str) -> Json:
    (operation,) = _post(schema, summary).values()
    return {"put": operation | {"parameters": _get(summary, parameter=parameter)["get"]["parameters"]}}


def _get(summary: str, *, plain: bool = False, parameter: str | None = None) -> Json:
    operation: Json = {"summary": summary, "responses": _answers(plain=plain)}
    if parameter is not None:
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": schemas.FULL_TEXT}
        ]
    return {"get": operation}


def _paths() -> Json:
    tokenize = schemas.record({"model": TEXT, "prompt": schemas.strings(null=False)}, "prompt")
    detokenize = schemas.record(
        {"model": TEXT, "tokens": {"type": "array", "items": schemas.TOKEN}}, "tokens"
    )
    abort = schemas.record({"rid": schemas.FULL_TEXT, "abort_all": {"type": "boolean"}})
    paths: Json = {}
    for dialect in DIALECTS.values():
        paths[dialect.path] = _post(dialect.schema, dialect.summary, streams=dialect.stream_type)
        if dialect.keeps_answers:
            kept = dialect.path + "/{response_id}"
            paths[kept] = _get("A response that is kept", parameter="response_id")
        for question in dialect.questions:
            paths[question.path] = _post(question.schema, question.summary)
    paths |= {
        "/v1/documents": _get("The documents of this key's tenant"),
        "/v1/documents/{id}": {
            **_get("A document, and where its KV is held back", parameter="id"),
            **_put(documents.SCHEMA, "Register a document, or replace it", parameter="id"),
            "delete": _get("Delete a document", parameter="id")["get"],
        },
        "/v1/models": _get("The model"),
        "/tokenize": _post(tokenize, "The tokens of a text"),
        "/detokenize": _post(detokenize, "The text of tokens"),
        "/abort_request": _post(abort, "End a request by its rid or request id"),
        "/open_session": _post(_OPENED, "Open a session at one instance"),
        "/close_session": _post(_CLOSED, "Close a session"),
        "/query": _post(_QUERY, "How much of a prompt each instance has cached (Mooncake's KV-indexer API)"),
        "/model_info": _get("Facts of the model"),
        "/get_model_info": _get("As /model_info"),
        "/server_info": _get("Facts of a server and of the router"),
        "/get_server_info": _get("As /server_info"),
        "/flush_cache": _post(schemas.OBJECT, "Make every instance forget its cache"),
        "/health": _get("Whether an instance can take requests"),
        "/health_generate": _get("Whether an instance generates"),
        "/metrics": _get("Prometheus metrics", plain=True),
        "/metrics/last_hour": _get("Samples of the last hour, and what an oracle would have found cached"),
        "/explain/{request_id}": _get("Why a request hit or missed", parameter="request_id"),
        "/openapi.json": _get("This description"),
    }
    for row in ROWS.values():
        path = row.path.replace(":path}", "}")
        if path not in paths:
            paths[path] = _passed_on(row)
        for operation in paths[path].values():
            operation["x-sglang-route"] = row.how.value
    return paths


def _passed_on(row: ServerRoute) -> Json:
    """A route of SGLang's that is described by the table alone: its body is the workers' to check."""
    name = row.path.partition("{")[2].partition("}")[0].partition(":")[0] or None
    if row.method == "GET":
        item = _get(row.note, plain=row.path == "/", parameter=name)
    else:
        item = _post(schemas.OBJECT, row.note)
        if name is not None:
            item["post"]["parameters"] = _get(row.note, parameter=name)["get"]["parameters"]
    for operation in item.values():
        operation["x-passed-on"] = True
        if row.how is How.REFUSED:
            operation["summary"] = f"Refused: {row.note}"
            operation["responses"] = {
                "404": {"description": row.note, "content": {"application/json": {"schema": {}}}}
            }
    return item


def description(*, asks_for_key: bool = False) -> Json:
    """The whole description.

    Args:
        asks_for_key: whether clients have to send a key.
    """
    value: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "sglang_ext router",
            "version": VERSION,
            "description": "One address in front of several SGLang servers.",
        },
        "paths": _paths(),
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "anthropic": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }
    if asks_for_key:
        value["security"] = [{"bearer": []}, {"anthropic": []}]
    return value
