"""The life of a generation request: check, encode, choose, send on, pass back, learn.

1. The body is parsed and checked; what is wrong is refused here (``native``, ``openai``).
2. Its prompts become keys of the prompt tree (``tokenizing``); too long ones are refused.
3. The tree says who holds how much of them, the policy chooses an instance, and the tree is told the
   guess that this instance will hold them.
4. The request goes to the instance as it came. While the client has been sent nothing, a lost
   connection means another instance; a client that goes away means a closed connection, on which the
   worker aborts.
5. When the answer begins, the guess becomes an entry; when it ends, what was generated is added: its ids
   where the answer tells them, else the tokens of its text.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import orjson

from router.config import RouterConfig
from router.costs import RouterCosts
from router.exchange import (
    EVENT_STREAM_TYPE,
    HOP_BY_HOP,
    ConnectFailed,
    ConnectionLost,
    Request,
    RequestRefused,
    RequestTimeout,
    Responder,
    Upstream,
    UpstreamResponse,
)
from router.fleet import Fleet, Load
from router.native import parse_generate
from router.observability import Record, RouterMetrics
from router.openai import parse_chat, parse_completion
from router.policies import Decision, Match, PolicyOptions, Prompt, beginners, policy_named
from router.policies.prompt_tree import NOTHING
from router.prompt_trees import PromptTrees
from router.sessions import session_of
from router.tokenizing import Encoded, TokenizerService
from router.usage import StreamReader, Usage, read_answer
from router.validation import Endpoint, Job, Json, Limits, check_length, parse_json_object
from sglang_ext.clock import Clock
from sglang_ext.errors import PeerError

logger = logging.getLogger("router.generation")

PARSERS: dict[Endpoint, Callable[[Json, Limits], Job]] = {
    Endpoint.GENERATE: parse_generate,
    Endpoint.CHAT: parse_chat,
    Endpoint.COMPLETIONS: parse_completion,
}
RETRY_AFTER_S = 1
MAX_READ_BYTES = 4 << 20
"""Longer answers are passed on unread."""
_PROMPT_FIELD = {Endpoint.CHAT: "messages", Endpoint.COMPLETIONS: "prompt", Endpoint.GENERATE: "text"}
_NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length", "content-encoding", "accept-encoding", "expect"}
_NOT_RETURNED = HOP_BY_HOP | {"content-length", "date", "server"}


@dataclass(frozen=True, slots=True)
class _Flight:
    """One request on its way."""

    job: Job
    prompts: Sequence[Encoded]
    request: Request
    responder: Responder
    record: Record
    session: str | None = None


class Generation:
    """Serves the generation endpoints.

    Args:
        config: policy, retries, time-outs.
        fleet: who can take requests.
        trees: who holds which prefix.
        costs: what computing takes where, and what is on its way.
        tokenizers: from prompts to keys.
        upstream: connections to workers.
        metrics: counts decisions and retries.
        clock: seconds.
    """

    def __init__(
        self,
        config: RouterConfig,
        fleet: Fleet,
        trees: PromptTrees,
        costs: RouterCosts,
        tokenizers: TokenizerService,
        upstream: Upstream,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._trees = trees
        self._costs = costs
        self._tokenizers = tokenizers
        self._upstream = upstream
        self._metrics = metrics
        self._clock = clock
        self._learning: set[asyncio.Task[None]] = set()
        self._policy = policy_named(config.policy)
        self._options = PolicyOptions(
            cache_threshold=config.cache_threshold,
            balance_abs_threshold=config.balance_abs_threshold,
            balance_rel_threshold=config.balance_rel_threshold,
            balance_cache_factor=config.balance_cache_factor,
            tie_tokens=config.block_size,
        )

    async def serve(self, endpoint: Endpoint, request: Request, responder: Responder, record: Record) -> None:
        """Answer one request.

        Raises:
            RequestRefused: with an error of ours; nothing has been sent.
        """
        start = self._clock.monotonic()
        payload = parse_json_object(request.body)
        model = self._fleet.model
        if model is None:
            raise no_worker(self._fleet)
        limits = Limits(model.model.vocab_size, model.model.context_length, model.truncates)
        job = PARSERS[endpoint](payload, limits)
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
        self._stage(record, "tokenize", parsed)
        session = session_of(
            request.headers,
            payload,
            header=self._config.session_header,
            field=self._config.session_field,
            cookie=self._config.session_cookie,
        )
        await self._attempts(_Flight(job, prompts, request, responder, record, session))

    # -- choosing ---------------------------------------------------------------------------------

    async def _attempts(self, flight: _Flight) -> None:
        excluded: frozenset[str] = frozenset()
        failure: PeerError | None = None
        lost = 0
        while len(excluded) <= self._config.max_retries:
            decision = self._decide(flight, excluded)
            if decision is None:
                break
            flight.record.attempts += 1
            try:
                await self._attempt(flight, decision)
                return
            except (ConnectFailed, ConnectionLost) as error:
                if flight.responder.started:
                    raise
                failure = error
                excluded |= {decision.instance}
                if isinstance(error, ConnectFailed):
                    self._fleet.lost(decision.instance, str(error))
                    self._metrics.retries.labels("connect").inc()
                    continue
                # The worker may have died of this very request: give it one more chance, not a whole fleet.
                lost += 1
                if lost > 1:
                    break
                self._metrics.retries.labels("lost").inc()
        if isinstance(failure, ConnectionLost):
            raise RequestRefused(
                f"the worker went away while it worked on the request: {failure}",
                status=502,
                kind="server_error",
                code="worker_lost",
            ) from failure
        raise no_worker(self._fleet) from failure

    def _decide(self, flight: _Flight, excluded: frozenset[str]) -> Decision | None:
        prompts, record = flight.prompts, flight.record
        start = self._clock.monotonic()
        fleet = self._fleet.usable(excluded)
        if not beginners(fleet):
            return None
        matches: dict[str, Match] = {}
        for encoded in prompts:
            for name, match in self._trees.match(encoded.namespace, encoded.key).items():
                before = matches.get(name, NOTHING)
                matches[name] = Match(
                    before.tokens + match.tokens,
                    before.own or match.own,
                    before.dram + match.dram,
                    before.disk + match.disk,
                )
        units = sum(encoded.units for encoded in prompts)
        prompt = Prompt(units, flight.session, request_id=record.request_id)
        decision = self._policy(prompt, fleet, matches, self._costs, self._options)
        for encoded in prompts:
            self._trees.guess(encoded.namespace, encoded.key, decision.instance)
        record.instance, record.reason = decision.instance, decision.reason.value
        record.matched_tokens = None if record.prompt_tokens is None else decision.matched
        self._metrics.decisions.labels(self._config.policy, decision.reason.value).inc()
        self._stage(record, "route", start)
        return decision

    def _stage(self, record: Record, stage: str, since: float) -> float:
        now = self._clock.monotonic()
        record.stages[stage] = record.stages.get(stage, 0.0) + now - since
        return now

    # -- sending on -------------------------------------------------------------------------------

    async def _attempt(self, flight: _Flight, decision: Decision) -> None:
        request = flight.request
        queued = max(0, sum(prompt.units for prompt in flight.prompts) - decision.matched)
        sending = self._costs.sending(decision.instance, queued, decision.matched, streams=flight.job.stream)
        with self._fleet.carrying(decision.instance, queued) as load, sending as first_byte:
            with load.until_lost():
                response = await self._upstream.open(
                    request.method,
                    decision.instance + request.target,
                    headers=self._request_headers(request, flight.record),
                    body=request.body,
                    timeout_s=self._config.request_timeout_secs,
                )
            try:
                is_stream = response.headers.get("content-type", "").startswith(EVENT_STREAM_TYPE)
                if response.status == 200 and is_stream:
                    await self._stream(flight, decision, response, load, first_byte)
                else:
                    await self._whole(flight, decision, response, load)
            finally:
                response.close()

    async def _whole(
        self, flight: _Flight, decision: Decision, response: UpstreamResponse, load: Load
    ) -> None:
        """Pass on an answer in one piece; until it is complete, another instance can be tried."""
        with load.until_lost():
            body = await response.read()
        job, record = flight.job, flight.record
        record.first_byte = self._clock.monotonic()
        record.status = response.status
        usage = Usage()
        if response.status == 200:
            if len(body) <= MAX_READ_BYTES:
                usage = read_answer(body, native=job.endpoint is Endpoint.GENERATE, choices=job.choices)
            self._learn(flight.prompts, decision.instance, usage)
            self._learn_texts(flight, decision.instance, lambda: usage.output_texts)
        _note(record, usage)
        headers = self._response_headers(response, record, usage)
        await flight.responder.send(response.status, headers, body)

    async def _stream(
        self,
        flight: _Flight,
        decision: Decision,
        response: UpstreamResponse,
        load: Load,
        first_byte: Callable[[], None],
    ) -> None:
        """Pass on an answer as it comes; until its first byte, another instance can be tried."""
        job, record, responder = flight.job, flight.record, flight.responder
        reader = StreamReader(native=job.endpoint is Endpoint.GENERATE, choices=job.choices)
        async with aclosing(response.chunks()) as chunks:
            with load.until_lost():
                first = await anext(chunks, b"")
            load.prefilled()
            first_byte()
            record.first_byte = self._clock.monotonic()
            record.status = response.status
            self._learn(flight.prompts, decision.instance, Usage())
            await responder.start(response.status, self._response_headers(response, record, Usage()))
            try:
                if first:
                    await responder.write(first)
                    reader.feed(first)
                async for chunk in chunks:
                    await responder.write(chunk)
                    reader.feed(chunk)
            except (ConnectionLost, RequestTimeout) as error:
                record.error = str(error)
                self._metrics.broken_streams.inc()
                await responder.write(_broken_off(error, in_event=reader.in_event))
        self._learn(flight.prompts, decision.instance, reader.usage)
        self._learn_texts(flight, decision.instance, reader.output_texts)
        _note(record, reader.usage)
        await responder.finish()

    def _learn(self, prompts: Sequence[Encoded], instance: str, usage: Usage) -> None:
        """The instance has computed these prompts, and what it generated from them."""
        for index, prompt in enumerate(prompts):
            generated = usage.output_keys.get(index, b"") if prompt.tokens is not None else b""
            self._trees.confirm(prompt.namespace, prompt.key + generated, instance)

    def _learn_texts(self, flight: _Flight, instance: str, texts: Callable[[], Mapping[int, str]]) -> None:
        """As ``_learn``, for answers that tell the text only; the client does not wait for it."""
        prompts = flight.prompts
        tells_ids = flight.job.endpoint is Endpoint.GENERATE
        if tells_ids or flight.job.echoes or all(prompt.tokens is None for prompt in prompts):
            return

        async def learn() -> None:
            for index, key in (await self._tokenizers.continuations(texts)).items():
                if index < len(prompts) and prompts[index].tokens is not None:
                    self._trees.confirm(prompts[index].namespace, prompts[index].key + key, instance)

        task = asyncio.create_task(learn(), name="learn what was generated")
        self._learning.add(task)
        task.add_done_callback(self._learnt)

    def _learnt(self, task: asyncio.Task[None]) -> None:
        self._learning.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("cannot learn what was generated", exc_info=error)

    async def stop(self) -> None:
        """End what goes on after the answers."""
        for task in self._learning:
            task.cancel()
        await asyncio.gather(*self._learning, return_exceptions=True)

    def _request_headers(self, request: Request, record: Record) -> dict[str, str]:
        headers = {name: value for name, value in request.headers.items() if name not in _NOT_FORWARDED}
        if self._config.worker_api_key:
            headers["authorization"] = f"Bearer {self._config.worker_api_key}"
        elif self._config.api_key:
            headers.pop("authorization", None)  # it is our key, not theirs
        headers["x-request-id"] = record.request_id
        return headers

    def _response_headers(self, response: UpstreamResponse, record: Record, usage: Usage) -> dict[str, str]:
        headers = {name: value for name, value in response.headers.items() if name not in _NOT_RETURNED}
        headers["x-request-id"] = record.request_id
        headers["x-kv-instance"] = record.instance or ""
        if self._config.explain_routing and record.reason is not None:
            headers["x-kv-route-reason"] = record.reason
        if usage.cached_tokens is not None:
            headers["x-kv-cached-tokens"] = str(usage.cached_tokens)
        return headers


def _field(job: Job, index: int) -> str:
    """The field in which a prompt came."""
    if job.endpoint is not Endpoint.CHAT and job.prompts[index].ids is not None:
        name = "prompt" if job.endpoint is Endpoint.COMPLETIONS else "input_ids"
    else:
        name = _PROMPT_FIELD[job.endpoint]
    return f"{name}[{index}]" if len(job.prompts) > 1 else name


def _note(record: Record, usage: Usage) -> None:
    record.prompt_tokens = usage.prompt_tokens if usage.prompt_tokens is not None else record.prompt_tokens
    record.cached_tokens = usage.cached_tokens
    record.completion_tokens = usage.completion_tokens


def _broken_off(error: Exception, *, in_event: bool) -> bytes:
    """The event that ends a stream whose worker went away; the end mark is left out on purpose."""
    payload: Mapping[str, object] = {
        "error": {
            "message": f"the worker went away in mid-answer: {error}",
            "type": "server_error",
            "param": None,
            "code": "worker_lost",
        }
    }
    return (b"\n\n" if in_event else b"") + b"data: " + orjson.dumps(payload) + b"\n\n"


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
    return uuid.uuid4().hex
