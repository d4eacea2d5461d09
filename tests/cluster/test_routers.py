"""Several routers on one port: each shares the others' state, and waiting requests outlive a router that is
killed."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cluster_processes import async_wait_for
from test_takeover import Instance, alone, clients, outcome, process_of, usable

from sglang_ext.addresses import Ports
from sglang_ext.cluster.command import open_door
from sglang_ext.cluster.config import ClusterConfig
from sglang_ext.cluster.lifecycle import State
from sglang_ext.cluster.plan import LOOPBACK, HostFacts, make_plan
from sglang_ext.cluster.supervisor import Cluster

pytestmark = pytest.mark.slow

ROUTERS = ("router-0", "router-1")


class Pair:
    """Two routers with an instance."""

    def __init__(self, cluster: Cluster, ports: tuple[int, ...]) -> None:
        self.cluster, self.ports = cluster, ports
        self.url = cluster.parts[ROUTERS[0]].part.url

    async def router(self, name: str) -> psutil.Process:
        return psutil.Process(await process_of(self.cluster.parts[name].process))

    async def both_know_the_instance(self) -> None:
        for port in self.ports:
            await async_wait_for(lambda port=port: usable(port) == 1, "an instance")


@asynccontextmanager
async def two_routers(tmp_path: Path, restarts: int) -> AsyncIterator[Pair]:
    config = ClusterConfig(model_path="m", port=0, routers=2, restart=restarts)
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    with Ports() as ports:
        port, door = open_door(config, ports, private)
        _, *routers = make_plan(
            config, HostFacts(2, 0), port, ports.free_after(port, config.ports), door=door
        )
        names = ",".join(f"http://{LOOPBACK}:{each}" for each in door.member_ports)
        parts = [alone(router) for router in routers]
        async with Instance(names), Cluster(parts, tmp_path, restarts=restarts) as cluster:
            await cluster.ready()
            pair = Pair(cluster, door.member_ports)
            await pair.both_know_the_instance()
            yield pair
    assert cluster.failure is None


def asked(port: int, path: str, body: Any = None) -> Any:
    """The answer of the router with this port for members."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}{path}", data, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


@pytest.mark.timeout(120)
async def test_two_routers_on_one_port_are_killed_in_turn(tmp_path: Path) -> None:
    async with two_routers(tmp_path, restarts=1) as pair:
        first, second = pair.ports
        # A response kept by one router is found at another.
        kept = await asyncio.to_thread(asked, first, "/v1/responses", {"input": "Hello", "store": True})
        found = await asyncio.to_thread(asked, second, f"/v1/responses/{kept['id']}")
        assert found["id"] == kept["id"]
        async with clients(pair.url + "/v1/models") as seen:
            for name, port in zip(ROUTERS, pair.ports, strict=True):
                answered = seen["200"]
                (await pair.router(name)).kill()
                await async_wait_for(lambda answered=answered: seen["200"] > answered + 20, "answers")
                await async_wait_for(
                    lambda name=name: (
                        pair.cluster.parts[name].restarts == 1
                        and pair.cluster.parts[name].state is State.READY
                    ),
                    "the restart",
                )
                await async_wait_for(lambda port=port: usable(port) == 1, "an instance")
        assert set(seen) <= {"200", "cut"}, seen
        assert seen["cut"] <= len(ROUTERS) * 5, "those that were with a router when it died"
        # Each was started anew while the other lived, and holds the former state.
        for port in pair.ports:
            assert (await asyncio.to_thread(asked, port, f"/v1/responses/{kept['id']}"))["id"] == kept["id"]
        view = await asyncio.to_thread(asked, first, "/cluster")
        assert (view["store"]["kind"], len(view["routers"])) == ("local", 2)
        pair.cluster.check()


@pytest.mark.timeout(120)
async def test_what_waits_at_the_port_when_a_router_is_killed_is_answered(tmp_path: Path) -> None:
    async with two_routers(tmp_path, restarts=1) as pair, httpx.AsyncClient(trust_env=False) as client:
        for name in ROUTERS:
            (await pair.router(name)).suspend()
        waiting = [asyncio.create_task(outcome(pair.url + "/v1/models", client)) for _ in range(8)]
        port = int(pair.url.rpartition(":")[2])
        mine = psutil.Process()
        await async_wait_for(
            lambda: sum(bool(each.raddr) and each.raddr.port == port for each in mine.net_connections()) == 8,
            "the connections",
        )
        (await pair.router(ROUTERS[0])).kill()
        (await pair.router(ROUTERS[1])).resume()
        assert await asyncio.gather(*waiting) == ["200"] * 8


async def test_the_folder_of_the_routers_is_theirs(tmp_path: Path) -> None:
    config = ClusterConfig(model_path="m", port=0, routers=3, restart=1)
    before = os.umask(0)
    try:
        with Ports() as ports:
            _, door = open_door(config, ports, tmp_path)
    finally:
        os.umask(before)
    assert door.shared is not None
    assert stat.S_IMODE(door.shared.stat().st_mode) == 0o700
    assert len(set(door.member_ports)) == 3
