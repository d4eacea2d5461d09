"""Requests of models with windows or states that run at an instance which is drained go on at another.

Their window or state comes with the KV of all tokens: between decode servers in a hand-over, and between
servers that do both by name, from DRAM.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dram_damage import arena_files, snapshot
from hooked_server import FOLDER
from pd_fleet import FaultySpec
from places import Place
from router_rig import FLAGS, running, until
from test_migration import (
    DRAM,
    Client,
    Fleet,
    Received,
    asked_and_drained,
    bodies,
    client_of,
    copied_ahead,
    moved,
)
from test_pd_hybrids import STATES, WINDOWS

from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.router.tokens.tokenizer_check import EVERYTHING
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

MODELS = {
    "windows": WINDOWS,
    "states": replace(STATES, flags=(*STATES.flags, "--max-mamba-cache-size", "64")),
}
SERVERS = ("decode-windows", "decode-states", "colocated-windows", "colocated-states")


@pytest.fixture(scope="module", params=SERVERS)
def fleet(
    request: pytest.FixtureRequest,
    leak_guard: LeakGuard,
    tmp_path_factory: pytest.TempPathFactory,
    preloaded_servers: None,
) -> Iterator[Fleet]:
    """A prefill server and two decode servers, or two that do both."""
    kind, _, name = request.param.partition("-")
    model, port, apart = MODELS[name], free_port(), kind == "decode"
    place = Place(tmp_path_factory.mktemp("place"))
    faults: dict[str, Path] = {}

    def spec(name: str) -> ServerSpec:
        router = ("--kv-router", place.router_url(port), "--kv-instance-id", name, "--kv-check")
        flags = (*FLAGS, *DRAM, *router, *model.flags)
        if not apart:
            return ServerSpec(model=model.model, flags=flags)
        faults[name] = place.folder / name
        faults[name].mkdir()
        # SGLang's strict count while requests run would miss the slots of a stopped request.
        return FaultySpec(model=model.model, flags=flags, environment={FOLDER: str(faults[name])})

    prefill, decode = ([spec("p")], [spec("a"), spec("b")]) if apart else ([], [])
    others = [] if apart else [spec("a"), spec("b")]
    with leak_guard.adopting(), pd_servers(prefill, decode, others) as (pd, rest):
        yield Fleet(place, port, request.param, [*pd.servers, *rest], faults)


@pytest.fixture
async def router(fleet: Fleet) -> AsyncIterator[Router]:
    config = RouterConfig(port=fleet.port, policy="round-robin", health_check_timeout_secs=5.0)
    async with Router(config) as router:
        await until(lambda: len(router.fleet.usable()) == len(fleet.servers), seconds=60)
        await until(lambda: router.tokenizers.trust == EVERYTHING, seconds=60)
        yield router
        router.check()


async def undisturbed(fleet: Fleet, client: Client) -> list[Received]:
    """The answers where nothing is moved. No server has anything of them afterwards."""
    expected = await asyncio.gather(*(client.ask(*each) for each in bodies()))
    assert not any(received.error for received in expected), expected
    assert len({received.said for received in expected}) == 8
    for server in fleet.servers:
        await asyncio.to_thread(server.wait_idle)
        await asyncio.to_thread(server.flush)
    return expected


async def drained(
    router: Router, fleet: Fleet, client: Client, standing: Callable[[], object] = lambda: None
) -> list[Received]:
    """The answers of servers of which one is drained meanwhile. standing: see `asked_and_drained`."""
    url, before = router.members.member("a").url, await moved(router)
    answers = await asked_and_drained(router, fleet, client, bodies(), standing=standing)
    await until(lambda: router.fleet.rows[url].state is State.LEFT, seconds=60)
    got = await asyncio.gather(*answers)
    assert await moved(router) > before
    assert [received.error for received in got] == [""] * 8
    server = next(server for server in fleet.servers if server.url == url)
    await until(lambda: running([server]) == 0)
    router.members.resume("a")
    await until(lambda: len(router.fleet.usable()) == len(fleet.servers), seconds=60)
    await asyncio.to_thread(server.wait_idle)
    return got


async def test_every_answer_is_the_undisturbed_one(router: Router, fleet: Fleet) -> None:
    async with client_of(router) as client:
        expected = await undisturbed(fleet, client)
        got = await drained(router, fleet, client)
    for received, true in zip(got, expected, strict=True):
        assert received.said == true.said
        assert len(received.names) == 1, "the answer changed its name in the middle"
    if fleet.kind.startswith("colocated"):
        target = next(server for server in fleet.servers if server.url == router.members.member("b").url)
        await until(lambda: copied_ahead(target) > 0)


async def test_damaged_memory_is_seen_in_moved_answers(router: Router, fleet: Fleet) -> None:
    """The twin. Between decode servers a block of the window, or a state, is zeros at the target; with
    other servers, the source's DRAM is damaged while the request stands still."""
    source = next(server for server in fleet.servers if server.url == router.members.member("a").url)
    async with client_of(router) as client:
        expected = await undisturbed(fleet, client)
        arenas = {path: snapshot(path) for path in arena_files(source.pid)}

        def damage() -> None:
            if fleet.faults:
                pool = "window" if fleet.kind.endswith("windows") else "state"
                (fleet.faults["b"] / f"zero-{pool}").touch()
            else:
                for path, before in arenas.items():
                    invert_changed(path, before)

        try:
            got = await drained(router, fleet, client, damage)
        finally:
            for fault in fleet.faults.values():
                for each in fault.glob("zero-*"):
                    each.unlink()
    began_there = [
        received.said == true.said
        for received, true in zip(got, expected, strict=True)
        if received.instance == source.url
    ]
    assert not all(began_there)
    for server in fleet.servers:
        await asyncio.to_thread(server.wait_idle)
        await asyncio.to_thread(server.flush)


def invert_changed(arena: Path, before: np.ndarray) -> None:
    """Invert the highest bit of the exponent of each number that has changed."""
    with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        now = np.frombuffer(memory, np.uint32)
        now[now != before.view(np.uint32)] ^= 1 << 30
        del now
