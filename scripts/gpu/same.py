"""same.py URL OUT.json: tokens and log probabilities of greedy answers (measurement 13).

The prompts are the same in each run, so that answers of several servers can be compared. Without `--pool` all
are computed: two runs, each of a stock server that has just started, give the bound. With `--pool` they are
asked for again from HBM and, after other prompts have filled the pool, from below it. `--damage PID` adds a
twin: one more prompt, of which one bit is inverted in the DRAM of the server with that process id, before its
KV is loaded. Serve with `--enable-deterministic-inference` in all of them, and without `--kv-check`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out

from gpu_client import Streamed, ask, fill, tokens

ARENA = "/memfd:sglang-ext-dram"
"""Beginning of the link to the file of a DRAM tier's memory, in ``/proc/PID/fd``."""
SIGN = 7
"""Twin's prompt: the number of tokens beyond whole blocks of 16, so that its last whole block is loaded."""


def questions(count: int, longest: int, shortest: int = 300) -> list[list[int]]:
    """Prompts of lengths from the shortest to the longest, and the twin's as the last one."""
    rng = random.Random(7)
    least = min(shortest, longest)
    lengths = [rng.randint(least, longest) for _ in range(count)]
    return [tokens(rng, length) for length in [*lengths, longest // 16 * 16 - 16 + SIGN]]


def groups(lengths: Sequence[int], pool: int) -> list[list[int]]:
    """Numbers of prompts, in groups that fit into half of the pool; a longer prompt is a group of its own."""
    found: list[list[int]] = []
    taken = 0
    for number, length in enumerate(lengths):
        if not found or taken + length > pool // 2:
            found.append([])
            taken = 0
        found[-1].append(number)
        taken += length
    return found


def kept(answer: Streamed, prompt: int) -> dict[str, Any]:
    """An answer as it is written down."""
    rows = answer.meta["output_token_logprobs"]
    place = "computed" if answer.cached <= prompt / 2 else "below" if answer.below > prompt / 2 else "HBM"
    return {"tokens": [row[1] for row in rows], "logprobs": [row[0] for row in rows], "from": place}


def arenas(pid: int) -> list[Path]:
    """The memory of a server's DRAM tiers, as files: those of the processes of its session."""
    found: dict[int, Path] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(process.name)) != os.getsid(pid):
                continue
            for link in (process / "fd").iterdir():
                # Another server's memory is open for reading only.
                if os.readlink(link).startswith(ARENA) and link.lstat().st_mode & 0o200:
                    found.setdefault(link.stat().st_ino, link)
        except OSError:
            continue  # it has ended, or closed the file
    return list(found.values())


def place_to_damage(before: Any, after: Any) -> int | None:
    """Where to invert bit 6: the last changed byte that is the upper one of a value below 2, which becomes
    huge. For values of two or four bytes; None where no byte has changed.

    before, after: bytes of the memory, as arrays of ``uint8`` of equal size.
    """
    import numpy as np

    changed = np.flatnonzero(before != after)
    upper = changed[changed % 4 == 3]
    small = upper[(after[upper] & 0x7F >= 0x30) & (after[upper] & 0x40 == 0)]
    return int(small[-1]) if small.size else None


def invert(arena: Path, place: int) -> None:
    """Invert bit 6 of a byte."""
    with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[place] ^= 1 << 6


def written(arena: Path, before: Any, seconds: float = 60.0) -> int:
    """Wait until the server has written KV there, and writes no more; returns the place to damage.

    Raises:
        RuntimeError: nothing was written.
    """
    import numpy as np

    end = time.monotonic() + seconds
    last = None
    while time.monotonic() < end:
        now = np.fromfile(arena, np.uint8)
        place = place_to_damage(before, now)
        if place is not None and last is not None and np.array_equal(last, now):
            return place
        last = now
        time.sleep(0.5)
    raise RuntimeError("the server wrote nothing to DRAM: there is nothing to damage")


@contextmanager
def damaged(given: argparse.Namespace, ids: Sequence[int], rng: random.Random) -> Iterator[None]:
    """The prompt's KV is in DRAM, not in HBM, and one bit of it is inverted meanwhile."""
    import numpy as np

    (arena,) = arenas(given.damage)
    before, last = np.fromfile(arena, np.uint8), None
    while last is None or not np.array_equal(before, last):  # until earlier prompts are written
        time.sleep(0.5)
        before, last = np.fromfile(arena, np.uint8), before
    ask(given.url, ids)
    place = written(arena, before)
    fill(given.url, rng, given.pool)
    invert(arena, place)
    try:
        yield
    finally:
        invert(arena, place)


def answers(given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By place, answers by number of their prompt."""
    rng, prompts = random.Random(8), questions(given.prompts, given.longest)
    found: dict[str, dict[str, Any]] = {"cold": {}}

    def each(place: str, numbers: Sequence[int]) -> None:
        for number in numbers:
            ids = prompts[number]
            answer = ask(given.url, ids, given.tokens, logprobs=True)
            found.setdefault(place, {})[str(number)] = kept(answer, len(ids))
        print(f"{place}: {len(found[place])} answers", flush=True)

    twin = len(prompts) - 1
    if given.pool is None:
        each("cold", range(len(prompts)))
        return found
    for numbers in groups([len(ids) for ids in prompts[:-1]], given.pool):
        each("cold", numbers)
        time.sleep(0.2)
        each("HBM", numbers)
        fill(given.url, rng, given.pool)
        each("below", numbers)
    if given.damage is not None:
        with damaged(given, prompts[twin], rng):
            each("damaged", [twin])
        fill(given.url, rng, given.pool)
        each("below", [twin])  # whole again
    return found


def main() -> None:
    """Ask, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--pool", type=int, help="tokens in HBM")
    parser.add_argument("--damage", type=int, metavar="PID", help="of the server; with --pool")
    given = parser.parse_args()
    if given.damage is not None and given.pool is None:
        parser.error("--damage needs --pool")
    given.out.write_text(json.dumps(answers(given)), encoding="utf-8")


if __name__ == "__main__":
    main()
