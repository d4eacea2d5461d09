"""The parts of a test run, and how they make its status (`scripts/run_tests.py`)."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "run_tests.py"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([0, 0, 0, 0], 0),
        ([0, 1, 0], 1),
        ([2, 1, 0], 2),
        ([5, 0, 5], 0),
        ([5, 5, 5], 5),
        ([5, 1, 5], 1),
        ([-11, 0, 0], 139),
        ([-15, 1, 0], 143),
    ],
)
def test_a_run_is_as_good_as_its_worst_part(statuses: list[int], expected: int) -> None:
    assert runpy.run_path(str(SCRIPT))["worst"](statuses) == expected


def test_it_runs_every_part() -> None:
    parts = runpy.run_path(str(SCRIPT.parents[1] / "tests" / "conftest.py"))["PARTS"]
    assert tuple(runpy.run_path(str(SCRIPT))["PARTS"]) == parts
