"""Output of the doctor: findings, on a terminal or as JSON."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

GIB = 1 << 30
MIB = 1 << 20

_INDENT = " " * 27


class Level(enum.Enum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """The checked feature works; something else will not, or not well."""
    PROBLEM = "problem"
    """A start would fail, or cached blocks are lost or out of reach."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    level: Level
    subject: str
    text: str
    advice: str = ""
    """The next step; empty when all is well."""


def problems(found: Sequence[Finding]) -> int:
    """How many findings are problems."""
    return sum(finding.level is Level.PROBLEM for finding in found)


def show(found: Sequence[Finding], console: Console) -> None:
    """A line for each finding, and one for its advice."""
    marks = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
    for finding in found:
        mark = f"[{marks[finding.level]}]{finding.level.value:8}[/]"
        text = escape(finding.text.replace("\n", "\n" + _INDENT))
        console.print(f"{mark} {finding.subject:16}  {text}", soft_wrap=True, highlight=False)
        if finding.advice:
            console.print(f"{_INDENT}{escape(finding.advice)}", soft_wrap=True, highlight=False)


def as_json(found: Sequence[Finding]) -> list[dict[str, Any]]:
    """The findings as plain data."""
    return [
        {
            "level": finding.level.value,
            "subject": finding.subject,
            "text": finding.text,
            "advice": finding.advice,
        }
        for finding in found
    ]


def size(nbytes: float) -> str:
    """A number of bytes for people."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.1f} MiB"
