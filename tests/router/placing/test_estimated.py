"""Profiles that are estimated from a model's shapes and a device's rates."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from router_costs import router_costs

from sglang_ext.clock import SystemClock
from sglang_ext.cost_model import CostModel, load, save
from sglang_ext.cost_model.estimated import DEVICES, config_of, estimated, rates_of, shapes_of
from sglang_ext.cost_model.profile import Identity
from sglang_ext.engine.model_settings import model_settings
from sglang_ext.errors import ConfigError
from sglang_ext.protocol.cluster import Registration, decode, encode
from sglang_ext.router.app.adoption import Adoption
from sglang_ext.router.fleet.facts import InstanceFacts, ModelFacts
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.placing.costs import BOUND_CALIBRATED, BOUND_DEFAULT
from sglang_ext.router.placing.profiles import cost_model_for, load_named
from sglang_ext.tasks import Rounds

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


# -- from what instances report ---------------------------------------------------------------------------


def registration(device: str, config: dict[str, Any] = LLAMA_8B, **more: Any) -> Registration:
    """Of an instance that serves a model of this configuration."""
    settings = model_settings(SimpleNamespace(to_dict=lambda: config))
    given: dict[str, Any] = {"url": "http://10.0.0.1:30000", "instance": "i", "epoch": "0" * 32}
    return Registration(**{**given, "device": device, "settings": settings, **more})


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cpu", "cpu"),
        ("cpu, 32 cores", "cpu"),
        ("cpu, many cores", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 MIG 1g.18gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H20", None),
        ("AMD Instinct MI300X", None),
        ("", None),
    ],
)
def test_devices_are_known_by_their_drivers_names(name: str, found: str | None) -> None:
    assert rates_of(name) == (None if found is None else DEVICES[found])


def test_a_cpu_computes_with_all_cores_and_moves_with_some() -> None:
    two, eight, many = (rates_of(f"cpu, {count} cores") for count in (2, 8, 64))
    assert two is not None
    assert eight is not None
    assert many is not None
    assert (eight.flops_per_s, many.flops_per_s) == (4 * two.flops_per_s, 32 * two.flops_per_s)
    assert (eight.bytes_per_s, many.bytes_per_s) == (4 * two.bytes_per_s, 4 * two.bytes_per_s)


def test_a_registrations_settings_give_the_estimate_of_the_configuration(tmp_path) -> None:
    nested = {"vision_config": {"depth": 32}, "text_config": LLAMA_8B}
    for config in (LLAMA_8B, MIXTRAL, nested):
        known = registration("NVIDIA H100 80GB HBM3", config)
        assert config_of(known.settings) == config
        model = cost_model_for("m", [known], tmp_path)
        assert model.basis == "estimated"
        assert model.profile == estimated(config, known.device, model="m")
    halved = cost_model_for("m", [registration("NVIDIA H200", tp_size=2)], tmp_path)
    assert halved.profile == estimated(LLAMA_8B, "NVIDIA H200", model="m", tp=2)
    settings = {**known.settings, "kv_cache_dtype": "torch.float8_e4m3fn"}
    eight = cost_model_for("m", [registration("NVIDIA H200", settings=settings)], tmp_path)
    assert eight.kv_bytes_per_token * 2 == model.kv_bytes_per_token


@pytest.mark.parametrize(
    "instances",
    [
        [],
        [registration("")],
        [registration("NVIDIA L40S")],
        [registration("NVIDIA H100 80GB HBM3", {"hidden_size": 4096})],
        [registration("cpu", {"text_config": "..."})],
    ],
)
def test_unknown_devices_and_models_keep_the_defaults(tmp_path, instances) -> None:
    assert cost_model_for("m", instances, tmp_path).basis == "defaults"
    with_another = [*instances, registration("cpu")]
    assert cost_model_for("m", with_another, tmp_path).basis == "estimated"


def test_a_calibration_goes_before_an_estimate_and_a_device_tells_several_apart(tmp_path) -> None:
    here = estimated(LLAMA_8B, "h100", model="m")
    for number, device in enumerate(("NVIDIA H100 80GB HBM3", "NVIDIA L40S")):
        measured = {"estimated": False, "identity": Identity("m", device, "bfloat16")}
        save(type(here)(**{**{n: getattr(here, n) for n in here.__struct_fields__}, **measured}),
             tmp_path / f"{number}.json")  # fmt: skip
        chosen = cost_model_for("m", [registration("NVIDIA L40S")], tmp_path)
        assert chosen.basis == "calibrated"
    assert chosen.profile is not None
    assert chosen.profile.identity.device == "NVIDIA L40S"
    assert cost_model_for("m", [], tmp_path).basis == "defaults"
    assert cost_model_for("m", [registration("cpu")], tmp_path).basis == "estimated"


def test_registrations_of_older_agents_name_no_device() -> None:
    fields = json.loads(encode(registration("cpu")))
    assert decode(encode(fields), Registration).device == "cpu"
    del fields["device"], fields["device_bytes"]
    assert decode(encode(fields), Registration).device == ""


FACTS = InstanceFacts(ModelFacts("m", "a", 32_000, 4096), "1", "x", "colocated", "")


async def adopting(fleet: Fleet, costs: Any, setting: str = "auto") -> Adoption:
    """An adoption without a tokenizer."""

    async def load_none(facts: InstanceFacts) -> None:
        pass

    tokenizers: Any = SimpleNamespace(load=load_none, tokenizer=None)
    trees: Any = SimpleNamespace(clear=lambda: None)
    api: Any = None
    clock = SystemClock()
    return Adoption(
        fleet, trees, costs, tokenizers, api, clock,
        cost_profile=setting, on_loaded=lambda: None, rounds=Rounds(clock),
    )  # fmt: skip


@pytest.mark.parametrize("setting", ["auto", "none"])
@pytest.mark.parametrize("first", ["registers", "answers"])
async def test_a_router_estimates_whichever_comes_first(tmp_path, monkeypatch, setting, first) -> None:
    monkeypatch.setenv("SGLANG_EXT_PROFILE_DIR", str(tmp_path))
    fleet, costs = Fleet(), router_costs(CostModel(), lambda: 0.0)
    adoption = await adopting(fleet, costs, setting)
    known = registration("cpu")
    if first == "registers":
        fleet.join(known.url, known)
        fleet.learnt(known.url, FACTS)
    else:
        fleet.join(known.url)
        fleet.learnt(known.url, FACTS)
        await adoption.loaded(5.0)
        assert costs.basis == "defaults"
        costs.observe(known.url, 1.0, 1.0)
        fleet.join(known.url, known)
        adoption.on_reached(known.url)
    wanted = "estimated" if setting == "auto" else "defaults"
    for _ in range(500):
        await asyncio.sleep(0.01)
        if costs.basis == wanted:
            break
    assert costs.basis == wanted
    model = costs.model
    adoption.on_reached(known.url)
    await asyncio.sleep(0.05)
    assert costs.model is model
    await adoption.stop()
