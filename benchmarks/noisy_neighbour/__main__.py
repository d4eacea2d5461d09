"""Tenant B's latency while tenant A stays within its key's limits and drives one mechanism to its maximum.

A router and stand-in workers are processes of their own. B sends prompts that nobody has sent before, at a
steady pace; A does one thing as fast as its key lets it. The phases take turns, and each is compared with B
alone right before it: the aim is a P99 of B's of at most 1.5 times that. Refusals of A (429) are its limits
at work and are counted. Disks and spilling need servers with KV, which stand-ins have not.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from benchmarks.lib.common import SEED, Options, Report, at_most, percentile
from benchmarks.router.processes import our_router, process, stand_ins, wait_for
from sglang_ext.flags import flag, one_of
from sglang_ext.testing.tokenizer import write_tokenizer
from tests.support.servers.ports import free_port

WORKERS = 2
SERVICE_S = 0.02
PLACES = 8
"""Requests that an instance works on at a time."""
CONTEXT = 131_072
B_PER_S = 20.0
B_CHARS = 4096
LONG_CHARS = 200_000
A_AT_ONCE = 8
KEYS = {"a": "sk-noisy-tenant-a", "b": "sk-quiet-tenant-b"}
LIMITS = {"requests_per_second": 50, "tokens_per_minute": 20_000_000, "concurrent": 16, "priority": 10}
"""Of A's key."""
RATIO = 1.5
SETTLED_S = 4 * SERVICE_S
SETTLE_TRIES = 200

_words = random.Random(SEED)
_numbers = itertools.count()


def text(size: int) -> str:
    """A text of about so many characters, none of whose pieces was used before."""
    count = size // 7
    return f"{next(_numbers)} " + " ".join(f"w{_words.randrange(10**5)}" for _ in range(count))


@dataclass
class Side:
    """A tenant's connection to the router."""

    session: aiohttp.ClientSession
    url: str
    key: str
    statuses: Counter[int] = field(default_factory=Counter)

    async def send(self, method: str, path: str, body: object = None) -> float:
        """Seconds until the whole answer was there."""
        begun = time.perf_counter()
        headers = {"authorization": f"Bearer {self.key}"}
        async with self.session.request(method, self.url + path, json=body, headers=headers) as answer:
            await answer.read()
            self.statuses[answer.status] += 1
        return time.perf_counter() - begun

    async def generate(self, size: int, **more: object) -> float:
        body = {"text": text(size), "sampling_params": {"max_new_tokens": 1}, **more}
        return await self.send("POST", "/generate", body)


async def tokenizing(a: Side) -> None:
    """Prompts near the context's length."""
    await a.generate(LONG_CHARS)


async def asked_tokens(a: Side) -> None:
    """Texts to be tokenized, and nothing else."""
    await a.send("POST", "/tokenize", {"prompt": text(LONG_CHARS)})


