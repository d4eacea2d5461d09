"""The description of the API that ``/openapi.json`` serves (OpenAPI 3.1).

It describes what the router itself checks; what it passes on unread is allowed as additional properties. The
tests send requests made from it (schemathesis) at a router, and compare it with the table of endpoints.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang_ext.router.api.anthropic import BLOCKS
from sglang_ext.router.api.openai import ROLES
from sglang_ext.router.api.validation import MAX_CHOICES

Json = dict[str, Any]

VERSION = "1"
_TEXT: Json = {"type": "string"}
_BOOL: Json = {"type": ["boolean", "null"]}
_NUMBER: Json = {"type": ["number", "null"]}
_TOKEN: Json = {"type": "integer", "minimum": 0}
_TOKENS: Json = {"type": "array", "items": _TOKEN, "minItems": 1}
_SALT: Json = {"type": ["string", "array", "null"], "items": {"type": "string"}}
_OBJECT: Json = {"type": "object"}


def _int(least: int | None = None, most: int | None = None, *, null: bool = True) -> Json:
    schema: Json = {"type": ["integer", "null"] if null else "integer"}
    if least is not None:
        schema["minimum"] = least
    if most is not None:
        schema["maximum"] = most
    return schema


def _strings(*, null: bool = True) -> Json:
    return {"type": ["string", "array", *(["null"] if null else [])], "items": _TEXT}


_SAMPLING: Json = {
    **dict.fromkeys(
        (
            "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
        ),
        _NUMBER,
    ),
    "top_k": _int(),
    "n": _int(1, MAX_CHOICES),
    "stop": _strings(),
    "stop_token_ids": {"type": ["array", "null"], "items": {"type": "integer"}},
    "ignore_eos": _BOOL,
    "skip_special_tokens": _BOOL,
    "regex": {"type": ["string", "null"]},
    "ebnf": {"type": ["string", "null"]},
}  # fmt: skip
_ROUTING: Json = {
    "rid": _SALT | {"description": "What the request is called; /abort_request takes it."},
    "extra_key": _SALT | {"description": "Prompts with different keys share no KV."},
    "cache_salt": _SALT
    | {"description": "As extra_key. Set by the router for tenants, who must not send it."},
    "priority": _int() | {"description": "Larger goes first. At most the API key's own."},
}
_PART: Json = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": _TEXT, "text": _TEXT},
}
_CONTENT: Json = {"type": ["string", "array", "null"], "items": _PART}


def _object(properties: Json, *required: str) -> Json:
    return {"type": "object", "properties": properties, "required": list(required)}


def _generate() -> Json:
    sampling = _object({**_SAMPLING, "max_new_tokens": _int(0), "min_new_tokens": _int(0)})
    body = _object(
        {
            "text": {"type": ["string", "array"], "items": _TEXT | {"minLength": 1}, "minLength": 1},
            "input_ids": {
                "type": "array",
                "minItems": 1,
                "items": {"anyOf": [_TOKEN, _TOKENS]},
            },
            "sampling_params": {"anyOf": [sampling, {"type": "array", "items": sampling}, {"type": "null"}]},
            "stream": _BOOL,
            "return_logprob": {"type": ["boolean", "array", "null"], "items": {"type": "boolean"}},
            "logprob_start_len": {"type": ["integer", "array", "null"], "items": {"type": "integer"}},
            "top_logprobs_num": {"type": ["integer", "array", "null"], "items": _TOKEN, "minimum": 0},
            **_ROUTING,
        }
    )
    return body | {"oneOf": [{"required": ["text"]}, {"required": ["input_ids"]}]}


def _chat() -> Json:
    message = _object({"role": {"enum": list(ROLES)}, "content": _CONTENT}, "role", "content")
    tool = _object({"type": {"const": "function"}, "function": _object({"name": _TEXT}, "name")}, "function")
    return _object(
        {
            "model": _TEXT,
            "messages": {"type": "array", "minItems": 1, "items": message},
            "max_tokens": _int(0),
            "max_completion_tokens": _int(0),
            "stream": _BOOL,
            "stream_options": {"type": ["object", "null"]},
            "logprobs": _BOOL,
            "top_logprobs": _int(0),
            "tools": {"type": ["array", "null"], "items": tool},
            "chat_template_kwargs": {"type": ["object", "null"]},
            **_SAMPLING,
            **_ROUTING,
        },
        "messages",
    )


def _completion() -> Json:
    prompt: Json = {
        "anyOf": [
            _TEXT | {"minLength": 1},
            {"type": "array", "minItems": 1, "items": _TEXT | {"minLength": 1}},
            _TOKENS,
            {"type": "array", "minItems": 1, "items": _TOKENS},
        ]
    }
    return _object(
        {
            "model": _TEXT,
            "prompt": prompt,
            "max_tokens": _int(1),
            "stream": _BOOL,
            "echo": _BOOL,
            "logprobs": _int(0),
            **_SAMPLING,
            **_ROUTING,
        },
        "prompt",
    )


def _responses() -> Json:
    item = _object({"type": _TEXT, "role": _TEXT, "content": _CONTENT})
    return _object(
        {
            "model": {"type": ["string", "null"]},
            "input": {"type": ["string", "array"], "items": item, "minItems": 1},
            "instructions": {"type": ["string", "null"]},
            "max_output_tokens": _int(1),
            "previous_response_id": {"type": ["string", "null"]},
            "store": _BOOL,
            "stream": _BOOL,
            "temperature": _NUMBER,
            "top_p": _NUMBER,
            "tools": {"type": ["array", "null"], "items": _OBJECT},
            "reasoning": {"type": ["object", "null"]},
        },
        "input",
    )


def _messages(*, counting: bool) -> Json:
    block = _object({"type": {"enum": sorted(BLOCKS)}, "text": _TEXT}, "type")
    content: Json = {"type": ["string", "array"], "items": block}
    message = _object(
        {"role": {"enum": ["user", "assistant", "system"]}, "content": content}, "role", "content"
    )
    tool = _object({"name": _TEXT, "input_schema": _OBJECT}, "name")
    properties: Json = {
        "model": _TEXT | {"minLength": 1},
        "messages": {"type": "array", "minItems": 1, "items": message},
        "system": {"type": ["string", "array", "null"], "items": block},
        "tools": {"type": ["array", "null"], "items": tool},
    }
    if counting:
        return _object(properties, "model", "messages")
    properties |= {
        "max_tokens": _int(1, null=False),
        "stop_sequences": {"type": ["array", "null"], "items": _TEXT},
        "stream": _BOOL,
        "temperature": _NUMBER,
        "top_p": _NUMBER,
        "top_k": _int(),
    }
    return _object(properties, "model", "messages", "max_tokens")


_ERROR = _object(
    {
        "error": _object(
            {
                "message": _TEXT,
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
            "message",
        )
    },
    "error",
)
_HEADERS: Json = {
    name: {"schema": _TEXT, "description": text}
    for name, text in {
        "x-request-id": "The request's id: yours, if you sent one; /explain/{request_id} takes it.",
        "x-kv-instance": "The instance that answered.",
        "x-kv-cached-tokens": "Prompt tokens that were cached, where that is known before the answer ends.",
        "x-kv-matched-tokens": "Prompt tokens that the router believed to be cached there.",
        "x-kv-route-reason": "Why this instance was chosen.",
    }.items()
}
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


def _answers(*, streams: bool = False, plain: bool = False) -> Json:
    content: Json = {"application/json": {"schema": {}}}
    if streams:
        content["text/event-stream"] = {"schema": _TEXT}
    if plain:
        content = {"text/plain": {"schema": _TEXT}}
    good: Json = {"description": "The answer.", "headers": _HEADERS, "content": content}
    errors = {
        status: {"description": text, "content": {"application/json": {"schema": {}}}}
        for status, text in _REFUSALS.items()
    }
    return {"200": good, **errors}


def _post(schema: Json, summary: str, *, streams: bool = False) -> Json:
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"post": {"summary": summary, "requestBody": body, "responses": _answers(streams=streams)}}


def _get(summary: str, *, plain: bool = False, parameter: str | None = None) -> Json:
    operation: Json = {"summary": summary, "responses": _answers(plain=plain)}
    if parameter is not None:
        operation["parameters"] = [
            {"name": parameter, "in": "path", "required": True, "schema": _TEXT | {"minLength": 1}}
        ]
    return {"get": operation}


def _paths() -> Json:
    tokenize = _object({"model": _TEXT, "prompt": _strings(null=False)}, "prompt")
    detokenize = _object({"model": _TEXT, "tokens": {"type": "array", "items": _TOKEN}}, "tokens")
    abort = _object({"rid": _TEXT | {"minLength": 1}, "abort_all": {"type": "boolean"}})
    return {
        "/generate": _post(_generate(), "SGLang's own generation", streams=True),
        "/v1/chat/completions": _post(_chat(), "OpenAI chat completions", streams=True),
        "/v1/completions": _post(_completion(), "OpenAI completions", streams=True),
        "/v1/responses": _post(_responses(), "OpenAI responses", streams=True),
        "/v1/responses/{response_id}": _get("A response that is kept", parameter="response_id"),
        "/v1/messages": _post(_messages(counting=False), "Anthropic messages", streams=True),
        "/v1/messages/count_tokens": _post(_messages(counting=True), "Tokens of an Anthropic message"),
        "/v1/models": _get("The model"),
        "/tokenize": _post(tokenize, "The tokens of a text"),
        "/detokenize": _post(detokenize, "The text of tokens"),
        "/abort_request": _post(abort, "End a request by its rid or request id"),
        "/model_info": _get("Facts of the model"),
        "/get_model_info": _get("As /model_info"),
        "/server_info": _get("Facts of a server and of the router"),
        "/get_server_info": _get("As /server_info"),
        "/flush_cache": _post(_OBJECT, "Make every instance forget its cache"),
        "/health": _get("Whether an instance can take requests"),
        "/health_generate": _get("Whether an instance generates"),
        "/metrics": _get("Prometheus metrics", plain=True),
        "/explain/{request_id}": _get("Why a request hit or missed", parameter="request_id"),
        "/openapi.json": _get("This description"),
    }


@cache
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
