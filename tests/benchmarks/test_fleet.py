"""The benchmark of large simulated fleets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import benchmarks.fleet.__main__ as fleet
from benchmarks.fleet import papers
from benchmarks.fleet.cells import Cell, measured
from benchmarks.policies.workloads import SimRequest, SimSession
from sglang_ext.cost_model import CostModel
from sglang_ext.cost_model.estimated import DEVICES
from sglang_ext.simulator.settings import Settings


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


@pytest.mark.parametrize(
    ("config", "kib"), [(papers.LLAMA_2_13B, 800), (papers.LLAMA_3_8B, 128), (papers.MISTRAL_LARGE, 352)]
)
def test_models_have_the_papers_bytes_of_kv_a_token(config: dict[str, int], kib: int) -> None:
    assert papers.costs(config, DEVICES["h100"], 1, 1e9).kv_bytes_per_token == kib * 1024


def test_an_a100_is_slower_than_an_h100_by_its_data_sheet() -> None:
    slow, fast = (
        CostModel(papers.costs(papers.LLAMA_3_8B, device, 1, 1e9))
        for device in (papers.A100, DEVICES["h100"])
    )
    assert slow.exec_s(100_000, 0) / fast.exec_s(100_000, 0) == pytest.approx(989 / 312, rel=0.02)
    assert slow.decode_s(1) / fast.decode_s(1) == pytest.approx(3.35 / 2.039, rel=0.02)


@pytest.mark.parametrize("wrap", [papers._same, papers.Recomputed])
def test_users_go_on_to_another_conversation_and_recomputed_prompts_share_nothing(wrap: type) -> None:
    requests = (SimRequest(tuple(range(40)), 40), SimRequest(tuple(range(60)), 40, think_s=1.0))
    first = (wrap(papers.UserSession([SimSession("talk", requests)], user, 3)) for user in range(3))
    settings = Settings(instances=2, requests=12, policy="session")
    outcome = papers.closed(settings, CostModel(), first, wrap)
    assert outcome.requests == 12
    reused = sum(outcome.hits.values())
    # Five conversations have had both of their turns, two have begun.
    assert reused == (0 if wrap is papers.Recomputed else 5 * 41 * 16)
