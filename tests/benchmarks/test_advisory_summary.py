"""The advisory benchmark's summary and figures, from made-up rows."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.advisory.fleet import BY_LAYER, WHOLE
from benchmarks.advisory.plan import AdvisoryOptions
from benchmarks.advisory.plots import FIGURES, draw
from benchmarks.advisory.summary import add_to, summarise
from benchmarks.lib.common import Report, Row, Value
from benchmarks.lib.plots import Axis, bars, lines

RECOMPUTE, STICKY, OURS, STOCK = "recompute", "sticky swapping", "ours", "stock, cache_aware"


def system(name: str, users: int, latency: float, **more: Value) -> Row:
    return {
        "case": "systems", "system": name, "users": users, "normalized_ms": latency, "ttft_p50_ms": 1.0,
        "max_over_median": 1.0, **more,
    }  # fmt: skip


def report(*rows: Row) -> Report:
    found = Report("advisory")
    found.rows = list(rows)
    return found


def test_users_are_compared_at_one_latency() -> None:
    rows = [system(RECOMPUTE, 2, 100.0), system(RECOMPUTE, 4, 150.0), system(OURS, 16, 100.0)]
    between = report(*rows, system(RECOMPUTE, 8, 900.0), system(OURS, 24, 200.0))
    summarise(between)
    assert between.summary["users_vs_recompute"] == pytest.approx(20 / 4)
    assert between.summary["users_vs_stock_router"] is None
    bounded = report(*rows, system(STOCK, 8, 300.0))
    summarise(bounded)
    # Ours serves 16 users or more, stock fewer than 8.
    assert bounded.summary["users_vs_stock_router"] == pytest.approx(16 / 8)
    assert "16 or more" in bounded.notes[-1]
    assert "fewer than 8" in bounded.notes[-1]


def test_the_load_is_that_of_the_part_made_for_it_where_there_is_one() -> None:
    rows = [
        system(OURS, 8, 1.0, max_over_median=1.4),
        system(OURS, 16, 1.0, max_over_median=1.3),
        system(STICKY, 16, 1.0, max_over_median=1.2),
    ]
    without = report(*rows)
    summarise(without)
    assert without.summary["max_over_median_load"] == 1.3
    assert without.summary["max_over_median_load_sticky"] == 1.2
    balance: list[Row] = [
        {"case": "balance", "system": name, "users": 40, "max_over_median": ratio}
        for name, ratio in ((OURS, 1.1), (STICKY, 1.6))
    ]
    summarise(both := report(*rows, *balance))
    assert both.summary["max_over_median_load"] == 1.1
    assert both.summary["max_over_median_load_sticky"] == 1.6


def test_sessions_by_layer_are_compared_with_as_many_as_whole_ones() -> None:
    rows: list[Row] = [
        {"case": "layers", "system": system.name, "announced": announced, "within_1_1": within}
        for system, announced, within in ((WHOLE, 6, 6), (WHOLE, 12, 4), (BY_LAYER, 6, 6), (BY_LAYER, 12, 9))
    ]
    summarise(found := report(*rows))
    assert found.summary["sessions_by_layer_vs_whole"] == 1.5
    assert len(found.rows) == 4


def test_the_summary_reports_the_hidden_share_at_the_least_demand_for_hbm() -> None:
    found = report(
        {"case": "hidden", "users": 24, "hidden": 0.3, "hbm_wanted": 1.4},
        {"case": "hidden", "users": 12, "hidden": 0.9, "hbm_wanted": 0.7},
    )
    summarise(found)
    assert found.summary["hidden_share"] == 0.9


def test_the_cost_of_missing_hints_comes_with_its_noise() -> None:
    found = report(
        {"case": "10% of hints missing", "users": 24, "cost": 0.5},
        {"case": "10% of hints missing, by the line", "users": 24, "cost": 0.02, "noise": 0.01},
    )
    summarise(found)
    assert found.summary == {"missed10_cost": 0.02, "missed10_noise": 0.01}


def test_a_report_goes_on_with_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    first = report(system(RECOMPUTE, 2, 100.0), system(RECOMPUTE, 4, 150.0), system(OURS, 8, 100.0))
    first.notes = ["servers (ours): run before other work of this machine"]
    path.write_text(json.dumps(first.as_dict()))
    second = report()
    add_to(second, path)
    second.rows += [system(OURS, 8, 90.0), system(OURS, 24, 240.0)]
    summarise(second)
    assert [row["normalized_ms"] for row in second.rows] == [100.0, 150.0, 90.0, 240.0]
    assert second.summary["users_vs_recompute"] == pytest.approx((8 + 16 * 60 / 150) / 4)
    assert second.notes[0] == first.notes[0]


def test_a_report_of_other_servers_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "first.json"
    first = report(system(OURS, 8, 100.0))
    first.note(AdvisoryOptions.of(["--disk-tokens", "64"], "advisory", "").servers)
    path.write_text(json.dumps(first.as_dict()))
    second = report()
    second.note(AdvisoryOptions.of([], "advisory", "").servers)
    with pytest.raises(ValueError, match=r"other servers .*disk of 64 tokens.*--disk-tokens"):
        add_to(second, path)
    same = report()
    same.notes = list(first.notes)
    add_to(same, path)
    assert same.rows == first.rows


def test_hints_along_edges_are_compared_with_none() -> None:
    found = report(
        {"case": "agents, all edges", "system": "ours without hints", "of_it_ttft_s": 4.0},
        {"case": "agents, all edges", "system": OURS, "of_it_ttft_s": 3.0},
        {"case": "agents, fan-out", "system": OURS, "of_it_ttft_s": 3.0},
    )
    summarise(found)
    assert found.summary == {"all_edges_wait_vs_unhinted": 0.75}


@pytest.mark.parametrize("text", ["", "[]", '{"name": "transfer", "rows": []}', '{"name": "advisory"}'])
def test_what_is_no_report_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"--add-to .*other\.json.*give the file of --json"):
        add_to(report(), path)


# -- figures ------------------------------------------------------------------------------------------


def test_a_figure_is_drawn_for_each_part_that_was_measured(tmp_path: Path) -> None:
    rows: list[Row] = [
        system(RECOMPUTE, 2, 100.0),
        system(OURS, 8, 90.0),
        system(OURS, 16, 120.0),
        {"case": "balance", "system": STICKY, "max_over_median": 1.6},
        {"case": "balance", "system": OURS, "max_over_median": 1.1},
        {"case": "prefill-heavy", "system": OURS, "per_s": 2.5},
        {"case": "agents", "system": OURS, "run_s": 11.0},
        {"case": "0% of hints missing", "normalized_ms": 50.0},
        {"case": "10% of hints missing", "normalized_ms": 52.0},
        {"case": "10% of hints missing, by the line", "cost": 0.04, "noise": 0.01},
        {"case": "10% high priority", "system": OURS, "priority": "high", "tokens_per_s": 30.0},
        {"case": "30% high priority", "system": OURS, "priority": "high", "tokens_per_s": 28.0},
        {"case": "30% high priority", "system": OURS, "priority": "regular", "tokens_per_s": 20.0},
    ]
    written = draw(rows, tmp_path / "new" / "folder")
    assert [path.stem for path in written] == list(FIGURES)
    assert not draw([], tmp_path)
    texts = {path.stem: _texts(path.read_text()) for path in written}
    assert {"1.6", "1.1", "sticky swapping", "ours"} <= texts["figure_14_balance"]
    assert {"0%", "10%", "50", "52"} <= texts["figure_17_missing"]
    assert {"ours, high", "ours, regular", "30% high", "28", "20"} <= texts["figure_18_priority"]


def _texts(svg: str) -> set[str]:
    return {element.text or "" for element in ElementTree.fromstring(svg).iter() if element.text}


def test_bars_are_as_high_as_their_values() -> None:
    svg = ElementTree.fromstring(bars("<&>", Axis("s", 4.0), ["a", "b"], {"x": [1.0, 2.0], "y": [None, 4.0]}))
    heights = [
        float(each.attrib["height"])
        for each in svg.iter("{http://www.w3.org/2000/svg}rect")
        if "y" in each.attrib and each.attrib["width"] not in ("640", "10")
    ]
    assert len(heights) == 3
    assert heights[1] == pytest.approx(2 * heights[0], abs=0.2)
    assert heights[2] == pytest.approx(4 * heights[0], abs=0.3)
    with pytest.raises(ValueError, match="2 values"):
        bars("", Axis("s"), ["a", "b"], {"x": [1.0]})


def test_lines_go_through_their_points() -> None:
    svg = ElementTree.fromstring(lines("", Axis("users"), Axis("ms"), {"x": {10.0: 5.0, 20.0: 10.0}}))
    (line,) = svg.iter("{http://www.w3.org/2000/svg}polyline")
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    zero = 380 - 84
    assert (zero - y2) == pytest.approx(2 * (zero - y1), abs=0.2)
    assert (x2 - 70) == pytest.approx(2 * (x1 - 70), abs=0.2)
    assert len(list(svg.iter("{http://www.w3.org/2000/svg}circle"))) == 2
