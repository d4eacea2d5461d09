"""Hints where each instance has two ranks: KV is brought to HBM on both, from DRAM, disk and a peer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from dram_damage import arena_files, make_huge, snapshot
from token_requests import advise, cold, generate, random_prompt, settled

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import Match
from sglang_ext.testing.waiting import until, wait_until
from sglang_ext.tiers import Tier
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long]

BLOCK = 16
BLOCKS = 20
TOKENS = BLOCKS * BLOCK
NS = ("tokens", None, None, None)
PUSHING = 900


@pytest.fixture(scope="module")
def port() -> int:
    """Where each test's router listens, and the servers look for it."""
    return free_port()


@pytest.fixture(scope="module")
def servers(
    port: int, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard
) -> Iterator[dict[str, ServerProcess]]:
    """By URL."""
    started = [
        ServerProcess(
            ServerSpec(
                flags=(
                    *("--tp", "2", "--radix-cache-backend", "global", "--kv-check"),
                    *("--kv-instance-id", name, "--kv-router", f"http://127.0.0.1:{port}"),
                    *("--kv-load-policy", "always", "--kv-dram-size", "16MB"),
                    *("--kv-disk-path", str(tmp_path_factory.mktemp(name)), "--kv-disk-size", "1GB"),
                    *("--max-total-tokens", "2048", "--chunked-prefill-size", "256", "--enable-metrics"),
                    *("--kv-layer-region-size", "1GB"),
                ),
                environment={
                    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
                    **STRICT,
                },
            )
        )
        for name in ("a", "b")
    ]
    try:
        with leak_guard.adopting(), ThreadPoolExecutor() as each:
            list(each.map(lambda server: server.start(), started))
        for server in started:  # compile now, before the tests, all that is compiled at first use
            server.generate(list(range(100, 1000)), max_new_tokens=2)
            server.flush()
        yield {server.url: server for server in started}
    finally:
        for server in started:
            server.stop()


@pytest.fixture
async def router(port: int, servers: dict[str, ServerProcess]) -> AsyncIterator[Router]:
    async with Router(RouterConfig(port=port, policy="least-load")) as router:
        router.agents.verdict_s = 20.0
        await until(lambda: all(router.trees.trusted(url) for url in servers), 30, "both servers")
        await until(lambda: len(router.fleet.usable()) == 2, 30, "both servers")
        yield router
        router.check()


def held(router: Router, server: ServerProcess, prompt: list[int]) -> Match:
    return router.trees.match(NS, encode_tokens(prompt)).get(server.url, Match(0))


def prefetched(server: ServerProcess) -> dict[str, float]:
    """Blocks brought from DRAM to HBM ahead of their request, by rank."""
    name = 'sglang_ext_cache_dram_blocks_total{event="prefetched",tp_rank="%d"}'
    metrics = server.metrics()
    return {str(rank): metrics.get(name % rank, 0.0) for rank in range(2)}


async def pushed_out(
    client: aiohttp.ClientSession, router: Router, server: ServerProcess, prompt: list[int], tier: str
) -> None:
    """Others are served until a prompt's KV is in DRAM only, or on disk only."""
    rng = random.Random(tier)
    for _ in range(40):
        match = held(router, server, prompt)
        if match.tokens >= TOKENS and (
            match.below.get(Tier.DISK, 0) >= TOKENS if tier == "disk" else not match.hbm
        ):
            return
        await generate(client, server.url, random_prompt(rng, PUSHING))
    raise AssertionError(f"still {held(router, server, prompt)}")


@asynccontextmanager
async def busy(
    client: aiohttp.ClientSession, router: Router, servers: dict[str, ServerProcess]
) -> AsyncIterator[ServerProcess]:
    """Another client's long answer keeps one of the servers busy while the block runs: the yielded one."""
    body = {
        "text": "Go on. ",
        "stream": True,
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
    }
    async with client.post(f"{router.url}/generate", json=body) as response:
        yield servers[response.headers["x-kv-instance"]]
        response.close()
    await until(lambda: not any(row.in_flight for row in router.fleet.rows.values()), 30, "the end of it")


