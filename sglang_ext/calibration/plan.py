"""The prefills to measure: pure, and the same for the same instance."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

SEED = 20_240_617
FIRST_TOKEN = 100
LEAST_TOKENS = 16
RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)
"""Cached ratios y."""


@dataclass(frozen=True, order=True)
class Point:
    """One (x, y): ``new`` tokens to compute behind ``context`` cached ones."""

    new: int
    context: int

    @property
    def prompt(self) -> int:
        return self.new + self.context


def lengths(longest: int, count: int) -> list[int]:
    """Prompt lengths from short to ``longest``, in equal ratios, whole blocks of 16."""
    shortest = min(4 * LEAST_TOKENS, longest)
    ratio = (longest / shortest) ** (1 / max(1, count - 1))
    exact = (shortest * ratio**number for number in range(count))
    whole = longest // 16 * 16
    return sorted({min(whole, max(LEAST_TOKENS, round(x / 16) * 16)) for x in exact} | {whole})


def points(longest: int, count: int, ratios: Sequence[float] = RATIOS) -> list[Point]:
    """The grid of (x, y): each length with each cached ratio that leaves whole blocks."""
    found = set()
    for length in lengths(longest, count):
        for ratio in ratios:
            context = int(length * ratio) // 16 * 16
            if length - context >= LEAST_TOKENS:
                found.add(Point(length - context, context))
    return sorted(found)


def between(grid: Sequence[Point]) -> list[Point]:
    """Points that are not of the grid: halfway between its lengths, with other ratios; for judging a fit."""
    sizes = sorted({point.prompt for point in grid})
    middles = [int((a * b) ** 0.5) for a, b in itertools.pairwise(sizes)]
    found = set()
    for length in middles:
        for ratio in (0.0, 0.37, 0.62, 0.83):
            context = int(length * ratio) // 16 * 16
            if length - context >= LEAST_TOKENS:
                found.add(Point(length - context, context))
    return sorted(found - set(grid))


def anchors(longest: int) -> list[Point]:
    """The few points by which a profile is scaled to another parallelism."""
    return points(longest, 3, (0.0, 0.75))


class Tokens:
    """Prompts of random tokens that are new to the instance's cache.

    Args:
        vocabulary: ids below it are valid.
        seed: another one for each run against one instance, or its cache would know the prompts.
    """

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._random = random.Random(seed)
        self._vocabulary = vocabulary

    def fresh(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_TOKEN, self._vocabulary) for _ in range(count)]


def shuffled(grid: Sequence[Point], rounds: int, seed: int = SEED) -> Iterator[Point]:
    """Every point once per round, each round in another order, so that drift is spread over all points."""
    chance = random.Random(seed)
    for _ in range(rounds):
        order = list(grid)
        chance.shuffle(order)
        yield from order
