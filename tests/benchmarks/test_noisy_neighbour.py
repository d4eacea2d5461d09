"""The benchmark of noisy neighbours runs, and says what it measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.noisy_neighbour.__main__ import MECHANISMS, RATIO, main

pytestmark = pytest.mark.slow


def test_it_measures_what_it_was_asked_for(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    assert main(["--tiny", "--mechanisms", "documents", "priorities", "--json", str(found)]) == 0
    report = json.loads(found.read_text())
    assert [row["case"] for row in report["rows"]] == ["documents", "priorities"]
    for row in report["rows"]:
        assert row["b_failed"] == 0
        assert row["a_done"] > 0
    assert {f"p99_{name}_vs_alone" for name in MECHANISMS} == report["aims"].keys()
    assert report["aims"]["p99_documents_vs_alone"]["aim"] == f"at most {RATIO}"
