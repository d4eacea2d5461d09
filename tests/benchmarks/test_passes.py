"""Every benchmark runs from its command line to its report, on sizes at which its figures mean nothing.

Those that need no SGLang server and take seconds run always, the others in the long form. The short twins of
"index" and "router" are test_index.py and test_router.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.lib.data import data_folder
from sglang_ext.errors import ConfigError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
ALONE: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "index": ((), {"match_vs_sglang_python", "insert_vs_sglang_rust", "hash_match_vs_tree"}),
    "index_events": ((), {"pass_vs_silent"}),
    "policies": ((), {"conversations_p99_cost_vs_session"}),
    "router": (
        ("--parts", "speed", "profile", "rules", "scale"),
        {"added_p50_ms", "fresh_vs_seen_rps", "bytecodes_generate_1_kb", "storm_vs_quiet_p99"},
    ),
    "tiers": (("--parts", "copy", "disk"), {"dram_to_hbm_vs_copy", "disk_read_vs_lmdb_cold"}),
    "transfer": ((), {"shm_vs_copy", "cma_vs_raw", "tcp_vs_raw_worst_case"}),
}
"""Flags, and figures that have to be measured, of benchmarks without SGLang servers."""
SLOW = ("index", "router")
"""Of these: tens of seconds of CPU time."""
WITH_SERVERS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "advisory": (("--systems", "ours"), set()),
    "cost_model": ((), {"op_mean_error", "batch_mean_error"}),
    "disagg": (("--designs", "3"), {"wrong_answers"}),
    "hosts": ((), {"wrong_answers", "pull_50ms_16_in_flight_vs_none", "router_added_ms_by_50ms"}),
    "router": (("--parts", "serving"), {"p99_ttft_vs_session_share2"}),
    "tiers": (("--parts", "servers"), {"load_hidden_disk", "ttft_disk_vs_hbm_1k"}),
}


def report_of(name: str, flags: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Run a benchmark as a person does; its report, as JSON."""
    file = folder / "out.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--tiny", "--json", str(file), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(file.read_text())
    assert "--tiny: too little was measured" in done.stdout
    return found


def check(name: str, flags: tuple[str, ...], figures: set[str], folder: Path) -> None:
    found = report_of(name, flags, folder)
    assert found["name"] == name
    assert found["rows"]
    missing = {figure for figure in figures if found["summary"].get(figure) is None}
    assert missing == set()
    for key, verdict in found["aims"].items():
        measured = found["summary"].get(key)
        assert verdict["aim"]
        assert (verdict["met"] is None) == (measured is None), key


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in ALONE]
)
def test_a_benchmark_runs_whole(name: str, tmp_path: Path) -> None:
    if name == "policies":
        try:
            data_folder(None)
        except ConfigError as error:
            pytest.skip(str(error))
    check(name, *ALONE[name], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_SERVERS)
def test_a_benchmark_with_servers_runs_whole(name: str, tmp_path: Path) -> None:
    check(name, *WITH_SERVERS[name], tmp_path)
