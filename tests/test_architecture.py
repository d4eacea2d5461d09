"""ARCHITECTURE.md is short, names every folder and none that is gone; every module's docstring states its
purpose."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
MAP: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "module_map.py"))
FOLDERS: list[Path] = list(MAP["folders"]())
NAMED = [folder for folder in FOLDERS if folder.parts[:-1] != ("benchmarks",)]
"""Folders of the page: of benchmarks, `benchmarks/` stands for all."""

PATH = re.compile(r"`((?:sglang_ext|router|patches|benchmarks|tests|scripts|examples|docs)/[\w/.]*)`")


def gone(text: str) -> set[str]:
    """The paths that a page names and that are not there."""
    return {path for path in PATH.findall(text) if not (ROOT / path).exists()}


def unnamed(text: str) -> set[str]:
    """The folders that a page does not name."""
    return {f"{folder}/" for folder in NAMED if f"`{folder}/`" not in text}


def test_it_can_be_read_in_one_sitting() -> None:
    assert len(TEXT.splitlines()) <= 200


def test_every_folder_is_named_and_nothing_that_is_gone() -> None:
    assert unnamed(TEXT) == set()
    assert gone(TEXT) == set()


def test_a_missing_folder_and_a_gone_module_are_noticed() -> None:
    assert unnamed("`router/`") == {f"{folder}/" for folder in NAMED} - {"router/"}
    assert gone("`router/gone.py` and `router/config.md`, not `tests/`") == {
        "router/gone.py",
        "router/config.md",
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_every_module_says_what_it_is(folder: Path) -> None:
    lines = {
        path.name: MAP["first_line"](path)
        for path in [ROOT / folder / "__init__.py", *MAP["modules"](folder)]
    }
    assert not [name for name, line in lines.items() if not line]
