"""The clock that is moved by hand."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from sglang_ext.testing.fakes import FakeClock, Stopwatch
from sglang_ext.testing.waiting import wait_until


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


STOPPED = """
import sys, time
from sglang_ext.testing.fakes import Stopwatch
with Stopwatch() as watch:
    began = time.monotonic()
    print("running", flush=True)
    sys.stdin.readline()
    took = time.monotonic() - began
print(took, watch.seconds)
"""


def test_a_stopwatch_does_not_count_what_passes_while_its_process_stands_still() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        stopped = time.monotonic()
        wait_until(lambda: time.monotonic() - stopped > 1.0, seconds=30, what="a second")
        process.send_signal(signal.SIGCONT)
        took, counted = map(float, process.communicate("\n", timeout=60)[0].split())
    assert took > 1.0
    assert counted < took / 2


def test_a_stopwatch_counts_what_passes_while_its_process_waits() -> None:
    with Stopwatch() as watch:
        wait_until(lambda: watch.seconds > 0.2, seconds=30, what="a moment")
    assert 0.2 < watch.seconds < 30
