"""Metrics, the dashboard that shows them, logs and traces."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.errors import ConfigError
from sglang_ext.protocol.metrics import metric_name
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.telemetry.local_metrics import LocalCounters, LocalHistograms
from sglang_ext.router.telemetry.logs import JsonFormatter, configure_logging
from sglang_ext.router.telemetry.metric_table import ROUTER
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.tracing import NO_TRACING, OpenTelemetry, open_tracing
from sglang_ext.stages import StageTimes

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "router.json"
BODY = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 2}}
_METRIC = re.compile(r"\bsglang_ext_\w+")


def queries(dashboard: Any) -> list[str]:
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def samples() -> dict[str, set[str]]:
    """Sample name -> its labels, of every metric that the router has."""
    found: dict[str, set[str]] = {}
    for family in all_metrics().registry.collect():
        labels = set(getattr(family, "_labelnames", ()))
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(family.type, [""])
        for suffix in suffixes:
            found[family.name + suffix] = labels
    return found


def all_metrics() -> RouterMetrics:
    """All metrics, including those that the router's parts add."""
    router = Router(RouterConfig())
    router.tokenizers.close()
    return router.metrics


def unknown_metrics(dashboard: Any) -> set[str]:
    return {name for query in queries(dashboard) for name in _METRIC.findall(query)} - set(samples())


def test_every_query_of_the_dashboard_names_a_metric_there_is() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert len(queries(dashboard)) > 20
    assert unknown_metrics(dashboard) == set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_a_query_for_a_metric_that_is_gone_is_noticed() -> None:
    text = DASHBOARD.read_text().replace("router_requests_total", "router_requests_totals")
    assert unknown_metrics(json.loads(text)) == {"sglang_ext_router_requests_totals"}


def test_labels_of_the_dashboard_are_there() -> None:
    labels = {}
    for one in set(all_metrics().registry._collector_to_names):
        if hasattr(one, "_labelnames"):
            labels[one._name] = set(one._labelnames)
        elif isinstance(one, LocalCounters | LocalHistograms):
            labels[one.name] = set(one.labels)
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel["targets"]:
            used = {
                name for text in re.findall(r"by \(([^)]*)\)", target["expr"]) for name in text.split(", ")
            }
            used |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            for name in _METRIC.findall(target["expr"]):
                known = labels[re.sub(r"_(total|bucket)$", "", name)]
                assert used - {"le"} <= known, (panel["title"], name)


def test_metrics_can_be_added_and_are_brought_up_to_date() -> None:
    metrics = RouterMetrics()
    gauge = metrics.gauge("in_flight")
    metrics.refreshing.subscribe(lambda: gauge.labels("i").set(3))
    metrics.refreshing()
    assert metrics.registry.get_sample_value("sglang_ext_router_in_flight", {"instance": "i"}) == 3


def test_a_router_makes_every_metric_of_its_table_and_no_other() -> None:
    made = {
        one._name if hasattr(one, "_name") else one.name: tuple(
            one._labelnames if hasattr(one, "_labelnames") else one.labels
        )
        for one in all_metrics().registry._collector_to_names
    }
    # Made with --record alone: tests/router/dispatch/test_recording.py.
    made[metric_name("router", "recorded_lines")] = ("what",)
    assert made == {metric_name("router", row.name): ROUTER.labels(row) for row in ROUTER.rows}


@pytest.mark.parametrize("name", ["hints", "gone"])
def test_a_gauge_that_is_not_in_the_table_is_refused(name: str) -> None:
    """A name of another kind of metric, and a name that no row has."""
    with pytest.raises(KeyError, match=name):
        RouterMetrics().gauge(name)


