"""``gpu-check`` on this machine without a GPU, and its logic on an emulated one. The emulator says nothing of
speed or order: that these rows are there, and judge, is tested; their words on a GPU are not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cluster.doctor.findings import Level
from sglang_ext.gpu_check.command import main
from sglang_ext.gpu_check.serving import Answer, _compared

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("emulated.py")


@cache
def everything() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def emulated(change: str = "all") -> dict[str, Any]:
    found: dict[str, Any] = everything()[change]
    return found


def rows(found: dict[str, Any], subject: str) -> list[dict[str, str]]:
    return [row for row in found["findings"] if row["subject"] == subject]


def test_a_machine_without_a_gpu_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (row,) = found["findings"]
    assert row["level"] == "problem"
    assert "no GPU" in row["text"]
    assert "sglang-ext doctor" in row["advice"]


@pytest.mark.timeout(1700)
def test_each_step_has_its_rows() -> None:
    found = emulated()
    subjects = {row["subject"] for row in found["findings"]}
    assert subjects >= {"GPU", "libraries", "locked memory", "DRAM tier", "prefill/decode", "limits"}
    assert "H100" in rows(found, "GPU")[0]["text"]
    assert [row["level"] for row in rows(found, "bytes")] == ["ok"] * 4
    assert len(rows(found, "order")) == 2
    assert {row["text"].partition(":")[0] for row in rows(found, "speed")} == {
        *("load in order", "load scattered", "write in order", "write scattered"),
        "load by SGLang's kernel",
    }
    # SGLang's kernel is compiled for a GPU; ours runs in Triton's interpreter.
    assert any("cannot be used here" in row["text"] for row in rows(found, "speed"))
    assert not any("our kernel" in row["text"] for row in rows(found, "speed"))


def test_a_pair_on_this_host_needs_no_rdma() -> None:
    (row,) = rows(emulated(), "prefill/decode")
    assert row["level"] == "ok"
    assert "cuda_ipc" in row["text"]


def test_a_twin_that_does_not_break_is_no_proof_of_order() -> None:
    """Nothing runs beside anything in the emulator."""
    levels = {row["level"] for row in rows(emulated(), "order")}
    assert levels <= {"warning", "problem"}


def test_a_step_that_ends_is_a_problem_and_the_others_go_on() -> None:
    (row,) = rows(emulated(), "gpu-check")
    assert "ZeroDivisionError" in row["text"]
    assert emulated()["problems"] >= 1


def test_damaged_copies_are_problems() -> None:
    levels = [row["level"] for row in rows(emulated("damage"), "bytes")]
    assert levels == ["problem"] * 4


def test_slow_copies_are_warnings_with_what_they_cost() -> None:
    slow = [row for row in rows(emulated("slow"), "speed") if row["text"].startswith(("load in", "load sc"))]
    assert [row["level"] for row in slow] == ["warning"] * 2
    assert all("hits in DRAM" in row["advice"] for row in slow)


def test_a_pass_reads_layers_that_arrive_while_it_runs() -> None:
    """The mover with its threads; the emulator executes queued operations at once."""
    assert emulated("arrives")["same"] == [True] * 6


def test_a_start_says_in_one_line_what_it_found() -> None:
    line = everything()["line"]
    assert "H100" in line
    assert "DRAM tier pinned" in line
    assert "travels by shm (verbs: no RDMA device)" in line
    assert "\n" not in line


def test_another_answer_of_a_tier_is_a_problem_and_another_tier_a_warning() -> None:
    """The judgement of the step with a server."""
    cold = Answer((1, 2), (-0.5, -0.25), "computed", 0.2)
    cases = (
        (Answer((1, 2), (-0.5, -0.25), "DRAM", 0.1), Level.OK, "the same answer"),
        (Answer((1, 3), (-0.5, -0.25), "DRAM", 0.1), Level.PROBLEM, "ANOTHER ANSWER"),
        (Answer((1, 2), (-0.5, -0.26), "DRAM", 0.1), Level.PROBLEM, "ANOTHER ANSWER"),
        (Answer((1, 2), (-0.5, -0.25), "HBM", 0.1), Level.WARNING, "from HBM instead"),
    )
    for found, level, text in cases:
        finding = _compared("DRAM", cold, found)
        assert finding.level is level
        assert text in finding.text
