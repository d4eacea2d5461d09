"""How wide SGLang's pad ids are, read from the expression that makes them.

A pad stands for a token of a picture, a video or a sound. Prompts are encoded from ids of up to 63 bits
(`sglang_ext.keys`); an SGLang with wider ones would end each scheduler at its first picture.
"""

from __future__ import annotations

import ast
from typing import Final

from sglang_ext.keys import MAX_WIDE_ID
from sglang_ext.patches.contract.source import Source

MODULE: Final = "sglang.srt.managers.schedule_batch"
SHIFT: Final = "MM_PAD_SHIFT_VALUE"


def largest_pad(source: Source) -> int | None:
    """The largest id that an expression ``MM_PAD_SHIFT_VALUE + (hash & mask)`` or ``+ (hash % size)`` gives.

    None where there is no such expression.
    """
    module = source.module(MODULE)
    if module is None:
        return None
    found = []
    for node in ast.walk(module.tree):
        match node:
            case ast.BinOp(left=ast.Name(id=name), op=ast.Add(), right=ast.BinOp(op=op, right=limit)) if (
                name == SHIFT and isinstance(op, ast.BitAnd | ast.Mod)
            ):
                shift, most = _value(module.names, node.left), _value(module.names, limit)
                if shift is not None and most is not None:
                    found.append(shift + most - isinstance(op, ast.Mod))
    return max(found, default=None)


def problem(source: Source) -> str:
    """Why pads cannot be encoded; empty where they can."""
    most = largest_pad(source)
    if most is None:
        return f"no expression {SHIFT} + (hash & mask) says how wide pads are"
    return "" if most <= MAX_WIDE_ID else f"pads are up to {most}, above {MAX_WIDE_ID}"


def _value(names: object, node: ast.expr) -> int | None:
    """A constant expression of integers and names of the module."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name) if isinstance(names, dict):
            entry = names.get(name)
            given = entry.value if isinstance(entry, ast.Assign | ast.AnnAssign) else None
            return None if given is None else _value(names, given)
        case ast.BinOp(left=left, op=op, right=right):
            first, second = _value(names, left), _value(names, right)
            if first is None or second is None:
                return None
            match op:
                case ast.LShift():
                    return first << second
                case ast.Sub():
                    return first - second
                case ast.Add():
                    return first + second
                case ast.Pow():
                    return int(first**second)
    return None
