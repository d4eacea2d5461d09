"""A server keeps KV that another one evicts from its DRAM, and answers are as if it had stayed.

Two servers and a router: ``small`` has DRAM for five conversations, ``idle`` has room. The test chooses the
server that answers; the router chooses the blocks to keep and their keeper.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dram_damage import arena_files, last_change, make_huge, snapshot
from hooked_server import FOLDER
from token_requests import cold, generate, random_prompt

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import Costs, Decision, Fleet, Match, Matches, PolicyOptions, Prompt, Reason
from sglang_ext.testing.waiting import until, wait_until
from sglang_ext.tiers import Tier
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
TOKENS = 40 * BLOCK
"""Tokens of a conversation's first turn; with the answer to it no further block is full."""
BLOCK_BYTES = 16 * 4 * 2 * 4 * 32 * 4
NS = ("tokens", None, None, None)
GATED = str(Path(__file__).parents[1].joinpath("servers", "gated_fetching_server.py"))
DRAM_BLOCKS = {"small": 200, "idle": 400}

where = ""
"""URL of the server that answers next."""


def chosen(prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions) -> Decision:
    """The test's policy."""
    return Decision(where, Reason.LEAST_LOAD)


class Pair:
    def __init__(self, port: int, folder: Path, leak_guard: LeakGuard) -> None:
        self._port, self._folder, self._leak_guard = port, folder, leak_guard
        self.servers: dict[str, ServerProcess] = {}

    def start(self, *names: str) -> None:
        for name in names:
            (self._folder / name).mkdir(exist_ok=True)
            spec = ServerSpec(
                run=(GATED,),
                flags=(
                    *("--radix-cache-backend", "global", "--kv-check", "--kv-instance-id", name),
                    *("--kv-router", f"http://127.0.0.1:{self._port}", "--kv-load-policy", "always"),
                    *("--kv-dram-size", str(DRAM_BLOCKS[name] * (BLOCK_BYTES + 8) + 8)),
                    *("--kv-dram-size", f"for-others={200 * (BLOCK_BYTES + 8)}"),
                    *("--max-total-tokens", "2048", "--enable-metrics"),
                    *("--chunked-prefill-size", "512", "--enable-cache-report"),
                ),
                environment={FOLDER: str(self._folder / name), **STRICT},
            )
            self.servers[name] = ServerProcess(spec)
        with self._leak_guard.adopting(), ThreadPoolExecutor() as each:
            list(each.map(lambda name: self.servers[name].start(), names))

    def complete(self) -> None:
        """Start others in place of those that have ended."""
        self.start(*(name for name, server in self.servers.items() if not server.running))

    def flush(self) -> None:
        for server in self.servers.values():
            server.flush()

    def gate(self, name: str) -> Path:
        return self._folder / name

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def both(port: int, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard) -> Iterator[Pair]:
    pair = Pair(port, tmp_path_factory.mktemp("gates"), leak_guard)
    try:
        pair.start("small", "idle")
        yield pair
    finally:
        pair.stop()


@pytest.fixture
def pair(both: Pair) -> Pair:
    both.complete()
    both.flush()
    return both


