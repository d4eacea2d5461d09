"""The router in front of real SGLang servers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import openai
import pytest
from router_rig import SPECS, running, until

from sglang_ext.keys import decode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.api.job import Chat, Job, PromptInput
from sglang_ext.router.tokens.tokenizer_check import EVERYTHING
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

Json = dict[str, Any]
SHORT = {"temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def servers(get_server: Callable[[ServerSpec], ServerProcess]) -> list[ServerProcess]:
    return [get_server(spec) for spec in SPECS]


@pytest.fixture
async def router(servers: list[ServerProcess]) -> AsyncIterator[Router]:
    await until(lambda: running(servers) == 0)
    for server in servers:
        server.flush()
    async with Router(RouterConfig(worker_urls=tuple(s.url for s in servers), port=0)) as router:
        yield router
        router.check()


async def test_what_a_server_tells(router: Router) -> None:
    facts = router.fleet.model
    assert facts is not None
    assert (facts.model.vocab_size, facts.model.context_length) == (32_000, 32_768)
    assert facts.role == "colocated"
    assert len(router.fleet.usable()) == 2
    assert router.tokenizers.trust == EVERYTHING
    assert router.tokenizers.tokenizer is not None
    assert router.tokenizers.tokenizer.segmenter.by_segment


BODIES: dict[str, list[Json]] = {
    "/generate": [
        {"text": "One day", "sampling_params": {"temperature": 0, "max_new_tokens": 8}},
        {
            "input_ids": [[5, 6, 7, 8], [9, 10, 11]],
            "sampling_params": {"temperature": 0, "max_new_tokens": 5},
        },
        {"text": "One day", "sampling_params": {"temperature": 0, "max_new_tokens": 5, "n": 2}},
        {
            "text": "One day",
            "return_logprob": True,
            "top_logprobs_num": 3,
            "sampling_params": {"temperature": 0, "max_new_tokens": 3},
        },
    ],
    "/v1/chat/completions": [
        {"messages": [{"role": "user", "content": "Hello"}], **SHORT},
        {
            "messages": [{"role": "system", "content": "Be terse"}, {"role": "user", "content": "Hello"}],
            "logprobs": True,
            "top_logprobs": 2,
            **SHORT,
        },
    ],
    "/v1/completions": [
        {"prompt": "One day", **SHORT},
        {"prompt": ["One day", "Another day"], **SHORT},
        {"prompt": [5, 6, 7, 8], "echo": True, **SHORT},
    ],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_answers_are_those_of_the_server(
    path: str, stream: bool, router: Router, servers: list[ServerProcess], client: aiohttp.ClientSession
) -> None:
    for body in BODIES[path]:
        body = {**body, "stream": stream}
        if stream and path != "/generate":
            body["stream_options"] = {"include_usage": True}
        async with client.post(servers[0].url + path, json=body) as direct:
            expected = _essence(await direct.read(), stream)
        async with client.post(router.url + path, json=body) as routed:
            assert routed.status == 200
            assert routed.headers["x-kv-instance"] in {server.url for server in servers}
            got = _essence(await routed.read(), stream)
        assert got == expected
        assert got["text"]


def _essence(body: bytes, stream: bool) -> Json:
    """The parts that must not depend on the way: texts, tokens and reasons; not ids, times and cuts."""
    events = body.split(b"\n\n") if stream else [body]
    values: list[Any] = []
    for event in filter(None, events):
        data = event.removeprefix(b"data: ")
        if data != b"[DONE]":
            values += value if isinstance(value := json.loads(data), list) else [value]
    texts: dict[int, str] = {}
    reasons: dict[int, Any] = {}
    usage: dict[int, Any] = {}
    for position, value in enumerate(values):
        if "meta_info" in value:
            index = value.get("index", 0 if stream else position)
            texts[index] = value["text"]
            reasons[index] = value["meta_info"]["finish_reason"]
            usage[index] = value["meta_info"]["prompt_tokens"]
        for choice in value.get("choices", ()):
            part = choice.get("delta") or choice.get("message") or choice
            texts[choice["index"]] = texts.get(choice["index"], "") + (
                part.get("content") or part.get("text") or ""
            )
            reasons[choice["index"]] = choice.get("finish_reason") or reasons.get(choice["index"])
        if value.get("usage"):
            usage[0] = (value["usage"]["prompt_tokens"], value["usage"]["completion_tokens"])
    return {"text": texts, "reason": reasons, "usage": usage}


def conversations(count: int, seed: int) -> list[Json]:
    """Chat bodies with the usual fields of clients."""
    rng = random.Random(seed)
    words = [
        "tree",
        " prefix",
        "caf\u00e9",
        "\u4f60\u597d",
        "\n\n",
        "  ",
        "it's",
        "<|im_start|>",
        "42",
        "\U0001f680",
        "",
    ]

    def text() -> str:
        return "".join(rng.choice(words) for _ in range(rng.randrange(1, 12))) or "x"

    bodies: list[Json] = []
    for _ in range(count):
        messages: list[Json] = []
        if rng.random() < 0.5:
            messages.append({"role": rng.choice(["system", "System", "developer"]), "content": text()})
        for _ in range(rng.randrange(3)):
            messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
        content: Any = text()
        if rng.random() < 0.3:
            content = [{"type": "text", "text": text()} for _ in range(rng.randrange(1, 3))]
        messages.append({"role": "user", "content": content})
        body: Json = {"messages": messages}
        if rng.random() < 0.2:
            body["messages"] = [*messages, {"role": "assistant", "content": text()}]
            body["continue_final_message"] = rng.random() < 0.5
        if rng.random() < 0.2:
            body["reasoning_effort"] = rng.choice(["none", "low", "high"])
        bodies.append(body)
    return bodies


async def test_the_routers_tokens_are_the_servers(
    router: Router, servers: list[ServerProcess], client: aiohttp.ClientSession, long_run: bool
) -> None:
    """As generation sees them: the server returns the ids of the prompt that it computed."""
    for body in conversations(300 if long_run else 40, seed=1):
        job = Job(False, (PromptInput(chat=Chat(body)),))
        (encoded,) = await router.tokenizers.encode(job)
        assert encoded.tokens is not None, body
        request = {**body, "temperature": 0, "max_tokens": 1, "return_prompt_token_ids": True}
        async with client.post(servers[0].url + "/v1/chat/completions", json=request) as answer:
            value = await answer.json()
        theirs = value.get("prompt_token_ids") or value["choices"][0]["prompt_token_ids"]
        assert [int(token) for token in decode_tokens(encoded.key)] == theirs, body
        assert encoded.tokens == value["usage"]["prompt_tokens"]
    for text in ("One day", " a\n", "\u4f60\u597d <|im_start|> x", "a" * 500):
        (encoded,) = await router.tokenizers.encode(Job(False, (PromptInput(text=text),)))
        answer_ = servers[0].post("/generate", {"text": text, "sampling_params": {"max_new_tokens": 1}})
        assert encoded.tokens == answer_["meta_info"]["prompt_tokens"]


BAD: list[tuple[str, Json | bytes]] = [
    ("/generate", {"input_ids": [1, 32_000]}),
    ("/generate", {"input_ids": [1, 2**40]}),
    ("/generate", {"input_ids": [[1], [-5]]}),
    ("/generate", {"text": "x", "top_logprobs_num": 100_000, "return_logprob": True}),
    ("/generate", {"text": "x", "top_logprobs_num": -3, "return_logprob": True}),
    ("/generate", {"text": "x", "sampling_params": {"stop_token_ids": [10**6], "min_new_tokens": 2}}),
    ("/generate", {"text": "x", "sampling_params": {"n": 10**8}}),
    ("/generate", {"text": "x", "sampling_params": {"max_new_tokens": "many"}}),
    ("/generate", {"text": ""}),
    ("/generate", {}),
    ("/generate", {"text": "x", "input_ids": [1]}),
    ("/generate", b'{"text": "x"'),
    ("/generate", {"input_ids": [7] * 32_768}),
    ("/generate", {"input_ids": [7] * 32_700, "sampling_params": {"max_new_tokens": 100}}),
    ("/v1/completions", {"prompt": [1, 32_000]}),
    ("/v1/completions", {"prompt": "x", "logprobs": 50_000}),
    ("/v1/completions", {"prompt": ""}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "input_ids": [40_000]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 40_000}]}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": -1},
    ),
]


async def test_bad_requests_are_refused_and_the_server_lives(
    router: Router, servers: list[ServerProcess], client: aiohttp.ClientSession
) -> None:
    for path, body in BAD:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with client.post(router.url + path, data=data) as answer:
            assert answer.status == 400, (path, str(body)[:200])
            error = (await answer.json())["error"]
            assert error["type"] == "invalid_request_error"
            assert error["message"]
    for server in servers:
        assert server.running
        assert server.generate([1, 2, 3], max_new_tokens=2).prompt_tokens == 3


USER: Json = {"role": "user", "content": "Say it."}
COERCED: list[tuple[str, Json, Json]] = [
    # path, body, and the same with the types that the fields have
    (
        "/v1/chat/completions",
        {"messages": [USER], "temperature": "0", "max_tokens": "8", "n": 2.0, "ignore_eos": "yes"},
        {"messages": [USER], "temperature": 0, "max_tokens": 8, "n": 2, "ignore_eos": True},
    ),
    (
        "/v1/completions",
        {"prompt": "Say it.", "temperature": "0.0", "max_tokens": " 8 ", "echo": 1},
        {"prompt": "Say it.", "temperature": 0, "max_tokens": 8, "echo": True},
    ),
    (
        "/v1/messages",
        {"model": "m", "messages": [USER], "temperature": "0", "max_tokens": "8"},
        {"model": "m", "messages": [USER], "temperature": 0, "max_tokens": 8},
    ),
]


@pytest.mark.parametrize(("path", "body", "exact"), COERCED, ids=[path for path, *_ in COERCED])
async def test_values_of_other_types_are_taken_as_a_server_takes_them(
    path: str, body: Json, exact: Json, router: Router, client: aiohttp.ClientSession
) -> None:
    answers, url = [], router.url
    for asked in (body, body, exact):  # at the router, and at the server that answered
        async with client.post(url + path, json=asked) as answer:
            assert answer.status == 200, await answer.text()
            value = await answer.json()
            url = answer.headers.get("x-kv-instance", url)
        usage = value["usage"]
        counts = usage.get("completion_tokens"), usage.get("output_tokens")
        answers.append((value.get("choices"), value.get("content"), counts))
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ messages[0].no.thing }}"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_template_that_fails_is_the_clients_error(
    path: str, template: str, router: Router, servers: list[ServerProcess], client: Any
) -> None:
    prompt = {"input": "x"} if path == "/v1/responses" else {"messages": [USER]}
    body = {**prompt, "chat_template_kwargs": {"chat_template": template}}
    for url in (servers[0].url, router.url):
        async with client.post(url + path, json=body) as answer:
            text = await answer.text()
            assert answer.status == 400, text
            assert "Internal" not in text


LONG = {"max_new_tokens": 6000, "ignore_eos": True}
LONG_CHAT: Json = {
    "messages": [{"role": "user", "content": "Go on"}],
    "max_tokens": 6000,
    "ignore_eos": True,
}
ENDLESS: dict[str, tuple[str, Json, int]] = {
    "generate": ("/generate", {"input_ids": list(range(100, 164)), "sampling_params": LONG}, 1),
    "samples": ("/generate", {"input_ids": list(range(100, 164)), "sampling_params": {**LONG, "n": 3}}, 3),
    "batch": (
        "/generate",
        {"input_ids": [list(range(100, 164)), list(range(7, 90))], "sampling_params": {**LONG, "n": 2}},
        4,
    ),
    "chat": ("/v1/chat/completions", LONG_CHAT, 1),
    "chat samples": ("/v1/chat/completions", {**LONG_CHAT, "n": 3}, 3),
}
"""Path, body and requests at the server."""


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ENDLESS)
async def test_a_client_that_goes_away_frees_the_request_on_the_server(
    kind: str, stream: bool, router: Router, servers: list[ServerProcess], client: aiohttp.ClientSession
) -> None:
    path, body, requests = ENDLESS[kind]
    request = asyncio.ensure_future(client.post(router.url + path, json={**body, "stream": stream}))
    if stream:
        answer = await request
        await answer.content.readuntil(b"\n\n")
        await until(lambda: running(servers) == requests)
        answer.close()
    else:
        await until(lambda: running(servers) == requests)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    # SGLang looks every few seconds whether the client of an answer in one piece is still there.
    await until(lambda: running(servers) == 0)
    assert all(row.in_flight == 0 for row in router.fleet.rows.values())


async def test_conversations_stay_where_their_prefix_is(
    router: Router, client: aiohttp.ClientSession
) -> None:
    """Four conversations with one system prompt, turn by turn: each stays with its server, and from the
    second turn on most of the prompt is found there."""
    system = {"role": "system", "content": "You are the librarian of a small town. " * 4}
    histories: list[list[Json]] = [
        [system, {"role": "user", "content": f"Reader {number} asks: " + f"what about book {number}? " * 12}]
        for number in range(4)
    ]
    homes: list[set[str]] = [set() for _ in histories]
    for turn in range(4):
        for number, history in enumerate(histories):
            body = {"messages": history, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
            async with client.post(router.url + "/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
                value = await answer.json()
            homes[number].add(answer.headers["x-kv-instance"])
            if turn:
                assert answer.headers["x-kv-route-reason"] in ("prefix", "prefix-shared")
                assert int(answer.headers["x-kv-cached-tokens"]) > 0.6 * value["usage"]["prompt_tokens"]
            history.append({"role": "assistant", "content": value["choices"][0]["message"]["content"]})
            history.append({"role": "user", "content": f"And part {turn}?"})
    assert all(len(home) == 1 for home in homes)
    assert set.union(*homes) == {instance.name for instance in router.fleet.usable()}
    # The router foresees the servers' cache hits, answers included.
    value = router.metrics.registry.get_sample_value
    cached = value("sglang_ext_router_cached_tokens_total") or 0.0
    assert abs((value("sglang_ext_router_matched_tokens_total") or 0.0) - cached) < 0.1 * cached


async def test_the_openai_client_works(router: Router) -> None:
    async with openai.AsyncOpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0) as client:
        (model,) = (await client.models.list()).data
        messages: Any = [{"role": "user", "content": "Hello"}]
        whole = await client.chat.completions.create(
            model=model.id, messages=messages, temperature=0, max_tokens=8
        )
        stream = await client.chat.completions.create(
            model="any name", messages=messages, temperature=0, max_tokens=8, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        assert "".join(pieces) == whole.choices[0].message.content
        with pytest.raises(openai.BadRequestError, match="messages is empty"):
            await client.chat.completions.create(model="x", messages=[])


async def test_flushing_the_router_flushes_the_servers(
    router: Router, servers: list[ServerProcess], client: aiohttp.ClientSession
) -> None:
    body = {"input_ids": list(range(500, 700)), "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
    for expected in ("0", "192"):  # whole pages of the 200 tokens, of which the last is computed again
        async with client.post(router.url + "/generate", json=body) as answer:
            assert answer.headers["x-kv-cached-tokens"] == expected
            home = answer.headers["x-kv-instance"]
    await until(lambda: running(servers) == 0)
    async with client.post(router.url + "/flush_cache") as answer:
        assert answer.status == 200, await answer.text()
    assert router.trees.tokens_of(home) == 0
    async with client.post(router.url + "/generate", json=body) as answer:
        assert answer.headers["x-kv-route-reason"] == "no-prefix"
        assert answer.headers["x-kv-cached-tokens"] == "0"


@pytest.mark.long
async def test_a_server_that_is_killed_costs_no_request_that_had_not_begun(
    router: Router, servers: list[ServerProcess], client: aiohttp.ClientSession
) -> None:
    body = {
        "text": "One day",
        "sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True},
    }

    async def ask(number: int) -> int:
        async with client.post(router.url + "/generate", json={**body, "text": f"Day {number}"}) as answer:
            await answer.read()
            return answer.status

    requests = [asyncio.create_task(ask(number)) for number in range(16)]
    await until(lambda: running(servers) > 4)
    for pid in servers[1].processes("sglang::scheduler"):
        os.kill(pid, signal.SIGKILL)
    assert await asyncio.gather(*requests) == [200] * 16
    assert await asyncio.gather(*(ask(number) for number in range(16))) == [200] * 16
    await until(lambda: len(router.fleet.usable()) == 1)
