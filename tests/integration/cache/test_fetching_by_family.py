"""KV, windows and states of models of each family that one server has computed are read by another: answers
are those of no cache. Two servers and a router. Both turns of a conversation go to the servers in turn, so
that the second finds the first one's blocks at the other server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from dram_damage import arena_files, last_change, make_huge, snapshot
from test_hybrid_tiers import LISTED, STATES, WINDOWS
from token_requests import cold, generate, random_prompt

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import Match
from sglang_ext.testing.waiting import until, wait_until
from tests.support.compare import assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

TOKENS = 320
NS = ("tokens", None, None, None)
MODELS = [
    pytest.param(("tiny-spark", WINDOWS), id="tiny-spark"),
    pytest.param(("tiny-gdn", STATES), id="tiny-gdn", marks=pytest.mark.long),
    *(
        pytest.param((name, (*WINDOWS, *flags)), id=name, marks=pytest.mark.long)
        for name, flags in (("tiny-mimo", LISTED), ("tiny-gemma4", LISTED), ("tiny-step", ()))
    ),
    *(
        pytest.param((name, ("--page-size", "16")), id=name, marks=pytest.mark.long)
        for name in ("tiny-moe", "tiny-mla", "tiny-mla-moe", "tiny-gemma3")
    ),
]
Pair = tuple[int, list[ServerProcess]]


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, leak_guard: LeakGuard) -> Iterator[Pair]:
    """The router's port and two servers."""
    (model, flags), port = request.param, free_port()
    specs = [
        ServerSpec(
            model=model,
            flags=(
                *("--radix-cache-backend", "global", "--kv-check", "--kv-instance-id", name, *flags),
                *("--kv-router", f"http://127.0.0.1:{port}", "--kv-dram-size", "64MB"),
                *("--max-total-tokens", "2048", "--max-running-requests", "2"),
                *("--chunked-prefill-size", "512", "--enable-metrics", "--enable-cache-report"),
            ),
            environment=STRICT,
        )
        for name in ("a", "b")
    ]
    servers = [ServerProcess(spec) for spec in specs]
    try:
        with leak_guard.adopting(), ThreadPoolExecutor() as each:
            list(each.map(ServerProcess.start, servers))
        yield port, servers
    finally:
        for server in servers:
            server.stop()


@asynccontextmanager
async def routing(pair: Pair) -> AsyncIterator[Router]:
    port, servers = pair
    async with Router(RouterConfig(port=port, policy="round-robin", explain_routing=True)) as router:
        await until(lambda: all(router.trees.trusted(server.url) for server in servers), 30, "both servers")
        await until(lambda: len(router.fleet.usable()) == 2, 30, "both servers")
        router.fetching.least_wait_s = 60.0  # the machine may be busy
        router.agents.verdict_s = 20.0
        yield router
        router.check()


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
async def test_what_one_has_computed_another_fetches(pair, client, rng, damaged: bool) -> None:
    servers = {server.url: server for server in pair[1]}
    async with routing(pair) as router:
        first = random_prompt(rng, TOKENS)
        arenas = {url: largest(server) for url, server in servers.items()}
        before = {url: await asyncio.to_thread(snapshot, arena) for url, arena in arenas.items()}
        answer, headers = await generate(client, router.url, first)
        owner = headers["x-kv-instance"]
        said = [*first, *answer.tokens[:-1]]  # the last token of an answer was never computed
        whole = len(said) // 16 * 16
        await until(
            lambda: router.trees.match(NS, encode_tokens(said)).get(owner, Match(0)).tokens >= whole,
            30,
            "the index",
        )
        last = await asyncio.to_thread(
            wait_until, lambda: last_change(arenas[owner], before[owner]), seconds=30, what="DRAM"
        )
        if damaged:
            await asyncio.to_thread(make_huge, arenas[owner], last)
        second = [*said, answer.tokens[-1], *random_prompt(rng, 40)]
        warm, headers = await generate(client, router.url, second)
        reader = headers["x-kv-instance"]
        assert reader != owner
        assert headers["x-kv-fetch"] in ("done", "under-way")
        assert headers["x-kv-fetch-source"] == owner
        assert (warm.hbm_tokens, warm.disk_tokens) == (0, 0)
        assert warm.dram_tokens >= whole
        compared = await cold(client, servers[reader], second)
        if damaged:
            with pytest.raises(AssertionError):
                assert_same(compared, warm)
        else:
            assert_same(compared, warm)
        for server in servers.values():
            await asyncio.to_thread(server.flush)


def largest(server: ServerProcess) -> Path:
    """The DRAM of the KV of every token, which has the most."""
    return max(arena_files(server.pid), key=lambda path: path.stat().st_size)
