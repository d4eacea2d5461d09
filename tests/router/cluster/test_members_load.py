"""Sixteen streams at a time while instances drain, hang, die, restart and leave: requests that had not begun
succeed.

The same with real servers is in ``tests/integration/cluster/test_real_members.py``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from streams import Streams

from sglang_ext.protocol.cluster import PATH, instance_path
from sglang_ext.router.fleet.fleet import State
from sglang_ext.testing.waiting import until
from tests.support.servers.workers import Gate, StandInWorker, running_worker

pytestmark = pytest.mark.slow

Start = Callable[..., Awaitable[StandInWorker]]


@pytest.fixture
async def streams(start_router: Any, client: aiohttp.ClientSession) -> Streams:
    return Streams(await start_router(health_check_timeout_secs=0.5), client)


async def join(streams: Streams, worker: StandInWorker, name: str, epoch: int) -> None:
    """Register, and be given requests."""
    body = {"url": worker.url, "instance": name, "epoch": f"{epoch:032x}"}
    async with streams.client.post(streams.router.url + PATH, json=body) as answer:
        assert answer.status == 200
    await until(lambda: streams.router.fleet.rows[worker.url].state is State.READY, 10)


async def call(streams: Streams, method: str, path: str, body: Any = None) -> Any:
    async with streams.client.request(method, streams.router.url + path, json=body) as answer:
        assert answer.status == 200
        return await answer.json()


async def test_instances_come_and_go(streams: Streams, start_worker: Start, eventually: Any) -> None:
    one, two = await start_worker(), await start_worker()
    await join(streams, one, "one", 1)
    async with streams.going_on():
        await join(streams, two, "two", 2)
        for _ in range(3):
            await call(streams, "POST", instance_path("one", "drain"), {"deadline_s": 30})
            await eventually(lambda: streams.router.fleet.rows[one.url].state is State.LEFT)
            before = len(one.requests)
            await streams.more()
            assert len(one.requests) == before
            await call(streams, "POST", instance_path("one", "drain"), {"cancel": True})
            await eventually(lambda: streams.router.fleet.rows[one.url].state is State.READY)
            await streams.more()
        await call(streams, "DELETE", instance_path("two"))
        await streams.more()
        await join(streams, two, "two", 2)
    assert streams.ends["broken off"] == 0


async def test_an_instance_hangs_and_goes_on(streams: Streams, start_worker: Start, eventually: Any) -> None:
    one, two = await start_worker(), await start_worker()
    await join(streams, one, "one", 1)
    await join(streams, two, "two", 2)
    async with streams.going_on():
        one.before_head, one.hang_probes = Gate(), Gate()
        await one.before_head.reached()
        await eventually(lambda: streams.router.fleet.rows[one.url].state is State.DOWN)
        await streams.more()
        one.before_head.open()
        one.hang_probes.open()
        one.before_head = one.hang_probes = None
        await eventually(lambda: streams.router.fleet.rows[one.url].state is State.READY)
    assert streams.ends["broken off"] == 0


async def test_an_instance_dies_and_is_started_anew(
    streams: Streams, start_worker: Start, tokenizer: Any, tokenizer_dir: Any, stack: AsyncExitStack
) -> None:
    def stand_in() -> StandInWorker:
        return StandInWorker(tokenizer=tokenizer, tokenizer_path=str(tokenizer_dir))

    await join(streams, await start_worker(), "steady", 100)
    port = 0
    async with streams.going_on():
        for epoch in range(1, 4):
            async with running_worker(stand_in(), port) as mortal:
                port = int(mortal.url.rpartition(":")[2])
                await join(streams, mortal, "mortal", epoch)
                await streams.more()
            await streams.more()


async def test_the_streams_would_notice(streams: Streams, start_worker: Start, eventually: Any) -> None:
    """The twin: without another instance to go to, clients see a death."""
    one = await start_worker()
    await join(streams, one, "one", 1)

    async def hang() -> None:
        async with streams.going_on():
            one.before_head, one.hang_probes = Gate(), Gate()
            await one.before_head.reached()
            await eventually(lambda: bool(streams.failures))
            one.before_head.open()
            one.hang_probes.open()

    with pytest.raises(AssertionError):
        await hang()