async def test_json_logs_have_the_requests_id(
    start_worker, start_router, client, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    root = logging.getLogger("router")
    before = root.handlers[:]
    try:
        configure_logging("info", "json")
        assert isinstance(root.handlers[0].formatter, JsonFormatter)
        router = await start_router(await start_worker())
        headers = {"x-request-id": "my-id"}
        async with client.post(router.url + "/generate", json=BODY, headers=headers) as answer:
            assert answer.headers["x-request-id"] == "my-id"
    finally:
        root.handlers[:] = before
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    (line,) = [line for line in lines if line["logger"] == "router.access"]
    assert (line["id"], line["status"], line["path"]) == ("my-id", 200, "/generate")
    assert line["ms"] >= line["first_byte_ms"] >= 0


# -- traces ---------------------------------------------------------------------------------------


def in_memory() -> tuple[OpenTelemetry, Any]:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    return OpenTelemetry(provider), exporter


async def traced(start_router: Any, tracing: OpenTelemetry, *workers: Any) -> Router:
    router: Router = await start_router(*workers)
    router.service._tracing = tracing
    router.relay._forwarding._tracing = tracing
    return router


async def test_a_span_per_request_continues_the_clients_trace_and_goes_on_to_the_worker(
    start_worker, start_router, client
) -> None:
    tracing, exporter = in_memory()
    worker = await start_worker()
    router = await traced(start_router, tracing, worker)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{parent}-01", "authorization": "Bearer hush"}
    async with client.post(router.url + "/generate", json=BODY, headers=headers) as answer:
        assert answer.status == 200
    (span,) = whole(exporter)
    context = span.get_span_context()
    assert format(context.trace_id, "032x") == trace
    assert format(span.parent.span_id, "016x") == parent
    assert span.attributes["kv.instance"] == worker.url
    assert span.attributes["kv.prompt_tokens"] == 64
    assert span.attributes["http.response.status_code"] == 200
    assert "hush" not in span.to_json()
    version, passed_trace, passed_parent, _ = worker.requests[-1][2]["traceparent"].split("-")
    assert (version, passed_trace) == ("00", trace)
    assert passed_parent == format(context.span_id, "016x")


def whole(exporter: Any) -> list[Any]:
    """Spans of whole requests."""
    return [span for span in exporter.get_finished_spans() if not span.name.startswith("stage ")]


STAGES_TOLD = StageTimes(0.5, 0.25, 0.0625, 0.0, 1.0)


async def test_what_instances_tell_of_stages_is_seen_everywhere(start_worker, start_router, client) -> None:
    tracing, exporter = in_memory()
    worker = await start_worker()
    worker.end_details = {**STAGES_TOLD.details(), "durability_end": "behind"}
    router = await traced(start_router, tracing, worker)
    message = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    asked = 0
    for path, body in (("/generate", BODY), ("/v1/chat/completions", message)):
        for stream in (False, True):
            asked += 1
            headers = {"x-request-id": str(asked)}
            async with client.post(
                router.url + path, json={**body, "stream": stream}, headers=headers
            ) as got:
                assert got.status == 200
                await got.read()
                timing = got.headers.get("server-timing")
            # A stream's head is sent before its stages are known.
            assert (timing is None) is stream
            if timing is not None:
                assert timing.endswith(
                    "prefill_queue;dur=500.000, prefill;dur=250.000, transfer;dur=62.500, "
                    "decode_queue;dur=0.000, decode;dur=1000.000"
                )
                assert "router_queue;dur=" in timing
            async with client.get(f"{router.url}/explain/{asked}") as got:
                explained = await got.json()
                assert explained["seconds"]["instances"] == dict(STAGES_TOLD.items())
                assert explained["durability"] == "behind"
    value = router.metrics.registry.get_sample_value
    name = "sglang_ext_router_instance_stage_seconds"
    assert value(f"{name}_sum", {"stage": "prefill"}) == asked * 0.25
    assert value(f"{name}_count", {"stage": "transfer"}) == asked
    assert not value(f"{name}_count", {"stage": "decode_queue"}), "nobody passed it"
    posts = [span for span in whole(exporter) if span.name.startswith("POST ")]
    assert len(posts) == asked
    for request in posts:
        parts = {
            span.name: (span.end_time - span.start_time) / 1e9
            for span in exporter.get_finished_spans()
            if span.parent is not None and span.parent.span_id == request.get_span_context().span_id
        }
        assert {"stage tokenize", "stage route"} <= parts.keys()
        assert parts["stage decode"] == pytest.approx(1.0)
        assert "stage decode_queue" not in parts


async def test_an_instance_that_tells_no_stages_has_none(start_worker, start_router, client) -> None:
    """The twin."""
    router = await start_router(await start_worker())
    async with client.post(router.url + "/generate", json=BODY, headers={"x-request-id": "q"}) as answer:
        assert "server-timing" not in answer.headers
    async with client.get(router.url + "/explain/q") as answer:
        explained = await answer.json()
        assert explained["seconds"]["instances"] is explained["durability"] is None


async def test_concurrent_requests_have_their_own_spans(start_worker, start_router, client) -> None:
    import asyncio

    tracing, exporter = in_memory()
    worker = await start_worker()
    router = await traced(start_router, tracing, worker)

    async def ask() -> None:
        async with client.post(router.url + "/generate", json=BODY) as answer:
            assert answer.status == 200

    await asyncio.gather(*(ask() for _ in range(8)))
    spans = whole(exporter)
    assert len({span.get_span_context().trace_id for span in spans}) == 8
    passed = {request[2]["traceparent"].split("-")[2] for request in worker.requests}
    assert passed == {format(span.get_span_context().span_id, "016x") for span in spans}


async def test_errors_are_marked_in_traces(start_router, client) -> None:
    tracing, exporter = in_memory()
    router = await traced(start_router, tracing, "http://127.0.0.1:1")
    async with client.post(router.url + "/generate", json=BODY) as answer:
        assert answer.status == 503
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code.name == "ERROR"


async def test_without_tracing_a_traceparent_passes_as_it_came(start_worker, start_router, client) -> None:
    assert open_tracing(None) is NO_TRACING
    worker = await start_worker()
    router = await start_router(worker)
    async with client.post(router.url + "/generate", json=BODY, headers={"traceparent": "x"}) as answer:
        assert answer.status == 200
    assert worker.requests[-1][2]["traceparent"] == "x"


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match="otel") as caught:
        open_tracing("http://127.0.0.1:4318/v1/traces")
    assert caught.value.field == "--otel-endpoint"


def test_nothing_of_opentelemetry_is_imported_unasked() -> None:
    import subprocess

    code = "import sglang_ext.router.app.run, sys; print([m for m in sys.modules if 'opentelemetry' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
