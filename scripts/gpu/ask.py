"""ask.py URL OUT.json --pool TOKENS: TTFT by where a prompt's KV is, of one server (measurements 2 and 3).

Prompts are random token ids. Each is asked for three times with the same beginning and `--new` other tokens
behind it: computed, from HBM, and, after other prompts have filled the pool (`--pool`), from below HBM.
`--hbm-only` leaves out the last, which stock SGLang does not have. An answer whose beginning was not found
where it should be is printed and not counted. The TTFT is the time to the first streamed event.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out

from gpu_client import Streamed, ask, fill, tokens

PLACES = ("computed", "HBM", "below")


def at(answer: Streamed, known: int) -> str | None:
    """The place that had the KV of the prompt's ``known`` first tokens; None where only a part was found."""
    if answer.cached < 16:
        return "computed"
    if answer.cached < 0.9 * known:
        return None
    return "below" if answer.below > known / 2 else "HBM"


def measured(given: argparse.Namespace, rng: random.Random, length: int) -> dict[str, Any]:
    """Medians in milliseconds by place, for prompts of one length."""
    found: dict[str, list[float]] = {place: [] for place in PLACES}
    known = length - given.new
    for _ in range(given.rounds):
        base = tokens(rng, known)
        for place in PLACES[: 2 if given.hbm_only else 3]:
            if place == "below":
                fill(given.url, rng, given.pool)
            answer = ask(given.url, base + tokens(rng, given.new))
            if at(answer, known) == place:
                found[place].append(answer.times[0])
            else:
                print(f"{length} tokens, {place}: found elsewhere, {answer.cached} cached", flush=True)
            time.sleep(0.1)
    medians = {place: 1000 * statistics.median(each) if each else None for place, each in found.items()}
    return {"tokens": length, "new": given.new, "counted": {k: len(v) for k, v in found.items()}, **medians}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--pool", type=int, required=True, help="tokens in HBM")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=512, help="tokens behind a known beginning")
    parser.add_argument("--hbm-only", action="store_true")
    given = parser.parse_args()
    rng, rows = random.Random(1), []
    ask(given.url, tokens(rng, given.new))  # kernels are compiled by the first one
    for length in given.lengths:
        rows.append(measured(given, rng, length))
        print(rows[-1], flush=True)
        given.out.write_text(json.dumps({"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
