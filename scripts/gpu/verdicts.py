"""verdicts.py FOLDER [--link GB/S]: judge what first_minutes.sh wrote (measurements 2, 3, 6 and 13).

Prints a row for each figure with its aim, and writes them to FOLDER/verdicts.json. A figure whose files are
not there has not run. The exit status is 1 when an aim is missed.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NOT_RUN, MET, MISSED = "not run", "met", "missed"
KV_BYTES = 131_072
"""Of a token of the 8B shape, in bfloat16."""
OF_LIMIT = 1.15
"""TTFT of a hit in DRAM, of what the link and the new tokens take at least."""
OF_STOCK = 1.02
"""TTFT and TPOT with the plugin, or with writes, of those without."""
FLOOR = 1e-4
"""Log probabilities that differ by no more are the same, even where two cold runs are equal."""
FOUND = 0.9
"""Least share of answers that came from the tier they are to show."""

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One figure. measurement: its number in docs/benchmarks/gpu.md."""

    measurement: str
    what: str
    verdict: str
    text: str


def at_most(measurement: str, what: str, value: float | None, most: float | None, unit: str = "ms") -> Row:
    """A figure with an upper bound. Not run where either is missing."""
    if value is None or most is None:
        return Row(measurement, what, NOT_RUN, "")
    verdict = MET if value <= most else MISSED  # NaN misses
    return Row(measurement, what, verdict, f"{value:.5g} {unit}, at most {most:.5g}".replace("  ", " "))


def link_of(check: Json) -> float | None:
    """Bytes per second to the GPU, from the JSON of ``gpu-check``."""
    for row in check.get("findings", ()):
        found = re.search(r"to the GPU ([\d.]+) GB/s", row["text"]) if row["subject"] == "limits" else None
        if found:
            return 1e9 * float(found[1])
    return None


def times(row: float | None, factor: float) -> float | None:
    """A bound as a multiple; None stays None."""
    return None if row is None else factor * row


def ttft(ours: Json | None, stock: Json | None, hicache: Json | None, link: float | None) -> Iterator[Row]:
    """Measurements 2 and 3, from the files of ask.py.

    link: bytes per second from DRAM to the GPU.
    """
    by = [{row["tokens"]: row for row in (found or {}).get("rows", ())} for found in (ours, stock, hicache)]
    if not by[0]:
        yield Row("2", "TTFT of a hit in DRAM", NOT_RUN, "")
        yield Row("3", "TTFT computed and from HBM, of stock's", NOT_RUN, "")
    for length, row in by[0].items():
        theirs, peer = by[1].get(length, {}), by[2].get(length, {})
        yield at_most("2", f"{length} tokens from DRAM, HiCache's", row["below"], peer.get("below"))
        limit = None
        if link is not None and row["HBM"] is not None:
            # A hit in HBM computes the same new tokens.
            limit = max(row["HBM"], 1000 * (length - row["new"]) * KV_BYTES / link)
        yield at_most("2", f"{length} tokens from DRAM, of the limit", row["below"], times(limit, OF_LIMIT))
        for place in ("computed", "HBM"):
            bound = times(theirs.get(place), OF_STOCK)
            yield at_most("3", f"{length} tokens, {place}, of stock's", row[place], bound)


def tpot(on: Json | None, off: Json | None, hicache: Json | None) -> Iterator[Row]:
    """Measurement 6, from the files of decode.py: with writes to DRAM, and without a DRAM tier."""
    on, off, hicache = on or {}, off or {}, hicache or {}
    yield at_most(
        "6", "TPOT beside writes, of without", on.get("tpot_ms"), times(off.get("tpot_ms"), OF_STOCK)
    )
    longest = off["gap_ms"] + off["tpot_ms"] if off else None
    yield at_most("6", "longest gap, of without and one pass", on.get("gap_ms"), longest)
    yield at_most("6", "TPOT beside writes, HiCache's", on.get("tpot_ms"), hicache.get("tpot_ms"))
    ours, theirs = on.get("beside_loads", {}), hicache.get("beside_loads", {})
    if ours and ours["loaded"] < FOUND * ours["asked"]:
        text = f"{ours['loaded']} of {ours['asked']} prompts were loaded"
        yield Row("6", "TPOT beside loads", NOT_RUN, text)
    else:
        yield at_most("6", "TPOT beside loads, HiCache's", ours.get("tpot_ms"), theirs.get("tpot_ms"))


