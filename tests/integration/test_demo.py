"""`make demo` in a short form: the report is complete, both tiers were used, and nothing is left."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest


@pytest.mark.timeout(600)
def test_both_tiers_are_reused_and_the_answers_are_the_same() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "sglang_ext.demo", "--conversations", "6", "--turns", "2"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    turns = [line.split() for line in lines if re.match(r"[A-F]  +[12]  +server-[01] ", line)]
    assert len(turns) == 12
    assert {turn[2] for turn in turns} == {"server-0", "server-1"}

    def tokens(name: str) -> int:
        (found,) = [m[1] for line in lines if (m := re.match(rf"  {name} +([\d,]+) tokens", line))]
        return int(found.replace(",", ""))

    computed = tokens("computed")
    assert tokens("HBM") > 0
    assert tokens("DRAM") > 0
    assert "Answers equal to those with caching off: 12 of 12." in lines
    last = re.match(
        r"With caching off, the same 12 turns computed ([\d,]+) prompt tokens instead of ([\d,]+), "
        r"and the median time to first token was \d+ ms instead of \d+ ms \(median ratio ([\d.]+)\)\.",
        lines[-1],
    )
    assert last is not None, lines[-1]
    assert int(last[1].replace(",", "")) == tokens("HBM") + tokens("DRAM") + computed
    assert int(last[2].replace(",", "")) == computed
