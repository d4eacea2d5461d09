"""The clock that is moved by hand."""

from __future__ import annotations

import asyncio

import pytest

from sglang_ext.testing.fakes import FakeClock


def test_it_stands_still_until_it_is_moved() -> None:
    clock = FakeClock(start=5.0, wall=100.0)
    assert (clock.monotonic(), clock.wall()) == (5.0, 100.0)
    clock.advance(2.5)
    assert (clock.monotonic(), clock.wall()) == (7.5, 102.5)
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1.0)


async def test_sleepers_wake_in_order_and_may_sleep_again() -> None:
    clock = FakeClock(start=0.0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, every: float) -> None:
        while True:
            await clock.sleep(every)
            woken.append((name, clock.monotonic()))

    tasks = [asyncio.create_task(sleeper("a", 2.0)), asyncio.create_task(sleeper("b", 3.0))]
    await asyncio.sleep(0)
    assert clock.sleepers == 2
    await clock.pass_time(7.0)
    assert woken == [("a", 2.0), ("b", 3.0), ("a", 4.0), ("b", 6.0), ("a", 6.0)]
    assert clock.monotonic() == 7.0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert clock.sleepers == 0
