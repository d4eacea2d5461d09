"""Endpoints for reading: facts of the router, of the model, of one request."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import orjson
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from sglang_ext.clock import Clock
from sglang_ext.errors import DeadlineError, PeerError
from sglang_ext.router.api.dialect import worker_lost
from sglang_ext.router.cluster.readiness import Readiness, State
from sglang_ext.router.dispatch.choosing import no_worker
from sglang_ext.router.dispatch.queueing import Admission
from sglang_ext.router.dispatch.regret import History
from sglang_ext.router.endpoints.openapi import description
from sglang_ext.router.endpoints.routes import Access, Route
from sglang_ext.router.endpoints.shared_requests import SharedRequests
from sglang_ext.router.fleet.fleet import USABLE, Fleet
from sglang_ext.router.fleet.worker import Answer, WorkerApi
from sglang_ext.router.http.types import JSON_TYPE, ConnectFailed, Request, RequestRefused, Responder
from sglang_ext.router.index.index import Index
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tokens.tokenizing import TokenizerService
from sglang_ext.tasks import Tasks

logger = logging.getLogger("router.information")

INFO_TIMEOUT_S = 10.0
HEALTH_TIMEOUT_S = 25.0
"""SGLang itself gives up after 20 s."""
NOT_SERVING = "not open to clients yet"
_SECRET = re.compile(r"api_key|password|secret|token$", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"(--[\w-]*(?:key|password|secret|token)(?:=|\s+))('[^']*'|\S+)", re.IGNORECASE)
_GET = frozenset({"GET"})
_PROBE = frozenset({"GET", "HEAD"})


MOST_ENCODED = 4
"""Times that the name of a model may be percent-encoded."""


class Information:
    """Answers without changing anything.

    Args:
        metrics: shown at ``/metrics``.
        shared: explains recent requests, for ``/explain``.
        history: of the last hour, for the cluster page.
        clock: seconds.
        policy: how instances are chosen, for people.
        asks_for_key: whether clients need a key; for the description of the API.
        metrics_open: ``/metrics`` needs no administrator's key.
        wait_s: see ``Readiness``.
    """

    def __init__(
        self,
        fleet: Fleet,
        trees: Index,
        tokenizers: TokenizerService,
        admission: Admission,
        api: WorkerApi,
        metrics: RouterMetrics,
        shared: SharedRequests,
        history: History,
        clock: Clock,
        *,
        policy: str,
        asks_for_key: bool,
        metrics_open: bool,
        wait_s: float,
    ) -> None:
        self._policy = policy
        self._asks_for_key = asks_for_key
        self._metrics_open = metrics_open
        self._fleet = fleet
        self._trees = trees
        self._tokenizers = tokenizers
        self._admission = admission
        self._api = api
        self._metrics = metrics
        self._shared = shared
        self._history = history
        self._clock = clock
        self._readiness = Readiness(wait_s)
        self._serves = False
        self._trying = Tasks()
        """The probe of ``/health_generate`` under way; requests that come meanwhile share it."""

    async def stop(self) -> None:
        """Wait for no answer any more."""
        await self._trying.cancel()

    def serve(self) -> None:
        """Clients can connect from now on; before, instances could (``--member-port``)."""
        self._serves = True

    def routes(self) -> Iterator[Route]:
        """The endpoints."""
        for path in ("/health", "/ping"):
            yield Route(path, _PROBE, self._health, Access.OPEN, logged=False)
        yield Route("/ready", _PROBE, self._ready, Access.OPEN, logged=False)
        # They name tenants and what each uses.
        who = Access.OPEN if self._metrics_open else Access.ADMIN
        yield Route("/metrics", _GET, self._show_metrics, who, logged=False)
        yield Route("/metrics/last_hour", _GET, self._last_hour, who, logged=False)
        yield Route("/health_generate", _PROBE, self._health_generate)
        yield Route("/v1/models/", _GET, self._model)
        for path in ("/v1/models", "/model_info", "/get_model_info"):
            yield Route(path, _GET, self._from_a_worker)
        for path in ("/server_info", "/get_server_info"):
            yield Route(path, _GET, self._server_info)
        yield Route("/explain/", _GET, self._explain)
        yield Route("/openapi.json", _GET, self._openapi)

    def look_ready(self) -> tuple[State, int, int]:
        """How far the router is, and how many instances can take requests and are awaited."""
        usable = [row.name for row in self._fleet.rows.values() if row.state in USABLE]
        awaited = [name for name in usable if self._trees.awaited(name)]
        state = self._readiness.look(self._clock.monotonic(), usable, awaited)
        return state, len(usable), len(awaited)

    async def _ready(self, request: Request, responder: Responder, record: Record) -> None:
        """Whether requests can be served, and be sent where their KV is."""
        state, usable, awaited = self.look_ready()
        record.status = 200 if self._serves and state is State.READY else 503
        body = {
            "status": state.value if self._serves else NOT_SERVING,
            "workers": len(self._fleet.rows),
            "usable": usable,
            "awaited": awaited,
        }
        await send_json(responder, record.status, body)

    async def _health(self, request: Request, responder: Responder, record: Record) -> None:
        """Whether requests can be served."""
        usable = sum(row.state in USABLE for row in self._fleet.rows.values())
        record.status = 200 if usable else 503
        body = {"status": "ok" if usable else "no worker", "workers": len(self._fleet.rows), "usable": usable}
        await send_json(responder, record.status, body)

    async def _health_generate(self, request: Request, responder: Responder, record: Record) -> None:
        """Whether an instance generates: all are asked, the first that does is the answer. Requests
        that come meanwhile get the same answer."""
        names = [instance.name for instance in self._fleet.usable()]
        if not names:
            raise no_worker(self._fleet)
        trying = next(iter(self._trying), None) or self._trying.start(self._first_that_generates(names))
        name: str | None = await asyncio.shield(trying)
        if name is None:
            raise RequestRefused(
                "no instance generates", status=503, kind="server_error", code="no_worker",
                headers={"retry-after": "1"},
            )  # fmt: skip
        record.status, record.instance = 200, name
        await responder.send(200, {"x-kv-instance": name}, b"")

    async def _first_that_generates(self, names: Sequence[str]) -> str | None:
        asked = [asyncio.ensure_future(self._generates(name)) for name in names]
        try:
            for answer in asyncio.as_completed(asked):
                if (name := await answer) is not None:
                    return name
            return None
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _generates(self, name: str) -> str | None:
        try:
            answer = await self._api.call(name, "GET", "/health_generate", timeout_s=HEALTH_TIMEOUT_S)
        except (PeerError, DeadlineError) as error:
            logger.warning("%s", error)
            return None
        return name if answer.status == 200 else None

    async def _show_metrics(self, request: Request, responder: Responder, record: Record) -> None:
        self._metrics.refreshing()
        record.status = 200
        body = generate_latest(self._metrics.registry)
        await responder.send(200, {"content-type": CONTENT_TYPE_LATEST}, body)

    async def _last_hour(self, request: Request, responder: Responder, record: Record) -> None:
        record.status = 200
        await send_json(responder, 200, self._history.as_json())

    async def _model(self, request: Request, responder: Responder, record: Record) -> None:
        """A worker's answer about one model. Its name may have slashes, but no part that is empty or dots."""
        name = fully_unquoted(request.path.removeprefix("/v1/models/"))
        if any(part in ("", ".", "..") for part in re.split(r"[/\\]", name)):
            raise RequestRefused(f"there is no model {name[:80]!r} here", status=404, code="model_not_found")
        await self._from_a_worker(request, responder, record)

    async def _from_a_worker(self, request: Request, responder: Responder, record: Record) -> None:
        name, answer = await ask_any(self._fleet, self._api, "GET", request.target)
        record.status, record.instance = answer.status, name
        headers = {"content-type": answer.headers.get("content-type", JSON_TYPE), "x-kv-instance": name}
        await responder.send(answer.status, headers, answer.body)

    async def _server_info(self, request: Request, responder: Responder, record: Record) -> None:
        """A worker's answer without its secrets, and this router's view of all workers."""
        name, answer = await ask_any(self._fleet, self._api, "GET", "/server_info")
        value = answer.json()
        info = without_secrets(value) if isinstance(value, dict) else {}
        info["router"] = {
            "policy": self._policy,
            "tokenizer": self._tokenizers.status,
            "prompt_tree": {"blocks": self._trees.blocks, "bytes": self._trees.size_bytes},
            "queue": {"admitted": self._admission.admitted, "waiting": len(self._admission.line)},
        }
        if record.caller.admin:
            info["router"]["workers"] = [
                {
                    "url": row.name,
                    "state": row.state.value,
                    "why": row.why,
                    "in_flight": row.in_flight,
                    "cached_tokens": self._trees.tokens_of(row.name),
                }
                for row in self._fleet.rows.values()
            ]
        record.status, record.instance = answer.status, name
        await send_json(responder, answer.status, info, {"x-kv-instance": name})

    async def _explain(self, request: Request, responder: Responder, record: Record) -> None:
        name = request.path.removeprefix("/explain/")
        value = await self._shared.explain(name, record.caller)
        if value is None:
            raise RequestRefused(
                f"nothing is known of request {name[:128]!r}: it is none of yours, or too long ago",
                status=404,
                code="request_not_found",
            )
        record.status = 200
        await send_json(responder, 200, value)

    async def _openapi(self, request: Request, responder: Responder, record: Record) -> None:
        record.status = 200
        await send_json(responder, 200, description(asks_for_key=self._asks_for_key))


