"""No request ends a server, whatever its fields hold; a request that would is not passed to a whole fleet."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from fatal_token_server import FATAL_TOKEN
from field_fuzz import BASES, SECONDS, Case, cases, sample
from hooked_server import FOLDER
from router_rig import FLAGS, KEPT, SPECS

from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.api.dialect import DIALECTS
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

Json = dict[str, Any]
SHORT = 100
"""Requests to a server, and as many through the router, of the short form."""
GREEDY = {"temperature": 0, "max_new_tokens": 4}
LENGTHS = ("max_tokens", "max_new_tokens", "max_completion_tokens", "max_output_tokens", "num_predict")
HOLDERS = ("sampling_params", "parameters", "options")
"""Fields with which an answer may be as long as the context, which is short in the long form only."""

# No CPU server compiles anything: this one could not.
ALL = ServerSpec(
    flags=(*KEPT, "--context-length", "256", "--enable-custom-logit-processor"),
    environment={"CXX": "/nowhere/c++", "CC": "/nowhere/cc"},
)
FATAL = str(Path(__file__).parents[1] / "servers" / "fatal_token_server.py")

ORDINARY: dict[str, Json] = {
    "a repetition penalty": {"repetition_penalty": 1.1},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.5},
    "a bias": {"logit_bias": {"5": 1}},
    "no end yet": {"min_tokens": 2},
    "a seed": {"seed": 5, "temperature": 1},
    "bounds": {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "temperature": 1},
    "a regular expression": {"regex": "a+"},
    "a grammar": {"ebnf": 'root ::= "a"+'},
    "a schema": {"response_format": {"type": "json_object"}},
    "log probabilities": {"logprobs": True, "top_logprobs": 3},
    "choices": {"n": 2, "temperature": 1},
}
"""Fields of a chat for which a server sets something up at its first use."""

# Requests that ended a server, or were answered with 500, before they were refused by name.
REFUSED: list[tuple[str, Json, str]] = [
    ("/generate", {"text": "a", "sampling_params": {"top_k": 2**31}}, "top_k"),
    ("/generate", {"text": "a", "sampling_params": {"logit_bias": {"5": 1e300}}}, "logit_bias"),
    ("/generate", {"text": "a", "sampling_params": {"temperature": 1e300}}, "temperature"),
    ("/generate", {"text": "a", "priority": 2**31}, "priority"),
    ("/generate", {"text": "", "sampling_params": GREEDY}, "empty"),
    ("/generate", {"text": "a", "positional_embed_overrides": "(("}, "positional_embed_overrides"),
    ("/generate", {"text": "a", "sampling_params": {"n": 2**31}}, "n must be"),
    (
        "/generate",
        {"text": "a", "sampling_params": {**GREEDY, "min_new_tokens": 1, "stop_token_ids": [10**6]}},
        "",
    ),
    ("/generate", {"text": "a", "rid": ["x", "y"]}, "rid"),
    ("/v1/completions", {"prompt": "a", "max_tokens": 1, "logprobs": 2**31 - 1}, "logprobs"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "top_k": 2**31}, "top_k"),
]


@pytest.fixture(scope="module")
def server(get_server: Callable[[ServerSpec], ServerProcess]) -> ServerProcess:
    return get_server(SPECS[0])


@pytest.fixture
async def router(server: ServerProcess) -> AsyncIterator[Router]:
    async with Router(RouterConfig(worker_urls=(server.url,), port=0)) as router:
        yield router
        router.check()


def post(url: str, path: str, body: bytes, client: httpx.Client | None = None) -> tuple[int, str]:
    """(status, text) of the answer, over a connection of its own: SGLang closes those with a 500."""
    if client is None:
        with connections() as client:
            return post(url, path, body, client)
    answer = client.post(url + path, content=body, headers={"content-type": "application/json"})
    return answer.status_code, answer.text


def connections() -> httpx.Client:
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(timeout=SECONDS, trust_env=False, verify=False, limits=limits)


def answer_of(server: ServerProcess) -> list[int]:
    return server.generate([5, 6, 7], max_new_tokens=4).tokens


@pytest.mark.parametrize("path", ["direct", "routed"])
async def test_what_would_end_a_server_is_refused_by_name(
    path: str, server: ServerProcess, router: Router
) -> None:
    url = server.url if path == "direct" else router.url
    before = await asyncio.to_thread(answer_of, server)
    for api, body, words in REFUSED:
        status, text = await asyncio.to_thread(post, url, api, json.dumps(body).encode())
        assert status == 400, (body, text)
        assert words in text, (body, text)
    for name, fields in ORDINARY.items():
        chat = {"messages": [{"role": "user", "content": "a"}], "temperature": 0, "max_tokens": 3, **fields}
        status, text = await asyncio.to_thread(post, url, "/v1/chat/completions", json.dumps(chat).encode())
        assert status == 200, (name, text)
    assert await asyncio.to_thread(answer_of, server) == before


def survives(url: str, server: ServerProcess, found: list[Case], routed: bool) -> Counter[int]:
    """Send requests one by one. Returns how often each status came."""
    statuses: Counter[int] = Counter()
    with connections() as client:
        for case in found:
            status, text = post(url, case.path, case.body, client)
            statuses[status] += 1
            assert server.running, case
            assert status < 500 or (status == 500 and not routed), f"{case}: {text}"
    return statuses


def short(case: Case) -> bool:
    """Whether the answer to a request is short whatever the model's context is."""
    name = case.field.rpartition(".")[2]
    return case.path in BASES and name not in LENGTHS and case.field not in HOLDERS


