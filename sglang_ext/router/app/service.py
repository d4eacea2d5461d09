"""The frame of every request: its id, its key, its endpoint, its errors, and the one log line."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Coroutine
from typing import Any

import orjson

from sglang_ext.clock import Clock
from sglang_ext.protocol.cluster import MAX_BODY_BYTES
from sglang_ext.router.api.dialect import error_body
from sglang_ext.router.endpoints.charges import Charge, charge_of
from sglang_ext.router.endpoints.generation import new_request_id
from sglang_ext.router.endpoints.routes import Access, Handler, Route, RouteTable, found
from sglang_ext.router.http.body import packing
from sglang_ext.router.http.state import RETRY_AFTER_S
from sglang_ext.router.http.types import (
    JSON_TYPE,
    ClientGone,
    NoFilesLeft,
    Request,
    RequestRefused,
    RequestTimeout,
    Responder,
)
from sglang_ext.router.http.web_sites import ReadableAnswer, WebSites, is_preflight, preflight_headers
from sglang_ext.router.telemetry.logs import log_access
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import CLIENT_GONE, Record
from sglang_ext.router.telemetry.tracing import NO_TRACING, Tracing
from sglang_ext.router.tenancy.budgets import Budgets
from sglang_ext.router.tenancy.tenants import KeyRing, Meter
from sglang_ext.signals import Signal

logger = logging.getLogger("router.service")

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Service:
    """Answers every request of the router.

    Args:
        routes: the handler of each path; endpoints may be added while it runs.
        keys: the valid API keys.
        budgets: the budgets of clients.
        sites: the web pages that may send requests.
        clock: seconds.
        tracing: a span per request, where that is wanted.
    """

    def __init__(
        self,
        routes: RouteTable,
        keys: KeyRing,
        budgets: Budgets,
        sites: WebSites,
        metrics: RouterMetrics,
        clock: Clock,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        self.routes = routes
        self._keys = keys
        self._budgets = budgets
        self._sites = sites
        self._metrics = metrics
        self._clock = clock
        self._tracing = tracing
        self._refused = metrics.counter("refused")
        self.ended: Signal[[Record, float]] = Signal()
        """A request has ended, and when; ``monotonic``."""

    # A function that only delegates returns the next coroutine: one around it would cost every request.

    def handle(self, request: Request, responder: Responder) -> Coroutine[Any, Any, None]:
        """Answer a request. Raises nothing but the cancellation that a client which goes away brings."""
        return self._answer(request, responder, self._dispatch)

    async def refuse(self, request: Request, responder: Responder, refused: RequestRefused) -> None:
        """Answer a request that could not be read."""

        async def raise_it(request: Request, responder: Responder, record: Record) -> None:
            raise refused

        await self._answer(request, responder, raise_it)

    async def _answer(self, request: Request, responder: Responder, handler: Handler) -> None:
        given = request.headers.get("x-request-id", "")
        request_id = given if given and _REQUEST_ID.fullmatch(given) else new_request_id()
        record = Record(request_id, request.method, request.path, self._clock.monotonic())
        if "origin" in request.headers and (readable := self._sites.cors(request)) is not None:
            responder = ReadableAnswer(responder, readable)
            if is_preflight(request):
                handler = _answer_preflight
        try:
            if self._tracing is NO_TRACING:
                await self._guarded(request, responder, record, handler)
            else:
                with self._tracing.request(request, record):
                    await self._guarded(request, responder, record, handler)
        finally:
            now = self._clock.monotonic()
            route = self.routes.get(request.path)
            self._metrics.count(record, "other" if route is None else route.path, now)
            self.ended(record, now)
            if route is None or route.logged:
                log_access(record, now)

    async def _guarded(
        self, request: Request, responder: Responder, record: Record, handler: Handler
    ) -> None:
        answer: RequestRefused
        try:
            await handler(request, responder, record)
            return
        except RequestRefused as refused:
            record.error = refused.message
            # Its traceback has this frame, which has it: a circle would keep the request until garbage is
            # collected, which is rare.
            answer = refused.with_traceback(None)
            if refused.status in (429, 503):
                self._refused.labels(refused.code or "other").inc()
        except NoFilesLeft as lacking:
            record.error = str(lacking)
            answer = no_files(record.error)
        except RequestTimeout as late:
            record.error = str(late)
            answer = RequestRefused(record.error, status=504, kind="server_error", code="timeout")
        except asyncio.CancelledError:
            record.status, record.error = CLIENT_GONE, "the client went away"
            raise
        except ClientGone:
            record.status, record.error = CLIENT_GONE, "the client went away"
            return
        except Exception:
            logger.exception("request %s failed by an error of the router", record.request_id)
            record.error = "internal error"
            answer = RequestRefused(
                f"internal error of the router; its log has the details under {record.request_id}",
                status=500,
                kind="server_error",
                code="internal_error",
            )
        await self._send_error(responder, record, answer)

    async def _send_error(self, responder: Responder, record: Record, refused: RequestRefused) -> None:
        if responder.started:
            responder.cut()
            return
        record.status = refused.status
        headers = {"content-type": JSON_TYPE, **refused.headers, "x-request-id": record.request_id}
        if record.instance is not None:
            headers["x-kv-instance"] = record.instance
        try:
            await responder.send(refused.status, headers, orjson.dumps(error_body(record.path, refused)))
        except ClientGone:
            record.status = CLIENT_GONE

    def turn_away(self, request: Request) -> RequestRefused | None:
        """Why the body of a request need not be read or unpacked: without a key, or beyond its limits,
        no client fills the router's memory. Endpoints that ask for no key take small plain bodies only."""
        record = Record("", request.method, request.path, self._clock.monotonic())
        try:
            route = self._find(request, record)
        except RequestRefused as refused:
            return refused
        if route.access in (Access.OPEN, Access.OWN):
            return _too_much(request)
        meter, charge = record.caller.meter, charge_of(route, request.method)
        if charge is Charge.NOTHING:
            return None
        beyond = None if meter is None else meter.refusal(work=charge is Charge.WORK)
        return beyond or self._budgets.of(record.caller, request.client).body_refusal()

    def _dispatch(self, request: Request, responder: Responder, record: Record) -> Awaitable[None]:
        route = self._find(request, record)
        charge, meter = charge_of(route, request.method), record.caller.meter
        if charge is Charge.NOTHING:
            return route.handler(request, responder, record)
        record.budget = budget = self._budgets.of(record.caller, request.client)
        if request.body:
            budget.take_body(len(request.body))
        if meter is not None:
            if charge is Charge.WORK:
                return _working(meter, route, request, responder, record)
            meter.count()
        return route.handler(request, responder, record)

    def _find(self, request: Request, record: Record) -> Route:
        route = self.routes.get(request.path)
        self._sites.check(request, public=route is not None and route.access is Access.OPEN)
        # The key is checked before any answer, even that there is no such path.
        if route is None or route.access in (Access.CLIENT, Access.ADMIN):
            self._check_key(request, record, route)
        return found(route, request)

    def _check_key(self, request: Request, record: Record, route: Route | None) -> None:
        caller = self._keys.caller(key_of(request) if self._keys.asks else None)
        if caller is None:
            raise RequestRefused(
                "this router asks for a key: send it as 'Authorization: Bearer KEY'",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        record.caller = caller
        if route is not None and route.access is Access.ADMIN and not caller.admin:
            raise RequestRefused(
                f"{request.path} needs an administrator's key",
                status=403,
                kind="permission_error",
                code="not_an_admin",
            )


def _too_much(request: Request) -> RequestRefused | None:
    """The refusal of a body that is not small, plain and of known length."""
    if packing(request.headers) is not None:
        why, status = "takes no compressed body", 415
    elif "transfer-encoding" in request.headers:
        why, status = "takes a body with a Content-Length only", 411
    elif int(request.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        why, status = f"takes at most {MAX_BODY_BYTES} bytes", 413
    else:
        return None
    return RequestRefused(
        f"{request.path[:200]} {why}", status=status, code="body_refused", headers={"connection": "close"}
    )


def no_files(why: str) -> RequestRefused:
    """The refusal of a request for which this process has no file left."""
    return RequestRefused(
        f"{why}; raise ulimit -n",
        status=503,
        kind="server_error",
        code="too_many_connections",
        headers={"retry-after": str(RETRY_AFTER_S)},
    )


async def _working(
    meter: Meter, route: Route, request: Request, responder: Responder, record: Record
) -> None:
    with meter.request():
        await route.handler(request, responder, record)


async def _answer_preflight(request: Request, responder: Responder, record: Record) -> None:
    record.status = 204
    await responder.send(204, preflight_headers(request), b"")


def key_of(request: Request) -> str | None:
    """The key in a request: OpenAI's header, or Anthropic's."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    return request.headers.get("x-api-key")
