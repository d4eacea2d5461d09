"""Whether running requests give way to one of a higher priority, and which (Symphony, 3.5).

A request that does not fit waits until running ones end, or low-priority ones are retracted for it: their
KV stays in the tiers, and they go on from it later. A retraction costs the retracted request time, so it is
made only where waiting would be noticed. `weigh` decides, without side effects; `Retraction` measures decode
steps, and makes all ranks of an instance decide alike.

The remaining time of a running request is only bounded: it ends by its ``max_new_tokens`` at the latest. The
wait is expected to be that long, so that requests which may run long do give way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.ranks import NOT_YET, Ranks
from sglang_ext.engine.resume import lost_by_retraction

DEFAULT_WAIT_SECONDS: Final = 0.2
"""Default of ``--kv-retract-wait``: the shortest delay of a first token that a user notices."""
UNFELT: Final = 0.1
"""The part of a request's own prefill time that a wait may add to it unnoticed."""
_SMOOTHING: Final = 0.2
"""Weight of the newest decode step."""
_LONGEST: Final = 4.0
"""Limit of one step, as a multiple of the average before, because the server may have been paused."""


class Why(enum.Enum):
    """The reason for a decision."""

    ROOM = "room"
    """The request fits."""
    NOBODY = "nobody"
    """Retracting all requests of lower priority would free too little."""
    SHORT = "short"
    """Room is expected soon enough without a retraction."""
    ALWAYS = "always"
    """No wait is accepted."""
    UNMEASURED = "unmeasured"
    """No decode step has been measured yet."""
    SLOWER = "slower"
    """The wait is expected to be too long."""


@dataclass(frozen=True)
class Running:
    """A running request.

    priority: larger goes first. remaining: tokens that it may still generate. held: slots that come free when
    it goes, because no other request uses them. reserved: slots that the scheduler keeps for its remaining
    tokens. retractable: whether it would resume as if nothing had happened.
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
    """retract: indices of the requests that give way; empty for no retraction. wait_s: expected without a
    retraction; None where no step has been measured."""

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
    """The requests that give way: the lowest priority first, of one priority the least KV, then the newest.
    Empty where that would not be enough. No request is chosen without need.

    Args:
        running: in the order in which they came.
        threshold: only requests give way whose priority is lower by more than this.
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
    """Whether running requests give way to another, and which.

    Args:
        running: in the order in which they came.
        step_s: seconds of a decode step; None when unknown.
        wait_s: how long it may be expected to wait; 0 for not at all.
        threshold: only requests give way whose priority is lower by more than this.
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
    """retracted: requests that gave way. avoided: requests for which others could have given way, but whose
    expected wait was too short. resumed: retracted requests that run again. found_tokens: tokens of resumed
    requests whose KV was found again. recomputed_tokens: tokens of resumed requests that were computed again.
    error: decisions that failed with an exception.
    """

    retracted: int = 0
    avoided: int = 0
    resumed: int = 0
    found_tokens: int = 0
    recomputed_tokens: int = 0
    error: int = 0


class Retraction(Planner):
    """Measures decode steps for the decision, alike on all ranks of an instance. In the scheduler's thread.

    Each rank measures its own decode steps. Several ranks agree on one duration in the pass after the first
    request that needs it, and that request waits for the pass.

    Args:
        wait_s: how long a request may be expected to wait before others give way.
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
        self._agreed = ranks.measure("decode step", self._measure)

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
        """Another batch than decode has run, so the time to the next result is no decode step."""
        self._last = None

    def _measure(self) -> Sequence[int]:
        return (NOT_YET if self._step_s is None else round(self._step_s * self._UNITS),)

    def judge(self, want: Wanting, running: Sequence[Running], threshold: int) -> Verdict | None:
        """`weigh`, with the step that all ranks agree on; None until they have agreed, in the next pass."""
        if self._ranks.alone or self.wait_s <= 0:  # a wait of 0 needs no step
            step = self._step_s
        else:
            self._agreed.ask()
            if not self._agreed.fresh or self._agreed.numbers is None:
                return None
            (units,) = self._agreed.numbers
            step = None if units == NOT_YET else units / self._UNITS
        return weigh(want, running, step_s=step, wait_s=self.wait_s, threshold=threshold)
