"""Print the share of popular models whose KV is cached in HBM, DRAM and on disk, with a proof of each.

python scripts/model_share.py [--write]

The list of models is docs/models.json, with its date and sources. A model counts when the three tiers of its
family (`sglang_ext/patches/adapter/families.py`) are proven by a server, the oracle or the emulator; a
reading of the source does not count. Models that SGLang does not serve are left out and listed. `--write`
writes the table and the shares into docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_ext.patches.adapter.families import COLUMNS, TABLE, Family

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "models.json"
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- from scripts/model_share.py -->", "<!-- end -->"


def read() -> dict[str, Any]:
    """The list of models."""
    data: dict[str, Any] = json.loads(DATA.read_text("utf-8"))
    return data


def shares(data: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """For each source, the sum over proven models, over those with proven speculation too, and
    over models that SGLang serves."""
    found = {}
    for column in data["columns"]:
        served = [model for model in data["models"] if "unserved" not in model]
        proven = [model for model in served if TABLE[model["family"]].proven]
        drafted = [model for model in proven if TABLE[model["family"]].drafts]
        done, also, all_of = (
            sum(model.get(column, 0) for model in some) for some in (proven, drafted, served)
        )
        found[column] = (done, also, all_of)
    return found


def share_lines(data: dict[str, Any]) -> Iterator[str]:
    """The shares as a table, and the models that are left out."""
    yield "| source | proven | of | share | with speculation proven |"
    yield "|---|---|---|---|---|"
    for column, (done, also, all_of) in shares(data).items():
        counts = f"{done:g} | {all_of:g} | {done / all_of:.0%} | {also:g}, {also / all_of:.0%}"
        yield f"| {data['columns'][column]} | {counts} |"
    yield ""
    for model in data["models"]:
        if "unserved" in model:
            numbers = ", ".join(f"{column} {model[column]}" for column in data["columns"] if column in model)
            yield f"Left out: {model['name']} ({numbers}): {model['unserved']}."


def _cell(family: Family, column: str) -> str:
    proof = next((proof for name, proof in family.cells.items() if name == column), None)
    if proof is None:
        return "\u2013"
    return f"[{proof.kind}](#{proof.kind})"


def _served_lines() -> Iterator[str]:
    served = [family for family in TABLE.values() if family.cells]
    yield f"| family | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for family in served:
        cells = " | ".join(_cell(family, column) for column in COLUMNS)
        yield f"| **{family.name}**: {family.members} | {cells} |"
    yield ""
    yield "Refused at start, before weights are loaded:"
    yield ""
    yield "| family | models | the way out |"
    yield "|---|---|---|"
    for family in TABLE.values():
        if not family.cells:
            yield f"| {family.name} | {family.members} | {family.way_out}. |"


def _test_lines() -> Iterator[str]:
    yield "| family | tests |"
    yield "|---|---|"
    for family in TABLE.values():
        by_test: dict[str, list[str]] = {}
        for column in COLUMNS:
            if column in family.cells and family.cells[column].test:
                by_test.setdefault(family.cells[column].test, []).append(column)
        if by_test:
            tests = "; ".join(f"{', '.join(columns)}: `{test}`" for test, columns in by_test.items())
            yield f"| {family.name} | {tests} |"


def generated() -> str:
    """The part of docs/models.md that is written by this script."""
    data = read()
    lines = (
        *_served_lines(),
        "",
        "## Share of popular models",
        "",
        f"Of {data['date']}. Models count whose HBM, DRAM and disk cells are proven by a server, the oracle",
        "or the emulator.",
        "",
        *share_lines(data),
        "",
        "## Tests",
        "",
        "Files are below `tests`.",
        "",
        *_test_lines(),
    )
    return "\n".join(lines)


def page(text: str) -> str:
    """The page with its generated part as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{generated()}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    """Print the shares, or write the page."""
    parser = argparse.ArgumentParser(description="Print the share of popular models whose KV is cached.")
    parser.add_argument("--write", action="store_true", help="write docs/models.md instead")
    if parser.parse_args(arguments).write:
        PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    else:
        print("\n".join(share_lines(read())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
