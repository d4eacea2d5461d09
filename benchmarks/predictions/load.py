"""The load: conversations behind shared beginnings, as requests at Poisson moments or by users who think.

Texts are random tokens. A prompt has all turns before it, with answers that were drawn in advance: so a
request is the same with every policy, whenever the answer before it came.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.agents.recorded import VOCABULARY

BEGINNINGS: Final = 5
LIVE: Final = 12
"""Conversations that go on at a time, where arrivals do not wait for answers."""
THINK_S: Final = 2.0
"""On average, of users."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. gap: since the one before (or a user's pause), in times of the mean."""

    session: str
    prompt: list[int]
    answer: int
    gap: float


def tokens(rng: random.Random, least: int, most: int) -> list[int]:
    return rng.choices(VOCABULARY, k=rng.randint(least, most))


def beginnings(seed: int) -> list[list[int]]:
    """With which conversations begin; the first is the most popular."""
    rng = random.Random(f"beginnings {seed}")
    return [tokens(rng, 150, 500) for _ in range(BEGINNINGS)]


def conversation(rng: random.Random, known: list[list[int]]) -> Iterator[tuple[list[int], int]]:
    """The prompts of two to eight turns, and the lengths of their answers."""
    weights = [1 / place for place in range(1, len(known) + 1)]
    text = list(rng.choices(known, weights)[0])
    for _ in range(rng.randint(2, 8)):
        text += tokens(rng, 20, 220)
        answer = rng.randint(4, 24)
        yield list(text), answer
        text += tokens(rng, answer, answer)


def arriving(seed: int, count: int) -> list[Asked]:
    """Requests in the order of their arrivals. Each is the next turn of one of the live conversations."""
    rng, known = random.Random(f"arrivals {seed}"), beginnings(seed)
    live: list[tuple[str, Iterator[tuple[list[int], int]]]] = []
    found: list[Asked] = []
    begun = 0
    while len(found) < count:
        place = rng.randrange(LIVE)
        if place >= len(live):
            live.append((f"talk-{begun}", conversation(random.Random(f"talk {seed} {begun}"), known)))
            begun, place = begun + 1, len(live) - 1
        name, turns = live[place]
        turn = next(turns, None)
        if turn is None:
            del live[place]
            continue
        found.append(Asked(name, *turn, rng.expovariate(1.0)))
    return found


def user(seed: int, number: int) -> Iterator[Asked]:
    """The requests of one user, conversation after conversation, without end."""
    rng, known = random.Random(f"user {seed} {number}"), beginnings(seed)
    while True:
        for prompt, answer in conversation(rng, known):
            yield Asked(f"user-{number}", prompt, answer, rng.expovariate(1.0))


def users_for(rate: float, jct_s: float) -> int:
    """Users who together ask ``rate`` times a second, by Little's law."""
    return max(1, round(rate * (THINK_S + jct_s)))
