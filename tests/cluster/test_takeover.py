"""A part that is killed while clients connect: its port stays open, and the process that stood by answers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import ssl
import sys
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from cluster_processes import alive, async_wait_for

from sglang_ext.addresses import Ports
from sglang_ext.cluster.command import open_door
from sglang_ext.cluster.config import ClusterConfig
from sglang_ext.cluster.guard import children_by_parent
from sglang_ext.cluster.lifecycle import State
from sglang_ext.cluster.plan import LOOPBACK, HostFacts, Part, make_plan
from sglang_ext.cluster.process import PartProcess
from sglang_ext.cluster.supervisor import Cluster
from tests.support import ROOT
from tests.support.servers.workers import running_worker

pytestmark = pytest.mark.slow

MakePart = Callable[..., Part]
Pids = Callable[[str], list[int]]
INSTANCE = "tests.support.servers.instance_process"
KILLS = 3
SESSIONS = 5


@contextmanager
def held_open(part: Part, *slots: tuple[str, ...]) -> Iterator[Part]:
    """The part, with a socket that the test holds for it."""
    with Ports() as ports:
        (door,) = ports.open(LOOPBACK, int(part.url.rpartition(":")[2]), "--port")
        flags = ("--listen-fds", str(door.fileno()))
        yield dataclasses.replace(
            part, command=(*part.command, *flags), sockets=(door.fileno(),), slots=slots
        )


async def outcome(url: str, client: httpx.AsyncClient) -> str:
    """How a request on a connection of its own ended."""
    try:
        return str((await client.get(url)).status_code)
    except httpx.ConnectError:
        return "refused"
    except httpx.HTTPError:
        return "cut"  # it was with the process that died


@asynccontextmanager
async def clients(url: str, count: int = SESSIONS) -> AsyncIterator[Counter[str]]:
    """Clients that ask one request after the other, and how these ended."""
    found: Counter[str] = Counter()

    async def ask_on() -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=60, trust_env=False, limits=limits) as client:
            while True:
                found[await outcome(url, client)] += 1
                await asyncio.sleep(0.005)

    tasks = [asyncio.create_task(ask_on()) for _ in range(count)]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_connection_made_while_no_process_accepts_is_answered(
    small_part: MakePart, tmp_path: Path, pids_of: Pids
) -> None:
    with held_open(small_part("router")) as part:
        async with Cluster([part], tmp_path, restarts=1) as cluster, httpx.AsyncClient() as client:
            await cluster.ready()
            (pid,) = pids_of("router")
            os.kill(pid, signal.SIGSTOP)
            waiting = asyncio.create_task(outcome(part.url, client))
            await async_wait_for(lambda: connections_to(part) >= 1, "the connection")
            os.kill(pid, signal.SIGKILL)
            assert await waiting == "200", "it waited in the socket, and the next process took it"
            await async_wait_for(lambda: cluster.parts["router"].state is State.READY, "the restart")
        async with httpx.AsyncClient() as client:
            assert await outcome(part.url, client) == "refused", "the cluster has ended"


def connections_to(part: Part) -> int:
    port = int(part.url.rpartition(":")[2])
    mine = psutil.Process().net_connections()
    return sum(bool(one.raddr) and one.raddr.port == port for one in mine)


async def test_without_a_held_socket_clients_are_refused(
    small_part: MakePart, tmp_path: Path, pids_of: Pids
) -> None:
    """The twin: the errors that the clients below would see. The next one takes a while to start, as a router
    does."""
    part = small_part("router", "late-again=2")
    async with Cluster([part], tmp_path, restarts=1) as cluster, clients(part.url) as seen:
        await cluster.ready()
        os.kill(pids_of("router")[0], signal.SIGKILL)
        await async_wait_for(lambda: seen["refused"] > 0, "a refused connection")


async def process_of(part: PartProcess | None) -> int:
    """The process that a guard runs."""
    assert part is not None
    # Its guard may run, and have reported it, before the supervisor has its number.
    await async_wait_for(lambda: part.pid is not None, "the guard")
    guard = part.pid
    assert guard is not None
    await async_wait_for(lambda: len(children_by_parent().get(guard, ())) == 1, "one process of the guard")
    (found,) = children_by_parent()[guard]
    return found


async def test_one_stands_by_before_the_part_serves(
    small_part: MakePart, tmp_path: Path, pids_of: Pids
) -> None:
    """Otherwise a part that is killed at once would be missed for as long as another one takes to start."""
    serves = asyncio.Event()

    async def probe(_url: str) -> bool:
        return serves.is_set()

    with held_open(small_part("router"), (), ()) as part:
        async with Cluster([part], tmp_path, restarts=1, probe=probe) as cluster:
            status = cluster.parts["router"]
            await async_wait_for(lambda: len(pids_of("router")) == 2, "a stand-by process")
            assert status.state is State.STARTING
            serves.set()
            await cluster.ready()
            assert status.standby is not None
            next_one = await process_of(status.standby.process)
            os.kill(await process_of(status.process), signal.SIGKILL)
            await async_wait_for(lambda: status.restarts == 1, "the restart")
            assert await process_of(status.process) == next_one
            assert len(pids_of("router")) == 2, "no other process was started to serve"


async def test_the_one_that_stands_by_takes_over(small_part: MakePart, tmp_path: Path, pids_of: Pids) -> None:
    standby = tmp_path / "router.pids.standby"
    with held_open(small_part("router"), (), ()) as part:
        async with Cluster([part], tmp_path, restarts=2) as cluster:
            await cluster.ready()
            status = cluster.parts["router"]
            async with clients(part.url) as seen:
                for kill in range(2):
                    await async_wait_for(
                        lambda kill=kill: standby.exists() and len(standby.read_text().split()) > kill,
                        "a stand-by process",
                    )
                    cluster.check()
                    assert status.standby is not None
                    serving = await process_of(status.process)
                    next_one = await process_of(status.standby.process)
                    os.kill(serving, signal.SIGKILL)
                    await async_wait_for(lambda kill=kill: status.restarts == kill + 1, "the restart")
                    await cluster.ready()
                    assert await process_of(status.process) == next_one
                    assert len(standby.read_text().split()) <= kill + 2, (
                        "no other process was started to serve"
                    )
            assert not seen["refused"], seen
            assert seen["200"] > 0
            assert status.standby is None, "no restart is left for it"
    assert cluster.failure is None
    assert not any(alive(pid) for pid in pids_of("router"))


async def test_one_that_stands_by_is_replaced_and_ends_with_the_part(
    small_part: MakePart, tmp_path: Path, pids_of: Pids
) -> None:
    with held_open(small_part("router"), (), ()) as part:
        async with Cluster([part], tmp_path, restarts=2) as cluster:
            await cluster.ready()
            status = cluster.parts["router"]
            await async_wait_for(lambda: len(pids_of("router")) == 2, "a stand-by process")
            assert status.standby is not None
            os.kill(await process_of(status.standby.process), signal.SIGKILL)
            await async_wait_for(lambda: len(pids_of("router")) == 3, "another one")
            assert status.state is State.READY
            assert status.restarts == 0, "the part itself lives"
            cluster.check()
        assert status.standby is None
    assert not any(alive(pid) for pid in pids_of("router"))


class Instance:
    """A stand-in with a real agent, which registers with the routers."""

    def __init__(self, routers: str) -> None:
        self._routers = routers

    async def __aenter__(self) -> Instance:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", INSTANCE, "server-0", self._routers, "/nowhere"),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.process.kill()
        await self.process.communicate()


def usable(port: int) -> int:
    """Instances that the router with this port for members would send requests to; -1 while it starts."""
    try:
        with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/cluster/instances", timeout=5) as response:
            found = json.load(response)["instances"]
    except OSError:
        return -1
    return sum(each["state"] == "ready" for each in found)


def alone(router: Part, *workers: str) -> Part:
    """The router without the cluster's servers, for others or for instances that register by themselves."""
    cut = router.command.index("--worker-urls")
    urls = ("--worker-urls", *workers) if workers else ()
    return dataclasses.replace(
        router, command=(*router.command[:cut], *urls, *router.command[cut + 2 :]), needs=()
    )


