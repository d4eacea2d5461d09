"""Whether running requests give way to one of a higher priority, and which (Symphony, 3.5).

A request that does not fit waits until running ones end, or low-priority ones are retracted for it: their
KV stays in the tiers, and they go on from it later. A retraction costs the retracted request time, so it is
made only where waiting would be noticed. `weigh` decides, without doing anything; `Retraction` knows what a
decode step takes, and has all ranks of an instance decide alike.

How long running requests run is known as a bound only: each ends by its ``max_new_tokens`` at the latest.
The wait is expected to be that long, so that requests which may run long do give way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.ranks import NOT_YET, Ranks
from sglang_ext.engine.resume import lost_by_retraction

DEFAULT_WAIT_SECONDS: Final = 0.2
"""Of ``--kv-retract-wait``: what somebody who waits for a first token notices."""
UNFELT: Final = 0.1
"""Of the time that a request's own prefill takes: what a wait may add to it unnoticed."""
_SMOOTHING: Final = 0.2
"""Weight of the newest decode step."""
_LONGEST: Final = 4.0
"""Times the steps before: as much as one step counts at most, because the server may have been paused."""


class Why(enum.Enum):
    """What a decision rests on."""

    ROOM = "room"
    """Nothing is lacking."""
    NOBODY = "nobody"
    """Too little would come free by retracting lower priorities."""
    SHORT = "short"
    """Room is expected soon enough without."""
    ALWAYS = "always"
    """No wait is accepted."""
    UNMEASURED = "unmeasured"
    """Nothing is known of decode steps yet."""
    SLOWER = "slower"
    """The wait is expected to be too long."""


@dataclass(frozen=True)
class Running:
    """A running request.

    priority: larger goes first. remaining: tokens that it may still generate. held: slots that come free when
    it goes, because nobody else uses them. reserved: slots that the scheduler keeps for its remaining tokens.
    retractable: whether it would go on as if nothing had happened.
    """

    priority: int
    remaining: int
    held: int
    reserved: float = 0.0
    retractable: bool = True

    @property
    def gives(self) -> float:
        """Slots that another request may have when it goes, now or at its end."""
        return self.held + self.reserved

    def short_of(self, steps: int) -> float:
        """Slots that it takes in ``steps`` decode steps beyond those that are kept for it."""
        return steps * (1 - self.reserved / self.remaining) if self.remaining else 0.0


@dataclass(frozen=True)
class Wanting:
    """A request that does not fit.

    tokens: slots that it lacks, 0 or less for none. rows: places among the running requests that it lacks.
    compute_s: seconds of its prefill; None when unknown.
    """

    priority: int
    tokens: float
    rows: int
    compute_s: float | None = None

    def has_room(self, *gone: Running, drift: float = 0.0) -> bool:
        """Whether it fits when these are gone. drift: slots that the others have taken by then."""
        return self.tokens + drift <= sum(each.gives for each in gone) and self.rows <= len(gone)


@dataclass(frozen=True)
class Verdict:
    """retract: indices of the requests that give way, none where nobody does. wait_s: expected without a
    retraction; None where nothing was measured."""

    retract: tuple[int, ...]
    why: Why
    wait_s: float | None = None


def steps_to_wait(want: Wanting, running: Sequence[Running]) -> float:
    """Decode steps until it fits by itself, at the latest; infinite when it does not before all have gone."""
    if want.has_room():
        return 0
    ended: list[Running] = []
    going = sorted(running, key=lambda each: each.remaining)
    while going:
        steps = going[0].remaining
        while going and going[0].remaining == steps:
            ended.append(going.pop(0))
        if want.has_room(*ended, drift=sum(each.short_of(steps) for each in going)):
            return steps
    return math.inf


def whom_to_retract(want: Wanting, running: Sequence[Running], *, threshold: int = 0) -> tuple[int, ...]:
    """Who gives way: the lowest priority first, of one priority the least KV, then who came last. Nobody
    where that is not enough, and nobody who is not needed.

    Args:
        running: in the order in which they came.
        threshold: only those give way whose priority is lower by more than this.
    """
    order = sorted(
        (
            index
            for index, each in enumerate(running)
            if each.retractable and want.priority - each.priority > threshold
        ),
        key=lambda index: (running[index].priority, running[index].held, -index),
    )
    chosen: list[int] = []
    for index in order:
        chosen.append(index)
        if want.has_room(*(running[each] for each in chosen)):
            break
    else:
        return ()
    for index in reversed(chosen[:-1]):
        rest = [each for each in chosen if each != index]
        if want.has_room(*(running[each] for each in rest)):
            chosen = rest
    return tuple(chosen)


