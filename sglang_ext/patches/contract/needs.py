"""Names and members of SGLang that our modules need, and the report of those that are missing."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from typing import Final

from sglang_ext.patches.contract.source import Found, Module, Source

SGLANG: Final = "sglang"


@dataclass(frozen=True)
class Broken:
    """Something that we need and SGLang has not: the place that needs it, its name, and the difference."""

    at: str
    need: str
    problem: str

    def __str__(self) -> str:
        return f"{self.at}: {self.need}: {self.problem}"


@dataclass
class Report:
    """The needs that were checked, by kind, and those that SGLang does not meet."""

    needs: dict[str, set[str]] = field(default_factory=dict)
    broken: list[Broken] = field(default_factory=list)
    targets: set[str] = field(default_factory=set)
    """The functions that patches replace or hook."""
    classes: list[Found] = field(default_factory=list)
    """Ours."""
    below: dict[str, set[str]] = field(default_factory=dict)

    def counts(self) -> str:
        return ", ".join(f"{len(paths)} {kind}" for kind, paths in sorted(self.needs.items()))


class Needs:
    """The needs of one module of ours, which go to the report."""

    def __init__(self, source: Source, module: Module, report: Report) -> None:
        self._source = source
        self._module = module
        self._report = report

    def need(self, kind: str, what: str, node: ast.AST, problem: str = "") -> None:
        """Count a need of a kind; report it as broken if there is a problem."""
        self._report.needs.setdefault(kind, set()).add(what)
        if problem:
            path = self._module.path
            at = f"{path.parent.name}/{path.name}:{getattr(node, 'lineno', 0)}"
            self._report.broken.append(Broken(at, what, problem))

    def text(self, node: ast.AST) -> str | None:
        """The string that an expression of constants is."""
        match node:
            case ast.Constant(value=str(value)):
                return value
            case ast.Name(id=name):
                entry = self._module.names.get(name)
                return (
                    self.text(entry.value)
                    if isinstance(entry, ast.Assign | ast.AnnAssign) and entry.value
                    else None
                )
            case ast.JoinedStr(values=parts):
                texts = [
                    self.text(each.value if isinstance(each, ast.FormattedValue) else each) for each in parts
                ]
                return None if None in texts else "".join(each for each in texts if each is not None)
        return None

    def exists(self, path: str, node: ast.AST) -> None:
        there = self._source.find(path) is not None or self._field(path)
        self.need("names", path, node, "" if there else "is gone")

    def _field(self, path: str) -> bool:
        owner, _, name = path.rpartition(".")
        cls = self._source.find(owner)
        return (
            isinstance(cls, Found)
            and isinstance(cls.node, ast.ClassDef)
            and name in self._source.members(cls).found
        )

    def _theirs(self, cls: Found) -> bool:
        """Whether a class is SGLang's, or built on one of SGLang's."""
        return any(
            each.module.name.startswith(f"{SGLANG}.") for each in [cls, *self._source.members(cls).bases]
        )

    def _below(self, owner: Found) -> set[str]:
        """Attributes that its module sets from outside, and classes there and of ours that may replace it."""
        if owner.path not in self._report.below:
            line = {owner.path, *(each.path for each in self._source.members(owner).bases)}
            beside = [
                Found(f"{owner.module.name}.{node.name}", owner.module, node)
                for node in owner.module.tree.body
                if isinstance(node, ast.ClassDef)
            ]
            outside = {
                node.attr
                for node in ast.walk(owner.module.tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            }
            self._report.below[owner.path] = outside | {
                name
                for cls in [*self._report.classes, *beside]
                if line & {each.path for each in self._source.members(cls).bases}
                for name in self._source.members(cls).found
            }
        return self._report.below[owner.path]

    def has(self, owner: Found, name: str, node: ast.AST) -> None:
        if not self._theirs(owner) or name.startswith("__"):
            return
        members = self._source.members(owner)
        there = name in members.found or members.open or name in self._below(owner)
        self.need("members", f"{owner.path}.{name}", node, "" if there else "is gone")