async def brought_and_hit(
    client: aiohttp.ClientSession, router: Router, server: ServerProcess, prompt: list[int]
) -> tuple[Answer, Answer]:
    """A hint brings a prompt's KV to a server's HBM, alike on both ranks, and its request finds it there;
    returns the answer without any cache, and the answer with the hint."""
    before = prefetched(server)
    told = await advise(client, router, input_ids=prompt)
    assert told["instance"] == server.url
    assert told["tokens"]["hbm"] == 0
    ready = await settled(client, router, told["id"])
    assert (ready["state"], ready["moved_tokens"]) == ("ready", TOKENS)
    wanted = {rank: blocks + BLOCKS for rank, blocks in before.items()}
    await asyncio.to_thread(wait_until, lambda: prefetched(server) == wanted, seconds=20, what="both ranks")
    answer, headers = await generate(client, router.url, [*prompt, 7])
    assert headers["x-kv-route-reason"] == "advised"
    assert (answer.hbm_tokens, answer.dram_tokens, answer.disk_tokens) == (TOKENS, 0, 0)
    return await cold(client, server, [*prompt, 7]), answer


@pytest.mark.parametrize("tier", ["dram", "disk"])
async def test_a_hint_brings_kv_up_on_both_ranks(tier, servers, router, client, rng) -> None:
    server = next(iter(servers.values()))
    prompt = random_prompt(rng, TOKENS)
    await generate(client, server.url, prompt)
    await until(lambda: held(router, server, prompt).tokens >= TOKENS, 20, "the index")
    await pushed_out(client, router, server, prompt, tier)
    assert_same(*await brought_and_hit(client, router, server, prompt))


async def test_a_hint_brings_kv_from_a_peer_on_both_ranks(servers, router, client, rng) -> None:
    async with busy(client, router, servers) as owner:
        (other,) = (server for server in servers.values() if server is not owner)
        prompt = random_prompt(rng, TOKENS)
        await generate(client, owner.url, prompt)
        await until(lambda: held(router, owner, prompt).tokens >= TOKENS, 30, "the index")
        assert_same(*await brought_and_hit(client, router, other, prompt))


async def test_layer_0_of_what_does_not_fit_is_held_on_both_ranks(servers, router, client, rng) -> None:
    server, other = servers.values()
    router.fleet.drain(other.url, "an idle server would get every second hint")
    name = 'sglang_ext_cache_layer_region_block_layers_total{event="%s",tp_rank="%d"}'

    def counted(event: str) -> list[float]:
        metrics = server.metrics()
        return [metrics.get(name % (event, rank), 0.0) for rank in range(2)]

    prompts = [random_prompt(rng, TOKENS) for _ in range(8)]
    for prompt in prompts:  # more than HBM holds
        await generate(client, server.url, prompt)
    await until(lambda: all(held(router, server, prompt).tokens >= TOKENS for prompt in prompts), 20, "index")
    filled, used = counted("filled"), counted("used")
    for prompt in prompts:
        told = await advise(client, router, input_ids=prompt)
        assert told["instance"] == server.url
        await settled(client, router, told["id"])
    await asyncio.to_thread(
        wait_until, lambda: min(counted("filled")) >= max(filled) + BLOCKS, seconds=20, what="layers"
    )
    for prompt in reversed(prompts):
        answer, _ = await generate(client, router.url, [*prompt, 7])
        assert answer.cached_tokens == TOKENS
        assert_same(await cold(client, server, [*prompt, 7]), answer)
    await asyncio.to_thread(
        wait_until, lambda: min(counted("used")) > max(used), seconds=20, what="their use"
    )
    assert len(set(counted("used"))) == 1


async def test_a_damaged_byte_of_one_rank_is_another_answer(servers, router, client, rng) -> None:
    """The twin: the comparison covers the KV that the hint has loaded, on either rank."""
    server = next(iter(servers.values()))
    server.flush()
    arenas = arena_files(server.pid)
    assert len(arenas) == 2
    empty = [snapshot(arena) for arena in arenas]
    prompt = random_prompt(rng, TOKENS)
    await generate(client, server.url, prompt)
    await until(lambda: held(router, server, prompt).tokens >= TOKENS, 20, "the index")

    def last_change() -> int:
        now = snapshot(arenas[1])
        changed = np.flatnonzero(now != empty[1])
        return int(changed[-1]) if changed.size and np.array_equal(now, snapshot(arenas[1])) else 0

    last = await asyncio.to_thread(wait_until, last_change, seconds=20, what="write-through")
    for _ in range(3):  # more than HBM holds, less than DRAM
        await generate(client, server.url, random_prompt(rng, PUSHING))
    assert not held(router, server, prompt).hbm
    make_huge(arenas[1], last)
    expected, damaged = await brought_and_hit(client, router, server, prompt)
    with pytest.raises(AssertionError):
        assert_same(expected, damaged)
    server.flush()
