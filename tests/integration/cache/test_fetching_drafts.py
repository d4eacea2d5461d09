"""Speculative decoding where a prompt's KV comes from another server: the draft model's KV comes with it, and
guesses are as good as those of SGLang's own cache after a hit in HBM.

Two servers and a router, which sends them requests in turn, and a server with SGLang's own cache. The draft
has the model's weights, so that it guesses well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dram_damage import arena_files, last_change, make_huge, snapshot
from token_requests import NAMESPACE, random_prompt

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import Match
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import until, wait_until
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long]

BLOCK = 16
TOKENS = 20 * BLOCK
NEW_TOKENS = 24
WINDOWED = "tiny-spark"


@dataclass(frozen=True)
class Drafted:
    """An answer, the passes of the model that it took, and the tokens that it accepted in each on average."""

    answer: Answer
    passes: int
    accepted: float


@dataclass(frozen=True)
class Pair:
    """port: of the router. servers: that fetch from each other. stock: with SGLang's own cache."""

    port: int
    servers: list[ServerProcess]
    stock: ServerProcess


@pytest.fixture(scope="module", params=["tiny", WINDOWED])
def pair(request: pytest.FixtureRequest, leak_guard: LeakGuard) -> Iterator[Pair]:
    model, port = request.param, free_port()
    weights = model_path(model)
    common = (
        *("--model-path", str(weights), "--speculative-algorithm", "STANDALONE"),
        *("--speculative-draft-model-path", str(weights), "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        *("--max-total-tokens", "2048", "--max-running-requests", "2", "--chunked-prefill-size", "256"),
        *(("--page-size", "16", "--swa-full-tokens-ratio", "0.5") if model == WINDOWED else ()),
    )
    ours = (
        *("--radix-cache-backend", "global", "--kv-check", "--kv-router", f"http://127.0.0.1:{port}"),
        *("--kv-dram-size", "64MB", "--enable-cache-report"),
    )
    specs = [
        ServerSpec(model=model, flags=(*common, *ours, "--kv-instance-id", name), environment=STRICT)
        for name in ("a", "b")
    ]
    servers = [ServerProcess(spec) for spec in (*specs, ServerSpec(model=model, flags=common))]
    try:
        with leak_guard.adopting(), ThreadPoolExecutor() as each:
            list(each.map(ServerProcess.start, servers))
        yield Pair(port, servers[:2], servers[2])
    finally:
        for server in servers:
            server.stop()


@asynccontextmanager
async def routing(pair: Pair) -> AsyncIterator[Router]:
    async with Router(RouterConfig(port=pair.port, policy="round-robin")) as router:
        await until(lambda: all(router.trees.trusted(each.url) for each in pair.servers), 30, "both servers")
        await until(lambda: len(router.fleet.usable()) == 2, 30, "both servers")
        router.fetching.least_wait_s = 60.0  # the machine may be busy
        router.agents.verdict_s = 20.0
        yield router
        router.check()


async def ask(client: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[Drafted, Any]:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    async with client.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        found = await response.json()
    meta = found["meta_info"]
    return Drafted(Answer.of(found), meta["spec_verify_ct"], meta["spec_accept_length"]), response.headers


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit of the draft"])
async def test_the_draft_guesses_from_a_peers_kv_as_from_hbm(pair: Pair, client, rng, damaged: bool) -> None:
    """Two turns; the second one's server fetches the first. The twin: the guesses depend on the draft's KV,
    and the answers do not."""
    prompt = random_prompt(rng, TOKENS + 4)
    first, _ = await ask(client, pair.stock.url, prompt)
    said = [*prompt, *first.answer.tokens]
    whole = (len(said) - 1) // BLOCK * BLOCK  # the last token of an answer was never computed
    later = [*said, *random_prompt(rng, 5)]
    stock, _ = await ask(client, pair.stock.url, later)
    assert stock.answer.hbm_tokens >= whole - BLOCK
    assert stock.accepted > 2, "the draft does not guess well"
    async with routing(pair) as router:
        arenas = {server.url: largest(server) for server in pair.servers}
        before = {url: await asyncio.to_thread(snapshot, arena) for url, arena in arenas.items()}
        cold, headers = await ask(client, router.url, prompt)
        owner = headers["x-kv-instance"]
        assert cold.answer.cached_tokens == 0
        assert_same(first.answer, cold.answer)
        assert (cold.passes, cold.accepted) == (first.passes, first.accepted)
        await until(lambda: held(router, owner, said) >= whole, 30, "the index")
        last = await asyncio.to_thread(
            wait_until, lambda: last_change(arenas[owner], before[owner]), seconds=30, what="DRAM"
        )
        if damaged:
            await asyncio.to_thread(make_huge, arenas[owner], last)
        fetched, headers = await ask(client, router.url, later)
        assert headers["x-kv-instance"] != owner
        assert headers["x-kv-fetch"] in ("done", "under-way")
        assert headers["x-kv-fetch-source"] == owner
        for server in pair.servers:
            await asyncio.to_thread(server.flush)
    assert (fetched.answer.hbm_tokens, fetched.answer.disk_tokens) == (0, 0)
    assert fetched.answer.dram_tokens >= whole - BLOCK
    assert_same(stock.answer, fetched.answer)
    if damaged:
        assert fetched.passes > stock.passes
    else:
        assert (fetched.passes, fetched.accepted) == (stock.passes, stock.accepted)


def held(router: Router, url: str, prompt: list[int]) -> int:
    return router.trees.match(NAMESPACE, encode_tokens(prompt)).get(url, Match(0)).tokens


def largest(server: ServerProcess) -> Path:
    """The DRAM of the KV of every token, which has the most."""
    return max(arena_files(server.pid), key=lambda path: path.stat().st_size)
