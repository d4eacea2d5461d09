"""The costs that policies see: cost models by instance, corrected by the times to first token observed.

A cost model is a measurement from another day, or an order of magnitude (``DefaultExecution``); what an
instance does today is in its answers. A ``Correction`` is observed over expected computing time, both
summed over the last answers: sums, because prompts that are computed together have their first bytes
together, and only all of them tell how long each took. It is bounded, narrowly where there is a profile: an
outlier must not make routing forget what was measured.

There is one for the fleet, and one per instance for what it differs from the fleet by; of that, the first
20 % do not count. Instances of one kind differ by chance, and a policy that followed chance would send
whatever is new to whoever was lucky last. What is learnt from is the time of a prompt that was the first in
line, not the time in the line: a correction that follows a queue comes when the queue has gone, and makes
the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sglang_ext.cost_model import CostModel
from sglang_ext.router.dispatch.queue_estimate import Entry, QueueEstimate
from sglang_ext.router.dispatch.transfer_times import TransferTimes
from sglang_ext.router.policies.base import Instance, Role
from sglang_ext.tiers import Tier

REMEMBERED = 0.9
"""Weight of all former answers when a new one comes: about ten are remembered."""
PRIOR_ANSWERS = 3.0
"""As many answers of the fleet's factor are taken to have come from an instance before its first."""
FADING = 0.98
"""What is left of an instance's answers with each answer of another one: whoever was taken for slow is sent
nothing, and could not show that it is not."""
CHANCE = math.log(1.2)
"""What an instance may differ from the fleet by without being taken for another kind."""
OUTLIER = 8.0
"""An answer counts as if it had taken at most so many times what was expected of it."""
BOUND_CALIBRATED = 4.0
"""The factor stays within 1/4 … 4 of what was measured,"""
BOUND_DEFAULT = 256.0
"""and within 1/256 … 256 of the defaults, which cover a laptop and a large accelerator."""


class Correction:
    """Observed over expected time, of the last answers."""

    __slots__ = ("expected_s", "observed_s")

    def __init__(self) -> None:
        self.observed_s = 0.0
        self.expected_s = 0.0

    def observe(self, expected_s: float, observed_s: float) -> None:
        """An answer has begun.

        Args:
            expected_s: what the cost model said, uncorrected.
            observed_s: what it took.
        """
        self.scale(REMEMBERED)
        self.observed_s += observed_s
        self.expected_s += expected_s

    def scale(self, share: float) -> None:
        """Let all that was observed count less."""
        self.observed_s *= share
        self.expected_s *= share

    def factor(self, bound: float, prior: float = 1.0, prior_s: float = 0.0) -> float:
        """What expected times are to be multiplied with.

        Args:
            bound: the least and the greatest are 1 / bound and bound.
            prior: the factor before anything was observed, with the weight of ``prior_s`` expected seconds.
        """
        expected = self.expected_s + prior_s
        if expected <= 0:
            return prior
        return min(bound, max(1 / bound, (self.observed_s + prior * prior_s) / expected))


class Sending:
    """See ``RouterCosts.sending``. A class, because a generator costs every request more."""

    __slots__ = ("_costs", "_entry", "_model_s", "_name", "_queue", "_streams")

    def __init__(
        self, costs: RouterCosts, name: str, queue: QueueEstimate, model_s: float, streams: bool
    ) -> None:
        self._costs = costs
        self._name = name
        self._queue = queue
        self._model_s = model_s
        self._streams = streams
        self._entry: Entry | None = None
        """Until the first byte."""

    def __enter__(self) -> Callable[[], None]:
        costs = self._costs
        expected_s = costs.factor(self._name) * self._model_s
        self._entry = self._queue.enter(expected_s, costs.now(), streams=self._streams)
        return self.first_byte

    def first_byte(self) -> None:
        """The first byte of the answer is here. Repeating it is harmless."""
        took = self._left()
        if took is not None and self._streams:
            self._costs.observe(self._name, self._model_s, took)

    def __exit__(self, *error: object) -> None:
        self._left()

    def _left(self) -> float | None:
        entry, self._entry = self._entry, None
        return None if entry is None else self._queue.leave(entry, self._costs.now())


