"""SGLang's routes beside generation: served by any worker, by every worker, or refused.

All of it follows the table of ``server_routes``. A change of the fleet goes to all members or to none: each
of them must be reachable before anything is sent, changes go one after the other, and where a worker fails,
the others are set back if SGLang has a route for that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Final

import msgspec

from sglang_ext.errors import DeadlineError, PeerError
from sglang_ext.protocol.cluster import server_of
from sglang_ext.router.api.dialect import worker_lost
from sglang_ext.router.api.usage import count
from sglang_ext.router.api.validation import Json, parse_json_object, take_string
from sglang_ext.router.dispatch.choosing import RETRY_AFTER_S, no_worker
from sglang_ext.router.endpoints.bounds import Bounds
from sglang_ext.router.endpoints.information import send_json, without_secrets
from sglang_ext.router.endpoints.routes import Access, Handler, Route
from sglang_ext.router.endpoints.server_routes import ROWS, How, ServerRoute, route_of
from sglang_ext.router.fleet.fleet import USABLE, Fleet
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.router.fleet.worker import Answer, WorkerApi
from sglang_ext.router.http.types import (
    JSON_TYPE,
    ConnectFailed,
    Request,
    RequestRefused,
    Responder,
)
from sglang_ext.router.index.prompt_trees import PromptTrees
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.admit import cannot_be_kept_apart
from sglang_ext.tasks import Tasks

logger = logging.getLogger("router.fleet_api")

MEMBERS: Final = USABLE | {State.DRAINING}
"""States of workers that take part in a change of the fleet."""
MISSING: Final = frozenset({State.NEW, State.DOWN})
"""States in which a worker belongs to the fleet, and cannot be changed with it."""
SET_BACK: Final = "set back"
"""In an answer: a worker had done it, and was set back because another one failed."""
_CONTINUES: Final = frozenset({"/pause_generation", "/continue_generation"})
"""They wait for no other change: the update under way may be the reason for the pause, or may hang."""


class Outcome(msgspec.Struct, omit_defaults=True):
    """The answer of one worker."""

    status: int
    message: object
    undone: object = ""
    """Whether it was set back, and how that ended."""

    @property
    def good(self) -> bool:
        """Whether the worker has done it."""
        return self.status == 200


class FleetApi:
    """Serves the rows of the table that no other part serves.

    Args:
        trees: forgets a worker after a flush or a change of its weights.
        api: reaches the workers.
        bounds: judges requests by their length.
        timeout_s: for a request to a worker.
    """

    def __init__(
        self, fleet: Fleet, trees: PromptTrees, api: WorkerApi, bounds: Bounds, *, timeout_s: float
    ) -> None:
        self._bounds = bounds
        self._fleet = fleet
        self._trees = trees
        self._api = api
        self._timeout_s = timeout_s
        self._changing = asyncio.Lock()
        self._running = Tasks(lambda error: logger.info("a change of the fleet ended: %s", error))

    def routes(self, served: frozenset[str]) -> Iterator[Route]:
        """The endpoints of the table that are not served yet.

        Args:
            served: paths of routes of other parts.
        """
        for row in ROWS.values():
            path = route_of(row.path)
            if path in served:
                continue
            match row.how:
                case How.REFUSED:
                    methods = frozenset({"GET", "POST", "PUT", "DELETE"})
                    yield Route(path, methods, _refusing(row))
                case How.ANY:
                    access = Access.ADMIN if row.admin else Access.CLIENT
                    yield Route(path, frozenset({row.method}), partial(self._any, row), access)
                case How.EVERY:
                    yield Route(path, frozenset({row.method}), partial(self._every, row), Access.ADMIN)
                case How.ALL_OR_NONE:
                    yield Route(path, frozenset({row.method}), partial(self._all_or_none, row), Access.ADMIN)

    async def stop(self) -> None:
        """Wait for no change any more."""
        await self._running.cancel()

    # -- any worker ---------------------------------------------------------------------------------

    async def _any(self, row: ServerRoute, request: Request, responder: Responder, record: Record) -> None:
        caller = record.caller
        if row.prompts and caller.salt is not None:
            raise cannot_be_kept_apart(row.path)
        body = None
        if row.method == "POST":
            self._bounds.check_body(request)
            body = parse_json_object(request.body)
            await self._bounds.check_text(body, "text", record)
        with self._bounds.charging(request, record):
            name, answer = await self._least_busy(row, request, body)
        if caller.meter is not None:
            caller.meter.charge(_tokens_of(answer.json()))
        record.status, record.instance = answer.status, name
        headers = {"content-type": answer.headers.get("content-type", JSON_TYPE), "x-kv-instance": name}
        await responder.send(answer.status, headers, answer.body)

    async def _least_busy(self, row: ServerRoute, request: Request, body: Json | None) -> tuple[str, Answer]:
        """A worker that the request reached is the only one: it may have ended by it."""
        for instance in sorted(self._fleet.usable(), key=lambda known: known.in_flight):
            try:
                with self._fleet.carrying(instance.name, 0), self._fleet.asking(instance.name):
                    answer = await self._api.call(
                        instance.name, row.method, request.target, body=body, timeout_s=self._timeout_s
                    )
            except ConnectFailed as error:
                self._fleet.unconnected(instance.name, str(error), refused=error.refused)
                continue
            except PeerError as error:
                raise worker_lost(f"the worker went away while it worked on the request: {error}") from error
            return instance.name, answer
        raise no_worker(self._fleet)

    # -- every worker -------------------------------------------------------------------------------

    async def _every(self, row: ServerRoute, request: Request, responder: Responder, record: Record) -> None:
        names = [instance.name for instance in self._fleet.usable()]
        if not names:
            raise no_worker(self._fleet)
        outcomes = await self._send(row, row.path, names, request.method, request.target, request.body)
        await _answer(outcomes, responder, record)

    async def _all_or_none(
        self, row: ServerRoute, request: Request, responder: Responder, record: Record
    ) -> None:
        # It goes on when the client goes away: a half-changed fleet is worse than a changed one.
        work = self._running.start(self._change(row, request), name=f"{row.path} at every worker")
        outcomes = await asyncio.shield(work)
        await _answer(outcomes, responder, record)

    async def _change(self, row: ServerRoute, request: Request) -> Mapping[str, Outcome]:
        async with nullcontext() if row.path in _CONTINUES else self._changing:
            names = self._members()
            outcomes = await self._send(row, row.path, names, request.method, request.target, request.body)
            failed = [name for name in names if not outcomes[name].good]
            done = [name for name in names if outcomes[name].good]
            if failed:
                logger.error("%s failed at %s, and was done at %s", row.path, failed, done)
            if failed and done and row.undo:
                body = msgspec.json.encode(_undoing(request.body))
                back = await self._send(row, row.undo, done, "POST", row.undo, body)
                for name, outcome in back.items():
                    outcomes[name].undone = SET_BACK if outcome.good else outcome.message
            return outcomes

    def _members(self) -> list[str]:
        """All workers that a change of the fleet concerns.

        Raises:
            RequestRefused: one of them cannot be reached.
        """
        rows = self._fleet.rows.values()
        if missing := [row for row in rows if row.state in MISSING]:
            missed = ", ".join(f"{row.name} is {row.state}" for row in missing)
            raise RequestRefused(
                f"nothing was changed, because {missed}. Bring it back or take it out (DELETE "
                "/cluster/instances/{instance}), and repeat the request",
                status=503,
                kind="server_error",
                code="worker_missing",
                headers={"retry-after": str(RETRY_AFTER_S)},
            )
        names = [row.name for row in rows if row.state in MEMBERS]
        if not names:
            raise no_worker(self._fleet)
        return names

    async def _send(
        self, row: ServerRoute, path: str, names: Sequence[str], method: str, target: str, body: bytes
    ) -> dict[str, Outcome]:
        """Send one body to several workers at once. The index entries of a worker are dropped before and
        after its weights may have changed.
        """

        async def one(name: str) -> Outcome:
            try:
                answer = await self._api.call(name, method, target, body=body, timeout_s=self._timeout_s)
            except (PeerError, DeadlineError) as error:
                return Outcome(502, str(error))
            value = answer.json()
            content = without_secrets(value) if value is not None else answer.body.decode("utf-8", "replace")
            return Outcome(answer.status, content.strip() if isinstance(content, str) else content)

        if row.weights:
            self._forget(names)
        servers = list(dict.fromkeys(map(server_of, names)))  # SGLang passes it on to all replicas
        answers = dict(zip(servers, await asyncio.gather(*map(one, servers)), strict=True))
        outcomes = {name: answers[server_of(name)] for name in names}
        if row.weights:
            self._forget(names)
        elif path == "/flush_cache":
            self._forget([name for name in names if outcomes[name].good])
        return outcomes

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            self._trees.forget(name)


def _refusing(row: ServerRoute) -> Handler:
    async def handler(request: Request, responder: Responder, record: Record) -> None:
        raise RequestRefused(
            f"{request.path[:200]} is not offered here: {row.note}", status=404, code="not_offered"
        )

    return handler


def _undoing(body: bytes) -> Json:
    """The request that sets a worker back: it names the adapter, if there is one."""
    name = take_string(parse_json_object(body), "lora_name") if body else None
    return {} if name is None else {"lora_name": name}


def _tokens_of(answer: object) -> int:
    usage = answer.get("usage") if isinstance(answer, dict) else None
    return (count(usage.get("total_tokens")) or 0) if isinstance(usage, dict) else 0


async def _answer(outcomes: Mapping[str, Outcome], responder: Responder, record: Record) -> None:
    """The workers' answers under their names. 200 where all have done it, 400 where all that have not refused
    it, else 502."""
    failed = [outcome for outcome in outcomes.values() if not outcome.good]
    refused = all(400 <= outcome.status < 500 for outcome in failed)
    record.status = 200 if not failed else 400 if refused else 502
    body = {"success": not failed, "workers": msgspec.to_builtins(outcomes)}
    await send_json(responder, record.status, body)
