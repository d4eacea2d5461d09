"""Counters and histograms that every request updates: plain numbers, exported when Prometheus scrapes.

prometheus-client takes a lock for each update, and scans the buckets of a histogram one by one. For a dozen
metrics that takes as long as choosing an instance. These metrics are for one thread, the event loop's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class LocalCounter:
    """A number that grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Add ``amount``."""
        self.value += amount


class LocalCounters(Collector):
    """A counter: a tally for each set of labels.

    Args:
        name: without ``_total``, which Prometheus appends.
        text: help text.
        labels: names of the labels. A counter without labels has one tally, from the start.
    """

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self.name, self._text, self.labels = name, text, labels
        self._local_counters: dict[tuple[str, ...], LocalCounter] = {}
        if not labels:
            self.of()
        registry.register(self)

    def of(self, *labels: str) -> LocalCounter:
        """The tally of these labels."""
        tally = self._local_counters.get(labels)
        if tally is None:
            tally = self._local_counters[labels] = LocalCounter()
        return tally

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        family = CounterMetricFamily(self.name, self._text, labels=self.labels)
        for labels, tally in self._local_counters.items():
            family.add_metric(labels, tally.value)
        yield family


class LocalHistogram:
    """Counts of values by bucket.

    Args:
        bounds: the largest value of each bucket, ascending; one more bucket has no bound.
    """

    __slots__ = ("_bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self.counts[bisect_left(self._bounds, value)] += 1
        self.total += value


class LocalHistograms(Collector):
    """A histogram: a spread for each set of labels.

    Args:
        name, text, labels: as for ``LocalCounters``.
        bounds: see ``LocalHistogram``.
    """

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self.name, self._text, self.labels, self._bounds = name, text, labels, bounds
        self._local_histograms: dict[tuple[str, ...], LocalHistogram] = {}
        if not labels:
            self.of()
        registry.register(self)

    def of(self, *labels: str) -> LocalHistogram:
        """The spread of these labels."""
        spread = self._local_histograms.get(labels)
        if spread is None:
            spread = self._local_histograms[labels] = LocalHistogram(self._bounds)
        return spread

    def drop(self, first: str) -> None:
        """Drop all histograms with this first label."""
        for labels in [labels for labels in self._local_histograms if labels[0] == first]:
            del self._local_histograms[labels]

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        family = HistogramMetricFamily(self.name, self._text, labels=self.labels)
        for labels, spread in self._local_histograms.items():
            buckets, so_far = [], 0
            for bound, count in zip((*self._bounds, float("inf")), spread.counts, strict=True):
                so_far += count
                buckets.append((str(float(bound)) if bound != float("inf") else "+Inf", float(so_far)))
            family.add_metric(labels, buckets, spread.total)
        yield family
