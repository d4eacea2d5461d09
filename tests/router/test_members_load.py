"""Sixteen streams at a time while instances drain, hang, die, restart and leave: what had not begun succeeds.

The same with real servers is in ``tests/integration/test_members.py``.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest

from router import Router
from router.fleet import State
from sglang_ext.cluster_messages import PATH, instance_path
from sglang_ext.testing.workers import Gate, StandInWorker, running_worker

STREAMS = 16


class Streams:
    """Streams without end, and how they ended."""

    def __init__(self, router: Router, client: aiohttp.ClientSession) -> None:
        self.router = router
        self.client = client
        self.ends: Counter[str] = Counter()
        self.failures: list[str] = []
        self._numbers = itertools.count()
        self._ending = False

    async def _stream(self) -> None:
        while not self._ending:
            first = 10 * next(self._numbers) % 3000
            body = {
                "input_ids": list(range(first, first + 64)),
                "sampling_params": {"max_new_tokens": 6},
                "stream": True,
            }
            async with self.client.post(self.router.url + "/generate", json=body) as answer:
                text = await answer.text()
            if answer.status == 200:
                self.ends["whole" if text.rstrip().endswith("[DONE]") else "broken off"] += 1
            else:
                self.failures.append(f"{answer.status} {text[:300]}")

    async def more(self, count: int = 60) -> None:
        """Wait until so many more have ended."""
        enough = self.ends.total() + count
        async with asyncio.timeout(30):
            while self.ends.total() < enough and not self.failures:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Send while the block runs, and look afterwards how it went."""
        tasks = [asyncio.create_task(self._stream()) for _ in range(STREAMS)]
        try:
            await self.more()
            yield
            await self.more()
        finally:
            self._ending = True
            await asyncio.gather(*tasks)
        assert self.failures == []


Start = Callable[..., Awaitable[StandInWorker]]


@pytest.fixture
async def streams(start_router: Any, client: aiohttp.ClientSession) -> Streams:
    return Streams(await start_router(health_check_timeout_secs=0.5), client)


async def join(streams: Streams, worker: StandInWorker, name: str, epoch: int) -> None:
    """Register, and be given requests."""
    body = {"url": worker.url, "instance": name, "epoch": f"{epoch:032x}"}
    async with streams.client.post(streams.router.url + PATH, json=body) as answer:
        assert answer.status == 200
    async with asyncio.timeout(10):
        while streams.router.fleet.rows[worker.url].state is not State.READY:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


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
    """The twin: with nobody else to go to, a death is seen."""
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
