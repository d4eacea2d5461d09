"""Links of a cluster over hosts that share nothing are cut, one pair after the other, under load.

A router, a prefill, a decode and a colocated server, and Redis, each on a host of its own, KV over tcp. The
colocated server answers while no pair of prefill and decode can.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hooked_server import FOLDER
from index_truth import assert_right
from pd_faults import stopped
from pd_fleet import COMMON, FaultySpec, fault, nothing_is_left
from places import ROUTER, Place, place_of
from token_requests import GREEDY, cold, generate, random_prompt

from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.testing.waiting import until
from tests.support.compare import Answer, assert_same
from tests.support.lab.hosts import Lab
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.redis_server import redis_is_installed
from tests.support.servers.server import STRICT, ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

CLIENTS = 4
PREFILL, DECODE, COLOCATED, REDIS = "prefill", "decode", "colocated", "redis"
SERVERS = (PREFILL, DECODE, COLOCATED)
PAIRS = (*itertools.combinations((ROUTER, *SERVERS), 2), (ROUTER, REDIS))
PASSWORD = "the-password-of-redis"
SLOW_S, LOSS = 0.02, 0.005
"""Delay and loss of each packet: between towns, over a link that is not the best."""
HARMLESS_S = 3.0
"""A switch may take as long to fail over."""
AT_ONCE_S = 5.0
"""After which the index is the truth again; a second, where the machine is not busy."""
MOST_S = 60.0
"""That a request may take beyond the cut: verdicts, another pair, and a machine that is busy."""
NAMED = frozenset({"pair_failed", "worker_lost", "no_worker"})
"""Error types with which a client's request may fail because of a cut."""


@dataclass
class Fleet:
    """The servers, in the lab, and where each looks for its faults."""

    place: Place
    port: int
    pd: PdServers
    servers: dict[str, ServerProcess]
    faults: dict[str, Path]

    @property
    def lab(self) -> Lab:
        assert self.place.lab is not None
        return self.place.lab


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard) -> Iterator[Place]:
    if not redis_is_installed():
        pytest.skip("redis-server is not installed")
    folder = tmp_path_factory.mktemp("place")
    with place_of("lab", (*SERVERS, REDIS), folder, leak_guard) as place:
        assert place.lab is not None
        redis = place.lab[REDIS]
        options = ("--bind", redis.address(), "--requirepass", PASSWORD, "--save", "", "--port", "6379")
        with leak_guard.adopting():
            redis.popen(["redis-server", *options], log=folder / "redis.log")
        yield place


@pytest.fixture(scope="module")
def fleet(place: Place, leak_guard: LeakGuard) -> Iterator[Fleet]:
    port = free_port()
    with ExitStack() as stack:
        with leak_guard.adopting():
            names = iter(SERVERS)
            faults = {name: place.folder / name for name in SERVERS}

            def server(spec: FaultySpec) -> ServerProcess:
                return place.server(spec, next(names))

            def spec(name: str, *more: str) -> FaultySpec:
                faults[name].mkdir()
                tells = ("--kv-router", place.router_url(port), "--kv-instance-id", name)
                return FaultySpec(
                    flags=(*COMMON, "--kv-dram-size", "64MB", *tells, *place.flags, *more),
                    environment={**STRICT, FOLDER: str(faults[name])},
                )

            apart = ("--kv-pd-caching", "3")
            pd, (colocated,) = stack.enter_context(
                pd_servers(
                    [spec(PREFILL, *apart)],
                    [spec(DECODE, *apart)],
                    [spec(COLOCATED, "--radix-cache-backend", "global")],
                    server,
                )
            )
        servers = dict(zip(SERVERS, (*pd.servers, colocated), strict=True))
        yield Fleet(place, port, pd, servers, faults)


@asynccontextmanager
async def routing(fleet: Fleet) -> AsyncIterator[Router]:
    """A router, with the settings that it has by default; it shares its membership through Redis."""
    redis = f"redis://:{PASSWORD}@{fleet.lab[REDIS].address()}:6379"
    config = RouterConfig(
        port=fleet.port, policy="round-robin", cluster=redis, cluster_name="lab", **fleet.place.router_options
    )
    async with Router(config) as router:
        await all_serve(router, fleet)
        yield router
        router.check()


