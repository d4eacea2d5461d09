"""pyproject, pins and set-up fit each other."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from setuptools import find_packages

from sglang_ext.patches.versions import SGLANG_VERSION, SUPPORTED, Status

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
BESIDE = {each.version: pins(f"sglang-{each.version}.txt") for each in SUPPORTED}


@pytest.mark.parametrize("sglang", BESIDE)
@pytest.mark.parametrize("text", [*PROJECT["dependencies"], *EXTRAS["cpu"], *EXTRAS["test"]])
def test_every_dependency_is_pinned_to_a_version_that_fits(text: str, sglang: str) -> None:
    requirement = Requirement(text)
    version = (CPU | TEST | BESIDE[sglang]).get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement.name} is in pyproject.toml and not in requirements/: make lock"
    assert requirement.specifier.contains(version)


def test_every_pinned_package_takes_the_python_of_debian_12() -> None:
    """Of those installed here; `make setup` takes any Python 3.11."""
    found = {
        f"{each.metadata['Name']} {each.version}": each.metadata["Requires-Python"]
        for each in importlib.metadata.distributions()
        if (CPU | TEST).get(canonicalize_name(each.metadata["Name"])) == each.version
    }
    assert len(found) > 100
    assert [
        name for name, pythons in found.items() if not SpecifierSet(pythons or "").contains("3.11.2")
    ] == []


def test_what_a_server_needs_is_not_among_the_tools() -> None:
    assert not set(CPU) & set(TEST)
    for each in BESIDE.values():
        assert not set(each) & (set(CPU) | set(TEST))
    runtime = {
        canonicalize_name(Requirement(text).name) for text in [*PROJECT["dependencies"], *EXTRAS["cpu"]]
    }
    for each in BESIDE.values():
        assert runtime <= {*CPU, *each}


def test_versions_of_sglang_are_the_supported_ones_everywhere() -> None:
    assert {version: each["sglang"] for version, each in BESIDE.items()} == {each: each for each in BESIDE}
    files = {path.name for path in (ROOT / "requirements").glob("sglang-*.txt")}
    assert files == {f"sglang-{each}.txt" for each in BESIDE}
    tested = [each.version for each in SUPPORTED if each.status is Status.TESTED]
    assert SGLANG_VERSION in tested
    (gpu,) = EXTRAS["gpu"]
    assert [each for each in BESIDE if Requirement(gpu).specifier.contains(each)] == tested
    setup = runpy.run_path(str(ROOT / "scripts" / "setup.py"))
    assert (setup["SGLANG"], setup["SUPPORTED"]) == (SGLANG_VERSION, list(BESIDE))


@pytest.mark.parametrize("sglang", BESIDE)
def test_setup_reads_every_pin(sglang: str) -> None:
    setup = runpy.run_path(str(ROOT / "scripts" / "setup.py"))
    files = (setup["CPU"], setup["TEST"], setup["beside"](sglang))
    read = {name: pin for path in files for name, pin in setup["read_pins"](path).items()}
    assert len(read) == len(CPU) + len(TEST) + len(BESIDE[sglang])
    for name in (*setup["FIRST"], *setup["BROUGHT_BY_TORCH"]):
        assert re.fullmatch(rf"{name}==[\d.]+", read[name])


def test_sglangs_own_pins_are_constraints_of_the_lock(tmp_path: Path) -> None:
    wheel = tmp_path / "sglang-1.whl"
    asks = ["torch==2.14.1", "openai==2.8.0", "kernels[cu13]<0.15,>=0.14", "IPython", 'av==1; extra == "all"']
    with zipfile.ZipFile(wheel, "w") as packed:
        lines = "".join(f"Requires-Dist: {each}\n" for each in asks)
        packed.writestr("sglang-1.dist-info/METADATA", f"Name: sglang\n{lines}")
    setup = runpy.run_path(str(ROOT / "scripts" / "setup.py"))
    assert setup["asked_by_sglang"](wheel) == ["openai==2.8.0", "kernels<0.15,>=0.14"]


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("53 modules are compiled.", "53 modules are compiled."),
        (
            "Nothing is compiled: there is no C compiler (cc).",
            "Nothing is compiled: there is no C compiler (cc).",
        ),
        ("Nothing is compiled:\nerror: a long story", "Nothing is compiled: {log} says why."),
    ],
)
def test_setup_says_what_became_of_compiling(said: str, outcome: str, tmp_path: Path) -> None:
    """And goes on, whatever that was: the sources serve as well."""
    setup = runpy.run_path(str(ROOT / "scripts" / "setup.py"))
    environment = setup["Environment"](tmp_path, setup["Progress"](1))
    environment.log.write_text("pip's output\n")
    environment.python = tmp_path / "python"
    environment.python.write_text(f"#!/bin/sh\ncat <<EOF\n{said}\nEOF\nexit 1\n")
    environment.python.chmod(0o700)
    assert environment.compile() == outcome.format(log=environment.log)
    assert environment.log.read_text().endswith(f"{said}\n")


def test_setup_compiles_last_and_not_at_all_on_request(tmp_path: Path) -> None:
    setup = runpy.run_path(str(ROOT / "scripts" / "setup.py"))
    environment = setup["Environment"](tmp_path, setup["Progress"](1))
    names = [step.name for step in environment.steps()]
    assert names[-1] == "compile"
    assert [step.name for step in environment.steps(compiling=False)] == names[:-1]


def test_without_a_compiler_it_is_said(tmp_path: Path) -> None:
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['obstacle']())"
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT / "scripts" / "compile_router.py"],
        env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("there is no C compiler (")


def test_every_package_is_installed() -> None:
    """setuptools finds every folder with modules, and each module once."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    there = {
        ".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "sglang_ext").rglob("__init__.py")
    }
    assert set(find_packages(str(ROOT), include=settings["include"])) == there
    for module in (ROOT / "sglang_ext").rglob("*.py"):
        assert (module.parent / "__init__.py").exists(), f"{module.parent} has no __init__.py"


@pytest.mark.parametrize("name", ["router", "patches"])
def test_links_at_the_top_are_for_reading_alone(name: str) -> None:
    """`git clone` makes a link of it, or a file that names its target where links are not supported.
    Nothing imports a module by it."""
    link = ROOT / name
    target = os.readlink(link) if link.is_symlink() else link.read_text().strip()
    assert (ROOT / target).resolve() == ROOT / "sglang_ext" / name
    for path in (ROOT / top for top in ("sglang_ext", "tests", "benchmarks", "scripts", "examples")):
        for module in path.rglob("*.py"):
            found = re.search(rf"^\s*(from|import) {name}\b", module.read_text(), re.MULTILINE)
            assert not found, f"{module} imports {name} in place of sglang_ext.{name}"
