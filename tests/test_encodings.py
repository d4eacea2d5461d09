"""Text is read and written as UTF-8, whatever the locale: in the C locale Python may take ASCII.

Ruff's PLW1514 sees this where it knows the type of the opened object. This test reads the rest from the
source: methods by their names, and the output of child processes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("sglang_ext", "scripts", "benchmarks", "examples")
MODES = frozenset("+abrtwx")
WITHOUT_TEXT = ("os", "tarfile")
"""Modules whose ``open`` never decodes."""


def _is_mode(word: object) -> bool:
    return isinstance(word, str) and 0 < len(word) <= 3 and set(word) <= MODES


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def unspecified(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that decode or encode text in the encoding of the locale."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        if "encoding" in keywords or None in keywords:
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        owner = ast.unparse(node.func).rpartition(".")[0]
        given = [*node.args, *([keywords["mode"]] if "mode" in keywords else [])]
        modes = [word.value for word in given if isinstance(word, ast.Constant) and _is_mode(word.value)]
        text = bool(modes) and "b" not in str(modes[0])
        if (
            (name == "read_text" and not node.args)
            or (name == "write_text" and len(node.args) == 1)
            or (name == "fdopen" and (text or not modes))
            or (name in ("NamedTemporaryFile", "TemporaryFile") and text)
            or (name == "open" and owner not in ("", *WITHOUT_TEXT) and text)
            or (
                any(_is_true(keywords[word]) for word in ("text", "universal_newlines") if word in keywords)
                and name in ("run", "Popen", "check_output")
            )
        ):
            yield node


def test_the_source_names_every_encoding() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for call in unspecified(ast.parse(path.read_bytes()))
    ]
    assert not found


@pytest.mark.parametrize(
    "breach",
    [
        "path.read_text()",
        "path.read_text(errors='replace')",
        "path.write_text(text)",
        "path.open('w')",
        "path.open(mode='r+')",
        "os.fdopen(descriptor)",
        "os.fdopen(descriptor, 'w')",
        "tempfile.NamedTemporaryFile('w')",
        "subprocess.run(words, text=True)",
        "subprocess.Popen(words, universal_newlines=True)",
    ],
)
def test_a_breach_is_found(breach: str) -> None:
    assert len([*unspecified(ast.parse(breach))]) == 1
    assert not [*unspecified(ast.parse(breach.replace(")", ", encoding='utf-8')").replace("(,", "(")))]


@pytest.mark.parametrize(
    "good",
    [
        "path.read_text('utf-8')",
        "path.read_bytes()",
        "path.open('rb')",
        "os.open(path, flags)",
        "os.fdopen(descriptor, 'wb')",
        "self.files.open(path)",
        "subprocess.run(words)",
        "subprocess.run(words, text=False)",
    ],
)
def test_what_is_right_is_not_found(good: str) -> None:
    assert not [*unspecified(ast.parse(good))]
