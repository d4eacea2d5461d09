"""The code to read when following SGLang from one version to another: the parts that we touch and that
differ."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator

from sglang_ext.patches.contract.source import Found, Source


def differences(old: Source, new: Source, paths: Iterable[str]) -> Iterator[str]:
    """A unified diff of each function or class, by dotted name, whose code is not the same in both. Comments,
    docstrings, annotations and layout do not count."""
    for path in sorted(set(paths)):
        before, after = old.find(path), new.find(path)
        if not isinstance(before, Found) or not isinstance(after, Found):
            if isinstance(before, Found) or isinstance(after, Found):
                yield f"{'-' if isinstance(before, Found) else '+'} {path}\n"
            continue
        if _meaning(before) != _meaning(after):
            lines = (before.code.splitlines(keepends=True), after.code.splitlines(keepends=True))
            yield "".join(difflib.unified_diff(*lines, f"{path} (old)", f"{path} (new)"))


class _Bare(ast.NodeTransformer):
    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.returns = None
        self.generic_visit(node)
        return node


def _meaning(found: Found) -> str:
    """The code without docstrings and annotations. A class counts by its fields and its methods'
    parameters."""
    node = ast.parse(ast.unparse(found.node)).body[0]
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                each.body = [ast.Pass()]
    return ast.dump(_Bare().visit(node))
