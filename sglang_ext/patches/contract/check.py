"""Whether the patches fit SGLang's source: every name, call, member, override and hook in our text.

Only facts that text cannot show are listed by hand: the type of a variable such as ``req`` where it is not
annotated (``_KNOWN``). From there types follow SGLang's own annotations.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from sglang_ext.patches.contract import pads
from sglang_ext.patches.contract.calls import (
    Shape,
    construction,
    is_abstract,
    is_property,
    is_static,
    refused,
)
from sglang_ext.patches.contract.needs import SGLANG, Broken, Needs, Report
from sglang_ext.patches.contract.source import Found, Function, Imported, Module, Source
from sglang_ext.patches.contract.types import Types

_DOTTED = re.compile(r"sglang(\.\w+)+")


def check(source: Source, modules: Iterable[Module]) -> Report:
    """Hold modules of ours to the SGLang in ``source``."""
    report = Report()
    readers = [_Reader(source, module, report) for module in modules]
    hooked: dict[tuple[str, str], dict[str, Found]] = {}
    for reader in readers:
        reader.read_hooks(hooked)
    for reader in readers:
        reader.read(hooked)
    if too_wide := pads.problem(source):
        report.broken.append(Broken("sglang_ext/keys.py", f"{pads.MODULE}.{pads.SHIFT}", too_wide))
    report.broken = sorted(
        set(report.broken), key=lambda each: (each.at.partition(":")[0], each.need, each.at)
    )
    return report


class _Reader:
    """One module of ours."""

    def __init__(self, source: Source, module: Module, report: Report) -> None:
        self._source = source
        self._module = module
        self._report = report
        self._needs = Needs(source, module, report)
        self._types = Types(source, module)

    # -- hooks and targets --------------------------------------------------------------------------------

    def read_hooks(self, hooked: dict[tuple[str, str], dict[str, Found]]) -> None:
        """Read the hooks' targets, and take the types of our hooks' parameters from SGLang's."""
        for node in ast.walk(self._module.tree):
            if isinstance(node, ast.ClassDef):
                name = f"{self._module.name}.{node.name}"
                self._report.classes.append(Found(name, self._module, node))
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id == "Hook" and len(node.args) == 3:
                self._hook(node, hooked)
            elif node.func.id == "Patch":
                named = [each.value for each in node.keywords if each.arg == "targets"]
                for given in [*named, *node.args[3:4]]:
                    paths = [text for each in getattr(given, "elts", ()) if (text := self._needs.text(each))]
                    self._report.targets.update(paths)
                    self._replacements(paths)

    def _replacements(self, paths: Iterable[str]) -> None:
        """Functions in our ``apply`` that have the name of a target are put in its place."""
        apply = self._module.names.get("apply")
        if not isinstance(apply, Function):
            return
        ours = {each.name: each for each in ast.walk(apply) if isinstance(each, Function)}
        for path in paths:
            target, mine = self._source.find(path), ours.get(path.rpartition(".")[2])
            if isinstance(target, Found) and isinstance(target.node, Function) and mine is not None:
                theirs = _with_first(Shape.of(target.node, bound=False), 0, target)
                problem = Shape.of(mine, bound=False).cannot_stand_for(theirs)
                self._needs.need("hooks", path, mine, problem and f"its replacement {problem}")

    def _hook(self, node: ast.Call, hooked: dict[tuple[str, str], dict[str, Found]]) -> None:
        path, kind = self._needs.text(node.args[0]), self._needs.text(node.args[1])
        ours = self._source.resolve(self._module, node.args[2])
        if path is None:
            self._needs.need(
                "hooks", ast.unparse(node), node, "its target is not written out, and cannot be checked"
            )
            return
        self._report.targets.add(path)
        target = self._source.find(path)
        if not isinstance(target, Found) or not isinstance(target.node, Function):
            return  # a name that is gone is reported with the other names
        if not isinstance(ours, Found) or not isinstance(ours.node, Function):
            return
        mine, theirs = ours.node, target.node
        first = 0 if kind == "before" else 1
        bound = _with_first(Shape.of(theirs, bound=False), first, target)
        problem = Shape.of(mine, bound=False).cannot_stand_for(bound)
        self._needs.need("hooks", f"{path} ({kind})", node, problem and f"{mine.name} {problem}")
        types = hooked.setdefault((ours.module.name, mine.name), {})
        arguments = mine.args.args[first:]
        for at, (own, their) in enumerate(zip(arguments, theirs.args.args, strict=False)):
            found = (
                target.owner
                if at == 0 and target.owner is not None and not is_static(theirs)
                else self._types.annotated(target.module, their.annotation)
            )
            if found is not None and not self._types.knows(own.arg):
                types[own.arg] = found

    # -- reading ------------------------------------------------------------------------------------------

    def read(self, hooked: Mapping[tuple[str, str], dict[str, Found]]) -> None:
        self._hooked = hooked
        for node in ast.walk(self._module.tree):
            if isinstance(node, ast.JoinedStr | ast.Constant):
                path = self._needs.text(node)
                if path and _DOTTED.fullmatch(path):
                    self._needs.exists(path, node)
        self._body(self._module.tree.body, {}, {})

    def _body(
        self, body: Iterable[ast.AST], scope: dict[str, Found | None], local: dict[str, Imported]
    ) -> None:
        for node in body:
            self._visit(node, scope, local)

    def _visit(self, node: ast.AST, scope: dict[str, Found | None], local: dict[str, Imported]) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._imports(node, local)
                return
            case ast.ClassDef():
                self._class(node, scope, local)
                return
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self._function(node, scope, local)
                return
        for child in ast.iter_child_nodes(node):
            self._visit(child, scope, local)
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found = self._types.type(value, scope, local)
                if found is not None or not self._types.knows(name):
                    scope[name] = found
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                self._declare(name, annotation, scope, local)
            case ast.Attribute():
                self._member(node, scope, local)
            case ast.Call():
                self._call(node, scope, local)

    def _imports(self, node: ast.Import | ast.ImportFrom, local: dict[str, Imported]) -> None:
        for name, entry in self._module.imports(node).items():
            local[name] = entry
            if entry.module == SGLANG or entry.module.startswith(f"{SGLANG}."):
                self._needs.exists(f"{entry.module}.{entry.member}" if entry.member else entry.module, node)
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.startswith(f"{SGLANG}."):
                    self._needs.exists(each.name, node)

    def _function(
        self,
        node: Function | ast.Lambda,
        scope: Mapping[str, Found | None],
        local: Mapping[str, Imported],
    ) -> None:
        inner, imports = dict(scope), dict(local)
        hooked = self._hooked.get((self._module.name, getattr(node, "name", "")), {})
        for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
            inner.pop(each.arg, None)
            if each.arg in hooked:
                inner[each.arg] = hooked[each.arg]
            elif each.annotation is not None:
                self._declare(each.arg, each.annotation, inner, imports)
        method = self._types.inside and not isinstance(node, ast.Lambda) and not is_static(node)
        if method and node.args.args and node.args.args[0].arg in ("self", "cls"):
            inner[node.args.args[0].arg] = self._types.inside[-1]
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        self._body([*getattr(node, "decorator_list", ()), *body], inner, imports)

    def _declare(
        self, name: str, annotation: ast.expr, scope: dict[str, Found | None], local: Mapping[str, Imported]
    ) -> None:
        if ast.unparse(annotation) in ("Any", "Any | None"):
            scope.pop(name, None)
        else:
            scope[name] = self._types.annotated(self._module, annotation, local)

    # -- the checks ---------------------------------------------------------------------------------------

    def _member(
        self, node: ast.Attribute, scope: Mapping[str, Found | None], local: Mapping[str, Imported]
    ) -> None:
        owner = self._types.type(node.value, scope, local)
        if owner is None:
            found = self._source.resolve(self._module, node.value, local)
            if not (isinstance(found, Found) and isinstance(found.node, ast.ClassDef)):
                return
            if isinstance(node.value, ast.Name) and node.value.id in scope:
                return
            owner = found
        self._needs.has(owner, node.attr, node)

    def _call(self, node: ast.Call, scope: Mapping[str, Found | None], local: Mapping[str, Imported]) -> None:
        match node:
            case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
                owner = self._types.type(value, scope, local)
                if owner is not None:
                    self._needs.has(owner, name, node)
                return
        found = self._types.callee(node.func, scope, local)
        if not isinstance(found, Found) or not found.path.startswith(f"{SGLANG}."):
            return
        if isinstance(found.node, ast.ClassDef):
            shape = construction(found, self._source.members(found))
        elif isinstance(found.node, Function) and not is_property(found.node):
            on_class = (
                isinstance(node.func, ast.Attribute)
                and self._types.type(node.func.value, scope, local) is None
            )
            bound = found.owner is not None and not is_static(found.node)
            by_class = any(ast.unparse(each) == "classmethod" for each in found.node.decorator_list)
            shape = Shape.of(found.node, bound=bound and (by_class or not on_class))
        else:
            return
        if shape is not None:
            self._needs.need("calls", found.path, node, refused(node, shape))

    def _class(self, node: ast.ClassDef, scope: dict[str, Found | None], local: dict[str, Imported]) -> None:
        path = f"{self._module.name}.{node.name}"
        cls = Found(path, self._module, node)
        members = self._source.members(cls)
        theirs = [each for each in members.bases if each.module.name.startswith(f"{SGLANG}.")]
        bases = [each for ours in self._report.classes for each in self._source.members(ours).bases]
        extended = path in {each.path for each in bases}
        for name, member in members.found.items() if theirs and not extended else ():
            if member.method is not None and is_abstract(member.method):
                self._needs.need("overrides", f"{member.owner.path}.{name}", node, f"{node.name} lacks it")
        held: set[str] = set()
        for base in theirs:
            for name, their in self._source.members(base).found.items():
                mine = members.found.get(name)
                if name in held:
                    continue  # to the nearest base, which SGLang's callers know to stand for those above it
                held.add(name)
                if mine is None or mine.method is None or their.method is None:
                    continue
                if mine.owner.module.name.startswith(f"{SGLANG}.") or not _calls(name, their.method):
                    continue
                if is_property(mine.method) or is_property(their.method):
                    continue
                problem = Shape.of(mine.method, bound=not is_static(mine.method)).cannot_stand_for(
                    Shape.of(their.method, bound=not is_static(their.method))
                )
                self._needs.need(
                    "overrides",
                    f"{their.owner.path}.{name}",
                    mine.method,
                    problem and f"{node.name}'s {problem}",
                )
        self._types.inside.append(cls)
        self._body([*node.decorator_list, *node.body], dict(scope), dict(local))
        self._types.inside.pop()


def _calls(name: str, theirs: Function) -> bool:
    """Whether SGLang calls a method as its base class has it: a constructor only where that is stated."""
    return not name.startswith("__") or (name == "__init__" and is_abstract(theirs))


def _with_first(shape: Shape, before: int, target: Found) -> Shape:
    """The arguments of a hook: ``self`` and other arguments that SGLang never passes by name come by
    position."""
    names = [f"<{at}>" for at in range(before)]
    return Shape(
        [*names, *shape.positional],
        shape.by_name,
        frozenset([*names, *shape.required]),
        shape.more,
        shape.more_named,
        before + max(0 if target.owner is None else 1, shape.nameless),
    )


def modules_in(source: Source, package: str, folder: Path) -> Iterator[Module]:
    """Every module of a package of ours."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join([package, *(parts[:-1] if parts[-1] == "__init__" else parts)])
        found = source.module(name)
        if found is not None:
            yield found
