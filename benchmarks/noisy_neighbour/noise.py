"""Tenant A, in a process of its own: making its requests delays none of B's."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import aiohttp

from benchmarks.noisy_neighbour.mechanisms import MECHANISMS
from benchmarks.noisy_neighbour.sides import KEYS, Side, keep_on
from sglang_ext.testing.waiting import until

END_S = 30.0


class Noise:
    """Has A begin and stop."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.statuses: Counter[int] = Counter()
        """Of all answers that A got before it stopped last."""

    async def begin(self) -> None:
        """Drive the mechanism from now on; returns when A has its first answer."""
        self._pipe.send(True)
        await asyncio.to_thread(self._pipe.recv)

    async def stop(self) -> None:
        """Return when A has stopped."""
        self._pipe.send(False)
        self.statuses = await asyncio.to_thread(self._pipe.recv)


@contextlib.contextmanager
def noise(name: str, url: str) -> Iterator[Noise]:
    """A's process, for a mechanism."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(name, url, theirs), daemon=True)
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
    with contextlib.suppress(EOFError):
        asyncio.run(_obey(name, url, pipe))


async def _obey(name: str, url: str, pipe: Connection) -> None:
    mechanism = MECHANISMS[name]
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        a = Side(session, url, KEYS["a"])
        pipe.send("ready")
        while True:
            if not await asyncio.to_thread(pipe.recv):
                continue
            tasks = [asyncio.create_task(keep_on(a, mechanism.drive)) for _ in range(mechanism.at_once)]
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
