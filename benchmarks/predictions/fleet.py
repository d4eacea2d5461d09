"""Real servers of a set-up and a router that records: one cell at a time is played on them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import aiohttp

from benchmarks.lib.quiet import DEFAULT, go_first, start_first, stolen_s, undisturbed
from benchmarks.predictions.cells import ESTIMATED, LOADS, MODEL, PAIR, Cell, Folder, estimate
from benchmarks.predictions.load import (
    THINK_S,
    Asked,
    arriving,
    beginnings,
    conversation,
    tokens,
    user,
    users_for,
)
from sglang_ext.calibration.command import Arguments
from sglang_ext.calibration.command import run as calibrate
from sglang_ext.cost_model import save
from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import until
from tests.support.servers.pd_servers import decode_spec, prefill_spec
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

CHUNK: Final = 2048
KEY: Final = "a-benchmark-s-key-0123456789-abcdefghij\n"
PARTS: Final = 5
"""Of a load, between which reference requests are sent to the idle servers."""
REFERENCES: Final = 3
"""At a time."""
REFERENCE_TOKENS: Final = 512
REFERENCE_ANSWER: Final = 24
CAPACITY_S: Final = 24.0
"""For which capacity is measured; the first third does not count."""
TIMEOUT: Final = aiohttp.ClientTimeout(total=600)


@dataclass(frozen=True)
class Setup:
    """Servers. count: colocated ones; with ``pair``, one for prefill and one for decode. users: that keep
    them busy. tiers: flags. hints: clients announce each turn when the one before has ended."""

    count: int
    users: int
    tiers: tuple[str, ...]
    disk: bool = False
    pair: bool = False
    hints: bool = False


_ROOMY: Final = ("--max-total-tokens", "16384", "--kv-dram-size", "128MB")
_SCARCE: Final = ("--max-total-tokens", "6144", "--kv-dram-size", "24MB")
SETUPS: Final = {
    "2-colocated": Setup(2, 12, _ROOMY),
    PAIR: Setup(2, 8, (*_ROOMY, "--kv-pd-caching", "2"), pair=True),
    "disk-hints": Setup(1, 6, _SCARCE, disk=True, hints=True),
    "3-colocated": Setup(3, 16, _ROOMY),
}


def spec(core: int, *flags: str) -> ServerSpec:
    """A server with one thread, on a core that it may share with others."""
    return ServerSpec(
        MODEL,
        flags=(
            *("--radix-cache-backend", "global", "--chunked-prefill-size", str(CHUNK)),
            *("--enable-cache-report", "--sleep-on-idle", *flags),
        ),
        environment={"SGLANG_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"},
    )


def make_profile(folder: Folder, lengths: int, rounds: int) -> None:
    """Calibrate a server by itself."""
    server = ServerProcess(spec(0, *_ROOMY))
    try:
        start_first([server])
        given = Arguments(longest=CHUNK, lengths=lengths, rounds=rounds)
        save(calibrate(given, server.url, lambda what, done, of: None), folder.profile)
    finally:
        server.stop()
        go_first([os.getpid()], DEFAULT)


class Fleet:
    """The servers of a set-up: a context manager."""

    def __init__(self, name: str, folder: Folder) -> None:
        self.name, self.setup, self._folder = name, SETUPS[name], folder
        self._port = free_port()
        self._stack = ExitStack()
        self.servers: list[ServerProcess] = []

    def __enter__(self) -> Self:
        try:
            scratch = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="predictions-")))
            self._key = scratch / "cluster.key"
            self._key.touch(mode=0o600)
            self._key.write_text(KEY, encoding="utf-8")
            self.servers = [ServerProcess(each) for each in self._specs(scratch)]
            self._stack.callback(go_first, [os.getpid()], DEFAULT)
            for server in self.servers:
                self._stack.callback(server.stop)
            start_first(self.servers)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _specs(self, scratch: Path) -> Iterator[ServerSpec]:
        setup, cores = self.setup, sorted(os.sched_getaffinity(0))
        router = ("--kv-router", f"http://127.0.0.1:{self._port}", "--kv-cluster-key-file", str(self._key))
        for number in range(setup.count):
            flags = (*setup.tiers, *router, "--kv-instance-id", f"s{number}")
            if setup.disk:
                flags = (*flags, "--kv-disk-path", str(scratch / f"disk{number}"), "--kv-disk-size", "1GB")
            found = spec(cores[number % len(cores)], *flags)
            if setup.pair:
                found = decode_spec(found) if number else prefill_spec(found, free_port())
            yield found

    @contextlib.asynccontextmanager
    async def _routed(self, policy: str, record: Path | None) -> AsyncIterator[Router]:
        estimates = policy == ESTIMATED
        config = RouterConfig(
            port=self._port,
            policy="cost" if estimates else policy,
            cluster_key_file=str(self._key),
            record=None if record is None else str(record),
            cost_profile=estimate() if estimates else str(self._folder.profile),
        )
        async with Router(config) as router:
            urls = [server.url for server in self.servers]
            await until(lambda: len(router.fleet.usable()) == len(urls), 120, "all servers")
            await until(lambda: all(router.trees.trusted(url) for url in urls), 120, "all servers")
            yield router

    def flush(self) -> None:
        """Nothing is cached any more."""
        for server in self.servers:
            server.wait_idle()
            server.flush()

    # -- measuring ------------------------------------------------------------------------------------

    def capacity(self, seconds: float = CAPACITY_S) -> float:
        """Requests a second that users who do not pause get answered."""
        self.flush()
        return asyncio.run(self._capacity(seconds))

    async def _capacity(self, seconds: float) -> float:
        async with self._routed("cost", None) as router, _client() as client:
            player = Player(client, router.url, hints=self.setup.hints)
            began = time.monotonic()
            talks = [user(0, number) for number in range(self.setup.users)]
            await player.users(talks, 0.0, lambda: time.monotonic() - began > seconds)
        counted = [at for at in player.ended if began + seconds / 3 <= at <= began + seconds]
        return len(counted) / (2 * seconds / 3)

    def play(self, cell: Cell, capacity: float, warm: int, count: int, jct_s: float) -> dict[str, Any]:
        """Play a cell, and record it. Returns the facts beside the recording.

        Args:
            capacity: requests a second. warm, count: requests that do not count yet, and that do.
            jct_s: of a request at that load, for the number of users.
        """
        self.flush()
        return asyncio.run(self._play(cell, capacity, warm, count, jct_s))

    async def _play(self, cell: Cell, capacity: float, warm: int, count: int, jct_s: float) -> dict[str, Any]:
        rate, core, stolen = LOADS[cell.load] * capacity, undisturbed(), stolen_s()
        total = warm + count
        users = users_for(rate, jct_s) if cell.closed else 0
        talks = [user(cell.seed, number) for number in range(users)]
        load = arriving(cell.seed, total)
        async with self._routed(cell.policy, self._folder.recording(cell)) as router, _client() as client:
            player = Player(client, router.url, hints=self.setup.hints)
            places, seconds = await self._references(player, cell, 0)
            references, took = [seconds], 0.0
            for part in range(1, PARTS + 1):
                began, sent = time.monotonic(), part * total // PARTS
                if cell.closed:
                    until_sent = sent + len(places)
                    await player.users(talks, THINK_S, lambda: player.sent >= until_sent)  # noqa: B023
                else:
                    await player.arrivals(load[(part - 1) * total // PARTS : sent], 1 / rate)
                took += time.monotonic() - began
                more, seconds = await self._references(player, cell, part)
                places += more
                references.append(seconds)
        return {
            "capacity": capacity,
            "rate": rate,
            "users": users,
            "sent": player.sent,
            "seconds": took,
            "warm": warm,
            "reference_places": places,
            "reference_s": references,
            "core_share": core,
            "stolen_s": stolen_s() - stolen,
            "load_1m": os.getloadavg()[0],
        }

    async def _references(
        self, player: Player, cell: Cell, part: int
    ) -> tuple[list[int], list[tuple[float, float]]]:
        """Send new prompts, one after the other.

        Returns:
            the places of these requests among all that were sent, and what `Player.ask` returns for each.
        """
        rng = random.Random(f"reference {cell.name} {part}")
        places, found = [], []
        for number in range(REFERENCES):
            prompt = tokens(rng, REFERENCE_TOKENS, REFERENCE_TOKENS)
            places.append(player.sent)
            found.append(await player.ask(Asked(f"reference-{part}-{number}", prompt, REFERENCE_ANSWER, 0.0)))
        return places, found


@contextlib.asynccontextmanager
async def _client() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0)
    async with aiohttp.ClientSession(connector=connector, timeout=TIMEOUT) as client:
        yield client


class Player:
    """Sends requests to a router. sent: how many; ended: when the answers did.

    Args:
        hints: announce a session's next request after each answer.
    """

    def __init__(self, client: aiohttp.ClientSession, url: str, *, hints: bool = False) -> None:
        self._client, self._url, self._hints = client, url, hints
        self.sent = 0
        self.ended: list[float] = []

    async def ask(self, asked: Asked) -> tuple[float, float]:
        """Send a request, and read its answer.

        Returns:
            seconds to the first token, and from the first token to the last.
        """
        sampling = {"temperature": 0, "max_new_tokens": asked.answer, "ignore_eos": True}
        body = {"input_ids": asked.prompt, "sampling_params": sampling, "stream": True}
        headers = {"x-session-id": asked.session}
        self.sent += 1
        begin = time.perf_counter()
        async with self._client.post(f"{self._url}/generate", json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            await response.content.readany()
            first = time.perf_counter()
            await response.read()
        last = time.perf_counter()
        self.ended.append(time.monotonic())
        if self._hints:
            hint = {"session": asked.session, "ttl_s": 30.0}
            async with self._client.post(f"{self._url}/v1/advisory", json=hint) as response:
                await response.read()
        return first - begin, last - first

    async def arrivals(self, load: list[Asked], gap_s: float) -> None:
        """Send each request at its moment, whether others have been answered or not."""
        due = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for asked in load:
                due += asked.gap * gap_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                group.create_task(self.ask(asked))

    async def users(self, talks: Iterable[Iterator[Asked]], think_s: float, over: Callable[[], bool]) -> None:
        """Users ask, wait for the answer, and think, until ``over``.

        Args:
            talks: the requests of each.
        """

        async def one(talk: Iterator[Asked]) -> None:
            for asked in talk:
                await asyncio.sleep(asked.gap * think_s)
                if over():
                    return
                await self.ask(asked)

        async with asyncio.TaskGroup() as group:
            for talk in talks:
                group.create_task(one(talk))


def expected_s(seconds: Callable[[int, int], float], step_s: float, seed: int = 1) -> float:
    """About the time to the last token of a request by itself.

    Args:
        seconds: of a prefill, by new and cached tokens. step_s: between two tokens.
    """
    rng, known = random.Random(seed), beginnings(seed)
    found = []
    for _ in range(20):
        before = 0
        for prompt, answer in itertools.islice(conversation(rng, known), 8):
            found.append(seconds(len(prompt) - before, before) + answer * step_s)
            before = len(prompt)
    return statistics.fmean(found)
