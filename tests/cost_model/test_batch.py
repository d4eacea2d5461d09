"""exec over a batch: its upper and lower bounds, and how prompts fall into passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cost_model import (
    ArchLevel,
    Attention,
    Batch,
    Batching,
    CostModel,
    Linear,
    OperatorLevel,
    Outside,
    Passes,
    Rest,
    Waves,
)
from sglang_ext.cost_model.levels import FEATURES
from sglang_ext.cost_model.model import DefaultExecution

work = st.floats(0, 1e-6, allow_nan=False)
operators = st.builds(
    OperatorLevel,
    layers=st.just(2),
    hidden=st.just(64),
    activation_bytes=st.just(4),
    linears=st.lists(
        st.builds(
            Linear,
            inner=st.integers(16, 8192),
            columns=st.integers(16, 32_000),
            count=st.integers(1, 80),
            rows=st.sampled_from(["tokens", "one"]),
        ),
        min_size=1,
        max_size=3,
    ).map(tuple),
    waves=st.builds(
        Waves,
        units=st.integers(1, 132),
        tile_rows=st.sampled_from([1, 16, 128]),
        tile_columns=st.sampled_from([16, 128]),
        flops_per_s=st.floats(1e9, 1e15),
        fixed_s=st.floats(0, 1e-4),
    ),
    attention=st.builds(Attention.of_work, work, work, work, work, work),
    rest=st.builds(Rest, work, work, work),
    outside=st.builds(Outside, work, work, work),
)
archs = st.lists(work, min_size=FEATURES, max_size=FEATURES).map(lambda c: ArchLevel(tuple(c)))
levels = st.one_of(operators, archs, st.just(DefaultExecution()))
prompts = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 20_000)), min_size=1, max_size=8)


def together(of: list[tuple[int, int]]) -> Batch:
    batch = Batch()
    for new, context in of:
        batch = batch.adding(new, context)
    return batch


@given(level=levels, batch=prompts)
def test_a_batch_takes_no_more_than_its_prompts_alone_and_no_less_than_the_largest(level, batch) -> None:
    singles = [level.batch_s(Batch.of(*prompt)) for prompt in batch]
    seconds = level.batch_s(together(batch))
    slack = 1e-9 + 1e-9 * sum(singles)
    assert max(singles) - slack <= seconds <= sum(singles) + slack


@given(level=levels, batch=prompts, chunk=st.integers(1, 4096), more=st.integers(1, 5000))
def test_passes_are_bounded_alike_and_never_fall(level, batch, chunk, more) -> None:
    passes = Passes(level.batch_s, level.around_s, Batching(chunk=chunk))
    pieces, room = [], chunk
    before = 0.0
    for new, context in batch:
        passes = passes.adding(new, context)
        slack = 1e-9 + 1e-9 * passes.seconds
        assert passes.seconds >= before - slack
        assert passes.adding(more + 1, 0).seconds >= passes.adding(more, 0).seconds - slack
        before = passes.seconds
        while new:
            room = room or chunk
            piece = min(new, room)
            pieces.append(level.batch_s(Batch.of(piece, context)))
            new, context, room = new - piece, context + piece, room - piece
    slack = 1e-9 + 1e-9 * sum(pieces)
    assert max(pieces) - slack <= passes.seconds <= sum(pieces) + slack


def test_what_a_pass_has_once_and_what_each_prompt_has() -> None:
    """Reckoned by hand: the fixed times once, products over all rows, attention prompt by prompt."""
    level = OperatorLevel(
        2, 64, 4, (Linear(64, 64, 1), Linear(64, 10, 1, rows="one")), Waves(1, 1, 1, 2.0 * 64),
        Attention.of_work(pairs=1e-3, rectangle=0, square=0, per_token=0, fixed=5.0), Rest(7.0, 0.0),
        Outside(11.0),
    )  # fmt: skip
    parts = level.parts(together([(3, 0), (2, 10)]))
    assert parts["linear"] == pytest.approx(5 * 64 + 2 * 10)
    assert parts["attention"] == pytest.approx(5.0 + 1e-3 * (3 * 1.5 + 2 * 11))
    assert (parts["rest"], parts["outside"]) == (7.0, 11.0)


def test_a_prompt_is_cut_where_a_pass_is_full() -> None:
    seen: list[tuple[int, int, int]] = []

    def noted(batch: Batch) -> float:
        seen.append((batch.prompts, batch.new, batch.tokens))
        return 1.0

    passes = Passes(noted, 0.25, Batching(chunk=100)).adding(60, 0).adding(150, 1000)
    # 60 and 40 of the second; 100 of it behind 1,040; 10 more behind 1,140.
    assert passes.seconds == 3 - 2 * 0.25
    assert [seen[-3], seen[-2], seen[-1]] == [(2, 100, 60 + 1040), (1, 100, 1140), (1, 10, 1150)]


def test_where_prompts_are_not_cut_a_pass_ends_before_the_one_that_does_not_fit() -> None:
    passes = Passes(lambda batch: 1.0, 0.0, Batching(most=100))
    assert passes.adding(500, 0).seconds == 1
    assert passes.adding(60, 0).adding(40, 0).seconds == 1
    assert passes.adding(60, 0).adding(41, 0).seconds == 2
    assert Passes(lambda batch: 1.0).adding(60, 0).adding(10**6, 0).seconds == 1


def test_a_mixed_pass_takes_the_running_batch_along() -> None:
    model = CostModel()
    plain = model.passes(Batching(chunk=512), running=10).adding(1024, 0).seconds
    mixed = model.passes(Batching(chunk=512, mixed=True), running=10).adding(1024, 0).seconds
    assert plain == model.exec_s(1024, 0, Batching(chunk=512))
    # Two passes, and in each a token of ten requests.
    assert mixed - plain == pytest.approx(2 * 10 * 2e-4)


def test_a_long_prompt_takes_as_many_passes_as_it_is_cut_into() -> None:
    model = CostModel()
    assert model.exec_s(4096, 0, Batching(chunk=1024)) - model.exec_s(4096, 0) == pytest.approx(3 * 0.02)
