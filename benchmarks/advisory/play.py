"""Playing people and agents against a router: requests, and the hints that go before them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.advisory.figures import Advised, Served
from benchmarks.advisory.graphs import Call
from benchmarks.advisory.talks import Ask, Talk, drawn
from benchmarks.lib.quiet import stolen_s
from sglang_ext.tasks import Tasks

TIMEOUT_S = 120.0
DRAIN_S = 30.0
"""How long requests that are under way when a measurement ends may take."""
HINT_TTL_S = 60.0


@dataclass
class Scene:
    """One measurement.

    name: goes before the names of sessions: the same for all measurements of one system. mark: a token that
    precedes the new tokens of each request, so that no measurement finds KV that another one has computed.
    hints: whether hints are sent at all. levels: levels of the varied parameter, one per slice of ``slice_s``
    seconds. missing: of a level, the share of requests whose hint is missing. urgent: of a level, the share
    of sessions with a high priority.
    """

    name: str
    seed: int
    seconds: float
    hints: bool = False
    mark: int | None = None
    levels: Sequence[float] = (0.0,)
    slice_s: float = 1e9
    missing: Callable[[float], float] = lambda level: 0.0
    urgent: Callable[[float], float] | None = None
    served: list[Served] = field(default_factory=list)
    hints_sent: int = 0
    hints_refused: int = 0

    def level(self, elapsed: float) -> float:
        """The level so many seconds after the beginning."""
        return self.levels[min(len(self.levels) - 1, int(elapsed / self.slice_s))]


class Player:
    """Plays against the router or server at ``url``."""

    def __init__(self, url: str, scene: Scene) -> None:
        self._url = url
        self._scene = scene
        self._http: aiohttp.ClientSession | None = None
        self._begin = 0.0
        self._tasks = Tasks()
        self._hints: dict[str, tuple[str, float]] = {}
        """Session -> id of its last hint, and when it was sent."""

    # -- the load -------------------------------------------------------------------------------

    def warm(self, talks: Sequence[Talk], at_once: int) -> None:
        """Have the turns before the measurement computed and kept."""

        async def play() -> None:
            line = iter([talk for talk in talks if talk.past])

            async def one(line: Iterator[Talk] = line) -> None:
                for talk in line:
                    await self._send(talk.name, 0, list(talk.past), 0, 1)

            async with self._open():
                await asyncio.gather(*(one() for _ in range(at_once)))

        asyncio.run(play())

    def people(self, users: Sequence[Iterator[Talk]]) -> None:
        """A fixed number of users, for as long as the scene lasts."""

        async def play() -> None:
            async with self._open():
                self._begin = time.perf_counter()
                tasks = [asyncio.create_task(self._user(user)) for user in users]
                await self._to_the_end(tasks, self._scene.seconds + DRAIN_S)

        asyncio.run(play())

    def in_turn(self, talks: Sequence[Talk], ahead: int) -> None:
        """One request at a time: the requests of one talk, each behind its past, then those of the next. A
        talk's hint comes ``ahead`` talks earlier, so its KV is promoted while others are served, by turns
        during each request of a talk; level 1 marks the requests served beside such moves.
        """

        async def play() -> None:
            async with self._open():
                self._begin = time.perf_counter()
                for number, talk in enumerate(talks):
                    for turn, ask in enumerate(talk.asks, 1):
                        beside = number + ahead < len(talks) and number % len(talk.asks) == turn - 1
                        if beside:
                            await self._hint(talks[number + ahead].name, 0)
                        served, _ = await self._send(
                            talk.name, turn, [*talk.past, *ask.new], len(talk.past), ask.answer,
                            level=float(beside), hinted=turn == 1 and number >= ahead and self._scene.hints,
                        )  # fmt: skip
                        self._scene.served.append(served)

        asyncio.run(play())

    def announced(self, talks: Sequence[Talk], wait_s: float) -> None:
        """The hints of all talks at once; after so many seconds their requests, one at a time."""

        async def play() -> None:
            async with self._open():
                for talk in talks:
                    await self._hint(talk.name, 0, said=list(talk.past))
                await asyncio.sleep(wait_s)
                for talk in talks:
                    for turn, ask in enumerate(talk.asks, 1):
                        served, _ = await self._send(
                            talk.name, turn, [*talk.past, *ask.new], len(talk.past), ask.answer,
                            hinted=turn == 1,
                        )  # fmt: skip
                        self._scene.served.append(served)

        asyncio.run(play())

    def agents(self, runs: Sequence[Sequence[Call]]) -> list[float]:
        """Runs of agents, all at once; the seconds that each took."""

        async def play() -> list[float]:
            async with self._open():
                self._begin = time.perf_counter()
                return list(await asyncio.gather(*(self._agents(run) for run in runs)))

        return asyncio.run(play())

    # -- users ------------------------------------------------------------------------------------

    async def _user(self, talks: Iterator[Talk]) -> None:
        for talk in talks:
            history = list(talk.past)
            for turn, ask in enumerate(talk.asks, 1):
                if not await self._turn(talk.name, turn, history, ask):
                    return

    async def _turn(self, session: str, turn: int, history: list[int], ask: Ask) -> bool:
        """A turn, whose tokens come behind ``history``. False when the measurement has ended before it."""
        scene = self._scene
        if self._elapsed + ask.reading_s + ask.typing_s > scene.seconds:
            return False
        await asyncio.sleep(ask.reading_s)
        level = scene.level(self._elapsed)
        priority = int(scene.urgent is not None and drawn(scene.seed, session, 0, scene.urgent(level)))
        # Of a session that has not sent anything nothing can be moved.
        hinted = scene.hints and bool(history) and not drawn(scene.seed, session, turn, scene.missing(level))
        if hinted:
            # A router knows the session's last request, which is another measurement's at first.
            self._aside(self._hint(session, priority, said=history if turn == 1 else None))
        await asyncio.sleep(ask.typing_s)
        new = ask.new if scene.mark is None else (scene.mark, *ask.new)
        served, answer = await self._send(
            session, turn, [*history, *new], len(history), ask.answer, priority, level, hinted=hinted
        )
        await self._keep(served)
        history += [*new, *answer]
        return True

    async def _agents(self, run: Sequence[Call]) -> float:
        begin = time.perf_counter()
        said: dict[str, list[int]] = {}
        hinted: set[str] = set()
        answered = [asyncio.Event() for _ in run]

        async def one(place: int, call: Call) -> None:
            for before in call.after:
                await answered[before].wait()
            await asyncio.sleep(call.pause_s)
            history = said.get(call.session, [])[: call.keeps]
            announced = call.session in hinted
            hinted.discard(call.session)
            for edge in call.edges if self._scene.hints else ():
                if edge.session in said:
                    # While this one works, the KV of those behind it can move.
                    hinted.add(edge.session)
                    self._aside(self._hint(edge.session, 0, edge.earliest_s))
            served, answer = await self._send(
                call.session, place, [*history, *call.new], len(history), call.answer, hinted=announced
            )
            await self._keep(served)
            said[call.session] = [*history, *call.new, *answer]
            answered[place].set()

        await asyncio.gather(*(one(place, call) for place, call in enumerate(run)))
        return time.perf_counter() - begin

    # -- on the wire --------------------------------------------------------------------------------

    async def _send(
        self,
        session: str,
        turn: int,
        prompt: list[int],
        known: int,
        answer: int,
        priority: int = 0,
        level: float = 0.0,
        *,
        hinted: bool = False,
    ) -> tuple[Served, list[int]]:
        """Send one request, streamed; returns its outcome and the tokens of the answer."""
        assert self._http is not None
        body: dict[str, Any] = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True},
            "stream": True,
        }
        if self._scene.urgent is not None:
            body["priority"] = priority
        stolen, sent = stolen_s(), time.perf_counter()
        first, last = 0.0, b""
        async with self._http.post(
            f"{self._url}/generate", json=body, headers={"x-session-id": self._named(session)}
        ) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {(await response.text())[:500]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    first = first or time.perf_counter()
                    last = line
            instance = response.headers.get("x-kv-instance")
        ended = time.perf_counter()
        event = json.loads(last.removeprefix(b"data: "))
        meta = event["meta_info"]
        details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"]}
        served = Served(
            session, turn, sent, first, ended, meta["prompt_tokens"], known, meta["completion_tokens"],
            details.get("device", 0), details.get("host", 0), details.get("storage", 0),
            instance, hinted, priority, level, stolen=stolen_s() - stolen,
        )  # fmt: skip
        return served, list(event["output_ids"])

    async def _hint(
        self, session: str, priority: int, earliest_s: float = 0.0, said: list[int] | None = None
    ) -> None:
        assert self._http is not None
        body: dict[str, Any] = {"session": self._named(session), "ttl_s": HINT_TTL_S}
        if said is not None:
            body["input_ids"] = list(said)
        if priority:
            body["priority"] = priority
        if earliest_s:
            body["earliest_s"] = earliest_s
        if not self._scene.hints:
            return
        asked = time.perf_counter()
        async with self._http.post(f"{self._url}/v1/advisory", json=body) as response:
            self._scene.hints_sent += 1
            self._scene.hints_refused += response.status != 200
            advised = await response.json()
            if advised.get("id"):
                self._hints[session] = (advised["id"], asked)

    async def _keep(self, served: Served) -> None:
        """Add a served request to the scene, with the outcome of its hint."""
        assert self._http is not None
        id, asked = self._hints.pop(served.session, ("", 0.0))
        if id and served.hinted:
            async with self._http.get(f"{self._url}/v1/advisory/{id}") as response:
                hint = await response.json()
            if hint.get("state") == "used":
                ready_s, where = hint["ready_after_s"], hint["tokens"]
                below = where["dram"] + where["disk"] + where["elsewhere"]
                advised = Advised(ready_s is not None, below, served.sent - asked, ready_s)
                served = dataclasses.replace(served, advised=advised)
        self._scene.served.append(served)

    def _named(self, session: str) -> str:
        return f"{self._scene.name}/{session}"

    @property
    def _elapsed(self) -> float:
        return time.perf_counter() - self._begin

    @contextlib.asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
            read_bufsize=1 << 20,
        ) as self._http:
            yield
            await asyncio.gather(*self._tasks)

    def _aside(self, doing: Any) -> None:
        self._tasks.start(doing)

    async def _to_the_end(self, tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
        """Wait until all have ended, or so long; a failure ends the measurement."""
        done, rest = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        for task in done:
            task.result()
