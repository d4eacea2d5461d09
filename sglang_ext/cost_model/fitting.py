"""From measurements to the two levels of the cost model: least squares, no I/O.

Each time is measured several times. Of whole prefills and steps the median counts: disturbances of a
calibration come while a server serves, too. Of operators ``typical`` counts: the median where the repetitions
agree, a low quantile where they do not, since a product of 200 µs fits between two disturbances; their sum is
then scaled to the whole prefills.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sglang_ext.cost_model.batch import Batch
from sglang_ext.cost_model.fit import non_negative, relative_errors
from sglang_ext.cost_model.levels import ArchLevel, OperatorLevel, features
from sglang_ext.cost_model.operators import Attention, Linear, Link, Outside, Rest, Scaling, Split, Waves
from sglang_ext.cost_model.profile import Decode
from sglang_ext.cost_model.sums import products_s

TILE_ROWS = (1, 8, 16, 32, 64, 128, 256)
TILE_COLUMNS = (16, 64, 128, 256)
"""Tiles that products may be cut into; the pair that fits best is taken."""
AGREE = 0.1
"""Repetitions agree when their quarters lie within this share of the median."""
LOW_QUANTILE = 0.25
MOST_PROFILED = 1.5
"""The most that profiling may be taken to lengthen operators, or a quieter moment to have shortened them."""


@dataclass(frozen=True, slots=True)
class Timed:
    """A prefill: ``new`` tokens behind ``context`` cached ones."""

    new: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TimedLinear:
    """One run of a matrix product ``[rows, inner] x [inner, columns]``."""

    rows: int
    inner: int
    columns: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One forward pass of a prefill, by kind of operator."""

    new: int
    context: int
    linears: tuple[TimedLinear, ...]
    attention_s: float
    """Of all layers."""
    rest_s: float
    split_share: float
    """Share, in the rest's work on new tokens, of operators that tensor parallelism divides."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes from the model's configuration."""

    layers: int
    hidden: int
    activation_bytes: int


def typical(seconds: Iterable[float]) -> float:
    """The time of repetitions of one operator.

    Raises:
        ValueError: there is none.
    """
    values = np.asarray(list(seconds), np.float64)
    if not values.size:
        raise ValueError("no repetition")
    low, median = np.quantile(values, (LOW_QUANTILE, 0.5))
    return float(median if median - low <= AGREE * median else low)


def spread(seconds: Iterable[float]) -> float:
    """How much repetitions differ: (median - lowest quarter) / median."""
    values = np.asarray(list(seconds), np.float64)
    low, median = np.quantile(values, (LOW_QUANTILE, 0.5))
    return float((median - low) / median)


def merged(samples: Sequence[Timed]) -> list[Timed]:
    """One per (new, context), with the median of its times."""
    groups: dict[tuple[int, int], list[float]] = {}
    for one in samples:
        groups.setdefault((one.new, one.context), []).append(one.seconds)
    return [Timed(*point, float(np.median(times))) for point, times in sorted(groups.items())]


# -- arch level -------------------------------------------------------------------------------------


def fit_arch(
    samples: Sequence[Timed], shape: Shape | None, tp: int, reductions: Mapping[str, Link]
) -> ArchLevel:
    """The arch level, from times to first token alone."""
    points = merged(samples)
    rows = [features(Batch.of(one.new, one.context)) for one in points]
    coefficients = non_negative(np.array(rows), [one.seconds for one in points])
    return ArchLevel(
        tuple(float(c) for c in coefficients),
        reductions,
        shape.layers if shape else 0,
        shape.hidden if shape else 0,
        shape.activation_bytes if shape else 0,
        tp,
    )


