"""The costs that policies see: a cost model per instance, corrected by observation, and its queue.

exec is that of a batch: a prompt joins the prompts that wait at an instance, and costs the time that it adds
to their passes. An instance reports how it fills its passes (``Batching``, from its ``/server_info``), and
with each heartbeat how many requests it generates for and how many wait, including requests of other routers.

A cost model is a measurement from another day, or an order of magnitude (``DefaultExecution``); today's speed
shows in the answers. A ``Correction`` is observed over expected computing time, both summed over the last
groups of prompts that were computed together (``queue_estimate``). It is bounded, narrowly if there is a
profile: an outlier must not override the measurement.

The fleet has one correction, and each instance has one for its difference from the fleet, of which the first
20 % do not count. Instances of one kind differ by chance, and a policy that followed chance would send every
new conversation to the instance that was lucky last. Corrections learn from computing times and not from
queueing times: a correction that follows a queue arrives when the queue has gone, and makes the next one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import numpy as np

from sglang_ext.cost_model import Batching, CostModel, Passes
from sglang_ext.protocol.agent import Load
from sglang_ext.router.placing.outlook import RouterOutlook, Steps
from sglang_ext.router.placing.queue_estimate import Entry, QueueEstimate
from sglang_ext.router.placing.rows import DISK, EXPECTED, FETCH, OBSERVED, Rows
from sglang_ext.router.placing.transfer_times import TransferTimes
from sglang_ext.router.policies.base import Fleet, Instance, Role, WholeFleet
from sglang_ext.router.policies.fleet_queries import counts_of
from sglang_ext.router.policies.outlook import Numbers
from sglang_ext.router.telemetry.estimate import Estimate
from sglang_ext.router.telemetry.local_metrics import LocalHistograms
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.tiers import Tier

REMEMBERED = 0.9
"""Weight of all earlier answers when a new one arrives: about ten are remembered."""
PRIOR_ANSWERS = 3.0
"""Before an instance's first answer, the fleet's factor counts as this many answers of it."""
FADING = 0.98
"""Weight of an instance's answers after each answer of another instance. An instance that seems slow gets no
requests, so it could never show that it is not."""
CHANCE = math.log(1.2)
"""A smaller difference from the fleet's factor counts as chance."""
COUNTS = 1.2 * (1 - 1e-9)
"""A quotient that does not count for certain, with a margin for rounding."""
OUTLIER = 8.0
"""An answer counts as at most this many times its expected time."""
REPORT_S = 5.0
"""Lifetime of an instance's load report; reports come every second."""
LEAST_LEARNT_S = 1e-9
"""No computing takes less; a quotient by less may overflow."""
LEAST_COMPARED_S = 1e-3
"""Smaller estimates are not compared: a ratio to almost zero means nothing."""
MOST_OTHERS = 32
"""Waiting prompts of other routers that are counted one by one."""
BOUND_CALIBRATED = 4.0
"""With a measured profile, the factor stays within 1/4 … 4,"""
BOUND_DEFAULT = 256.0
"""and within 1/256 … 256 of an estimate and of the defaults, which cover a laptop and a large accelerator."""


class Correction:
    """Observed over expected time of the last answers."""

    __slots__ = ("expected_s", "observed_s")

    def __init__(self) -> None:
        self.observed_s = 0.0
        self.expected_s = 0.0

    def observe(self, expected_s: float, observed_s: float) -> None:
        """Add one answer.

        Args:
            expected_s: by the cost model, uncorrected.
            observed_s: measured.
        """
        self.scale(REMEMBERED)
        self.observed_s += observed_s
        self.expected_s += expected_s

    def scale(self, share: float) -> None:
        """Multiply the weight of all observations."""
        self.observed_s *= share
        self.expected_s *= share

    def factor(self, bound: float, prior: float = 1.0, prior_s: float = 0.0) -> float:
        """The factor for expected times, from 1 / ``bound`` to ``bound``.

        Args:
            prior: the factor before the first observation, with the weight of ``prior_s`` expected seconds.
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
        """The prompt's place in the queue; None after the first byte."""

    def __enter__(self) -> Callable[[], None]:
        now = self._costs.now()
        self._entry = self._queue.enter(self._new, self._context, now, streams=self._streams)
        self._costs.changed(self._name)
        return self.first_byte

    def first_byte(self) -> None:
        """The first byte of the answer has arrived. Calls after the first have no effect."""
        if not self._streams:
            self.__exit__()
            return
        entry, self._entry = self._entry, None
        if entry is None:
            return
        now = self._costs.now()
        computed = self._queue.first_byte(entry, now)
        self._costs.changed(self._name)
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
            self._costs.changed(self._name)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """An instance's load report, compared with this router's own count at that time."""

    at: float
    load: Load
    running: int
    """Requests that it generated for beyond this router's own; negative if there were fewer."""
    queue_s: float
    """Computing time of other routers' waiting prompts, uncorrected."""


