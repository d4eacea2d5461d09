"""A conversation that moves between prefill servers: its KV is fetched from its holder (equation 2).

Two prefill servers and a decode server behind a router; in the long form two decode servers. Nothing returns
from decode to prefill, so that of a conversation the prefill server has the prompt, and decode all of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from dram_damage import arena_files, last_change, make_huge, snapshot
from hooked_server import FOLDER
from pd_fleet import COMMON, assert_alike, kill, logprobs_of, nothing_is_left
from token_requests import generate, random_prompt

from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.cluster import VERDICT_S
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import Match
from sglang_ext.testing.waiting import until, wait_until
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

BLOCK = 16
TOKENS = 40 * BLOCK
ANSWER = 8 * BLOCK
NS = ("tokens", None, None, None)
GATED = str(Path(__file__).parents[1].joinpath("servers", "gated_fetching_server.py"))


@dataclass
class Fleet:
    """The servers, where their router is to listen, and where the reads of prefill servers can be held."""

    pd: PdServers
    port: int
    gates: dict[str, Path]

    def other_prefill(self, url: str) -> ServerProcess:
        (other,) = (each.server for each in self.pd.prefill if each.server.url != url)
        return other

    def at(self, url: str) -> ServerProcess:
        return next(server for server in self.pd.servers if server.url == url)


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.long)], ids=["2P1D", "2P2D"])
def fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard
) -> Iterator[Fleet]:
    folder, port = tmp_path_factory.mktemp("gates"), free_port()
    tells = ("--kv-router", f"http://127.0.0.1:{port}", "--kv-dram-size", "64MB", "--enable-cache-report")
    spec = ServerSpec(
        run=(GATED,), flags=(*COMMON, "--kv-pd-caching", "2", "--kv-load-policy", "always", *tells)
    )

    def gated(name: str) -> ServerSpec:
        (folder / name).mkdir()
        return replace(spec, environment={FOLDER: str(folder / name), **STRICT})

    prefill = [gated(f"prefill{number}") for number in range(2)]
    with leak_guard.adopting(), pd_servers(prefill, [spec] * request.param) as (pd, _):
        gates = {each.server.url: Path(each.server.spec.environment[FOLDER]) for each in pd.prefill}
        yield Fleet(pd, port, gates)


@asynccontextmanager
async def routing(fleet: Fleet, *, verdict_s: float = 20.0) -> AsyncIterator[Router]:
    """A router that sends each turn to the prefill server that caches less, so to the other one."""
    config = RouterConfig(port=fleet.port, policy="least-load", explain_routing=True, cost_profile="none")
    async with Router(config) as router:
        servers = fleet.pd.servers
        await until(lambda: all(router.trees.trusted(server.url) for server in servers), 60, "all servers")
        await until(lambda: len(router.fleet.usable()) == len(servers), 60, "all servers")
        # The machine that runs tests may be busy: reads are awaited for as long as they take.
        router.fetching.least_wait_s = 8.0
        router.agents.verdict_s = verdict_s
        yield router
        router.check()


def held(router: Router, url: str, prompt: list[int]) -> int:
    return router.trees.match(NS, encode_tokens(prompt)).get(url, Match(0)).in_memory


@dataclass
class Turn:
    """A request's prompt and answer, and the servers that served it."""

    prompt: list[int]
    answer: Answer
    prefill: str
    decode: str
    id: str

    @property
    def said(self) -> list[int]:
        return [*self.prompt, *self.answer.tokens]


async def turn(client: aiohttp.ClientSession, router: Router, prompt: list[int]) -> Turn:
    """One request; returns once the router's index has the KV that its servers then hold."""
    answer, headers = await generate(client, router.url, prompt, sampling_params=SAMPLING)
    found = Turn(
        prompt,
        answer,
        headers["x-kv-prefill-instance"],
        headers["x-kv-instance"],
        headers["x-request-id"],
    )
    whole = len(prompt) // BLOCK * BLOCK
    all_of_it = (len(found.said) - 1) // BLOCK * BLOCK  # the last token has no KV
    await until(lambda: held(router, found.prefill, prompt) >= whole, 30, "prefill's KV in the index")
    await until(lambda: held(router, found.decode, found.said) >= all_of_it, 30, "decode's KV in the index")
    return found