def fit_scaling(level: OperatorLevel | ArchLevel, samples: Sequence[Timed]) -> Scaling:
    """The constants of a parallelism.

    Args:
        level: scaled to it by shapes alone.
        samples: times to first token of an instance with that parallelism.

    Raises:
        ValueError: the samples say too little.
    """
    points = merged(samples)
    if len(points) < 2:
        raise ValueError("at least two different prefills have to be measured")
    rows = np.array([[level.seconds(one.new, one.context), 1.0] for one in points])
    factor, fixed = non_negative(rows, [one.seconds for one in points])
    if factor <= 0:
        raise ValueError("prefills take no longer where more has to be computed")
    return Scaling(float(factor), float(fixed))


# -- operator level ---------------------------------------------------------------------------------


def fit_waves(runs: Sequence[TimedLinear], units: int) -> Waves:
    """How fast the device runs matrix products, and in which tiles.

    Args:
        runs: of products of any shapes.
        units: that run tiles side by side.
    """
    groups: dict[tuple[int, int, int], list[float]] = {}
    for run in runs:
        groups.setdefault((run.rows, run.inner, run.columns), []).append(run.seconds)
    seconds = np.array([typical(times) for times in groups.values()])
    best: tuple[float, Waves] | None = None
    for tile_rows, tile_columns in itertools.product(TILE_ROWS, TILE_COLUMNS):
        unit = Waves(units, tile_rows, tile_columns, 1.0, 0.0)
        work = [products_s((Linear(inner, columns, 1),), unit, rows, 1) for rows, inner, columns in groups]
        columns = np.stack([np.ones(len(work)), np.array(work)], axis=1)
        fixed, per_work = non_negative(columns, seconds)
        if per_work <= 0:
            continue
        error = float(np.mean(relative_errors(columns @ np.array([fixed, per_work]), seconds)))
        if best is None or error < best[0] * (1 - 1e-6):
            best = error, Waves(units, tile_rows, tile_columns, float(1.0 / per_work), float(fixed))
    if best is None:
        raise ValueError("the time of matrix products does not grow with their size")
    return best[1]


def find_linears(steps: Sequence[TimedStep], hidden: int) -> tuple[Linear, ...]:
    """The products that a forward pass runs, with their counts, from the step with most new tokens.

    How tensor parallelism divides a product follows from its shape, as in every model that SGLang divides: a
    product that reads the hidden state is cut by columns, a product that writes it by the inner dimension.
    """
    step = max(steps, key=lambda one: one.new)
    counts: dict[tuple[int, int, bool], int] = {}
    for run in step.linears:
        key = (run.inner, run.columns, run.rows != step.new)
        counts[key] = counts.get(key, 0) + 1
    found = []
    for (inner, columns, single), count in sorted(counts.items()):
        split: Split = "columns" if inner == hidden else "inner" if columns == hidden else "none"
        found.append(Linear(inner, columns, count, "one" if single else "tokens", split))
    return tuple(found)


def fit_attention(steps: Sequence[TimedStep]) -> Attention:
    """Attention of all layers, as a sum of the terms of ``Attention.of_work``."""
    points = merged([Timed(s.new, s.context, s.attention_s) for s in steps if s.attention_s > 0])
    if not points:
        return Attention(0.0, 0.0, 0.0, 0.0)
    rows = np.array(
        [
            [
                one.new * (one.context + one.new / 2),
                one.new * (one.new + one.context),
                (one.new + one.context) ** 2,
                one.new + one.context,
                1.0,
            ]
            for one in points
        ]
    )
    return Attention.of_work(*(float(c) for c in non_negative(rows, [one.seconds for one in points])))


def fit_rest(steps: Sequence[TimedStep], attention: Attention) -> tuple[Rest, Attention]:
    """The rest, and attention with the rest's part that grows with the whole prompt: reading its KV."""
    points = merged([Timed(s.new, s.context, s.rest_s) for s in steps if s.rest_s > 0])
    rows = np.array([[1.0, one.new, one.new + one.context] for one in points])
    fixed, per_new, per_prompt = non_negative(rows, [one.seconds for one in points])
    share = float(np.median([step.split_share for step in steps]))
    rest = Rest(float(fixed), float(per_new) * (1 - share), float(per_new) * share)
    return rest, Attention(
        attention.a, attention.b, attention.c + float(per_prompt), attention.d, attention.e
    )


