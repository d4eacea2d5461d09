"""SGLang's sessions: ``/open_session`` and ``/close_session``.

A session is kept by the server that opened it. Requests that name it in ``session_params`` go there
(``Job.pinned_to``), whichever router they come to: a name given by the router contains the session's
instance, and routers inform each other of names chosen by clients, as of responses that are kept. At the
server, a tenant's session has a name of the tenant's own. Each has a time-out, and each client a limit on
those that it has open (``OpenSessions``).
"""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from sglang_ext.errors import DeadlineError, PeerError
from sglang_ext.router.api.dialect import worker_lost
from sglang_ext.router.api.job import MAX_SESSION_CHARS, session_key, session_of_key
from sglang_ext.router.api.limits import Limits
from sglang_ext.router.api.validation import Json, check_fields, kinds, parse_json_object
from sglang_ext.router.dispatch.choosing import no_worker
from sglang_ext.router.dispatch.flight import Homes, home_lost, session_named_after
from sglang_ext.router.endpoints.information import INFO_TIMEOUT_S
from sglang_ext.router.endpoints.routes import Route
from sglang_ext.router.endpoints.shared_requests import SharedRequests
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.fleet.instance_record import InstanceRecord
from sglang_ext.router.fleet.lifecycle import Event, State
from sglang_ext.router.fleet.worker import Answer, WorkerApi
from sglang_ext.router.http.types import JSON_TYPE, ConnectFailed, Request, RequestRefused, Responder
from sglang_ext.router.policies import Role
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.open_sessions import OpenSessions
from sglang_ext.router.tenancy.tenants import Caller

_OPENED = kinds(count="capacity_of_str_len", string="session_id", boolean="streaming", number="timeout")
_CLOSED = kinds(string="session_id")
_POST = frozenset({"POST"})


class Sessions:
    """Opens and closes sessions.

    Args:
        api: reaches them.
        shared: finds the instances that keep sessions.
        homes: learns where sessions are opened.
        open: counts the sessions of each client.
    """

    def __init__(
        self, fleet: Fleet, api: WorkerApi, shared: SharedRequests, homes: Homes, open: OpenSessions
    ) -> None:
        self._fleet = fleet
        self._api = api
        self._shared = shared
        self._homes = homes
        self._open_sessions = open
        shared.used.subscribe(self._used)
        fleet.happened.subscribe(self._happened)

    def routes(self) -> Iterator[Route]:
        """The endpoints."""
        yield Route("/open_session", _POST, self._open)
        yield Route("/close_session", _POST, self._close)

    async def _open(self, request: Request, responder: Responder, record: Record) -> None:
        payload = parse_json_object(request.body)
        check_fields(payload, _OPENED, _NO_LIMITS)
        if payload.get("capacity_of_str_len") is None:
            raise RequestRefused(
                "capacity_of_str_len is missing", param="capacity_of_str_len", code="missing"
            )
        caller = record.caller
        owner = caller.scope if record.budget is None else record.budget.owner
        self._open_sessions.check(owner)
        timeout = self._open_sessions.timeout(payload.get("timeout"))
        body = {field: payload[field] for field in _OPENED if field in payload} | {"timeout": timeout}
        home, name, answer = await self._opened_at(_name_in(payload), body, caller)
        record.status, record.instance = answer.status, home
        if answer.status != 200:
            await _pass_on(home, answer, responder)
            return
        self._open_sessions.opened(owner, caller.scope, name, home, timeout)
        self._homes.keep(caller.scope, session_key(name), home)
        await responder.send(200, {"content-type": JSON_TYPE, "x-kv-instance": home}, orjson.dumps(name))

    async def _opened_at(self, given: str | None, body: Json, caller: Caller) -> tuple[str, str, Answer]:
        """(instance, name, its answer). A session is opened at the instance with the fewest requests and
        sessions, or at the former home of a session of the ``given`` name, whose server checks whether it
        still has one.
        """
        former = None if given is None else await self._shared.found(caller.scope, session_key(given))
        fleet = [instance for instance in self._fleet.usable() if instance.role is Role.COLOCATED]
        fleet.sort(
            key=lambda each: (each.name != former, each.in_flight, self._open_sessions.kept_by(each.name))
        )
        for instance in fleet:
            name = given or session_named_after(instance.name)
            sent = body | {"session_id": caller.scope + name}
            try:
                with self._fleet.carrying(instance.name, 0):
                    return instance.name, name, await self._call(instance.name, "/open_session", sent)
            except ConnectFailed as error:
                self._fleet.unconnected(instance.name, str(error), refused=error.refused)
        raise no_worker(self._fleet)

    async def _close(self, request: Request, responder: Responder, record: Record) -> None:
        payload = parse_json_object(request.body)
        check_fields(payload, _CLOSED, _NO_LIMITS)
        name, caller = _name_in(payload), record.caller
        if name is None:
            raise RequestRefused("session_id is missing", param="session_id", code="missing")
        key = session_key(name)
        home = await self._shared.home(caller.scope, key)
        try:
            answer = await self._call(home, "/close_session", {"session_id": caller.scope + name})
        except ConnectFailed as error:
            raise home_lost(key, home, str(error)) from error
        if answer.status == 200:
            self._open_sessions.closed(caller.scope, name)
            self._homes.forget(caller.scope, key)
        record.status, record.instance = answer.status, home
        await _pass_on(home, answer, responder)

    def _used(self, scope: str, key: str) -> None:
        if (name := session_of_key(key)) is not None:
            self._open_sessions.used(scope, name)

    def _happened(self, record: InstanceRecord, event: Event, state: State) -> None:
        if event is Event.RESTARTED or state is State.LEFT:
            self._open_sessions.left(record.name)

    async def _call(self, instance: str, path: str, body: Json) -> Answer:
        try:
            return await self._api.call(instance, "POST", path, body=body, timeout_s=INFO_TIMEOUT_S)
        except ConnectFailed:
            raise
        except (PeerError, DeadlineError) as error:
            raise worker_lost(f"the worker went away while it worked on the request: {error}") from error


_NO_LIMITS = Limits(0, 0)
"""Of the model; sessions are opened without a prompt."""


def _name_in(payload: Json) -> str | None:
    name: str | None = payload.get("session_id")
    if name is not None and not 1 <= len(name) <= MAX_SESSION_CHARS:
        raise RequestRefused(
            f"session_id must have 1 to {MAX_SESSION_CHARS} characters",
            param="session_id",
            code="out_of_range",
        )
    return name


async def _pass_on(name: str, answer: Answer, responder: Responder) -> None:
    headers = {"content-type": answer.headers.get("content-type", JSON_TYPE), "x-kv-instance": name}
    await responder.send(answer.status, headers, answer.body)