SAMPLING = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}


async def explained(client: aiohttp.ClientSession, router: Router, id: str) -> dict[str, Any]:
    """The router's explanation of a request's fetch, once the fetch has ended."""
    await until(lambda: not router.fetching.under_way, 30, "the end of the fetch")
    async with client.get(f"{router.url}/explain/{id}") as response:
        return dict((await response.json())["routing"][-1]["fetch"])


async def the_same_as_cold(truth: ServerProcess, found: Turn) -> None:
    expected = await asyncio.to_thread(truth.generate, found.prompt, max_new_tokens=ANSWER)
    assert_same(expected, found.answer)


def fetched_bytes(server: ServerProcess) -> float:
    return sum(v for k, v in server.metrics().items() if k.startswith("sglang_ext_cache_fetched_bytes_total"))


def read(told: dict[str, Any]) -> list[tuple[str, int, int, str]]:
    """The spans of a plan that were read from others, and how that ended."""
    spans = [span for span in told["plan"] if span["end"] is not None]
    return [(span["from"], span["start"], span["stop"], span["end"]) for span in spans]


def slow_to_read(router: Router, source: str, seconds: float) -> None:
    """Report slow reads from an instance to the cost model: others are read from."""
    router.costs.observe_transfer(source, source, TOKENS, seconds)


async def test_a_session_moves_between_prefills(
    fleet: Fleet, truth: ServerProcess, client: aiohttp.ClientSession, rng: random.Random
) -> None:
    async with routing(fleet) as router:
        first = await turn(client, router, random_prompt(rng, TOKENS + 3))
        before = {url: fetched_bytes(fleet.at(url)) for url in fleet.gates}
        second = await turn(client, router, first.said + random_prompt(rng, 40))
        assert second.prefill == fleet.other_prefill(first.prefill).url
        told = await explained(client, router, second.id)
        known = (len(first.said) - 1) // BLOCK * BLOCK
        assert (told["end"], told["moved_tokens"]) == ("done", known), told
        # Decode has the answer too, and so it is decode that is read from.
        assert read(told) == [(first.decode, 0, known, "done")]
        await asyncio.to_thread(
            wait_until,
            lambda: fetched_bytes(fleet.at(second.prefill)) > before[second.prefill],
            seconds=30,
            what="the bytes",
        )
        await the_same_as_cold(truth, first)
        await the_same_as_cold(truth, second)
        nothing_is_left(fleet.pd.servers)


SLIGHTLY = 0.033
"""Seconds for a prompt: half as much again as is expected of others."""


async def test_each_span_comes_from_who_is_soonest(
    fleet: Fleet, truth: ServerProcess, client: aiohttp.ClientSession, rng: random.Random
) -> None:
    """The prompt from the other prefill server, the answer from decode, which alone has it."""
    async with routing(fleet) as router:
        first = await turn(client, router, random_prompt(rng, TOKENS + 3))
        for server in fleet.pd.decode:
            slow_to_read(router, server.url, SLIGHTLY)
        second = await turn(client, router, first.said + random_prompt(rng, 40))
        told = await explained(client, router, second.id)
        known = (len(first.said) - 1) // BLOCK * BLOCK
        assert read(told) == [(first.prefill, 0, TOKENS, "done"), (first.decode, TOKENS, known, "done")]
        assert told["moved_tokens"] == known
        assert told["plan"][-1]["from"] == "compute"
        await the_same_as_cold(truth, second)
        nothing_is_left(fleet.pd.servers)


@pytest.mark.parametrize("where", [pytest.param("decode", marks=pytest.mark.long), "prefill"])
async def test_one_damaged_byte_at_a_holder_is_another_answer(
    where: str, fleet: Fleet, truth: ServerProcess, client: aiohttp.ClientSession, rng: random.Random
) -> None:
    """The twin of the tests above: the forward pass uses the fetched KV."""
    async with routing(fleet) as router:
        arenas = {server.url: arena_files(server.pid)[0] for server in fleet.pd.servers}
        before = {url: snapshot(arena) for url, arena in arenas.items()}
        first = await turn(client, router, random_prompt(rng, TOKENS + 3))
        holder = first.decode if where == "decode" else first.prefill
        arena = arenas[holder]
        last = await asyncio.to_thread(
            wait_until, lambda: last_change(arena, before[holder]), seconds=30, what="DRAM"
        )
        if where == "prefill":
            for server in fleet.pd.decode:
                slow_to_read(router, server.url, SLIGHTLY)
        else:
            slow_to_read(router, first.prefill, 3.0)
        make_huge(arena, last)
        second = await turn(client, router, first.said + random_prompt(rng, 40))
        told = await explained(client, router, second.id)
        assert read(told)[0][0] == holder
        assert told["end"] == "done"
        with pytest.raises(AssertionError):
            await the_same_as_cold(truth, second)
    for server in fleet.pd.servers:
        await asyncio.to_thread(server.flush)