class RouterCosts:
    """``policies.base.Costs`` over cost models, and the queues at the instances.

    Args:
        model: of all instances.
        monotonic: seconds.
        can_fetch: whether an instance can fetch KV from another one: (from, to).
        can_split: whether an instance can compute the beginning of a prompt for another one: (from, to).
        shares_kv: the kind of an instance's KV: instances of one kind can fetch from each other; None if the
            instance cannot.
        batching: how an instance fills its passes.
    """

    def __init__(
        self,
        model: CostModel,
        monotonic: Callable[[], float],
        *,
        can_fetch: Callable[[str, str], bool],
        shares_kv: Callable[[str], Hashable],
        can_split: Callable[[str, str], bool],
        batching: Callable[[str], Batching],
    ) -> None:
        self.model = model
        self._monotonic = monotonic
        self._can_fetch = can_fetch
        self._shares_kv = shares_kv
        self._can_split = can_split
        self._batching = batching
        self._ratios: LocalHistograms | None = None
        self._reports: dict[str, LoadReport] = {}
        self._fleet = Correction()
        self._rows = Rows()
        self._dirty: dict[str, None] = {}
        """Instances whose row is to be entered anew, in the order in which they changed."""
        self._ends: list[tuple[float, str]] = []
        """Heap of the moments at which a row changes by itself."""
        self._reported: deque[tuple[float, str]] = deque()
        """When load reports came, oldest first: a row changes when its report gets too old."""
        self._factors: Numbers | None = None
        """``factor`` of each row, until the next answer."""
        self._even: float | None = None
        """The fleet's factor, where no instance differs from it; else None."""
        self._steps = Steps(model, MOST_OTHERS)
        self._queues: dict[str, QueueEstimate] = {}
        self._empty: dict[str, tuple[CostModel, Batching, Passes]] = {}
        """Passes without a prompt, by instance, unless they depend on its running requests."""
        self._transfers = TransferTimes()
        self._disks = TransferTimes()
        """Times of an instance's loads from below memory, observed when it exports."""

    def use(self, model: CostModel) -> None:
        """Replace the model and drop all corrections of the former one."""
        self.model = model
        self._steps = Steps(model, self._steps.most)
        self._fleet = Correction()
        self._rows.table[OBSERVED : EXPECTED + 1] = 0.0
        self._factors = None
        self._dirty.update(dict.fromkeys(self._rows.places))
        self._transfers.clear()
        self._disks.clear()
        for queue in self._queues.values():
            queue.replan()

    @property
    def calibrated(self) -> bool:
        return self.model.calibrated

    @property
    def basis(self) -> str:
        """See ``CostModel.basis``."""
        return self.model.basis

    def can_fetch(self, source: str, target: str) -> bool:
        """Whether instance ``target`` can fetch KV from instance ``source``."""
        return self._can_fetch(source, target)

    def can_split(self, source: str, target: str) -> bool:
        """Whether ``source`` can compute the beginning of a prompt for ``target``."""
        return self._can_split(source, target)

    def chunk(self, name: str) -> int:
        """Tokens of a prompt that an instance computes in one pass; 0 for all."""
        return self._batching(name).chunk

    def exec_s(self, instance: Instance, new_tokens: int, context_tokens: int) -> float:
        """The time that the prompt adds to the passes of the prompts that wait there."""
        name, new, context = instance.name, max(1, new_tokens), max(0, context_tokens)
        queue = self._queues.get(name)
        waiting = None if queue is None else queue.joined(self._monotonic())
        if waiting is not None:
            return self.factor(name) * max(0.0, waiting.adding(new, context).seconds - waiting.seconds)
        batching = self._batching(name)
        if batching.mixed:
            return self.factor(name) * self._idle(name).adding(new, context).seconds
        return self.factor(name) * self.model.exec_s(new, context, batching)

    def alone_s(self, name: str, new_tokens: int, context_tokens: int) -> float:
        """To the first token of a prompt at an idle instance that has ``context_tokens`` of it in HBM."""
        return self.factor(name) * self.model.exec_s(new_tokens, context_tokens, self._batching(name))

    def load_s(self, instance: Instance, tier: Tier, tokens: int) -> float:
        if tokens <= 0:
            return 0.0
        factor = 1.0 if tier.in_memory else self._disks.factor(instance.name, self._monotonic())
        return factor * self.model.load_tokens_s(tier, tokens)

    def transfer_s(self, source: Instance, target: Instance, tokens: int) -> float:
        # A hand-over from prefill to decode needs no fetch.
        hands_over = source.role is Role.PREFILL and target.role is Role.DECODE
        if not (hands_over or self._can_fetch(source.name, target.name)):
            return math.inf
        if tokens <= 0:
            return 0.0
        model = self.model
        if hands_over:
            return model.transfer_s(tokens)
        # Fetched KV arrives in DRAM and is loaded from there.
        factor = self._transfers.factor(source.name, self._monotonic())
        return factor * model.transfer_s(tokens) + model.load_tokens_s(Tier.DRAM, tokens)

    def queue_s(self, instance: Instance) -> float:
        """The prompts before it, including reported ones of other routers, and the current decode step."""
        now, name = self._monotonic(), instance.name
        running = self._running(instance)
        step = self.model.decode_s(running) if running else 0.0
        queue, report = self._queues.get(name), self._report(name, now)
        others_s = 0.0 if report is None else max(0.0, self.factor(name) * report.queue_s - (now - report.at))
        return (0.0 if queue is None else queue.waits_s(now)) + others_s + step

    def decode_s(self, instance: Instance) -> float:
        return self.model.decode_s(self._running(instance) + 1)

    def _running(self, instance: Instance) -> int:
        """Requests that it generates for: the last report, and this router's changes since."""
        report = self._report(instance.name, self._monotonic())
        return max(
            0, self._known_running(instance.name, instance.in_flight) + (report.running if report else 0)
        )

    def _known_running(self, name: str, in_flight: int) -> int:
        queue = self._queues.get(name)
        return max(0, in_flight - (queue.waiting(self._monotonic()) if queue else 0))

    def _report(self, name: str, now: float) -> LoadReport | None:
        report = self._reports.get(name)
        return report if report is not None and now - report.at < REPORT_S else None

    def _idle(self, name: str) -> Passes:
        """The passes of an instance without a prompt."""
        model, batching = self.model, self._batching(name)
        if batching.mixed:
            report = self._report(name, self._monotonic())
            return model.passes(batching, report.load.running if report else 0)
        known = self._empty.get(name)
        if known is None or known[0] is not model or known[1] is not batching:
            known = self._empty[name] = model, batching, model.passes(batching)
        return known[2]

    def said(self, name: str) -> Load | None:
        """An instance's last load report, if it is recent."""
        report = self._report(name, self._monotonic())
        return None if report is None else report.load

    def step_s(self, requests: int) -> float:
        """One decode step with this many requests, by the fleet's model."""
        return self.model.decode_s(requests)

    def on_load(self, name: str, load: Load, in_flight: int) -> None:
        """Store an instance's load report.

        Args:
            in_flight: this router's requests at the instance.
        """
        now, queue = self._monotonic(), self._queues.get(name)
        waiting, tokens = (queue.waiting(now), queue.waiting_tokens(now)) if queue else (0, 0)
        # This router's own requests must not be counted twice, and may have come or gone since the report.
        prompts, more = min(MOST_OTHERS, load.queued - waiting), load.queued_tokens - tokens
        others = self.model.passes(self._batching(name))
        for _ in range(prompts if more > 0 else 0):
            others = others.adding(max(1, more // prompts), 0)
        running = load.running - self._known_running(name, in_flight)
        self._reports[name] = LoadReport(now, load, running, others.seconds)
        self._reported.append((now, name))
        self._outdate(now)
        if name in self._rows.places:
            self._enter(name, now)

    def observe_transfer(self, source: str, target: str, tokens: int, took_s: float) -> None:
        """Add a fetch of ``tokens`` tokens from ``source``. A failed fetch counts with the time it cost."""
        expected = self.model.transfer_s(tokens)
        factor = self._transfers.factor(source, self._monotonic())
        self._compare(target, "transfer", factor * expected, took_s)
        self._transfers.observe(source, expected, took_s, self._monotonic())
        self.changed(source)

    def observe_load(self, name: str, expected_s: float, took_s: float) -> None:
        """Add a load from an instance's disk for an export. expected_s: with the factor at that time."""
        now = self._monotonic()
        self._disks.observe(name, expected_s / self._disks.factor(name, now), took_s, now)
        self.changed(name)

    # -- at a whole fleet ---------------------------------------------------------------------------

    def outlook(self, fleet: Fleet) -> RouterOutlook:
        """See ``Costs.outlook``."""
        now, rows = self._monotonic(), self._rows
        whole = isinstance(fleet, WholeFleet)
        if isinstance(fleet, WholeFleet) and rows.order is not fleet.places:
            self._dirty.update(dict.fromkeys(rows.arrange(fleet.places)))
            self._factors = None
        columns = [] if whole else [self._row(instance.name) for instance in fleet]
        ends = self._ends
        while ends and ends[0][0] <= now:
            self._dirty[heapq.heappop(ends)[1]] = None
        self._outdate(now)
        for name in list(self._dirty):
            self._enter(name, now)
        self._dirty.clear()
        chosen = slice(len(fleet)) if whole else np.array(columns)
        factor, in_flight = self._all_factors()[chosen], counts_of(fleet)[0]
        table, counts = rows.table[:, chosen], rows.counts[:, chosen]
        observed = bool(self._disks), bool(self._transfers)
        found = RouterOutlook(self._steps, rows, table, counts, factor, self._even, in_flight, now, observed)
        self._steps = found.steps
        return found

    def _outdate(self, now: float) -> None:
        """Mark the instances whose load reports have got too old."""
        reported = self._reported
        while reported and now - reported[0][0] >= REPORT_S:
            at, name = reported.popleft()
            known = self._reports.get(name)
            if known is not None and known.at == at:
                self.changed(name)

    def changed(self, name: str) -> None:
        """Something about an instance is not as its row has it."""
        if name in self._rows.places:
            self._dirty[name] = None

    def _row(self, name: str) -> int:
        """The column of an instance."""
        found = self._rows.places.get(name)
        if found is None:
            found = self._rows.place(name)
            self._dirty[name] = None
            self._factors = None
        return found

    def _enter(self, name: str, now: float) -> None:
        """Enter the known facts of an instance in its row."""
        place, rows = self._row(name), self._rows
        queue, report, table = self._queues.get(name), self._report(name, now), rows.table
        batching = self._batching(name)
        rows.set_kind(place, batching, self._shares_kv(name))
        if queue is not None:
            standing = queue.standing(now)
            rows.set_queue(place, standing.began, standing.group_s, standing.line_s, standing.waiting)
            if standing.ends is not None:
                heapq.heappush(self._ends, (standing.ends, name))
        if report is None:
            rows.set_report(place, -math.inf, 0.0, 0, 0)
        else:
            running = report.load.running if batching.mixed else 0
            rows.set_report(place, report.at, report.queue_s, report.running, running)
        for row, times in ((FETCH, self._transfers), (DISK, self._disks)):
            observed = times.observed(name)
            if observed is not None:
                table[row, place], table[row + 1, place], table[row + 2, place] = observed

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
        """Count a prompt as waiting at ``name`` while the block runs. The block's value is a function for the
        caller to call at the first byte.

        Args:
            new_tokens: to compute, behind ``context_tokens``.
            streams: whether the first byte comes with the first token.
            estimate: of the request; its observed times are set at the first byte.
        """
        queue = self._queues.get(name)
        if queue is None:
            queue = self._queues[name] = QueueEstimate(lambda: self._idle(name), lambda: self.factor(name))
        return Sending(self, name, queue, new_tokens, context_tokens, streams, estimate)

    def now(self) -> float:
        """Seconds."""
        return self._monotonic()

    # -- expected and observed ----------------------------------------------------------------------

    def measure(self, metrics: RouterMetrics) -> None:
        """Add metrics of estimates: observed over expected, corrections, and queues."""
        self._ratios = metrics.estimate_ratio
        corrections = metrics.gauge("cost_correction")
        queues = metrics.gauge("queue_estimate_seconds")

        def refresh() -> None:
            corrections.clear()
            queues.clear()
            for name, queue in self._queues.items():
                corrections.labels(name).set(self.factor(name))
                queues.labels(name).set(queue.waits_s(self.now()))

        metrics.refreshing.subscribe(refresh)

    def compare(self, name: str, estimate: Estimate) -> None:
        """Compare a request's estimate with its observed times."""
        self._compare(name, "ttft", estimate.ttft_s, estimate.observed_s)
        self._compare(name, "queue", estimate.queue_s, estimate.observed_queue_s)

    def _compare(self, name: str, term: str, expected_s: float, observed_s: float | None) -> None:
        if self._ratios is not None and observed_s is not None and expected_s >= LEAST_COMPARED_S:
            self._ratios.of(name, term).add(observed_s / expected_s)

    # -- learning ---------------------------------------------------------------------------------

    def factor(self, name: str) -> float:
        """The correction of an instance's expected computing times."""
        place = self._rows.places.get(name)
        return self._fleet.factor(self._bound) if place is None else float(self._all_factors()[place])

    @property
    def _bound(self) -> float:
        return BOUND_CALIBRATED if self.model.calibrated else BOUND_DEFAULT

    def _all_factors(self) -> Numbers:
        """``factor`` of each row."""
        found = self._factors
        if found is None:
            corrected = self._corrected()
            self._even = corrected if isinstance(corrected, float) else None
            found = self._factors = np.full(self._rows.table.shape[1], corrected)
        return found

    def _corrected(self) -> Numbers | float:
        """``factor`` of each row; one number where all have the fleet's."""
        bound, table = self._bound, self._rows.table
        fleet = self._fleet.factor(bound)
        # Ten answers are remembered, so one answer is a tenth of the fleet's sum.
        prior_s = self._fleet.expected_s * (1 - REMEMBERED) * PRIOR_ANSWERS
        if prior_s <= 0:
            return fleet
        own = table[OBSERVED] + fleet * prior_s
        own /= table[EXPECTED] + prior_s
        if own[own.argmax()] < fleet * COUNTS and own[own.argmin()] * COUNTS > fleet:
            return fleet
        apart = np.log(np.clip(own, 1 / bound, bound) / fleet)
        counts = np.copysign(np.maximum(np.abs(apart) - CHANCE, 0), apart)
        corrected: Numbers = np.clip(fleet * np.exp(counts), 1 / bound, bound)
        return corrected

    def observe(self, name: str, expected_s: float, observed_s: float) -> None:
        """Add a group of prompts that ``name`` has computed together.

        Args:
            expected_s: by its cost model, uncorrected.
        """
        if expected_s < LEAST_LEARNT_S:
            return
        factor = self.factor(name)
        self._compare(name, "exec", factor * expected_s, observed_s)
        # The first answer of all may be off by as much as the defaults are.
        if self._fleet.expected_s > 0:
            observed_s = min(observed_s, OUTLIER * factor * expected_s)
        self._fleet.observe(expected_s, observed_s)
        place, table = self._row(name), self._rows.table
        observed, expected = float(table[OBSERVED, place]), float(table[EXPECTED, place])
        table[OBSERVED : EXPECTED + 1] *= FADING
        table[OBSERVED, place] = REMEMBERED * observed + observed_s
        table[EXPECTED, place] = REMEMBERED * expected + expected_s
        self._factors = None

    def forget(self, name: str) -> None:
        """Drop everything about an instance that left or was started anew. Prompts on their way there are not
        affected."""
        self._rows.drop(name)
        self._dirty.pop(name, None)
        self._factors = None
        self._queues.pop(name, None)
        self._empty.pop(name, None)
        self._reports.pop(name, None)
        if self._ratios is not None:
            self._ratios.drop(name)
        self._transfers.forget(name)
        self._disks.forget(name)

    def __repr__(self) -> str:
        known = self._rows.table[EXPECTED] > 0
        corrected = [name for name, place in self._rows.places.items() if known[place]]
        factors = ", ".join(f"{name}: x{self.factor(name):.2f}" for name in corrected)
        return f"RouterCosts({self.model!r}, {factors or 'uncorrected'})"
