"""Instances that register themselves, under load: drained, flushed, stopped, killed and started anew.

Sixteen streams at a time go on through all of it. Requests that had not begun to answer succeed, and the
router's view of the caches is right again within a second.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from router_rig import FLAGS, running, until

from sglang_ext.cluster.guard import descendants
from sglang_ext.protocol.cluster import VERDICT_S, instance_path
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.testing.fakes import Stopwatch
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]

STREAMS = 16
PATIENCE = {"health_check_timeout_secs": 5.0}
"""As `sglang-ext cluster` gives it on a CPU. The agents' heartbeats make the verdict on a stopped server."""


@dataclass
class Fleet:
    """Two servers, and where they look for their router."""

    port: int
    servers: dict[str, ServerProcess] = field(default_factory=dict)

    def spec(self, name: str) -> ServerSpec:
        router = ("--kv-router", f"http://127.0.0.1:{self.port}", "--kv-instance-id", name)
        return ServerSpec(flags=(*FLAGS, *router))

    def start(self, *names: str) -> None:
        """Start servers, all at the same time."""
        for name in names:
            self.servers[name] = ServerProcess(self.spec(name))
        with ThreadPoolExecutor(len(names)) as pool:
            list(pool.map(lambda name: self.servers[name].start(), names))

    def signal(self, name: str, number: int) -> None:
        """Send a signal to every process of a server."""
        for pid in descendants(self.servers[name].pid):
            os.kill(pid, number)


@pytest.fixture(scope="module")
def fleet(leak_guard: LeakGuard) -> Iterator[Fleet]:
    found = Fleet(free_port())
    with leak_guard.adopting():
        found.start("a", "b")
    yield found
    for server in found.servers.values():
        server.stop()


@pytest.fixture
async def router(fleet: Fleet) -> AsyncIterator[Router]:
    """A router without configured workers: the servers find it."""
    async with Router(RouterConfig(port=fleet.port, **PATIENCE)) as router:
        await until(lambda: len(router.fleet.usable()) == 2, seconds=60)
        yield router
        router.check()


def name_of(router: Router, name: str) -> str:
    return router.members.member(name).url


class Load:
    """Streams without end, `STREAMS` at a time, and how each of them ended."""

    def __init__(self, router: Router, client: aiohttp.ClientSession) -> None:
        self._router = router
        self._client = client
        self._ending = False
        self._numbers = itertools.count()
        self.ends: Counter[str] = Counter()
        self.failures: list[str] = []

    async def _one(self) -> None:
        number = next(self._numbers)
        rng = random.Random(number % 24)  # some are repeated, and find their prefix
        body = {
            "input_ids": [rng.randrange(100, 30_000) for _ in range(rng.randrange(48, 160))],
            "sampling_params": {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True},
            "stream": True,
        }
        async with self._client.post(self._router.url + "/generate", json=body) as answer:
            text = await answer.text()
        if answer.status != 200:
            self.ends["refused"] += 1
            self.failures.append(f"{answer.status}: {text[:300]}")
        else:
            self.ends["whole" if text.rstrip().endswith("[DONE]") else "broken off"] += 1

    async def _stream(self) -> None:
        while not self._ending:
            await self._one()

    async def more(self, count: int = 16) -> None:
        """Wait until so many more have ended."""
        enough = self.ends.total() + count
        async with asyncio.timeout(120):
            while self.ends.total() < enough:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[Load]:
        """Send while the block runs; afterwards all have ended, and none that had not begun has failed."""
        tasks = [asyncio.create_task(self._stream()) for _ in range(STREAMS)]
        try:
            await self.more()
            yield self
            await self.more()
        finally:
            self._ending = True
            await asyncio.gather(*tasks)
        assert self.failures == []
        assert self.ends["refused"] == 0


def in_flight(router: Router, name: str) -> Callable[[], bool]:
    return lambda: router.fleet.rows[name].in_flight > 0


async def test_servers_find_a_router_that_starts_after_them(router: Router, fleet: Fleet) -> None:
    rows = {row.registration.instance: row for row in router.fleet.rows.values() if row.registration}
    assert set(rows) == {"a", "b"}
    for name, row in rows.items():
        assert row.name == fleet.servers[name].url
        assert row.registration is not None
        assert row.registration.agent.startswith("tcp://127.0.0.1:")
    await until(lambda: all(instance.trusted for instance in router.fleet.usable()))