async def test_log_probabilities_of_a_prompt_whose_prefix_is_fetched(
    fleet: Fleet, truth: ServerProcess, client: aiohttp.ClientSession, rng: random.Random
) -> None:
    """The reader computes log probabilities with fetched KV. The twin: one damaged bit of that KV."""
    async with routing(fleet) as router:
        for damaged in (False, True):
            arenas = {server.url: arena_files(server.pid)[0] for server in fleet.pd.decode}
            before = {url: snapshot(arena) for url, arena in arenas.items()}
            first = await turn(client, router, random_prompt(rng, TOKENS + 3))
            known = (len(first.said) - 1) // BLOCK * BLOCK
            arena, unchanged = arenas[first.decode], before[first.decode]
            body = {
                "input_ids": first.said + random_prompt(rng, 200),
                "sampling_params": {**SAMPLING, "max_new_tokens": 4},
                "return_logprob": True,
                "logprob_start_len": known,
                "top_logprobs_num": 3,
                "token_ids_logprob": [200, 30_000],
            }
            expected = logprobs_of(await asyncio.to_thread(truth.post, "/generate", body))
            last = await asyncio.to_thread(
                wait_until,
                lambda arena=arena, unchanged=unchanged: last_change(arena, unchanged),
                seconds=30,
                what="DRAM",
            )
            if damaged:
                make_huge(arena, last)
            # The damaged bit is decode's, so that all of the prefix has to come from there.
            slow_to_read(router, first.prefill, 3.0)
            async with client.post(f"{router.url}/generate", json=body) as response:
                assert response.status == 200, await response.text()
                got = logprobs_of(await response.json())
            assert response.headers["x-kv-prefill-instance"] != first.prefill
            told = await explained(client, router, response.headers["x-request-id"])
            assert (told["end"], told["moved_tokens"]) == ("done", known), told
            assert read(told) == [(first.decode, 0, known, "done")], told
            if damaged:
                with pytest.raises(AssertionError):
                    assert_alike(expected, got)
            else:
                assert_alike(expected, got)
        nothing_is_left(fleet.pd.servers)
    for server in fleet.pd.servers:
        await asyncio.to_thread(server.flush)


async def test_a_prefill_that_dies_in_mid_read_is_replaced_by_the_next_holder(
    fleet: Fleet, truth: ServerProcess, client: aiohttp.ClientSession, rng: random.Random
) -> None:
    """Decode has the prompt too. The last test: one of the prefill servers is gone."""
    async with routing(fleet, verdict_s=VERDICT_S) as router:
        first = await turn(client, router, random_prompt(rng, TOKENS + 3))
        for server in fleet.pd.decode:
            slow_to_read(router, server.url, 3.0)
        reader = fleet.other_prefill(first.prefill)
        gate = fleet.gates[reader.url]
        (gate / "hold").touch()
        try:
            request = asyncio.create_task(turn(client, router, first.said + random_prompt(rng, 40)))
            await until((gate / "held").exists, 30, "the read")
            await asyncio.to_thread(kill, fleet.at(first.prefill))
            await until((gate / "dead").exists, 30, "the reader to know of the death")
        finally:
            (gate / "hold").unlink()
        second = await request
        assert second.prefill == reader.url
        told = await explained(client, router, second.id)
        assert read(told) == [(first.prefill, 0, TOKENS, "gone")]
        assert (told["spare"]["from"], told["spare"]["end"]) == (first.decode, "done")
        assert told["moved_tokens"] == TOKENS
        await the_same_as_cold(truth, second)
        nothing_is_left([reader, *fleet.pd.decode])
