"""How the benchmark of the cost model judges batches."""

from __future__ import annotations

import pytest

from benchmarks.cost_model.__main__ import BATCHES, compare_batches
from benchmarks.lib.common import Report
from sglang_ext.cost_model import Attention, Batch, Linear, OperatorLevel, Outside, Rest, Waves

LEVEL = OperatorLevel(
    2, 64, 4, (Linear(64, 64, 2),), Waves(1, 16, 16, 1e9), Attention.of_work(1e-7, 0, 0, 0, 1e-3),
    Rest(2e-3, 1e-6), Outside(5e-3),
)  # fmt: skip


def measured(factor: float) -> list[float]:
    """Batches that take ``factor`` times the level's prediction."""
    found = []
    for prompts in BATCHES:
        batch = Batch()
        for new, context in prompts:
            batch = batch.adding(new, context)
        found.append(factor * (LEVEL.batch_s(batch) - 5e-3))
    return found


@pytest.mark.parametrize(("factor", "error"), [(1.0, 0.0), (1.25, 0.2)])
def test_batches_are_compared_with_exec_over_them_and_with_the_sum(factor: float, error: float) -> None:
    report = Report("cost_model", {})
    compare_batches(report, LEVEL, measured(factor))
    assert report.summary["batch_mean_error"] == pytest.approx(error)
    assert report.summary["batch_mean_error_as_sum"] > report.summary["batch_mean_error"]
    assert [row["prompts"] for row in report.rows] == [2, 2, 4, 4, 8, 8]