async def test_a_drain_under_load_loses_nothing(
    router: Router, client: aiohttp.ClientSession, fleet: Fleet
) -> None:
    b = name_of(router, "b")
    async with Load(router, client).going_on() as load:
        await until(in_flight(router, b))
        async with client.post(router.url + instance_path("b", "drain"), json={"deadline_s": 60}) as answer:
            assert (await answer.json())["state"] in ("draining", "left")
        await until(lambda: router.fleet.rows[b].state is State.LEFT, seconds=60)
        assert await asyncio.to_thread(running, [fleet.servers["b"]]) == 0
        picked = router.fleet.rows[b].last_picked
        await load.more()
        assert router.fleet.rows[b].last_picked == picked
        async with client.post(router.url + instance_path("b", "drain"), json={"cancel": True}) as answer:
            assert answer.status == 200
        await until(in_flight(router, b))
    assert load.ends["broken off"] == 0


async def test_a_flush_beside_the_load_and_the_index_after_it(
    router: Router, client: aiohttp.ClientSession, fleet: Fleet
) -> None:
    """SGLang refuses to flush while it has requests, so the server is drained first. The flush reaches the
    router through the server's agent only."""
    b = name_of(router, "b")

    def blocks() -> int:
        replica = router.trees.replica(b)
        return -1 if replica is None or not replica.trusted else replica.blocks

    async with Load(router, client).going_on():
        await until(lambda: blocks() > 0)
        async with client.post(router.url + instance_path("b", "drain"), json={}) as answer:
            assert answer.status == 200
        await until(lambda: router.fleet.rows[b].state is State.LEFT, seconds=60)
        await asyncio.to_thread(fleet.servers["b"].flush)
        async with client.post(router.url + instance_path("b", "drain"), json={"cancel": True}) as answer:
            assert answer.status == 200
        await until(lambda: router.fleet.rows[b].state is State.READY)
        await until(lambda: blocks() > 0)
    await until(lambda: running([fleet.servers["b"]]) == 0)
    await asyncio.to_thread(fleet.servers["b"].flush)
    with Stopwatch() as told:
        await until(lambda: blocks() == 0)
    assert told.seconds < 1.0


async def test_a_server_that_stands_still_is_forsaken_and_comes_back(
    router: Router, client: aiohttp.ClientSession, fleet: Fleet
) -> None:
    b = name_of(router, "b")
    async with Load(router, client).going_on() as load:
        await until(in_flight(router, b))
        fleet.signal("b", signal.SIGSTOP)
        try:
            with Stopwatch() as verdict:
                await until(lambda: router.fleet.rows[b].state is State.DOWN)
            await load.more()
        finally:
            fleet.signal("b", signal.SIGCONT)
        await until(lambda: router.fleet.rows[b].state is State.READY, seconds=60)
        await until(in_flight(router, b))
    # The machine is busy with sixteen streams: the verdict's own time, and as much again for noticing.
    assert verdict.seconds < 2 * VERDICT_S


async def test_a_server_that_is_killed_and_started_anew(
    router: Router, client: aiohttp.ClientSession, fleet: Fleet, leak_guard: LeakGuard
) -> None:
    b = name_of(router, "b")
    epoch = router.fleet.rows[b].epoch
    async with Load(router, client).going_on() as load:
        await until(in_flight(router, b))
        fleet.signal("b", signal.SIGKILL)
        await until(lambda: router.fleet.rows[b].state is State.DOWN)
        await load.more()
        fleet.servers.pop("b").stop()
        with leak_guard.adopting():
            await asyncio.to_thread(fleet.start, "b")
        await until(lambda: len(router.fleet.usable()) == 2, seconds=60)
        await until(in_flight(router, name_of(router, "b")))
    row = router.fleet.rows[name_of(router, "b")]
    assert row.epoch != epoch
    assert set(router.fleet.rows) == {fleet.servers["a"].url, fleet.servers["b"].url}


async def test_a_router_that_is_started_anew_finds_everybody(
    fleet: Fleet, client: aiohttp.ClientSession
) -> None:
    seen: list[Any] = []
    for _ in range(2):
        async with Router(RouterConfig(port=fleet.port, **PATIENCE)) as router:
            await until(lambda: len(router.fleet.usable()) == 2, seconds=60)
            seen.append({row.epoch for row in router.fleet.rows.values()})
    assert seen[0] == seen[1]
