"""A router keeps a bounded number of bytes of requests: of any string of any API, and of names without end.

The requests are made from the router's own description (``/openapi.json``).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import io
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.router import Router
from sglang_ext.router.api.validation import MAX_NAME_CHARACTERS
from sglang_ext.router.endpoints.openapi import description
from sglang_ext.router.http.types import RequestRefused
from sglang_ext.testing.waiting import until

MIB = 1 << 20
HEADER_BYTES = 6000
"""Of a value that clients and router take."""
MESSAGES = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "x", "sampling_params": {"max_new_tokens": 1}},
    "/v1/chat/completions": {"model": "m", "messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"model": "m", "prompt": "x", "max_tokens": 1},
    "/v1/responses": {"model": "m", "input": "x", "max_output_tokens": 1},
    "/v1/messages": {"model": "m", "messages": MESSAGES, "max_tokens": 1},
    "/api/chat": {"model": "m", "messages": MESSAGES, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"model": "m", "prompt": "x", "stream": False, "options": {"num_predict": 1}},
    "/v1/documents/{id}": {"text": "x"},
    "/v1/advisory": {"text": "x"},
}
"""Requests that are served, by path; of other paths the schema's least."""
FUNCTION = ("tools", 0, "function")
CHAT = ("messages", 0)
DEEPER: dict[str, tuple[tuple[str | int, ...], ...]] = {
    "/generate": (
        ("sampling_params", "stop"), ("sampling_params", "regex"), ("sampling_params", "json_schema"),
        ("sampling_params", "custom_params", "x"), ("session_params", "id"), ("image_data", 0),
    ),
    "/v1/chat/completions": (
        (*CHAT, "role"), (*CHAT, "name"), (*CHAT, "tool_call_id"), (*CHAT, "reasoning_content"),
        (*CHAT, "content", 0, "image_url", "url"), (*CHAT, "tool_calls", 0, "function", "arguments"),
        (*FUNCTION, "description"), (*FUNCTION, "parameters", "description"),
        ("tool_choice", "function", "name"),
        ("response_format", "type"), ("response_format", "json_schema", "name"),
        ("response_format", "json_schema", "schema", "description"), ("chat_template_kwargs", "x"),
        ("prompt_cache_options", "ttl"), ("session_params", "id"), ("user",), ("metadata", "x"),
    ),
    "/v1/responses": (
        ("input", 0, "id"), ("text", "format", "name"), ("text", "format", "schema", "description"),
        ("tools", 0, "name"), ("tools", 0, "parameters", "description"), ("metadata", "x"),
    ),
    "/v1/messages": (
        (*CHAT, "content", 0, "type"), (*CHAT, "content", 0, "source", "data"),
        (*CHAT, "content", 0, "cache_control", "ttl"), ("tools", 0, "description"),
        ("tools", 0, "input_schema", "description"), ("metadata", "user_id"),
    ),
    "/v1/documents/{id}": (
        (*CHAT, "content"), (*CHAT, "content", 0, "text"), (*CHAT, "name"), (*CHAT, "padding"),
        (*CHAT, "tool_calls", 0, "function", "arguments"),
    ),
    "/v1/advisory": ((*CHAT, "content"), (*CHAT, "content", 0, "text"), (*CHAT, "name")),
}  # fmt: skip
"""Places of strings that the description does not list, by path."""
INSTEAD_OF_TEXT = ("/v1/documents/{id}", "/v1/advisory")
"""Of these, a body with messages has no text."""
NAMED = (("x",), ("options", "x"), ("metadata", "x"), ("sampling_params", "x"), ("logit_bias", "x"))
"""Places of objects whose keys a client chooses; the last word stands for the key."""
SMALLEST: dict[str, Any] = {"string": "x", "integer": 1, "number": 1, "boolean": True, "null": None}
KEYS = {
    "/generate": ("rid", "extra_key", "cache_salt", "session_id"),
    "/v1/chat/completions": ("rid", "extra_key", "cache_salt", "user"),
    "/v1/responses": ("extra_key", "previous_response_id"),
    "/v1/advisory": ("session", "extra_key"),
}
"""Fields by which something is kept."""


def kind_of(schema: dict[str, Any]) -> list[str]:
    kind = schema.get("type", "object")
    return kind if isinstance(kind, list) else [kind]