def apart(one: Json, other: Json) -> float:
    """The largest difference of log probabilities of two answers; infinite where tokens differ, or where a
    log probability is not a number (null)."""
    if one["tokens"] != other["tokens"]:
        return math.inf
    pairs = list(zip(one["logprobs"], other["logprobs"], strict=True))
    if any(value is None for pair in pairs for value in pair):
        return math.inf
    return max((abs(a - b) for a, b in pairs), default=0.0)


def farthest(cold: Mapping[str, Json], others: Mapping[str, Json]) -> tuple[float, int]:
    """Over the prompts of ``others``: the largest difference of log probabilities among answers with equal
    tokens, and how many answers have other tokens."""
    each = [apart(cold[number], answer) for number, answer in others.items()]
    return max((value for value in each if value < math.inf), default=0.0), sum(map(math.isinf, each))


def same(first: Json | None, second: Json | None, ours: Json | None) -> Iterator[Row]:
    """Measurement 13, from the files of same.py: two cold runs of stock servers, and ours."""
    if not (first and second and ours):
        yield Row("13", "same answers by log probability", NOT_RUN, "")
        return
    cold = first["cold"]
    noise, unequal = farthest(cold, second["cold"])
    bound = max(noise, FLOOR)
    for place in ("cold", "HBM", "below"):
        answers = ours.get(place, {})
        came = {"cold": "computed"}.get(place, place)
        found = {number: answer for number, answer in answers.items() if answer["from"] == came}
        what = f"{place}: answers of stock's cold run"
        if not answers or len(found) < FOUND * len(answers):
            yield Row("13", what, NOT_RUN, f"{len(found)} of {len(answers)} answers came from there")
            continue
        far, others = farthest(cold, found)
        text = (
            f"{len(found)} answers: {others} with other tokens, at most {unequal}; "
            f"log probabilities {far:.1e} apart, at most {bound:.1e}"
        )
        yield Row("13", what, MET if others <= unequal and far <= bound else MISSED, text)
    yield _twin(cold, ours.get("damaged", {}), bound)


def _twin(cold: Json, damaged: Json, bound: float) -> Row:
    what = "twin with one damaged byte: another answer"
    if any(answer["from"] != "below" for answer in damaged.values()) or not damaged:
        return Row("13", what, NOT_RUN, "its prompt was not loaded")
    far = min(apart(cold[number], answer) for number, answer in damaged.items())
    verdict = MET if far > bound else MISSED
    return Row("13", what, verdict, f"{far:.1e} apart, more than {bound:.1e}")


def judge(folder: Path, link: float | None = None) -> list[Row]:
    """All rows. link: bytes per second, instead of what gpu-check found."""

    def read(name: str) -> Any:
        path = folder / f"{name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    link = link or link_of(read("gpu-check") or {})
    return [
        *ttft(read("ttft-ours"), read("ttft-stock"), read("ttft-hicache"), link),
        *tpot(read("tpot-ours"), read("tpot-off"), read("tpot-hicache")),
        *same(read("answers-stock-1"), read("answers-stock-2"), read("answers-ours")),
    ]


def main(words: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--link", type=float, help="GB/s to the GPU, instead of gpu-check's")
    given = parser.parse_args(words)
    rows = judge(given.folder, given.link and 1e9 * given.link)
    for row in rows:
        print(f"{row.measurement:>2}  {row.verdict:<7}  {row.what}: {row.text}")
    text = json.dumps([asdict(row) for row in rows], indent=1)
    (given.folder / "verdicts.json").write_text(text, encoding="utf-8")
    return int(any(row.verdict == MISSED for row in rows))


if __name__ == "__main__":
    sys.exit(main())
