"""Compiled modules: used while they are of their sources, never else; and they do the same."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterable
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
    """A package of two compiled modules, as far as names and digests go, which import a third."""
    folder = tmp_path / "package"
    built = folder / FOLDER
    (built / "http").mkdir(parents=True)
    (folder / "http").mkdir()
    sources = {}
    for name in ("one", "http/two"):
        (folder / f"{name}.py").write_text(f"NAME = {name!r}\n")
        (built / f"{name}{SUFFIX}").write_bytes(b"")
        sources[name] = digest(folder / f"{name}.py")
    (folder / "limits.py").write_text("LIMIT: Final = 10\n")
    sources["limits"] = digest(folder / "limits.py")
    (built / f"group{SUFFIX}").write_bytes(b"")
    listed = {"suffix": SUFFIX, "group": "group", "modules": ["one", "http/two"], "sources": sources}
    (built / LIST).write_text(json.dumps(listed))
    return folder


def test_what_was_compiled_of_these_sources_is_found(package: Path) -> None:
    there = found("some.package", package)
    assert there is not None
    assert set(there.files) == {"some.package.one", "some.package.http.two", "group"}
    spec = there.find_spec("some.package.http.two")
    assert spec is not None
    assert spec.origin == str(package / FOLDER / f"http/two{SUFFIX}")
    assert there.find_spec("some.package.other") is None


@pytest.mark.parametrize("what", ["edited", "constant", "gone", "half", "suffix", "no list", "damaged list"])
def test_nothing_compiled_hides_other_sources(what: str, package: Path) -> None:
    """One difference, and none of it is used: the modules know each other's insides."""
    if what == "edited":
        (package / "one.py").write_text("NAME = 'edited'\n")
    elif what == "constant":  # inlined in the compiled modules
        (package / "limits.py").write_text("LIMIT: Final = 11\n")
    elif what == "gone":
        (package / "http" / "two.py").unlink()
    elif what == "half":
        (package / FOLDER / f"one{SUFFIX}").unlink()
    elif what == "suffix":  # of another Python
        listed = json.loads((package / FOLDER / LIST).read_text())
        (package / FOLDER / LIST).write_text(json.dumps({**listed, "suffix": ".cpython-399.so"}))
    elif what == "no list":
        (package / FOLDER / LIST).unlink()
    else:
        (package / FOLDER / LIST).write_text("{")
    assert found("some.package", package) is None


def test_it_can_be_switched_off(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv(SWITCH, "0")
    assert not native.use("some.package", package)
    monkeypatch.delenv(SWITCH)
    assert native.use("some.package", package)
    assert isinstance(sys.meta_path[0], native.Native)


def test_sources_alone_are_refused_where_compiled_modules_are_required(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv(SWITCH, native.REQUIRED)
    assert native.use("some.package", package)
    (package / "one.py").write_text("NAME = 'edited'\n")
    with pytest.raises(ImportError, match="make compile"):
        native.use("some.package", package)


def test_every_module_that_is_compiled_is_there() -> None:
    for name in script().MODULES:
        assert (ROOT / "sglang_ext" / f"{name}.py").exists(), name


def test_what_is_imported_is_found_wherever_it_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "some"
    (package / "inner").mkdir(parents=True)
    for name, text in {
        "one": "from some.inner import two\nimport json\n",
        "inner/__init__": "from some.limits import LIMIT\n",
        "inner/two": "def f():\n    import some.late\n",
        "limits": "LIMIT = 1\n",
        "late": "from other import limits\n",
        "unused": "",
    }.items():
        (package / f"{name}.py").write_text(text)
    expected = {"one", "inner/__init__", "inner/two", "limits", "late"}
    assert script().imported(package, ["one"]) == expected


def test_the_digests_cover_modules_whose_constants_are_inlined() -> None:
    built = ROOT / "sglang_ext" / FOLDER / LIST
    if not built.exists() and (why := script().obstacle()):
        pytest.skip(why)
    listed = json.loads(built.read_text())
    assert {"router/api/documents", "tiers"} <= set(listed["sources"]) - set(listed["modules"])


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
        assert two_kinds((ROOT / "sglang_ext" / f"{name}.py").read_text()) == [], name
    twin = "def f():\n try: g()\n except OSError as e: print(e)\n except ValueError as e: print(e)\n"
    assert two_kinds(twin) == ["f"]


SUSPENDS = (ast.Await, ast.AsyncFor, ast.AsyncWith, ast.Yield, ast.YieldFrom)


def suspends(body: Iterable[ast.AST]) -> bool:
    """Whether a coroutine may be suspended in a block; functions that the block defines do not count."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, SUSPENDS):
            return True
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return False


def suspended_in_handlers(source: str) -> list[int]:
    """Lines of blocks in which a coroutine may be suspended while it handles an exception.

    mypyc keeps the exception that a function handles in the thread's state, and not per coroutine: another
    coroutine that runs meanwhile raises it again in place of its own, or the interpreter crashes.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            bad = suspends(node.body)
        elif isinstance(node, ast.Try):
            bad = suspends(node.finalbody)
        else:
            bad = isinstance(node, ast.AsyncWith)  # its end awaits while an exception is handled
        if bad:
            found.append(node.lineno)
    return found


def test_no_compiled_coroutine_is_suspended_while_it_handles_an_exception() -> None:
    for name in script().MODULES:
        source = (ROOT / "sglang_ext" / f"{name}.py").read_text(encoding="utf-8")
        assert suspended_in_handlers(source) == [], name


@pytest.mark.parametrize(
    "twin",
    [
        "async def f():\n try: g()\n except OSError: await h()\n",
        "async def f():\n try: g()\n finally: await h()\n",
        "async def f():\n async with g(): pass\n",
    ],
)
def test_a_suspension_in_a_handler_is_found(twin: str) -> None:
    assert suspended_in_handlers(twin)
