"""Profiles without a measurement: a model's shapes over a device's peak rates (the roofline model).

A prefill reads the weights once and computes, for each new token, two operations per active weight, and for
each pair of tokens the products of attention. A step of generation reads the weights and each request's KV.
The rates that kernels reach are ``COMPUTED`` and ``MOVED`` of the peaks. This is an estimate: it knows no
kernel, no batch of the server, no other process. So ``Profile.estimated`` marks it, the router corrects it
within the bounds of its defaults, and ``auto`` does not take it for a calibration.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from sglang_ext.cost_model.levels import ArchLevel
from sglang_ext.cost_model.operators import Link, Part
from sglang_ext.cost_model.profile import SCHEMA, Decode, Identity, Profile, Quality
from sglang_ext.errors import ConfigError

COMPUTED: Final = 0.5
"""Share of the peak rate of operations that prefills reach."""
MOVED: Final = 0.7
"""Share of the peak bandwidth of memory that steps of generation reach."""
LONGEST: Final = 8192
NUMBER_BYTES: Final = {"float32": 4, "float8": 1, "fp8": 1}
"""Bytes of a number, by a part of its type's name; of others, ``USUAL_BYTES``."""
USUAL_BYTES: Final = 2


class Device(Part, frozen=True):
    """Peak rates of one device. loads: from host memory. around_s: of a request outside of its pass."""

    flops_per_s: float
    bytes_per_s: float
    loads_bytes_per_s: float
    around_s: float


CORE: Final = Device(31e9, 12.5e9, 2.5e9, 5e-3)
"""One core of a server's CPU, with wide vectors."""
CORES: Final = 32
"""Of a CPU whose number of cores is not known."""
CORES_OF_MEMORY: Final = 8
"""So many cores use all of a CPU's bandwidth."""


def cpu(cores: int) -> Device:
    """A CPU of so many cores."""
    moving = min(cores, CORES_OF_MEMORY)
    return Device(
        cores * CORE.flops_per_s, moving * CORE.bytes_per_s, moving * CORE.loads_bytes_per_s, CORE.around_s
    )


DEVICES: Final = {
    "cpu": cpu(CORES),
    "h100": Device(989e12, 3.35e12, 50e9, 3e-3),
    "h200": Device(989e12, 4.8e12, 50e9, 3e-3),
}
"""Of GPUs: dense operations in bfloat16 of the SXM modules, by NVIDIA's data sheets, and PCIe 5."""
_GPU: Final = re.compile(r"\b(h100|h200)\b(?!.*\bmig\b)", re.IGNORECASE)
"""In a name such as ``NVIDIA H100 80GB HBM3``; not in one of a part of it (MIG), nor of a GH200."""
_CPU: Final = re.compile(r"cpu(?:, ([1-9][0-9]{0,3}) cores)?")


def rates_of(name: str) -> Device | None:
    """The rates of a device: of a key of ``DEVICES``, a GPU by the name that its driver has for it, or a CPU
    with a number of cores, such as ``cpu, 16 cores``. None for other devices."""
    if (found := _CPU.fullmatch(name)) is not None:
        return cpu(int(found[1])) if found[1] else DEVICES[name]
    found = _GPU.search(name)
    return None if found is None else DEVICES[found[1].lower()]


class Shapes(Part, frozen=True):
    """A model's sizes. weights: all of them; active: those that a token passes. heads: of queries."""

    layers: int
    heads: int
    head_dim: int
    weights: int
    active: int
    kv_per_token: int
    """Numbers in all layers."""


def config_of(settings: Mapping[str, str]) -> dict[str, Any]:
    """A model's ``config.json`` from its settings as registrations have them: values as JSON, names such as
    ``text_config.hidden_size``. Values that are cut or no JSON are left out."""
    config: dict[str, Any] = {}
    for name, text in settings.items():
        try:
            value = json.loads(text)
        except ValueError:
            continue
        into, (*parents, last) = config, name.split(".")
        for parent in parents:
            inner = into.setdefault(parent, {})
            into = inner if isinstance(inner, dict) else {}
        into[last] = value
    return config


