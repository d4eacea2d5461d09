"""Sending a request to an instance: where, with which headers, and for how long at most."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from sglang_ext.keys import KEEP_HEADER, SALT_HEADER
from sglang_ext.protocol.cluster import dp_rank_of, server_of
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.http.types import JSON_TYPE, Upstream, UpstreamResponse
from sglang_ext.router.telemetry.tracing import NO_TRACING, TRACE_HEADERS, Tracing
from sglang_ext.router.tenancy.admit import splice
from sglang_ext.router.tenancy.request_fields import OPERATOR_HEADERS, PASSED_HEADERS

RANK_HEADER = "x-data-parallel-rank"
"""The replica that a request goes to, for all APIs of SGLang but its own: it counts before a body's field."""
_PASSED_FOR_OPERATORS = PASSED_HEADERS | OPERATOR_HEADERS


class Forwarding:
    """Sends requests on.

    Args:
        upstream: connections to workers.
        timeout_s: for a request in all.
        asks_for_key: whether clients send a key; it is the router's, and no worker's.
        worker_api_key: sent in its place.
        tracing: headers with which workers continue a trace.
        keeps_states: whether an instance takes breakpoints.
    """

    def __init__(
        self,
        upstream: Upstream,
        *,
        timeout_s: float,
        asks_for_key: bool = False,
        worker_api_key: str | None = None,
        tracing: Tracing = NO_TRACING,
        keeps_states: Callable[[str], bool] = lambda instance: False,
    ) -> None:
        self._upstream = upstream
        self._timeout_s = timeout_s
        self._asks_for_key = asks_for_key
        self._worker_api_key = worker_api_key
        self._tracing = tracing
        self._keeps_states = keeps_states

    def open(self, flight: Flight, instance: str, body: bytes) -> Coroutine[Any, Any, UpstreamResponse]:
        """Send a request, and wait for the head of its answer.

        Raises:
            ConnectFailed, ConnectionLost, RequestTimeout: see ``Upstream.open``.
        """
        rank = dp_rank_of(instance)
        if rank is not None and flight.sent.target.startswith("/generate"):
            body = splice(body, {"routed_dp_rank": rank})
        return self._upstream.open(
            flight.request.method,
            server_of(instance) + flight.sent.target,
            headers=self._headers(flight, instance),
            body=body,
            timeout_s=self._timeout_s,
        )

    def _headers(self, flight: Flight, instance: str) -> dict[str, str]:
        passed = _PASSED_FOR_OPERATORS if flight.record.caller.tenant is None else PASSED_HEADERS
        headers = {name: value for name, value in flight.request.headers.items() if name in passed}
        if self._worker_api_key:
            headers["authorization"] = f"Bearer {self._worker_api_key}"
        elif self._asks_for_key:
            headers.pop("authorization", None)  # it is our key, not theirs
        if self._asks_for_key:
            headers.pop("x-api-key", None)
        if flight.salt_by_header is not None:
            headers[SALT_HEADER] = flight.salt_by_header
        if flight.breakpoints and self._keeps_states(instance):
            headers[KEEP_HEADER] = ",".join(map(str, flight.breakpoints))
        if continued := self._tracing.headers():
            for name in TRACE_HEADERS[:2]:
                headers.pop(name, None)
            headers.update(continued)
        if flight.sent.dialect is not flight.admitted.dialect:
            headers["content-type"] = JSON_TYPE  # the body is the router's, not the client's
        headers["x-request-id"] = flight.record.request_id
        if (rank := dp_rank_of(instance)) is not None:
            headers[RANK_HEADER] = str(rank)
        return headers
