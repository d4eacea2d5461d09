"""The costs that policies see: cost models by instance, corrected by the times to first token observed.

A cost model is a measurement from another day, or an order of magnitude (``DefaultExecution``); what an
instance does today is in its answers. ``Corrections`` keeps one factor per instance, the exponential average
of observed over expected time, in logarithms, so that being twice too slow and twice too fast weigh the same.
It is bounded, narrowly where there is a profile: an outlier must not make routing forget what was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.policies.base import Instance, Role
from router.queue_estimate import QueueEstimate
from sglang_ext.cost_model import CostModel
from sglang_ext.keys import Tier

LEARNING_RATE = 0.1
"""Weight of the newest answer: about ten answers are remembered."""
BOUND_CALIBRATED = 4.0
"""The factor stays within 1/4 … 4 of what was measured,"""
BOUND_DEFAULT = 256.0
"""and within 1/256 … 256 of the defaults, which cover a laptop and a large accelerator."""
SHORTEST_S = 1e-4
"""Shorter times are taken to be this long: they say nothing, and have no logarithm at 0."""


class Correction:
    """The factor of one instance."""

    __slots__ = ("_bound", "_log", "answers")

    def __init__(self, bound: float) -> None:
        self._bound = math.log(bound)
        self._log = 0.0
        self.answers = 0

    @property
    def factor(self) -> float:
        """What expected times are multiplied with."""
        return math.exp(self._log)

    def observe(self, expected_s: float, observed_s: float) -> None:
        """An answer has begun.

        Args:
            expected_s: what was expected when it was sent, this factor included.
            observed_s: what it took.
        """
        error = math.log(max(observed_s, SHORTEST_S) / max(expected_s, SHORTEST_S))
        # The first answers count more, or the tenth would still be told by the starting value.
        self.answers += 1
        weight = max(LEARNING_RATE, 1 / self.answers)
        self._log = min(self._bound, max(-self._bound, self._log + weight * error))


class RouterCosts:
    """``policies.base.Costs`` over cost models, and the queues at the instances.

    Args:
        model: of every instance that ``models`` does not name.
        monotonic: seconds.
        models: by instance name, where instances differ.
        can_fetch: whether an instance can be told to fetch KV from another.
    """

    def __init__(
        self,
        model: CostModel,
        monotonic: Callable[[], float],
        *,
        models: Callable[[str], CostModel | None] = lambda name: None,
        can_fetch: bool = False,
    ) -> None:
        self.model = model
        self._monotonic = monotonic
        self._models = models
        self._can_fetch = can_fetch
        self._corrections: dict[str, Correction] = {}
        self._queues: dict[str, QueueEstimate] = {}

    def of(self, name: str) -> CostModel:
        """The model of an instance."""
        return self._models(name) or self.model

    def use(self, model: CostModel) -> None:
        """Calculate with another model from now on; what was learnt about the former one is dropped."""
        self.model = model
        self._corrections.clear()

    @property
    def calibrated(self) -> bool:
        return self.model.calibrated

    def exec_s(self, instance: Instance, new_tokens: int, context_tokens: int) -> float:
        return self.factor(instance.name) * self.of(instance.name).exec_s(new_tokens, context_tokens)

    def load_s(self, instance: Instance, tier: Tier, tokens: int) -> float:
        return self.of(instance.name).load_tokens_s(tier, tokens) if tokens > 0 else 0.0

    def transfer_s(self, source: Instance, target: Instance, tokens: int) -> float:
        # A hand-over from prefill to decode takes place in any case.
        hands_over = source.role is Role.PREFILL and target.role is Role.DECODE
        if not (self._can_fetch or hands_over):
            return math.inf
        return self.of(target.name).transfer_s(tokens) if tokens > 0 else 0.0

    def queue_s(self, instance: Instance) -> float:
        """The prompts before it, and the step of generation that is under way."""
        running = self._running(instance)
        step = self.of(instance.name).decode_s(running) if running else 0.0
        return self._backlog_s(instance.name) + step

    def decode_s(self, instance: Instance) -> float:
        return self.of(instance.name).decode_s(self._running(instance) + 1)

    def _running(self, instance: Instance) -> int:
        """Requests that it generates for."""
        queue = self._queues.get(instance.name)
        return max(0, instance.in_flight - (queue.waiting(self._monotonic()) if queue else 0))

    def _backlog_s(self, name: str) -> float:
        queue = self._queues.get(name)
        return queue.seconds(self._monotonic()) if queue else 0.0

    # -- queues -----------------------------------------------------------------------------------

    @contextmanager
    def sending(
        self, name: str, new_tokens: int, context_tokens: int, *, streams: bool
    ) -> Iterator[Callable[[], None]]:
        """A prompt is on its way to ``name``; the caller calls what it is given at the first byte.

        Args:
            new_tokens: to compute, behind ``context_tokens``.
            streams: whether the first byte comes with the first token.
        """
        sent = self._monotonic()
        exec_s = self.factor(name) * self.of(name).exec_s(new_tokens, context_tokens)
        queue = self._queues.setdefault(name, QueueEstimate())
        expected_s = queue.seconds(sent) + exec_s
        entry = queue.enter(exec_s, sent, streams=streams)
        first = True

        def first_byte() -> None:
            nonlocal first
            if not first:
                return
            first = False
            now = self._monotonic()
            queue.leave(entry, now)
            if streams:
                self.observe(name, expected_s, now - sent)

        try:
            yield first_byte
        finally:
            queue.leave(entry, self._monotonic())

    # -- learning ---------------------------------------------------------------------------------

    def factor(self, name: str) -> float:
        """What an instance's expected times are multiplied with."""
        correction = self._corrections.get(name)
        return 1.0 if correction is None else correction.factor

    def observe(self, name: str, expected_s: float, observed_s: float) -> None:
        """An answer of ``name`` has begun ``observed_s`` after it was sent; ``expected_s`` was expected."""
        correction = self._corrections.get(name)
        if correction is None:
            bound = BOUND_CALIBRATED if self.of(name).calibrated else BOUND_DEFAULT
            correction = self._corrections[name] = Correction(bound)
        correction.observe(expected_s, observed_s)

    def forget(self, name: str) -> None:
        """An instance left, or was started anew. What is on its way to it still ends its own way."""
        self._corrections.pop(name, None)
        self._queues.pop(name, None)

    def __repr__(self) -> str:
        factors = ", ".join(f"{name}: x{c.factor:.2f}" for name, c in self._corrections.items())
        return f"RouterCosts({self.model!r}, {factors or 'uncorrected'})"
