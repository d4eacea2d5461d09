"""How long an instance is busy with the prompts it was sent: the first term of MemServe's equation 1, with
exec over batches as the instance computes them.

Pure bookkeeping: the caller brings the time, the cost model's ``Passes``, and the factor by which expected
times are corrected. A prompt that arrives at an idle instance is computed at once. Prompts that arrive
meanwhile wait, and are computed together afterwards, as many as fit into one pass (a *group*). Observations
correct this:

- a first byte ends its prompt's share of its group, however early or late;
- a group that is overdue is expected at any moment, and nothing behind it moves up;
- an answer that does not stream has no first byte to see: its prompt counts as computed with the rest of its
  group, or once their time is over, and as generating from then on.

A prompt's share is the time by which its group would be shorter without it. So the shares of a group sum to
the group's time, whether its first bytes arrive together, as expected, or one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang_ext.cost_model import Passes
from sglang_ext.errors import InternalError


class Entry:
    """One prompt on its way. Only ``QueueEstimate`` writes it."""

    __slots__ = ("arrived", "began", "context", "new", "streams")

    def __init__(self, new: int, context: int, streams: bool, arrived: float) -> None:
        self.new = new
        self.context = context
        self.streams = streams
        self.arrived = arrived
        self.began: float | None = None
        """When the group in which it is computed began."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A group whose first bytes have all come."""

    expected_s: float
    """By the cost model, uncorrected; of the prompts whose first bytes were seen."""
    took_s: float


def added(passes: Passes, entries: Iterable[Entry]) -> Passes:
    """With all these prompts more."""
    for entry in entries:
        passes = passes.adding(entry.new, entry.context)
    return passes


