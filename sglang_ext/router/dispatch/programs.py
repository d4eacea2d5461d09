"""Admits sessions as a whole, as many as fit into HBM with their KV. Others wait at their tool calls. Pure.

When more agents take turns than HBM holds, each turn finds its KV evicted by the turns of others, and all of
them are slow at once. So sessions (*programs*) are admitted as a whole: an admitted program keeps its place
over several turns and the pauses between them, and its KV stays in HBM. When others wait, a program gives its
place up at the end of a turn: after ``quantum`` turns, or for a pause that is expected to be long. Its KV
goes to DRAM, and it waits at the end of the line when its next turn comes. The line is first come, first
served, so that all programs wait alike.

A program that is larger than HBM works alone. No I/O; ``now`` is seconds of any clock that does not go back.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from sglang_ext.errors import InternalError

QUANTUM = 8
"""Turns after which a program makes room for others."""
LONG_PAUSE_S = 30.0
"""A program that pauses longer, or is expected to, makes room for others."""
LATE = 4.0
"""A program makes room for others, too, when it pauses so many times longer than expected."""
LEAST_PAUSE_S = 1.0
"""It may pause for so long in any case."""


@dataclass(eq=False, slots=True)
class Program:
    """A program with a place.

    tokens: of its conversation. turns: that have ended since it was admitted. running: requests on their way.
    idle_since: when the last of them ended. patience_s: how long its place is kept from then on while others
    wait.
    """

    tokens: int
    turns: int = 0
    running: int = 0
    idle_since: float = 0.0
    patience_s: float = LONG_PAUSE_S


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
        self.tokens = 0
        """Of the programs at work."""
        self.retired = 0
        """Programs that have given their place up to others, since the start."""

    def arrives(self, name: str, tokens: int, capacity: float) -> bool:
        """A turn of a program has come, with so many tokens. Returns whether it may go; else it waits until
        ``admissible`` names it, or it ``leaves``.

        Args:
            capacity: tokens that HBM holds.
        """
        program = self._working.get(name)
        if program is not None:
            program.running += 1
            self._resize(program, tokens)
            return True
        if not self._line and self._fits(tokens, capacity):
            self._admit(name, tokens, 1)
            return True
        known, requests = self._line.get(name, (0, 0))
        self._line[name] = (max(known, tokens), requests + 1)
        return False

    def leaves(self, name: str) -> None:
        """A request of a waiting program has gone away."""
        tokens, requests = self._line[name]
        if requests > 1:
            self._line[name] = (tokens, requests - 1)
        else:
            del self._line[name]

    def ends(self, name: str, tokens: int, pause_s: float | None, now: float, capacity: float) -> bool:
        """A turn has ended. Returns whether the program has given its place up.

        Args:
            tokens: of its conversation now.
            pause_s: the expected time until its next turn; None if that is not known.
        """
        program = self._working.get(name)
        if program is None:
            return False
        program.running -= 1
        program.turns += 1
        program.idle_since = now
        program.patience_s = self._long_pause_s
        if pause_s is not None:
            program.patience_s = min(self._long_pause_s, max(LEAST_PAUSE_S, LATE * pause_s))
        self._resize(program, tokens)
        if program.running or not (self._line or self.tokens > capacity):
            return False
        long = pause_s is not None and pause_s > self._long_pause_s
        outgrown = self.tokens > capacity and len(self._working) > 1
        if program.turns >= self._quantum or long or outgrown:
            self._retire(name)
            return True
        return False

    def admissible(self, now: float, capacity: float) -> list[str]:
        """The waiting programs that may go now, in order; each of their requests does. While some wait,
        programs that have paused for long give their places up."""
        if self._line:
            late = [
                name
                for name, program in self._working.items()
                if not program.running and now - program.idle_since >= program.patience_s
            ]
            for name in late:
                self._retire(name)
        admitted: list[str] = []
        while self._line:
            name, (tokens, requests) = next(iter(self._line.items()))
            if not self._fits(tokens, capacity):
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
        """Programs with a place."""
        return len(self._working)

    @property
    def waiting(self) -> int:
        """Programs in the line."""
        return len(self._line)

    def _fits(self, tokens: int, capacity: float) -> bool:
        return not self._working or self.tokens + tokens <= capacity

    def _admit(self, name: str, tokens: int, requests: int) -> None:
        self._working[name] = Program(tokens, running=requests)
        self.tokens += tokens

    def _resize(self, program: Program, tokens: int) -> None:
        self.tokens += tokens - program.tokens
        program.tokens = tokens

    def _retire(self, name: str) -> None:
        self._drop(name)
        self.retired += 1

    def _drop(self, name: str) -> None:
        self.tokens -= self._working.pop(name).tokens

    def __repr__(self) -> str:
        return f"Programs({self.working} at work with {self.tokens} tokens, {self.waiting} waiting)"

    def check(self) -> None:
        """Verify every counter.

        Raises:
            InternalError: one of them is wrong.
        """
        if self.tokens != sum(program.tokens for program in self._working.values()):
            raise InternalError(f"{self!r} counts other tokens than its programs have")
        if self._working.keys() & self._line.keys():
            raise InternalError("a program waits that is at work")
        if any(program.running < 0 for program in self._working.values()):
            raise InternalError("a program has less than no requests")
        if any(requests < 1 for _, requests in self._line.values()):
            raise InternalError("a program waits without a request")
        if self._line and not self._working:
            raise InternalError("programs wait although none is at work")
