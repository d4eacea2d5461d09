"""Admits sessions as a whole, as many as are served in time together. Others wait at their tool calls. Pure.

When more agents take turns than memory holds, each turn finds its KV evicted by the turns of others, and all
of them are slow at once. So sessions (*programs*) are admitted as a whole: an admitted program keeps its
place over several turns and the pauses between them. When others wait, a program gives its place up at the
end of a turn, after ``quantum`` turns. It waits at the end of the line when its next turn comes. The line is
first come, first served, so that all programs wait alike.

How many programs can work depends on more than HBM: on how fast KV comes back from DRAM, on how much of the
device's time turns take, on how long tools run. ``Budget`` finds it out from whether turns are in time.

A program that pauses for long does not count meanwhile, as its KV goes to DRAM; when it returns, it goes on
without waiting. No I/O; ``now`` is seconds of any clock that does not go back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from sglang_ext.errors import InternalError

QUANTUM = 32
"""Turns after which a program makes room for others."""
LONG_PAUSE_S = 30.0
"""A program that pauses longer does not count until it returns."""
IN_TIME = 3.0
"""A turn is in time whose time to first token is at most so many times the expected one of an idle instance
that has its KV in HBM."""
GROWTH = 0.1
"""Share of its own tokens by which a turn in time makes room for more programs,"""
FIRST_GROWTH = 1.0
"""until the first turn that is late,"""
SHRINKAGE = 0.5
"""and by which a late one shrinks it: at one late turn in six, the budget stays as it is."""
LEAST = 0.5
"""The budget is never smaller than this share of the first one."""
OUTGROWN = 1.25
"""Beyond so many times the budget, programs give their places up before their quantum has ended."""
SPARE = 1.5
"""The budget does not grow beyond so many times the tokens of the programs at work."""


class Budget:
    """The tokens that programs at work may have together. It begins with what HBM holds, grows with turns
    that are in time while others wait, and shrinks with turns that are late."""

    def __init__(self) -> None:
        self._factor = 1.0
        """Of the first budget."""
        self._growth = FIRST_GROWTH

    def tokens(self, first: float) -> float:
        """The present budget.

        Args:
            first: tokens of the budget that it begins with.
        """
        return self._factor * first

    def learn(self, tokens: int, first: float, *, late: bool, most: float) -> None:
        """A turn of a program with so many tokens has got its first token.

        Args:
            most: up to which tokens the budget may grow.
        """
        share = tokens / first
        if late:
            self._growth = GROWTH
            self._factor = max(LEAST, self._factor - min(0.5, SHRINKAGE * share))
        elif self._factor * first < most:
            self._factor += self._growth * share

    def __repr__(self) -> str:
        return f"Budget({self._factor:.2f} of the first)"


@dataclass(eq=False, slots=True)
class Program:
    """A program with a place.

    tokens: of its conversation. turns: that have ended since it was admitted. running: requests on their way.
    idle_since: when the last of them ended. away: it has paused for long, and does not count.
    """

    tokens: int
    turns: int = 0
    running: int = 0
    idle_since: float = 0.0
    away: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a turn.

    tokens: of its conversation. late: whether its first token was; None if that is not known. pause_s: the
    expected time until the next turn; None if that is not known.
    """

    tokens: int
    late: bool | None = None
    pause_s: float | None = None


