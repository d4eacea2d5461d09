"""Servers of a vision model behind a router, which knows prompts up to their first picture: two colocated,
and prefill and decode apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
from pictures import MODEL, TOKEN_BYTES, picture
from token_requests import advise, settled

from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.index.prompt_trees import GUESS_SPAN_S, GUESS_TTL_S
from sglang_ext.testing.waiting import until
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long]

BLOCK = 16
RULES = "Say which plant it is by the form of its leaf and by its flower. " * 60


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def both(port: int, leak_guard: LeakGuard) -> Iterator[list[ServerProcess]]:
    def spec(name: str) -> ServerSpec:
        flags = (
            *("--radix-cache-backend", "global", "--kv-check", "--kv-instance-id", name),
            *("--kv-router", f"http://127.0.0.1:{port}", "--kv-load-policy", "always"),
            *("--kv-dram-size", str(8000 * TOKEN_BYTES), "--max-total-tokens", "8000"),
            *("--chunked-prefill-size", "512", "--enable-cache-report"),
        )
        return ServerSpec(model=MODEL, flags=flags, environment=STRICT)

    servers = [ServerProcess(spec(name)) for name in "ab"]
    try:
        with leak_guard.adopting(), ThreadPoolExecutor() as each:
            list(each.map(ServerProcess.start, servers))
        yield servers
    finally:
        for server in servers:
            server.stop()


def chat(number: int | None, rules: str = RULES) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "Which plant is this?"}]
    if number is not None:
        parts.append({"type": "image_url", "image_url": {"url": picture(number)}})
    messages = [{"role": "system", "content": rules}, {"role": "user", "content": parts}]
    return {"messages": messages, "temperature": 0, "max_tokens": 12, "stream": False}


async def ask(client: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[str, int, Any]:
    """The answer, its cached tokens, and its headers."""
    async with client.post(f"{url}/v1/chat/completions", json={"model": "m", **body}) as response:
        assert response.status == 200, await response.text()
        answer = await response.json()
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return answer["choices"][0]["message"]["content"], cached, response.headers


@pytest.mark.timeout(600)
async def test_what_comes_before_a_picture_is_matched_fetched_and_prefetched(
    both: list[ServerProcess], port: int, client: aiohttp.ClientSession
) -> None:
    first, second = (server.url for server in both)
    config = RouterConfig(port=port, policy="round-robin", explain_routing=True)
    async with Router(config) as router:
        await until(lambda: all(router.trees.trusted(url) for url in (first, second)), 60, "both servers")
        await until(lambda: len(router.fleet.usable()) == 2, 60, "both servers")
        await until(lambda: router.tokenizers.trust.chat, 60, "the comparison of tokens")
        router.fetching.least_wait_s = 60.0
        # A conversation of text alone is known token by token.
        _, _, headers = await ask(client, router.url, chat(None))
        owner = headers["x-kv-instance"]
        reader = second if owner == first else first
        await until(lambda: router.trees.tokens_of(owner) > 600, 30, "the index")
        _, before, _ = await ask(client, owner, chat(None))
        assert before > 600
        # The other server reads the tokens before the picture, and computes the picture.
        colds = [
            (await ask(client, owner, {**chat(number), "cache_salt": f"cold {number}"}))[0]
            for number in (1, 2)
        ]
        assert colds[0] != colds[1], "the model does not see its pictures"
        for number, expected in enumerate(colds, 1):
            async with client.post(f"{reader}/flush_cache") as response:
                assert response.status == 200
            await until(lambda: router.trees.tokens_of(reader) == 0, 30, "the index")
            await asyncio.sleep(GUESS_TTL_S + GUESS_SPAN_S)
            # The servers take turns.
            while (await ask(client, router.url, chat(None, "Hello.")))[2]["x-kv-instance"] != owner:
                pass
            answer, cached, headers = await ask(client, router.url, chat(number))
            assert headers["x-kv-instance"] == reader
            assert answer == expected
            assert headers["x-kv-fetch"] in ("done", "under-way")
            assert headers["x-kv-fetch-source"] == owner
            assert cached >= before // BLOCK * BLOCK
            async with client.get(f"{router.url}/explain/{headers['x-request-id']}") as response:
                told = (await response.json())["prompt"]
            assert told["matched_by"] == "tokens before the first picture, then text"
        # A hint brings up the same.
        hint = await advise(client, router, messages=chat(3)["messages"], ttl_s=60)
        ended = await settled(client, router, hint["id"])
        tokens = hint["tokens"]
        assert ended["state"] == "ready", ended
        assert before <= sum(tokens.values()) - tokens.get("nowhere", 0) <= sum(tokens.values()) < before + 40
        answer, cached, headers = await ask(client, router.url, chat(3))
        assert headers["x-kv-instance"] == hint["instance"]
        assert headers["x-kv-route-reason"] == "advised"
        assert cached >= before // BLOCK * BLOCK
        router.check()


@pytest.fixture(scope="module")
def apart(leak_guard: LeakGuard) -> Iterator[tuple[PdServers, ServerProcess, int]]:
    """Prefill and decode, a server that keeps nothing, and the port where the first two look for a router."""
    port = free_port()
    flags = (
        *("--kv-router", f"http://127.0.0.1:{port}", "--kv-check", "--kv-pd-caching", "3"),
        *("--kv-dram-size", str(8000 * TOKEN_BYTES), "--kv-load-policy", "always"),
        *("--max-total-tokens", "2400", "--chunked-prefill-size", "512", "--enable-cache-report"),
    )
    base = ServerSpec(model=MODEL, flags=flags, environment=STRICT)
    alone = ServerSpec(model=MODEL, flags=("--max-total-tokens", "2400", "--disable-radix-cache"))
    with leak_guard.adopting(), pd_servers([base], [base], [alone]) as (pair, (truth,)):
        yield pair, truth, port


@pytest.mark.timeout(900)
async def test_prefill_and_decode_behind_a_router_answer_about_pictures(
    apart: tuple[PdServers, ServerProcess, int], client: aiohttp.ClientSession
) -> None:
    """Cold, from HBM, and after its KV has left HBM. The effect of damage is in `test_pictures.py`."""
    pair, truth, port = apart
    prefill = pair.prefill[0].server
    async with Router(RouterConfig(port=port)) as router:
        await until(lambda: len(router.fleet.usable()) == 2, 60, "prefill and decode")
        await until(lambda: router.tokenizers.trust.chat, 60, "the comparison of tokens")
        right = {number: (await ask(client, truth.url, chat(number)))[0] for number in (1, 2)}
        assert right[1] != right[2], "the model does not see its pictures"
        shared = 0
        for number in (1, 2):
            answer, shared, _ = await ask(client, router.url, chat(number))
            assert answer == right[number]
        answer, whole, headers = await ask(client, router.url, chat(1))
        assert answer == right[1]
        assert headers["x-kv-prefill-instance"] == prefill.url
        assert whole >= shared + BLOCK > 600, "the picture's KV was not found"
        for seed in range(4):  # until all of it has left HBM
            await ask(client, router.url, chat(None, f"{seed} " + RULES))
        answer, cached, _ = await ask(client, router.url, chat(1))
        assert (answer, cached) == (right[1], whole)
        router.check()
