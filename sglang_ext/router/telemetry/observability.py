"""The router's Prometheus metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge

from sglang_ext.router.telemetry.local_metrics import (
    LocalCounter,
    LocalCounters,
    LocalHistogram,
    LocalHistograms,
)
from sglang_ext.router.telemetry.record import CLIENT_GONE, Record
from sglang_ext.signals import Signal
from sglang_ext.stages import RATIO_BUCKETS, REQUEST_BUCKETS, STAGE_BUCKETS, metric_name


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
        self.requests = self._local_counters("requests", "Requests answered", "endpoint", "status")
        self.decisions = self._local_counters("decisions", "Routing decisions", "policy", "reason")
        self.prompt_tokens = self._local_counters("prompt_tokens", "Prompt tokens of answered requests")
        self.matched_tokens = self._local_counters(
            "matched_tokens", "Prompt tokens the router believed to be cached"
        )
        self.cached_tokens = self._local_counters(
            "cached_tokens", "Prompt tokens that workers report as cached"
        )
        self.tier_tokens = self._local_counters(
            "tier_tokens", "Prompt tokens that workers report as cached, where they tell the tier", "tier"
        )
        self.completion_tokens = self._local_counters("completion_tokens", "Tokens generated")
        self.transfers = self.counter(
            "transferred_tokens",
            "Tokens whose KV went from one instance to another: fetched, or of prompts that were handed over",
            "source", "target", "how",
        )  # fmt: skip
        self.disconnects = self.counter("client_disconnects", "Clients that went away before the end")
        self.tenant_requests = self._local_counters(
            "tenant_requests", "Generation requests", "tenant", "status"
        )
        self.tenant_tokens = self._local_counters(
            "tenant_tokens", "Tokens of generation requests", "tenant", "kind"
        )
        self.stage = self._local_histograms(
            "stage_seconds", "Time added by the router before a request is sent on", STAGE_BUCKETS, "stage"
        )
        self.instance_stage = self._local_histograms(
            "instance_stage_seconds",
            "Time that answered requests spent at their instances, by stage, where these tell",
            REQUEST_BUCKETS,
            "stage",
        )
        self.queue_wait = self._local_histograms(
            "queue_wait_seconds", "Time that requests waited for an instance with room", REQUEST_BUCKETS
        )
        self.first_byte = self._local_histograms(
            "first_byte_seconds", "Time from a request to the first byte of its answer", REQUEST_BUCKETS,
            "endpoint",
        )  # fmt: skip
        self.duration = self._local_histograms(
            "request_seconds", "Time from a request to the end of its answer", REQUEST_BUCKETS, "endpoint"
        )
        self.estimate_ratio = self._local_histograms(
            "estimate_ratio", "Observed over expected seconds until the first token, and of terms of that",
            RATIO_BUCKETS, "instance", "term",
        )  # fmt: skip
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
        self._table_bytes = self.gauge("table_bytes", "Memory of a table that clients fill", "table")
        self._table_entries = self.gauge("table_entries", "Entries of a table that clients fill", "table")
        self.refreshing.subscribe(self._show_tables)

    def show_table(self, name: str, table: Table) -> None:
        """Export the size of a table."""
        self.tables[name] = table

    def _show_tables(self) -> None:
        for name, table in self.tables.items():
            self._table_bytes.labels(name).set(table.size_bytes)
            self._table_entries.labels(name).set(len(table))

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A new counter in this registry."""
        return Counter(metric_name("router", name), text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A new gauge in this registry."""
        return Gauge(metric_name("router", name), text, labels, registry=self.registry)

    def _local_counters(self, name: str, text: str, *labels: str) -> LocalCounters:
        """A new counter that every request updates."""
        return LocalCounters(metric_name("router", name), text, labels, self.registry)

    def _local_histograms(
        self, name: str, text: str, bounds: Sequence[float], *labels: str
    ) -> LocalHistograms:
        """A new histogram that every request updates."""
        return LocalHistograms(metric_name("router", name), text, labels, bounds, self.registry)

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
