"""Each promise of docs/security.md names a test that holds it and the line that keeps it, which exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "security.md"
HEADER = "| promise | test | line |"
CODE = re.compile(r"`([^`]+)`")
PACKAGE = ROOT / "sglang_ext"
READERS = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
"""Modules whose formats execute their input."""
CALLS = {"recv_pyobj", "allow_pickle", "weights_only"}
"""Names by which zmq, numpy and torch read pickles."""


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """(promise, test, line) of each row of the tables of promises."""
    of_promises = False
    for line in text.splitlines():
        if not line.startswith("|"):
            of_promises = False
        elif line == HEADER:
            of_promises = True
        elif of_promises and not line.startswith("|---"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            first, second, third, *more = [*cells, "", "", ""]
            yield (first, second, third) if not any(more) else (first, "", "")


@cache
def functions(file: Path) -> frozenset[str]:
    """Names of the functions and methods of a module."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, kinds))


def is_test(place: str) -> bool:
    """Whether ``FILE::FUNCTION``, below `tests/`, is a test."""
    name, _, function = place.partition("::")
    file = ROOT / "tests" / name
    return function.startswith("test_") and file.is_file() and function in functions(file)


def is_line(place: str) -> bool:
    """Whether ``FILE: TEXT`` is a text that stands in a module below `sglang_ext/`, or in a template below
    `deploy/`."""
    name, _, text = place.partition(": ")
    is_template = name.startswith("deploy/")
    file = (ROOT if is_template else PACKAGE) / name
    kinds = (".yaml", ".tpl") if is_template else (".py",)
    return file.suffix in kinds and file.is_file() and bool(text) and text in file.read_text(encoding="utf-8")


def faults(text: str) -> list[str]:
    """The errors in the promises of a page."""
    found = []
    for promise, test, line in rows(text):
        tests, lines = CODE.findall(test), CODE.findall(line)
        if not promise:
            found.append("a row without a promise")
        if not tests:
            found.append(f"no test: {promise}")
        if not lines:
            found.append(f"no line: {promise}")
        found += [f"{each} is no test: {promise}" for each in tests if not is_test(each)]
        found += [f"{each} is not there: {promise}" for each in lines if not is_line(each)]
    return found


def test_every_promise_has_its_test_and_its_line() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert faults(text) == []
    assert len([*rows(text)]) > 50


GOOD = (
    "`security/test_promises.py::test_every_promise_has_its_test_and_its_line`",
    "`router/config.py: class RouterConfig`",
)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (("x", *GOOD), None),
        (("x", "", GOOD[1]), "no test: x"),
        (("x", "all of `tests/fuzz`", GOOD[1]), "tests/fuzz is no test: x"),
        (("x", "`security/test_promises.py::test_gone`", GOOD[1]), "test_gone is no test: x"),
        (("x", "`security/test_gone.py::test_it`", GOOD[1]), "test_it is no test: x"),
        (("x", "`security/test_promises.py::rows`", GOOD[1]), "rows is no test: x"),
        (("x", GOOD[0], ""), "no line: x"),
        (("x", GOOD[0], "`router/config.py`"), "router/config.py is not there: x"),
        (("x", GOOD[0], "`router/gone.py: x`"), "gone.py: x is not there: x"),
        (("x", GOOD[0], "`router/config.py: class Gone`"), "class Gone is not there: x"),
        (("x", GOOD[0], "`tests/conftest.py: import`"), "import is not there: x"),
        (("", *GOOD), "a row without a promise"),
        (("a | b", *GOOD), "no test: a"),
    ],
)
def test_a_promise_without_one_is_found(row: tuple[str, str, str], fault: str | None) -> None:
    page = f"| who | may |\n|---|---|\n| x | |\n\n{HEADER}\n|---|---|---|\n| {' | '.join(row)} |\n\n| y |\n"
    found = faults(page)
    assert (found == []) if fault is None else (bool(found) and found[0].endswith(fault)), found


def pickled(source: str) -> set[str]:
    """The modules and calls by which a module could read pickles."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & READERS
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0]} & READERS
        elif isinstance(node, ast.Attribute | ast.keyword):
            found |= {node.attr if isinstance(node, ast.Attribute) else node.arg or ""} & CALLS
    return found


def test_no_module_reads_pickles() -> None:
    found = {
        str(path.relative_to(ROOT)): names
        for path in PACKAGE.rglob("*.py")
        if (names := pickled(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import os, pickle",
        "from marshal import loads",
        "def f():\n    import dill.detect",
        "socket.recv_pyobj()",
        "np.load(file, allow_pickle=True)",
    ],
)
def test_a_module_that_reads_pickles_is_found(source: str) -> None:
    assert pickled(source)
    assert not pickled("import json, msgspec\nsocket.recv()\nnp.load(file)")
