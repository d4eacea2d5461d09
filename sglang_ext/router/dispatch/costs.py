"""The costs that policies see: exec over what each instance has to compute, corrected by what is observed.

exec is that of a batch: a prompt joins those that wait at an instance, and what it adds to their passes is
what it costs there. An instance says how it fills its passes (``Batching``, from its ``/server_info``), and
with each heartbeat how many requests it generates for and how many wait, of whoever sent them.

A cost model is a measurement from another day, or an order of magnitude (``DefaultExecution``); what an
instance does today is in its answers. A ``Correction`` is observed over expected computing time, both
summed over the last groups of prompts that were computed together (``queue_estimate``). It is bounded,
narrowly where there is a profile: an outlier must not make routing forget what was measured.

There is one for the fleet, and one per instance for what it differs from the fleet by; of that, the first
20 % do not count. Instances of one kind differ by chance, and a policy that followed chance would send
whatever is new to whoever was lucky last. What is learnt from is the time of computing, not the time in the
line: a correction that follows a queue comes when the queue has gone, and makes the next one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from sglang_ext.cost_model import Batching, CostModel, Passes
from sglang_ext.cost_model.batch import ANY
from sglang_ext.protocol.agent import Load
from sglang_ext.router.dispatch.queue_estimate import Entry, QueueEstimate
from sglang_ext.router.dispatch.transfer_times import TransferTimes
from sglang_ext.router.policies.base import Instance, Match, Role
from sglang_ext.router.policies.spans import ways
from sglang_ext.router.telemetry.estimate import Estimate
from sglang_ext.router.telemetry.local_metrics import LocalHistograms
from sglang_ext.router.telemetry.observability import RouterMetrics
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
SAID_S = 5.0
"""How long what an instance said of itself counts; it says so every second."""
LEAST_COMPARED_S = 1e-3
"""Estimates below it are not compared: a ratio to next to nothing says nothing."""
MOST_OTHERS = 32
"""Prompts of others that are told apart."""
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

    __slots__ = ("_context", "_costs", "_entry", "_estimate", "_name", "_new", "_queue", "_streams")

    def __init__(
        self,
        costs: RouterCosts,
        name: str,
        queue: QueueEstimate,
        new: int,
        context: int,
        streams: bool,
        estimate: Estimate | None,
    ) -> None:
        self._costs = costs
        self._estimate = estimate
        self._name = name
        self._queue = queue
        self._new, self._context = new, context
        self._streams = streams
        self._entry: Entry | None = None
        """Until the first byte."""

    def __enter__(self) -> Callable[[], None]:
        now = self._costs.now()
        self._entry = self._queue.enter(self._new, self._context, now, streams=self._streams)
        return self.first_byte

    def first_byte(self) -> None:
        """The first byte of the answer is here. Repeating it is harmless."""
        if not self._streams:
            self.__exit__()
            return
        entry, self._entry = self._entry, None
        if entry is None:
            return
        now = self._costs.now()
        computed = self._queue.first_byte(entry, now)
        if self._estimate is not None:
            self._estimate.observed_s = now - entry.arrived
            if entry.began is not None:
                self._estimate.observed_queue_s = entry.began - entry.arrived
            self._costs.compare(self._name, self._estimate)
        if computed is not None:
            self._costs.observe(self._name, computed.expected_s, computed.took_s)

    def __exit__(self, *error: object) -> None:
        entry, self._entry = self._entry, None
        if entry is not None:
            self._queue.leave(entry, self._costs.now())


@dataclass(frozen=True, slots=True)
class Said:
    """What an instance said of itself, beside what this router knew at that moment."""

    at: float
    load: Load
    running: int
    """Requests that it generated for, beyond those that this router knew of; negative for less."""
    queue_s: float
    """What others had waiting there, expected and uncorrected."""


class RouterCosts:
    """``policies.base.Costs`` over cost models, and the queues at the instances.

    Args:
        model: of every instance that ``models`` does not name.
        monotonic: seconds.
        models: by instance name, where instances differ.
        can_fetch: whether an instance can be told to fetch KV from another: (from, to).
        batching: how an instance fills its passes.
    """

    def __init__(
        self,
        model: CostModel,
        monotonic: Callable[[], float],
        *,
        models: Callable[[str], CostModel | None] = lambda name: None,
        can_fetch: Callable[[str, str], bool] = lambda source, target: False,
        batching: Callable[[str], Batching] = lambda name: ANY,
    ) -> None:
        self.model = model
        self._monotonic = monotonic
        self._models = models
        self._can_fetch = can_fetch
        self._batching = batching
        self._ratios: LocalHistograms | None = None
        self._said: dict[str, Said] = {}
        self._fleet = Correction()
        self._corrections: dict[str, Correction] = {}
        self._factors: dict[str, float] = {}
        """By instance, until the next answer."""
        self._queues: dict[str, QueueEstimate] = {}
        self._empty: dict[str, tuple[CostModel, Batching, Passes]] = {}
        """Passes without a prompt, by instance, where they do not change with what it generates."""
        self._transfers = TransferTimes()
        self._disks = TransferTimes()
        """What an instance's loads from below memory take; by what was waited for when it exported them."""

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
        self._disks.clear()

    @property
    def calibrated(self) -> bool:
        return self.model.calibrated

    def chunk(self, name: str) -> int:
        """Tokens of a prompt that an instance computes in one pass; 0 for all."""
        return self._batching(name).chunk

    def exec_s(self, instance: Instance, new_tokens: int, context_tokens: int) -> float:
        """What the prompt adds to the passes of those that wait there."""
        name, new, context = instance.name, max(1, new_tokens), max(0, context_tokens)
        queue = self._queues.get(name)
        waiting = None if queue is None else queue.joined(self._monotonic())
        if waiting is not None:
            return self.factor(name) * max(0.0, waiting.adding(new, context).seconds - waiting.seconds)
        batching = self._batching(name)
        if batching.mixed:
            return self.factor(name) * self._idle(name).adding(new, context).seconds
        return self.factor(name) * self.of(name).exec_s(new, context, batching)

    def load_s(self, instance: Instance, tier: Tier, tokens: int) -> float:
        if tokens <= 0:
            return 0.0
        factor = 1.0 if tier.in_memory else self._disks.factor(instance.name, self._monotonic())
        return factor * self.of(instance.name).load_tokens_s(tier, tokens)

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
        """The prompts before it, of others as far as the instance said, and the step of generation that is
        under way."""
        now, name = self._monotonic(), instance.name
        running = self._running(instance)
        step = self.of(name).decode_s(running) if running else 0.0
        queue, said = self._queues.get(name), self._heard(name, now)
        others_s = 0.0 if said is None else max(0.0, self.factor(name) * said.queue_s - (now - said.at))
        return (0.0 if queue is None else queue.waits_s(now)) + others_s + step

    def decode_s(self, instance: Instance) -> float:
        return self.of(instance.name).decode_s(self._running(instance) + 1)

    def _running(self, instance: Instance) -> int:
        """Requests that it generates for: what it said last, and what has changed since."""
        said = self._heard(instance.name, self._monotonic())
        return max(0, self._known_running(instance.name, instance.in_flight) + (said.running if said else 0))

    def _known_running(self, name: str, in_flight: int) -> int:
        queue = self._queues.get(name)
        return max(0, in_flight - (queue.waiting(self._monotonic()) if queue else 0))

    def _heard(self, name: str, now: float) -> Said | None:
        said = self._said.get(name)
        return said if said is not None and now - said.at < SAID_S else None

    def _idle(self, name: str) -> Passes:
        """The passes of an instance without any prompt."""
        model, batching = self.of(name), self._batching(name)
        if batching.mixed:
            said = self._heard(name, self._monotonic())
            return model.passes(batching, said.load.running if said else 0)
        known = self._empty.get(name)
        if known is None or known[0] is not model or known[1] is not batching:
            known = self._empty[name] = model, batching, model.passes(batching)
        return known[2]

    def said(self, name: str) -> Load | None:
        """What an instance said of itself a moment ago."""
        said = self._heard(name, self._monotonic())
        return None if said is None else said.load

    def step_s(self, requests: int) -> float:
        """One step of generation of so many requests, as the model of the fleet has it."""
        return self.model.decode_s(requests)

    def heard(self, name: str, load: Load, in_flight: int) -> None:
        """An instance has said how busy it is.

        Args:
            in_flight: requests that this router knows to be there.
        """
        now, queue = self._monotonic(), self._queues.get(name)
        waiting, tokens = (queue.waiting(now), queue.waiting_tokens(now)) if queue else (0, 0)
        # What this router knows of is not to be counted twice, and may have come or gone since.
        prompts, more = min(MOST_OTHERS, load.queued - waiting), load.queued_tokens - tokens
        others = self.of(name).passes(self._batching(name))
        for _ in range(prompts if more > 0 else 0):
            others = others.adding(max(1, more // prompts), 0)
        running = load.running - self._known_running(name, in_flight)
        self._said[name] = Said(now, load, running, others.seconds)

    def observe_transfer(self, source: str, target: str, tokens: int, took_s: float) -> None:
        """An instance has fetched so many tokens from another one, or tried to, and lost that time."""
        expected = self.of(target).transfer_s(tokens)
        factor = self._transfers.factor(source, self._monotonic())
        self._compare(target, "transfer", factor * expected, took_s)
        self._transfers.observe(source, expected, took_s, self._monotonic())

    def observe_load(self, name: str, expected_s: float, took_s: float) -> None:
        """An instance has brought KV from its disk to export it. expected_s: as it was said before."""
        now = self._monotonic()
        self._disks.observe(name, expected_s / self._disks.factor(name, now), took_s, now)

    def estimate(self, instance: Instance, tokens: int, held: Match) -> Estimate:
        """What a prompt of so many tokens is expected to take at an instance that holds ``held`` of it."""
        found = None
        for way in ways(held):
            load_s = sum(self.load_s(instance, tier, count) for tier, count in way.below.items())
            new = max(1, tokens - way.tokens)
            exec_s = self.exec_s(instance, new, tokens - new)
            if found is None or load_s + exec_s < found[0] + found[1]:
                found = load_s, exec_s
        assert found is not None
        return Estimate(self.queue_s(instance), found[0], 0.0, found[1], self.factor(instance.name))

    # -- queues -----------------------------------------------------------------------------------

    def sending(
        self,
        name: str,
        new_tokens: int,
        context_tokens: int,
        *,
        streams: bool,
        estimate: Estimate | None = None,
    ) -> Sending:
        """A prompt is on its way to ``name`` while the block runs; the caller calls what it is given at the
        first byte.

        Args:
            new_tokens: to compute, behind ``context_tokens``.
            streams: whether the first byte comes with the first token.
            estimate: what it is expected to take; filled in at the first byte.
        """
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = QueueEstimate(lambda: self._idle(name), lambda: self.factor(name))
        return Sending(self, name, queue, new_tokens, context_tokens, streams, estimate)

    def now(self) -> float:
        """Seconds."""
        return self._monotonic()

    # -- what became of it --------------------------------------------------------------------------

    def measure(self, metrics: RouterMetrics) -> None:
        """Show how near estimates are to what is observed, and what they are corrected by."""
        self._ratios = metrics.estimate_ratio
        corrections = metrics.gauge(
            "cost_correction", "Observed over calculated computing time, of the last answers", "instance"
        )
        queues = metrics.gauge(
            "queue_estimate_seconds", "Expected until what was sent there is computed", "instance"
        )

        def refresh() -> None:
            corrections.clear()
            queues.clear()
            for name, queue in self._queues.items():
                corrections.labels(name).set(self.factor(name))
                queues.labels(name).set(queue.waits_s(self.now()))

        metrics.refreshing.subscribe(refresh)

    def compare(self, name: str, estimate: Estimate) -> None:
        """A request that was estimated so has had its first byte."""
        self._compare(name, "ttft", estimate.ttft_s, estimate.observed_s)
        self._compare(name, "queue", estimate.queue_s, estimate.observed_queue_s)

    def _compare(self, name: str, term: str, expected_s: float, observed_s: float | None) -> None:
        if self._ratios is not None and observed_s is not None and expected_s >= LEAST_COMPARED_S:
            self._ratios.of(name, term).add(observed_s / expected_s)

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
        """Prompts that ``name`` computed together have their first bytes; computing them took ``observed_s``.

        Args:
            expected_s: what its cost model says, uncorrected.
        """
        if expected_s <= 0:
            return
        factor = self.factor(name)
        self._compare(name, "exec", factor * expected_s, observed_s)
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
        self._empty.pop(name, None)
        self._said.pop(name, None)
        if self._ratios is not None:
            self._ratios.drop(name)
        self._transfers.forget(name)
        self._disks.forget(name)

    def __repr__(self) -> str:
        factors = ", ".join(f"{name}: x{self.factor(name):.2f}" for name in self._corrections)
        return f"RouterCosts({self.model!r}, {factors or 'uncorrected'})"
