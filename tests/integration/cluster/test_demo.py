"""`make demo`: the report is complete, both tiers were used, KV came back to prefill.

It belongs to the long form. Its short twins: test_cluster starts such a cluster, test_same_answer compares
the answers from all tiers, test_pd has the KV that comes back, and tests/demo the report.
"""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise

import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def lines_of(*arguments: str) -> list[str]:
    """The lines that the demo prints."""
    result = subprocess.run(
        [sys.executable, "-m", "examples.demo", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_both_tiers_are_reused_and_the_answers_are_the_same() -> None:
    lines = lines_of("--part", "together", "--conversations", "6", "--turns", "2")
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
    (comparison,) = [line for line in lines if line.startswith("With caching off")]
    last = re.match(
        r"With caching off, the same 12 turns computed ([\d,]+) prompt tokens instead of ([\d,]+), "
        r"and the median time to first token was \d+ ms instead of \d+ ms \(median ratio ([\d.]+)\)\.",
        comparison,
    )
    assert last is not None, comparison
    assert int(last[1].replace(",", "")) == tokens("HBM") + tokens("DRAM") + computed
    assert int(last[2].replace(",", "")) == computed


def test_what_decode_has_of_a_prompt_grows_when_it_comes_back_to_prefill() -> None:
    """Under PD-Caching-1 decode never has any of a prompt, under 3 more of it with each turn."""
    lines = lines_of("--part", "apart")
    apart = [[int(cell) for cell in line.split()] for line in lines if re.match(r" {3}\d( +\d+){7}$", line)]
    assert [turn[0] for turn in apart] == list(range(1, 6))
    assert [turn[3] for turn in apart] == [0] * 5
    assert all(a[6] < b[6] for a, b in pairwise(apart))
    assert all(a[5] > a[2] for a in apart[1:])
    assert lines[-1].endswith("Answers equal: 5 of 5.")
