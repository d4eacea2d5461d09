"""Python packages as source: resolve dotted names and members of classes, without importing anything.

SGLang cannot be imported where torch is missing, and not in two versions at once. All answers here come from
the text: definitions, re-exports, bases, and attributes that methods set on ``self``.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

HASH_CHARS = 12
_DEEP = 12
"""Re-exports and bases that are followed at most."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Imported:
    """A name that an import brings in: ``member`` of a module, or the module itself when that is empty."""

    module: str
    member: str


@dataclass(eq=False)
class Module:
    """One file."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def names(self) -> dict[str, Definition | Imported]:
        """The names that it defines and imports, in ``if`` and ``try`` too; where there are several, the
        last."""
        found: dict[str, Definition | Imported] = {}
        for node in statements(self.tree.body):
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    found[node.name] = node
                case ast.Assign():
                    # A class that is made anew from itself (``defstruct``) keeps its written definition.
                    for each in node.targets:
                        if isinstance(each, ast.Name) and not isinstance(found.get(each.id), ast.ClassDef):
                            found[each.id] = node
                case ast.AnnAssign(target=ast.Name(id=name)):
                    found[name] = node
                case ast.Import() | ast.ImportFrom():
                    found.update(self.imports(node))
        return found

    @cached_property
    def starred(self) -> list[str]:
        """The modules of which it imports all."""
        nodes = [each for each in statements(self.tree.body) if isinstance(each, ast.ImportFrom)]
        return [self.imports(each)["*"].module for each in nodes if each.names[0].name == "*"]

    def imports(self, node: ast.Import | ast.ImportFrom) -> dict[str, Imported]:
        """The names that one import statement brings in."""
        if isinstance(node, ast.Import):
            return {
                each.asname or each.name.partition(".")[0]: Imported(
                    each.name if each.asname else each.name.partition(".")[0], ""
                )
                for each in node.names
            }
        base = node.module or ""
        if node.level:
            package = self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]
            parts = package.split(".")
            base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
        return {each.asname or each.name: Imported(base, each.name) for each in node.names}

    def code(self, node: Definition) -> str:
        """The lines of a definition, with its decorators."""
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))])
        return "".join(self.text.splitlines(keepends=True)[first - 1 : node.end_lineno])


@dataclass(frozen=True)
class Found:
    """A definition, and where it is. ``owner`` is the class of a method."""

    path: str
    module: Module
    node: Definition
    owner: Found | None = None

    @property
    def code(self) -> str:
        return self.module.code(self.node)

    @property
    def source(self) -> str:
        """The first ``HASH_CHARS`` hex digits of the SHA-256 of its source."""
        return hashlib.sha256(self.code.encode()).hexdigest()[:HASH_CHARS]

    @property
    def signature(self) -> str:
        """Its parameters with defaults, without annotations: ``(self, n, flag=None)``; a class's bases."""
        match self.node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return f"({', '.join(parameters(self.node.args))})"
            case ast.ClassDef():
                return f"class({', '.join(ast.unparse(each) for each in self.node.bases)})"
        return ""


@dataclass
class Member:
    """A member of a class: a method, or a field with its annotation or the value it is given."""

    owner: Found
    method: Function | None = None
    annotation: ast.expr | None = None
    value: ast.expr | None = None
    required: bool = False
    """A field of a dataclass or struct without default."""
    declared: bool = False
    """In the class's body, not on ``self`` in a method."""


@dataclass
class Members:
    """All that a class and its bases have. ``open`` when a base cannot be read, so that it may have more."""

    found: dict[str, Member] = field(default_factory=dict)
    open: bool = False
    bases: list[Found] = field(default_factory=list)


def statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those inside their ``if``, ``try``, ``with`` and loops."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for name in ("body", "orelse", "finalbody"):
                yield from statements(getattr(node, name, ()))
            for handler in getattr(node, "handlers", ()):
                yield from statements(handler.body)


