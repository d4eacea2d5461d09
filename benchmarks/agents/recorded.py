"""Recorded sessions of coding agents (``kv_cache_tester``): the lengths of their turns and pauses.

Lengths are divided, so that a small model on a CPU serves them; pauses are divided too. Recordings have no
texts: tokens are drawn. Sessions with an even SHA-256 of their id are for tuning, the others held out.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.data import rows

FILE = "kv_cache_tester/v6_global.dev.jsonl.gz"
DIVIDED = 32
LONGEST_PAUSE_S = 240.0
"""As recorded; a longer one is cut."""
LEAST_STEPS = 6
VOCABULARY = range(100, 30_000)


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: the pause before it, the tokens that are new in its prompt, and those of its answer."""

    pause_s: float
    new: int
    answer: int
    tool: bool
    """The turn before it had called a tool."""


@dataclass(frozen=True, slots=True)
class Program:
    """A stretch of a session. past: tokens of its prompt before the first step."""

    id: str
    past: int
    steps: tuple[Step, ...]

    @property
    def tokens(self) -> int:
        """Of its conversation at the end."""
        return self.past + sum(step.new + step.answer for step in self.steps)


def held_out(id: str) -> bool:
    """Whether a session is read for the final figures only."""
    return bool(int(hashlib.sha256(id.encode()).hexdigest(), 16) % 2)


def programs(folder: Path, *, held: bool, steps: int, pace: float, most_tokens: int) -> list[Program]:
    """Stretches of ``steps`` turns each, in a random order that is always the same.

    Args:
        folder: with the workloads.
        held: the sessions that were held out, or the others.
        pace: by which pauses are divided.
        most_tokens: stretches with longer prompts are left out.
    """
    found = [
        each
        for row in rows(folder, FILE)
        if held_out(str(row["id"])) is held
        for each in _stretches(row, steps, pace)
        if each.tokens <= most_tokens
    ]
    return sorted(found, key=lambda each: hashlib.sha256(each.id.encode()).digest())


def _stretches(row: dict[str, Any], steps: int, pace: float) -> Iterator[Program]:
    asked = sorted((each for each in row["requests"] if each["agent"] == "main"), key=lambda each: each["t"])
    past, taken, number = 0, list[Step](), 0
    for before, after in itertools.pairwise(asked):
        grown = after["in"] - before["in"] - before["out"]
        if before["stop"] not in ("tool_use", "end_turn") or grown < 0:
            taken = []  # no turn of this conversation, or a compacted one
            continue
        if not taken:
            past = max(1, before["in"] // DIVIDED)
        gap = min(LONGEST_PAUSE_S, max(0.0, after["t"] - before["t"] - before.get("api_time", 0.0)))
        size = max(1, grown // DIVIDED), max(2, after["out"] // DIVIDED)
        taken.append(Step(gap / pace, *size, before["stop"] == "tool_use"))
        if len(taken) == steps:
            yield Program(f"{row['id']}/{number}", past, tuple(taken))
            taken, number = [], number + 1
    if len(taken) >= LEAST_STEPS:
        yield Program(f"{row['id']}/{number}", past, tuple(taken))


def tokens(name: str, count: int) -> list[int]:
    """Token ids that depend on the name only."""
    return random.Random(name).choices(VOCABULARY, k=count)
