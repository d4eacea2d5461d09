"""Recorded sessions of agents replayed in simulated time: turns that find their KV in HBM, by kind of hint.

A session's KV is in HBM as a whole or not at all, a turn takes a fixed time, and KV that is brought is there
at once. Eviction, priorities and hints follow the rules of the engine and the router, and forecasts are those
of ``router.clients.pauses``. The figures do not depend on the machine. Times to first token are measured by
``benchmarks.agents.pauses``.

Bounds for all that knows past pauses only: ``best guess`` has in HBM, at each turn, the sessions that most
probably return within the next 50 ms, and moving them costs nothing. ``guessed swaps`` does the same where an
absent session is four times as likely to return as those that go for it, and counts the moves. ``guessed
order`` gives up first whatever returns with the least probability within half a second, and brings nothing
back. ``certain order`` knows the pauses, gives up what returns last, and brings nothing back.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.agents.recorded import Program, programs
from benchmarks.lib.common import SEED, Options, Report, at_least
from benchmarks.lib.data import data_flag, data_folder
from sglang_ext.flags import NUMBER, flag, one_of
from sglang_ext.router.clients.pauses import USER, Pauses, Turned
from sglang_ext.router.dispatch.pausing import rank_of

NAME = "agents.replay"
AIMS = {"gain_of_learnt_vs_explicit": at_least(0.9)}
TURN_S = 0.3
LEAD_S = 0.15
"""How long before its turn KV is brought."""
AHEAD_S = 1.0
"""How long before its turn a client's hint comes."""
SOON_S = 0.05
ORDER_S = 0.5
SWAP = 4.0
"""A session is brought if it is so many times as likely to return as those that go for it."""
TOOL = "tool"
KINDS = ("no hints", "learnt hints", "learnt hints, tools not seen", "explicit hints")
CROWDS = ((8, 12_288), (14, 12_288), (14, 20_000))
"""(agents, tokens of HBM)."""


@dataclass(frozen=True, kw_only=True)
class ReplayOptions(Options):
    """The command line."""

    data: str | None = data_flag()
    sessions: str = flag("tune", "Which sessions are played.", one_of("tune", "held-out"))
    pace: float = flag(8.0, "By which pauses are divided.", NUMBER.positive())


@dataclass(slots=True)
class Expected:
    """A live hint. Times are simulated seconds."""

    priority: int
    earliest: float
    until: float
    since: float


@dataclass
class Counts:
    """turns: turns that continue a session. found: turns that found their KV in HBM. moved, vain: tokens
    brought, and of them those that were evicted before their turn."""

    turns: int = 0
    found: int = 0
    moved: int = 0
    vain: int = 0

    @property
    def share(self) -> float:
        return self.found / max(1, self.turns)


class Memory:
    """HBM: sessions as a whole, evicted in the engine's order."""

    def __init__(self, tokens: int, counts: Counts) -> None:
        self._tokens = tokens
        self._counts = counts
        self.used: dict[str, float] = {}
        """Session in HBM -> when it was used last."""
        self.sizes: dict[str, int] = {}
        self.hints: dict[str, Expected] = {}
        self.running: set[str] = set()
        self.order = self._in_order
        self._brought: dict[str, int] = {}

    def add(self, name: str, now: float) -> None:
        """A session's turn runs."""
        self._brought.pop(name, None)
        self.used.pop(name, None)
        self._make_room(self.sizes[name], self.order(now))
        self.used[name] = now

    def bring(self, name: str, hint: Expected, now: float) -> None:
        """Bring a session for its hint, in place of sessions that may go for it."""
        if name in self.used or name in self.running:
            return
        unused, deferred, announced = self._parts(now)
        order = [other for other in unused if self.used[other] < hint.since] + deferred
        order += [other for other in announced if self.hints[other].priority < hint.priority]
        self.swap(name, order, now)

    def swap(self, name: str, order: Sequence[str], now: float) -> None:
        """Bring a session in place of others, in this order, if that makes room enough."""
        filled = sum(self.sizes[other] for other in self.used)
        going = sum(self.sizes[other] for other in order if other not in self.running)
        if filled - going + self.sizes[name] > self._tokens:
            return
        order = [other for other in order if other not in self.running]
        if self._make_room(self.sizes[name], order):
            self.used[name] = now
            self._brought[name] = self.sizes[name]
            self._counts.moved += self.sizes[name]

    def _in_order(self, now: float) -> list[str]:
        unused, deferred, announced = self._parts(now)
        since = min((self.hints[name].since for name in deferred), default=now)
        older = [name for name in unused if self.used[name] < since]
        return [*older, *deferred, *unused[len(older) :], *announced]

    def _parts(self, now: float) -> tuple[list[str], list[str], list[str]]:
        """Sessions without a hint, sessions announced for later, and sessions that are due, each in the order
        of eviction."""
        free = [name for name in self.used if name not in self.running]
        live = {name for name in free if name in self.hints and self.hints[name].until > now}
        deferred = {name for name in live if self.hints[name].earliest > now}
        return (
            sorted((name for name in free if name not in live), key=lambda name: self.used[name]),
            sorted(deferred, key=lambda name: -self.hints[name].earliest),
            sorted(live - deferred, key=lambda name: (self.hints[name].priority, self.hints[name].until)),
        )

    def _make_room(self, tokens: int, order: Sequence[str]) -> bool:
        filled = sum(self.sizes[name] for name in self.used)
        for name in order:
            if filled + tokens <= self._tokens:
                break
            filled -= self.sizes[name]
            del self.used[name]
            self._counts.vain += self._brought.pop(name, 0)
        return filled + tokens <= self._tokens


