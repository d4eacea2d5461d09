"""The shapes of an SGLang server's answers: recorded from a real one, and compared with stand-ins.

An answer is reduced to its shape: keys and the kinds of their values, with the values themselves only where a
reader decides by them (`KEPT`). A stream is the sequence of its events' shapes, in which a run of equal ones
counts as one, because how many tokens an event brings is a matter of time.

``scripts/record_dialect.py`` writes the recording. One test holds a running server to it, so that it does not
go stale; another one the stand-ins, which may say less than a server does and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

Json = dict[str, Any]
KEPT = frozenset({"event", "finish_reason", "object", "role", "status", "stop_reason", "type"})
"""Keys whose values, where they are strings or null, belong to the shape."""
IGNORED = frozenset({"response_sent_to_client_ts"})
"""In the first event of a stream only, and of no use to a reader."""
DONE = "[DONE]"
PROMPT = "The librarian of a small town reads a book about radix trees. " * 6
MESSAGES = [{"role": "user", "content": PROMPT}]
TOKENS = 4
NATIVE = {"sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}}
OPENAI = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
DETAILS = {"return_cached_tokens_details": True}
CHAT = {"messages": MESSAGES, **OPENAI}
ANTHROPIC = {"messages": MESSAGES, "max_tokens": TOKENS, "temperature": 0}
RESPONSES = {"input": PROMPT, "max_output_tokens": TOKENS, "temperature": 0}


@dataclass(frozen=True)
class Exchange:
    """A request. Args:

    only: keys of the answer that count; of a long list of facts, those that a router reads.
    depth: levels of the answer that are looked into.
    """

    name: str
    path: str
    body: Mapping[str, Any] | None = None
    only: Sequence[str] = ()
    depth: int = 12


EXCHANGES = (
    # In this order: the first exchange of a kind has nothing cached, the second has.
    Exchange("flush", "/flush_cache", {}),
    Exchange("health", "/health"),
    Exchange(
        "model_info",
        "/model_info",
        only=(
            *("model_path", "served_model_name", "tokenizer_path", "is_generation", "weight_version"),
            *("reasoning_parser", "tool_call_parser", "disaggregation_mode", "has_image_understanding"),
            *("has_audio_understanding", "model_type", "architectures"),
        ),
        depth=1,
    ),
    Exchange(
        "server_info",
        "/server_info",
        only=(
            *("startup_time", "random_seed", "api_key", "allow_auto_truncate", "chat_template"),
            *("completion_template", "version", "internal_states", "served_model_name"),
        ),
        depth=1,
    ),
    Exchange("models", "/v1/models"),
    Exchange("tokenize", "/v1/tokenize", {"prompt": PROMPT}),
    Exchange("tokenize messages", "/v1/tokenize", {"messages": MESSAGES}),
    Exchange("detokenize", "/detokenize", {"tokens": [500, 501]}),
    Exchange("generate", "/generate", {"text": PROMPT, **NATIVE}),
    Exchange("generate, cached", "/generate", {"text": PROMPT, **NATIVE}),
    Exchange("generate, stream", "/generate", {"input_ids": [500, 501, 502], "stream": True, **NATIVE}),
    Exchange("generate, batch", "/generate", {"text": ["One", "Two"], **NATIVE}),
    Exchange("generate, batch, stream", "/generate", {"text": ["Three"], "stream": True, **NATIVE}),
    Exchange("generate, refused", "/generate", {"text": PROMPT, "token_ids_logprob": [10**9], **NATIVE}),
    Exchange("completion", "/v1/completions", {"prompt": PROMPT, **OPENAI}),
    Exchange("completion, stream", "/v1/completions", {"prompt": PROMPT, "stream": True, **OPENAI}),
    Exchange("completion, usage", "/v1/completions", {"prompt": PROMPT, **USAGE, **OPENAI}),
    Exchange("chat", "/v1/chat/completions", CHAT),
    Exchange("chat, cached", "/v1/chat/completions", {**CHAT, **DETAILS}),
    Exchange("chat, stream", "/v1/chat/completions", {**CHAT, "stream": True}),
    Exchange("chat, stream, usage", "/v1/chat/completions", {**CHAT, **USAGE}),
    Exchange("chat, stream, details", "/v1/chat/completions", {**CHAT, **USAGE, **DETAILS}),
    Exchange("messages", "/v1/messages", ANTHROPIC),
    Exchange("messages, stream", "/v1/messages", {**ANTHROPIC, "stream": True}),
    Exchange("messages, count", "/v1/messages/count_tokens", {"messages": MESSAGES}),
    Exchange("responses", "/v1/responses", RESPONSES),
    Exchange("responses, stream", "/v1/responses", {**RESPONSES, "stream": True}),
    Exchange("nowhere", "/v1/nowhere"),
)


def record(url: str) -> Json:
    """The shapes of a server's answers to all exchanges, by name."""
    with httpx.Client(base_url=url, timeout=120, trust_env=False) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        return {exchange.name: _answer(client, exchange, model) for exchange in EXCHANGES}