def least(schema: dict[str, Any]) -> Any:
    """The smallest value of a schema."""
    kind = kind_of(schema)[0]
    if kind == "array":
        return [least(schema.get("items", {}))]
    if kind == "object":
        return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
    return SMALLEST[kind]


def strings(schema: dict[str, Any], path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Where a body can have strings."""
    if "string" in kind_of(schema):
        yield path
    for name, inner in schema.get("properties", {}).items():
        yield from strings(inner, (*path, name))
    if "array" in kind_of(schema) and "items" in schema:
        yield from strings(schema["items"], (*path, 0))


def with_value(body: Any, path: tuple[str | int, ...], value: str) -> Any:
    """A copy of a body with a value at a place."""
    if not path:
        return value
    first, *rest = path
    if isinstance(first, int):
        inner = body[0] if isinstance(body, list) and body else {}
        return [with_value(inner, tuple(rest), value)]
    body = deepcopy(body) if isinstance(body, dict) else {}
    body[first] = with_value(body.get(first), tuple(rest), value)
    return body


def described() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(method, path, schema of the body) of each request that the router parses."""
    for path, methods in description()["paths"].items():
        for method, operation in methods.items():
            if "requestBody" in operation and "x-passed-on" not in operation:
                yield method, path, operation["requestBody"]["content"]["application/json"]["schema"]
    text = {"type": ["string", "null"]}
    names = ("text", "prompt", "session", "extra_key", "cache_salt")
    yield "post", "/v1/advisory", {"type": "object", "properties": dict.fromkeys(names, text)}


def resident() -> int:
    """Bytes of this process, after its allocator has returned free memory."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096


@asynccontextmanager
async def stalls() -> AsyncIterator[list[float]]:
    """The longest time in which the event loop did nothing else, in seconds; of requests and their answers,
    which this process makes, too."""
    worst = [0.0]

    async def look() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0)
            now = time.monotonic()
            worst[0], last = max(worst[0], now - last), now

    task = asyncio.create_task(look())
    try:
        yield worst
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def send(
    client: Any, router: Router, method: str, path: str, body: Any, headers: dict[str, str] | None = None
) -> int:
    url = router.url + path.replace("{id}", "d")
    data = io.BytesIO(json.dumps(body).encode())
    async with client.request(method.upper(), url, data=data, headers=headers) as answer:
        assert b"internal error of the router" not in await answer.read(), (path, list(body))
        return int(answer.status)


def kept(router: Router) -> int:
    return sum(table.size_bytes for table in router.metrics.tables.values())


def with_key(body: Any, path: tuple[str, ...], key: str) -> Any:
    """A copy of a body with a key in place of a path's last word."""
    found = with_value(body, path, "x")
    inner = found
    for name in path[:-1]:
        inner = inner[name]
    inner[key] = inner.pop(path[-1])
    return found


def bodies(value: str) -> Iterator[tuple[str, str, Any]]:
    """(method, path, body): a string in each place, and as a key."""
    for method, path, schema in described():
        body = BODIES.get(path) or least(schema)
        for where in strings(schema):
            yield method, path, with_value(body, where, value)
        for named in NAMED if path in BODIES else ():
            yield method, path, with_key(body, named, value)
    for path, places in DEEPER.items():
        for where in places:
            body = BODIES[path]
            if path in INSTEAD_OF_TEXT:
                body = {"messages": MESSAGES}
            yield "put" if "documents" in path else "post", path, with_value(body, where, value)


async def test_no_string_of_any_api_is_kept(
    start_worker, start_router, client, long_run, record_property
) -> None:
    """Each was kept as long as the client wished: sessions of hints, extra keys, padding of documents."""
    size = MIB if long_run else MIB // 4
    worker = await start_worker(context_length=1 << 10)
    router = await start_router(worker, tokenizer_cache_bytes=1 << 20, tree_max_bytes=1 << 23)
    value, sent = "x " * (size // 2), 0
    assert sum(1 for _ in bodies("")) > 200
    await send(client, router, "post", "/generate", BODIES["/generate"])
    before = resident()
    async with stalls() as worst:
        for method, path, body in bodies(value):
            await send(client, router, method, path, body)
            worker.requests.clear()
            sent += size
        for header in ("x-session-id", "x-request-id", "traceparent", "x-smg-routing-key"):
            await send(client, router, "post", "/generate", BODIES["/generate"], {header: "x" * HEADER_BYTES})
    grown = resident() - before
    record_property("grown_bytes", grown)
    record_property("longest_stall_s", worst[0])
    record_property("kept_bytes", kept(router))
    assert kept(router) < 2 * MIB, {name: table.size_bytes for name, table in router.metrics.tables.items()}
    assert grown < sent // 2


@pytest.mark.timeout(3600)
async def test_names_without_end_are_bounded(
    start_worker, start_router, client, long_run, record_property
) -> None:
    count = 10_000 if long_run else 60
    worker = await start_worker()
    router = await start_router(
        worker, explain_max_bytes=MIB // 8, session_memory_bytes=MIB // 8, hint_bytes=MIB // 8,
        hints_live=20, hints_per_second=1e6, tree_max_bytes=1 << 23, session_answer_bytes=MIB // 8,
    )  # fmt: skip
    limits = {
        "request-log": MIB // 8, "sessions": MIB // 8, "hints": MIB, "homes": 32 * MIB,
        "documents": 256 * MIB, "deleted-documents": 16 * MIB, "open-sessions": 32 * MIB, "pins": 16 * MIB,
        "diagnoses": MIB // 32, "pauses": 4 * MIB, "paused-sessions": 8 * MIB, "regret": 2 * MIB,
        "session-answers": MIB // 8,
    }  # fmt: skip
    assert limits.keys() == router.metrics.tables.keys(), "say here how large a new table may be"
    before = resident()
    async with stalls() as worst:
        for number in range(count):
            name = f"{number:06d}".ljust(MAX_NAME_CHARACTERS, "n")
            for path, names in KEYS.items():
                body = BODIES[path] | dict.fromkeys(names, name)
                await send(client, router, "post", path, body, {"x-request-id": name[:128]})
            await send(client, router, "put", f"/v1/documents/d{number}", {"text": "x"})
            await send(client, router, "delete", f"/v1/documents/d{number}", {})
            worker.requests.clear()
    record_property("grown_bytes", resident() - before)
    record_property("longest_stall_s", worst[0])
    for table, most in limits.items():
        assert router.metrics.tables[table].size_bytes <= most, table
    assert router.trees.size_bytes <= 1 << 23
    assert len(router.documents.book.deleted) <= 1024
    assert len(router.metrics.tables["request-log"]) < count * 3
    assert resident() - before < 256 * MIB


async def test_a_refused_request_leaves_nothing_behind(start_worker, start_router, client) -> None:
    """Its body stayed until garbage was collected, by the traceback of its refusal: 30 of 20 MB, 1.2 GB."""
    router = await start_router(await start_worker())
    long = "n" * (MAX_NAME_CHARACTERS + 1)
    gc.collect()
    gc.disable()
    try:
        for path, body in (
            ("/generate", BODIES["/generate"] | {"extra_key": long}),
            ("/v1/chat/completions", {"messages": []}),
            ("/v1/chat/completions", BODIES["/v1/chat/completions"] | {"document_ids": ["none"]}),
            ("/v1/advisory", {"text": "x", "session": long}),
            ("/v1/documents/.", {"text": "x"}),
        ):
            method = "put" if "documents" in path else "post"
            assert 400 <= await send(client, router, method, path, body) < 500
        # The client has its answer before the router's handler has ended, which has the refusal until then.
        await until(lambda: not refusals(), what="all refusals to end with their requests")
    finally:
        gc.enable()


def refusals() -> list[object]:
    """That exist."""
    return [each for each in gc.get_objects() if issubclass(type(each), RequestRefused)]


async def test_a_refusal_that_is_kept_by_its_traceback_is_found() -> None:
    """The twin: a frame that has the refusal which has the frame."""

    def refuse() -> None:
        refused = RequestRefused("no")
        try:
            raise refused
        except RequestRefused as error:
            kept.append(error)  # with its traceback, this frame, and so ``refused``

    kept: list[RequestRefused] = []
    gc.collect()
    gc.disable()
    try:
        refuse()
        kept.clear()
        assert len(refusals()) == 1
    finally:
        gc.enable()
        gc.collect()
    assert refusals() == []