@pytest.mark.timeout(120)
async def test_three_routers_are_killed_and_no_client_is_refused(tmp_path: Path) -> None:
    config = ClusterConfig(model_path="m", port=0, restart=KILLS)
    with Ports() as ports:
        port, door = open_door(config, ports, tmp_path)
        *_, router = make_plan(config, HostFacts(2, 0), port, ports.free_after(port, config.ports), door=door)
        router = alone(router)
        first, second = door.member_ports
        async with (
            Instance(f"http://{LOOPBACK}:{first},http://{LOOPBACK}:{second}"),
            Cluster([router], tmp_path, restarts=KILLS) as cluster,
        ):
            await cluster.ready()
            status = cluster.parts["router"]
            await async_wait_for(lambda: usable(door.member_ports[0]) == 1, "the first registration")
            async with clients(router.url + "/v1/models") as seen:
                for kill in range(KILLS):
                    await async_wait_for(
                        lambda: usable(door.member_ports[1 - status.slot]) == 1,
                        "a router that stands by and knows the instance",
                    )
                    answered = seen["200"]
                    os.kill(await process_of(status.process), signal.SIGKILL)
                    await async_wait_for(lambda kill=kill: status.restarts == kill + 1, "the restart")
                    await cluster.ready()
                    await async_wait_for(lambda answered=answered: seen["200"] > answered, "an answer")
            assert set(seen) <= {"200", "cut"}, seen
            assert seen["cut"] <= KILLS * SESSIONS, "those that were with the router when it died"
    assert cluster.failure is None


async def test_a_router_over_tls_is_seen_to_be_ready(tmp_path: Path, certificate: tuple[str, str]) -> None:
    tls = ("--tls-cert-file", certificate[0], "--tls-key-file", certificate[1])
    config = ClusterConfig(model_path="m", port=0, router_args=tls)
    with Ports() as ports:
        port, door = open_door(config, ports, tmp_path)
        *_, router = make_plan(config, HostFacts(2, 0), port, ports.free_after(port, config.ports), door=door)
        async with (
            running_worker() as worker,
            Cluster([alone(router, worker.url)], tmp_path) as cluster,
        ):
            async with asyncio.timeout(60):
                await cluster.ready()
            assert router.url == f"https://{LOOPBACK}:{port}"
            tls_context = ssl.create_default_context(cafile=certificate[0])
            async with httpx.AsyncClient(trust_env=False, verify=tls_context) as client:
                assert await outcome(router.url + "/v1/models", client) == "200"
    assert cluster.failure is None
