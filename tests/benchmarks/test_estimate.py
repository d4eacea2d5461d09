"""Traces as prompts for real servers: equal blocks become equal tokens, and no more than that."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from benchmarks.agents.recorded import FILE, held_out
from benchmarks.estimate.__main__ import BLOCK, coding, mooncake


def written(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_prompts_share_as_many_blocks_as_their_trace_says(tmp_path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 512 * 3 + 100, "output_length": 9, "hash_ids": [0, 1, 2, 3]},
        {"timestamp": 0, "input_length": 512 * 4, "output_length": 9, "hash_ids": [0, 1, 4, 5]},
        {"timestamp": 0, "input_length": 512 * 500, "output_length": 9, "hash_ids": list(range(500))},
    ]
    written(tmp_path / "mooncake" / "t.jsonl.gz", rows)
    one, other = mooncake(tmp_path, "t.jsonl.gz", 10)  # the third is too long
    assert (len(one), len(other)) == (3 * BLOCK + 3, 4 * BLOCK)
    assert one[: 2 * BLOCK] == other[: 2 * BLOCK]
    assert one[2 * BLOCK : 3 * BLOCK] != other[2 * BLOCK : 3 * BLOCK]


def test_the_sessions_that_are_held_out_are_the_others(tmp_path) -> None:
    steps = [{"t": at, "hash_runs": [[7, 8 + 4 * at]]} for at in range(3)]
    written(tmp_path / FILE, [{"id": f"s{number}", "requests": steps} for number in range(9)])
    both = [len(coding(tmp_path, 100, held=held)) for held in (False, True)]
    held = sum(held_out(f"s{number}") for number in range(9))
    assert both == [3 * (9 - held), 3 * held]
    first, second = coding(tmp_path, 100, held=True)[:: 3 if held == 1 else held][:2]
    assert second[: len(first) - 5] == first[:-5]