class Programs:
    """See the module's docstring.

    Args:
        quantum: turns of a program while others wait.
        long_pause_s: seconds.
    """

    def __init__(self, *, quantum: int = QUANTUM, long_pause_s: float = LONG_PAUSE_S) -> None:
        self._quantum = quantum
        self._long_pause_s = long_pause_s
        self._working: dict[str, Program] = {}
        self._line: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Waiting program -> (tokens, its waiting requests), in the order in which they came."""
        self.budget = Budget()
        self.tokens = 0
        """Of the programs that count."""
        self.retired = 0
        """Programs that have given their place up to others, since the start."""

    def arrives(self, name: str, tokens: int, first: float) -> bool:
        """A turn of a program has come, with so many tokens. Returns whether it may go; else it waits until
        ``admissible`` names it, or it ``leaves``.

        Args:
            first: tokens of the budget that the programs began with.
        """
        program = self._working.get(name)
        if program is not None:
            program.running += 1
            self._count(program)
            self._resize(program, tokens)
            return True
        if not self._line and self._fits(tokens, first):
            self._admit(name, tokens, 1)
            return True
        known, requests = self._line.get(name, (0, 0))
        self._line[name] = (max(known, tokens), requests + 1)
        return False

    def known(self, name: str) -> int | None:
        """Tokens of the conversation of a program with a place; None of another one."""
        program = self._working.get(name)
        return None if program is None else program.tokens

    def leaves(self, name: str) -> None:
        """A request of a waiting program has gone away."""
        tokens, requests = self._line[name]
        if requests > 1:
            self._line[name] = (tokens, requests - 1)
        else:
            del self._line[name]

    def ends(self, name: str, turn: Ended, now: float, first: float) -> bool:
        """A turn has ended. Returns whether the program has given its place up."""
        program = self._working.get(name)
        if program is None:
            return False
        program.running -= 1
        program.turns += 1
        program.idle_since = now
        self._resize(program, turn.tokens)
        if turn.late is not None:
            self.budget.learn(turn.tokens, first, late=turn.late, most=max(first, SPARE * self.tokens))
        if program.running or not self._line:
            return False
        if turn.pause_s is not None and turn.pause_s > self._long_pause_s:
            self._leave(program)
            return False
        outgrown = self.tokens > OUTGROWN * self.budget.tokens(first) and self.tokens > program.tokens
        if program.turns >= self._quantum or outgrown:
            self._drop(name)
            self.retired += 1
            return True
        return False

    def admissible(self, now: float, first: float) -> list[str]:
        """The waiting programs that may go now, in order; each of their requests does."""
        admitted: list[str] = []
        if self._line:
            self._pause(now)
        while self._line:
            name, (tokens, requests) = next(iter(self._line.items()))
            if not self._fits(tokens, first):
                break
            del self._line[name]
            self._admit(name, tokens, requests)
            admitted.append(name)
        return admitted

    def forget_idle(self, now: float, idle_s: float) -> None:
        """Drop programs that have sent nothing for so long."""
        for name in [
            name
            for name, program in self._working.items()
            if not program.running and now - program.idle_since >= idle_s
        ]:
            self._drop(name)

    @property
    def working(self) -> int:
        """Programs that count."""
        return sum(not program.away for program in self._working.values())

    @property
    def waiting(self) -> int:
        """Programs in the line."""
        return len(self._line)

    def _pause(self, now: float) -> None:
        for program in self._working.values():
            if not program.running and not program.away and now - program.idle_since >= self._long_pause_s:
                self._leave(program)

    def _leave(self, program: Program) -> None:
        program.away = True
        self.tokens -= program.tokens

    def _count(self, program: Program) -> None:
        if program.away:
            program.away = False
            self.tokens += program.tokens

    def _fits(self, tokens: int, first: float) -> bool:
        return not self.tokens or self.tokens + tokens <= self.budget.tokens(first)

    def _admit(self, name: str, tokens: int, requests: int) -> None:
        self._working[name] = Program(tokens, running=requests)
        self.tokens += tokens

    def _resize(self, program: Program, tokens: int) -> None:
        self.tokens += tokens - program.tokens
        program.tokens = tokens

    def _drop(self, name: str) -> None:
        program = self._working.pop(name)
        if not program.away:
            self.tokens -= program.tokens

    def __repr__(self) -> str:
        at_work = f"{self.working} at work with {self.tokens} tokens"
        return f"Programs({at_work}, {self.waiting} waiting, {self.budget})"

    def check(self) -> None:
        """Verify every counter.

        Raises:
            InternalError: one of them is wrong.
        """
        if self.tokens != sum(program.tokens for program in self._working.values() if not program.away):
            raise InternalError(f"{self!r} counts other tokens than its programs have")
        if self._working.keys() & self._line.keys():
            raise InternalError("a program waits that is at work")
        if any(program.running < 0 for program in self._working.values()):
            raise InternalError("a program has less than no requests")
        if any(program.away and program.running for program in self._working.values()):
            raise InternalError("a program with requests does not count")
        if any(requests < 1 for _, requests in self._line.values()):
            raise InternalError("a program waits without a request")
        if self._line and not self.tokens:
            raise InternalError("programs wait although none is at work")