def number_bytes(kind: str) -> int:
    """Bytes of a number of a type such as ``torch.float8_e4m3fn``."""
    return next((size for part, size in NUMBER_BYTES.items() if part in kind), USUAL_BYTES)


def _of_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is of the language model."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) and text else config


def shapes_of(config: Mapping[str, Any]) -> Shapes:
    """The sizes of a model, from its ``config.json``.

    Raises:
        ConfigError: it lacks a size that a transformer has.
    """
    config = _of_text(config)

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name, default)
        if not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"the model's configuration has no {name}, so its costs cannot be estimated",
                field="--cost-profile",
                hint="Measure them: sglang-ext calibrate",
            )
        return value

    layers, hidden, heads = (
        size(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads")
    )
    kv_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim") if config.get("head_dim") else hidden // max(1, heads)
    latent = size("kv_lora_rank", 0)
    if latent:  # MLA: one latent of all heads
        kv = latent + size("qk_rope_head_dim", 0)
        attention = hidden * (heads * head_dim + kv) + (latent + hidden) * heads * head_dim
    else:
        kv = 2 * kv_heads * head_dim
        attention = 2 * hidden * heads * head_dim + hidden * kv
    experts = size("num_experts", size("num_local_experts", size("n_routed_experts", 0)))
    wide = size("moe_intermediate_size", size("intermediate_size")) if experts else size("intermediate_size")
    mlp = 3 * hidden * wide
    used = size("num_experts_per_tok", 1) + size("n_shared_experts", 0) if experts else 1
    head = hidden * size("vocab_size")
    return Shapes(
        layers,
        heads,
        head_dim,
        weights=layers * (attention + mlp * max(1, experts)) + 2 * head,
        active=layers * (attention + mlp * used),
        kv_per_token=layers * kv,
    )


def estimated(
    config: Mapping[str, Any], device: str, *, model: str, tp: int = 1, kv_type: str = ""
) -> Profile:
    """The profile of a model on ``tp`` devices of a class.

    Args:
        config: the model's ``config.json``.
        device: see ``rates_of``.
        model: its served name.
        kv_type: of the numbers of KV; empty for that of the weights.

    Raises:
        ConfigError: the device is unknown, or the configuration lacks a size.
    """
    rates = rates_of(device)
    if rates is None:
        raise ConfigError(
            f"the rates of a device {device!r} are not known; there are {', '.join(DEVICES)}",
            field="--cost-profile",
            hint="Measure the costs: sglang-ext calibrate",
        )
    shapes = shapes_of(config)
    text = _of_text(config)
    dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
    operation_s = 1 / (COMPUTED * rates.flops_per_s * tp)
    byte_s = 1 / (MOVED * rates.bytes_per_s * tp)
    kv_bytes = shapes.kv_per_token * number_bytes(kv_type or dtype)
    weights_s = shapes.weights * number_bytes(dtype) * byte_s
    token_s = 2 * shapes.active * operation_s
    pair_s = 4 * shapes.layers * shapes.heads * shapes.head_dim * operation_s
    return Profile(
        schema=SCHEMA,
        identity=Identity(model, device, dtype, tp),
        arch=ArchLevel((rates.around_s + weights_s, kv_bytes * byte_s, token_s, pair_s, 0.0, 0.0)),
        quality=Quality(0, 0.0),
        longest_prompt=LONGEST,
        kv_bytes_per_token=kv_bytes,
        decode=Decode.linear(weights_s, token_s, kv_bytes * byte_s, late=device.startswith("cpu")),
        tiers={"dram": Link(1e-4, 1 / rates.loads_bytes_per_s)},
        estimated=True,
        notes=("estimated from the model's shapes and the device's peak rates; nothing was measured",),
    )
