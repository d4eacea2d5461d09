"""The plan of a calibration: the prefills that it measures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.calibration.command import Arguments
from sglang_ext.calibration.instance import Facts
from sglang_ext.calibration.measure import longest_prompt, read_model
from sglang_ext.calibration.plan import Point, Tokens, between, lengths, points, shuffled
from sglang_ext.errors import ConfigError


@given(st.integers(256, 40_000), st.integers(3, 12))
def test_the_grid_covers_lengths_and_shares_in_whole_blocks(longest, count) -> None:
    grid = points(longest, count)
    assert max(point.prompt for point in grid) == longest // 16 * 16
    assert all(point.new >= 16 and point.context % 16 == 0 for point in grid)
    assert {0} < {point.context for point in grid}
    assert len(lengths(longest, count)) >= min(3, count)
    unseen = between(grid)
    assert unseen
    assert not set(unseen) & set(grid)
    assert max(point.prompt for point in unseen) < longest


def test_every_round_has_every_point_in_another_order() -> None:
    grid = points(2048, 4)
    orders = list(shuffled(grid, 3))
    rounds = [orders[n * len(grid) : (n + 1) * len(grid)] for n in range(3)]
    assert all(sorted(one) == sorted(grid) for one in rounds)
    assert rounds[0] != rounds[1]
    assert orders == list(shuffled(grid, 3))


def test_prompts_are_new_and_valid() -> None:
    tokens = Tokens(1000, 5)
    first, second = tokens.fresh(500), tokens.fresh(500)
    assert first != second
    assert all(100 <= token < 1000 for token in first)


def facts(**changes) -> Facts:
    parts = {
        "model": "m", "model_path": "/nowhere", "device": "cpu", "dtype": "auto", "tp": 1, "pp": 1,
        "capacity": 30_000, "chunk": None, "caches": True,
    }  # fmt: skip
    return Facts(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 4096),
        ({"capacity": 3000}, 992),
        ({"chunk": 2048}, 2048),
        ({"chunk": 8192}, 4096),
    ],
)
def test_the_longest_prompt_fits(changes, longest) -> None:
    assert longest_prompt(facts(**changes), 4096) == longest


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"capacity": 300}, "too small"), ({"chunk": 64}, "too small"), ({"caches": False}, "no prefixes")],
)
def test_an_instance_that_cannot_be_measured_is_refused(changes, why) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        longest_prompt(facts(**changes), 4096)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("config", "dtype", "kv", "number_bytes"),
    [
        pytest.param(
            '{"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,'
            ' "head_dim": 16, "vocab_size": 5000, "torch_dtype": "bfloat16"}',
            "auto",
            4 * 2 * 2 * 16 * 2,
            2,
            id="grouped queries",
        ),
        pytest.param(
            '{"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 8, "vocab_size": 5000}',
            "float32",
            4 * 2 * 8 * 8 * 4,
            4,
            id="every head its own",
        ),
        pytest.param(
            '{"text_config": {"num_hidden_layers": 4, "hidden_size": 64, "kv_lora_rank": 64,'
            ' "qk_rope_head_dim": 16, "vocab_size": 5000}}',
            "bfloat16",
            4 * 80 * 2,
            2,
            id="latent attention, inside a larger model",
        ),
    ],
)
def test_the_models_shape_is_read(tmp_path, config, dtype, kv, number_bytes) -> None:
    (tmp_path / "config.json").write_text(config)
    model = read_model(str(tmp_path), dtype)
    assert model is not None
    assert (model.kv_bytes_per_token, model.shape.activation_bytes) == (kv, number_bytes)
    assert (model.shape.layers, model.shape.hidden, model.vocabulary) == (4, 64, 5000)


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"num_hidden_layers": "many"}'])
def test_without_a_readable_shape_there_is_none(tmp_path, config) -> None:
    (tmp_path / "config.json").write_text(config)
    assert read_model(str(tmp_path), "auto") is None
    assert read_model("org/model-on-a-hub", "auto") is None


@pytest.mark.parametrize("text", ["0", "-1", "fast", "1:2:3", "1:-1", "", "nan"])
def test_bandwidths_that_cannot_be_are_refused(text, capsys) -> None:
    with pytest.raises(SystemExit):
        Arguments.parse(["--url", "x", "--links", f"dram={text}"])
    assert "not a bandwidth" in capsys.readouterr().err


def test_bandwidths_are_links() -> None:
    given_ = Arguments.parse(["--url", "x", "--links", "dram=10,disk=2:0.001"])
    assert given_.dram.seconds(10e9) == pytest.approx(1.0)
    assert given_.disk.seconds(2e9) == pytest.approx(1.001)


def test_points_are_ordered_and_know_their_prompt() -> None:
    assert Point(3, 4).prompt == 7
    assert sorted([Point(2, 1), Point(1, 9)]) == [Point(1, 9), Point(2, 1)]
