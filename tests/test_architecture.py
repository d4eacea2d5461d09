"""ARCHITECTURE.md names every module, and no module that is gone."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sglang_ext", "router", "benchmarks")
UNNAMED = frozenset({"__init__.py", "__main__.py"})


def modules_in_the_map(text: str) -> set[str]:
    """Paths in the tables below the heading of each folder."""
    named: set[str] = set()
    folder = ""
    for line in text.splitlines():
        if heading := re.match(r"### `(\S+)/`", line):
            folder = heading[1]
        elif folder and (row := re.match(r"\| `(\S+\.py)` \|", line)):
            named.add(f"{folder}/{row[1]}")
    return named


def modules_in_the_tree() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name not in UNNAMED
    }


def test_the_map_and_the_tree_agree() -> None:
    named = modules_in_the_map((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
    there = modules_in_the_tree()
    assert there - named == set(), "modules that ARCHITECTURE.md does not name"
    assert named - there == set(), "modules that ARCHITECTURE.md names and that are gone"


def test_a_missing_module_is_noticed() -> None:
    text = "### `router/`: x\n\n| module | what it is |\n|---|---|\n| `app.py` | a |\n"
    assert modules_in_the_map(text) == {"router/app.py"}
