"""The tables of docs/migrating.md: ``python -m sglang_ext.migrate.tables`` writes them anew."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sglang_ext.migrate.gateway import GATEWAY
from sglang_ext.migrate.lmcache import LMCACHE
from sglang_ext.migrate.rules import Rule
from sglang_ext.migrate.server_flags import SERVER_FLAGS

TABLES: Final[Mapping[str, Mapping[str, Rule]]] = {
    "server": SERVER_FLAGS,
    "lmcache": LMCACHE,
    "router": {f"--{name}": rule for name, rule in GATEWAY.items()},
}
"""By the names of their markers in the page."""


def table(rules: Mapping[str, Rule]) -> str:
    """Rules as a table of Markdown; flags of one rule share a row."""
    rows: dict[int, tuple[list[str], Rule]] = {}
    for name, rule in rules.items():
        rows.setdefault(id(rule), ([], rule))[0].append(f"`{name}`")
    lines = ["| theirs | here | |", "|---|---|---|"]
    for names, rule in rows.values():
        about = "; ".join(part for part in (rule.note, rule.others and f"else: {rule.others}") if part)
        lines.append(f"| {', '.join(names)} | {rule.new} | {about} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """A page with each table between its markers, ``<!-- NAME -->`` and ``<!-- /NAME -->``."""
    for name, rules in TABLES.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        text = table(rules)
        page = between.sub(rf"\1\n{text}\n\n\2", page)
    return page


if __name__ == "__main__":
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/migrating.md")
    path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
