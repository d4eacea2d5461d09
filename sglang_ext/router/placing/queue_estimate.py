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

A long line (more than ``SHORT`` prompts) is not planned anew for each prompt that leaves it: the line gets
shorter by the time that the prompt added. That is exact while prompts leave at the front and are not cut.
Otherwise the passes behind a prompt that left are not filled again, until half of the line has left: the time
of a pass without tokens is wrong at most once for each prompt that left meanwhile.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sglang_ext.cost_model import Passes
from sglang_ext.cost_model.batch import NOTHING
from sglang_ext.errors import InternalError

SHORT = 32
"""Waiting prompts up to which a line is planned anew after each change."""


class Entry:
    """One prompt on its way. Only ``QueueEstimate`` writes it."""

    __slots__ = ("adds_s", "arrived", "began", "context", "new", "streams")

    def __init__(self, new: int, context: int, streams: bool, arrived: float) -> None:
        self.new = new
        self.context = context
        self.streams = streams
        self.arrived = arrived
        self.began: float | None = None
        """When the group in which it is computed began."""
        self.adds_s: float | None = None
        """Expected time by which the line got longer with it, uncorrected; only of a long line."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A group whose first bytes have all come."""

    expected_s: float
    """By the cost model, uncorrected; of the prompts whose first bytes were seen."""
    took_s: float