def fit_outside(samples: Sequence[Timed], level: OperatorLevel) -> OperatorLevel:
    """The level fitted to times to first token: adds the time outside of the forward pass, and scales all
    operators by one factor for the profiler's overhead."""
    points = merged(samples)
    seconds = [one.seconds for one in points]
    inside = [level.seconds(one.new, one.context) for one in points]
    rows = np.array(
        [[passed, 1.0, one.new, one.new + one.context] for passed, one in zip(inside, points, strict=True)]
    )
    factor, fixed, per_new, per_prompt = (float(c) for c in non_negative(rows, seconds))
    if not 1 / MOST_PROFILED <= factor <= MOST_PROFILED:
        # Such times do not belong to the profiled passes: the factor is clamped, and the operators keep
        # their times.
        factor = min(MOST_PROFILED, max(1 / MOST_PROFILED, factor))
        left = np.array(seconds) - factor * np.array(inside)
        scale = np.array(seconds)
        rest = np.maximum(left / scale, 1e-9)
        fixed, per_new, per_prompt = (
            float(c) for c in non_negative(rows[:, 1:] / scale[:, None], rest, relative=False)
        )
    return msgspec.structs.replace(
        level,
        waves=msgspec.structs.replace(
            level.waves,
            flops_per_s=level.waves.flops_per_s / factor,
            fixed_s=level.waves.fixed_s * factor,
        ),
        attention=level.attention.times(factor),
        rest=level.rest.times(factor),
        outside=Outside(fixed, per_new, per_prompt, level.outside.overlap_s),
    )


def fit_operators(
    steps: Sequence[TimedStep],
    samples: Sequence[Timed],
    shape: Shape,
    *,
    units: int,
    tp: int = 1,
    pp: int = 1,
    reductions: Mapping[str, Link] | None = None,
    stage_link: Link | None = None,
    overlap_s: float | None = None,
) -> OperatorLevel:
    """The operator level.

    Args:
        steps: forward passes, by operator.
        samples: times to first token.
        units: of the device (``Waves.units``).
        tp, pp: of the measured instance; with more than one rank, ``reductions`` has its all-reduce.
        overlap_s: see ``Outside``.

    Raises:
        ValueError: the steps say too little.
    """
    if len({(step.new, step.context) for step in steps}) < 3:
        raise ValueError("at least three different prefills have to be measured")
    runs = [run for step in steps for run in step.linears]
    if not runs:
        raise ValueError("no matrix product was seen")
    rest, attention = fit_rest(steps, fit_attention(steps))
    level = OperatorLevel(
        layers=shape.layers,
        hidden=shape.hidden,
        activation_bytes=shape.activation_bytes,
        linears=find_linears(steps, shape.hidden),
        waves=fit_waves(runs, units),
        attention=attention,
        rest=rest,
        outside=Outside(0.0, overlap_s=overlap_s),
        tp=tp,
        pp=pp,
        reductions=reductions or {},
        stage_link=stage_link,
    )
    return fit_outside(samples, level)


# -- generation -------------------------------------------------------------------------------------


def fit_decode(
    steps: Mapping[int, float], context: int, long: tuple[int, int, float], *, late: bool
) -> Decode:
    """Steps of generation.

    Args:
        steps: seconds, by requests of the batch; of one request and, where the instance generates for more,
            of larger batches.
        context: tokens that each of these requests had.
        long: requests of one of these batches with longer contexts, tokens of each, and seconds.
        late: see ``Decode``.
    """
    batch, tokens, long_s = long
    more = batch * (tokens - context)
    per_token_s = max(0.0, (long_s - steps[batch]) / more) if more > 0 else 0.0
    sizes = sorted(steps)
    without = [max(0.0, steps[size] - per_token_s * size * context) for size in sizes]
    if len(sizes) == 1:
        return Decode.linear(0.0, without[0], per_token_s, late=late)
    return Decode(tuple(sizes), tuple(without), per_token_s, late)
