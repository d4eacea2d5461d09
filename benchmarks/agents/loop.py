"""Agents in a closed loop: each sends a turn, waits for the answer, pauses, and sends the next."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.agents.recorded import Program, Step, tokens
from benchmarks.lib.common import percentile

TIMEOUT_S = 600.0
BLOCK_TOKENS = 16
SYSTEM_TOKENS = 352
"""With which all sessions begin: tools and system prompt of the recorded ones, divided like all lengths."""
AHEAD_S = 1.0
"""How long before its turn a client sends its own hint."""


@dataclass(frozen=True, slots=True)
class Served:
    """One turn. Times are seconds of ``time.perf_counter``.

    known: tokens of the prompt that the turns before had. hbm: tokens found there at arrival. moved: tokens
    brought to HBM for its hint. expected: whether a hint has announced it.
    """

    program: str
    sent: float
    first: float
    ended: float
    prompt: int
    known: int
    hbm: int
    below: int
    answer: int
    first_of_program: bool
    tool: bool
    expected: bool = False
    moved: int = 0
    status: int = 200

    @property
    def ttft(self) -> float:
        return self.first - self.sent

    @property
    def in_hbm(self) -> bool:
        """All whole blocks of the turns before, but for one, were there."""
        return self.hbm >= self.known // BLOCK_TOKENS * BLOCK_TOKENS - BLOCK_TOKENS


@dataclass
class Load:
    """One measurement. name: goes before the names of sessions. begins: when turns count from."""

    name: str
    seconds: float
    hints: bool = False
    """Clients send hints of their own."""
    asks: bool = False
    """Ask the router for the KV that it has brought for each turn."""
    warm_s: float = 0.0
    served: list[Served] = field(default_factory=list)
    began: float = 0.0

    @property
    def counted(self) -> list[Served]:
        """Turns that were sent after the warm-up, and were not the first of their session."""
        return [
            each
            for each in self.served
            if each.sent >= self.began + self.warm_s and not each.first_of_program and each.status == 200
        ]


class Agents:
    """Plays programs against a router or a server at ``url``."""

    def __init__(self, url: str, load: Load) -> None:
        self._url = url
        self._load = load
        self._http: aiohttp.ClientSession | None = None
        self._turns = 0

    def play(self, lines: Sequence[Sequence[Program]]) -> None:
        """An agent for each line of programs, for as long as the load lasts."""

        async def all_of_them() -> None:
            async with self._open():
                self._load.began = time.perf_counter()
                tasks = [asyncio.create_task(self._agent(number, line)) for number, line in enumerate(lines)]
                await asyncio.wait(tasks, timeout=self._load.seconds + 20.0)
                for task in tasks:
                    task.cancel()
                for ended in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(ended, Exception):
                        raise ended

        asyncio.run(all_of_them())

    @property
    def _over(self) -> bool:
        return time.perf_counter() > self._load.began + self._load.seconds

    async def _agent(self, number: int, line: Sequence[Program]) -> None:
        await asyncio.sleep(0.05 * number)
        for program in line:
            name = f"{self._load.name}/{number}/{program.id}"
            history = [*tokens("system", SYSTEM_TOKENS), *tokens(name, max(1, program.past - SYSTEM_TOKENS))]
            steps = (Step(0.0, 1, 2, tool=False), *program.steps)
            for at, step in enumerate(steps):
                hint = await self._pause(name, step, first=at == 0)
                if self._over:
                    return
                new = tokens(f"{name} {at}", step.new)
                served, answer = await self._send(name, at, step, [*history, *new], len(history), hint)
                self._load.served.append(served)
                history += [*new, *answer]

    async def _pause(self, name: str, step: Step, *, first: bool) -> str | None:
        """Wait for the step's turn; the id of the hint that has announced it, if the client sends one."""
        if first:
            return None
        ahead = min(AHEAD_S, step.pause_s) if self._load.hints else 0.0
        await asyncio.sleep(step.pause_s - ahead)
        if not self._load.hints:
            return None
        assert self._http is not None
        body = {"session": name, "ttl_s": 30.0}
        async with self._http.post(f"{self._url}/v1/advisory", json=body) as response:
            told = await response.json()
        await asyncio.sleep(ahead)
        return str(told["id"]) if told.get("id") else None

    async def _send(
        self, name: str, at: int, step: Step, prompt: list[int], known: int, hint: str | None
    ) -> tuple[Served, list[int]]:
        assert self._http is not None
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": step.answer, "ignore_eos": True},
            "stream": True,
        }
        headers = {
            "x-session-id": name,
            "user-agent": "claude-cli/2.1",
            "x-request-id": f"{name}/{at}".replace("/", "-"),
        }
        sent, first, last = time.perf_counter(), 0.0, b""
        async with self._http.post(f"{self._url}/generate", json=body, headers=headers) as response:
            status = response.status
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter()
                    last = line
        ended = time.perf_counter()
        served = Served(
            name, sent, first or ended, ended, len(prompt), known, 0, 0, 0, at == 0, step.tool, status=status
        )
        if not last:
            return served, []
        event = json.loads(last.removeprefix(b"data: "))
        meta = event["meta_info"]
        details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"]}
        served = dataclasses.replace(
            served,
            hbm=details.get("device", 0),
            below=details.get("host", 0) + details.get("storage", 0),
            answer=meta["completion_tokens"],
        )
        if self._load.asks and at:
            hint = hint or await self._learnt(f"{name}/{at - 1}".replace("/", "-"))
            if hint:
                served = dataclasses.replace(served, expected=True, moved=await self._moved(hint))
        return served, list(event["output_ids"])

    async def _learnt(self, request: str) -> str | None:
        """The router's own hint after a request."""
        assert self._http is not None
        async with self._http.get(f"{self._url}/explain/{request}") as response:
            pause = (await response.json()).get("pause") if response.status == 200 else None
        return None if pause is None else pause["hint"]

    async def _moved(self, hint: str) -> int:
        assert self._http is not None
        async with self._http.get(f"{self._url}/v1/advisory/{hint}") as response:
            return int((await response.json()).get("moved_tokens", 0)) if response.status == 200 else 0

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            read_bufsize=1 << 20,
        ) as self._http:
            yield


def lines_of(programs: Sequence[Program], agents: int) -> list[list[Program]]:
    """The programs of each agent. Several agents may play the same one, as sessions of their own."""
    return [
        [programs[(agent + agents * round) % len(programs)] for round in range(4)] for agent in range(agents)
    ]


def times(values: Iterator[float] | Sequence[float]) -> dict[str, float]:
    """Mean, median and 90th percentile in milliseconds."""
    found = sorted(values)
    if not found:
        return {"mean_ms": 0.0, "p50_ms": 0.0, "p90_ms": 0.0}
    return {
        "mean_ms": 1e3 * statistics.fmean(found),
        "p50_ms": 1e3 * percentile(found, 50),
        "p90_ms": 1e3 * percentile(found, 90),
    }
