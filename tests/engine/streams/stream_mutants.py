"""The places where the product orders streams, found in its source, and sources with one of them changed.

A site is a call of a method that waits for a stream or an event, records or asks an event, keeps memory for
a stream, makes the host wait or sets a fence; or of one of the product's own helpers with such a call.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import sglang_ext

ROOT = Path(next(iter(sglang_ext.__path__)))
STREAMS = {"wait_stream", "wait_event", "record_stream", "record_event", "synchronize", "_follow_engine"}
EVENTS = {"record", "query"}
"""Names that other classes have too: sites only in modules that have one of the others, or make events."""
FENCES = {"until_passed"}
SETTERS = {"fence", "_fence"}
"""Calls that set a fence. Order of memory has fences too: sites only in modules that ask for passes."""


@dataclass(frozen=True)
class Site:
    """A call in a function; ``index`` among all calls of its module."""

    path: str
    function: str
    call: str
    index: int

    def __str__(self) -> str:
        return f"{self.function}: {self.call}"


def sites_of(path: Path) -> list[Site]:
    """The sites of a module, in its order."""
    text = path.read_text(encoding="utf-8")
    names = STREAMS | FENCES | (EVENTS if ".Event(" in text or "wait_stream" in text else set())
    names |= SETTERS if "Passed" in text or "Wanted(" in text else set()
    if not any(name in text for name in names):
        return []
    tree = ast.parse(text)
    owners = {
        inner: node.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
    }
    found = []
    for index, node in enumerate(calls_of(tree)):
        if called(node) in names:
            found.append(Site(str(path.relative_to(ROOT)), owners.get(node, ""), ast.unparse(node), index))
    return found


def called(call: ast.Call) -> str:
    """The name of the called function."""
    return str(getattr(call.func, "attr", getattr(call.func, "id", "")))


def calls_of(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def all_sites() -> list[Site]:
    """Of the whole product; the router has no device."""
    paths = (path for path in sorted(ROOT.rglob("*.py")) if "router" not in path.parts)
    return [site for path in paths for site in sites_of(path)]


def mutants_of(site: Site) -> Iterator[tuple[str, ast.Module]]:
    """The module without the site (``deleted``), or with it a statement earlier (``up``) or later."""
    for change in ("deleted", "up", "down"):
        tree = ast.parse((ROOT / site.path).read_text(encoding="utf-8"))
        call = calls_of(tree)[site.index]
        stands_alone = any(call in ast.walk(node) for node in ast.walk(tree) if isinstance(node, ast.Expr))
        for node in ast.walk(tree):
            for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
                at = _statement(body, call) if isinstance(body, list) else None
                if at is not None and _change(body, at, change):
                    yield change, ast.fix_missing_locations(tree)
        if change == "deleted" and not stands_alone:
            yield change, ast.fix_missing_locations(_Answer(call).visit(tree))


def _statement(body: list[ast.stmt], call: ast.Call) -> int | None:
    for at, statement in enumerate(body):
        if isinstance(statement, ast.Expr) and any(node is call for node in ast.walk(statement)):
            return at
    return None


def _change(body: list[ast.stmt], at: int, change: str) -> bool:
    other = at - 1 if change == "up" else at + 1
    if change == "deleted":
        body[at] = ast.Pass()
        return True
    if not 0 <= other < len(body):
        return False
    if isinstance(body[other], ast.Expr) and isinstance(body[other].value, ast.Constant):
        return False  # a docstring
    body[at], body[other] = body[other], body[at]
    return True


class _Answer(ast.NodeTransformer):
    """A question whose answer is always yes, or a fence that is always passed."""

    def __init__(self, call: ast.Call) -> None:
        self._call = call

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if node is not self._call:
            return self.generic_visit(node)
        yes = ast.Constant(value=True)
        return ast.parse("lambda: True", mode="eval").body if called(node) in SETTERS else yes


@contextmanager
def module_of(tree: ast.Module, site: Site) -> Iterator[ModuleType]:
    """The changed source as a module."""
    module = ModuleType("mutant")
    sys.modules["mutant"] = module
    try:
        exec(compile(tree, site.path, "exec"), module.__dict__)
        yield module
    finally:
        del sys.modules["mutant"]
