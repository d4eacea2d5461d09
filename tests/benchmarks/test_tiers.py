"""The benchmark of the tiers runs, and its summary has the keys that others read from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks.tiers.__main__ import main

RATIOS = {
    "dram_to_hbm_vs_copy",
    "hbm_to_dram_vs_copy",
    "disk_to_hbm_vs_fio",
    "load_hidden_dram",
    "load_hidden_disk",
    "ttft_disk_vs_recompute_8k",
    "write_through_decode_cost",
}
SHARES = {"load_hidden_dram", "load_hidden_disk"}


@pytest.mark.long
def test_quick_run(tmp_path: Path) -> None:
    assert main(["--quick", "--json", str(tmp_path / "out.json"), "--disk-path", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["name"] == "tiers"
    assert set(report["summary"]) >= RATIOS
    for name in RATIOS:
        value = report["summary"][name]
        if name.endswith("fio") and not shutil.which("fio"):
            assert value is None
        elif name in SHARES:
            assert 0 <= value <= 1
        elif name == "write_through_decode_cost":
            assert value < 1  # below zero where a neighbour slowed the server that does not write
        else:
            assert value > 0
    assert {row["case"] for row in report["rows"]} >= {"dram_to_hbm 32 KiB", "disk to HBM, cold, direct"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
