"""Tiny models of which layers keep a state of fixed size, with or instead of the KV of every token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_DENSE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attn_output_gate": True,
}

STATE_KINDS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "tiny-gdn": (
        "Qwen3.5, three gated delta layers (GDN) to one of attention",
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        {
            **_DENSE,
            **_DELTA,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "partial_rotary_factor": 0.25,
            },
        },
    ),
    "tiny-gdn-moe": (
        "Qwen3-Next, the same layers with shared and routed experts",
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            **_DENSE,
            **_DELTA,
            # The file has the output layer too, equal to the embeddings.
            "tie_word_embeddings": False,
            "rope_theta": 10_000.0,
            "rope_scaling": None,
            "partial_rotary_factor": 0.25,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "moe_intermediate_size": 256,
            "shared_expert_intermediate_size": 256,
            "norm_topk_prob": True,
        },
    ),
    "tiny-mamba2": (
        "Falcon-H1, attention and Mamba2 side by side in each layer",
        "FalconH1ForCausalLM",
        "falcon_h1",
        {
            **_DENSE,
            "num_hidden_layers": 3,
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 1,
            "mamba_chunk_size": 64,
            "mamba_conv_bias": True,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mlp_multipliers": [1.0, 1.0],
            "ssm_multipliers": [1.0] * 5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "tiny-kda": (
        "Kimi-Linear, three gated delta layers with a decay by channel (KDA) to one of latent attention",
        "KimiLinearForCausalLM",
        "kimi_linear",
        {
            **{name: value for name, value in _DENSE.items() if name != "head_dim"},
            "num_key_value_heads": 8,
            # SGLang has it in the delta layers whatever the file says.
            "rms_norm_eps": 1e-5,
            # The file has the output layer too, equal to the embeddings.
            "tie_word_embeddings": False,
            "q_lora_rank": None,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "mla_use_nope": True,
            # No layer has experts.
            "first_k_dense_replace": 4,
            "moe_layer_freq": 1,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_shared_experts": 1,
            "moe_intermediate_size": 256,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
            "linear_attn_config": {
                "kda_layers": [1, 2, 3],
                "full_attn_layers": [4],
                "num_heads": 8,
                "head_dim": 32,
                "short_conv_kernel_size": 4,
            },
        },
    ),
    "tiny-nemotron": (
        "Nemotron-H, each layer Mamba2, attention without positions, or feed-forward",
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            **_DENSE,
            "hybrid_override_pattern": "M-M*-M-",
            "num_hidden_layers": 7,
            # The file has the output layer too, equal to the embeddings.
            "tie_word_embeddings": False,
            "layer_norm_epsilon": 1e-5,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 8,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            # SGLang reads both.
            "n_groups": 2,
            "mamba_n_groups": 2,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 64,
            "use_conv_bias": True,
        },
    ),
    "tiny-lfm2": (
        "LFM2, grouped-query attention and short convolutions",
        "Lfm2ForCausalLM",
        "lfm2",
        {
            **_DENSE,
            "layer_types": ["conv", "full_attention"] * 2,
            "conv_L_cache": 3,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
}
"""As `model_kinds.KINDS`."""

CONVOLUTION = ".conv.conv.weight"
"""How the names of LFM2's convolutions end."""


def has_attention(config: dict[str, Any], layer: int) -> bool:
    """Whether a layer keeps KV of its tokens."""
    if "hybrid_override_pattern" in config:
        return bool(config["hybrid_override_pattern"][layer] == "*")
    if "linear_attn_config" in config:
        return layer + 1 in config["linear_attn_config"]["full_attn_layers"]
    return "layer_types" not in config or config["layer_types"][layer] not in ("linear_attention", "conv")


