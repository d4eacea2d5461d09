"""The router's Prometheus metrics."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from sglang_ext.protocol.metrics import Kind, metric_name
from sglang_ext.router.telemetry.local_metrics import (
    LocalCounter,
    LocalCounters,
    LocalHistogram,
    LocalHistograms,
)
from sglang_ext.router.telemetry.metric_table import ROUTER
from sglang_ext.router.telemetry.record import CLIENT_GONE, Record
from sglang_ext.signals import Signal


class Table(Protocol):
    """A table of data kept for clients beyond their requests, such as a ``Bounded``."""

    @property
    def size_bytes(self) -> int:
        """Memory of its entries, as charged."""

    def __len__(self) -> int: ...


class RouterMetrics:
    """The metrics of ``/metrics``, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._local_counters("requests")
        self.decisions = self._local_counters("decisions")
        self.prompt_tokens = self._local_counters("prompt_tokens")
        self.matched_tokens = self._local_counters("matched_tokens")
        self.cached_tokens = self._local_counters("cached_tokens")
        self.tier_tokens = self._local_counters("tier_tokens")
        self.completion_tokens = self._local_counters("completion_tokens")
        self.transfers = self.counter("transferred_tokens")
        self.disconnects = self.counter("client_disconnects")
        self.tenant_requests = self._local_counters("tenant_requests")
        self.tenant_tokens = self._local_counters("tenant_tokens")
        self.stage = self._local_histograms("stage_seconds")
        self.instance_stage = self._local_histograms("instance_stage_seconds")
        self.queue_wait = self._local_histograms("queue_wait_seconds")
        self.first_byte = self._local_histograms("first_byte_seconds")
        self.duration = self._local_histograms("request_seconds")
        self.estimate_ratio = self._local_histograms("estimate_ratio")
        self._queue_wait = self.queue_wait.of()
        self._prompt_tokens, self._matched_tokens = self.prompt_tokens.of(), self.matched_tokens.of()
        self._cached_tokens, self._completion_tokens = self.cached_tokens.of(), self.completion_tokens.of()
        self._ends: dict[tuple[str, int], tuple[LocalCounter, LocalHistogram, LocalHistogram]] = {}
        """(endpoint, status) -> the counter and histograms of requests with this end."""
        self._stages: dict[str, LocalHistogram] = {}
        self.refreshing: Signal[[]] = Signal()
        """Called before the metrics are exported: owners of gauges update them."""
        self.tables: dict[str, Table] = {}
        """Gauges of the tables kept for clients, by table name."""
        self._table_bytes = self.gauge("table_bytes")
        self._table_entries = self.gauge("table_entries")
        self.refreshing.subscribe(self._show_tables)

    def show_table(self, name: str, table: Table) -> None:
        """Export the size of a table."""
        self.tables[name] = table

    def _show_tables(self) -> None:
        for name, table in self.tables.items():
            self._table_bytes.labels(name).set(table.size_bytes)
            self._table_entries.labels(name).set(len(table))

    def counter(self, name: str) -> Counter:
        """The counter of this name in the table, made in this registry."""
        row = ROUTER.row(name, Kind.COUNTER)
        return Counter(metric_name("router", name), row.help, row.labels, registry=self.registry)

    def gauge(self, name: str) -> Gauge:
        """The gauge of this name in the table, made in this registry."""
        row = ROUTER.row(name, Kind.GAUGE)
        return Gauge(metric_name("router", name), row.help, row.labels, registry=self.registry)

    def _local_counters(self, name: str) -> LocalCounters:
        """A counter that every request updates."""
        row = ROUTER.row(name, Kind.COUNTER)
        return LocalCounters(metric_name("router", name), row.help, row.labels, self.registry)

    def _local_histograms(self, name: str) -> LocalHistograms:
        """A histogram that every request updates."""
        row = ROUTER.row(name, Kind.HISTOGRAM)
        return LocalHistograms(metric_name("router", name), row.help, row.labels, row.buckets, self.registry)

    @property
    def answered(self) -> float:
        """Requests that have ended, of all endpoints."""
        return sum([requests.value for requests, _, _ in self._ends.values()])

    def decided(self, policy: str, reason: str) -> None:
        """Count a routing decision."""
        self.decisions.of(policy, reason).add()

    def count(self, record: Record, endpoint: str, now: float) -> None:
        """Count a request that has ended."""
        ends = self._ends.get((endpoint, record.status))
        if ends is None:
            ends = self._ends[endpoint, record.status] = (
                self.requests.of(endpoint, str(record.status)),
                self.duration.of(endpoint),
                self.first_byte.of(endpoint),
            )
        requests, duration, first_byte = ends
        requests.value += 1.0
        duration.add(now - record.started)
        if record.first_byte is not None:
            first_byte.add(record.first_byte - record.started)
        for stage, seconds in record.stages.items():
            spread = self._stages.get(stage)
            if spread is None:
                spread = self._stages[stage] = self.stage.of(stage)
            spread.add(seconds)
        if record.status == CLIENT_GONE:
            self.disconnects.inc()
        if record.caller.tenant is not None and record.stages:
            self.tenant_requests.of(record.caller.tenant, str(record.status)).add()
        if record.status == 200 and record.stages:
            self._count_tokens(record)

    def _count_tokens(self, record: Record) -> None:
        prompt, cached = record.prompt_tokens or 0, record.cached_tokens or 0
        completion = record.completion_tokens or 0
        self._queue_wait.add(record.queued_s)
        self._prompt_tokens.value += prompt
        self._matched_tokens.value += record.matched_tokens or 0
        self._cached_tokens.value += cached
        self._completion_tokens.value += completion
        if record.instance_stages is not None:
            for stage, seconds in record.instance_stages.items():
                if seconds:
                    self.instance_stage.of(stage).add(seconds)
        for tier, tokens in record.tiers.items():
            self.tier_tokens.of(tier).add(tokens)
        tenant = record.caller.tenant
        if tenant is not None:
            self.tenant_tokens.of(tenant, "prompt").add(prompt)
            self.tenant_tokens.of(tenant, "cached").add(cached)
            self.tenant_tokens.of(tenant, "completion").add(completion)
