"""The two levels: their terms, their scaling, and that no time falls where the work grows."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cost_model import (
    ArchLevel,
    Attention,
    Batch,
    Linear,
    Link,
    OperatorLevel,
    Outside,
    Rest,
    Scaling,
    Waves,
)
from sglang_ext.cost_model.levels import FEATURES
from sglang_ext.cost_model.sums import products_s
from sglang_ext.errors import ConfigError

work = st.floats(0, 1e-6, allow_nan=False)
waves = st.builds(
    Waves,
    units=st.integers(1, 132),
    tile_rows=st.sampled_from([1, 16, 64, 128]),
    tile_columns=st.sampled_from([16, 128]),
    flops_per_s=st.floats(1e9, 1e15),
    fixed_s=st.floats(0, 1e-4),
)
linears = st.lists(
    st.builds(
        Linear,
        inner=st.integers(16, 8192),
        columns=st.integers(16, 32_000),
        count=st.integers(1, 80),
        rows=st.sampled_from(["tokens", "one"]),
        split=st.sampled_from(["columns", "inner", "none"]),
    ),
    min_size=1,
    max_size=4,
).map(tuple)
levels = st.builds(
    OperatorLevel,
    layers=st.integers(1, 80),
    hidden=st.integers(64, 8192),
    activation_bytes=st.sampled_from([2, 4]),
    linears=linears,
    waves=waves,
    attention=st.builds(Attention.of_work, work, work, work, work, work),
    rest=st.builds(Rest, work, work, work),
    outside=st.builds(Outside, work, work, work),
    reductions=st.just({"2": Link(1e-5, 1e-10), "4": Link(2e-5, 2e-10)}),
)
archs = st.lists(work, min_size=FEATURES, max_size=FEATURES).map(lambda c: ArchLevel(tuple(c)))
tokens = st.integers(0, 20_000)


@given(level=st.one_of(levels, archs), new=tokens, context=tokens, more=st.integers(1, 5000))
def test_more_to_compute_never_takes_less(level, new, context, more) -> None:
    seconds = level.seconds(new, context)
    assert seconds >= 0
    slack = 1e-9 + 1e-9 * seconds
    assert level.seconds(new + more, context) >= seconds - slack
    assert level.seconds(new, context + more) >= seconds - slack
    # The same prompt with more of it cached.
    if context >= more:
        assert level.seconds(new + more, context - more) >= seconds - slack


@given(level=levels, new=tokens, context=tokens)
def test_the_parts_are_the_whole(level, new, context) -> None:
    assert sum(level.parts(Batch.of(new, context)).values()) == pytest.approx(level.seconds(new, context))


def test_waves_are_steps() -> None:
    """4 units, tiles of 16 x 16: 32 columns are 2 tiles, so 32 rows fill a wave."""
    device = Waves(units=4, tile_rows=16, tile_columns=16, flops_per_s=4 * 2 * 16 * 16 * 8, fixed_s=0.0)
    product = Linear(inner=8, columns=32, count=1)
    times = [products_s((product,), device, rows, 1) for rows in (1, 16, 32, 33, 64, 65)]
    assert times == [1, 1, 1, 2, 2, 3]
    assert products_s((Linear(8, 32, 1, "one"),), device, 1000, 1) == 1


def test_attention_is_the_papers_polynomial() -> None:
    attention = Attention(a=-2e-9, b=3e-9, c=4e-6, d=5e-3)
    x, y = 1000, 0.25
    assert attention.seconds(Batch.of(750, 250)) == pytest.approx(
        -2e-9 * x * x * y + 3e-9 * x * x + 4e-6 * x + 5e-3
    )


def test_attention_counts_pairs_where_kernels_skip_the_diagonal() -> None:
    attention = Attention.of_work(pairs=1.0, rectangle=0, square=0, per_token=0, fixed=0)
    assert attention.seconds(Batch.of(30, 70)) == pytest.approx(30 * (70 + 30 / 2))
    attention = Attention.of_work(pairs=0, rectangle=1.0, square=0, per_token=0, fixed=0)
    assert attention.seconds(Batch.of(30, 70)) == pytest.approx(30 * 100)


def level(**changes) -> OperatorLevel:
    parts = {
        "layers": 2,
        "hidden": 64,
        "activation_bytes": 4,
        "linears": (
            Linear(64, 256, 2),
            Linear(256, 64, 2, split="inner"),
            Linear(64, 1000, 1, rows="one"),
        ),
        "waves": Waves(1, 1, 1, 1e9),
        "attention": Attention.of_work(1e-9, 0, 0, 1e-6, 1e-3),
        "rest": Rest(2e-3, 1e-6, 3e-6),
        "outside": Outside(4e-3),
        "reductions": {"2": Link(1e-4, 1e-9)},
    }
    return OperatorLevel(**(parts | changes))


def test_twice_the_ranks_halve_what_is_parallel_and_nothing_else() -> None:
    one, two = level().parts(Batch.of(1000, 500)), level().scaled(2).parts(Batch.of(1000, 500))
    assert two["linear"] == pytest.approx(one["linear"] / 2)
    assert two["attention"] - 1e-3 == pytest.approx((one["attention"] - 1e-3) / 2)
    assert two["rest"] == pytest.approx(2e-3 + 1000 * (1e-6 + 1.5e-6))
    assert two["outside"] == one["outside"]
    # Two per layer and one behind the embedding, of 1,000 rows of 64 numbers of 4 bytes; as many of one row
    # in the step of generation; and four small ones.
    assert two["communication"] == pytest.approx(5 * (1e-4 + 1000 * 64 * 4 * 1e-9) + 9 * 1e-4)
    assert one["communication"] == 0


def test_scaling_there_and_back_changes_nothing() -> None:
    there = level().scaled(2)
    back = there.scaled(1)
    assert back.seconds(1000, 500) == pytest.approx(level().seconds(1000, 500))


def test_stages_add_what_lies_between_them() -> None:
    piped = level(stage_link=Link(1e-3, 0.0)).scaled(1, pp=4)
    assert piped.seconds(100, 0) == pytest.approx(level().seconds(100, 0) + 3e-3)


def test_the_arch_level_can_only_be_divided() -> None:
    whole = ArchLevel((1e-2, 0, 1e-4, 0, 0, 0), {"2": Link(1e-4, 0.0)}, 2, 64, 4)
    assert whole.scaled(2).seconds(100, 0) == pytest.approx((1e-2 + 1e-2) / 2 + 14 * 1e-4)


@pytest.mark.parametrize("whole", [level(), ArchLevel((0.1,) + (0.0,) * 5)])
def test_unmeasured_reductions_are_named(whole) -> None:
    with pytest.raises(ConfigError, match="4 ranks") as caught:
        whole.scaled(4)
    assert "--scale-to-tp 4" in str(caught.value)


def test_a_parallelism_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 x 1"):
        level().scaled(0)


def test_the_constants_of_a_parallelism_apply_to_it_alone() -> None:
    scalings = {"2": Scaling(1.5, 0.01)}
    level = OperatorLevel(
        4, 512, 4, (Linear(512, 512, 4),), Waves(1, 16, 16, 1e9), Attention.of_work(1e-9, 0, 0, 0, 0),
        Rest(1e-3, 0.0), Outside(5e-3), reductions={"2": Link(1e-5, 0.0), "4": Link(1e-5, 0.0)},
    )  # fmt: skip
    told = msgspec.structs.replace(level, scalings=scalings)
    assert told.seconds(100, 50) == level.seconds(100, 50)
    assert told.scaled(4) == msgspec.structs.replace(level.scaled(4), scalings=scalings)
    assert told.scaled(2).seconds(100, 50) == pytest.approx(1.5 * level.scaled(2).seconds(100, 50) + 0.01)
    assert told.scaled(2).scaled(1).seconds(100, 50) == pytest.approx(level.seconds(100, 50))
    arch = ArchLevel((0.01, 0.0, 1e-4, 0.0, 0.0, 0.0), level.reductions, 4, 512, 4)
    told_arch = msgspec.structs.replace(arch, scalings=scalings)
    assert told_arch.seconds(100, 50) == arch.seconds(100, 50)
    assert told_arch.scaled(2).seconds(100, 50) == pytest.approx(1.5 * arch.scaled(2).seconds(100, 50) + 0.01)
