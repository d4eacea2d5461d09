"""The load of prefill and decode, as one router sees it: from its own requests, the instances' heartbeats,
and the stage times in answers.

Where several routers send requests, this one scales its own by its share of all requests in flight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from sglang_ext.protocol.agent import Load
from sglang_ext.router.policies.roles import RoleLoads
from sglang_ext.stages import StageTimes

REMEMBERED = 0.95
"""Weight of all former answers when a new one comes, in no time: about twenty are remembered."""
LEAST_REMEMBERED = 0.1
"""Weight of former answers after a long pause. They fade as rates do; otherwise a shift to few long answers
would go unnoticed.
"""
FEWEST = 3
"""Answers needed for a load."""
INTERVALS = 32
"""Prefills of an instance that are compared for how far they were computed together."""
PRIOR_VARIANCE = 1.0
"""Requests²: the weight of the cost model's step time, beside the measured variance of batch sizes."""


class Sends(msgspec.Struct, frozen=True):
    """One instance, now."""

    name: str
    requests: int
    """Requests of this router sent to it since it joined."""
    tokens: int
    """The same of prompt tokens that it has to compute."""
    in_flight: int
    elsewhere: int
    queued_tokens: int
    """Of this router: tokens that are not computed yet."""
    said: Load | None
    """Its load in the last heartbeat."""


class Ended(msgspec.Struct, frozen=True):
    """One answer."""

    prefill: str
    decode: str
    new_tokens: int
    """Of its prompt, that were computed."""
    answer_tokens: int
    stages: StageTimes


class _Sums(NamedTuple):
    """Over answers, faded."""

    answers: float = 0.0
    prefill_s: float = 0.0
    new: float = 0.0
    slots_s: float = 0.0
    answer: float = 0.0
    batch: float = 0.0
    """Requests that an instance generated for, and"""
    step: float = 0.0
    """seconds per step, for a line through them."""
    batch_batch: float = 0.0
    batch_step: float = 0.0


class RoleTraffic:
    """See the module's docstring.

    Args:
        mean_s: seconds over which rates are means.
        step_more: by the cost model, how much each further request adds to a step of generation, as a share
            of a step for one request.
    """

    def __init__(self, mean_s: float, step_more: Callable[[], float]) -> None:
        self._mean_s = mean_s
        self._step_more = step_more
        self._at: float | None = None
        self._seen: dict[str, tuple[int, int]] = {}
        self._running_at: dict[str, int] = {}
        self._arrivals = self._tokens = self._running = 0.0
        self._weight = 0.0
        """Weight of the samples in the means; 1 when they are full."""
        self._queued_tokens = 0.0
        self.answers = 0
        self._sums = _Sums()
        self._ended_at = 0.0
        self._intervals: dict[str, deque[tuple[float, float]]] = {}

    def sample(self, now: float, prefill: Iterable[Sends], decode: Iterable[Sends]) -> None:
        """How all instances are, about once per second."""
        prefill, decode = list(prefill), list(decode)
        own = sum(one.in_flight for one in (*prefill, *decode))
        others = sum(one.elsewhere for one in (*prefill, *decode))
        scale = 1.0 + others / own if own else 1.0
        requests = tokens = 0
        seen: dict[str, tuple[int, int]] = {}
        for one in prefill:
            before = self._seen.get(one.name, (one.requests, one.tokens))
            requests += max(0, one.requests - before[0])
            tokens += max(0, one.tokens - before[1])
        for one in (*prefill, *decode):
            seen[one.name] = one.requests, one.tokens
        self._running_at = {one.name: _running(one) for one in decode}
        running = sum(self._running_at.values())
        self._queued_tokens = sum(
            scale * one.queued_tokens if one.said is None else float(one.said.queued_tokens)
            for one in prefill
        )
        before_at, self._at, self._seen = self._at, now, seen
        if before_at is None or now <= before_at:
            return
        took = now - before_at
        share = 1.0 - math.exp(-took / self._mean_s)
        self._arrivals += share * (scale * requests / took - self._arrivals)
        self._tokens += share * (scale * tokens / took - self._tokens)
        self._weight += share * (1.0 - self._weight)
        # It is a level, not a rate: a shorter mean is as smooth.
        self._running += (1.0 - math.exp(-3 * took / self._mean_s)) * (running - self._running)

    def ended(self, now: float, answer: Ended) -> None:
        """A request was answered to the end, with the times of its stages."""
        stages = answer.stages
        self.answers += 1
        batch = float(max(1, self._running_at.get(answer.decode, 1)))
        step = stages.decode / max(1, answer.answer_tokens - 1)
        new, slots_s, tokens = max(1, answer.new_tokens), stages.decode_queue, answer.answer_tokens
        seen = _Sums(1.0, stages.prefill, new, slots_s, tokens, batch, step, batch * batch, batch * step)
        share = REMEMBERED * max(LEAST_REMEMBERED, math.exp((self._ended_at - now) / self._mean_s))
        self._ended_at = now
        self._sums = _Sums(*(share * a + b for a, b in zip(self._sums, seen, strict=True)))
        end = now - stages.decode - stages.decode_queue - stages.transfer
        kept = self._intervals.setdefault(answer.prefill, deque(maxlen=INTERVALS))
        kept.append((end - stages.prefill, end))

    def loads(self, prefill: int, decode: int) -> RoleLoads | str:
        """The load, for so many instances of each role; or why it is not known."""
        if self.answers < FEWEST:
            return f"{self.answers} answers have reported their stages so far, and {FEWEST} are needed"
        if self._weight < 0.5:
            return "not seen for long enough yet"
        arrivals, tokens = self._arrivals / self._weight, self._tokens / self._weight
        sums = self._sums
        token_s = self._together() * sums.prefill_s / sums.new
        step_s, more_s = self._step()
        each = max(1.0, self._running / decode)
        return RoleLoads(
            prefill,
            decode,
            arrivals,
            tokens * token_s,
            self._queued_tokens * token_s,
            self._running,
            sums.answer / sums.answers * (step_s + more_s * (each - 1.0)),
            sums.slots_s / sums.answers,
            step_s,
            more_s,
        )

    def _step(self) -> tuple[float, float]:
        """Seconds of a step for one request, and of each further one: a line through the measured steps,
        drawn towards the cost model's where batches hardly differed.
        """
        count, more = self._sums.answers, self._step_more()
        batch, step = self._sums.batch / count, self._sums.step / count
        variance = max(0.0, self._sums.batch_batch / count - batch * batch)
        covariance = self._sums.batch_step / count - batch * step
        slope = step * more / (1.0 + more * (batch - 1.0))
        slope = (covariance + PRIOR_VARIANCE * slope) / (variance + PRIOR_VARIANCE)
        slope = min(max(0.0, slope), step / batch)
        return step - slope * (batch - 1.0), slope

    def _together(self) -> float:
        """Seconds in which an instance computed prompts, over the sum of the seconds of each prompt: less
        than 1 where several were in one pass.
        """
        union = whole = 0.0
        for kept in self._intervals.values():
            until = -math.inf
            for begin, end in sorted(kept):
                whole += end - begin
                union += max(0.0, end - max(begin, until))
                until = max(until, end)
        return union / whole if whole > 0.0 else 1.0

    def __repr__(self) -> str:
        return f"RoleTraffic({self.answers} answers, {self._arrivals:.2f}/s)"


def _running(one: Sends) -> int:
    return one.in_flight + one.elsewhere if one.said is None else one.said.running
