"""Tasks beside their owner: kept until they end, cancelled together, and reported when they fail."""

from __future__ import annotations

import asyncio
import gc

from sglang_ext.tasks import Tasks


async def test_a_task_is_kept_until_it_ends_and_its_error_is_logged() -> None:
    told: list[BaseException] = []
    tasks, may_go = Tasks(told.append), asyncio.Event()

    async def fails() -> None:
        await may_go.wait()
        raise ValueError("as it must")

    tasks.start(fails(), name="fails")
    gc.collect()
    assert [task.get_name() for task in tasks] == ["fails"]
    may_go.set()
    await asyncio.wait(tasks)
    await asyncio.sleep(0)
    assert not tasks
    assert [str(error) for error in told] == ["as it must"]


async def test_all_are_cancelled_and_none_of_that_is_an_error() -> None:
    told: list[BaseException] = []
    tasks, ended = Tasks(told.append), []

    async def waits(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    tasks.start(waits("started"))
    tasks.keep(asyncio.create_task(waits("kept")))
    await asyncio.sleep(0)
    await tasks.cancel()
    assert sorted(ended) == ["kept", "started"]
    assert not tasks
    assert not told
