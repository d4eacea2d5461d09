"""The parts of a test run, and how they make its status (`scripts/run_tests.py`)."""

from __future__ import annotations

import json
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


def part_that_failed(folder: Path, *tests: str) -> Path:
    """The folder of a part, as pytest leaves it."""
    cache = folder / "cache" / "v" / "cache"
    cache.mkdir(parents=True)
    if tests:
        (cache / "lastfailed").write_text(json.dumps(dict.fromkeys(tests, True)))
    return folder


@pytest.mark.parametrize(
    ("statuses", "failed", "expected"),
    [
        ([0, 0], [[], []], []),
        ([1, 0], [["a"], []], ["a"]),
        ([1, 1], [["b", "a"], ["c"]], ["a", "b", "c"]),
        ([1, 5], [["a"], []], ["a"]),
        # More than can be for want of a core.
        ([1, 1], [["a", "b", "c"], ["d", "e", "f"]], []),
        # Something beside the tests is wrong: no test to blame, a crash, a file that cannot be collected.
        ([1, 1], [["a"], []], []),
        ([1, -11], [["a"], []], []),
        ([1, 2], [["a"], ["b"]], []),
    ],
)
def test_a_few_tests_run_again_if_nothing_else_is_wrong(
    statuses: list[int], failed: list[list[str]], expected: list[str], tmp_path: Path
) -> None:
    folders = [part_that_failed(tmp_path / str(number), *tests) for number, tests in enumerate(failed)]
    assert runpy.run_path(str(SCRIPT))["failed_tests"](statuses, folders) == expected