def _answer(client: httpx.Client, exchange: Exchange, model: str) -> Json:
    if exchange.body is None:
        response = client.get(exchange.path)
    else:
        response = client.post(exchange.path, json={"model": model, **exchange.body})
    kind = response.headers.get("content-type", "").partition(";")[0]
    found: Json = {"status": response.status_code}
    if kind == "text/event-stream":
        found["events"] = _without_repeats(_events(response.text))
    elif kind == "application/json" and response.content:
        answer = response.json()
        if exchange.only:
            answer = {name: answer[name] for name in exchange.only if name in answer}
        found["answer"] = shape_of(answer, exchange.depth)
    return found


def _events(text: str) -> Iterator[Any]:
    for block in text.split("\n\n"):
        if not block.strip():
            continue
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        data = fields.get("data", "")
        event: Json = {"event": fields.get("event")}
        event["data"] = DONE if data == DONE else shape_of(json.loads(data))
        yield event


def _without_repeats(events: Iterator[Any]) -> list[Any]:
    found: list[Any] = []
    for event in events:
        if not found or found[-1] != event:
            found.append(event)
    return found


def shape_of(value: Any, depth: int = 12, key: str = "") -> Any:
    """Keys and kinds of a JSON value: an object becomes an object, a list the different shapes in it, and
    anything else the name of its kind, or ``= value`` where it is kept.
    """
    if isinstance(value, dict):
        if not depth:
            return "object"
        return {name: shape_of(value[name], depth - 1, name) for name in sorted(value.keys() - IGNORED)}
    if isinstance(value, list):
        if not depth:
            return "array"
        different: list[Any] = []
        for shape in (shape_of(item, depth - 1) for item in value):
            if shape not in different:
                different.append(shape)
        return different
    if key in KEPT and (value is None or isinstance(value, str)):
        return f"= {value}"
    kinds: dict[type, str] = {str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")


def differences(real: Any, stand_in: Any, where: str = "") -> list[str]:
    """Differences between a stand-in's recording and a server's: other values, or fields missing by which
    readers decide."""
    if isinstance(real, dict) and isinstance(stand_in, dict):
        found = [f"{where}/{key}: no server says it" for key in stand_in.keys() - real.keys()]
        found += [
            f"{where}/{key}: lacks {real[key]!r}"
            for key in real.keys() - stand_in.keys()
            if str(real[key]).startswith("= ") and real[key] != "= None"
        ]
        for key in sorted(real.keys() & stand_in.keys()):
            found += differences(real[key], stand_in[key], f"{where}/{key}")
        return found
    if isinstance(real, list) and isinstance(stand_in, list):
        if len(real) != len(stand_in):
            return [f"{where}: {len(stand_in)} different ones, and a server has {len(real)}"]
        return [
            line
            for at, (one, other) in enumerate(zip(real, stand_in, strict=True))
            for line in differences(one, other, f"{where}[{at}]")
        ]
    return [] if real == stand_in else [f"{where}: {stand_in!r}, and a server says {real!r}"]