class QueueEstimate:
    """The line of prompts at one instance.

    Args:
        idle: the instance's passes without any prompt.
        factor: multiplies expected times.
    """

    __slots__ = (
        "_began", "_computed_s", "_empty", "_factor", "_group", "_group_s", "_idle", "_line", "_plan",
        "_took_s",
    )  # fmt: skip

    def __init__(self, idle: Callable[[], Passes], factor: Callable[[], float] = lambda: 1.0) -> None:
        self._idle, self._factor = idle, factor
        self._group: list[Entry] = []
        """The group that is computed now."""
        self._empty = idle()
        """The passes of the group without any prompt."""
        self._group_s = 0.0
        """Expected time left for the group, uncorrected, as of ``_began``."""
        self._began = 0.0
        """Start of the time left."""
        self._computed_s = self._took_s = 0.0
        """Finished part of the group: expected time, uncorrected, and observed time."""
        self._line: list[Entry] = []
        """Prompts that wait for the group."""
        self._plan: Passes | None = None
        """Passes of the waiting prompts, cached until they change."""

    def enter(self, new: int, context: int, now: float, *, streams: bool) -> Entry:
        """A prompt is sent, of which ``new`` tokens are to be computed behind ``context``."""
        self._advance(now)
        entry = Entry(max(1, new), max(0, context), streams, now)
        self._line.append(entry)
        if self._group:
            if self._plan is not None:
                self._plan = self._plan.adding(entry.new, entry.context)
        else:
            self._begin(now)
        return entry

    def first_byte(self, entry: Entry, now: float) -> Computed | None:
        """A prompt's first byte has arrived. Returns the observation for the cost model if the prompt is the
        last of its group; None otherwise, and for a prompt that overtakes its group. Repeating it is
        harmless.
        """
        self._advance(now)
        if entry not in self._group:
            self._drop(entry)
            return None
        rest = [other for other in self._group if other is not entry]
        rest_s = self._seconds(rest)
        self._computed_s += max(0.0, self._group_s - rest_s)
        self._took_s += max(0.0, now - self._began)
        return self._left(rest, rest_s, now)

    def leave(self, entry: Entry, now: float) -> None:
        """It was given up, or answered without a first byte to see. Repeating it is harmless."""
        self._advance(now)
        if entry not in self._group:
            self._drop(entry)
            return
        rest = [other for other in self._group if other is not entry]
        if not rest:
            self._left(rest, 0.0, now)
            return
        rest_s = self._seconds(rest)
        if any(other.streams for other in rest):
            # The rest goes on, and has its own first bytes: only the expected time changes.
            self._group, self._group_s = rest, rest_s
        else:
            self._left(rest, rest_s, now)

    def waits_s(self, now: float) -> float:
        """Seconds until the instance has computed all prompts that precede one sent now."""
        self._advance(now)
        if not self._group:
            return 0.0
        factor, joined = self._factor(), self.joined(now)
        line_s = 0.0 if joined is None else factor * joined.seconds
        return max(0.0, factor * self._group_s - (now - self._began)) + line_s

    def joined(self, now: float) -> Passes | None:
        """The passes of all that waits, which a prompt that is sent now joins, uncorrected; None when nothing
        waits."""
        self._advance(now)
        if not self._line:
            return None
        if self._plan is None:
            self._plan = added(self._idle(), self._line)
        return self._plan

    def waiting(self, now: float) -> int:
        """Prompts that are not computed yet."""
        self._advance(now)
        return len(self._group) + len(self._line)

    def waiting_tokens(self, now: float) -> int:
        """Their tokens, cached ones included."""
        self._advance(now)
        return sum(entry.new + entry.context for entry in (*self._group, *self._line))

    # -- groups -----------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Begin to compute the waiting prompts that fit into one group."""
        self._plan = None
        self._group = []
        if not self._line:
            self._began, self._group_s = now, 0.0
            self._computed_s = self._took_s = 0.0
            return
        self._empty = passes = self._idle()
        for entry in self._line:
            more = passes.adding(entry.new, entry.context)
            if self._group and more.closed:
                break
            entry.began = now
            self._group.append(entry)
            passes = more
        del self._line[: len(self._group)]
        self._began, self._group_s = now, passes.seconds
        self._computed_s = self._took_s = 0.0

    def _left(self, rest: list[Entry], rest_s: float, now: float) -> Computed | None:
        """One prompt of the group is computed; the group ends with its last streaming prompt."""
        self._group, self._group_s, self._began = rest, rest_s, now
        if any(entry.streams for entry in rest):
            return None
        computed = Computed(self._computed_s, self._took_s) if self._computed_s > 0 else None
        self._begin(now)
        return computed

    def _drop(self, entry: Entry) -> None:
        if entry in self._line:
            self._line.remove(entry)
            self._plan = None

    def _advance(self, now: float) -> None:
        """Take out groups that do not stream and are expected to be computed."""
        while self._group and not any(entry.streams for entry in self._group):
            took = self._factor() * self._group_s
            if now - self._began < took:
                return
            self._begin(self._began + took)

    def _seconds(self, entries: Iterable[Entry]) -> float:
        return added(self._empty, entries).seconds

    def __len__(self) -> int:
        return len(self._group) + len(self._line)

    def __repr__(self) -> str:
        return f"QueueEstimate({len(self._group)} computed for {self._group_s:.3f} s, {len(self._line)} wait)"

    def check(self) -> None:
        """Verify the invariants.

        Raises:
            InternalError: names the invariant that does not hold.
        """
        entries = [*self._group, *self._line]
        if len({id(entry) for entry in entries}) < len(entries):
            raise InternalError("a prompt is in the line twice")
        if self._line and not self._group:
            raise InternalError("prompts wait, and nothing is computed")
        if any(entry.began is None for entry in self._group) or any(e.began is not None for e in self._line):
            raise InternalError("a prompt is in the wrong list")
        if abs(self._group_s - self._seconds(self._group)) > 1e-6 * max(1.0, self._group_s):
            raise InternalError(f"the rest of the group does not take {self._group_s} s")
