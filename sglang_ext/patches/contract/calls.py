"""Whether a call fits a function's parameters, and whether one function can stand for another."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.patches.contract.source import Found, Function, Member, Members


@dataclass(frozen=True)
class Shape:
    """Parameters: by position, in order; by name only; and those of both that have no default."""

    positional: Sequence[str]
    by_name: frozenset[str]
    required: frozenset[str]
    more: bool = False
    """``*args``"""
    more_named: bool = False
    """``**kwargs``"""
    nameless: int = 0
    """How many of the first may not be given by name."""

    @staticmethod
    def of(function: Function, *, bound: bool) -> Shape:
        """A function's, without its first parameter where that is bound."""
        args = function.args
        plain = [*args.posonlyargs, *args.args]
        without = plain[: len(plain) - len(args.defaults)]
        skip = 1 if bound and plain else 0
        named_only = [
            each.arg
            for each, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
            if default is None
        ]
        return Shape(
            [each.arg for each in plain[skip:]],
            frozenset(each.arg for each in args.kwonlyargs),
            frozenset([*(each.arg for each in without[skip:]), *named_only]),
            args.vararg is not None,
            args.kwarg is not None,
            max(0, len(args.posonlyargs) - skip),
        )

    def refuses(self, given: int, names: Sequence[str], *, partly: bool = False) -> str:
        """Why a call with so many arguments by position, and these by name, does not fit; empty when it does.
        ``partly``: there are more that the text does not show."""
        if given > len(self.positional) and not self.more:
            return f"takes {len(self.positional)} arguments by position, {given} are given"
        known = {*self.positional[max(given, self.nameless) :], *self.by_name}
        for name in names:
            if name not in known and not self.more_named:
                return f"has no parameter {name!r}"
        lacking = self.required - set(self.positional[:given]) - set(names)
        return f"needs {', '.join(sorted(lacking))}" if lacking and not partly else ""

    def cannot_stand_for(self, other: Shape) -> str:
        """Why a call that fits ``other`` may not fit this; empty when each does."""
        return (
            self.refuses(len(other.positional), sorted(other.by_name))
            or self.refuses(
                len([each for each in other.positional if each in other.required]),
                sorted(other.required & other.by_name),
            )
            or self.refuses(other.nameless, [*other.positional[other.nameless :], *sorted(other.by_name)])
        )


def refused(call: ast.Call, shape: Shape) -> str:
    """Why a call in the text does not fit; empty when it does."""
    given = [each for each in call.args if not isinstance(each, ast.Starred)]
    names = [each.arg for each in call.keywords if each.arg is not None]
    partly = len(given) < len(call.args) or len(names) < len(call.keywords)
    return shape.refuses(len(given), names, partly=partly)


def is_static(function: Function) -> bool:
    return any(ast.unparse(each) == "staticmethod" for each in function.decorator_list)


def is_classmethod(function: Function) -> bool:
    return any(ast.unparse(each) == "classmethod" for each in function.decorator_list)


def is_property(function: Function) -> bool:
    return any(ast.unparse(each).rpartition(".")[2].endswith("property") for each in function.decorator_list)


def is_abstract(function: Function) -> bool:
    return any("abstract" in ast.unparse(each) for each in function.decorator_list)


def construction(cls: Found, members: Members) -> Shape | None:
    """The parameters for constructing a class: ``__init__``'s parameters, or its fields; None where neither
    shows."""
    made = members.found.get("__init__")
    if made is not None and made.method is not None:
        return Shape.of(made.method, bound=True)
    assert isinstance(cls.node, ast.ClassDef)
    text = " ".join(
        [
            *(ast.unparse(each) for each in cls.node.decorator_list),
            *(
                ast.unparse(base)
                for each in [cls, *members.bases]
                if isinstance(each.node, ast.ClassDef)
                for base in each.node.bases
            ),
        ]
    )
    if members.open or not any(kind in text for kind in ("dataclass", "Struct", "NamedTuple")):
        return None
    fields = {name: each for name, each in members.found.items() if _is_field(each)}
    required = frozenset(name for name, each in fields.items() if each.required)
    return Shape(list(fields), frozenset(), required)


def _is_field(member: Member) -> bool:
    if member.method is not None or member.annotation is None or not member.declared:
        return False
    default = "" if member.value is None else ast.unparse(member.value).replace(" ", "")
    return "ClassVar" not in ast.unparse(member.annotation) and "init=False" not in default