def mixer_layer(config: dict[str, Any], layer: int, prefix: str) -> Shapes:
    """All weights of a layer of Nemotron-H, which has one part: Mamba2, attention, or feed-forward."""
    hidden, kind = config["hidden_size"], config["hybrid_override_pattern"][layer]
    yield prefix + "norm.weight", (hidden,)
    if kind == "M":
        own = {
            "mamba_d_ssm": config["mamba_num_heads"] * config["mamba_head_dim"],
            "mamba_n_heads": config["mamba_num_heads"],
            "mamba_d_state": config["ssm_state_size"],
        }
        yield from _mamba2({**config, **own}, prefix + "mixer.")
    elif kind == "*":
        queries = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        for name, size in (("q", queries), ("k", keys), ("v", keys)):
            yield f"{prefix}mixer.{name}_proj.weight", (size, hidden)
        yield prefix + "mixer.o_proj.weight", (hidden, queries)
    else:
        yield prefix + "mixer.up_proj.weight", (config["intermediate_size"], hidden)
        yield prefix + "mixer.down_proj.weight", (hidden, config["intermediate_size"])


def state_layer(config: dict[str, Any], layer: int, prefix: str) -> Shapes:
    """Weights of a layer's state part; none where it has none."""
    if config["model_type"] == "falcon_h1":
        yield from _mamba2(config, prefix + "mamba.")
    elif has_attention(config, layer):
        return
    elif config["model_type"] == "kimi_linear":
        yield from _kda(config, prefix + "self_attn.")
    elif config["model_type"] == "lfm2":
        yield from _short_conv(config, prefix)
    else:
        yield from _gdn(config, prefix + "linear_attn.")


def _gdn(config: dict[str, Any], prefix: str) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    if config["model_type"] == "qwen3_next":
        yield prefix + "in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
        yield prefix + "in_proj_ba.weight", (2 * heads, hidden)
    else:
        yield prefix + "in_proj_qkv.weight", (2 * keys + values, hidden)
        yield prefix + "in_proj_z.weight", (values, hidden)
        yield prefix + "in_proj_b.weight", (heads, hidden)
        yield prefix + "in_proj_a.weight", (heads, hidden)
    yield prefix + "conv1d.weight", (2 * keys + values, 1, config["linear_conv_kernel_dim"])
    yield prefix + "dt_bias", (heads,)
    yield prefix + "A_log", (heads,)
    yield prefix + "norm.weight", (config["linear_value_head_dim"],)
    yield prefix + "out_proj.weight", (hidden, values)


def _kda(config: dict[str, Any], prefix: str) -> Shapes:
    own, hidden = config["linear_attn_config"], config["hidden_size"]
    heads, size = own["num_heads"], own["head_dim"]
    for name in "qkv":
        yield f"{prefix}{name}_proj.weight", (heads * size, hidden)
        yield f"{prefix}{name}_conv1d.weight", (heads * size, 1, own["short_conv_kernel_size"])
    yield prefix + "b_proj.weight", (heads, hidden)
    for name in "fg":  # the forget gate and the output gate
        yield f"{prefix}{name}_a_proj.weight", (size, hidden)
        yield f"{prefix}{name}_b_proj.weight", (heads * size, size)
    yield prefix + "dt_bias", (heads * size,)
    yield prefix + "A_log", (1, 1, heads, 1)
    yield prefix + "o_norm.weight", (size,)
    yield prefix + "o_proj.weight", (hidden, heads * size)


def _mamba2(config: dict[str, Any], prefix: str) -> Shapes:
    inner, heads = config["mamba_d_ssm"], config["mamba_n_heads"]
    convolved = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    yield prefix + "in_proj.weight", (inner + convolved + heads, config["hidden_size"])
    yield prefix + "conv1d.weight", (convolved, 1, config["mamba_d_conv"])
    yield prefix + "conv1d.bias", (convolved,)
    for name in ("dt_bias", "A_log", "D"):
        yield prefix + name, (heads,)
    yield prefix + "norm.weight", (inner,)
    yield prefix + "out_proj.weight", (config["hidden_size"], inner)


def _short_conv(config: dict[str, Any], prefix: str) -> Shapes:
    """A short convolution between two gates."""
    hidden = config["hidden_size"]
    yield prefix + "conv.in_proj.weight", (3 * hidden, hidden)
    yield prefix.removesuffix(".") + CONVOLUTION, (hidden, 1, config["conv_L_cache"])
    yield prefix + "conv.out_proj.weight", (hidden, hidden)
