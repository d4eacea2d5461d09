"""Optional OpenTelemetry traces: a span per request, and ``traceparent`` passed on to workers.

OpenTelemetry is imported only if ``--otel-endpoint`` or a tracer provider is given; the packages come with
the extra ``otel``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from sglang_ext.errors import ConfigError
from sglang_ext.router.http.types import Request
from sglang_ext.router.telemetry.record import CLIENT_GONE, Record

TRACE_HEADERS = ("traceparent", "tracestate", "baggage")


class Tracing(Protocol):
    """Tracing of the router's requests."""

    def request(self, request: Request, record: Record) -> contextlib.AbstractContextManager[None]:
        """A context around one request."""

    def headers(self) -> Mapping[str, str]:
        """Headers with which a worker continues the trace of the running request."""

    def close(self) -> None:
        """Send the pending spans."""


_NOTHING = contextlib.nullcontext()


class NoTracing:
    """No tracing; a client's ``traceparent`` passes through unchanged."""

    def request(self, request: Request, record: Record) -> contextlib.AbstractContextManager[None]:
        return _NOTHING

    def headers(self) -> Mapping[str, str]:
        return {}

    def close(self) -> None:
        return None


NO_TRACING = NoTracing()


class OpenTelemetry:
    """Spans by OpenTelemetry.

    Args:
        provider: makes tracers; its ``shutdown``, if it has one, is called by ``close``.
    """

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._trace = trace
        self._tracer = provider.get_tracer("sglang_ext.router")
        self._propagator = TraceContextTextMapPropagator()

    @contextlib.contextmanager
    def request(self, request: Request, record: Record) -> Iterator[None]:
        parent = self._propagator.extract(dict(request.headers))
        kind = self._trace.SpanKind.SERVER
        name = f"{request.method} {request.path}"
        began = time.time_ns()
        with self._tracer.start_as_current_span(name, parent, kind, record_exception=False) as span:
            record.trace_id = format(span.get_span_context().trace_id, "032x")
            try:
                yield
            finally:
                for key, value in attributes(record).items():
                    span.set_attribute(key, value)
                self._stages(record, began)
                if record.status >= 500 or record.status == CLIENT_GONE:
                    span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, record.error))

    def _stages(self, record: Record, began: int) -> None:
        """A child span for each stage. Hosts measure only durations, so the children are laid end to end from
        the request's beginning."""
        at = began
        for stage, seconds in record.timings():
            if seconds:
                child = self._tracer.start_span(f"stage {stage}", start_time=at)
                at += round(seconds * 1e9)
                child.end(end_time=at)

    def headers(self) -> Mapping[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    def close(self) -> None:
        shutdown = getattr(self._provider, "shutdown", None)
        if shutdown is not None:
            shutdown()


def attributes(record: Record) -> dict[str, str | int | float | bool]:
    """Span attributes of a request, without prompts, answers and keys."""
    found: dict[str, str | int | float | bool | None] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "http.response.status_code": record.status,
        "kv.request_id": record.request_id,
        "kv.tenant": record.caller.tenant,
        "kv.instance": record.instance,
        "kv.route_reason": record.reason,
        "kv.prompt_tokens": record.prompt_tokens,
        "kv.matched_tokens": record.matched_tokens,
        "kv.cached_tokens": record.cached_tokens,
        "kv.completion_tokens": record.completion_tokens,
        "kv.stream": record.stream,
        "kv.attempts": record.attempts,
        "kv.queued_s": record.queued_s,
        "kv.first_byte_s": None if record.first_byte is None else record.first_byte - record.started,
        **{f"kv.stage.{stage}_s": seconds for stage, seconds in record.stages.items()},
        **{f"kv.tier.{tier}_tokens": tokens for tier, tokens in record.tiers.items()},
    }
    return {name: value for name, value in found.items() if value is not None}


def open_tracing(endpoint: str | None) -> Tracing:
    """Tracing to an OTLP/HTTP endpoint, or none.

    Raises:
        ConfigError: the packages are not installed.
    """
    if endpoint is None:
        return NO_TRACING
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"traces need packages that are not installed ({error.name})",
            field="--otel-endpoint",
            hint="pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http",
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "sglang-ext-router"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OpenTelemetry(provider)