async def test_no_field_ends_a_server(server: ServerProcess, router: Router) -> None:
    """A few of all; the long form has all of them."""
    found = [case for case in cases(server.get("/openapi.json")) if short(case)]
    ours = [case for case in found if case.path in DIALECTS]
    assert len(found) > 10_000
    before = await asyncio.to_thread(answer_of, server)
    await asyncio.to_thread(survives, server.url, server, sample(found, SHORT, 1), False)
    await asyncio.to_thread(survives, router.url, server, sample(ours, SHORT, 2), True)
    assert await asyncio.to_thread(answer_of, server) == before


@pytest.mark.long
@pytest.mark.parametrize("path", ["direct", "routed"])
async def test_no_field_of_any_api_ends_a_server_without_a_compiler(path: str) -> None:
    server = ServerProcess(ALL)
    await asyncio.to_thread(server.start)
    try:
        async with Router(RouterConfig(worker_urls=(server.url,), port=0)) as router:
            found = cases(await asyncio.to_thread(server.get, "/openapi.json"))
            url, routed = (server.url, False) if path == "direct" else (router.url, True)
            sent = [case for case in found if case.path in DIALECTS] if routed else found
            before = await asyncio.to_thread(answer_of, server)
            statuses = await asyncio.to_thread(survives, url, server, sent, routed)
            assert await asyncio.to_thread(answer_of, server) == before
            print(f"{len(sent)} requests, {path}: {dict(statuses)}, no server ended")
    finally:
        await asyncio.to_thread(server.stop)


@pytest.mark.long
async def test_a_request_that_ends_its_server_ends_two_of_four(
    tmp_path: Path, client: aiohttp.ClientSession
) -> None:
    """However often it is sent; requests beside it are answered by the others."""
    spec = ServerSpec(flags=FLAGS, run=(FATAL,), environment={FOLDER: str(tmp_path)})
    servers = [ServerProcess(spec) for _ in range(4)]
    try:
        await asyncio.gather(*(asyncio.to_thread(server.start) for server in servers))
        urls = tuple(server.url for server in servers)
        async with Router(RouterConfig(worker_urls=urls, port=0, policy="round-robin")) as router:

            async def ask(ids: list[int]) -> tuple[int, Json]:
                body = {"input_ids": ids, "sampling_params": {**GREEDY, "ignore_eos": True}}
                async with client.post(router.url + "/generate", json=body) as answer:
                    return answer.status, await answer.json()

            for number in range(4):
                (status, said), *beside = await asyncio.gather(
                    ask([5, FATAL_TOKEN, 6]), *(ask([7, number, each]) for each in range(4))
                )
                assert status == 500
                assert said["error"]["code"] == "request_ends_servers"
                assert {status for status, _ in beside} <= {200, 500}
                assert sum(server.running for server in servers) >= 2
            for each in range(6):
                assert (await ask([8, 9, each]))[0] == 200
    finally:
        await asyncio.gather(*(asyncio.to_thread(server.stop) for server in servers))