@dataclass(frozen=True, slots=True)
class Standing:
    """A line of prompts at one moment. Seconds are uncorrected.

    began: start of the time left for the present group; -inf without one. group_s: the time left. line_s: of
    the prompts behind it; None if there are none. waiting: prompts that are not computed yet. ends: when the
    present group is taken to have ended, if no first byte will show it.
    """

    began: float
    group_s: float
    line_s: float | None
    waiting: int
    ends: float | None


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
        "_began", "_computed_s", "_factor", "_gone", "_group", "_group_passes", "_group_s", "_idle", "_line",
        "_plan", "_streaming", "_tokens", "_took_s",
    )  # fmt: skip

    def __init__(self, idle: Callable[[], Passes], factor: Callable[[], float] = lambda: 1.0) -> None:
        self._idle, self._factor = idle, factor
        self._group: dict[Entry, None] = {}
        """The group that is computed now."""
        self._group_passes = idle()
        """Its passes: one, unless the group is a single prompt."""
        self._group_s = 0.0
        """Expected time left for the group, uncorrected, as of ``_began``."""
        self._streaming = 0
        """Prompts of the group whose answers stream."""
        self._began = 0.0
        """Start of the time left."""
        self._computed_s = self._took_s = 0.0
        """Finished part of the group: expected time, uncorrected, and observed time."""
        self._line: OrderedDict[Entry, None] = OrderedDict()
        """Prompts that wait for the group."""
        self._plan: Passes | None = None
        """Passes of the waiting prompts; None when they have to be planned anew."""
        self._gone = 0
        """Prompts that have left the line since it was planned."""
        self._tokens = 0
        """Of all prompts, cached ones included."""

    def enter(self, new: int, context: int, now: float, *, streams: bool) -> Entry:
        """A prompt is sent, of which ``new`` tokens are to be computed behind ``context``."""
        self._advance(now)
        entry = Entry(max(1, new), max(0, context), streams, now)
        self._line[entry] = None
        self._tokens += entry.new + entry.context
        if not self._group:
            self._begin(now)
        elif (plan := self._plan) is not None:
            more = plan.adding(entry.new, entry.context)
            if len(self._line) > SHORT:
                entry.adds_s = more.seconds - plan.seconds
            self._plan = more
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
        before_s = self._group_s
        self._take_out(entry)
        self._computed_s += max(0.0, before_s - self._group_s)
        self._took_s += max(0.0, now - self._began)
        self._began = now
        return self._left(now)

    def leave(self, entry: Entry, now: float) -> None:
        """It was given up, or answered without a first byte to see. Repeating it is harmless."""
        self._advance(now)
        if entry not in self._group:
            self._drop(entry)
            return
        # If the rest streams, it goes on and has its own first bytes: only the expected time changes.
        self._take_out(entry)
        if not self._streaming:
            self._began = now
            self._left(now)

    def waits_s(self, now: float) -> float:
        """Seconds until the instance has computed all prompts that precede one sent now."""
        self._advance(now)
        if not self._group:
            return 0.0
        factor, joined = self._factor(), self.joined(now)
        line_s = 0.0 if joined is None else factor * max(0.0, joined.seconds)
        return max(0.0, factor * self._group_s - (now - self._began)) + line_s

    def joined(self, now: float) -> Passes | None:
        """The passes of all that waits, which a prompt that is sent now joins, uncorrected; None when nothing
        waits."""
        self._advance(now)
        if not self._line:
            return None
        plan = self._plan
        if plan is None:
            plan = self._plan = self._planned()
        return plan

    def standing(self, now: float) -> Standing:
        """The terms of ``waits_s``."""
        joined = self.joined(now)
        ends = None
        if self._group and not self._streaming:
            ends = self._began + self._factor() * self._group_s
        return Standing(
            self._began if self._group else -math.inf,
            self._group_s if self._group else 0.0,
            None if joined is None else max(0.0, joined.seconds),
            len(self._group) + len(self._line),
            ends,
        )

    def replan(self) -> None:
        """The passes take other times than before."""
        self._plan = None

    def waiting(self, now: float) -> int:
        """Prompts that are not computed yet."""
        self._advance(now)
        return len(self._group) + len(self._line)

    def waiting_tokens(self, now: float) -> int:
        """Their tokens, cached ones included."""
        self._advance(now)
        return self._tokens

    # -- groups -----------------------------------------------------------------------------------

    def _begin(self, now: float) -> None:
        """Begin to compute the waiting prompts that fit into one group."""
        for entry in self._group:
            self._tokens -= entry.new + entry.context
        self._group = {}
        self._streaming = 0
        passes = self._idle()
        while self._line:
            entry = next(iter(self._line))
            more = passes.adding(entry.new, entry.context)
            if self._group and more.closed:
                break
            entry.began = now
            self._remove(entry)
            self._group[entry] = None
            self._streaming += entry.streams
            passes = more
        self._group_passes = passes
        self._began, self._group_s = now, passes.seconds
        self._computed_s = self._took_s = 0.0

    def _take_out(self, entry: Entry) -> None:
        """Go on without a prompt of the group."""
        del self._group[entry]
        self._tokens -= entry.new + entry.context
        self._streaming -= entry.streams
        if self._group:
            self._group_passes = self._group_passes.without(entry.new, entry.context)
            self._group_s = self._group_passes.seconds
        else:
            self._group_s = 0.0

    def _left(self, now: float) -> Computed | None:
        """One prompt of the group is computed; the group ends with its last streaming prompt."""
        if self._streaming:
            return None
        computed = Computed(self._computed_s, self._took_s) if self._computed_s > 0 else None
        self._begin(now)
        return computed

    def _drop(self, entry: Entry) -> None:
        if entry in self._line:
            self._remove(entry)
            self._tokens -= entry.new + entry.context

    def _remove(self, entry: Entry) -> None:
        """Take a prompt out of the line."""
        del self._line[entry]
        self._gone += 1
        plan = self._plan
        if plan is None:
            return
        if entry.adds_s is None or self._gone > len(self._line) or len(self._line) <= SHORT:
            self._plan = None
        else:
            self._plan = plan.sooner(entry.adds_s)

    def _planned(self) -> Passes:
        """The passes of the line."""
        self._gone = 0
        if len(self._line) <= SHORT:
            for entry in self._line:
                entry.adds_s = None
            return added(self._idle(), self._line)
        plan = self._idle()
        seconds = plan.seconds
        for entry in self._line:
            plan = plan.adding(entry.new, entry.context)
            before_s, seconds = seconds, plan.seconds
            entry.adds_s = seconds - before_s
        return plan

    def _advance(self, now: float) -> None:
        """Take out groups that do not stream and are expected to be computed."""
        while self._group and not self._streaming:
            took = self._factor() * self._group_s
            if now - self._began < took:
                return
            self._begin(self._began + took)

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
        if self._streaming != sum(entry.streams for entry in self._group):
            raise InternalError(f"{self._streaming} prompts of the group do not stream")
        if self._tokens != sum(entry.new + entry.context for entry in entries):
            raise InternalError(f"the prompts do not have {self._tokens} tokens")
        if self._plan is not None and len(self._line) <= SHORT and any(e.adds_s for e in self._line):
            raise InternalError("a prompt of a short line has the time of a long one")
        batch = NOTHING
        for entry in self._group:
            batch = batch.adding(entry.new, entry.context)
        if len(self._group) > 1 and self._group_passes.open != batch:
            raise InternalError(f"the group is {batch}, not {self._group_passes.open}")
