"""Profiles: a file gives the profile that wrote it, and a damaged file is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cost_model import (
    ArchLevel,
    Attention,
    CostModel,
    Decode,
    Identity,
    Linear,
    Link,
    OperatorLevel,
    Outside,
    Profile,
    Quality,
    Rest,
    Waves,
    load,
    save,
)
from sglang_ext.cost_model.model import USUAL_CONTEXT
from sglang_ext.cost_model.profile import SCHEMA, directory, find
from sglang_ext.errors import ConfigError
from sglang_ext.router.placing.profiles import cost_model_for, load_named
from sglang_ext.tiers import Tier


def profile(**changes) -> Profile:
    parts = {
        "schema": SCHEMA,
        "identity": Identity("a/model", "a GPU", "bfloat16"),
        "arch": ArchLevel((0.01, 0.0, 1e-4, 1e-9, 0.0, 0.0)),
        "quality": Quality(10, 0.1, 0.05),
        "longest_prompt": 4096,
        "kv_bytes_per_token": 4096,
        "operators": OperatorLevel(
            2,
            64,
            4,
            (Linear(64, 256, 2), Linear(256, 64, 2, split="inner")),
            Waves(1, 16, 16, 1e9),
            Attention(-1e-9, 2e-9, 1e-6, 1e-3, -0.5e-9),
            Rest(1e-3, 1e-6),
            Outside(4e-3),
            reductions={"2": Link(1e-4, 1e-9)},
        ),
        "decode": Decode.linear(0.01, 0.001),
        "tiers": {"dram": Link(1e-3, 1e-10), "disk": Link(2e-3, 1e-9)},
        "transfer": Link(5e-3, 1e-9),
        "measured_at": "2024-06-25T00:00:00+00:00",
        "notes": ("quiet",),
    }
    return Profile(**(parts | changes))


def test_a_profile_is_read_as_it_was_written(tmp_path) -> None:
    path = save(profile(), tmp_path / "deep" / "p.json")
    assert load(path) == profile()
    assert load(path).level.seconds(100, 50) == profile().level.seconds(100, 50)
    assert sorted(p.name for p in path.parent.iterdir()) == ["p.json"]


def test_without_operators_the_arch_level_is_used(tmp_path) -> None:
    bare = profile(operators=None, decode=None, transfer=None, tiers={})
    read = load(save(bare, tmp_path / "p.json"))
    assert read.level == read.arch
    assert CostModel(read).exec_s(100, 0) == pytest.approx(0.01 + 0.01 + 1e-9 * 100 * 50)


def test_profiles_are_kept_by_what_they_belong_to(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("SGLANG_EXT_PROFILE_DIR", str(tmp_path))
    first = save(profile())
    other = save(profile(identity=Identity("a/model", "a GPU", "bfloat16", tp=2)))
    save(profile(identity=Identity("another", "a GPU", "bfloat16")))
    (tmp_path / "broken.json").write_text("{")
    assert directory() == tmp_path
    assert set(find("a/model")) == {first, other}
    assert find("a/model", tp=2) == [other]
    assert first.name.startswith("a_model-a_GPU-bfloat16-tp1-pp1-")


def test_names_that_look_alike_are_different_files() -> None:
    names = {
        Identity(model, device, "bfloat16").file_name()
        for model in ("a/b", "a_b", "a b", "x" * 100 + "a/b", "../../etc/passwd")
        for device in ("GPU", "GPU ")
    }
    assert len(names) == 10
    assert not any("/" in name or name.startswith(".") for name in names)


def edited(path: Path, where: str, value: object) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    place = content
    *way, last = where.split(".")
    for step in way:
        place = place[int(step) if isinstance(place, list) else step]
    if value is ...:
        del place[last]
    else:
        place[int(last) if isinstance(place, list) else last] = value
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.parametrize(
    ("where", "value", "said"),
    [
        ("schema", 99, "schema 99"),
        ("schema", ..., "schema None"),
        ("arch", ..., "arch"),
        ("arch.coefficients", [1.0], "arch.coefficients"),
        ("arch.coefficients.2", -1.0, r"coefficients\[2\]"),
        ("arch.coefficients.2", "fast", "Expected `float`"),
        ("unknown", 1, "unknown"),
        ("operators.waves.flops_per_s", 0, "waves.flops_per_s"),
        ("operators.waves.units", -1, "waves.units"),
        ("operators.waves.flops_per_s", 1e999, "malformed"),
        ("operators.linears.0.inner", 0, r"linears\[0\]"),
        ("operators.linears.0.split", "sideways", "sideways"),
        ("operators.attention.a", 5.0, "attention"),
        ("operators.attention.a", -5.0, "attention"),
        ("operators.tp", 4, "4 ranks"),
        ("operators.rest.fixed_s", -0.5, "rest.fixed_s"),
        ("kv_bytes_per_token", 0, "kv_bytes_per_token"),
        ("longest_prompt", 0, "longest_prompt"),
        ("identity.tp", 0, "identity.tp"),
        ("tiers.tape", {"fixed_s": 1, "per_byte_s": 1}, "tape"),
        ("tiers.dram.per_byte_s", -1, "per_byte_s"),
        ("transfer.fixed_s", None, "fixed_s"),
        ("decode.requests", [1], "decode.requests has batches"),
        ("decode.requests", [2, 3], "decode.requests has batches"),
        ("decode.requests", [1, 1], "decode.requests is .* must ascend"),
        ("decode.steps_s.1", -0.1, r"decode.steps_s\[1\]"),
    ],
)
def test_a_damaged_profile_is_refused_by_name(tmp_path, where, value, said) -> None:
    path = save(profile(), tmp_path / "p.json")
    edited(path, where, value)
    with pytest.raises(ConfigError, match=said) as caught:
        load(path)
    assert caught.value.field == "--cost-profile"
    assert "calibrate" in str(caught.value)


@pytest.mark.parametrize("content", ["", "[]", "null", '{"schema": 1', "NaN", "\x00", '{"schema": true}'])
def test_what_is_no_profile_is_refused(tmp_path, content) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        load(path)
    path.write_bytes(b" " * (2 << 20))
    with pytest.raises(ConfigError, match="2097152 bytes"):
        load(path)
    with pytest.raises(ConfigError, match="No such file"):
        load(tmp_path / "gone.json")


def test_an_impossible_profile_is_not_written(tmp_path) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        save(profile(longest_prompt=0), tmp_path / "p.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        save(profile(), tmp_path / "file" / "p.json")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_profile_or_an_error_of_ours(tmp_path_factory, data) -> None:
    path = tmp_path_factory.mktemp("any") / "p.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError):
        load(path)


# -- asking ---------------------------------------------------------------------------------------------


def test_costs_come_from_the_profile() -> None:
    model = CostModel(profile())
    assert model.calibrated
    assert model.load_s(Tier.HBM, 1e9) == 0
    assert model.load_s(Tier.DRAM, 1e9) == pytest.approx(1e-3 + 0.1)
    assert model.load_tokens_s(Tier.DISK, 100) == pytest.approx(2e-3 + 100 * 4096 * 1e-9)
    assert model.transfer_s(100) == pytest.approx(5e-3 + 100 * 4096 * 1e-9)
    assert model.transfer_s(0) == 0
    assert model.decode_s(10) == pytest.approx(0.02)
    assert model.exec_s(0, 500) == model.exec_s(1, 500)


def test_a_step_follows_the_measured_batches_and_the_contexts() -> None:
    # As measured on a CPU, where three requests take longer than four.
    decode = Decode((1, 2, 3, 4, 8), (0.020, 0.036, 0.046, 0.036, 0.042), 1e-6)
    model = CostModel(profile(decode=decode))
    assert [model.decode_s(count, 0) for count in (1, 3, 4)] == pytest.approx([0.020, 0.046, 0.036])
    assert model.decode_s(6, 0) == pytest.approx(0.039)
    assert model.decode_s(15, 0) == pytest.approx(0.042 + 7 * 0.022 / 7)
    assert model.decode_s(4, 10_000) == pytest.approx(0.036 + 0.01)
    assert model.decode_s(4) == model.decode_s(4, 4 * USUAL_CONTEXT)
    assert model.beside_s == pytest.approx(0.022 / 7 + USUAL_CONTEXT * 1e-6)
    falling = CostModel(profile(decode=Decode((1, 2), (0.02, 0.01))))
    assert falling.decode_s(5, 0) == pytest.approx(0.01)
    assert decode.times(2).seconds(6) == pytest.approx(0.078)


def test_without_a_profile_there_are_defaults() -> None:
    model = CostModel()
    assert not model.calibrated
    assert 0.1 < model.exec_s(1000, 0) < 0.2
    assert model.exec_s(1000, 50_000) == pytest.approx(0.02 + 0.1 * 2 + 0.1 * 0.01)
    assert model.load_tokens_s(Tier.DRAM, 1000) < model.exec_s(1000, 0)


# -- the router's choice ----------------------------------------------------------------------------------


def test_the_one_profile_of_a_model_is_used(tmp_path, caplog) -> None:
    save(profile(), tmp_path / "one.json")
    assert cost_model_for("a/model", folder=tmp_path).calibrated
    assert not cost_model_for("another", folder=tmp_path).calibrated
    save(profile(identity=Identity("a/model", "another GPU", "bfloat16")), tmp_path / "two.json")
    assert not cost_model_for("a/model", folder=tmp_path).calibrated
    assert "--cost-profile" in caplog.text


@pytest.mark.parametrize("choose", [lambda: load_named("none"), lambda: cost_model_for("nobody's/model")])
def test_it_is_said_which_defaults_are_calculated_with(choose, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    caplog.set_level("INFO")
    choose()
    assert "calculating with defaults" in caplog.text
    assert "5 GB/s between instances" in caplog.text
    assert "128 KiB of KV per token" in caplog.text
    assert CostModel().transfer_s(1_000_000) == pytest.approx(1e6 * 128 * 1024 / 5e9, rel=0.01)


def test_a_named_profile_is_used_or_refused(tmp_path) -> None:
    path = save(profile(), tmp_path / "one.json")
    named = load_named(str(path))
    assert named is not None
    assert named.profile == profile()
    assert load_named("auto") is None
    assert load_named("none") is None
    with pytest.raises(ConfigError, match="No such file"):
        load_named(str(tmp_path / "gone.json"))


def test_profiles_are_immutable() -> None:
    with pytest.raises(AttributeError):
        profile().longest_prompt = 5  # type: ignore[misc]
    assert msgspec.structs.replace(profile(), longest_prompt=5).longest_prompt == 5
