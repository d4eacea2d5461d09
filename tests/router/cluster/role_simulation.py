"""Requests that arrive at random at prefill and decode instances, in steps of a tenth of a second: the input
of a role controller, and the outcome of its changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from sglang_ext.protocol.agent import Load
from sglang_ext.router.cluster.role_controller import HOLDS, MEAN
from sglang_ext.router.cluster.role_traffic import Ended, RoleTraffic, Sends
from sglang_ext.router.policies.base import Role
from sglang_ext.router.policies.roles import History, due_in_s, split_name, wish
from sglang_ext.stages import StageTimes

TICK_S = 0.1
PROMPT_TOKENS = 1000


@dataclass(frozen=True)
class Phase:
    """A load: requests per second, seconds of prefill and tokens of answer of each on average."""

    seconds: float
    rate: float
    prefill_s: float
    tokens: float


@dataclass
class Request:
    prefill_s: float
    tokens: float
    came: float
    began: float = -1.0
    prefilled: float = -1.0
    left_s: float = 0.0
    left: float = 0.0


@dataclass
class Simulation:
    """One fleet. step_s, more_s: seconds of a step of generation, and seconds that each further request adds
    to it. Changes take `takes_s`, in which the instance has no role."""

    prefill: int
    decode: int
    seed: int = 0
    dwell_s: float = 60.0
    takes_s: float = 5.0
    step_s: float = 0.03
    more_s: float = 0.01
    changes: list[tuple[float, str]] = field(default_factory=list)
    gained: list[tuple[float, Role]] = field(default_factory=list)
    finished: list[tuple[float, float, float]] = field(default_factory=list)
    """When it ended, seconds to its first token, seconds to its last."""

    def play(self, *phases: Phase, controls: bool = True) -> Simulation:
        rng = random.Random(self.seed)
        traffic = RoleTraffic(MEAN * self.dwell_s, lambda: self.more_s / self.step_s)
        history, going = History(), None
        waiting: list[Request] = []
        generating: list[Request] = []
        sent = sent_tokens = ticks = 0
        for phase, now in _moments(phases):
            ticks += 1
            if rng.random() < phase.rate * TICK_S:
                spread = rng.uniform(0.5, 1.5), rng.uniform(0.5, 1.5)
                request = Request(phase.prefill_s * spread[0], phase.tokens * spread[1], now)
                request.left_s, request.left = request.prefill_s, request.tokens
                waiting.append(request)
                sent += 1
                sent_tokens += round(PROMPT_TOKENS * request.prefill_s)
            prefill = self.prefill - (going is not None and going[0] is Role.DECODE)
            decode = self.decode - (going is not None and going[0] is Role.PREFILL)
            for request in waiting[:prefill]:
                request.began = request.began if request.began >= 0.0 else now
                request.left_s -= TICK_S
                if request.left_s <= 0.0:
                    request.prefilled = now
                    generating.append(request)
            waiting = [request for request in waiting if request.left_s > 0.0]
            batch = max(1.0, len(generating) / decode)
            for request in generating:
                request.left -= TICK_S / (self.step_s + self.more_s * (batch - 1))
                if request.left <= 0.0:
                    self.finished.append((now, request.prefilled - request.came, now - request.came))
                    stages = StageTimes(
                        request.began - request.came,
                        request.prefilled - request.began,
                        0.0,
                        0.0,
                        now - request.prefilled,
                    )
                    # Tokens stand for seconds of prefill: a router knows how many are new.
                    new = round(PROMPT_TOKENS * request.prefill_s)
                    traffic.ended(now, Ended("p", "d0", new, round(request.tokens) + 1, stages))
            generating = [request for request in generating if request.left > 0.0]
            if going is not None and now >= going[1]:
                step = 1 if going[0] is Role.PREFILL else -1
                self.prefill, self.decode = self.prefill + step, self.decode - step
                history = history.after(going[0], now, self.dwell_s)
                self.gained.append((now, going[0]))
                self.changes.append((now, split_name(self.prefill, self.decode)))
                going = None
            if ticks % 10 or going is not None:
                continue
            queued = round(sum(request.left_s for request in waiting) * PROMPT_TOKENS)
            traffic.sample(
                now,
                [Sends("p", sent, sent_tokens, len(waiting), 0, 0, Load(0, len(waiting), queued))],
                [
                    Sends(f"d{at}", 0, 0, 0, 0, 0, Load(len(generating[at :: self.decode])))
                    for at in range(self.decode)
                ],
            )
            loads = traffic.loads(self.prefill, self.decode)
            if isinstance(loads, str) or not controls:
                continue
            wished = wish(loads, history, now, dwell_s=self.dwell_s, takes_s=self.takes_s)
            history = msgspec.structs.replace(history, wish=wished)
            if wished.role is not None and not due_in_s(
                wished, history, now, dwell_s=self.dwell_s, holds_s=HOLDS * self.dwell_s
            ):
                going = wished.role, now + self.takes_s
        return self

    def mean_s(self, since: float = 0.0) -> float:
        """Seconds to the last token, of requests that ended since."""
        found = [whole for ended, _, whole in self.finished if ended >= since]
        return sum(found) / len(found)


def _moments(phases: tuple[Phase, ...]) -> Iterator[tuple[Phase, float]]:
    now = 0.0
    for phase in phases:
        end = now + phase.seconds
        while now < end:
            now += TICK_S
            yield phase, now