class RouterCosts:
    """``policies.base.Costs`` over cost models, and the queues at the instances.

    Args:
        model: of every instance that ``models`` does not name.
        monotonic: seconds.
        models: by instance name, where instances differ.
        can_fetch: whether an instance can be told to fetch KV from another: (from, to).
    """

    def __init__(
        self,
        model: CostModel,
        monotonic: Callable[[], float],
        *,
        models: Callable[[str], CostModel | None] = lambda name: None,
        can_fetch: Callable[[str, str], bool] = lambda source, target: False,
    ) -> None:
        self.model = model
        self._monotonic = monotonic
        self._models = models
        self._can_fetch = can_fetch
        self._fleet = Correction()
        self._corrections: dict[str, Correction] = {}
        self._factors: dict[str, float] = {}
        """By instance, until the next answer."""
        self._queues: dict[str, QueueEstimate] = {}
        self._transfers = TransferTimes()

    def of(self, name: str) -> CostModel:
        """The model of an instance."""
        return self._models(name) or self.model

    def use(self, model: CostModel) -> None:
        """Calculate with another model from now on; what was learnt about the former one is dropped."""
        self.model = model
        self._fleet = Correction()
        self._corrections.clear()
        self._factors.clear()
        self._transfers.clear()

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
        if not (hands_over or self._can_fetch(source.name, target.name)):
            return math.inf
        if tokens <= 0:
            return 0.0
        model = self.of(target.name)
        if hands_over:
            return model.transfer_s(tokens)
        # What is fetched comes to DRAM, and has to be loaded from there.
        factor = self._transfers.factor(source.name, self._monotonic())
        return factor * model.transfer_s(tokens) + model.load_tokens_s(Tier.DRAM, tokens)

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

    def observe_transfer(self, source: str, target: str, tokens: int, took_s: float) -> None:
        """An instance has fetched so many tokens from another one, or tried to, and lost that time."""
        expected = self.of(target).transfer_s(tokens)
        self._transfers.observe(source, expected, took_s, self._monotonic())

    # -- queues -----------------------------------------------------------------------------------

    def sending(self, name: str, new_tokens: int, context_tokens: int, *, streams: bool) -> Sending:
        """A prompt is on its way to ``name`` while the block runs; the caller calls what it is given at the
        first byte.

        Args:
            new_tokens: to compute, behind ``context_tokens``.
            streams: whether the first byte comes with the first token.
        """
        model_s = self.of(name).exec_s(new_tokens, context_tokens)
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = QueueEstimate()
        return Sending(self, name, queue, model_s, streams)

    def now(self) -> float:
        """Seconds."""
        return self._monotonic()

    # -- learning ---------------------------------------------------------------------------------

    def factor(self, name: str) -> float:
        """What an instance's expected times are multiplied with."""
        found = self._factors.get(name)
        if found is None:
            found = self._factors[name] = self._factor(name)
        return found

    def _factor(self, name: str) -> float:
        bound = BOUND_CALIBRATED if self.of(name).calibrated else BOUND_DEFAULT
        fleet = self._fleet.factor(bound)
        own = self._corrections.get(name)
        if own is None:
            return fleet
        # Ten answers are remembered, so a tenth of the fleet's sum is one answer.
        prior_s = self._fleet.expected_s * (1 - REMEMBERED) * PRIOR_ANSWERS
        apart = math.log(own.factor(bound, fleet, prior_s) / fleet)
        counts = math.copysign(max(0.0, abs(apart) - CHANCE), apart)
        return min(bound, max(1 / bound, fleet * math.exp(counts)))

    def observe(self, name: str, expected_s: float, observed_s: float) -> None:
        """An answer of ``name`` has begun; computing its prompt took ``observed_s``.

        Args:
            expected_s: what its cost model says, uncorrected.
        """
        if expected_s <= 0:
            return
        factor = self.factor(name)
        # The first answer of all may be off by as much as the defaults are.
        if self._fleet.expected_s > 0:
            observed_s = min(observed_s, OUTLIER * factor * expected_s)
        self._fleet.observe(expected_s, observed_s)
        own = self._corrections.setdefault(name, Correction())
        own.observe(expected_s, observed_s)
        for other in self._corrections.values():
            if other is not own:
                other.scale(FADING)
        self._factors.clear()

    def forget(self, name: str) -> None:
        """An instance left, or was started anew. What is on its way to it still ends its own way."""
        self._corrections.pop(name, None)
        self._factors.clear()
        self._queues.pop(name, None)
        self._transfers.forget(name)

    def __repr__(self) -> str:
        factors = ", ".join(f"{name}: x{self.factor(name):.2f}" for name in self._corrections)
        return f"RouterCosts({self.model!r}, {factors or 'uncorrected'})"
