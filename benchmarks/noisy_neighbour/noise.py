"""Tenant A, in a process of its own: making its requests delays none of B's."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import aiohttp

from benchmarks.noisy_neighbour.compute import Compute, compute
from benchmarks.noisy_neighbour.mechanisms import MECHANISMS, Mechanism
from benchmarks.noisy_neighbour.sides import KEYS, Paced, Side, keep_on
from sglang_ext.testing.waiting import until

END_S = 30.0
Plain = tuple[float, float]
"""Plain requests: per second, and CPU seconds of each."""
MECHANISM = "mechanism"


class Noise:
    """Has A begin and stop."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.statuses: Counter[int] = Counter()
        """Of all answers that A got before it stopped last."""

    async def begin(self, plain: Plain | None = None) -> None:
        """Drive the mechanism from now on, or send plain requests; returns when A has its first answer."""
        self._pipe.send(plain or MECHANISM)
        await asyncio.to_thread(self._pipe.recv)

    async def stop(self) -> int:
        """Return when A has stopped: the requests that were answered since it began."""
        self._pipe.send(None)
        before, self.statuses = self.statuses[200], await asyncio.to_thread(self._pipe.recv)
        return self.statuses[200] - before


@contextlib.contextmanager
def noise(name: str, url: str) -> Iterator[Noise]:
    """A's process, for a mechanism."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(name, url, theirs))
    process.start()
    theirs.close()
    try:
        ours.recv()  # it has imported everything
        yield Noise(ours)
    finally:
        ours.close()
        process.join(END_S)
        process.kill()
        process.join()


def _run(name: str, url: str, pipe: Connection) -> None:
    with contextlib.suppress(EOFError), compute() as processes:
        asyncio.run(_obey(MECHANISMS[name], url, processes, pipe))


async def _obey(mechanism: Mechanism, url: str, processes: Compute, pipe: Connection) -> None:
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        a = Side(session, url, KEYS["a"])
        pipe.send("ready")
        while True:
            asked = await asyncio.to_thread(pipe.recv)
            if asked is None:
                continue
            drive = mechanism.drive if asked == MECHANISM else Paced(processes.take, *asked)
            tasks = [asyncio.create_task(keep_on(a, drive)) for _ in range(mechanism.at_once)]
            await _first_answer(a, tasks)
            pipe.send("begun")
            await asyncio.to_thread(pipe.recv)
            for task in tasks:
                task.cancel()
            for ended in await asyncio.gather(*tasks, return_exceptions=True):
                a.statuses[0] += isinstance(ended, Exception)  # a request without an answer
            pipe.send(+a.statuses)


async def _first_answer(a: Side, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Return when A has one more answer than now, a request has failed, or `END_S` are over."""
    before = a.statuses.total()
    with contextlib.suppress(TimeoutError):
        await until(lambda: a.statuses.total() > before or any(task.done() for task in tasks), END_S)
