"""Parts are complete when they are made: nobody fills in an attribute of another part afterwards.

Read from the source. A *part* is a class that is neither a dataclass, a struct nor an enum, and none of
`RECORDS`. What a part keeps under a name of its own is set by its own methods only; a constructor sets
nothing of anything but itself. Where two parts need each other, one subscribes to a signal of the other
(`sglang_ext.signals`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("router",)
"""Those in which it holds."""

RECORDS = {
    "LocalCounter": "a number that whoever counts adds to",
    "RequestReader": "one half of a connection's state machine; the connection, which owns it, is the other",
    "WorkerConnection": "the pool that lends it out notes since when it is idle",
    "ServerState": "of one HTTP server: its connections count themselves in it",
}
"""Classes that are data of whoever made them, each with why."""

FOREIGN = {
    "router/index/memory.py tree.observer": "the tree's place for its one observer, set while it is empty",
    "router/tokens/prompt_tokenizer.py tokenizer.chat_template": "how transformers is told a template",
}
"""Attributes of objects that are none of these folders', each with why it is the way to set it."""


def is_data(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass, a struct, a named tuple or an enum."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    marks = {ast.unparse(mark).partition("(")[0].rpartition(".")[2] for mark in node.decorator_list}
    return bool(bases & {"Struct", "Enum", "StrEnum", "NamedTuple", "Exception"}) or "dataclass" in marks


def targets(node: ast.AST) -> Iterator[ast.Attribute]:
    """The attributes that a statement assigns."""
    if isinstance(node, ast.Assign):
        found: list[ast.expr] = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    else:
        return
    while found:
        target = found.pop()
        if isinstance(target, ast.Tuple | ast.List):
            found += target.elts
        elif isinstance(target, ast.Attribute):
            yield target


def is_own(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def attributes(trees: Iterable[ast.Module]) -> tuple[set[str], set[str]]:
    """The names that parts keep things under, and those of data."""
    parts: set[str] = set()
    data: set[str] = set()
    for tree in trees:
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef):
                continue
            mine = data if is_data(node) or node.name in RECORDS else parts
            for inner in ast.walk(node):
                mine |= {target.attr for target in targets(inner) if is_own(target)}
            mine |= {
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            }
    return parts, data


def filled_in(sources: dict[str, str]) -> list[str]:
    """Where an attribute of another part is assigned: ``module target``."""
    trees = {module: ast.parse(source) for module, source in sources.items()}
    parts, data = attributes(trees.values())
    found = []
    for module, tree in trees.items():
        constructing = {
            id(inner)
            for outer in ast.walk(tree)
            if isinstance(outer, ast.FunctionDef) and outer.name == "__init__"
            for inner in ast.walk(outer)
        }
        for node in ast.walk(tree):
            for target in targets(node):
                if is_own(target):
                    continue
                if id(node) in constructing or (target.attr in parts and target.attr not in data):
                    found.append(f"{module} {ast.unparse(target)}")
    return found


def sources() -> dict[str, str]:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def test_parts_are_complete_when_they_are_made() -> None:
    assert sorted(filled_in(sources())) == sorted(FOREIGN)


@pytest.mark.parametrize(
    "breach",
    [
        "class Wiring:\n    def __init__(self, relay, hints):\n        relay.on_learnt = hints.learn\n",
        "def wire(chooser, advisor):\n    chooser._expectations = advisor\n",
        "class Wiring:\n    def join(self):\n        self.advisor._fetching, self.x = self.fetching, 1\n",
    ],
)
def test_a_breach_is_found(breach: str) -> None:
    """The twins: what such a wiring would add."""
    found = filled_in(sources() | {"router/app/breach.py": breach})
    assert sum(place.startswith("router/app/breach.py") for place in found) == 1


def test_every_record_is_there() -> None:
    """A class that is gone needs no exception."""
    there = {
        node.name
        for source in sources().values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }
    assert there >= set(RECORDS)
