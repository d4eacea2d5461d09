"""Counts of requests are shown as Prometheus' own library would show them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram

from sglang_ext.router.telemetry.local_metrics import LocalCounters, LocalHistograms

BOUNDS = (0.5, 1.0, 2.5)
label = st.sampled_from(["a", 'b "quoted"', ""])


def shown(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.tuples(label, st.sampled_from([0.0, 0.4, 0.5, 0.75, 1.0, 2.5, 2.6, 1e9])), max_size=20))
def test_the_same_as_the_library(values) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tallies = LocalCounters("n", "How many", ["why"], ours)
    spreads = LocalHistograms("s", "How long", ["why"], BOUNDS, ours)
    counter = Counter("n", "How many", ["why"], registry=theirs)
    histogram = Histogram("s", "How long", ["why"], buckets=BOUNDS, registry=theirs)
    for why, value in values:
        tallies.of(why).add(value)
        spreads.of(why).add(value)
        counter.labels(why).inc(value)
        histogram.labels(why).observe(value)
    assert shown(ours) == shown(theirs)


def test_without_labels_there_is_one_from_the_start() -> None:
    registry = CollectorRegistry()
    LocalCounters("n", "How many", (), registry)
    LocalHistograms("s", "How long", (), BOUNDS, registry)
    assert shown(registry)["n_total", ()] == 0
    assert shown(registry)["s_count", ()] == 0
