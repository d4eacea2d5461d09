"""pyproject, pins and set-up fit each other."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_ext.patches.versions import SGLANG_VERSION

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]


def pins(name: str) -> dict[str, str]:
    """Version by package of one of the requirements files."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found = {}
    for line in lines:
        if not line.startswith("#"):
            package, version = line.split("==")
            found[canonicalize_name(package)] = version
    return found


CPU, TEST = pins("cpu.txt"), pins("test.txt")


@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *EXTRAS["cpu"], *EXTRAS["test"]])
def test_every_dependency_is_pinned_to_a_version_that_fits(text: str) -> None:
    requirement = Requirement(text)
    version = (CPU | TEST).get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement.name} is in pyproject.toml and not in requirements/: make lock"
    assert requirement.specifier.contains(version)


def test_what_a_server_needs_is_not_among_the_tools() -> None:
    assert not set(CPU) & set(TEST)
    runtime = {
        canonicalize_name(Requirement(text).name) for text in [*PROJECT["dependencies"], *EXTRAS["cpu"]]
    }
    assert runtime <= set(CPU)


def test_one_version_of_sglang_everywhere() -> None:
    assert CPU["sglang"] == SGLANG_VERSION
    assert EXTRAS["gpu"] == [f"sglang=={SGLANG_VERSION}"]
    setup = runpy.run_path(str(ROOT / "scripts" / "setup.py"))
    assert setup["WITHOUT_DEPENDENCIES"][0] == f"sglang=={SGLANG_VERSION}"


def test_setup_reads_every_pin() -> None:
    setup = runpy.run_path(str(ROOT / "scripts" / "setup.py"))
    read = setup["read_pins"](setup["CPU"]) | setup["read_pins"](setup["TEST"])
    assert len(read) == len(CPU) + len(TEST)
    for name in (*setup["FIRST"], *setup["BROUGHT_BY_TORCH"]):
        assert re.fullmatch(rf"{name}==[\d.]+", read[name])


def test_every_package_is_installed() -> None:
    """`router/` and `patches/` lie elsewhere than they are installed, so the list is written by hand."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {"sglang_ext": "sglang_ext"} | {path: name for name, path in setuptools["package-dir"].items()}
    there = {
        ".".join([name, *init.parent.relative_to(ROOT / folder).parts])
        for folder, name in folders.items()
        for init in (ROOT / folder).rglob("__init__.py")
    }
    assert set(setuptools["packages"]) == there
    for folder, name in folders.items():
        for module in (ROOT / folder).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} has no __init__.py ({name})"
