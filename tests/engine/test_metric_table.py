"""The tables of a server's metrics: each row is published, and nothing that no row has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from sglang_ext import engine
from sglang_ext.disagg.transports.rails import Nic, Place, Rail
from sglang_ext.engine import rank_metrics
from sglang_ext.engine.cache import metrics
from sglang_ext.engine.metric_table import PD, REQUESTS, cache_table, weighed
from sglang_ext.engine.pd.messages import ReturnEnd
from sglang_ext.engine.pd.metrics import AgentMetrics, AgentState
from sglang_ext.engine.rank_metrics import RankMetrics
from sglang_ext.protocol.metrics import Kind, Metric, MetricTable, metric_name
from sglang_ext.tiers import Tier, tiers_below

PUBLISHING = {"set", "count", "observe", "count_events"}


def published(source: str) -> set[str]:
    """The names of metrics that a module publishes, as far as they are written out."""
    return {
        node.args[0].value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in PUBLISHING
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def test_the_cache_and_its_planners_publish_every_row_and_no_other_name() -> None:
    by_tier = {weighed(tier) for tier in tiers_below(Tier.HBM)}
    source = Path(inspect.getfile(metrics)).read_text("utf-8")
    texts = [path.read_text("utf-8") for path in Path(inspect.getfile(engine)).parent.rglob("*.py")]
    planners = [text for text in texts if "def show(self, metrics: RankMetrics)" in text]
    assert len(planners) > 3
    names = {row.name for row in cache_table().rows}
    assert set().union(*map(published, (source, *planners))) == names - by_tier
    assert "weighed(tier)" in source
    assert "failures" in published(source.replace('"faults"', '"failures"'))


def samples(registry: CollectorRegistry) -> dict[str, dict[tuple[str, ...], float]]:
    """The values by labels of each metric that has any."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in registry.collect():
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found.setdefault(family.name, {})[tuple(sample.labels.values())] = sample.value
    return found


def test_an_agent_publishes_every_row() -> None:
    state: dict[str, Any] = {
        "live": {"prefill": 1},
        "ends": {"prefill": {"released": 4}},
        "leased_pages": 5,
        "transport_bytes": {"shm": 6},
        "transactions": {"shm": 7},
        "returns": {"decode": {next(iter(ReturnEnd)): 8}},
        "set_aside": {"HBM": 9},
        "prefill_servers": {"connected": 10},
        "connects": {"ahead": 11},
        "rail": Rail(Nic("mlx5_0", 1, Place()), "named"),
        "calls": {"transfer": 12},
        "pushed": {"ahead": 13},
    }
    made = AgentMetrics(3)
    made.update(AgentState(**state))
    found = samples(made.registry)
    assert set(found) == {metric_name("pd", row.name) for row in PD.rows}
    assert all(labels[-1] == "3" for values in found.values() for labels in values)
    assert found["sglang_ext_pd_handovers"] == {("prefill", "released", "3"): 4}
    assert found["sglang_ext_pd_rdma_device"] == {("mlx5_0:1", "named", "3"): 1}


def test_counters_follow_totals_and_never_fall() -> None:
    made = RankMetrics(PD, 0)
    for total in (3, 5, 0, 2):  # a part that began anew counts from zero
        made.count("read_bytes", total, "tcp")
    assert samples(made.registry)["sglang_ext_pd_read_bytes"] == {("tcp", "0"): 7}


def test_a_name_of_another_kind_and_one_that_no_row_has_are_refused() -> None:
    made = RankMetrics(PD, 0)
    with pytest.raises(KeyError, match="read_bytes is a counter"):
        made.set("read_bytes", 1, "tcp")
    with pytest.raises(KeyError, match="gone"):
        made.count("gone", 1)


def test_two_rows_of_one_name_are_noticed() -> None:
    row = Metric("x", Kind.GAUGE, "blocks", (), "X.")
    with pytest.raises(AssertionError, match="two metrics of cache have one name"):
        MetricTable("cache", (row, row)).row("x", Kind.GAUGE)


def test_each_row_says_what_it_counts_and_histograms_have_buckets() -> None:
    for table in (cache_table(), PD, REQUESTS):
        for name, row in table.exported():
            assert name.startswith(f"sglang_ext_{table.part}_")
            assert name.endswith("_total") == (row.kind is Kind.COUNTER)
            assert row.unit
            assert row.help
            assert bool(row.buckets) == (row.kind is Kind.HISTOGRAM)
            assert rank_metrics.made(table, row, CollectorRegistry()) is not None