def weigh(
    want: Wanting,
    running: Sequence[Running],
    *,
    step_s: float | None,
    wait_s: float,
    threshold: int = 0,
) -> Verdict:
    """Whether others give way to a request, and who.

    Args:
        running: in the order in which they came.
        step_s: seconds of a decode step; None when unknown.
        wait_s: how long it may be expected to wait; 0 for not at all.
        threshold: only those give way whose priority is lower by more than this.
    """
    if want.has_room():
        return Verdict((), Why.ROOM, 0.0)
    chosen = whom_to_retract(want, running, threshold=threshold)
    waits = None if step_s is None else steps_to_wait(want, running) * step_s
    if not chosen:
        return Verdict((), Why.NOBODY, waits)
    if wait_s <= 0:
        return Verdict(chosen, Why.ALWAYS, waits)
    if waits is None:
        return Verdict(chosen, Why.UNMEASURED)
    if waits <= max(wait_s, UNFELT * (want.compute_s or 0.0)):
        return Verdict((), Why.SHORT, waits)
    return Verdict(chosen, Why.SLOWER, waits)


def obstacle(req: Any) -> str:
    """Why a running request is not retracted for another; empty when it may be. From its ids alone, SGLang
    would go on with it in another way than it began.
    """
    sampling = req.sampling_params
    if not req.output_ids:
        return "its first token"
    if len(req.output_ids) < sampling.min_new_tokens:
        return "tokens that have to come before the end"  # SGLang would count them from the beginning
    return lost_by_retraction(req)


@dataclass
class RetractionCounters:
    """retracted: requests that gave way. avoided: requests that could have been given way to, and did not
    wait long enough for that. resumed: retracted requests that run again. found_tokens: of these, tokens
    whose KV was found again, and recomputed_tokens: computed again. error: decisions that failed, and were
    not made.
    """

    retracted: int = 0
    avoided: int = 0
    resumed: int = 0
    found_tokens: int = 0
    recomputed_tokens: int = 0
    error: int = 0


class Retraction:
    """What the decision needs to know, alike on all ranks of an instance. In the scheduler's thread.

    Decode steps take each rank its own time. Where there are several, the ranks agree on one in the pass
    after it was asked for, and a request that does not fit waits for that pass.

    Args:
        wait_s: how long a request may be expected to wait before others give way.
        ranks: of the instance.
        clock: seconds, monotonic.
    """

    _UNITS: Final = 1e9
    """Numbers that are compared are whole: nanoseconds."""

    def __init__(self, wait_s: float, ranks: Ranks, clock: Clock | None = None) -> None:
        self.wait_s = wait_s
        self.counters = RetractionCounters()
        self._ranks = ranks
        self._clock = clock or SystemClock()
        self._step_s: float | None = None
        self._last: float | None = None
        self._asked = False
        self._agreed: tuple[int, float | None] | None = None
        """In which pass all ranks agreed, and on what."""
        ranks.add(self)

    def __repr__(self) -> str:
        return f"Retraction(step_s={self._step_s}, {self.counters})"

    def decoded(self) -> None:
        """The result of a decode step is there."""
        now = self._clock.monotonic()
        if self._last is not None:
            step, known = now - self._last, self._step_s
            self._step_s = (
                step if known is None else known + _SMOOTHING * (min(step, _LONGEST * known) - known)
            )
        self._last = now

    def interrupted(self) -> None:
        """Something else has run: the next result comes later than a decode step takes."""
        self._last = None

    def propose(self) -> Sequence[int]:
        if not self._asked or self._ranks.alone:
            return ()
        return (NOT_YET if self._step_s is None else round(self._step_s * self._UNITS),)

    def act(self, agreed: Sequence[int]) -> None:
        self._asked = False
        if agreed:
            step = None if agreed[0] == NOT_YET else agreed[0] / self._UNITS
            self._agreed = (self._ranks.passes, step)

    def judge(self, want: Wanting, running: Sequence[Running], threshold: int) -> Verdict | None:
        """`weigh`, with what all ranks know; None until they do, in the next pass."""
        if self._ranks.alone or self.wait_s <= 0:  # which needs no step
            step = self._step_s
        else:
            self._asked = True
            if self._agreed is None or self._agreed[0] != self._ranks.passes:
                return None
            step = self._agreed[1]
        return weigh(want, running, step_s=step, wait_s=self.wait_s, threshold=threshold)
