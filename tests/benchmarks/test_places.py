"""Where benchmarks look for files elsewhere in the checkout."""

from __future__ import annotations

from benchmarks.lib.data import ROOT
from benchmarks.tiers.lmcache import CHILD


def test_what_is_started_by_its_path_is_there() -> None:
    assert (ROOT / "pyproject.toml").is_file()
    assert (ROOT / "benchmarks" / "lib" / "data.py").is_file()
    assert CHILD.is_file()
