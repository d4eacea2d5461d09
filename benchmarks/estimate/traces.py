"""Recorded traces as sessions of short prompts: one of a trace's blocks is 16 tokens, drawn by its name.

Traces to develop with: the first half of Mooncake's conversations, and sessions with an even SHA-256 of their
id: coding agents' (kv_cache_tester), and texts of agents and dialogues (lmcache_agent_traces,
tau_bench_airline). Held out, for final figures only: Mooncake's synthetic trace, and the sessions with an odd
one.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from benchmarks.agents.recorded import FILE, VOCABULARY, held_out
from benchmarks.lib.data import rows

LMCACHE = "lmcache_agent_traces"
TAU = "tau_bench_airline/gpt-4o-airline.tasks_even.jsonl.gz"
BLOCK = 16
TEXT_BYTES = 256
"""Of a text, that become one block: 64 units of 4 bytes."""
MOST_BLOCKS = 120
"""Of a prompt; the context of the tiny model has no more."""
MOST_TURNS = 40
"""Of a coding agent's session."""

Talk = list[list[int]]
"""The prompts of a session, as tokens."""


def traces(folder: Path, *, held: bool) -> dict[str, list[Talk]]:
    """The sessions of each trace. Mooncake's requests are sessions of their own, in their order."""
    name = "synthetic_trace" if held else "conversation_trace.first_half"
    return {
        f"mooncake {name.partition('.')[0]}": mooncake(folder, f"{name}.jsonl.gz"),
        "coding agents": coding(folder, held=held),
        "lmcache_agent_traces": recorded_texts(folder, held=held),
        "tau_bench_airline": dialogues(folder, held=held),
    }


def mooncake(folder: Path, name: str) -> list[Talk]:
    """A block of 512 tokens becomes one of 16."""
    found = []
    for row in rows(folder, f"mooncake/{name}"):
        ids, length = cast(list[int], row["hash_ids"]), int(cast(Any, row["input_length"])) // 32
        if len(ids) <= MOST_BLOCKS:
            found.append([_tokens(name, ids, length)])
    return found


def coding(folder: Path, *, held: bool) -> list[Talk]:
    """Turns of coding agents' sessions. A block of 64 tokens becomes one of 16."""
    return [_turns(row) for row in rows(folder, FILE) if held_out(str(row["id"])) is held]


def recorded_texts(folder: Path, *, held: bool) -> list[Talk]:
    """Requests of `lmcache_agent_traces`: coding agents, and dialogues with a simulated user."""
    talks = []
    for path in sorted((folder / LMCACHE).glob("*/*.jsonl.gz")):
        if held_out(path.name.partition(".")[0]) is held:
            found = sorted(
                rows(folder, str(path.relative_to(folder))), key=lambda row: cast(int, row["timestamp"])
            )
            talks.append([_of_text("lmcache", str(row["input"])) for row in found])
    return talks


def dialogues(folder: Path, *, held: bool) -> list[Talk]:
    """Requests of `tau_bench_airline`: for each message of the agent, all messages before it. A session is a
    trial of a task."""
    talks = []
    for row in rows(folder, TAU):
        if held_out(f"{row['task_id']}-{row['trial']}") is held:
            talk, text = [], ""
            for message in cast(list[dict[str, Any]], row["traj"]):
                if message["role"] == "assistant":
                    talk.append(_of_text("tau", text))
                text += json.dumps(message)
            talks.append(talk)
    return talks


def _of_text(name: str, text: str) -> list[int]:
    """A prompt's beginning: `TEXT_BYTES` of it become a block, whose tokens all text before it decides."""
    data, chain, found = text.encode(), hashlib.sha256(name.encode()), list[int]()
    for start in range(0, min(len(data), MOST_BLOCKS * TEXT_BYTES), TEXT_BYTES):
        chain.update(data[start : start + TEXT_BYTES])
        size = max(1, len(data[start : start + TEXT_BYTES]) * BLOCK // TEXT_BYTES)
        found += random.Random(chain.hexdigest()).choices(VOCABULARY, k=size)
    return found if len(found) > 1 else [VOCABULARY[0], *found, VOCABULARY[1]]


def _turns(row: dict[str, Any]) -> list[list[int]]:
    found = []
    for each in sorted(row["requests"], key=lambda each: each["t"]):
        ids = [id for first, count in each.get("hash_runs", ()) for id in range(first, first + count)]
        # The beginnings of prompts of 90,000 tokens: a session repeats these, too.
        ids = ids[: MOST_BLOCKS * 4 : 4]
        if ids:
            found.append(_tokens("coding", ids, len(ids) * BLOCK + 5))
    return found[:MOST_TURNS]


def _tokens(name: str, ids: Sequence[int], length: int) -> list[int]:
    """A prompt: 16 tokens of each block, which its hash alone decides."""
    tokens: list[int] = []
    for id in ids:
        tokens += random.Random(f"{name}/{id}").choices(VOCABULARY, k=BLOCK)
    tokens += random.Random(f"{name}/{ids[-1]}/end").choices(VOCABULARY, k=BLOCK)
    return tokens[: max(2, length)]
