"""Metrics of one rank, in its scheduler process; the server's ``/metrics`` shows them.

SGLang runs Prometheus in its multi-process mode, in which every process writes its values to files that the
HTTP process reads. A metric therefore has to be made after SGLang has set that mode up, and reaches
``/metrics`` from any registry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_ext.protocol.metrics import Kind, Metric, MetricTable, metric_name

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


class RankMetrics:
    """The metrics of a table, each with the rank as its last label.

    Args:
        rank: distinguishes the ranks of a server.
    """

    def __init__(self, table: MetricTable, rank: int) -> None:
        from prometheus_client import CollectorRegistry

        self.registry = CollectorRegistry()
        self._table = table
        self._rank = str(rank)
        self._made = {row.name: made(table, row, self.registry) for row in table.rows}
        self._totals: dict[tuple[str, ...], int] = {}

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._table.row(name, Kind.GAUGE)
        gauge: Gauge = self._made[name]
        gauge.labels(*labels, self._rank).set(value)

    def count(self, name: str, total: int, *labels: str) -> None:
        """Raise a counter by the growth of a total since the last call with these labels."""
        self._table.row(name, Kind.COUNTER)
        before, self._totals[name, *labels] = self._totals.get((name, *labels), 0), total
        counter: Counter = self._made[name]
        counter.labels(*labels, self._rank).inc(max(0, total - before))

    def count_events(self, name: str, totals: Mapping[Any, int]) -> None:
        """Publish a counter whose one label, beside the rank, is the key of its totals: a text, or an
        enum whose value is one."""
        for event, total in totals.items():
            self.count(name, total, str(getattr(event, "value", event)))

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add a value to a histogram."""
        self._table.row(name, Kind.HISTOGRAM)
        histogram: Histogram = self._made[name]
        histogram.labels(*labels, self._rank).observe(value)


def made(table: MetricTable, row: Metric, registry: CollectorRegistry) -> Any:
    """The metric of a row, in a registry."""
    from prometheus_client import Counter, Gauge, Histogram

    name, labels = metric_name(table.part, row.name), table.labels(row)
    if row.kind is Kind.COUNTER:
        return Counter(name, row.help, labels, registry=registry)
    if row.kind is Kind.HISTOGRAM:
        return Histogram(name, row.help, labels, registry=registry, buckets=row.buckets)
    return Gauge(name, row.help, labels, registry=registry, multiprocess_mode="mostrecent")
