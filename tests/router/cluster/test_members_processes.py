"""Instances in processes of their own, with real agents, stopped and killed under sixteen streams."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from streams import Streams

from sglang_ext.protocol.cluster import VERDICT_S
from sglang_ext.router import Router
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.testing.fakes import Stopwatch
from tests.support import ROOT
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.slow

PROGRAM = "tests.support.servers.instance_process"
PATIENCE = {"health_check_interval_secs": 0.5, "health_check_timeout_secs": 60.0}
"""Probes that never give up: failures are found by heartbeats alone."""


class Instance:
    """One process."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, epoch: str) -> None:
        self.process = process
        self.url = url
        self.epoch = epoch

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    async def line(self) -> Any:
        """The next thing that it says."""
        assert self.process.stdout is not None
        return json.loads(await asyncio.wait_for(self.process.stdout.readline(), 20))

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


Begin = Callable[[str], Awaitable[Instance]]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
async def begin(stack: AsyncExitStack, tokenizer_dir: Path, port: int) -> Begin:
    """Start an instance, which looks for its router."""

    async def start(name: str) -> Instance:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", PROGRAM, name, f"http://127.0.0.1:{port}", str(tokenizer_dir)),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONWARNINGS": "ignore"},
            cwd=ROOT,
        )
        found = Instance(process, "", "")
        stack.push_async_callback(found.end)
        said = await found.line()
        found.url, found.epoch = said["url"], said["epoch"]
        return found

    return start


@pytest.fixture
async def streams(start_router: Any, client: Any, port: int) -> Streams:
    return Streams(await start_router(port=port, **PATIENCE), client)


def told_blocks(router: Router, instance: Instance) -> int:
    """Blocks that an instance's agent has reported, if the report is trusted; else -1."""
    replica = router.trees.replica(instance.url)
    return replica.blocks if replica is not None and router.trees.trusted(instance.url) else -1


def state(router: Router, instance: Instance) -> State | None:
    row = router.fleet.rows.get(instance.url)
    return row.state if row else None


async def test_one_that_stands_still_is_forsaken_and_comes_back(
    streams: Streams, begin: Begin, eventually: Any
) -> None:
    router = streams.router
    one, two = await begin("one"), await begin("two")
    await eventually(lambda: len(router.fleet.usable()) == 2, 20.0)
    async with streams.going_on():
        await eventually(lambda: router.fleet.rows[one.url].in_flight > 0)
        with Stopwatch() as verdict:
            one.signal(signal.SIGSTOP)
            await eventually(lambda: state(router, one) is State.DOWN, 20.0)
        assert await two.line() == {"dead": "one", "epoch": one.epoch}
        assert told_blocks(router, one) == -1, "nothing that it told before is believed"
        await streams.more()
        one.signal(signal.SIGCONT)
        await eventually(lambda: state(router, one) is State.READY, 20.0)
        await eventually(lambda: router.fleet.rows[one.url].in_flight > 0)
        await eventually(lambda: told_blocks(router, one) > 0)
    assert verdict.seconds < VERDICT_S + 1.0


async def test_one_that_is_killed_is_started_anew(streams: Streams, begin: Begin, eventually: Any) -> None:
    router = streams.router
    one, two = await begin("one"), await begin("two")
    await eventually(lambda: len(router.fleet.usable()) == 2, 20.0)
    async with streams.going_on():
        for _ in range(2):
            await eventually(lambda: router.fleet.rows[one.url].in_flight > 0)  # noqa: B023
            one.signal(signal.SIGKILL)
            await eventually(lambda: state(router, one) is State.DOWN, 20.0)  # noqa: B023
            assert await two.line() == {"dead": "one", "epoch": one.epoch}
            await streams.more()
            one = await begin("one")
            await eventually(lambda: state(router, one) is State.READY, 20.0)  # noqa: B023
            await eventually(lambda: told_blocks(router, one) > 0)  # noqa: B023
    assert set(router.fleet.rows) == {one.url, two.url}
    assert router.fleet.rows[one.url].epoch == one.epoch


async def test_a_router_that_is_started_anew_is_found(
    start_router: Any, begin: Begin, port: int, eventually: Any
) -> None:
    instances = [await begin(name) for name in ("one", "two")]
    for _ in range(2):
        router = await start_router(port=port)
        await eventually(lambda: len(router.fleet.usable()) == 2, 20.0)  # noqa: B023
        assert {row.epoch for row in router.fleet.rows.values()} == {i.epoch for i in instances}
        await router.stop()
