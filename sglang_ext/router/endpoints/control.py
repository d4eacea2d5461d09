"""Endpoints that act without generating: aborting, tokenizing, kept responses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.errors import PeerError
from sglang_ext.router.api.dialect import DIALECTS, Dialect
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.validation import (
    MAX_NAME_CHARACTERS,
    Json,
    check_ids,
    check_strings,
    parse_json_object,
    take_bool,
    take_string,
    wrong,
)
from sglang_ext.router.dispatch.aborting import Aborting
from sglang_ext.router.dispatch.choosing import no_worker
from sglang_ext.router.endpoints.bounds import Bounds
from sglang_ext.router.endpoints.information import INFO_TIMEOUT_S, ask_any, send_json
from sglang_ext.router.endpoints.repairing import Repairs
from sglang_ext.router.endpoints.routes import Handler, Route
from sglang_ext.router.endpoints.shared_requests import SharedRequests
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.fleet.worker import Answer, WorkerApi
from sglang_ext.router.http.types import JSON_TYPE, Request, RequestRefused, Responder
from sglang_ext.router.telemetry.record import Record

_POST = frozenset({"POST"})
_GET_OR_POST = frozenset({"GET", "POST"})


class Control:
    """Serves requests to instances other than generation.

    Args:
        aborting: aborts requests at instances.
        shared: requests and responses, of all routers.
        bounds: judges requests by their length.
        repairs: of prompts whose tokens are counted, as requests with them have it.
    """

    def __init__(
        self,
        fleet: Fleet,
        api: WorkerApi,
        aborting: Aborting,
        shared: SharedRequests,
        bounds: Bounds,
        repairs: Repairs,
    ) -> None:
        self._bounds = bounds
        self._repairs = repairs
        self._fleet = fleet
        self._api = api
        self._aborting = aborting
        self._shared = shared

    def routes(self) -> Iterator[Route]:
        """The endpoints."""
        yield Route("/abort_request", _POST, self._abort)
        for path in ("/tokenize", "/v1/tokenize"):
            yield Route(path, _POST, self._asking(self._check_tokenize))
        for path in ("/detokenize", "/v1/detokenize"):
            yield Route(path, _POST, self._asking(self._check_detokenize))
        for dialect in DIALECTS.values():
            for question in dialect.questions:
                yield Route(question.path, _POST, self._asking(question.check, dialect))
            if dialect.keeps_answers:
                yield Route(dialect.path + "/", _GET_OR_POST, self._keeping(dialect.path + "/"))

    # -- aborting ---------------------------------------------------------------------------------

    async def _abort(self, request: Request, responder: Responder, record: Record) -> None:
        """End a request by its ``rid`` or ``x-request-id``, or all of them, whichever routers serve them."""
        payload = parse_json_object(request.body)
        # Twice the length: a tenant may give a name from an answer, with its prefix.
        rid = take_string(payload, "rid", most=2 * MAX_NAME_CHARACTERS)
        caller = record.caller
        if take_bool(payload, "abort_all"):
            if caller.tenant is None:
                everybody = self._fleet.usable()
                body = {"rid": "", "abort_all": True}
                await asyncio.gather(
                    *(self._aborting.abort_at(instance.name, body) for instance in everybody)
                )
            aborted = await self._shared.abort(None, caller)
        elif rid:
            aborted = await self._shared.abort(rid, caller)
        else:
            raise RequestRefused("give rid, or abort_all", param="rid", code="missing")
        record.status = 200
        await send_json(responder, 200, {"aborted": aborted})

    # -- one instance -----------------------------------------------------------------------------

    def _asking(self, check: Callable[[Json], None], dialect: Dialect | None = None) -> Handler:
        async def handler(request: Request, responder: Responder, record: Record) -> None:
            self._bounds.check_body(request)
            payload = parse_json_object(request.body)
            if dialect is not None:
                self._repairs.apply(dialect, payload, request, record)
            check(payload)
            field = "messages" if payload.get("prompt") is None else "prompt"
            await self._bounds.check_text(payload, field, record)
            with self._bounds.charging(request, record):
                name, answer = await ask_any(self._fleet, self._api, "POST", request.target, payload)
            await _pass_on(name, answer, responder, record)

        return handler

    def _check_tokenize(self, payload: Json) -> None:
        take_string(payload, "model")
        if (payload.get("prompt") is None) == (payload.get("messages") is None):
            raise RequestRefused("give exactly one of prompt and messages", param="prompt", code="missing")
        check_strings(payload, "prompt")
        if payload.get("messages") is not None and type(payload["messages"]) is not list:
            raise wrong("messages", "an array of messages", payload["messages"])

    def _check_detokenize(self, payload: Json) -> None:
        take_string(payload, "model")
        take_bool(payload, "skip_special_tokens")
        model = self._fleet.model
        limits = Limits(model.model.vocab_size if model else 1 << 31, 0)
        tokens: Any = payload.get("tokens")
        if type(tokens) is not list:
            raise wrong("tokens", "an array of token ids, or of arrays of them", tokens)
        nested = bool(tokens) and type(tokens[0]) is list
        for index, ids in enumerate(tokens if nested else [tokens]):
            check_ids(ids, f"tokens[{index}]" if nested else "tokens", limits.vocab_size)
        self._bounds.check_ids(sum(map(len, tokens)) if nested else len(tokens), "tokens")

    def _keeping(self, prefix: str) -> Handler:
        """``GET PREFIX{id}`` and ``POST …/cancel``, at the instance that keeps the answer."""

        async def handler(request: Request, responder: Responder, record: Record) -> None:
            name, _, action = request.path.removeprefix(prefix).partition("/")
            if (request.method, action) not in (("GET", ""), ("POST", "cancel")):
                raise RequestRefused(f"there is no {request.path[:200]} here", status=404, code="not_found")
            home = await self._shared.home(record.caller.scope, name)
            record.instance = home
            try:
                answer = await self._api.call(home, request.method, request.target, timeout_s=INFO_TIMEOUT_S)
            except PeerError as error:
                raise no_worker(self._fleet) from error
            await _pass_on(home, answer, responder, record)

        return handler


async def _pass_on(name: str, answer: Answer, responder: Responder, record: Record) -> None:
    record.status, record.instance = answer.status, name
    headers = {"content-type": answer.headers.get("content-type", JSON_TYPE), "x-kv-instance": name}
    await responder.send(answer.status, headers, answer.body)
