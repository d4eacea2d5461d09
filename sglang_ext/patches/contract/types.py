"""Types of our expressions, as far as names and annotations, ours and SGLang's, give them."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Final

from sglang_ext.patches.contract.calls import is_property
from sglang_ext.patches.contract.source import Found, Function, Imported, Member, Module, Source

_BATCH = "sglang.srt.managers.schedule_batch"
_KNOWN: Final = {
    "req": f"{_BATCH}.Req",
    "batch": f"{_BATCH}.ScheduleBatch",
    "scheduler": "sglang.srt.managers.scheduler.Scheduler",
    "server_args": "sglang.srt.server_args.ServerArgs",
    "adder": "sglang.srt.managers.schedule_policy.PrefillAdder",
    "ctx": "sglang.srt.mem_cache.registry.TreeCacheBuildContext",
    "kvcache": "sglang.srt.mem_cache.memory_pool.KVCache",
    "decode_req": "sglang.srt.disaggregation.decode.DecodeRequest",
}
"""Types of variables and attributes of these names where no annotation gives one; leading underscores are
ignored."""


class Types:
    """One module of ours.

    Args:
        source: both.
        module: ours.
    """

    def __init__(self, source: Source, module: Module) -> None:
        self._source = source
        self._module = module
        self.inside: list[Found] = []
        """The classes around the code being read."""

    def knows(self, name: str) -> bool:
        """Whether a name alone gives its type."""
        return name.lstrip("_") in _KNOWN

    def annotated(
        self, module: Module, annotation: ast.expr | None, local: Mapping[str, Imported] = {}
    ) -> Found | None:
        """The class that an annotation names, ``X | None`` and ``Optional[X]`` included."""
        match annotation:
            case ast.Constant(value=str(text)):
                try:
                    return self.annotated(module, ast.parse(text, mode="eval").body, local)
                except SyntaxError:
                    return None
            case ast.BinOp(left=left, right=right):
                return self.annotated(module, left, local) or self.annotated(module, right, local)
            case ast.Subscript(value=value, slice=inner):
                if ast.unparse(value).rpartition(".")[2] in ("Optional", "A", "Annotated"):
                    first = inner.elts[0] if isinstance(inner, ast.Tuple) else inner
                    return self.annotated(module, first, local)
                return None
            case ast.Name() | ast.Attribute():
                found = self._source.resolve(module, annotation, local)
                return found if isinstance(found, Found) and isinstance(found.node, ast.ClassDef) else None
        return None

    def type(
        self, node: ast.AST, scope: Mapping[str, Found | None], local: Mapping[str, Imported]
    ) -> Found | None:
        """The class of an expression's value, as far as names and annotations give it."""
        match node:
            case ast.Name(id=name):
                return scope[name] if name in scope else self._known(name)
            case ast.Attribute(value=value, attr=name):
                owner = self.type(value, scope, local)
                member = None if owner is None else self._source.members(owner).found.get(name)
                return (None if member is None else self._held(member)) or self._known(name)
            case ast.Call(func=ast.Name(id="super")) if self.inside:
                return self.inside[-1]
            case ast.Call(func=function):
                found = self.callee(function, scope, local)
                if isinstance(found, Found) and isinstance(found.node, ast.ClassDef):
                    return found
                if isinstance(found, Found) and isinstance(found.node, Function):
                    return self.annotated(found.module, found.node.returns)
        return None

    def _known(self, name: str) -> Found | None:
        path = _KNOWN.get(name.lstrip("_"))
        found = self._source.find(path) if path else None
        return found if isinstance(found, Found) else None

    def _held(self, member: Member) -> Found | None:
        """The type of a field or property."""
        module = member.owner.module
        if member.method is not None:
            return self.annotated(module, member.method.returns) if is_property(member.method) else None
        if member.annotation is not None:
            return self.annotated(module, member.annotation)
        if isinstance(member.value, ast.Call):
            return self.annotated(module, member.value.func)
        return None

    def callee(
        self, function: ast.expr, scope: Mapping[str, Found | None], local: Mapping[str, Imported]
    ) -> Found | Module | None:
        if isinstance(function, ast.Attribute):
            owner = self.type(function.value, scope, local)
            if owner is not None:
                return self._source.inside(owner, function.attr)
        if isinstance(function, ast.Name) and function.id in scope:
            return None
        return self._source.resolve(self._module, function, local)
