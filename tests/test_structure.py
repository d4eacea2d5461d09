"""Parts are complete when they are made: no module fills in an attribute of another part afterwards.

Read from the source. A *part* is a class that is neither a dataclass, a struct nor an enum, and none of
`RECORDS`. An attribute that a part keeps is set by its own methods only; a constructor sets no attribute of
another object. Where two parts need each other, one subscribes to a signal of the other
(`sglang_ext.signals`).

Nor has a module state of its own: state that must be found by code that SGLang calls is in
`patches/process.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "sglang_ext"
FOLDERS = ("router", "engine", "patches/adapter")
"""Those in which it holds."""

RECORDS = {
    "Record": "the notes of one request, set by each of its handlers; a class for its speed",
    "Flight": "one request, whose handlers note its outcome; a class for its speed",
    "Entry": "one prompt in the line that ``QueueEstimate`` keeps, alike",
    "OpenAnswer": "one answer, alike",
    "LocalCounter": "a number that its counters add to",
    "RequestReader": "one half of a connection's state machine; the connection, which owns it, is the other",
    "WorkerConnection": "the pool that exports it out notes since when it is idle",
    "ServerState": "of one HTTP server: its connections count themselves in it",
    "Writing": "a hand-over that is written while it is computed: the feed of layers notes how far it is",
}
"""Classes that are data of their makers, each with why."""

FOREIGN = {
    "router/index/memory.py tree.observer": "the tree's place for its one observer, set while it is empty",
    "router/tokens/prompt_tokenizer.py tokenizer.chat_template": "transformers' own way to set a template",
    "patches/adapter/pd/kv_manager.py PROCESS.manager": "SGLang makes it anew with each role of a server",
}
"""Attributes of objects that are none of these folders', each with why it is the way to set it."""


def is_data(node: ast.ClassDef) -> bool:
    """Whether a class is a dataclass, a struct, a named tuple or an enum."""
    bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    marks = {ast.unparse(mark).partition("(")[0].rpartition(".")[2] for mark in node.decorator_list}
    return bool(bases & {"Struct", "Enum", "StrEnum", "NamedTuple", "Exception"}) or "dataclass" in marks


def is_frozen(node: ast.ClassDef) -> bool:
    """Whether Python itself refuses to assign to its instances."""
    return any("frozen=True" in ast.unparse(mark) for mark in (*node.decorator_list, *node.keywords))


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


@dataclass(frozen=True)
class Reading:
    """One module: the names under which its parts and its data keep things, and its assignments to others'
    attributes.

    foreign: (attribute, target, whether a constructor assigns it).
    """

    parts: frozenset[str]
    data: frozenset[str]
    foreign: tuple[tuple[str, str, bool], ...]


@cache
def reading(source: str) -> Reading:
    """Of a module with this source, which most tests here have in common."""
    tree = ast.parse(source)
    parts: set[str] = set()
    data: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or is_frozen(node):
            continue  # frozen: Python refuses assignments, so its names stay the parts'
        mine = data if is_data(node) or node.name in RECORDS else parts
        for inner in ast.walk(node):
            mine |= {target.attr for target in targets(inner) if is_own(target)}
        mine |= {
            item.target.id
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
    constructing = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef) and outer.name == "__init__"
        for inner in ast.walk(outer)
    }
    foreign = tuple(
        (target.attr, ast.unparse(target), id(node) in constructing)
        for node in ast.walk(tree)
        for target in targets(node)
        if not is_own(target)
    )
    return Reading(frozenset(parts), frozenset(data), foreign)


def filled_in(sources: dict[str, str]) -> list[str]:
    """Where an attribute of another part is assigned: ``module target``."""
    readings = {module: reading(source) for module, source in sources.items()}
    parts = frozenset[str]().union(*(each.parts for each in readings.values()))
    data = frozenset[str]().union(*(each.data for each in readings.values()))
    return [
        f"{module} {target}"
        for module, each in readings.items()
        for attribute, target, constructs in each.foreign
        if constructs or (attribute in parts and attribute not in data)
    ]


def sources(folders: tuple[str, ...] = FOLDERS) -> dict[str, str]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


def test_parts_are_complete_when_they_are_made() -> None:
    assert set(filled_in(sources())) == set(FOREIGN)


@pytest.mark.parametrize(
    "breach",
    [
        "class Wiring:\n    def __init__(self, relay, hints):\n        relay.on_learnt = hints.learn\n",
        "def wire(chooser, advisor):\n    chooser._expectations = advisor\n",
        "class Wiring:\n    def join(self):\n        self.advisor._fetching, self.x = self.fetching, 1\n",
        "def attach_peers(cache, peers):\n    cache.peers = peers\n",
    ],
)
def test_a_breach_is_found(breach: str) -> None:
    """The twins: the breaches that such a wiring would add."""
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


PROCESS = "patches/process.py"
"""The one module with state of its own: the state of this process."""


def state_of(source: str) -> Iterator[int]:
    """Where a module has state of its own: ``global``, or a container or an object that it changes."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield node.lineno
    for node in tree.body:
        value = getattr(node, "value", None)
        if not isinstance(node, ast.Assign | ast.AnnAssign) or value is None:
            continue
        names = node.targets if isinstance(node, ast.Assign) else [node.target]
        made = isinstance(value, ast.List | ast.Dict | ast.Set | ast.Call)
        if made and any(isinstance(name, ast.Name) and _changes(tree, name.id) for name in names):
            yield node.lineno


def _changes(tree: ast.Module, name: str) -> bool:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            if isinstance(node.value, ast.Name) and node.value.id == name:
                return True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            changes = node.func.attr in ("append", "add", "update", "pop", "clear", "extend", "setdefault")
            if changes and isinstance(owner, ast.Name) and owner.id == name:
                return True
    return False


def test_modules_have_no_state_but_in_one_place() -> None:
    found = {path for path, source in sources(("engine", "patches")).items() if [*state_of(source)]}
    assert found <= {PROCESS}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("_given = None\n\ndef f(x):\n    global _given\n    _given = x\n", 1),
        ("_known: list[int] = []\n\ndef f(x):\n    _known.append(x)\n", 1),
        ("_process = Process()\n\ndef f(x):\n    _process.scheduler = x\n", 1),
        ("TABLE = {1: 2}\n\ndef f(x):\n    return TABLE[x]\n", 0),
    ],
)
def test_state_of_a_module_is_found(source: str, count: int) -> None:
    assert len(list(state_of(source))) == count