async def hints(a: Side) -> None:
    """Hints at long prompts that live as long as they may."""
    await a.send("POST", "/v1/advisory", {"text": text(LONG_CHARS // 4), "ttl_s": 3600})


async def documents(a: Side) -> None:
    """Documents that replace each other."""
    name = f"/v1/documents/{next(_numbers) % 16}"
    await a.send("PUT", name, {"text": text(LONG_CHARS // 4)})


async def priorities(a: Side) -> None:
    """Many short requests of the highest priority that its key allows."""
    await a.generate(256, priority=LIMITS["priority"])


MECHANISMS: dict[str, Callable[[Side], Awaitable[None]]] = {
    "tokenizing": tokenizing,
    "tokenize-endpoint": asked_tokens,
    "hints": hints,
    "documents": documents,
    "priorities": priorities,
}
AIMS = {f"p99_{name}_vs_alone": at_most(RATIO) for name in MECHANISMS}


@dataclass(frozen=True, kw_only=True)
class NoisyOptions(Options):
    """The flags of this benchmark."""

    mechanisms: tuple[str, ...] = flag(tuple(MECHANISMS), "What A drives.", one_of(*MECHANISMS), several="+")


async def keep_on(a: Side, drive: Callable[[Side], Awaitable[None]]) -> None:
    """Drive a mechanism until cancelled; after a refusal, a moment later again."""
    while True:
        refused = a.statuses[429]
        await drive(a)
        if a.statuses[429] > refused:
            await asyncio.sleep(0.05)


async def pace(b: Side, seconds: float) -> list[float]:
    """B's latencies: requests begin at their times, whether earlier ones are answered or not."""
    tasks = []
    begun = time.perf_counter()
    for number in range(max(2, int(seconds * B_PER_S))):
        await asyncio.sleep(max(0.0, begun + number / B_PER_S - time.perf_counter()))
        tasks.append(asyncio.create_task(b.generate(B_CHARS)))
    return list(await asyncio.gather(*tasks))


async def phase(
    b: Side, seconds: float, a: Side, drive: Callable[[Side], Awaitable[None]] | None
) -> list[float]:
    """B's latencies while A does something, or nothing."""
    noisy = [] if drive is None else [asyncio.create_task(keep_on(a, drive)) for _ in range(A_AT_ONCE)]
    try:
        return await pace(b, seconds)
    finally:
        for task in noisy:
            task.cancel()
        await asyncio.gather(*noisy, return_exceptions=True)


async def settle(b: Side) -> None:
    """Wait until what A has left behind is done: B's short requests take no longer than ``SETTLED_S``."""
    for _ in range(SETTLE_TRIES):
        if await b.generate(64) < SETTLED_S:
            return
        await asyncio.sleep(0.1)


async def measure(options: NoisyOptions, report: Report, url: str) -> None:
    """Rows by mechanism, and the ratios of B's P99."""
    seconds, rounds = options.pick((20.0, 3), quick=(6.0, 1), tiny=(0.5, 1))
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await phase(Side(session, url, KEYS["b"]), seconds / 4, Side(session, url, KEYS["a"]), None)
        for name in options.mechanisms:
            ratios, alone, beside = [], [], []
            a, b = Side(session, url, KEYS["a"]), Side(session, url, KEYS["b"])
            for _ in range(rounds):
                await settle(b)
                quiet = await phase(b, seconds, a, None)
                noisy = await phase(b, seconds, a, MECHANISMS[name])
                ratios.append(percentile(noisy, 99) / percentile(quiet, 99))
                alone += quiet
                beside += noisy
            ratio = statistics.median(ratios)
            report.add(
                name,
                b_p50_alone_ms=percentile(alone, 50) * 1e3,
                b_p99_alone_ms=percentile(alone, 99) * 1e3,
                b_p50_ms=percentile(beside, 50) * 1e3,
                b_p99_ms=percentile(beside, 99) * 1e3,
                ratio=ratio,
                b_failed=sum(count for status, count in b.statuses.items() if status != 200),
                a_done=a.statuses[200],
                a_refused=a.statuses[429],
                a_failed=sum(count for status, count in a.statuses.items() if status not in (200, 429)),
            )
            report.summary[f"p99_{name}_vs_alone"] = ratio


def key_file(folder: Path) -> Path:
    """The keys of both tenants."""
    path = folder / "keys.json"
    entries = [{"key": KEYS["a"], "tenant": "a", **LIMITS}, {"key": KEYS["b"], "tenant": "b"}]
    path.write_text(json.dumps({"keys": entries}), encoding="utf-8")
    os.chmod(path, 0o600)
    return path


@contextlib.contextmanager
def running(folder: Path) -> Iterator[str]:
    """The router's URL, while it runs."""
    tokenizer = folder / "tokenizer"
    tokenizer.mkdir()
    write_tokenizer(tokenizer, CONTEXT)
    with stand_ins(folder, tokenizer=tokenizer, service_s=SERVICE_S, count=WORKERS, core=None) as ports:
        port = free_port()
        urls = [f"http://127.0.0.1:{each}" for each in ports]
        flags = ("--api-keys-file", str(key_file(folder)), "--max-running-per-instance", str(PLACES))
        command = our_router(port, urls, *flags)
        with process(command, core=None, log=folder / "router.log") as router:
            wait_for(port, router, "/health")
            yield f"http://127.0.0.1:{port}"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = NoisyOptions.of(argv, "noisy_neighbour", __doc__)
    report = Report("noisy_neighbour", AIMS)
    report.note("disk, spilling and documents' KV were not driven: stand-in workers have none")
    with tempfile.TemporaryDirectory(prefix="noisy-neighbour-") as name, running(Path(name)) as url:
        asyncio.run(measure(options, report, url))
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