async def all_serve(router: Router, fleet: Fleet) -> None:
    urls = [server.url for server in fleet.servers.values()]
    await until(lambda: len(router.fleet.usable()) == len(urls), 60, f"all servers at {router.fleet!r}")
    await until(lambda: all(map(router.trees.trusted, urls)), 60, "their blocks")


@dataclass
class Load:
    """Requests without end, with the answers that they have to get."""

    url: str
    client: aiohttp.ClientSession
    prompts: list[list[int]]
    expected: list[Answer]
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _ending: bool = False

    async def one(self) -> None:
        number = next(self._numbers) % len(self.prompts)
        fields: dict[str, Any] = {"sampling_params": GREEDY, "return_logprob": True, "top_logprobs_num": 2}
        began = time.monotonic()
        async with self.client.post(
            f"{self.url}/generate", json={"input_ids": self.prompts[number], **fields}
        ) as response:
            said = await response.json()
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        if response.status == 200:
            try:
                assert_same(self.expected[number], Answer.of(said))
            except AssertionError as error:
                self.wrong.append(str(error))
            self.ends["answered"] += 1
        else:
            self.ends[f"{response.status} {said['error']['code']}"] += 1

    async def _go_on(self) -> None:
        while not self._ending:
            await self.one()

    async def more(self, count: int) -> None:
        """Until so many more have ended."""
        enough = self.ends.total() + count
        await until(lambda: self.ends.total() >= enough, 2 * MOST_S, "requests that end")

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        self._ending = False
        tasks = [asyncio.create_task(self._go_on()) for _ in range(CLIENTS)]
        try:
            await self.more(CLIENTS)
            yield
            await self.more(2 * CLIENTS)
        finally:
            self._ending = True
            await asyncio.gather(*tasks)

    @property
    def failures(self) -> Counter[str]:
        return Counter({end: count for end, count in self.ends.items() if end != "answered"})


async def load_of(fleet: Fleet, router: Router, client: aiohttp.ClientSession, rng: random.Random) -> Load:
    """Prompts of which some begin alike, and their answers without any cache."""
    beginning = random_prompt(rng, 160)
    prompts = [
        *(beginning + random_prompt(rng, 40) for _ in range(4)),
        *(random_prompt(rng, rng.randrange(60, 300)) for _ in range(4)),
    ]
    alone = fleet.servers[COLOCATED]
    return Load(router.url, client, prompts, [await cold(client, alone, prompt) for prompt in prompts])


async def healed(router: Router, fleet: Fleet) -> None:
    """All serve again, nothing runs or is held, and the router trusts the servers' events."""
    await all_serve(router, fleet)
    for server in fleet.servers.values():
        await asyncio.to_thread(server.wait_idle)
    await asyncio.to_thread(nothing_is_left, list(fleet.servers.values()), 30)
    for server in fleet.servers.values():
        await assert_right(router, server, AT_ONCE_S)
    assert all(row.in_flight == 0 for row in router.fleet.rows.values())


def pair_name(pair: tuple[str, str]) -> str:
    return "-".join(pair)


@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
async def test_a_network_that_fails_over_costs_no_answer(
    pair: tuple[str, str], fleet: Fleet, client: aiohttp.ClientSession, rng: random.Random
) -> None:
    async with routing(fleet) as router:
        load = await load_of(fleet, router, client, rng)
        async with load.going_on():
            fleet.lab.cut(*pair)
            await asyncio.sleep(HARMLESS_S)
            fleet.lab.wire(*pair)
        assert load.wrong == []
        assert load.failures == {}
        assert all(row.state in (State.READY, State.SUSPECT) for row in router.fleet.rows.values())
        await healed(router, fleet)