@dataclass(slots=True)
class Agent:
    """The session that an agent is in. at: its next step."""

    program: Program
    name: str
    at: int = 0
    ended: float = 0.0


class Replay:
    """Agents that play one session after the other, for so many simulated seconds."""

    def __init__(self, found: Sequence[Program], agents: int, tokens: int, kind: str) -> None:
        self.counts = Counts()
        self._memory = Memory(tokens, self.counts)
        self._pauses = Pauses()
        self._kind = kind
        order = list(found)
        random.Random(SEED).shuffle(order)
        self._next = itertools.cycle(order)
        self._numbers = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        for number in range(agents):
            self._at(0.05 * number, self._starter())

    def run(self, seconds: float) -> Counts:
        """Play; returns the counts."""
        while self._events and self._events[0][0] < seconds:
            now, _, happens = heapq.heappop(self._events)
            happens(now)
        return self.counts

    def _at(self, when: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), happens))

    def _starter(self) -> Callable[[float], None]:
        def start(now: float) -> None:
            program = next(self._next)
            agent = Agent(program, f"{program.id} {next(self._numbers)}")
            self._memory.sizes[agent.name] = program.past
            self._turn(agent, now)

        return start

    def _turn(self, agent: Agent, now: float) -> None:
        memory, name = self._memory, agent.name
        if agent.at:
            step = agent.program.steps[agent.at - 1]
            self._pauses.learn(self._turned(agent, step.tool), now - agent.ended)
            self.counts.turns += 1
            self.counts.found += name in memory.used
            memory.sizes[name] += step.new + step.answer
        memory.hints.pop(name, None)
        memory.running.add(name)
        memory.add(name, now)
        self._at(now + TURN_S, lambda now: self._end(agent, now))

    def _end(self, agent: Agent, now: float) -> None:
        self._memory.running.discard(agent.name)
        self._memory.used[agent.name] = agent.ended = now
        if agent.at >= len(agent.program.steps):
            self._at(now + 1.0, self._starter())
            return
        step = agent.program.steps[agent.at]
        agent.at += 1
        self._at(now + step.pause_s, lambda now: self._turn(agent, now))
        if self._kind.startswith("explicit"):
            hint = Expected(0, now, now + step.pause_s + AHEAD_S, now)
            self._at(now + max(0.0, step.pause_s - AHEAD_S), lambda now: self._hint(agent, hint, now))
        elif self._kind.startswith("learnt"):
            self._forecast(agent, step.tool, now)

    def _forecast(self, agent: Agent, tool: bool, now: float) -> None:
        found = self._pauses.forecast(self._turned(agent, tool))
        if found is None:
            return
        wait_s = found.away_s(LEAD_S)
        until = now + max(found.latest_s, wait_s) + LEAD_S
        hint = Expected(rank_of(found), now + wait_s, until, now)
        self._memory.hints[agent.name] = hint
        if wait_s:
            self._at(now + wait_s - LEAD_S, lambda now: self._due(agent, hint, now))

    def _hint(self, agent: Agent, hint: Expected, now: float) -> None:
        self._memory.hints[agent.name] = hint
        hint.since = now
        self._memory.bring(agent.name, hint, now)

    def _due(self, agent: Agent, hint: Expected, now: float) -> None:
        if self._memory.hints.get(agent.name) is hint:
            hint.earliest = now
            self._memory.bring(agent.name, hint, now)

    def _turned(self, agent: Agent, tool: bool) -> Turned:
        seen = tool and "not seen" not in self._kind
        return Turned("tenant", "agent", agent.name, TOOL if seen else USER)


@dataclass
class Guess:
    """See ``best guess`` in the module's docstring."""

    pauses: dict[bool, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, found: Sequence[Program]) -> Guess:
        guess = cls({True: [], False: []})
        for program in found:
            for step in program.steps:
                bisect.insort(guess.pauses[step.tool], step.pause_s)
        return guess

    def soon(self, tool: bool, paused_s: float, within_s: float = SOON_S) -> float:
        """The probability that a session returns so soon, after it has paused for so long."""
        known = self.pauses[tool]
        start, end = bisect.bisect_left(known, paused_s), bisect.bisect_left(known, paused_s + within_s)
        return (end - start) / max(1, len(known) - start)


