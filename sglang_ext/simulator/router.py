"""The router of a simulation: the router's own index, fleet, chooser, costs, hints, fetching and admission.

A request takes the way of `router.endpoints.generation` and `router.dispatch.relaying`, without HTTP, texts
and tokenizers: admission, the choice, the fetches of its plan, the instance's first and last token, and the
observations that the router makes of both.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import cast

from sglang_ext.cost_model import CostModel
from sglang_ext.ids import NewId
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.job import Job as ApiJob
from sglang_ext.router.clients.divergence import Turn as KnownTurn
from sglang_ext.router.dispatch.choosing import Chooser, Routing
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.dispatch.pausing import Pausing
from sglang_ext.router.dispatch.program_gate import ProgramGate
from sglang_ext.router.dispatch.queueing import (
    Admission,
    QueueFull,
    QueueTimeout,
    Waiting,
    queue_policy_named,
)
from sglang_ext.router.dispatch.spilling import Spilling
from sglang_ext.router.endpoints.retry_budget import RetryBudget
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.advising import Advisor
from sglang_ext.router.hints.advisory_book import HintBook, HintLimits
from sglang_ext.router.hints.hint import Hint
from sglang_ext.router.hints.preparing import Preparer
from sglang_ext.router.hints.remote_hints import RemoteHints
from sglang_ext.router.hints.session_memory import SessionMemory
from sglang_ext.router.http.types import ConnectionLost, RequestRefused, Responder
from sglang_ext.router.index.index import Index
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.placing.fetching import Fetching
from sglang_ext.router.placing.placing import Placement, PlacingOptions
from sglang_ext.router.policies import PolicyOptions, policy_named
from sglang_ext.router.policies.spilling import SpillTerms
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.admitted import Admitted, Sent
from sglang_ext.router.tenancy.tenants import Caller
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.signals import Signal
from sglang_ext.simulator.agents import Channels
from sglang_ext.simulator.control.tenants import REQUEST, Tenants
from sglang_ext.simulator.instance import Instance, Job, PromptTooLong
from sglang_ext.simulator.outcome import STAGES, Decided, Outcome, Served
from sglang_ext.simulator.settings import BLOCK_TOKENS, Settings
from sglang_ext.simulator.virtual_time import VirtualClock
from sglang_ext.simulator.workload import Session, Turn
from sglang_ext.stages import StageTimes
from sglang_ext.tiers import Tier

MAX_RETRIES = 5
"""Of a request whose instance went away, as `--max-retries` has it."""
INDEX_BYTES, NAME_BYTES, LEAST_INDEX_BYTES = 2048, 256, 1 << 28
"""Memory of the index for each block of HBM and DRAM of the fleet, for each one on disk, and at least. More
than blocks take, so that the index forgets nothing for lack of memory. It keeps no history of evictions,
which only ``/explain`` reads."""
SENT = Sent(b"{}", "/generate", GENERATE)
MOST_WAITING = 1 << 20
"""Turns of a crowd that wait in the router."""
MOST_LOST = 1
"""An instance may have died of the request: it is sent to a second one, and not to a third."""
RETRY_BUDGET = 0.8
"""The default of ``RouterConfig.retry_budget``."""
PATIENCE_S = 3600.0
"""Turns of a crowd wait as long as it takes."""
SESSION_BYTES = 1 << 40


class SimulatedRouter:
    """See the module's docstring.

    Args:
        model: the costs that the router expects.
        instances: those that live, by name.
        new_id: names hints, fetches and exports.
        took: takes the observed seconds of fetches, by the names of their exports.
        tenants: their names.
    """

    def __init__(
        self,
        settings: Settings,
        model: CostModel,
        clock: VirtualClock,
        loop: asyncio.AbstractEventLoop,
        instances: Mapping[str, Instance],
        outcome: Outcome,
        new_id: NewId,
        took: dict[str, float],
        tenants: Sequence[str] = (),
    ) -> None:
        self._settings, self._clock, self._loop = settings, clock, loop
        self._instances, self._outcome, self._model = instances, outcome, model
        self.metrics = metrics = RouterMetrics()
        each = INDEX_BYTES * (settings.hbm + settings.dram) + NAME_BYTES * settings.disk
        self.index = Index(
            clock,
            block_size=BLOCK_TOKENS,
            max_bytes=max(LEAST_INDEX_BYTES, each * settings.instances),
            history=False,
        )
        self.fleet = Fleet(
            view=self.index.holdings_of, changed=self.index.take_changed, pairs=True, now=clock.monotonic
        )
        self.channels = Channels(self.index, loop, settings.lag_ms / 1e3)
        self.costs = RouterCosts(
            model,
            clock.monotonic,
            can_fetch=self.channels.can_fetch,
            shares_kv=self.channels.shares_kv,
            can_split=self.channels.can_split,
            batching=self.fleet.batching,
        )
        self.channels.loads.subscribe(
            lambda name, load: self.costs.on_load(name, load, self.fleet.in_flight(name))
        )
        placing = PlacingOptions(
            policy=policy_named(settings.policy),
            thresholds=PolicyOptions(
                cache_threshold=settings.cache_threshold,
                balance_abs_threshold=settings.balance_abs,
                balance_rel_threshold=settings.balance_rel,
                balance_cache_factor=settings.balance_cache,
                tie_tokens=BLOCK_TOKENS,
                queue_weight=settings.queue_weight,
                exec_weight=settings.exec_weight,
            ),
            block_size=BLOCK_TOKENS,
        )
        self._new_id, self._took = new_id, took
        self._drawn: list[str] = []
        """Names that were drawn for the present fetch."""
        self.fetching = Fetching(self.channels, self.costs, metrics, new_id=self._draw)
        remote = RemoteHints()
        book = HintBook(HintLimits(learnt=settings.learnt_hints), remote)
        preparer = Preparer(
            self.fleet, self.index, self.costs, placing, self.channels, metrics, clock, self.fetching, book
        )
        self.advisor = Advisor(
            self.fleet, placing.thresholds, metrics, clock, book, remote, preparer, new_id=new_id
        )
        routing = Routing(name=settings.policy, placing=placing, most_running=settings.most_running)
        self.chooser = Chooser(
            routing, self.fleet, self.index, self.costs, metrics, self.fetching, self.advisor
        )
        size, patience_s = settings.queue_size, settings.queue_timeout_secs
        if settings.crowd:
            size, patience_s = MOST_WAITING, PATIENCE_S
        self.admission = Admission(
            self.chooser.capacity,
            clock,
            size=size,
            patience_s=patience_s,
            order=queue_policy_named(settings.queue_policy),
        )
        self.gate = ProgramGate(
            self._program_tokens, self.costs.alone_s, metrics, clock, size=size, patience_s=patience_s
        )
        self.tenants = Tenants(settings, clock, loop, tenants)
        self._sessions = SessionMemory(SESSION_BYTES)
        self._budget = RetryBudget(RETRY_BUDGET)
        self.pausing = Pausing(
            self.advisor, self._sessions, self.costs, self.gate, metrics, clock,
            share=settings.learnt_hints, longest_s=HintLimits().ttl_s,
        )  # fmt: skip
        self.spilling = Spilling(
            SpillTerms(
                full=settings.spill_above,
                idle=settings.spill_above * SpillTerms.IDLE,
                tenant_blocks=settings.spill_blocks,
            ),
            self.fleet, self.index, self.channels, metrics, clock, new_id=new_id,
        )  # fmt: skip
        for forget in (self.index.forget, self.costs.forget, self.fetching.forget, self.spilling.forget):
            self.fleet.restarted.subscribe(forget)
        self.counts: Counter[str] = Counter()
        self.begins: Callable[[Session, Turn], object] = lambda session, turn: None
        """Called with each request that the router has admitted."""
        self.paired: Signal[[Record, float]] = Signal()
        """A prefill and a decode instance have answered a request, and when."""

    def _draw(self) -> str:
        id = self._new_id()
        self._drawn.append(id)
        return id

    # -- requests -----------------------------------------------------------------------------------

    async def serve(self, session: Session, turn: Turn) -> bool:
        """One request, from its arrival to its last token. Returns whether it was answered."""
        caller = self.tenants.caller(session.tenant)
        try:
            with self.tenants.request(caller, len(turn.key)):
                return await self._serve(session, turn, caller)
        except RequestRefused as refused:
            self._outcome.fail(str(refused.code), caller.tenant)
            return False

    async def _serve(self, session: Session, turn: Turn, caller: Caller) -> bool:
        arrived = self._clock.monotonic()
        if turn.observed is not None:
            await self._clock.sleep(turn.observed.decided_s)
        record = Record(self._new_id(), "POST", "/generate", arrived, caller)
        record.stream, record.priority = True, caller.priority or 0
        prompt = Encoded(("tokens", None, None, caller.salt), turn.key, len(turn.key) // TOKEN_BYTES)
        record.prompt_tokens = prompt.units
        admitted = Admitted(GENERATE, ApiJob(True, (), 1), SENT, session=session.name)
        flight = Flight(
            admitted, [prompt], REQUEST, cast(Responder, None), record, SENT, prompt.units
        )  # nothing answers a client
        self.pausing.begins(flight)
        self._budget.begin(self._clock.monotonic())
        try:
            return await self._carry(flight, prompt, session, turn, arrived)
        finally:
            if caller.meter is not None and record.first_byte is not None:
                caller.meter.charge(prompt.units + (record.completion_tokens or 0))
            self._budget.end()
            self.pausing.ends(flight)

    async def _carry(
        self, flight: Flight, prompt: Encoded, session: Session, turn: Turn, arrived: float
    ) -> bool:
        """Wait for a place, and send the request on (`Generation._carry`)."""
        record = flight.record
        try:
            record.queued_s = await self.gate.enter(flight)
            if not self.admission.enter():
                waiting = Waiting(record.priority, prompt.units, record.caller.tenant, True)
                record.queued_s += await self.admission.wait(waiting)
        except (QueueFull, QueueTimeout) as error:
            code = "queue_full" if isinstance(error, QueueFull) else "queue_timeout"
            self._outcome.fail(code, record.caller.tenant)
            return False
        try:
            self.begins(session, turn)
            return await self._attempts(flight, prompt, turn, arrived)
        finally:
            self.admission.leave()

    async def _attempts(self, flight: Flight, prompt: Encoded, turn: Turn, arrived: float) -> bool:
        """Have an instance answer, and another one if that goes away before its first token, as
        `Generation._attempts` does.
        """
        excluded: frozenset[str] = frozenset()
        lost = 0
        while len(excluded) <= MAX_RETRIES:
            if lost and not self._budget.spend(self._clock.monotonic()):
                break
            self.counts["choose"] += 1
            self._drawn.clear()
            chosen = self._clock.monotonic()
            found = self.chooser.choose(flight, excluded)
            if turn.observed is not None and turn.observed.fetch_s is not None:
                # The exports of this fetch are named by these.
                self._took.update(dict.fromkeys(self._drawn, turn.observed.fetch_s))
            if found is None:
                break
            await self.chooser.prepared(flight)
            if turn.observed is not None:
                await self._clock.sleep(chosen + turn.observed.sending_s - self._clock.monotonic())
            try:
                attempt = self._attempt if found[0].decode is None else self._pair
                await attempt(flight, found[0], prompt, turn, arrived)
            except ConnectionLost:
                if flight.record.first_byte is not None:
                    self._outcome.fail("broken_off", flight.record.caller.tenant)
                    return False
                excluded |= {flight.failed or found[0].instance}
                flight.failed = None
                lost += 1
                if lost > MOST_LOST:
                    break
                self._outcome.retried += 1
                continue
            except PromptTooLong:
                self._outcome.fail("prompt_too_long", flight.record.caller.tenant)
                return False
            return True
        self._outcome.fail("worker_lost" if lost else "no_worker", flight.record.caller.tenant)
        return False

    async def _attempt(
        self, flight: Flight, placed: Placement, prompt: Encoded, turn: Turn, arrived: float
    ) -> None:
        """Have the chosen instance answer.

        Raises:
            ConnectionLost: it went away.
            PromptTooLong: its HBM cannot hold the prompt.
        """
        name, lag_s = placed.instance, self._settings.lag_ms / 1e3
        way_s = lag_s if turn.observed is not None else lag_s + self._model.execution.around_s
        queued = max(0, flight.units - placed.matched)
        sending = self.costs.sending(
            name, queued, placed.matched, streams=True, estimate=flight.record.estimate
        )
        future = self._loop.create_future
        _, _, extra_key, salt = prompt.namespace
        job = Job((0, extra_key, salt), turn.key, turn.answer, future(), future())
        if turn.observed is not None:
            job.observed = turn.observed
            job.arrived = arrived
        with self.fleet.carrying(name, queued) as load, sending as first_byte:
            self._loop.call_later(way_s, self._submit, name, job)
            with load.until_lost():
                await job.first
            load.answered()
            load.prefilled()
            first_byte()
            back_s = 0.0 if turn.observed is not None else lag_s
            first = self._clock.monotonic() + back_s
            flight.record.instance, flight.record.first_byte = name, self._clock.monotonic()
            self.index.confirm(prompt.namespace, prompt.key, name)
            with load.until_lost():
                await job.last
            self._learn(flight, prompt, job, name)
        self._answered(flight, turn, job, job, name, arrived, first, self._clock.monotonic() + back_s)

    async def _pair(
        self, flight: Flight, placed: Placement, prompt: Encoded, turn: Turn, arrived: float
    ) -> None:
        """Have a prefill and a decode instance answer (`Relay._pair`).

        Raises:
            ConnectionLost: one of them went away.
            PromptTooLong: the HBM of one of them cannot hold the prompt.
        """
        name, decode, lag_s = placed.instance, placed.decode or "", self._settings.lag_ms / 1e3
        queued = max(0, flight.units - placed.matched)
        future = self._loop.create_future
        _, _, extra_key, salt = prompt.namespace
        half = Job((0, extra_key, salt), turn.key, turn.answer[:TOKEN_BYTES], future(), future())
        half.hands_over = True
        job = Job((0, extra_key, salt), turn.key, turn.answer, future(), future())
        sending = self.costs.sending(
            name, queued, placed.matched, streams=True, estimate=flight.record.estimate
        )
        first_half: Instance | None = self._instances.get(name)
        try:
            with self.fleet.carrying(decode, 0) as load, sending as first_byte:
                with self.fleet.carrying(name, queued) as before:
                    flight.failed = name
                    way_s = lag_s + self._model.execution.around_s
                    self._loop.call_later(way_s, self._submit, name, half)
                    with before.until_lost():
                        await half.first
                    self._loop.call_later(lag_s, self._receive, decode, job, name)
                    try:
                        # A prefill server answers once decode has the KV.
                        with load.until_lost(), before.until_lost():
                            await job.first
                    except ConnectionLost:
                        flight.failed = name if before.doomed else decode
                        self._give_up(decode, job)
                        raise
                flight.failed = decode
                load.answered()
                load.prefilled()
                first_byte()
                first = self._clock.monotonic() + lag_s
                flight.record.instance, flight.record.first_byte = decode, self._clock.monotonic()
                self.index.confirm(prompt.namespace, prompt.key, name)
                self.index.confirm(prompt.namespace, prompt.key, decode)
                if first_half is not None:
                    self._loop.call_later(lag_s, first_half.handed_over, half)
                    first_half = None
                with load.until_lost():
                    await job.last
                self._learn(flight, prompt, job, decode)
        finally:
            if first_half is not None:
                first_half.handed_over(half)
        flight.failed = None
        job.hits = half.hits
        if self.paired:
            self._note_pair(flight.record, name, half, job, first)
        self._answered(flight, turn, job, half, name, arrived, first, self._clock.monotonic() + lag_s)

    def _note_pair(self, record: Record, prefill: str, half: Job, job: Job, first: float) -> None:
        """The facts of a request that an answer tells the router."""
        now = self._clock.monotonic()
        record.status, record.prefill_instance = 200, prefill
        record.cached_tokens, record.completion_tokens = sum(job.hits.values()), job.output
        record.instance_stages = StageTimes(
            prefill_queue=half.began_at - half.came_at,
            prefill=half.computed_at - half.began_at,
            transfer=max(0.0, first - job.admitted_at + job.came_at - half.computed_at),
            decode_queue=job.admitted_at - job.came_at,
            decode=max(0.0, now - first),
        )
        self.paired(record, now)

    def _learn(self, flight: Flight, prompt: Encoded, job: Job, name: str) -> None:
        """An instance has the KV of a request's prompt and answer (`Relay._learn`)."""
        key = job.key + job.answer
        self.index.confirm(prompt.namespace, key, name)
        self.spilling.learn(flight, prompt.namespace, key)

    def _answered(
        self,
        flight: Flight,
        turn: Turn,
        job: Job,
        computed: Job,
        name: str,
        arrived: float,
        first: float,
        last: float,
    ) -> None:
        """A request has its whole answer. name: of the instance that has computed the prompt, as ``computed``
        there."""
        self._outcome.answered(
            arrived, first, last, job.tokens, job.output, job.hits, name, str(flight.record.reason)
        )
        flight.record.completion_tokens = job.output
        if (tenant := flight.record.caller.tenant) is not None:
            figures = self._outcome.tenant(tenant)
            figures.ttft.append(first - arrived)
            figures.tokens += job.tokens + job.output
        if self._settings.crowd:
            self._note(flight, turn, job, arrived, first)
        if turn.id:
            hits = {tier.name: tokens for tier, tokens in job.hits.items() if tokens}
            stages = {} if job.observed is not None else _stages(flight, computed, arrived, first, last)
            self._outcome.decided[turn.id] = Decided(name, hits, stages)
        reused = sum(job.hits.values())
        self._outcome.saved_s += self._model.exec_s(job.tokens, 0) - self._model.exec_s(
            job.tokens - reused, reused
        )

    def _note(self, flight: Flight, turn: Turn, job: Job, arrived: float, first: float) -> None:
        """An agent's turn was answered."""
        name, record = flight.admitted.session, flight.record
        record.status, record.tools = 200, (turn.tool,)
        known = None if name is None else self._sessions.find(name)
        if name is not None:
            namespace = flight.prompts[0].namespace
            self._sessions.learn(name, namespace, KnownTurn(turn.key + turn.answer, job.tokens))
        self._outcome.served.append(
            Served(
                name or "",
                arrived,
                first,
                self._clock.monotonic(),
                job.tokens,
                job.output,
                0 if known is None else len(known[1]) // TOKEN_BYTES,
                job.hits.get(Tier.HBM, 0),
                sum(job.hits.values()) - job.hits.get(Tier.HBM, 0),
                known is None,
                record.queued_s,
            )
        )

    def _program_tokens(self) -> float:
        """Of KV that sessions at work may have (`routing_parts`)."""
        settings = self._settings
        blocks = settings.instances * settings.hbm
        return settings.program_share * blocks * BLOCK_TOKENS if settings.program_share else math.inf

    def _receive(self, name: str, job: Job, source: str) -> None:
        instance = self._instances.get(name)
        if instance is not None and not job.first.done():
            instance.receive(job, source)

    def _give_up(self, name: str, job: Job) -> None:
        instance = self._instances.get(name)
        if instance is not None:
            instance.give_up(job)

    def _submit(self, name: str, job: Job) -> None:
        instance = self._instances.get(name)
        if instance is not None:
            instance.submit(job)

    # -- hints --------------------------------------------------------------------------------------

    def announce(self, session: str, tenant: int, key: bytes, earliest_s: float) -> None:
        """A client announces the next request of a session, whose conversation so far is ``key``."""
        caller = self.tenants.caller(tenant)
        namespace = ("tokens", None, None, caller.salt)
        hint = Hint(caller.scope, namespace, key, session, earliest_s=earliest_s)
        answer, _ = self.advisor.offer(hint)
        self.counts[f"hints {answer.verdict.value}"] += 1

    async def spill(self) -> None:
        """Look for full instances, as the router's rounds do."""
        while True:
            await self._clock.sleep(await self.spilling.next_round())

    async def tick(self) -> None:
        """Expire hints and prefixes, as the router's rounds do."""
        while True:
            await self._clock.sleep(await self.advisor.round())
            while self.index.tidy():  # a router goes on at once while there is more
                pass


def _stages(flight: Flight, job: Job, arrived: float, first: float, last: float) -> dict[str, float]:
    """The times of a request (``outcome.STAGES``). job: where its prompt was computed."""
    queue_s = flight.record.queued_s + job.began_at - job.came_at
    prefill_s = job.computed_at - job.began_at
    transfer_s = max(0.0, flight.record.first_byte - job.computed_at) if flight.record.first_byte else 0.0
    way_s = first - arrived - queue_s - prefill_s - transfer_s
    return dict(zip(STAGES, (way_s, queue_s, prefill_s, transfer_s, last - first), strict=True))
