"""A router and two servers of a model with windows, or with states: full members of a cluster.

The answers are those of a lone server without our cache. Conversations go back to the server that has them,
in HBM, in DRAM or on disk, and a hint brings one from disk to DRAM.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import aiohttp
import numpy as np
import pytest
from dram_damage import arena_files, flip_bit, last_change, snapshot
from index_truth import assert_right
from token_requests import advise, generate, random_prompt, settled

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import Match
from sglang_ext.testing.waiting import until
from sglang_ext.tiers import Tier
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long]

NS = ("tokens", None, None, None)
BLOCK = 16
TURN = 160
CONVERSATIONS, TURNS = 4, 3
STATES = (
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule", "--page-size", "1"),
    *("--max-mamba-cache-size", "16"),
)
WINDOWS = ("--page-size", "16", "--swa-full-tokens-ratio", "0.5")
LISTED = ("--attention-backend", "intel_amx")
MODELS = {
    "tiny-spark": WINDOWS,
    "tiny-gdn": STATES,
    "tiny-mimo": (*WINDOWS, *LISTED),
    "tiny-gemma4": (*WINDOWS, *LISTED),
    "tiny-step": WINDOWS,
}
ENVIRONMENT = {"SGLANG_MAMBA_CONV_DTYPE": "float32", **STRICT}


def flags_of(model: str) -> tuple[str, ...]:
    limits = ("--max-total-tokens", "900", "--max-running-requests", "2", "--chunked-prefill-size", "128")
    return (*MODELS[model], *limits)


@dataclass
class Lone:
    """Conversations with a lone server without our cache: prompts of all turns, and its answers."""

    model: str
    prompts: list[list[list[int]]]
    answers: list[list[Answer]]
    fillers: list[list[int]]


@pytest.fixture(
    scope="module",
    params=list(MODELS),
)
def lone(request: pytest.FixtureRequest) -> Lone:
    rng = random.Random(3)
    found = Lone(request.param, [], [], [random_prompt(rng, 400) for _ in range(24)])
    with ServerProcess(
        ServerSpec(model=request.param, flags=flags_of(request.param), environment=ENVIRONMENT)
    ) as server:
        for _ in range(CONVERSATIONS):
            history: list[int] = []
            prompts, answers = [], []
            for _ in range(TURNS + 2):
                history = history + random_prompt(rng, TURN)
                prompts.append(history)
                answers.append(server.generate(history, max_new_tokens=8))
                history = history + answers[-1].tokens
            found.prompts.append(prompts)
            found.answers.append(answers)
    return found


@dataclass
class Pair:
    """Two servers of a cluster."""

    port: int
    specs: list[ServerSpec]
    servers: list[ServerProcess]


@pytest.fixture(scope="module")
def pair(lone: Lone, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard) -> Iterator[Pair]:
    port = free_port()
    specs = [
        ServerSpec(
            model=lone.model,
            flags=(
                *("--radix-cache-backend", "global", "--kv-check", "--kv-instance-id", name),
                *("--kv-router", f"http://127.0.0.1:{port}", "--kv-dram-size", dram),
                *("--kv-disk-path", str(tmp_path_factory.mktemp(name)), "--kv-disk-size", "1GB"),
                *flags_of(lone.model),
            ),
            environment=ENVIRONMENT,
        )
        for name, dram in (("one", "6MB"), ("two", "64MB"))
    ]
    with ExitStack() as stack:
        with leak_guard.adopting():
            servers = [ServerProcess(spec) for spec in specs]
            for server in servers:
                server.start()
        pair = Pair(port, specs, servers)
        stack.callback(lambda: [server.stop() for server in pair.servers])
        yield pair


async def ready(router: Router, pair: Pair) -> None:
    router.agents.verdict_s = 20.0
    for server in pair.servers:
        await until(lambda url=server.url: router.trees.trusted(url), 60, "a trusted index")
    await until(lambda: len(router.fleet.usable()) == 2, 60, "two servers")


def there(router: Router, url: str, prompt: list[int]) -> Match:
    return router.trees.match(NS, encode_tokens(prompt)).get(url, Match(0))


async def elsewhere_than(
    router: Router,
    client: aiohttp.ClientSession,
    url: str,
    prompt: list[int],
    tiers: tuple[Tier, ...],
    fillers: Iterator[list[int]],
) -> None:
    """Have a server compute other prompts until it announces nothing of a prompt in these tiers."""

    def gone() -> bool:
        match = there(router, url, prompt)
        here = {Tier.HBM: match.hbm, **match.below}
        return not any(here.get(tier) for tier in tiers)

    while not gone():
        await generate(client, url, next(fillers))
        await asyncio.sleep(0.2)


async def play(lone: Lone, pair: Pair, client: aiohttp.ClientSession, router: Router) -> list[str]:
    """The first turns of all conversations; returns the server of each."""
    homes: list[str] = []
    for turn, number in itertools.product(range(TURNS), range(CONVERSATIONS)):
        prompt = lone.prompts[number][turn]
        answer, headers = await generate(client, router.url, prompt, session=f"s{number}")
        assert_same(lone.answers[number][turn], answer)
        url = headers["x-kv-instance"]
        if not turn:
            homes.append(url)
            continue
        assert url == homes[number]
        before = len(lone.prompts[number][turn - 1])
        assert answer.cached_tokens >= before - BLOCK
        await until(partial(has, router, url, prompt, before), 30, "the index to have it")
    assert len(set(homes)) == 2, "both servers serve"
    for server in pair.servers:
        await assert_right(router, server, 30)
    return homes


def has(router: Router, url: str, prompt: list[int], tokens: int) -> bool:
    return there(router, url, prompt).tokens >= tokens


async def test_members_of_a_cluster(
    lone: Lone, pair: Pair, client: aiohttp.ClientSession, leak_guard: LeakGuard
) -> None:
    """Conversations go back to the instance that they left, also to its disk, by hints, after a restart."""
    fillers = itertools.cycle(lone.fillers)
    async with Router(RouterConfig(port=pair.port, policy="prompt-tree")) as router:
        await ready(router, pair)
        homes = await play(lone, pair, client, router)

        small, large = (server.url for server in pair.servers)
        number = homes.index(small)
        last, prompt = lone.prompts[number][TURNS - 1], lone.prompts[number][TURNS]
        await elsewhere_than(router, client, small, last, (Tier.HBM, Tier.DRAM), fillers)
        assert there(router, small, last).below.get(Tier.DISK, 0) >= len(last) - BLOCK, "announced on disk"
        told = await advise(client, router, session=f"s{number}")
        assert told["instance"] == small
        assert (await settled(client, router, told["id"]))["state"] == "ready"
        await until(lambda: there(router, small, last).below.get(Tier.DRAM, 0), 30, "it in DRAM")
        answer, headers = await generate(client, router.url, prompt, session=f"s{number}")
        assert headers["x-kv-instance"] == small
        assert answer.dram_tokens >= len(last) - BLOCK
        assert not answer.disk_tokens
        assert_same(lone.answers[number][TURNS], answer)

        number = homes.index(large)
        last, prompt = lone.prompts[number][TURNS - 1], lone.prompts[number][TURNS]
        arenas = {arena: snapshot(arena) for arena in arena_files(pair.servers[1].pid)}
        answer, headers = await generate(client, router.url, prompt, session=f"s{number}")
        assert headers["x-kv-instance"] == large
        assert_same(lone.answers[number][TURNS], answer)
        await until(lambda: any(last_change(arena, before) for arena, before in arenas.items()), 30, "saves")
        changes = {arena: np.flatnonzero(snapshot(arena) != before) for arena, before in arenas.items()}
        await elsewhere_than(router, client, large, prompt, (Tier.HBM,), fillers)
        # Of states, not each that was kept is the one from which the next turn goes on.
        for arena, changed in changes.items():
            for place in np.unique(changed | 3)[::64].tolist():
                flip_bit(arena, place, 6)
        damaged, _ = await generate(client, large, lone.prompts[number][TURNS + 1])
        assert damaged.dram_tokens >= len(prompt) - BLOCK
        with pytest.raises(AssertionError):
            assert_same(lone.answers[number][TURNS + 1], damaged)

        number = homes.index(small)
        pair.servers[0].stop()
        pair.servers[0] = ServerProcess(pair.specs[0])
        with leak_guard.adopting():
            await asyncio.to_thread(pair.servers[0].start)
        await ready(router, pair)
        prompt, before = lone.prompts[number][TURNS + 1], lone.prompts[number][TURNS]
        answer, _ = await generate(client, pair.servers[0].url, prompt)
        assert answer.disk_tokens >= len(before) - BLOCK
        assert_same(lone.answers[number][TURNS + 1], answer)
        await until(partial(has, router, pair.servers[0].url, prompt, len(before)), 30, "the index")
        await assert_right(router, pair.servers[0], 30)
        router.check()


BEGINNING = [
    {"type": "text", "text": "You are an agent that edits code. " * 60},
    {"type": "text", "text": "You read files before you change them. " * 12},
]
MARK = {"cache_control": {"type": "ephemeral"}}


async def test_another_conversation_finds_the_state_at_a_breakpoint(leak_guard: LeakGuard) -> None:
    """Anthropic's ``cache_control``; without it the second conversation finds no state."""
    port = free_port()
    spec = ServerSpec(
        model="tiny-gdn",
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-instance-id", "one"),
            *("--kv-router", f"http://127.0.0.1:{port}", "--kv-dram-size", "64MB"),
            *STATES,
            *("--max-total-tokens", "12000", "--max-running-requests", "2", "--chunked-prefill-size", "4096"),
        ),
        environment=ENVIRONMENT,
    )
    router = Router(RouterConfig(port=port))
    with ExitStack() as stack:
        with leak_guard.adopting():
            server = stack.enter_context(ServerProcess(spec))
        await router.start()
        try:
            await until(lambda: bool(router.fleet.usable()) and router.tokenizers.trust.chat)
            async with aiohttp.ClientSession(router.url) as session:

                async def ask(system: list[dict[str, object]], words: str) -> tuple[str, int]:
                    body = {
                        "model": "default",
                        "max_tokens": 8,
                        "temperature": 0,
                        "system": system,
                        "messages": [{"role": "user", "content": words}],
                    }
                    async with session.post("/v1/messages", json=body) as answer:
                        assert answer.status == 200, await answer.text()
                        found = await answer.json()
                    return found["content"], found["usage"].get("cache_read_input_tokens", 0)

                marked = [BEGINNING[0], BEGINNING[1] | MARK]
                plain, _ = await ask(BEGINNING, "read the first file")
                assert (await ask(BEGINNING, "say what is in the folder"))[1] == 0
                server.flush()
                answers = [await ask(marked, words) for words in ("read the first file", "what is it for")]
                assert answers[0] == (plain, 0)
                assert answers[1][1] > 256
                server.flush()
                assert (await ask(BEGINNING, "what is it for"))[0] == answers[1][0]
        finally:
            await router.stop()
