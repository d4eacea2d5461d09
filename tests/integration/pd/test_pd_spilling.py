"""An idle prefill server keeps KV that another one evicts from its DRAM (KVDirect, section 7).

Two prefill servers and a decode server, which keeps no KV, so that blocks evicted by prefill are lost. The
test chooses the prefill server that computes.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
from dram_damage import arena_files, last_change, make_huge, snapshot
from pd_fleet import COMMON, nothing_is_left
from token_requests import GREEDY, generate, random_prompt

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import Costs, Decision, Fleet, Match, Matches, PolicyOptions, Prompt, Reason
from sglang_ext.router.policies.base import Role
from sglang_ext.testing.waiting import until, wait_until
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BLOCK = 16
TOKENS = 40 * BLOCK
BLOCK_BYTES = 16 * 4 * 2 * 4 * 32 * 4
NS = ("tokens", None, None, None)

where = ""
"""URL of the server that prefills next."""


def chosen(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """The test's policy."""
    (decode,) = (known.name for known in fleet if known.role is Role.DECODE)
    return Decision(where, Reason.LEAST_LOAD, decode=decode)


@dataclass
class Servers:
    pd: PdServers
    port: int

    @property
    def small(self) -> ServerProcess:
        return self.pd.prefill[0].server

    @property
    def idle(self) -> ServerProcess:
        return self.pd.prefill[1].server


@pytest.fixture(scope="module")
def servers(leak_guard: LeakGuard) -> Iterator[Servers]:
    port = free_port()
    tells = ("--kv-router", f"http://127.0.0.1:{port}", "--enable-cache-report", "--kv-pd-caching", "1")
    spec = ServerSpec(flags=(*COMMON, "--kv-load-policy", "always", *tells))

    def prefill(blocks: int) -> ServerSpec:
        size = ("--kv-dram-size", str(blocks * (BLOCK_BYTES + 8) + 8), "--max-total-tokens", "2048")
        return replace(
            spec, flags=(*spec.flags, *size, "--kv-dram-size", f"for-others={200 * (BLOCK_BYTES + 8)}")
        )

    with leak_guard.adopting(), pd_servers([prefill(200), prefill(400)], [spec]) as (pd, _):
        yield Servers(pd, port)


class Rig:
    """A router in front of them, and the test's requests to it."""

    def __init__(self, router: Router, servers: Servers, client: aiohttp.ClientSession) -> None:
        self.router, self.servers, self.client = router, servers, client
        self.rng = random.Random(19)

    async def turn(self, server: ServerProcess, prompt: list[int], session: str) -> tuple[Answer, Any]:
        global where
        where = server.url
        answer, headers = await generate(self.client, self.router.url, prompt, session=session)
        assert headers["x-kv-prefill-instance"] == server.url
        return answer, headers

    def held(self, server: ServerProcess, prompt: list[int]) -> int:
        return self.router.trees.match(NS, encode_tokens(prompt)).get(server.url, Match(0)).tokens

    async def conversation(self, session: str) -> list[int]:
        prompt = random_prompt(self.rng, TOKENS + 3)
        await self.turn(self.servers.small, prompt, session)
        await until(lambda: self.held(self.servers.small, prompt) >= TOKENS, 30, "the index")
        return prompt

    async def spilled(self) -> list[int]:
        """A conversation that the small server has evicted, and the idle one keeps."""
        prompt = await self.conversation("first")
        for number in range(4):
            await self.conversation(f"other {number}")
        await until(lambda: self.held(self.servers.idle, prompt) >= TOKENS, 30, "it to be kept")
        return prompt

    async def evicted(self, prompt: list[int]) -> None:
        for number in range(20):
            if not self.held(self.servers.small, prompt):
                return
            await self.conversation(f"more {number}")
        raise AssertionError("it is not evicted")


@asynccontextmanager
async def routing(servers: Servers, client: aiohttp.ClientSession) -> AsyncIterator[Rig]:
    for server in servers.pd.servers:
        await asyncio.to_thread(server.flush)
    # A decode server that keeps nothing does not register.
    decode = (servers.pd.decode[0].url,)
    config = RouterConfig(
        port=servers.port, worker_urls=decode, policy=f"{__name__}:chosen", explain_routing=True
    )
    async with Router(config) as router:
        urls = [server.url for server in servers.pd.servers]
        await until(lambda: len(router.fleet.usable()) == len(urls), 60, "all servers")
        prefills = (servers.small.url, servers.idle.url)
        await until(lambda: all(router.trees.trusted(url) for url in prefills), 60, "prefill's blocks")
        await until(lambda: router.spilling.is_on, 30, "their idle room")
        router.fetching.least_wait_s = 8.0
        router.agents.verdict_s = 20.0
        yield Rig(router, servers, client)
        router.check()


async def test_an_idle_prefill_server_keeps_what_another_has_evicted(
    servers: Servers, truth: ServerProcess, client: aiohttp.ClientSession
) -> None:
    async with routing(servers, client) as rig:
        prompt = await rig.spilled()
        await rig.evicted(prompt)
        asked = [*prompt, 7, 8, 9]
        answer, headers = await rig.turn(servers.small, asked, "first")
        assert headers["x-kv-fetch-source"] == servers.idle.url
        assert answer.cached_tokens == TOKENS
        expected = await asyncio.to_thread(truth.generate, asked, max_new_tokens=GREEDY["max_new_tokens"])
        assert_same(expected, answer)
        nothing_is_left(servers.pd.servers)


async def test_one_damaged_byte_of_what_is_kept_is_another_answer(
    servers: Servers, truth: ServerProcess, client: aiohttp.ClientSession
) -> None:
    """The twin of the test above, where it is used instead of fetched back."""
    async with routing(servers, client) as rig:
        (arena,) = arena_files(servers.idle.pid)
        # Of the prompts of the test above, the blocks may still have the bytes.
        rig.rng.seed(20)
        before = snapshot(arena)
        prompt = await rig.spilled()
        last = await asyncio.to_thread(
            wait_until, lambda: last_change(arena, before), seconds=30, what="DRAM"
        )
        make_huge(arena, last)
        asked = [*prompt, 7, 8, 9]
        answer, _ = await rig.turn(servers.idle, asked, "first")
        assert answer.cached_tokens == TOKENS
        expected = await asyncio.to_thread(truth.generate, asked, max_new_tokens=GREEDY["max_new_tokens"])
        with pytest.raises(AssertionError):
            assert_same(expected, answer)