class Rig:
    """A router in front of the pair, and the test's requests to it."""

    def __init__(self, router: Router, pair: Pair, client: aiohttp.ClientSession) -> None:
        self.router, self.pair, self.client = router, pair, client
        self.small, self.idle = pair.servers["small"], pair.servers["idle"]
        self.rng = random.Random(19)

    async def turn(self, server: ServerProcess, prompt: list[int], session: str | None) -> tuple[Answer, Any]:
        global where
        where = server.url
        answer, headers = await generate(self.client, self.router.url, prompt, session=session)
        assert headers["x-kv-instance"] == server.url
        return answer, headers

    async def conversation(self, server: ServerProcess, session: str | None) -> list[int]:
        """A session's first turn, and its KV in DRAM."""
        prompt = random_prompt(self.rng, TOKENS + 3)
        await self.turn(server, prompt, session)
        await until(lambda: self.held(server, prompt).tokens >= TOKENS, 30, "the index")
        return prompt

    def held(self, server: ServerProcess, prompt: list[int]) -> Match:
        return self.router.trees.match(NS, encode_tokens(prompt)).get(server.url, Match(0))

    def kept(self, prompt: list[int]) -> bool:
        """Whether the idle server has it all, in DRAM alone."""
        return self.held(self.idle, prompt).below.get(Tier.DRAM, 0) >= TOKENS

    async def fill(self, conversations: int = 4) -> list[list[int]]:
        """Other conversations at the small server, which push out the earlier ones."""
        return [await self.conversation(self.small, f"other {n}") for n in range(conversations)]

    async def spilled(self) -> list[int]:
        """A conversation that the small server has evicted, and the idle one keeps."""
        prompt = await self.conversation(self.small, "first")
        await self.fill()
        await until(lambda: self.kept(prompt), 30, "the evicted KV to be kept")
        for number in range(20):
            if not self.held(self.small, prompt).tokens:
                return prompt
            await self.conversation(self.small, f"more {number}")
        raise AssertionError("it is not evicted")

    async def metric(self, name: str) -> float:
        async with self.client.get(f"{self.router.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def counted(server: ServerProcess, event: str) -> float:
    samples = server.metrics().items()
    name = "sglang_ext_cache_spilled_blocks_events_total{"
    return sum(v for k, v in samples if k.startswith(name) and f'event="{event}"' in k)


async def seen(server: ServerProcess, event: str, least: float) -> None:
    """Until a server has counted so many."""
    await asyncio.to_thread(
        wait_until, lambda: counted(server, event) >= least, seconds=30, what=f"{event} blocks"
    )


@asynccontextmanager
async def routing(pair: Pair, port: int, client: aiohttp.ClientSession, **flags: Any) -> AsyncIterator[Rig]:
    config = RouterConfig(port=port, policy=f"{__name__}:chosen", explain_routing=True, **flags)
    async with Router(config) as router:
        urls = [server.url for server in pair.servers.values()]
        await until(lambda: all(router.trees.trusted(url) for url in urls), 30, "both servers")
        await until(lambda: len(router.fleet.usable()) == 2, 30, "both servers")
        await until(lambda: router.spilling.is_on, 30, "their idle room")
        router.fetching.least_wait_s = 8.0
        router.agents.verdict_s = 20.0
        yield Rig(router, pair, client)
        router.check()


async def test_what_one_has_evicted_another_has_kept(pair, port, client) -> None:
    async with routing(pair, port, client) as rig:
        before = {event: counted(rig.idle, event) for event in ("kept", "exported")}
        prompt = await rig.spilled()
        await seen(rig.idle, "kept", before["kept"] + 40)
        asked = [*prompt, 7, 8, 9]
        answer, headers = await rig.turn(rig.small, asked, "first")
        assert headers["x-kv-fetch-source"] == rig.idle.url
        assert (answer.cached_tokens, answer.dram_tokens) == (TOKENS, TOKENS)
        assert_same(await cold(client, rig.small, asked), answer)
        await seen(rig.idle, "exported", before["exported"] + 40)
        async with client.get(f"{rig.router.url}/explain/{headers['x-request-id']}") as response:
            (told,) = (await response.json())["spilled"]
        assert (told["from"], told["to"], told["end"]) == (rig.small.url, rig.idle.url, "done")
        assert told["moved_tokens"] == TOKENS
        assert await rig.metric('sglang_ext_router_spills_total{how="done"}') >= 1
        assert await rig.metric('sglang_ext_router_spilled_blocks{tenant=""}') >= 40
        async with client.get(f"{rig.router.url}/cluster") as response:
            tiers = {each["instance"]: each["tiers"] for each in (await response.json())["instances"]}
        assert tiers["idle"]["dram"]["spilled"] >= 40
        assert tiers["small"]["dram"]["spilled"] == 0


async def test_one_damaged_byte_of_what_is_kept_is_another_answer(pair, port, client) -> None:
    """The twin of the test above: the comparison covers the kept KV."""
    async with routing(pair, port, client) as rig:
        (arena,) = arena_files(rig.idle.pid)
        # Of the prompts of the test above, the blocks may still have the bytes.
        rig.rng.seed(20)
        before = snapshot(arena)
        prompt = await rig.conversation(rig.small, "first")
        await rig.fill()
        await until(lambda: rig.kept(prompt), 30, "the evicted KV to be kept")
        last = await asyncio.to_thread(
            wait_until, lambda: last_change(arena, before), seconds=30, what="DRAM"
        )
        make_huge(arena, last)
        answer, _ = await rig.turn(rig.idle, [*prompt, 7, 8, 9], "first")
        assert answer.dram_tokens == TOKENS
        with pytest.raises(AssertionError):
            assert_same(await cold(client, rig.idle, [*prompt, 7, 8, 9]), answer)


async def test_it_is_used_where_it_is_kept(pair, port, client) -> None:
    async with routing(pair, port, client) as rig:
        prompt = await rig.spilled()
        used = counted(rig.idle, "used")
        asked = [*prompt, 7, 8, 9]
        answer, headers = await rig.turn(rig.idle, asked, "first")
        assert "x-kv-fetch" not in headers
        assert (answer.cached_tokens, answer.dram_tokens) == (TOKENS, TOKENS)
        assert_same(await cold(client, rig.idle, asked), answer)
        # Its own from now on: it stays when the server needs room. The request above is counted as its use.
        prompts = [await rig.conversation(rig.idle, f"own {n}") for n in range(9)]
        await seen(rig.idle, "used", used + 40)
        assert rig.held(rig.idle, prompts[-1]).tokens >= TOKENS


async def test_a_tenant_at_its_budget_has_nothing_more_kept(pair, port, client) -> None:
    async with routing(pair, port, client, spill_blocks_per_tenant=60) as rig:
        kept = counted(rig.idle, "kept")
        prompt = await rig.spilled()
        await rig.fill()
        await until(lambda: rig.router.spilling.taken()[""] == 40, 30, "the copies under way")
        for _ in range(60):
            if await rig.metric('sglang_ext_router_spills_total{how="tenant-budget"}'):
                break
            await rig.conversation(rig.small, "another")
        else:
            raise AssertionError("nothing was refused")
        assert rig.kept(prompt)
        assert counted(rig.idle, "kept") == kept + 40


async def test_its_own_needs_push_it_out_first(pair, port, client) -> None:
    async with routing(pair, port, client) as rig:
        own = [await rig.conversation(rig.idle, None) for _ in range(4)]
        prompt = await rig.spilled()
        given_up = counted(rig.idle, "given_up")
        own += [await rig.conversation(rig.idle, None) for _ in range(6)]  # all of its 400 blocks
        await until(lambda: not rig.held(rig.idle, prompt).tokens, 30, "the kept KV to go")
        await seen(rig.idle, "given_up", given_up + 40)
        assert all(rig.held(rig.idle, each).tokens >= TOKENS for each in own[1:])
        answer, _ = await rig.turn(rig.small, prompt, "first")
        assert_same(await cold(client, rig.small, prompt), answer)


async def test_one_that_dies_while_it_reads_costs_nothing(pair, port, client) -> None:
    async with routing(pair, port, client) as rig:
        (pair.gate("idle") / "hold").write_text("0")
        try:
            prompt = await rig.conversation(rig.small, "first")
            await rig.fill()
            await until(lambda: (pair.gate("idle") / "held").exists(), 30, "the read")
            for pid in rig.idle.processes("sglang::scheduler"):
                os.kill(pid, signal.SIGKILL)
            rig.idle.stop()
        finally:
            for name in ("hold", "held", "dead"):
                (pair.gate("idle") / name).unlink(missing_ok=True)
        assert rig.held(rig.small, prompt).tokens >= TOKENS
        answer, _ = await rig.turn(rig.small, prompt, "first")
        assert answer.cached_tokens == TOKENS
        assert_same(await cold(client, rig.small, prompt), answer)
        await until(lambda: not rig.router.spilling.taken(), 40, "the router to see that it is gone")
        await asyncio.to_thread(
            wait_until, lambda: given_back(rig.small), seconds=30, what="the end of its export"
        )


def given_back(server: ServerProcess) -> bool:
    """Whether nothing is locked for a reader any more."""
    found = {}
    for name, value in server.metrics().items():
        for event in ("exported", "given_back"):
            if name.startswith("sglang_ext_cache_peers_total{") and f'event="{event}"' in name:
                found[event] = found.get(event, 0.0) + value
    return found.get("exported") == found.get("given_back")
