"""Fits recover what made the measurements."""

from __future__ import annotations

import random

import msgspec
import pytest

from sglang_ext.cost_model.batch import Batch
from sglang_ext.cost_model.fitting import (
    Shape,
    Timed,
    TimedLinear,
    TimedStep,
    find_linears,
    fit_arch,
    fit_attention,
    fit_decode,
    fit_operators,
    fit_rest,
    fit_scaling,
    fit_waves,
    typical,
)
from sglang_ext.cost_model.levels import ArchLevel, OperatorLevel
from sglang_ext.cost_model.operators import Attention, Linear, Link, Outside, Rest, Waves
from sglang_ext.cost_model.profile import Decode
from sglang_ext.cost_model.sums import products_s

SHAPE = Shape(layers=2, hidden=64, activation_bytes=4)
TRUTH = OperatorLevel(
    layers=2,
    hidden=64,
    activation_bytes=4,
    linears=(
        Linear(64, 192, 2, "tokens", "columns"),
        Linear(64, 1000, 1, "one", "columns"),
        Linear(256, 64, 2, "tokens", "inner"),
    ),
    waves=Waves(4, 64, 64, 3e10, 2e-6),
    attention=Attention.of_work(4e-9, 0.0, 1e-9, 2e-6, 1e-4),
    rest=Rest(3e-3, 2e-6, 2e-6),
    outside=Outside(6e-3, 0.0, 1e-6),
)
POINTS = [(new, context) for new in (32, 128, 500, 1500) for context in (0, 300, 1000)]
UNSEEN = [(70, 0), (333, 150), (900, 700), (2500, 2000)]


def once_s(waves: Waves, one: Linear, new: int) -> float:
    """Of one run of a product."""
    return products_s((msgspec.structs.replace(one, count=1),), waves, new, 1)


def step(new: int, context: int) -> TimedStep:
    """The true times of a step, by operator."""
    parts = TRUTH.parts(Batch.of(new, context))
    runs = tuple(
        TimedLinear(new if one.rows == "tokens" else 1, one.inner, one.columns, once_s(TRUTH.waves, one, new))
        for one in TRUTH.linears
        for _ in range(one.count)
    )
    return TimedStep(new, context, runs, parts["attention"], parts["rest"], split_share=0.5)


STEPS = [step(new, context) for new, context in POINTS]
SAMPLES = [Timed(new, context, TRUTH.seconds(new, context)) for new, context in POINTS]


def test_the_operator_level_predicts_what_it_has_not_seen() -> None:
    fitted = fit_operators(STEPS, SAMPLES, SHAPE, units=4)
    for new, context in UNSEEN:
        assert fitted.seconds(new, context) == pytest.approx(TRUTH.seconds(new, context), rel=0.02)
    assert fitted.linears == TRUTH.linears
    assert (fitted.waves.tile_rows, fitted.waves.tile_columns) == (64, 64)
    assert fitted.waves.flops_per_s == pytest.approx(3e10, rel=0.01)


def test_the_arch_level_predicts_smooth_times() -> None:
    def smooth(new: int, context: int) -> float:
        return 0.01 + 2e-5 * new + 3e-9 * new * (context + new / 2)

    fitted = fit_arch([Timed(n, c, smooth(n, c)) for n, c in POINTS], SHAPE, 1, {})
    for new, context in UNSEEN:
        assert fitted.seconds(new, context) == pytest.approx(smooth(new, context), rel=1e-3)


def test_the_papers_four_coefficients_are_recovered() -> None:
    known = Attention(a=-3e-9, b=5e-9, c=2e-6, d=1e-3)
    steps = [TimedStep(n, c, (), known.seconds(Batch.of(n, c)), 0.0, 0.0) for n, c in POINTS]
    found = fit_attention(steps)
    assert (found.a, found.b, found.c, found.d, found.e) == pytest.approx(
        (known.a, known.b, known.c, known.d, 0.0), rel=1e-5, abs=1e-15
    )


def test_reading_kv_is_attention_wherever_it_was_measured() -> None:
    steps = [TimedStep(n, c, (), 1e-9, 1e-3 + 2e-6 * n + 5e-7 * (n + c), 0.25) for n, c in POINTS]
    rest, attention = fit_rest(steps, Attention(0.0, 0.0, 1e-6, 0.0))
    assert (rest.fixed_s, rest.per_token_s, rest.split_per_token_s) == pytest.approx((1e-3, 1.5e-6, 5e-7))
    assert attention.c == pytest.approx(1.5e-6)


