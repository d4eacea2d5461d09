"""Traces as prompts for real servers: equal blocks become equal tokens, and no more than that."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from benchmarks.agents.recorded import FILE, held_out
from benchmarks.estimate.traces import (
    BLOCK,
    LMCACHE,
    MOST_BLOCKS,
    TAU,
    TEXT_BYTES,
    coding,
    dialogues,
    mooncake,
    recorded_texts,
)


def prompts_of(talks: list[list[list[int]]]) -> list[list[int]]:
    return [prompt for talk in talks for prompt in talk]


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
    [[one], [other]] = mooncake(tmp_path, "t.jsonl.gz")  # the third is too long
    assert (len(one), len(other)) == (3 * BLOCK + 3, 4 * BLOCK)
    assert one[: 2 * BLOCK] == other[: 2 * BLOCK]
    assert one[2 * BLOCK : 3 * BLOCK] != other[2 * BLOCK : 3 * BLOCK]


def test_the_sessions_that_are_held_out_are_the_others(tmp_path) -> None:
    steps = [{"t": at, "hash_runs": [[7, 8 + 4 * at]]} for at in range(3)]
    written(tmp_path / FILE, [{"id": f"s{number}", "requests": steps} for number in range(9)])
    both = [len(coding(tmp_path, held=held)) for held in (False, True)]
    held = sum(held_out(f"s{number}") for number in range(9))
    assert both == [9 - held, held]
    first, second, _ = coding(tmp_path, held=True)[0]
    assert second[: len(first) - 5] == first[:-5]


def test_texts_share_blocks_as_far_as_they_are_equal(tmp_path) -> None:
    text = "a" * (2 * TEXT_BYTES)
    names = [f"s{number}" for number in range(9)]
    for name in names:
        inputs = [text + "b" * TEXT_BYTES, text, text + "c" * 70_000]
        found = [{"timestamp": at, "input": each} for at, each in zip((2, 1, 3), inputs, strict=True)]
        written(tmp_path / LMCACHE / "some" / f"{name}.jsonl.gz", found)
    held = sum(held_out(name) for name in names)
    prompts = prompts_of(recorded_texts(tmp_path, held=True))
    assert len(prompts) == 3 * held
    assert len(prompts_of(recorded_texts(tmp_path, held=False))) == 3 * (9 - held)
    prompts.sort(key=len)
    short, longer, cut = prompts[0], prompts[held], prompts[-1]
    assert (len(short), len(longer), len(cut)) == (2 * BLOCK, 3 * BLOCK, MOST_BLOCKS * BLOCK)
    assert longer[: 2 * BLOCK] == cut[: 2 * BLOCK] == short
    assert longer[2 * BLOCK :] != cut[2 * BLOCK : 3 * BLOCK]


def test_a_dialogue_is_a_request_for_each_message_of_its_agent(tmp_path) -> None:
    said = [
        {"role": role, "content": role * 200} for role in ("system", "user", "assistant", "user", "assistant")
    ]
    written(tmp_path / TAU, [{"task_id": 2, "trial": trial, "traj": said} for trial in range(6)])
    both = [prompts_of(dialogues(tmp_path, held=held)) for held in (False, True)]
    assert sum(map(len, both)) == 6 * 2
    first, second = sorted({tuple(prompt) for found in both for prompt in found}, key=len)
    whole = len(first) // BLOCK * BLOCK
    assert second[:whole] == first[:whole]
