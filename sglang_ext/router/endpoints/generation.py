"""The life of a generation request: admit, encode, place, choose, send, pass back.

1. The body is parsed, repaired (``clients.repairs``), checked, and rewritten where the router or the tenant's
   key requires it (``tenancy.admit``, once for everything).
2. Its prompts become keys of the prompt tree (``tokenizing``); too long ones are refused.
3. When every instance has as many requests as it may, it waits (``queueing``).
4. The tree finds the instances with the longest prefixes, the policy chooses an instance (``choosing``), and
   the tree records the guess that this instance will hold them.
5. The request goes to the instance (``relaying``). While the client has been sent nothing, a lost connection
   means another instance, within the budget for that; a client that goes away means a closed connection, on
   which the worker aborts.
6. When the answer begins, the guess becomes an entry; when it ends, the generated tokens are added: its ids
   where the answer has them, else the tokens of its text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from typing import Protocol

import msgspec

from sglang_ext.clock import Clock
from sglang_ext.errors import PeerError
from sglang_ext.ids import NewId, quick_ids
from sglang_ext.router.api.dialect import DIALECTS, Dialect, worker_lost
from sglang_ext.router.api.documents import DOCUMENT_IDS
from sglang_ext.router.api.hints import HintAction
from sglang_ext.router.api.job import Chat
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.validation import LARGE_JSON_BYTES, Json, check_length, fits, parse_json_object
from sglang_ext.router.cluster.queries import Queries
from sglang_ext.router.dispatch.choosing import RETRY_AFTER_S, Chooser, no_worker
from sglang_ext.router.dispatch.diagnosing import Diagnoses
from sglang_ext.router.dispatch.explain import Choice, LoggedRequest, RequestLog
from sglang_ext.router.dispatch.flight import Flight, Flights, home_lost
from sglang_ext.router.dispatch.pairs import HalfFailed
from sglang_ext.router.dispatch.pausing import Pausing
from sglang_ext.router.dispatch.program_gate import ProgramGate
from sglang_ext.router.dispatch.queueing import Admission, QueueFull, QueueTimeout, Waiting
from sglang_ext.router.dispatch.relaying import Relay
from sglang_ext.router.dispatch.suspects import Suspects
from sglang_ext.router.endpoints.repairing import Repairs
from sglang_ext.router.endpoints.retry_budget import RetryBudget
from sglang_ext.router.endpoints.routes import Handler, Route
from sglang_ext.router.endpoints.shared_requests import SharedRequests
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.documents import Documents
from sglang_ext.router.hints.session_answers import SessionAnswers
from sglang_ext.router.http.types import ConnectFailed, ConnectionLost, Request, RequestRefused, Responder
from sglang_ext.router.placing.placing import Placement
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.admit import admit, cannot_be_kept_apart
from sglang_ext.router.tenancy.admitted import Admitted, Rules
from sglang_ext.router.tokens.breakpoints import places_of
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.router.tokens.tokenizing import TokenizerService

_ids: NewId = quick_ids()
"""Of request ids."""


class Hinting(Protocol):
    """Takes the hints in generation requests (``advisory_api``)."""

    async def serve_prewarm(
        self, dialect: Dialect, payload: Json, responder: Responder, record: Record
    ) -> None:
        """Answer a request that is only a hint."""

    def note(self, hints: Sequence[HintAction], record: Record) -> None:
        """Take the hints that a request carries beside itself, without being waited for."""


class Generation:
    """Serves the generation endpoints.

    Args:
        rules: for reading requests.
        repairs: of prompts, before they are read.
        chooser: from requests to instances.
        tokenizers: from prompts to keys.
        admission: where requests wait for room.
        programs: where turns of sessions wait for the room of their KV.
        suspects: requests that were at an instance's death.
        shared: finds the instances that keep responses.
        log: recent requests, to be explained.
        pausing: learns the pauses between turns.
        documents: puts documents that a request names in front of its prompt.
        diagnoses: compares requests with earlier ones, for clients that ask for it.
        answers: puts the tokens of sessions' last answers into prompts.
        clock: seconds.
        max_retries: other instances tried for one request.
        retry_budget: see ``RetryBudget``.
    """

    def __init__(
        self,
        rules: Rules,
        repairs: Repairs,
        fleet: Fleet,
        chooser: Chooser,
        relay: Relay,
        tokenizers: TokenizerService,
        admission: Admission,
        programs: ProgramGate,
        flights: Flights,
        suspects: Suspects,
        shared: SharedRequests,
        queries: Queries,
        log: RequestLog,
        hinting: Hinting,
        pausing: Pausing,
        documents: Documents,
        diagnoses: Diagnoses,
        answers: SessionAnswers,
        metrics: RouterMetrics,
        clock: Clock,
        *,
        max_retries: int,
        retry_budget: float,
    ) -> None:
        self._rules = rules
        self._repairs = repairs
        self._fleet = fleet
        self._chooser = chooser
        self._relay = relay
        self._tokenizers = tokenizers
        self._admission = admission
        self._programs = programs
        self._flights = flights
        self.suspects = suspects
        self._shared = shared
        self._queries = queries
        self._log = log
        self._hinting = hinting
        self._pausing = pausing
        self._documents = documents
        self._diagnoses = diagnoses
        self._answers = answers
        self._retries = metrics.counter("retries")
        self._retries_denied = metrics.counter("retries_denied")
        self._clock = clock
        self._max_retries = max_retries
        self._budget = RetryBudget(retry_budget)
        self._parsing = asyncio.Lock()

    async def serve(self, dialect: Dialect, request: Request, responder: Responder, record: Record) -> None:
        """Answer one request.

        Raises:
            RequestRefused: with an error of ours; nothing has been sent.
        """
        start = self._clock.monotonic()
        self._budget.begin(start)
        meter = record.caller.meter
        try:
            await self._serve(dialect, request, responder, record, start)
        finally:
            if meter is not None and record.first_byte is not None:
                meter.charge((record.prompt_tokens or 0) + (record.completion_tokens or 0))
            self._budget.end()
            if record.documents is not None:
                self._documents.ended(record)
                if record.first_byte is not None:
                    self._documents.used(record)

    async def _serve(
        self, dialect: Dialect, request: Request, responder: Responder, record: Record, start: float
    ) -> None:
        large = len(request.body) > LARGE_JSON_BYTES
        payload = await self._parsed(request.body) if large else parse_json_object(request.body)
        model = self._fleet.model
        if model is None:
            raise no_worker(self._fleet)
        dialect.check_model(model.model.kind)
        limits = model.limits
        if (answer := dialect.answer_at_once(payload, limits)) is not None:
            record.status = 200
            await responder.send(200, {"content-type": answer[0]}, answer[1])
            return
        if DOCUMENT_IDS in payload:
            body = await self._composed(dialect, payload, record)
            payload = await self._parsed(body) if len(body) > LARGE_JSON_BYTES else parse_json_object(body)
            request = msgspec.structs.replace(request, body=body)
        if (repaired := self._repairs.apply(dialect, payload, request, record)) is not None:
            payload, body = repaired
            request = msgspec.structs.replace(request, body=body)
        if dialect.only_warms(payload):
            await self._hinting.serve_prewarm(dialect, payload, responder, record)
            return
        in_place = self._tokenizers.shows_in_place
        admitted = admit(
            dialect, payload, request, record.caller, limits, self._rules, new_request_id(), in_place
        )
        asked = dialect.asks_diagnosis(payload)
        begun = self._beginnings(dialect, payload, request)
        del payload  # several times as large as the body, and the answer may take long
        record.priority, record.stream = admitted.priority, admitted.job.stream
        parsed = self._clock.monotonic()
        record.stages["parse"] = parsed - start
        prompts = await self._tokenizers.encode(
            admitted.job,
            completion_template=model.chat.completion_template is not None,
            limits=limits,
            budget=record.budget,
            field=lambda index: admitted.dialect.field_of(admitted.job, index),
        )
        turn = await self._answers.begin(admitted, prompts, record, limits) if self._answers.on else None
        if turn is not None:
            admitted, prompts = turn.admitted, turn.prompts
        _check_lengths(admitted, prompts, limits, record)
        units = sum([encoded.units for encoded in prompts])
        flight = Flight(admitted, prompts, request, responder, record, admitted.sent, units, turn)
        if begun:
            flight.breakpoints = await places_of(begun, prompts[0], self._tokenizers, limits, record.budget)
        if asked is not None:
            flight.diagnosed = self._diagnoses.begin(asked, admitted, prompts[0], record.caller.scope)
        record.stages["tokenize"] = self._clock.monotonic() - parsed
        if record.documents is not None:
            self._documents.note(record, prompts)
        if admitted.hints:
            self._hinting.note(admitted.hints, record)
        if len(self.suspects):
            self.suspects.check(flight.digest())
        logged = LoggedRequest(
            record,
            prompts,
            self._clock.wall(),
            session=admitted.session,
            max_new_tokens=next((each.max_new_tokens for each in admitted.job.prompts), None),
        )
        self._log.add(logged, len(self._fleet.rows))
        self._pausing.begins(flight)
        try:
            await self._carry(flight, logged)
        finally:
            self._pausing.ends(flight)

    async def _carry(self, flight: Flight, logged: LoggedRequest) -> None:
        """Wait for a place, and send the request on."""
        record = flight.record
        with self._flights.carrying(flight):
            try:
                record.queued_s = await self._programs.enter(flight)
                if not self._admission.enter():
                    waiting = Waiting(record.priority, flight.units, record.caller.tenant, record.stream)
                    record.queued_s += await self._admission.wait(waiting)
                try:
                    await self._attempts(flight, logged)
                finally:
                    self._admission.leave()
            except QueueFull as full:
                raise _no_room(str(full), "queue_full") from full
            except QueueTimeout as late:
                raise _no_room(str(late), "queue_timeout") from late

    def _beginnings(self, dialect: Dialect, payload: Json, request: Request) -> list[Chat]:
        """Of conversations that the client has marked, where an instance has a use for them."""
        marks = dialect.marks_beginnings
        if not marks or marks not in request.body or not any(map(self._fleet.keeps_states, self._fleet.rows)):
            return []
        return dialect.beginnings(payload)

    async def _composed(self, dialect: Dialect, payload: Json, record: Record) -> bytes:
        return await self._queries.found(lambda: self._documents.compose(dialect, payload, record))

    async def _parsed(self, body: bytes) -> Json:
        # Nothing else runs while JSON is parsed, in no thread: between two large bodies others get a turn.
        await self._parsing.acquire()
        try:
            await asyncio.sleep(0)
            return parse_json_object(body)
        finally:
            self._parsing.release()

    # -- attempts ---------------------------------------------------------------------------------

    async def _attempts(self, flight: Flight, logged: LoggedRequest) -> None:
        excluded: frozenset[str] = frozenset()
        failure: PeerError | None = None
        lost = 0
        pinned_to, home = flight.admitted.job.pinned_to, None
        if pinned_to is not None:
            home = await self._shared.home(flight.record.caller.scope, pinned_to)
        while len(excluded) <= self._max_retries:
            if failure is not None and not self._may_retry(failure):
                break
            chosen = self._choose(flight, excluded | self._sharing(flight), home)
            if chosen is None:
                break
            placement, choice = chosen
            logged.choices.append(choice)
            flight.record.attempts += 1
            if flight.record.fetch is not None:
                await self._chooser.prepared(flight)
            try:
                await self._relay.attempt(flight, placement)
            except (ConnectFailed, ConnectionLost) as error:
                if flight.responder.started:
                    raise
                failure = error.with_traceback(None)  # the traceback has this frame, and so the request
                where, flight.failed = flight.failed or placement.instance, None
                excluded |= {where}
                if isinstance(error, ConnectFailed):
                    self._fleet.unconnected(where, str(error), refused=error.refused)
                    continue
                # The instance may have died of this very request: it gets one more chance, not a whole fleet.
                self.suspects.check(flight.digest())
                lost += 1
                if lost > 1:
                    break
            else:
                if len(self.suspects) and flight.record.error is None:
                    self.suspects.answered(flight.digest())
                return
        if isinstance(failure, HalfFailed):
            raise failure.refused() from failure
        if isinstance(failure, ConnectionLost):
            raise worker_lost(f"the worker went away while it worked on the request: {failure}") from failure
        if pinned_to is not None and home is not None:
            raise home_lost(pinned_to, home, self._fleet.state_of(home)) from failure
        raise no_worker(self._fleet) from failure

    def _sharing(self, flight: Flight) -> frozenset[str]:
        """The instances at which a tenant's prompts would share KV with those of others.

        Raises:
            RequestRefused: 403, there is no other one.
        """
        if flight.salt_by_header is None:
            return frozenset()
        sharing = self._fleet.without_salts()
        if self._fleet.usable() and not self._fleet.usable(sharing):
            raise cannot_be_kept_apart(flight.sent.dialect.path)
        return sharing

    def _may_retry(self, failure: PeerError) -> bool:
        if not self._budget.spend(self._clock.monotonic()):
            self._retries_denied.inc()
            return False
        self._retries.labels("connect" if isinstance(failure, ConnectFailed) else "lost").inc()
        return True

    def _choose(
        self, flight: Flight, excluded: frozenset[str], home: str | None
    ) -> tuple[Placement, Choice] | None:
        start = self._clock.monotonic()
        if home is None:
            chosen = self._chooser.choose(flight, excluded)
        else:
            chosen = None if home in excluded else self._chooser.pinned(flight, home, excluded)
        stages = flight.record.stages
        stages["route"] = stages.get("route", 0.0) + self._clock.monotonic() - start
        return chosen


def generation_routes(generation: Generation) -> Iterator[Route]:
    """The generation endpoints."""

    def handler(dialect: Dialect) -> Handler:
        def handle(request: Request, responder: Responder, record: Record) -> Awaitable[None]:
            return generation.serve(dialect, request, responder, record)

        return handle

    for dialect in DIALECTS.values():
        yield Route(dialect.path, dialect.methods, handler(dialect))


def _check_lengths(admitted: Admitted, prompts: Sequence[Encoded], limits: Limits, record: Record) -> None:
    """Refuse prompts that do not fit into the context, and record their length, if all are known."""
    job, total, known = admitted.job, 0, True
    for index, (prompt, encoded) in enumerate(zip(job.prompts, prompts, strict=True)):
        if encoded.tokens is None:
            known = False
            continue
        total += encoded.tokens
        if not fits(encoded.tokens, prompt.max_new_tokens, limits):
            check_length(encoded.tokens, prompt.max_new_tokens, limits, admitted.dialect.field_of(job, index))
    record.prompt_tokens = total if known else None


def _no_room(why: str, code: str) -> RequestRefused:
    return RequestRefused(
        f"every instance has as many requests as it may: {why}",
        status=503,
        kind="server_error",
        code=code,
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


def new_request_id() -> str:
    """A request id for clients that send none."""
    return _ids()
