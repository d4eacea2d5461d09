"""The life of a generation request: check, encode, wait, choose, send on, pass back, learn.

1. The body is parsed and checked; what is wrong is refused here (``native``, ``openai``, ``responses``,
   ``anthropic``), and so is what a tenant must not choose (``tenancy``).
2. Its prompts become keys of the prompt tree (``tokenizing``); too long ones are refused.
3. When every instance has as many requests as it may, it waits (``queueing``).
4. The tree says who holds how much of them, the policy chooses an instance (``choosing``), and the tree is
   told the guess that this instance will hold them.
5. The request goes to the instance as it came, with the tenant's salt put in (``relaying``). While the
   client has been sent nothing, a lost connection means another instance, within the budget for that; a
   client that goes away means a closed connection, on which the worker aborts.
6. When the answer begins, the guess becomes an entry; when it ends, what was generated is added: its ids
   where the answer tells them, else the tokens of its text.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Protocol

from sglang_ext.clock import Clock
from sglang_ext.errors import PeerError
from sglang_ext.router.api.anthropic import parse_messages
from sglang_ext.router.api.hints import only_a_hint
from sglang_ext.router.api.native import parse_generate
from sglang_ext.router.api.openai import parse_chat, parse_completion
from sglang_ext.router.api.responses import parse_responses
from sglang_ext.router.api.sessions import session_of
from sglang_ext.router.api.sse import EventFilter
from sglang_ext.router.api.usage import FORMS
from sglang_ext.router.api.validation import (
    LARGE_JSON_BYTES,
    Endpoint,
    Job,
    Json,
    Limits,
    check_length,
    parse_json_object,
)
from sglang_ext.router.config import RouterConfig
from sglang_ext.router.dispatch.choosing import Chooser
from sglang_ext.router.dispatch.explain import Choice, Stories, Story
from sglang_ext.router.dispatch.flight import Flight, Flights, Homes, through_chat
from sglang_ext.router.dispatch.queueing import Admission, QueueFull, QueueTimeout
from sglang_ext.router.dispatch.relaying import Relay
from sglang_ext.router.dispatch.retry_budget import RetryBudget
from sglang_ext.router.endpoints.background import Background
from sglang_ext.router.endpoints.routes import Handler, Route
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.http.types import ConnectFailed, ConnectionLost, Request, RequestRefused, Responder
from sglang_ext.router.policies import Decision
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.tenancy import (
    additions,
    check_reserved,
    judged,
    priority_of,
    put_in_front,
    rids_of,
    splice,
    with_salt,
)
from sglang_ext.router.tokens.tokenizing import TokenizerService

PARSERS: dict[Endpoint, Callable[[Json, Limits], Job]] = {
    Endpoint.GENERATE: parse_generate,
    Endpoint.CHAT: parse_chat,
    Endpoint.COMPLETIONS: parse_completion,
    Endpoint.RESPONSES: parse_responses,
    Endpoint.MESSAGES: parse_messages,
}
RETRY_AFTER_S = 1
DEFAULT_MODEL = "default"
_PROMPT_FIELD = {
    Endpoint.CHAT: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.GENERATE: "text",
    Endpoint.RESPONSES: "input",
    Endpoint.MESSAGES: "messages",
}
_ids = random.Random()
"""Of request ids: they need to be different, not secret, and asking the system for each is slow."""
_TELL_TIERS = {"return_cached_tokens_details": True}


class Hinting(Protocol):
    """What takes the hints in generation requests (``advisory_api``)."""

    async def serve_prewarm(
        self, endpoint: Endpoint, payload: Json, responder: Responder, record: Record
    ) -> None:
        """Answer a request that is only a hint."""

    def note(self, payload: Json, record: Record) -> None:
        """Take the hints that a request carries beside itself, without being waited for."""


class Generation:
    """Serves the generation endpoints.

    Args:
        config: retries, and where sessions are named.
        fleet: who can take requests.
        chooser: from requests to instances.
        relay: sends requests on.
        tokenizers: from prompts to keys.
        admission: where requests wait for room.
        flights: requests on their way.
        homes: where responses are kept.
        stories: recent requests, to be explained.
        background: counts what goes on after its request.
        metrics: counts retries and refusals.
        clock: seconds.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        chooser: Chooser,
        relay: Relay,
        tokenizers: TokenizerService,
        admission: Admission,
        flights: Flights,
        homes: Homes,
        stories: Stories,
        background: Background,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._chooser = chooser
        self._relay = relay
        self._tokenizers = tokenizers
        self._admission = admission
        self._flights = flights
        self._homes = homes
        self._stories = stories
        self.background = background
        relay.on_background = background.keep
        self._metrics = metrics
        self._clock = clock
        self._budget = RetryBudget(config.retry_budget)
        self._parsing = asyncio.Lock()
        self.hinting: Hinting | None = None
        """Takes the hints in requests."""

    async def serve(self, endpoint: Endpoint, request: Request, responder: Responder, record: Record) -> None:
        """Answer one request.

        Raises:
            RequestRefused: with an error of ours; nothing has been sent.
        """
        start = self._clock.monotonic()
        self._budget.begin(start)
        meter = record.caller.meter
        try:
            if meter is None:
                await self._serve(endpoint, request, responder, record, start)
                return
            with meter.request():
                try:
                    await self._serve(endpoint, request, responder, record, start)
                finally:
                    if record.first_byte is not None:
                        meter.charge((record.prompt_tokens or 0) + (record.completion_tokens or 0))
        except RequestRefused as refused:
            if refused.status in (429, 503):
                self._metrics.refused.labels(refused.code or "other").inc()
            raise
        finally:
            self._budget.end()

    async def _serve(
        self, endpoint: Endpoint, request: Request, responder: Responder, record: Record, start: float
    ) -> None:
        payload = await self._parsed(request.body)
        if self.hinting is not None and only_a_hint(endpoint, payload):
            check_reserved(payload, record.caller)
            record.priority = priority_of(payload, record.caller)
            await self.hinting.serve_prewarm(endpoint, payload, responder, record)
            return
        flight = await self._prepare(endpoint, payload, request, responder, record, start)
        if self.hinting is not None and "kv_hints" in payload:
            self.hinting.note(payload, record)
        del payload  # several times as large as the body, and the answer may take long
        story = Story(record, flight.prompts, self._clock.wall())
        self._stories.add(story)
        with self._flights.carrying(flight):
            try:
                async with self._admission.place(record.priority) as waited:
                    record.queued_s = waited
                    await self._attempts(flight, story)
            except QueueFull as error:
                raise _no_room(str(error), "queue_full") from error
            except QueueTimeout as error:
                raise _no_room(str(error), "queue_timeout") from error

    async def _parsed(self, body: bytes) -> Json:
        if len(body) <= LARGE_JSON_BYTES:
            return parse_json_object(body)
        # Nothing else runs while JSON is parsed, in no thread: between two large bodies others get a turn.
        async with self._parsing:
            await asyncio.sleep(0)
            return parse_json_object(body)

    async def _prepare(
        self,
        endpoint: Endpoint,
        payload: Json,
        request: Request,
        responder: Responder,
        record: Record,
        start: float,
    ) -> Flight:
        """Check a request, and find the keys of its prompts."""
        model = self._fleet.model
        if model is None:
            raise no_worker(self._fleet)
        limits = Limits(model.model.vocab_size, model.model.context_length, model.truncates)
        caller = record.caller
        check_reserved(payload, caller)
        record.priority = priority_of(payload, caller)
        job = with_salt(PARSERS[endpoint](payload, limits), caller)
        record.stream = job.stream
        parsed = self._stage(record, "parse", start)
        prompts = await self._tokenizers.encode(
            job, completion_template=model.chat.completion_template is not None
        )
        for index, (prompt, encoded) in enumerate(zip(job.prompts, prompts, strict=True)):
            if encoded.tokens is not None:
                check_length(encoded.tokens, prompt.max_new_tokens, limits, _field(job, index))
        if all(encoded.tokens is not None for encoded in prompts):
            record.prompt_tokens = sum(encoded.tokens or 0 for encoded in prompts)
        flight = Flight(
            job, prompts, request, responder, record, judged(request.body, payload, caller), request.target,
            FORMS[endpoint],
            session=self._session(request, payload, record),
            rids=rids_of(payload),
            units=sum(encoded.units for encoded in prompts),
        )  # fmt: skip
        self._rewrite(flight, payload)
        self._stage(record, "tokenize", parsed)
        return flight

    def _rewrite(self, flight: Flight, payload: Json) -> None:
        """Put into the body what the router has to say, if anything."""
        job, caller = flight.job, flight.record.caller
        fields = additions(payload, caller)
        flight.rid = _one_name(flight, {**payload, **fields} if fields else payload)
        if job.endpoint is Endpoint.MESSAGES and caller.salt is not None:
            if self._config.cache_details:
                fields |= _TELL_TIERS
                flight.tells_cached = True
            through_chat(flight, fields)
            return
        if job.endpoint in (Endpoint.CHAT, Endpoint.COMPLETIONS):
            asked = payload.get("return_cached_tokens_details")
            if asked is None and self._config.cache_details:
                flight.body = put_in_front(flight.body, _TELL_TIERS)
                flight.filter = EventFilter(b'"sglext":{', b'"choices":[]') if job.stream else None
                asked = True
            flight.tells_cached = asked is True
        if job.endpoint is Endpoint.RESPONSES and (model := self._served(payload)) is not None:
            fields["model"] = model
        if fields and job.endpoint is not Endpoint.MESSAGES:
            flight.body = splice(flight.body, fields)

    def _served(self, payload: Json) -> str | None:
        """The name under which the model is served, for a request that says ``default``, which SGLang takes
        under every endpoint but ``/v1/responses``."""
        base, colon, adapter = (payload.get("model") or "").partition(":")
        model = self._fleet.model
        return None if base != DEFAULT_MODEL or model is None else model.model.name + colon + adapter

    def _session(self, request: Request, payload: Json, record: Record) -> str | None:
        config = self._config
        named = session_of(
            request.headers,
            payload,
            header=config.session_header,
            field=config.session_field,
            cookie=config.session_cookie,
        )
        return None if named is None else record.caller.scope + named

    def _stage(self, record: Record, stage: str, since: float) -> float:
        now = self._clock.monotonic()
        record.stages[stage] = record.stages.get(stage, 0.0) + now - since
        return now

    # -- attempts ---------------------------------------------------------------------------------

    async def _attempts(self, flight: Flight, story: Story) -> None:
        excluded: frozenset[str] = frozenset()
        failure: PeerError | None = None
        lost = 0
        while len(excluded) <= self._config.max_retries:
            if failure is not None and not self._may_retry(failure):
                break
            chosen = self._choose(flight, excluded)
            if chosen is None:
                break
            decision, choice = chosen
            story.choices.append(choice)
            flight.record.attempts += 1
            if flight.record.fetch is not None:
                await self._chooser.prepared(flight)
            try:
                await self._relay.attempt(flight, decision)
                return
            except (ConnectFailed, ConnectionLost) as error:
                if flight.responder.started:
                    raise
                failure = error
                where, flight.failed = flight.failed or decision.instance, None
                excluded |= {where}
                if isinstance(error, ConnectFailed):
                    self._fleet.lost(where, str(error))
                    continue
                # The worker may have died of this very request: give it one more chance, not a whole fleet.
                lost += 1
                if lost > 1:
                    break
        if isinstance(failure, ConnectionLost):
            raise RequestRefused(
                f"the worker went away while it worked on the request: {failure}",
                status=502,
                kind="server_error",
                code="worker_lost",
            ) from failure
        raise no_worker(self._fleet) from failure

    def _may_retry(self, failure: PeerError) -> bool:
        if not self._budget.spend(self._clock.monotonic()):
            self._metrics.retries_denied.inc()
            return False
        self._metrics.retries.labels("connect" if isinstance(failure, ConnectFailed) else "lost").inc()
        return True

    def _choose(self, flight: Flight, excluded: frozenset[str]) -> tuple[Decision, Choice] | None:
        start = self._clock.monotonic()
        previous = flight.job.pinned_to
        if previous is None:
            chosen = self._chooser.choose(flight, excluded)
        else:
            home = self._homes.find(flight.record.caller.scope, previous)
            chosen = None if home in excluded else self._chooser.pinned(flight, home, excluded)
        self._stage(flight.record, "route", start)
        return chosen

    async def stop(self) -> None:
        """End what goes on after the answers."""
        await self.background.stop()
        await self._relay.stop()