def fully_unquoted(path: str) -> str:
    """A path after every proxy on the way has decoded it; ``..`` for a path that is encoded more than
    ``MOST_ENCODED`` times.
    """
    for _ in range(MOST_ENCODED):
        if (plain := unquote(path)) == path:
            return path
        path = plain
    return ".."


async def ask_any(
    fleet: Fleet, api: WorkerApi, method: str, target: str, body: Any = None
) -> tuple[str, Answer]:
    """The answer of the least busy instance, or of the next one where nothing can be sent to it.

    Once a question has reached an instance, no other is asked: a question that takes too long there, or ends
    the instance, would do the same to the next.

    Raises:
        RequestTimeout: it did not answer in time.
        RequestRefused: 502: it went away; 503: none can be reached.
    """
    for instance in sorted(fleet.usable(), key=lambda known: known.in_flight):
        try:
            with fleet.asking(instance.name):
                answer = await api.call(instance.name, method, target, body=body, timeout_s=INFO_TIMEOUT_S)
        except ConnectFailed as error:
            fleet.unconnected(instance.name, str(error), refused=error.refused)
            continue
        except PeerError as error:
            raise worker_lost(f"the worker went away while it worked on the request: {error}") from error
        return instance.name, answer
    raise no_worker(fleet)


async def send_json(
    responder: Responder, status: int, value: Any, headers: dict[str, str] | None = None
) -> None:
    """Answer with JSON."""
    await responder.send(status, {"content-type": JSON_TYPE, **(headers or {})}, orjson.dumps(value))


def without_secrets(value: Any) -> Any:
    """``value`` with everything blanked that is called a key or a password, however deep, or follows a
    flag of such a name in a command line."""
    if isinstance(value, dict):
        return {
            name: None if isinstance(name, str) and _SECRET.search(name) and isinstance(inner, str)
            else without_secrets(inner)
            for name, inner in value.items()
        }  # fmt: skip
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, str) and "--" in value:
        return _SECRET_FLAG.sub(r"\1***", value)
    return value
