"""The two tenants: their keys, their requests, and how B's latency is measured."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp

from benchmarks.lib.common import SEED, percentile

A_AT_ONCE = 8
KEYS = {"a": "sk-noisy-tenant-a", "b": "sk-quiet-tenant-b", "admin": "sk-admin"}
LIMITS = {"requests_per_second": 50, "tokens_per_minute": 20_000_000, "concurrent": 16, "priority": 10}
"""Of A's key."""
PLAIN_TOKENS = 64
"""Of a plain request of A's."""
SETTLED = 2.0
"""B has settled when its requests take at most so many times its median alone,"""
IN_A_ROW = 8
"""so many in a row."""
SETTLE_S = 60.0

VOCABULARY = [f"w{number:05}" for number in range(10**5)]
_words = random.Random(f"{SEED} {os.getpid()}")
"""A's process draws other words than B's."""
_numbers = itertools.count()


def number() -> int:
    """A number that was not used before."""
    return next(_numbers)


def text(size: int) -> str:
    """A text of about so many characters, none of whose pieces was used before."""
    return f"{number()} " + " ".join(_words.choices(VOCABULARY, k=size // 7))


def tokens(count: int) -> list[int]:
    """Random token ids."""
    return _words.choices(range(100, 30_000), k=count)


class NotSettledError(RuntimeError):
    """A's work was not done in time."""


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

    async def generate(self, prompt: str | list[int], **more: object) -> float:
        """Seconds of a request for one token."""
        named = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        body = {**named, "sampling_params": {"max_new_tokens": 1, "temperature": 0}, **more}
        return await self.send("POST", "/generate", body)


def failed(statuses: Counter[int]) -> int:
    """Answers that are neither right nor refusals by limits."""
    return sum(count for status, count in statuses.items() if status not in (200, 429))


Drive = Callable[[Side], Awaitable[None]]
"""Sends one of A's requests."""
Ask = Callable[[Side], Awaitable[float]]
"""A request of B's; returns its seconds."""


async def keep_on(a: Side, drive: Drive) -> None:
    """Drive a mechanism until cancelled; after a refusal, a moment later again."""
    while True:
        refused = a.statuses[429]
        await drive(a)
        if a.statuses[429] > refused:
            await asyncio.sleep(0.05)


class Paced:
    """Plain requests of A's in place of a mechanism's: as many per second, each with as many CPU seconds.

    Args:
        compute: takes the CPU seconds.
        per_s: requests.
        cpu_s: of one request.
    """

    def __init__(self, compute: Callable[[float], Awaitable[None]], per_s: float, cpu_s: float) -> None:
        self._compute = compute
        self._every_s = 1 / per_s
        self._cpu_s = cpu_s
        self._next = time.perf_counter()

    async def __call__(self, a: Side) -> None:
        """The next one, at its time."""
        now = time.perf_counter()
        due = max(self._next, now - self._every_s)
        self._next = due + self._every_s
        await asyncio.sleep(max(0.0, due - now))
        await asyncio.gather(a.generate(tokens(PLAIN_TOKENS)), self._compute(self._cpu_s))


async def pace(b: Side, ask: Ask, seconds: float, per_s: float) -> list[float]:
    """B's latencies: requests begin at their times, whether earlier ones are answered or not."""
    tasks = []
    begun = time.perf_counter()
    for index in range(max(2, int(seconds * per_s))):
        await asyncio.sleep(max(0.0, begun + index / per_s - time.perf_counter()))
        tasks.append(asyncio.ensure_future(ask(b)))
    return list(await asyncio.gather(*tasks))


async def settle(b: Side, ask: Ask, alone_s: float, timeout_s: float = SETTLE_S) -> None:
    """Wait until A's work is done: B's own requests, one after the other, take no longer than
    `SETTLED` times ``alone_s``, `IN_A_ROW` of them.

    Raises:
        NotSettledError: that did not happen within ``timeout_s``.
    """
    took: list[float] = []
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        took.append(await ask(b))
        if len(took) >= IN_A_ROW and max(took[-IN_A_ROW:]) <= SETTLED * alone_s:
            return
    raise NotSettledError(
        f"after {timeout_s:g} s, B's requests alone took {percentile(took[-IN_A_ROW:], 50) * 1e3:.0f} ms, "
        f"and before A's {alone_s * 1e3:.0f} ms"
    )
