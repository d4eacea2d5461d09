"""What the router answers: the table of endpoints, keys, errors, and the one log line per request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from router.config import RouterConfig
from router.exchange import JSON_TYPE, ClientGone, Request, RequestRefused, RequestTimeout, Responder
from router.fleet import USABLE, Fleet
from router.generation import Generation, new_request_id, no_worker
from router.observability import CLIENT_GONE, Record, RouterMetrics, log_access
from router.prompt_trees import PromptTrees
from router.tokenizing import TokenizerService
from router.validation import Endpoint
from router.worker import Answer, WorkerApi
from sglang_ext.clock import Clock
from sglang_ext.errors import DeadlineError, PeerError
from sglang_ext.metrics import EXPOSITION_CONTENT_TYPE, render

logger = logging.getLogger("router.service")

Handler = Callable[[Request, Responder, Record], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/metrics"})
"""Answered without a key, as SGLang does: for probes and scrapers."""
INFO_TIMEOUT_S = 10.0
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_SECRET = re.compile(r"api_key|password|secret|token$", re.IGNORECASE)
_SECRET_FLAG = re.compile(r"(--[\w-]*(?:key|password|secret|token)(?:=|\s+))('[^']*'|\S+)", re.IGNORECASE)


class Service:
    """Answers every request of the router.

    Args:
        generation: serves the generation endpoints.
        fleet, trees, tokenizers: looked at by the endpoints that tell about the router.
        api: asks the workers.
        metrics: counted here, shown at ``/metrics``.
        clock: seconds.
    """

    def __init__(
        self,
        config: RouterConfig,
        generation: Generation,
        fleet: Fleet,
        trees: PromptTrees,
        tokenizers: TokenizerService,
        api: WorkerApi,
        metrics: RouterMetrics,
        clock: Clock,
    ) -> None:
        self._config = config
        self._generation = generation
        self._fleet = fleet
        self._trees = trees
        self._tokenizers = tokenizers
        self._api = api
        self._metrics = metrics
        self._clock = clock
        self._routes: dict[str, tuple[frozenset[str], Handler]] = {
            "/health": (frozenset({"GET"}), self._health),
            "/metrics": (frozenset({"GET"}), self._show_metrics),
            "/v1/models": (frozenset({"GET"}), self._from_a_worker),
            "/model_info": (frozenset({"GET"}), self._from_a_worker),
            "/get_model_info": (frozenset({"GET"}), self._from_a_worker),
            "/server_info": (frozenset({"GET"}), self._server_info),
            "/get_server_info": (frozenset({"GET"}), self._server_info),
            "/flush_cache": (frozenset({"GET", "POST"}), self._flush_cache),
        }
        for endpoint in Endpoint:
            methods = frozenset({"POST", "PUT"}) if endpoint is Endpoint.GENERATE else frozenset({"POST"})
            self._routes[endpoint.value] = (methods, self._generating(endpoint))

    async def handle(self, request: Request, responder: Responder) -> None:
        """Answer a request. Raises nothing but the cancellation that a client which goes away brings."""
        await self._answer(request, responder, self._dispatch)

    async def refuse(self, request: Request, responder: Responder, refused: RequestRefused) -> None:
        """Answer a request that could not be read."""

        async def raise_it(request: Request, responder: Responder, record: Record) -> None:
            raise refused

        await self._answer(request, responder, raise_it)

    async def _answer(self, request: Request, responder: Responder, handler: Handler) -> None:
        given = request.headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else new_request_id()
        record = Record(request_id, request.method, request.path, self._clock.monotonic())
        try:
            await handler(request, responder, record)
        except RequestRefused as refused:
            record.error = refused.message
            await self._send_error(responder, record, refused)
        except RequestTimeout as error:
            record.error = str(error)
            timeout = RequestRefused(str(error), status=504, kind="server_error", code="timeout")
            await self._send_error(responder, record, timeout)
        except asyncio.CancelledError:
            record.status, record.error = CLIENT_GONE, "the client went away"
            raise
        except ClientGone:
            record.status, record.error = CLIENT_GONE, "the client went away"
        except Exception:
            logger.exception("request %s failed by an error of the router", request_id)
            record.error = "internal error"
            internal = RequestRefused(
                f"internal error of the router; its log has the details under {request_id}",
                status=500,
                kind="server_error",
                code="internal_error",
            )
            await self._send_error(responder, record, internal)
        finally:
            now = self._clock.monotonic()
            known = request.path in self._routes
            self._metrics.count(record, request.path if known else "other", now)
            if request.path not in OPEN_PATHS:
                log_access(record, now)

    async def _send_error(self, responder: Responder, record: Record, refused: RequestRefused) -> None:
        if responder.started:
            responder.cut()
            return
        record.status = refused.status
        headers = {**refused.headers, "x-request-id": record.request_id}
        try:
            await _send_json(responder, refused.status, refused.payload(), headers)
        except ClientGone:
            record.status = CLIENT_GONE

    async def _dispatch(self, request: Request, responder: Responder, record: Record) -> None:
        if request.path not in OPEN_PATHS:
            self._check_key(request)
        route = self._routes.get(request.path)
        if route is None and request.path.startswith("/v1/models/"):
            route = (frozenset({"GET"}), self._from_a_worker)
        if route is None:
            raise RequestRefused(f"there is no {request.path} here", status=404, code="not_found")
        methods, handler = route
        if request.method not in methods:
            allowed = ", ".join(sorted(methods))
            raise RequestRefused(
                f"{request.path} takes {allowed}, not {request.method}",
                status=405,
                code="method_not_allowed",
                headers={"allow": allowed},
            )
        await handler(request, responder, record)

    def _check_key(self, request: Request) -> None:
        key = self._config.api_key
        if key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), key.encode()):
            raise RequestRefused(
                "this router asks for a key: send it as 'Authorization: Bearer KEY'",
                status=401,
                kind="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )

    def _generating(self, endpoint: Endpoint) -> Handler:
        async def handler(request: Request, responder: Responder, record: Record) -> None:
            await self._generation.serve(endpoint, request, responder, record)

        return handler

    # -- telling ----------------------------------------------------------------------------------

    async def _health(self, request: Request, responder: Responder, record: Record) -> None:
        usable = sum(row.state in USABLE for row in self._fleet.rows.values())
        record.status = 200 if usable else 503
        body = {"status": "ok" if usable else "no worker", "workers": len(self._fleet.rows), "usable": usable}
        await _send_json(responder, record.status, body)

    async def _show_metrics(self, request: Request, responder: Responder, record: Record) -> None:
        self._metrics.refresh(self._fleet, self._trees, self._tokenizers.cache)
        record.status = 200
        body = render(self._metrics.registry)
        await responder.send(200, {"content-type": EXPOSITION_CONTENT_TYPE}, body)

    async def _from_a_worker(self, request: Request, responder: Responder, record: Record) -> None:
        name, answer = await self._ask_any(request.target)
        record.status, record.instance = answer.status, name
        headers = {"content-type": answer.headers.get("content-type", JSON_TYPE), "x-kv-instance": name}
        await responder.send(answer.status, headers, answer.body)

    async def _server_info(self, request: Request, responder: Responder, record: Record) -> None:
        """A worker's answer without its secrets, and what this router knows of all of them."""
        name, answer = await self._ask_any("/server_info")
        value = answer.json()
        info = _without_secrets(value) if isinstance(value, dict) else {}
        info["router"] = {
            "policy": self._config.policy,
            "tokenizer": self._tokenizers.status,
            "prompt_tree": {"blocks": self._trees.blocks, "bytes": self._trees.size_bytes},
            "workers": [
                {
                    "url": row.name,
                    "state": row.state.value,
                    "why": row.why,
                    "in_flight": row.in_flight,
                    "cached_tokens": self._trees.tokens_of(row.name),
                }
                for row in self._fleet.rows.values()
            ],
        }
        record.status, record.instance = answer.status, name
        await _send_json(responder, answer.status, info, {"x-kv-instance": name})

    async def _ask_any(self, target: str) -> tuple[str, Answer]:
        """The answer of the first worker that gives one."""
        for instance in self._fleet.usable():
            try:
                answer = await self._api.call(instance.name, "GET", target, timeout_s=INFO_TIMEOUT_S)
            except (PeerError, DeadlineError) as error:
                logger.warning("%s", error)
                continue
            return instance.name, answer
        raise no_worker(self._fleet)

    async def _flush_cache(self, request: Request, responder: Responder, record: Record) -> None:
        """Make every usable worker forget; one that refuses, because it has requests, keeps its entries."""
        names = [instance.name for instance in self._fleet.usable()]
        if not names:
            raise no_worker(self._fleet)
        results = await asyncio.gather(*(self._flush_one(name, request.query) for name in names))
        answers = dict(zip(names, results, strict=True))
        failed = [name for name, (status, _) in answers.items() if status != 200]
        record.status = 200 if not failed else 400 if all(answers[n][0] == 400 for n in failed) else 502
        body = {
            "success": not failed,
            "workers": {
                name: {"status": status, "message": text} for name, (status, text) in answers.items()
            },
        }
        await _send_json(responder, record.status, body)

    async def _flush_one(self, name: str, query: str) -> tuple[int, str]:
        try:
            answer = await self._api.flush(name, query)
        except (PeerError, DeadlineError) as error:
            return 502, str(error)
        if answer.status == 200:
            self._trees.forget(name)
        return answer.status, answer.body.decode("utf-8", "replace").strip()


async def _send_json(
    responder: Responder, status: int, value: Any, headers: dict[str, str] | None = None
) -> None:
    await responder.send(status, {"content-type": JSON_TYPE, **(headers or {})}, orjson.dumps(value))


def _without_secrets(value: Any) -> Any:
    """``value`` with everything blanked that is called a key or a password, however deep, or follows a
    flag of such a name in a command line."""
    if isinstance(value, dict):
        return {
            name: None if isinstance(name, str) and _SECRET.search(name) and isinstance(inner, str)
            else _without_secrets(inner)
            for name, inner in value.items()
        }  # fmt: skip
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    if isinstance(value, str) and "--" in value:
        return _SECRET_FLAG.sub(r"\1***", value)
    return value