@pytest.mark.parametrize("seconds", [1, 10, 60])
@pytest.mark.parametrize("pair", PAIRS, ids=pair_name)
async def test_a_partition_of_any_pair(
    pair: tuple[str, str], seconds: int, fleet: Fleet, client: aiohttp.ClientSession, rng: random.Random
) -> None:
    """Answers are right, failures name their reason and come in time; when the link is back all serve again,
    the index equals the servers' caches, and no resources are held."""
    async with routing(fleet) as router:
        load = await load_of(fleet, router, client, rng)
        async with load.going_on():
            fleet.lab.cut(*pair)
            try:
                await asyncio.sleep(seconds)
            finally:
                fleet.lab.wire(*pair)
        print(f"{pair_name(pair)} {seconds} s: {dict(load.ends)}, slowest {load.slowest_s:.1f} s")
        assert load.wrong == []
        assert {end.split()[1] for end in load.failures} <= NAMED
        assert load.slowest_s < seconds + MOST_S
        await healed(router, fleet)


@pytest.mark.parametrize("victim", [PREFILL, DECODE])
async def test_who_stands_still_in_a_hand_over_on_a_slow_link_costs_no_wrong_answer(
    victim: str, fleet: Fleet, client: aiohttp.ClientSession, rng: random.Random
) -> None:
    """With latency and loss on every link, under load, with returns: a server is taken for dead in the middle
    of a read, and clients give up meanwhile. The twin: one damaged bit of the bytes read there is seen."""
    async with routing(fleet) as router:
        load = await load_of(fleet, router, client, rng)
        for pair in PAIRS:
            fleet.lab.wire(*pair, delay_s=SLOW_S, loss=LOSS)
        try:
            async with load.going_on():
                await load.more(4 * CLIENTS)
                with fault(fleet.faults[DECODE], "hold-reading") as at:
                    await until(at.exists, MOST_S, "a read")
                    with stopped(fleet.servers[victim]):
                        give_up = [asyncio.create_task(load.one()) for _ in range(2)]
                        row = router.fleet.rows[fleet.servers[victim].url]
                        await until(lambda: row.state is State.DOWN, MOST_S, "the router's verdict")
                        for each in give_up:
                            each.cancel()
                        await asyncio.wait(give_up)
                await load.more(4 * CLIENTS)
            print(f"{victim} stood still: {dict(load.ends)}, slowest {load.slowest_s:.1f} s")
            assert load.wrong == []
            assert {end.split()[1] for end in load.failures} <= NAMED
            assert load.slowest_s < 2 * MOST_S
            await all_serve(router, fleet)
            with fault(fleet.faults[DECODE], "damage"):
                async with load.going_on():
                    await until(lambda: load.wrong, MOST_S, "a wrong answer")
        finally:
            for pair in PAIRS:
                fleet.lab.wire(*pair)
        for server in fleet.servers.values():
            await asyncio.to_thread(server.wait_idle)
            await asyncio.to_thread(server.flush)
        await healed(router, fleet)


async def test_a_router_that_is_cut_off_ends_nothing_between_servers(
    fleet: Fleet, client: aiohttp.ClientSession, rng: random.Random
) -> None:
    """The router takes prefill for dead and reports that to decode, which gets prefill's heartbeats and reads
    on. The request comes from another host.
    """
    async with routing(fleet) as router:
        prompt = random_prompt(rng, 200)
        expected = await cold(client, fleet.servers[COLOCATED], prompt)
        with fleet.lab[COLOCATED].network():
            asking = PdServers(fleet.pd.prefill, fleet.pd.decode)
        try:
            with fault(fleet.faults[DECODE], "hold-reading") as at:
                answers = asking.start(prompt, max_new_tokens=GREEDY["max_new_tokens"])
                await until(at.exists, 60, "the read")
                fleet.lab.cut(ROUTER, PREFILL)
                try:
                    row = router.fleet.rows[fleet.servers[PREFILL].url]
                    await until(lambda: row.state is State.DOWN, 60, "the router's verdict")
                    await asyncio.sleep(2.0)  # two heartbeats, in which decode asks prefill
                finally:
                    fleet.lab.wire(ROUTER, PREFILL)
            first, whole = [await asyncio.wrap_future(answer) for answer in answers]
            assert first.tokens == expected.tokens[:1]  # prefill's
            assert_same(expected, whole)
        finally:
            asking.close()
        assert not re.search(r"is gone|has not answered", fleet.servers[DECODE].log.read_text())
        await healed(router, fleet)
        await generate(client, router.url, prompt)
