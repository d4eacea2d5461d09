"""Paired measuring and the report of a benchmark."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.lib.common import Options, Report, Samples, at_least, at_most, paired, percentile
from benchmarks.lib.quiet import go_first, grouped_by_session


def test_legs_take_turns_and_warmup_is_not_counted() -> None:
    calls: list[str] = []
    legs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    samples = paired(legs, rounds=5, warmup=2, before={"a": lambda: calls.append("before a")})
    assert {leg: len(times) for leg, times in samples.seconds.items()} == {"a": 5, "b": 5}
    assert calls.count("a") == calls.count("b") == calls.count("before a") == 7
    rounds = [tuple(c for c in calls[i : i + 3] if c != "before a") for i in range(0, 21, 3)]
    assert {("a", "b"), ("b", "a")} == set(rounds)
    assert all(calls[i + 1] == "a" for i, call in enumerate(calls) if call == "before a")


def test_ratio_is_the_median_of_pairs() -> None:
    samples = Samples({"slow": [2.0, 30.0, 4.0], "fast": [1.0, 10.0, 1.0]})
    assert samples.ratio("slow", "fast") == 3.0
    assert samples.median("slow") == 4.0
    assert samples.p("slow", 50) == 4.0


def test_a_deadline_ends_measuring_after_three_rounds() -> None:
    samples = paired({"a": lambda: None}, rounds=10_000, deadline=1e-9)
    assert len(samples.seconds["a"]) == 3


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 5), (99, 10), (100, 10)])
def test_percentile(percent: float, value: float) -> None:
    assert percentile(range(10, 0, -1), percent) == value


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_report_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = Options.of(["--quick", "--json", str(tmp_path / "out.json")], "demo", __doc__)
    assert options.rounds(9, quick=2) == 2
    aims = {"ratio": at_least(0.8), "cost": at_most(0.03), "not_measured": at_least(1.0)}
    report = Report("demo", aims)
    report.add("copy [bold]", gb_s=12.3456, ok=True)
    report.add("read", gb_s=None, ok=False)
    report.add("other", microseconds=12345.6)
    report.note("fio is not installed")
    report.summary["ratio"] = 0.8512
    report.summary["cost"] = 0.04
    assert report.finish(options) == 0
    printed = capsys.readouterr().out
    for text in ("copy [bold]", "12.3", "12,346", "note: fio"):
        assert text in printed
    lines = [line.split() for line in printed.splitlines()]
    row = {line[1]: line for line in lines if len(line) > 3 and line[1] in aims}
    assert row["ratio"][3:-1] == ["0.851", "│", "at", "least", "0.8", "│", "met"]
    assert row["cost"][3:-1] == ["0.04", "│", "at", "most", "0.03", "│", "missed"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written) == ["name", "environment", "rows", "summary", "aims", "notes"]
    assert written["rows"][0] == {"case": "copy [bold]", "gb_s": 12.3456, "ok": True}
    assert written["aims"] == {
        "ratio": {"aim": "at least 0.8", "met": True},
        "cost": {"aim": "at most 0.03", "met": False},
        "not_measured": {"aim": "at least 1", "met": None},
    }
    assert written["environment"]["cores"] >= 1
    assert written["environment"]["packages"]["numpy"]


def test_processes_go_before_others_where_the_kernel_shares_by_session_and_where_it_does_not() -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        assert go_first([child.pid], 3)
        if grouped_by_session():
            assert "nice 3" in Path(f"/proc/{child.pid}/autogroup").read_text(encoding="ascii")
        else:
            assert os.getpriority(os.PRIO_PROCESS, child.pid) == 3
    finally:
        child.kill()
        child.wait()
    assert not go_first([child.pid], 3), "it has ended"
