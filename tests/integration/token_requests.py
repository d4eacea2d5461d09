"""What tests of one server's cache behind a router share: prompts of token ids, and asking with them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import aiohttp

from sglang_ext.testing.compare import Answer

GREEDY = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}


async def until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Wait until a condition that is seen at once holds."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{what}: not within {seconds} s"
        await asyncio.sleep(0.01)


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
