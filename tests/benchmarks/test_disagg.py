"""The disagg benchmark's report: what is compared with what, from turns that are made up."""

from __future__ import annotations

import pytest

from benchmarks.common import Report
from benchmarks.disagg import DESIGNS, QUICK, TRUTH, Running, Turn, report_on


def side(name: str, ttft: float, sent: list[float], wrong: int = 0) -> Running:
    design = next(design for design in DESIGNS if design.name == name)
    turns = [
        Turn(number, 100 * number, ttft, 2 * ttft, 0.01, 0, bytes_) for number, bytes_ in enumerate(sent, 1)
    ]
    return Running(design, [], turns=turns, wrong=wrong)


def test_ratios_are_of_means_and_of_late_turns() -> None:
    report = Report("disagg")
    report_on(
        report,
        [
            side(TRUTH, 1.0, [0, 0, 0, 0]),
            side("basic", 0.8, [100, 200, 300, 400]),
            side("1", 0.5, [100, 200, 300, 400]),
            side("3", 0.2, [100, 100, 100, 100], wrong=2),
        ],
    )
    summary = report.summary
    assert summary["ttft_c3_vs_c1_turn3"] == pytest.approx(0.4)
    assert summary["jct_c3_vs_basic"] == pytest.approx(0.25)
    assert summary["bytes_per_turn_growth_c1"] == pytest.approx(2.0)
    assert summary["bytes_per_turn_growth_c3"] == pytest.approx(1.0)
    assert summary["wrong_answers"] == 2
    assert summary["ttft_c3_vs_stock_mooncake_tcp"] is None, "left out, not zero"
    assert {row["case"] for row in report.rows} == {TRUTH, "basic", "1", "3"}


def test_the_quick_form_has_what_the_summary_compares() -> None:
    names = {design.name for design in DESIGNS}
    assert set(QUICK) <= names
    assert {TRUTH, "basic", "1", "3"} <= set(QUICK)
