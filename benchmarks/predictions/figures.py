"""Errors of predictions, and orders of policies: statistics of numbers, without servers."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from benchmarks.lib.common import SEED, percentile
from sglang_ext.simulator.outcome import STAGES

TO_FIRST: Final = STAGES[:-1]
"""The stages until the first token."""
DRAWS: Final = 2000
SURE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Times:
    """One request. stages: seconds, by the names of ``STAGES``. below: tokens found below HBM."""

    session: str
    stages: Mapping[str, float]
    below: int = 0

    @property
    def ttft(self) -> float:
        return sum(self.stages[stage] for stage in TO_FIRST)

    @property
    def jct(self) -> float:
        return sum(self.stages.values())


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds."""

    mean: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), percentile(values, 90))


def error(predicted: float, truth: float) -> float:
    """The signed error, as a share of the truth."""
    return (predicted - truth) / truth


@dataclass(frozen=True, slots=True)
class Errors:
    """Signed shares of the truth. each: the mean of the absolute errors of single requests, as a share of the
    mean truth. middle: the median of the signed errors of single requests, each as a share of its own truth,
    on which moments of a slow machine have little influence."""

    mean: float
    p90: float
    each: float
    middle: float

    @classmethod
    def of(cls, predicted: Sequence[float], truth: Sequence[float]) -> Errors:
        """Of the same requests."""
        ours, real = Spread.of(predicted), Spread.of(truth)
        pairs = list(zip(predicted, truth, strict=True))
        apart = statistics.fmean(abs(a - b) for a, b in pairs)
        middle = statistics.median(error(a, b) for a, b in pairs)
        return cls(error(ours.mean, real.mean), error(ours.p90, real.p90), apart / real.mean, middle)


def components(predicted: Sequence[Times], truth: Sequence[Times]) -> dict[str, float]:
    """By how many seconds each stage is predicted too long, on average. ``load`` is the part of prefill that
    is of requests which found KV below HBM."""
    pairs = list(zip(predicted, truth, strict=True))
    found = {stage: statistics.fmean(a.stages[stage] - b.stages[stage] for a, b in pairs) for stage in STAGES}
    loaded = [a.stages["prefill"] - b.stages["prefill"] for a, b in pairs if b.below]
    found["load"] = sum(loaded) / len(truth)
    return found


def inside(truth: float, predicted: Sequence[float]) -> bool:
    """Whether the truth is between the least and the most that was predicted."""
    return min(predicted) <= truth <= max(predicted)


def verdict(one: Mapping[str, Times], other: Mapping[str, Times], draws: int = DRAWS) -> int:
    """-1 if one policy's mean TTFT is less than the other's, 1 if it is more, 0 for a tie.

    Paired bootstrap: the same requests with both, whose sessions are drawn with replacement, because the
    requests of a session depend on each other. It is a tie where the interval of the difference has 0.

    Args:
        one, other: by request.
    """
    differences: dict[str, list[float]] = defaultdict(list)
    for request in one:
        if request in other:
            differences[one[request].session].append(one[request].ttft - other[request].ttft)
    sessions = [(sum(found), len(found)) for _, found in sorted(differences.items())]
    rng = random.Random(SEED)
    means = []
    for _ in range(draws):
        drawn = rng.choices(sessions, k=len(sessions))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    low, high = percentile(means, 50 * (1 - SURE)), percentile(means, 50 * (1 + SURE))
    return -1 if high < 0 else 1 if low > 0 else 0


def order(policies: Mapping[str, Mapping[str, Times]]) -> dict[tuple[str, str], int]:
    """The verdict on each pair of policies."""
    return {(a, b): verdict(policies[a], policies[b]) for a, b in combinations(policies, 2)}