class GuessedReplay(Replay):
    """A replay in which HBM holds the sessions of the guess at each turn."""

    def __init__(self, found: Sequence[Program], agents: int, tokens: int) -> None:
        super().__init__(found, agents, tokens, "no hints")
        self._tokens = tokens
        self._guess = Guess.of(found)
        self._idle: dict[str, tuple[float, bool]] = {}

    def _turn(self, agent: Agent, now: float) -> None:
        if agent.at:
            self._prepare(now)
        self._idle.pop(agent.name, None)
        super()._turn(agent, now)

    def _likely(self, now: float, within_s: float = SOON_S) -> dict[str, float]:
        """How probably each paused session returns within so many seconds."""
        guess = self._guess
        return {other: guess.soon(tool, now - at, within_s) for other, (at, tool) in self._idle.items()}

    def _prepare(self, now: float) -> None:
        """Have the most likely sessions in HBM before a turn."""
        memory, likely = self._memory, self._likely(now)
        left = self._tokens - sum(memory.sizes[other] for other in memory.running)
        memory.used = {}
        for other in sorted(likely, key=lambda other: -likely[other]):
            left -= memory.sizes[other]
            if left < 0:
                break
            memory.used[other] = now

    def _end(self, agent: Agent, now: float) -> None:
        before = agent.at
        super()._end(agent, now)
        if agent.at > before:  # else the session has ended
            self._idle[agent.name] = (now, agent.program.steps[agent.at - 1].tool)


class SwappedReplay(GuessedReplay):
    """A replay in which more likely sessions are brought in place of others."""

    def _prepare(self, now: float) -> None:
        likely, used = self._likely(now), self._memory.used
        for other in sorted((other for other in likely if other not in used), key=lambda name: -likely[name]):
            weaker = [name for name in used if SWAP * likely.get(name, 0.0) < likely[other]]
            self._memory.swap(other, sorted(weaker, key=lambda name: likely.get(name, 0.0)), now)


class OrderedReplay(GuessedReplay):
    """A replay that brings nothing, and evicts in an order of its own.

    Args:
        certain: evict the session that returns last; else the session that returns least probably.
    """

    def __init__(self, found: Sequence[Program], agents: int, tokens: int, *, certain: bool) -> None:
        super().__init__(found, agents, tokens)
        self._certain = certain
        self._returns: dict[str, float] = {}
        self._memory.order = self._order

    def _prepare(self, now: float) -> None:
        pass

    def _order(self, now: float) -> list[str]:
        memory = self._memory
        free = [name for name in memory.used if name not in memory.running]
        if self._certain:
            return sorted(free, key=lambda name: -self._returns.get(name, math.inf))
        likely = self._likely(now, ORDER_S)
        return sorted(free, key=lambda name: (likely.get(name, 0.0), memory.used[name]))

    def _end(self, agent: Agent, now: float) -> None:
        super()._end(agent, now)
        self._returns.pop(agent.name, None)
        if agent.name in self._idle:
            self._returns[agent.name] = now + agent.program.steps[agent.at - 1].pause_s


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = ReplayOptions.of(argv, NAME, __doc__)
    report = Report(NAME, AIMS)
    seconds = options.pick(4000.0, quick=1000.0, tiny=100.0)
    found = programs(
        data_folder(options.data),
        held=options.sessions == "held-out",
        steps=12,
        pace=options.pace,
        most_tokens=7000,
    )
    report.note(f"{len(found)} stretches of sessions ({options.sessions})")
    gains: list[float] = []
    for agents, tokens in CROWDS:
        counts = {kind: Replay(found, agents, tokens, kind).run(seconds) for kind in KINDS}
        counts["best guess"] = GuessedReplay(found, agents, tokens).run(seconds)
        counts["guessed swaps"] = SwappedReplay(found, agents, tokens).run(seconds)
        counts["guessed order"] = OrderedReplay(found, agents, tokens, certain=False).run(seconds)
        counts["certain order"] = OrderedReplay(found, agents, tokens, certain=True).run(seconds)
        for kind, each in counts.items():
            report.add(
                kind,
                agents=agents,
                hbm_tokens=tokens,
                turns=each.turns,
                in_hbm=each.share,
                moved_per_turn=each.moved / max(1, each.turns),
                moved_in_vain=each.vain / max(1, each.moved),
            )
        none, learnt, explicit = (counts[kind].share for kind in (KINDS[0], KINDS[1], KINDS[3]))
        gains.append((learnt - none) / (explicit - none) if explicit > none else 0.0)
    report.summary["gain_of_learnt_vs_explicit"] = min(gains)
    report.summary["largest gain_of_learnt_vs_explicit"] = max(gains)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