@pytest.mark.parametrize(
    ("rows", "columns", "units"), [(r, c, u) for r in (1, 16, 128) for c in (16, 128) for u in (1, 132)]
)
def test_tiles_are_found(rows, columns, units) -> None:
    truth = Waves(units, rows, columns, 1e12, 1e-6)
    products = [Linear(256, 1000, 1), Linear(1000, 300, 1), Linear(512, 4000, 1)]
    runs = [
        TimedLinear(r, one.inner, one.columns, once_s(truth, one, r))
        for r in (7, 40, 100, 260, 900, 3000)
        for one in products
    ]
    found = fit_waves(runs, units)
    for rows_unseen in (1, 55, 1234):
        for one in products:
            expected_s = once_s(truth, one, rows_unseen)
            assert once_s(found, one, rows_unseen) == pytest.approx(expected_s, rel=0.01)


def test_products_know_how_they_are_divided() -> None:
    found = {(one.inner, one.columns): (one.rows, one.split, one.count) for one in find_linears(STEPS, 64)}
    assert found == {
        (64, 192): ("tokens", "columns", 2),
        (64, 1000): ("one", "columns", 1),
        (256, 64): ("tokens", "inner", 2),
    }


def test_a_disturbed_repetition_does_not_count() -> None:
    assert typical([1.0, 1.01, 1.02, 1.03]) == pytest.approx(1.015)
    assert typical([1.0, 1.01, 5.0, 9.0]) == pytest.approx(1.0075)
    with pytest.raises(ValueError, match="no repetition"):
        typical([])


def test_noise_of_a_shared_machine_is_survived() -> None:
    """Half of all repetitions are lengthened, by up to as much again: the fit stays near the truth."""
    chance = random.Random(5)

    def noisy(seconds: float) -> float:
        return seconds * (1 + chance.random() * (chance.random() < 0.5))

    samples = [Timed(s.new, s.context, noisy(s.seconds)) for s in SAMPLES for _ in range(9)]
    fitted = fit_operators(STEPS, samples, SHAPE, units=4)
    errors = [abs(fitted.seconds(n, c) / TRUTH.seconds(n, c) - 1) for n, c in UNSEEN]
    assert sum(errors) / len(errors) < 0.05


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        pytest.param(STEPS[:2], "three different", id="too few"),
        pytest.param(
            [TimedStep(n, c, (), 1.0, 1.0, 0.0) for n, c in POINTS], "no matrix product", id="no product"
        ),
    ],
)
def test_what_says_too_little_is_refused(steps, why) -> None:
    with pytest.raises(ValueError, match=why):
        fit_operators(steps, SAMPLES, SHAPE, units=4)


def test_other_ranks_are_predicted_with_their_reductions() -> None:
    fitted = fit_operators(STEPS, SAMPLES, SHAPE, units=4, reductions={"2": Link(1e-5, 1e-9)})
    assert fitted.scaled(2).seconds(1500, 0) < fitted.seconds(1500, 0)


def test_the_constants_of_a_parallelism_are_found_again() -> None:
    arch = ArchLevel((0.01, 0.0, 1e-4, 0.0, 0.0, 0.0))
    samples = [
        Timed(new, context, 1.4 * arch.seconds(new, context) + 0.02)
        for new, context in ((64, 0), (16, 48), (2048, 0), (512, 1536))
    ]
    found = fit_scaling(arch, samples)
    assert (found.factor, found.fixed_s) == pytest.approx((1.4, 0.02))
    with pytest.raises(ValueError, match="two different"):
        fit_scaling(arch, samples[:1])
    with pytest.raises(ValueError, match="no longer"):
        fit_scaling(arch, [Timed(100, 0, 1.0), Timed(1000, 0, 0.1)])


def test_steps_of_generation_are_told_from_their_contexts() -> None:
    truth = Decode((1, 2, 4), (0.020, 0.036, 0.034), 2e-6, late=True)
    steps = {count: truth.seconds(count) + truth.per_token_s * count * 44 for count in truth.requests}
    long_s = truth.seconds(4) + truth.per_token_s * 4 * 900
    found = fit_decode(steps, 44, (4, 900, long_s), late=True)
    assert (found.requests, found.late) == (truth.requests, True)
    assert found.steps_s == pytest.approx(truth.steps_s)
    assert found.per_token_s == pytest.approx(2e-6)
    # An instance that generates for one request at a time.
    assert fit_decode({1: 0.02}, 44, (1, 44, 0.02), late=False).seconds(1) == pytest.approx(0.02)
    # Steps behind long prompts that were faster, and long prompts of the short length: no time for contexts.
    assert fit_decode(steps, 44, (4, 900, 0.01), late=False).per_token_s == 0.0
    assert fit_decode(steps, 44, (4, 44, 1.0), late=False).per_token_s == 0.0
