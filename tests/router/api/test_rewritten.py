"""Ollama's and Vertex AI's APIs: the requests that workers get for them, and the clients' answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.rewritten.ollama import OLLAMA_CHAT, OLLAMA_GENERATE, OllamaAnswer
from sglang_ext.router.api.rewritten.vertex import VERTEX
from sglang_ext.router.api.sse import event
from sglang_ext.router.http.types import RequestRefused

Json = dict[str, Any]
LIMITS = Limits(1000, 4096, served_name="tiny")
TEXT = "The librarian of a small town reads a book about radix trees. " * 6
TURNS = [{"role": "user", "content": TEXT}]
KEYS = {"keys": [{"key": f"sk-tenant-{tenant}-1", "tenant": tenant} for tenant in "ab"]}
BODIES: dict[str, Json] = {
    "/api/chat": {"model": "any", "messages": TURNS, "options": {"num_predict": 4}},
    "/api/generate": {"model": "any", "prompt": TEXT, "options": {"num_predict": 4}},
    "/vertex_generate": {
        "instances": [{"text": TEXT}], "parameters": {"sampling_params": {"max_new_tokens": 4}},
    },
}  # fmt: skip


def lines(raw: bytes) -> list[Json]:
    assert raw.endswith(b"\n")
    return [json.loads(line) for line in raw.splitlines()]


# -- requests ----------------------------------------------------------------------------------------


def test_options_become_sampling_parameters() -> None:
    options = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "num_predict": 7, "stop": ["x"], "seed": 5,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "num_ctx": 4096, "min_p": 0.1, "mirostat": None,
    }  # fmt: skip
    body = {"model": "m", "prompt": "hello", "system": "be brief", "options": options, "raw": True}
    assert OLLAMA_GENERATE.rewritten(body, LIMITS) == {
        "text": "be brief\n\nhello",
        "stream": True,
        "sampling_params": {
            "max_new_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ["x"],
            "sampling_seed": 5, "presence_penalty": 0.1, "frequency_penalty": 0.2,
        },
    }  # fmt: skip
    chat = OLLAMA_CHAT.rewritten({"model": "m", "messages": TURNS, "options": options}, LIMITS)
    assert (chat["model"], chat["max_tokens"], chat["seed"], chat["top_k"]) == ("tiny", 7, 5, 3)
    assert (chat["repetition_penalty"], chat["min_p"]) == (1.0, 0.0), "not the model's own defaults"
    plain = OLLAMA_CHAT.rewritten({"model": "m", "messages": TURNS, "stream": False}, LIMITS)
    assert (plain["stream"], plain["max_tokens"], plain["temperature"]) == (False, 2048, 1.0)
    assert "stream_options" not in plain


@pytest.mark.parametrize(
    ("dialect", "change", "param"),
    [
        (OLLAMA_CHAT, {"model": None}, "model"),
        (OLLAMA_CHAT, {"messages": []}, "messages"),
        (OLLAMA_CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (OLLAMA_CHAT, {"messages": [{"role": 1, "content": ""}]}, "messages[0].role"),
        (OLLAMA_CHAT, {"messages": [{**TURNS[0], "images": ["iVBO"]}]}, "messages[0].images"),
        (OLLAMA_CHAT, {"stream": "maybe"}, "stream"),
        (OLLAMA_CHAT, {"stream": None}, "stream"),
        (OLLAMA_CHAT, {"options": 3}, "options"),
        (OLLAMA_CHAT, {"options": {"num_predict": -1}}, "options.num_predict"),
        (OLLAMA_CHAT, {"options": {"num_predict": 0}}, "options.num_predict"),
        (OLLAMA_CHAT, {"options": {"temperature": "0.5"}}, "options.temperature"),
        (OLLAMA_GENERATE, {"prompt": None}, "prompt"),
        (OLLAMA_GENERATE, {"system": 1}, "system"),
        (OLLAMA_GENERATE, {"images": ["iVBO"]}, "images"),
        (OLLAMA_GENERATE, {"options": {"stop": [1]}}, "options.stop[0]"),
        (VERTEX, {"instances": 3}, "instances"),
        (VERTEX, {"instances": [3]}, "instances[0]"),
        (VERTEX, {"parameters": []}, "parameters"),
        (VERTEX, {"parameters": {"text": "x"}}, "parameters.text"),
        (VERTEX, {"parameters": {"sampling_params": {"top_k": "a"}}}, "sampling_params.top_k"),
        (VERTEX, {"instances": [{"text": "a"}, {"input_ids": [1]}]}, "text[1]"),
        (VERTEX, {"instances": [{}]}, "text"),
    ],
)  # fmt: skip
def test_what_is_refused(dialect: Any, change: Json, param: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        dialect.parse({**BODIES[dialect.path], **change}, LIMITS)
    assert refused.value.param == param


def test_vertex_instances_become_a_batch() -> None:
    body = {
        "instances": [{"input_ids": [1, 2], "image_data": "data:,"}, {"input_ids": [3], "text": ""}],
        "parameters": {"sampling_params": {"max_new_tokens": 4}, "lora_path": ["a", None]},
    }
    assert VERTEX.rewritten(body, LIMITS) == {
        "input_ids": [[1, 2], [3]],
        "image_data": ["data:,"],
        "sampling_params": {"max_new_tokens": 4},
        "lora_path": ["a", None],
    }


def test_an_empty_prompt_is_answered_at_once() -> None:
    for body in ({"prompt": ""}, {"prompt": " \n", "stream": True}):
        kind, raw = OLLAMA_GENERATE.answer_at_once({"model": "m", **body}, LIMITS) or ("", b"")
        (answer,) = lines(raw)
        assert (kind, answer["response"], answer["done"]) == ("application/x-ndjson", "", True)
    kind, raw = OLLAMA_GENERATE.answer_at_once({"model": "m", "prompt": "", "stream": False}, LIMITS) or (
        "",
        b"",
    )
    assert kind == "application/json"
    assert OLLAMA_GENERATE.answer_at_once({"model": "m", "prompt": "", "system": "x"}, LIMITS) is None
    assert OLLAMA_CHAT.answer_at_once({"model": "m", "messages": []}, LIMITS) is None
    assert VERTEX.answer_at_once({"instances": []}, LIMITS) == ("application/json", b"[]")


# -- answers -----------------------------------------------------------------------------------------


def native(text: str, tokens: int, ids: int | None = None) -> bytes:
    size = tokens if ids is None else ids
    return event({"text": text, "output_ids": [1] * size, "meta_info": {"completion_tokens": tokens}})


@pytest.mark.parametrize("cut", [1, 7, 10_000])
@pytest.mark.parametrize(
    "events",
    [
        native("one", 1) + native("one two", 2) + event(None),
        native("one", 1, 1) + native(" two", 2, 1) + event(None),
        event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        + event({"choices": [{"delta": {"content": "one"}}]})
        + event({"choices": [{"delta": {"content": " two"}, "finish_reason": "stop"}]})
        + event({"choices": [], "usage": {"prompt_tokens": 3}})
        + event(None),
    ],
    ids=["whole", "increments", "chat"],
)  # fmt: skip
def test_a_stream_becomes_lines(events: bytes, cut: int) -> None:
    translation = OllamaAnswer(OLLAMA_GENERATE, "tiny")
    raw = b"".join(translation.feed(events[at : at + cut]) for at in range(0, len(events), cut))
    said = lines(raw)
    assert [line["response"] for line in said] == ["one", " two", ""]
    assert [(line["done"], line["done_reason"]) for line in said] == [(False, None)] * 2 + [(True, "stop")]


def test_a_stream_that_fails_has_no_end() -> None:
    translation = OllamaAnswer(OLLAMA_CHAT, "tiny")
    raw = translation.feed(event({"error": {"message": "out of memory"}}) + event(None))
    assert lines(raw) == [{"error": "out of memory"}]
    assert json.loads(translation.whole(500, b"no JSON")) == {"error": "the worker failed"}
    assert json.loads(translation.whole(400, b'{"message": "too long"}')) == {"error": "too long"}


# -- a router that serves them ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_they_are_served_by_prefix(path: str, stream: bool, start_worker, start_router, client) -> None:
    workers = [await start_worker() for _ in range(2)]
    router = await start_router(*workers, policy="prompt-tree")
    body = json.loads(json.dumps(BODIES[path]))
    (body if "model" in body else body["parameters"])["stream"] = stream
    homes = []
    for _ in range(2):
        # As curl sends it: without a type of content.
        headers = {"content-type": "application/x-www-form-urlencoded"}
        async with client.post(router.url + path, data=json.dumps(body), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            raw = await answer.read()
            homes.append(answer.headers["x-kv-instance"])
            kind = answer.headers["content-type"]
    assert answer.headers["x-kv-route-reason"] == "prefix"
    assert len(set(homes)) == 1
    name = answer.headers["x-request-id"]
    record = router.request_log.find(name, tenant=None, admin=True).record
    assert record.completion_tokens == 4
    assert record.cached_tokens > 40
    async with client.get(f"{router.url}/explain/{name}") as told:
        assert (await told.json())["cached"]["tokens"] == record.cached_tokens
    (sent, *_) = [request for worker in workers for request in worker.requests]
    assert sent[0] == ("/v1/chat/completions" if path == "/api/chat" else "/generate")
    assert sent[2]["content-type"] == "application/json"
    if path == "/vertex_generate":
        assert kind.startswith("text/event-stream" if stream else "application/json")
        assert stream or len(json.loads(raw)["predictions"]) == 1
    elif stream:
        assert kind == "application/x-ndjson"
        assert [line["done"] for line in lines(raw)] == [False] * 4 + [True]
    else:
        assert kind.startswith("application/json")
        (said,) = lines(raw + b"\n")
        assert (said["model"], said["done"], said["eval_count"]) == ("stand-in", True, 4)
        assert said["total_duration"] > 0


@pytest.mark.parametrize("path", BODIES)
async def test_tenants_are_kept_apart(path: str, start_worker, start_router, client, tmp_path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps(KEYS))
    file.chmod(0o600)
    worker = await start_worker()
    router = await start_router(worker, api_keys_file=str(file))
    cached = []
    for tenant in "aabb":
        headers = {"authorization": f"Bearer sk-tenant-{tenant}-1", "x-request-id": "mine"}
        async with client.post(router.url + path, json=BODIES[path], headers=headers) as answer:
            assert answer.status == 200
            await answer.read()
        record = router.request_log.find("mine", tenant=tenant, admin=False).record
        cached.append(bool(record.cached_tokens))
    assert cached == [False, True, False, True]
    assert len({body["cache_salt"] for _, body, _ in worker.requests}) == 2
    async with client.post(router.url + path, json=BODIES[path]) as answer:
        assert answer.status == 401


async def test_errors_have_ollamas_form(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    for path in ("/api/chat", "/api/generate"):
        async with client.post(router.url + path, json={"model": "m"}) as answer:
            assert answer.status == 400
            assert " must be " in (await answer.json())["error"]
        long = {"messages": [{"role": "user", "content": "x " * 5000}], "prompt": "x " * 5000, "model": "m"}
        async with client.post(router.url + path, json=long) as answer:
            assert (answer.status, "context length" in (await answer.json())["error"]) == (400, True)
        worker.fails = "no memory"
        async with client.post(router.url + path, json=BODIES[path]) as answer:
            assert (answer.status, type((await answer.json())["error"])) == (500, str)
        worker.fails = None
    worker.die_after_chunks = 2
    async with client.post(router.url + "/api/chat", json=BODIES["/api/chat"]) as answer:
        *_, last = lines(await answer.read())
    assert "went away in mid-answer" in last["error"]


async def test_an_empty_prompt_needs_no_worker(start_worker, start_router, client) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    async with client.post(router.url + "/api/generate", json={"model": "m", "prompt": ""}) as answer:
        assert (answer.status, lines(await answer.read())[0]["done"]) == (200, True)
    assert worker.requests == []
