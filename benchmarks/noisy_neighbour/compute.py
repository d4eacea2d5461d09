"""Compute of requests without any mechanism: processes that take so many CPU seconds for each request."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.router.processes import cpu_seconds as cpu_seconds_of


def burn(seconds: float) -> None:
    """Take so many CPU seconds."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Compute:
    """A process for each core, as many as the tokenizer's threads of a router."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool

    async def take(self, seconds: float) -> None:
        """Return when so many CPU seconds were taken."""
        await asyncio.get_running_loop().run_in_executor(self._pool, burn, seconds)


@contextmanager
def compute() -> Iterator[Compute]:
    """The processes, which end with the block. For a process that has no threads yet: they are forked."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, mp_context=multiprocessing.get_context("fork")) as pool:
        list(pool.map(burn, [0.001] * cores))  # they are there from now on
        yield Compute(pool)


def cpu_seconds() -> float:
    """CPU seconds of the running descendants of this process."""
    total = 0.0
    for pid in _below(os.getpid()):
        with suppress(OSError):  # it has ended meanwhile
            total += cpu_seconds_of(pid)
    return total


def _below(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text(encoding="ascii").split()):
                yield child
                yield from _below(child)
