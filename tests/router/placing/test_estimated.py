"""Profiles that are estimated from a model's shapes and a device's rates."""

from __future__ import annotations

import json

import pytest
from router_costs import router_costs

from sglang_ext.cost_model import CostModel, load, save
from sglang_ext.cost_model.estimated import DEVICES, estimated, shapes_of
from sglang_ext.errors import ConfigError
from sglang_ext.router.placing.costs import BOUND_CALIBRATED, BOUND_DEFAULT
from sglang_ext.router.placing.profiles import load_named

LLAMA_8B = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
MIXTRAL = {**LLAMA_8B, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}


def test_the_shapes_are_those_of_the_models() -> None:
    llama, mixtral = shapes_of(LLAMA_8B), shapes_of(MIXTRAL)
    assert llama.weights == pytest.approx(8.03e9, rel=0.01)
    assert llama.kv_per_token * 2 == 128 * 1024
    assert mixtral.weights == pytest.approx(46.7e9, rel=0.01)
    assert mixtral.active == pytest.approx(12.6e9, rel=0.01)
    assert shapes_of({"text_config": LLAMA_8B}) == llama


def test_times_follow_the_devices_rates() -> None:
    models = {name: CostModel(estimated(LLAMA_8B, name, model="m")) for name in DEVICES}
    # 2 operations for each of 7e9 weights and 8192 tokens, at half of 989 TFLOP/s: 0.23 s; attention: 0.04.
    assert models["h100"].exec_s(8192, 0) == pytest.approx(0.28, rel=0.1)
    assert models["h200"].exec_s(8192, 0) < models["h100"].exec_s(8192, 0) < models["cpu"].exec_s(8192, 0)
    assert models["h200"].decode_s(1) < models["h100"].decode_s(1)
    for model in models.values():
        assert model.exec_s(100, 8000) < model.exec_s(8100, 0)
    assert CostModel(estimated(LLAMA_8B, "h100", model="m", tp=2)).exec_s(8192, 0) < models["h100"].exec_s(
        8192, 0
    )


def test_an_estimate_is_a_third_state(tmp_path) -> None:
    profile = estimated(LLAMA_8B, "h100", model="m")
    assert load(save(profile, tmp_path / "p.json")) == profile
    costs = router_costs(CostModel(profile), lambda: 0.0)
    assert (costs.calibrated, costs.basis) == (False, "estimated")
    assert CostModel().basis == "defaults"
    for _ in range(30):
        costs.observe("a", 1.0, 100.0)
    assert BOUND_CALIBRATED < costs.factor("a") <= BOUND_DEFAULT


def test_a_router_reads_a_models_configuration(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    model = load_named(f"estimated=h200:{path}")
    assert model is not None
    assert model.basis == "estimated"


@pytest.mark.parametrize(
    ("setting", "content", "why"),
    [
        ("estimated=h100:{path}", "{}", "num_hidden_layers"),
        ("estimated=h100:{path}", "[]", "no configuration"),
        ("estimated=h100:{path}.gone", "{}", "cannot read"),
        (
            "estimated=abacus:{path}",
            json.dumps(LLAMA_8B),
            "'abacus' are not known; there are cpu, h100, h200",
        ),
    ],
)
def test_what_cannot_be_estimated_is_refused(tmp_path, setting, content, why) -> None:
    path = tmp_path / "config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=why):
        load_named(setting.format(path=path))
