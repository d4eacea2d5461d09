"""The benchmark of large simulated fleets."""

from __future__ import annotations

import json
from pathlib import Path

import benchmarks.fleet.__main__ as fleet
from benchmarks.fleet.cells import Cell, measured


def test_every_part_runs_and_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    results, plots, report = tmp_path / "results", tmp_path / "plots", tmp_path / "report.json"
    arguments = ["--tiny", "--results", str(results), "--plots", str(plots), "--json", str(report)]
    assert fleet.main(arguments) == 0
    first = json.loads(report.read_text())
    kept = {path: path.stat().st_mtime_ns for path in results.iterdir()}
    assert fleet.main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in results.iterdir()} == kept
    assert json.loads(report.read_text())["rows"] == first["rows"]
    assert {row["run"] for row in first["rows"]} >= {*fleet.POLICIES, *fleet.MECHANISMS, *fleet.DEATHS}
    assert {path.name for path in plots.iterdir()} == {
        "fleet-thousand.svg", "fleet-policies-5.svg", "fleet-policies-2.5.svg", "fleet-mechanisms.svg"
    }  # fmt: skip


def test_settings_name_a_cell(tmp_path: Path) -> None:
    """The title does not, and another setting has another file."""
    first = measured(Cell("a", "instances=2,requests=4"), tmp_path)
    assert measured(Cell("b", "instances=2,requests=4"), tmp_path) == first
    measured(Cell("a", "instances=2,requests=5"), tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