def generation_routes(generation: Generation) -> Iterator[Route]:
    """The generation endpoints."""

    def handler(endpoint: Endpoint) -> Handler:
        async def handle(request: Request, responder: Responder, record: Record) -> None:
            await generation.serve(endpoint, request, responder, record)

        return handle

    for endpoint in Endpoint:
        methods = frozenset({"POST", "PUT"} if endpoint is Endpoint.GENERATE else {"POST"})
        yield Route(endpoint.value, methods, handler(endpoint))


def _field(job: Job, index: int) -> str:
    """The field in which a prompt came."""
    ids_field = {Endpoint.COMPLETIONS: "prompt", Endpoint.GENERATE: "input_ids"}.get(job.endpoint)
    if ids_field is not None and job.prompts[index].ids is not None:
        name = ids_field
    else:
        name = _PROMPT_FIELD[job.endpoint]
    return f"{name}[{index}]" if len(job.prompts) > 1 else name


def _one_name(flight: Flight, payload: Json) -> str:
    """What a worker will call a request that is a single one; empty where it will be several."""
    if flight.job.choices != 1 or len(flight.prompts) != 1:
        return ""
    given = payload.get("rid")
    if list in (type(given), type(payload.get("text")), type(payload.get("sampling_params"))):
        return ""
    ids = payload.get("input_ids", payload.get("prompt"))
    if isinstance(ids, list) and ids and not isinstance(ids[0], int):
        return ""
    return given if isinstance(given, str) and given else new_request_id()


def _no_room(why: str, code: str) -> RequestRefused:
    return RequestRefused(
        f"every instance has as many requests as it may: {why}",
        status=503,
        kind="server_error",
        code=code,
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


def no_worker(fleet: Fleet) -> RequestRefused:
    """The error when no instance can take a request."""
    return RequestRefused(
        f"no worker can take the request now: {fleet.obstacle() or 'all that could were tried'}",
        status=503,
        kind="server_error",
        code="no_worker",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


def new_request_id() -> str:
    """A request id for clients that send none."""
    return f"{_ids.getrandbits(128):032x}"