def parameters(args: ast.arguments) -> list[str]:
    """Parameters as text, without annotations."""
    plain = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    found = [_parameter(each, default) for each, default in zip(plain, defaults, strict=True)]
    if args.posonlyargs:
        found.insert(len(args.posonlyargs), "/")
    if args.vararg:
        found.append(f"*{args.vararg.arg}")
    elif args.kwonlyargs:
        found.append("*")
    found += [
        _parameter(each, default) for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    return [*found, f"**{args.kwarg.arg}"] if args.kwarg else found


def _parameter(each: ast.arg, default: ast.expr | None) -> str:
    return each.arg if default is None else f"{each.arg}={ast.unparse(default)}"


class Source:
    """Packages by name, each a folder.

    Args:
        packages: the longest name that fits a module counts.
        aliases: modules by the dotted names under which code finds them, chosen when it runs.
    """

    def __init__(
        self, packages: Mapping[str, Path], aliases: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._aliases = aliases
        self._packages = sorted(packages.items(), key=lambda each: -len(each[0]))
        self._modules: dict[str, Module | None] = {}
        self._members: dict[tuple[str, str], Members] = {}

    def module(self, name: str) -> Module | None:
        """A module by its dotted name; None where there is none."""
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        for package, folder in self._packages:
            if name == package or name.startswith(f"{package}."):
                at = folder.joinpath(*name[len(package) :].split(".")[1:])
                for path in (at / "__init__.py", at.with_suffix(".py")):
                    if path.is_file():
                        return Module(name, path)
        return None

    def knows(self, name: str) -> bool:
        """Whether a dotted name is in one of the packages, there or not."""
        return any(name == package or name.startswith(f"{package}.") for package, _ in self._packages)

    def find(self, path: str) -> Found | Module | None:
        """The definition or module of a dotted path, through re-exports and bases; None when it is not
        there."""
        parts = path.split(".")
        for cut in range(len(parts), 0, -1):
            module = self.module(".".join(parts[:cut]))
            if module is not None:
                found: Found | Module | None = module
                for name in parts[cut:]:
                    found = self.inside(found, name)
                return found
        return None

    def inside(self, found: Found | Module | None, name: str, depth: int = 0) -> Found | Module | None:
        """A name in a module or class."""
        if isinstance(found, Module):
            if (alias := self._aliases.get(f"{found.name}.{name}")) is not None:
                return self.module(alias)
            entry = found.names.get(name)
            if isinstance(entry, Imported):
                if depth > _DEEP or not self.knows(entry.module):
                    return None
                there = self.module(entry.module)
                return self.inside(there, entry.member, depth + 1) if entry.member else there
            if entry is None:
                return self.module(f"{found.name}.{name}") or self._starred(found, name, depth)
            return Found(f"{found.name}.{name}", found, entry)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return None
        member = self.members(found).found.get(name)
        if member is None or member.method is None:
            return None
        return Found(f"{member.owner.path}.{name}", member.owner.module, member.method, member.owner)

    def _starred(self, module: Module, name: str, depth: int) -> Found | Module | None:
        if depth < _DEEP and not name.startswith("_"):
            for base in module.starred:
                found = self.inside(self.module(base), name, depth + 1)
                if found is not None:
                    return found
        return None

    def members(self, cls: Found, depth: int = 0) -> Members:
        """The members of a class, its bases' included."""
        key = (cls.module.name, cls.path)
        if key not in self._members:
            self._members[key] = self._collect(cls, depth)
        return self._members[key]

    def _collect(self, cls: Found, depth: int) -> Members:
        assert isinstance(cls.node, ast.ClassDef)
        all_of = Members()
        for part in self._assembled(cls):
            all_of.found.update(_own_members(part))
        for base in reversed(cls.node.bases):
            found = self.resolve(cls.module, base)
            if isinstance(found, Found) and isinstance(found.node, ast.ClassDef) and depth < _DEEP:
                theirs = self.members(found, depth + 1)
                all_of.found.update(theirs.found)
                all_of.open |= theirs.open
                all_of.bases = [found, *theirs.bases, *all_of.bases]
                continue
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            if name in _ENUMERATIONS:
                all_of.found |= {"name": Member(cls), "value": Member(cls)}
            elif name not in _PLAIN_BASES:
                all_of.open = True
        own = _own_members(cls)
        all_of.open |= "__getattr__" in own
        for name, member in own.items():
            before = all_of.found.get(name)
            # A class's declaration of a field takes precedence over the value that a method sets.
            if before is None or member.declared or before.method is not None:
                all_of.found[name] = member
        return all_of

    def _assembled(self, cls: Found) -> Iterator[Found]:
        """The classes from whose fields this one is put together at import."""
        package = self.module(_ASSEMBLED.get(cls.path, ""))
        if package is not None:
            for path in sorted(package.path.parent.glob("*.py")):
                part = self.module(f"{package.name}.{path.stem}")
                for node in part.tree.body if part is not None else ():
                    if part is not None and isinstance(node, ast.ClassDef):
                        yield Found(f"{part.name}.{node.name}", part, node)

    def resolve(
        self, module: Module, node: ast.expr, local: Mapping[str, Imported] = {}
    ) -> Found | Module | None:
        """Resolve an expression of names and dots in a module, with the function's own imports."""
        match node:
            case ast.Subscript(value=value):
                return self.resolve(module, value, local)
            case ast.Attribute(value=value, attr=name):
                return self.inside(self.resolve(module, value, local), name)
            case ast.Name(id=name) if name in local:
                entry = local[name]
                return self.find(f"{entry.module}.{entry.member}" if entry.member else entry.module)
            case ast.Name(id=name) if name in module.names:
                return self.inside(module, name)
        return None


_ASSEMBLED = {"sglang.srt.server_args.ServerArgs": "sglang.srt.arg_groups.fields"}
_PLAIN_BASES = {"ABC", "object", "Generic", "Protocol", "Struct", "NamedTuple", "str", "int"}
"""Bases outside that add no member which could be missing."""
_ENUMERATIONS = {"Enum", "IntEnum", "StrEnum", "Flag", "IntFlag"}


def _own_members(cls: Found) -> dict[str, Member]:
    assert isinstance(cls.node, ast.ClassDef)
    found: dict[str, Member] = {}
    for node in statements(cls.node.body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found[node.name] = Member(cls, method=node, declared=True)
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = Member(
                    cls, None, node.annotation, node.value, required=node.value is None, declared=True
                )
            case ast.Assign():
                for each in node.targets:
                    if isinstance(each, ast.Name):
                        found[each.id] = Member(cls, value=node.value, declared=True)
    for method in [node for node in statements(cls.node.body) if isinstance(node, Function)]:
        annotated = {each.arg: each.annotation for each in [*method.args.args, *method.args.kwonlyargs]}
        for inner in ast.walk(method):
            if isinstance(inner, ast.AnnAssign):
                targets: list[ast.expr] = [inner.target]
                annotation, value = inner.annotation, inner.value
            elif isinstance(inner, ast.Assign):
                targets, annotation, value = inner.targets, None, inner.value
            else:
                continue
            flat = [each for target in targets for each in getattr(target, "elts", [target])]
            for target in flat:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                    and target.attr not in found
                ):
                    given = annotated.get(value.id) if isinstance(value, ast.Name) else None
                    found[target.attr] = Member(cls, None, annotation or given, value)
    return found
