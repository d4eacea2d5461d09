"""The endpoints of hints: ``/v1/advisory``, and requests elsewhere that are hints in truth."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from urllib.parse import parse_qs

import orjson

from sglang_ext.clock import Clock
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.protocol.agent import MAX_PROMPT_BYTES, MAX_TAG
from sglang_ext.router.api.dialect import Dialect
from sglang_ext.router.api.documents import DOCUMENT_IDS, hinting_dialect
from sglang_ext.router.api.hints import HintAction
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.sse import event
from sglang_ext.router.api.validation import Json, check_length, parse_json_object
from sglang_ext.router.cluster.queries import Queries
from sglang_ext.router.dispatch.choosing import no_worker
from sglang_ext.router.endpoints.repairing import Repairs
from sglang_ext.router.endpoints.routes import Route
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.advising import Advisor
from sglang_ext.router.hints.advisory_book import Answer, Verdict
from sglang_ext.router.hints.documents import Documents
from sglang_ext.router.hints.encoding import HintEncoder
from sglang_ext.router.hints.hint import ENDED, Entry, Hint, State
from sglang_ext.router.hints.remote_hints import RemoteHint
from sglang_ext.router.http.types import EVENT_STREAM_TYPE, JSON_TYPE, Request, RequestRefused, Responder
from sglang_ext.router.telemetry.record import BY_FETCH, Record
from sglang_ext.router.tenancy.admit import admit_hint
from sglang_ext.router.tenancy.admitted import AdmittedHint
from sglang_ext.router.tenancy.tenants import Caller
from sglang_ext.tasks import Tasks
from sglang_ext.tiers import all_tiers

logger = logging.getLogger("router.advisory")

PATH = "/v1/advisory"
MAX_WAIT_S = 60.0
COMPLETED, REJECTED = "completed", "rejected"
"""Of hints in other requests, which are answered in the words of their envelope."""
MOST_ACTIONS = 16
"""Hints that one request may carry beside itself; further ones are left out."""
MOST_NOTING = 256
"""Such hints that are tokenized at a time, of all requests."""
UNKNOWN_SESSION = "nothing is known of this session: give the conversation so far"


class AdvisoryApi:
    """Answers requests under ``/v1/advisory``.

    Args:
        advisor: takes the hints.
        encoder: makes hints of advisory requests.
        fleet: has the model, against which hints are checked.
        documents: puts documents that a hint names in front of its prompt.
        repairs: of prompts, as their requests will have them.
        clock: seconds.
    """

    def __init__(
        self,
        advisor: Advisor,
        encoder: HintEncoder,
        fleet: Fleet,
        documents: Documents,
        repairs: Repairs,
        clock: Clock,
        queries: Queries,
    ) -> None:
        self._advisor = advisor
        self._encoder = encoder
        self._documents = documents
        self._repairs = repairs
        self._fleet = fleet
        self._clock = clock
        self._queries = queries
        self._noting = Tasks()

    def routes(self) -> Iterator[Route]:
        """The endpoints."""
        yield Route(PATH, frozenset({"POST"}), self._take)
        yield Route(PATH + "/", frozenset({"GET", "DELETE"}), self._one)

    # -- hints ------------------------------------------------------------------------------------

    async def _take(self, request: Request, responder: Responder, record: Record) -> None:
        try:
            payload = await self._with_documents(parse_json_object(request.body), record)
            if (dialect := hinting_dialect(payload)) is not None:
                self._repairs.apply(dialect, payload, request, record)
            offered = await self._offer(admit_hint(payload, record.caller, self._limits()), record)
        finally:
            self._documents.ended(record)
        await _send(responder, record, 200, offered)

    async def _with_documents(self, payload: Json, record: Record) -> Json:
        if DOCUMENT_IDS not in payload:
            return payload
        dialect = hinting_dialect(payload)
        body = await self._queries.found(lambda: self._documents.compose(dialect, payload, record))
        return parse_json_object(body)

    async def _offer(self, admitted: AdmittedHint, record: Record) -> dict[str, Any]:
        """Offer a hint to the advisor, and return its state as JSON.

        Raises:
            RequestRefused: 429 when it was refused, 404 when its session is unknown.
        """
        record.priority = admitted.priority
        if (refused := self._advisor.too_fast(record.caller)) is not None:
            raise _refused(refused)
        hint = await self._encoder.hint(admitted.advisory, record.caller, admitted.priority, record.budget)
        if hint is None:
            raise RequestRefused(UNKNOWN_SESSION, status=404, param="session", code="unknown_session")
        check_size(hint, self._limits())
        answer, offered = self._advisor.offer(hint)
        if answer.verdict is Verdict.REFUSED:
            raise _refused(answer)
        record.instance = offered.get("instance")
        return offered

    def _limits(self) -> Limits:
        model = self._fleet.model
        if model is None:
            raise no_worker(self._fleet)
        return model.limits

    # -- one hint -----------------------------------------------------------------------------------

    async def _one(self, request: Request, responder: Responder, record: Record) -> None:
        id = request.path.removeprefix(PATH + "/")
        entry = await self._queries.found(lambda: self._find(id, record))
        if request.method == "DELETE":
            self._advisor.withdraw(entry)
        elif EVENT_STREAM_TYPE in request.headers.get("accept", ""):
            with _counted(record.caller):
                await self._stream(entry, responder, record)
            return
        elif wait := _wait_of(request):
            with _counted(record.caller):
                await self._wait(entry, wait)
        await _send(responder, record, 200, self._advisor.as_json(entry))

    def _find(self, id: str, record: Record) -> Entry | RemoteHint:
        """A hint of the caller's.

        Raises:
            RequestRefused: 404: there is no such hint.
        """
        entry = self._advisor.find(id, record.caller)
        if entry is None:
            raise RequestRefused(
                f"there is no hint {id[:80]!r} here, or it ended long ago",
                status=404,
                code="no_such_hint",
            )
        return entry

    async def _wait(self, entry: Entry | RemoteHint, seconds: float) -> None:
        """Until the hint is ready or has ended, but no longer than so."""
        deadline = self._clock.monotonic() + seconds
        while not _settled(entry) and (left := deadline - self._clock.monotonic()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._advisor.changed(entry)
            except TimeoutError:
                return

    async def _stream(self, entry: Entry | RemoteHint, responder: Responder, record: Record) -> None:
        """Each state as an event, until nothing is moved any more."""
        record.status = 200
        record.stream = True
        headers = {"content-type": EVENT_STREAM_TYPE, "x-request-id": record.request_id}
        await responder.start(200, headers)
        while True:
            settled = _settled(entry)
            await responder.write(event(self._advisor.as_json(entry)))
            if settled:
                break
            await self._advisor.changed(entry)
        await responder.write(event(None))
        await responder.finish()

    # -- hints in other requests ----------------------------------------------------------------------

    async def serve_prewarm(
        self, dialect: Dialect, payload: Json, responder: Responder, record: Record
    ) -> None:
        """Answer a request that only warms the cache: with no text, in its own dialect."""
        offered = await self._offer(admit_hint(payload, record.caller, self._limits(), dialect), record)
        tokens = offered["tokens"]
        record.prompt_tokens = sum(tokens.values())
        record.cached_tokens = sum(tokens.get(tier.name, 0) for tier in all_tiers())
        headers = {
            "x-kv-advisory": offered["verdict"],
            "x-kv-advisory-id": offered["id"],
            "x-kv-instance": offered["instance"] or "",
            "x-kv-cached-tokens": str(record.cached_tokens),
        }
        body = dialect.empty_answer(
            record.request_id, payload.get("model"), record.prompt_tokens, record.cached_tokens
        )
        if payload.get("stream") is True:
            record.status, record.stream = 200, True
            head = {"content-type": EVENT_STREAM_TYPE, "x-request-id": record.request_id, **headers}
            await responder.start(200, head)
            for part in dialect.empty_events(body):
                await responder.write(part)
            await responder.finish()
        else:
            await _send(responder, record, 200, body, headers)

    def note(self, hints: Sequence[HintAction], record: Record) -> None:
        """Take the hints that a request carries beside itself, and note the answers in its record. An error
        in one of them does not affect the request.
        """
        for number, action in enumerate(hints):
            if number >= MOST_ACTIONS or len(self._noting) >= MOST_NOTING:
                logger.info("hints in a request beyond the first %d were not taken", number)
                return
            if action.fetches:
                record.hints[action.id] = BY_FETCH
            elif action.body is None:
                record.hints[action.id] = REJECTED
            else:
                self._noting.start(self._note(action.id, action.body, record), name="take a hint")

    async def _note(self, id: str, body: Json, record: Record) -> None:
        own = Record("", "POST", PATH, self._clock.monotonic(), caller=record.caller)
        own.budget = record.budget
        try:
            body = await self._with_documents(body, own)
            offered = await self._offer(admit_hint(body, record.caller, self._limits()), own)
            done = offered["state"] == State.READY.value
            record.hints[id] = f"{COMPLETED if done else offered['verdict']};id={offered['id']}"
        except RequestRefused as refused:
            record.hints[id] = REJECTED
            logger.info("a hint in a request was not taken: %s", refused.message)
        except Exception:
            logger.exception("a hint in a request was not taken")
        finally:
            self._documents.ended(own)

    async def stop(self) -> None:
        """End the work that goes on after the answers."""
        await self._noting.cancel()


def check_size(hint: Hint, limits: Limits) -> None:
    """Refuse a hint that stands for no request, or is too long for a message to an instance."""
    if len(hint.key) > MAX_PROMPT_BYTES:
        raise RequestRefused(
            f"the hint has {hint.tokens} tokens, and a message to an instance has room for "
            f"{MAX_PROMPT_BYTES // TOKEN_BYTES}; announce a shorter beginning of the prompt",
            code="hint_too_long",
        )
    if not isinstance(hint.namespace, tuple) or hint.namespace[0] != "tokens":
        return
    check_length(hint.tokens, None, limits, "the hint")
    if any(isinstance(name, str) and len(name) > MAX_TAG for name in hint.namespace):
        raise RequestRefused(
            f"extra_key and cache_salt of a hint have at most {MAX_TAG} characters",
            param="extra_key",
            code="hint_too_long",
        )


def _refused(answer: Answer) -> RequestRefused:
    wait = max(1, math.ceil(answer.retry_after_s or 0.0))
    return RequestRefused(
        f"the hint is refused: {answer.reason}; try again in {wait} s",
        status=429,
        kind="rate_limit_error",
        code="hint_refused",
        headers={"retry-after": str(wait), "x-kv-advisory": Verdict.REFUSED.value},
    )


def _counted(caller: Caller) -> AbstractContextManager[None]:
    """While it waits, a request counts as one of those that a key may have at a time."""
    return nullcontext() if caller.meter is None else caller.meter.waiting()


def _settled(entry: Entry | RemoteHint) -> bool:
    return entry.state is State.READY or entry.state in ENDED


def _wait_of(request: Request) -> float:
    """``?wait_s=``: how long to wait until the hint is ready."""
    given = parse_qs(request.query).get("wait_s", [])
    if not given:
        return 0.0
    try:
        wait = float(given[-1])
    except ValueError:
        wait = math.nan
    if not 0 <= wait <= MAX_WAIT_S:
        raise RequestRefused(
            f"wait_s must be a number of seconds from 0 to {MAX_WAIT_S:g}",
            param="wait_s",
            code="invalid_value",
        )
    return wait


async def _send(
    responder: Responder, record: Record, status: int, body: Json, headers: dict[str, str] | None = None
) -> None:
    record.status = status
    head = {"content-type": JSON_TYPE, "x-request-id": record.request_id, **(headers or {})}
    await responder.send(status, head, orjson.dumps(body))
