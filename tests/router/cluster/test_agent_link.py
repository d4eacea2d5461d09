"""The channel to a silent agent: when it is made anew, and that its socket is closed however it ends."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_ext.clock import SystemClock
from sglang_ext.protocol.agent import Running
from sglang_ext.protocol.cluster import Registration
from sglang_ext.router.cluster.agent_link import Link
from sglang_ext.router.cluster.agents import Agents
from sglang_ext.router.index.index import Index
from sglang_ext.testing.fakes import FakeClock

SILENT = Registration(url="http://127.0.0.1:1", instance="a", epoch="0" * 32, agent="tcp://127.0.0.1:1")


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All that channels open."""
    found: list[Any] = []
    connected = Agents.socket

    def socket(agents: Agents, registration: Registration) -> Any:
        found.append(connected(agents, registration))
        return found[-1]

    monkeypatch.setattr(Agents, "socket", socket)
    return found


async def test_a_channel_that_is_ended_while_it_is_made_anew_leaves_no_socket(
    sockets: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that was left would keep the router from ever ending."""
    ending = asyncio.Event()

    async def receive(_link: Link) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.sleep(0)  # the task that waits for this end is cancelled meanwhile

    monkeypatch.setattr(Link, "_receive", receive)
    clock = SystemClock()
    agents = Agents(Index(clock, block_size=16, max_bytes=1 << 20), clock, router="r")
    agents.verdict_s = 0.6
    agents.connect(SILENT.url, SILENT)
    await ending.wait()
    assert [socket.closed for socket in sockets] == [False]
    agents.disconnect(SILENT.url)
    await asyncio.gather(*agents._ending, return_exceptions=True)
    left = [socket for socket in sockets if not socket.closed]
    for socket in left:
        socket.close(linger=0)
    await agents.close()
    assert not left


async def pass_by(clock: FakeClock, seconds: int) -> None:
    """In one step it would be this process that stood still."""
    for step in range(10 * seconds + 1):
        while not clock.sleepers:  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0)
        if step:
            clock.advance(0.1)
            await asyncio.sleep(0)


async def test_another_verdict_counts_for_a_channel_that_stands(sockets: list[Any]) -> None:
    clock = FakeClock()
    agents = Agents(Index(clock, block_size=16, max_bytes=1 << 20), clock, router="r")
    agents.connect(SILENT.url, SILENT)
    try:
        await pass_by(clock, 0)
        agents.verdict_s = 20.0
        for channels, seconds in ((1, 19), (2, 2)):
            await pass_by(clock, seconds)
            assert len(sockets) == channels
    finally:
        agents.disconnect(SILENT.url)
        await agents.close()


class Listener:
    """Remembers which instances were reported as silent."""

    def __init__(self) -> None:
        self.silent: list[str] = []

    def on_heartbeat(self, name: str, epoch: str) -> None:
        pass

    def on_silent(self, name: str) -> None:
        self.silent.append(name)


async def test_an_agent_that_falls_silent_is_reported_once(sockets: list[Any]) -> None:
    """Its index is not trusted from then on (`health.py`). An agent that never sent a heartbeat is not
    reported."""
    clock, listener = FakeClock(), Listener()
    agents = Agents(Index(clock, block_size=16, max_bytes=1 << 20), clock, router="r", listener=listener)
    agents.verdict_s = 5.0
    agents.connect(SILENT.url, SILENT)
    try:
        await pass_by(clock, 7)
        assert not listener.silent
        agents._links[SILENT.url]._take(Running(bytes(16), "a message"))
        await pass_by(clock, 4)
        assert not listener.silent
        await pass_by(clock, 20)
        assert listener.silent == [SILENT.url]
    finally:
        agents.disconnect(SILENT.url)
        await agents.close()
