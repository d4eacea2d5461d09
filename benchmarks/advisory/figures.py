"""The figures of the advisory benchmark, computed from the served requests: pure arithmetic.

Normalized latency is Symphony's: the mean over the requests of seconds from sending to the last token, by
tokens of the answer. Load is requests at an instance, waiting or running.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_ext.cost_model.fit import non_negative

WITHIN = 1.1
"""A TTFT of at most so many times that of an HBM hit counts as one."""


@dataclass(frozen=True, slots=True)
class Advised:
    """The outcome of a request's hint. ready: all promotable KV was there before the request. below: tokens
    that were known then and not in HBM. gap_s: from the hint to the request. ready_s: from the hint until all
    was there; None where the request came sooner."""

    ready: bool
    below: int
    gap_s: float
    ready_s: float | None


@dataclass(frozen=True, slots=True)
class Served:
    """One request. sent, first, ended: seconds of one clock. hbm, dram, disk: cached tokens of the prompt by
    the tier that they were in when the request was admitted; tokens fetched from another instance are in DRAM
    by then. hinted: whether a hint was sent for it. level: level of the varied parameter when the request was
    sent. stolen: core seconds that the hypervisor took for others meanwhile.
    """

    session: str
    turn: int
    sent: float
    first: float
    ended: float
    prompt: int
    known: int
    """Tokens of the prompt that some request before has had or generated."""
    answer: int
    hbm: int
    dram: int
    disk: int
    instance: str | None = None
    hinted: bool = False
    priority: int = 0
    level: float = 0.0
    advised: Advised | None = None
    stolen: float = 0.0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.first - self.sent

    @property
    def normalized(self) -> float:
        """Seconds per token of the answer."""
        return (self.ended - self.sent) / self.answer

    @property
    def computed(self) -> int:
        """Tokens of the prompt that were computed."""
        return self.prompt - self.hbm - self.dram - self.disk


def normalized_latency(served: Iterable[Served]) -> float:
    """Mean seconds per token of the answers (Symphony, section 4)."""
    return statistics.fmean(one.normalized for one in served)


def max_over_median(served: Sequence[Served], instances: Sequence[str], window_s: float) -> float | None:
    """How far the most loaded instance is above the median one (Symphony, figure 14): in each window, the
    mean number of requests at each instance; the mean over the windows, weighted by how much there was to do.

    None where it is not known which instance served.
    """
    if not served or any(one.instance is None for one in served):
        return None
    begin = min(one.sent for one in served)
    end = max(one.sent for one in served)
    windows = max(1, int((end - begin) // window_s))
    load = np.zeros((windows, len(instances)))
    column = {name: number for number, name in enumerate(instances)}
    for one in served:
        assert one.instance is not None
        for number in range(windows):
            low = begin + number * window_s
            share = min(one.ended, low + window_s) - max(one.sent, low)
            if share > 0:
                load[number, column[one.instance]] += share / window_s
    total = load.sum(axis=1)
    busy = total > 0
    # The median of an even number lies between two: of two instances it is their mean.
    ratios = load[busy].max(axis=1) / np.maximum(np.median(load[busy], axis=1), 1e-9)
    return float(np.average(np.minimum(ratios, len(instances)), weights=total[busy]))


def users_at(latency: float, curve: Mapping[int, float]) -> tuple[float, float]:
    """How many users are served at a normalized latency, on a line through the measured points.

    Returns:
        The fewest and the most that it can be: the same where the latency lies between measured points;
        from 0 where even the fewest users that were measured are served later than that; up to infinity
        where even the most are served sooner.
    """
    points = sorted(curve.items())
    fewest, at_fewest = points[0]
    if latency < at_fewest:
        return 0.0, float(fewest)
    for (low, a), (high, b) in itertools.pairwise(points):
        if a <= latency <= b:
            users = low + (high - low) * (latency - a) / (b - a) if b > a else float(high)
            return users, users
    return float(points[-1][0]), math.inf


def times_the_users(ours: tuple[float, float], theirs: tuple[float, float]) -> float:
    """Lower bound of the factor between the numbers of users, from the ``users_at`` of both."""
    return ours[0] / theirs[1]


# --- the time of an HBM hit ---


@dataclass(frozen=True, slots=True)
class HitTime:
    """Seconds to the first token of a prompt whose known part is in HBM: a + b·new + c·known + d·new·known,
    none of them negative."""

    coefficients: tuple[float, float, float, float]

    def seconds(self, new: int, known: int) -> float:
        """For ``new`` computed tokens behind ``known`` ones."""
        return float(np.dot(self.coefficients, _terms(new, known)))


def _terms(new: int, known: int) -> tuple[float, float, float, float]:
    return (1.0, float(new), float(known), float(new) * known)


def fit_hits(hits: Sequence[Served]) -> HitTime:
    """The line through the TTFT of HBM hits, least squares of relative errors; then moved so that half of
    them are above it, because disturbances lengthen a time and never shorten it.

    Raises:
        ValueError: there are fewer hits than the line has coefficients.
    """
    if len(hits) < 4:
        raise ValueError(f"{len(hits)} HBM hits are too few for a line")
    terms = np.array([_terms(hit.computed, hit.hbm) for hit in hits])
    ttft = np.array([hit.ttft for hit in hits])
    coefficients = non_negative(terms, ttft)
    coefficients *= float(np.median(ttft / (terms @ coefficients)))
    a, b, c, d = (float(value) for value in coefficients)
    return HitTime((a, b, c, d))


def share_within(served: Iterable[Served], hit: HitTime, factor: float = WITHIN) -> float:
    """Share of requests whose TTFT is at most ``factor`` times that of an HBM hit of the same lengths."""
    found = [one.ttft <= factor * hit.seconds(max(1, one.prompt - one.known), one.known) for one in served]
    return sum(found) / len(found)


def hidden_share(before: float, after: float) -> float:
    """The share of the moved tokens that were moved before their request came.

    Args:
        before: tokens moved for hints. after: tokens loaded once their request was there.
    """
    return before / (before + after) if before + after else 1.0


def not_hidden(served: Iterable[Served]) -> dict[str, int]:
    """Tokens loaded once their request was there, by why: it had no hint; the hint was too late; HBM had no
    room when the hint came; or it was given up again between the two."""
    found = {"no hint": 0, "too late": 0, "no room": 0, "given up": 0}
    for one in served:
        loaded = one.dram + one.disk
        if one.advised is None:
            found["no hint"] += loaded
        elif not one.advised.ready:
            found["too late"] += loaded
        else:
            below = min(loaded, one.advised.below)
            found["no room"] += below
            found["given up"] += loaded - below
    return found


def cost_of(level: float, served: Sequence[Served]) -> float | None:
    """Normalized latency of the requests at a level over that of those at level 0, less 1; None where one of
    the two had no request."""
    at = [one for one in served if one.level == level]
    base = [one for one in served if one.level == 0.0]
    return normalized_latency(at) / normalized_latency(base) - 1.0 if at and base else None


@dataclass(frozen=True, slots=True)
class CostLine:
    """The cost of a level when it grows linearly with the level. per_level: of level 1, over the latency at
    level 0. noise: its standard error."""

    per_level: float
    noise: float

    def cost(self, level: float) -> tuple[float, float]:
        """Of a level, and its standard error."""
        return level * self.per_level, level * self.noise


def cost_line(served: Sequence[Served], slice_s: float, seed: int, rounds: int = 400) -> CostLine:
    """A line through the normalized latency of all requests over their levels: ten times as sure at 10 % as
    the difference between two levels. The part that a prompt's known and new tokens explain is taken out
    first.

    Its error is found by drawing the slices anew: requests of one slice wait for each other.
    """
    begin = min(one.sent for one in served)
    slices: dict[int, list[Served]] = {}
    for one in served:
        slices.setdefault(int((one.sent - begin) / slice_s), []).append(one)
    rows = list(slices.values())
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(rounds):
        again = [one for at in rng.integers(0, len(rows), len(rows)) for one in rows[at]]
        if len({one.level for one in again}) > 1:
            drawn.append(_slope(again))
    return CostLine(_slope(served), float(np.std(drawn)))


def _slope(served: Sequence[Served]) -> float:
    terms = np.array([(1.0, one.level, one.prompt - one.known, one.known) for one in served])
    means = terms[:, 2:].mean(axis=0)
    terms[:, 2:] -= means
    latency = np.array([one.normalized for one in served])
    at_0, per_level, _, _ = np.linalg.lstsq(terms, latency, rcond=None)[0]
    return float(per_level / at_0)
