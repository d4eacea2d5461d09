"""Compiled modules: used while they are of their sources, never else; and they do the same."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_ext import native
from sglang_ext.native import FOLDER, LIST, SUFFIX, SWITCH, digest, found

ROOT = Path(__file__).resolve().parents[2]
SUITES = ("http", "index", "fleet", "policies", "dispatch", "tenancy", "telemetry", "api", "app")
"""Folders of tests of the compiled modules."""


def script() -> Any:
    spec = importlib.util.spec_from_file_location("compile_router", ROOT / "scripts" / "compile_router.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package of two modules that were compiled, as far as names and digests go."""
    folder = tmp_path / "package"
    built = folder / FOLDER
    (built / "http").mkdir(parents=True)
    (folder / "http").mkdir()
    sources = {}
    for name in ("one", "http/two"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
        (built / f"{name}{SUFFIX}").write_bytes(b"")
        sources[name] = digest(folder / f"{name}.py")
    (built / f"group{SUFFIX}").write_bytes(b"")
    (built / LIST).write_text(json.dumps({"suffix": SUFFIX, "group": "group", "sources": sources}))
    return folder


def test_what_was_compiled_of_these_sources_is_found(package: Path) -> None:
    there = found("some.package", package)
    assert there is not None
    assert set(there.files) == {"some.package.one", "some.package.http.two", "group"}
    spec = there.find_spec("some.package.http.two")
    assert spec is not None
    assert spec.origin == str(package / FOLDER / f"http/two{SUFFIX}")
    assert there.find_spec("some.package.other") is None


@pytest.mark.parametrize("what", ["edited", "gone", "half", "other Python", "no list", "damaged list"])
def test_nothing_compiled_hides_other_sources(what: str, package: Path) -> None:
    """One difference, and none of it is used: the modules know each other's insides."""
    if what == "edited":
        (package / "one.py").write_text("NAME = 'edited'\n")
    elif what == "gone":
        (package / "http" / "two.py").unlink()
    elif what == "half":
        (package / FOLDER / f"one{SUFFIX}").unlink()
    elif what == "other Python":
        told = json.loads((package / FOLDER / LIST).read_text())
        (package / FOLDER / LIST).write_text(json.dumps({**told, "suffix": ".cpython-399.so"}))
    elif what == "no list":
        (package / FOLDER / LIST).unlink()
    else:
        (package / FOLDER / LIST).write_text("{")
    assert found("some.package", package) is None


def test_of_a_checkout_parts_of_the_package_lie_beside_it(package: Path) -> None:
    (package / "http").rename(package.parent / "http")
    assert found("some.package", package) is not None
    (package.parent / "http" / "two.py").write_text("NAME = 'edited'\n")
    assert found("some.package", package) is None


def test_it_can_be_switched_off(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv(SWITCH, "0")
    assert not native.use("some.package", package)
    monkeypatch.delenv(SWITCH)
    assert native.use("some.package", package)
    assert isinstance(sys.meta_path[0], native.Native)


def test_every_module_that_is_compiled_is_there() -> None:
    for name in script().MODULES:
        assert native.source(ROOT / "sglang_ext", name).exists(), name


def two_kinds(source: str) -> list[str]:
    """Functions that give errors of two kinds one name: compiled, the second counts as one of the first."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            kinds: dict[str, set[str]] = {}
            for node in ast.walk(function):
                if isinstance(node, ast.ExceptHandler) and node.name and node.type:
                    kinds.setdefault(node.name, set()).add(ast.unparse(node.type))
            found += [function.name for kind in kinds.values() if len(kind) > 1]
    return found


def test_no_name_has_errors_of_two_kinds_in_what_is_compiled() -> None:
    for name in script().MODULES:
        assert two_kinds(native.source(ROOT / "sglang_ext", name).read_text()) == [], name
    twin = "def f():\n try: g()\n except OSError as e: print(e)\n except ValueError as e: print(e)\n"
    assert two_kinds(twin) == ["f"]


@pytest.mark.long
def test_the_suite_of_the_compiled_modules_passes_both_ways(tmp_path: Path) -> None:
    """Compiled here, in a folder of its own; and not compiled, whatever `make compile` has left."""
    compiler = script()
    if why := compiler.obstacle():
        pytest.skip(why)
    compiler.compile_into(tmp_path / FOLDER)
    environment = {**os.environ, SWITCH: str(tmp_path / FOLDER)}
    code = "from sglang_ext.router.http import reader; print(reader.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip().endswith(SUFFIX)
    for setting in (str(tmp_path / FOLDER), "0"):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *(f"tests/router/{suite}" for suite in SUITES)],
            cwd=ROOT, env={**os.environ, SWITCH: setting}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, (setting, done.stdout[-4000:])
    shutil.rmtree(tmp_path / FOLDER)
