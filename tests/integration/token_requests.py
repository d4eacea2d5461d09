"""For tests of one server's cache behind a router: prompts of token ids, and requests with them."""

from __future__ import annotations

import random
import time
from typing import Any

import aiohttp

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router
from tests.support.compare import Answer
from tests.support.servers.server import ServerProcess

NAMESPACE = ("tokens", None, None, None)
"""Of prompts without a salt, an adapter or a tenant."""
GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    return [rng.randrange(100, 30_000) for _ in range(tokens)]


async def generate(
    client: aiohttp.ClientSession, url: str, prompt: list[int], *, session: str | None = None, **fields: Any
) -> tuple[Answer, Any]:
    """The greedy answer to token ids, and the headers it came with. fields: of the request."""
    body = {
        "input_ids": prompt,
        "sampling_params": GREEDY,
        "return_logprob": True,
        "top_logprobs_num": 2,
        **fields,
    }
    headers = {} if session is None else {"x-session-id": session}
    async with client.post(f"{url}/generate", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return Answer.of(await response.json()), response.headers


async def cold(client: aiohttp.ClientSession, server: ServerProcess, prompt: list[int]) -> Answer:
    """The answer without any cache: its salt is new."""
    answer, _ = await generate(client, server.url, prompt, cache_salt=f"cold {time.monotonic_ns()}")
    assert answer.cached_tokens == 0
    return answer


async def advise(client: aiohttp.ClientSession, router: Router, **body: Any) -> dict[str, Any]:
    """Give a hint; returns the router's immediate answer."""
    async with client.post(f"{router.url}/v1/advisory", json=body) as response:
        told = await response.json()
        assert response.status == 200, told
        return dict(told)


def held_in_hbm(router: Router, server: ServerProcess, prompt: list[int]) -> int:
    """Tokens of a prompt that the server has in HBM, as far as the router knows."""
    match = router.trees.match(NAMESPACE, encode_tokens(prompt)).get(server.url)
    return 0 if match is None else match.hbm


async def settled(client: aiohttp.ClientSession, router: Router, id: str) -> dict[str, Any]:
    """The final state of a hint."""
    async with client.get(f"{router.url}/v1/advisory/{id}?wait_s=30") as response:
        return dict(await response.json())
