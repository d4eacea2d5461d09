"""Further kinds of tiny models: experts (MoE), latent attention with experts, and sliding windows, of which
SGLang keeps all KV, or that of the last tokens only. Each is the part of a config.json that tells it from
others, and its layers' weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Shapes = Iterator[tuple[str, tuple[int, ...]]]

_GROUPED: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rope_theta": 10_000.0,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
# Scores without groups, as in DeepSeek V3.
_SCORED: dict[str, Any] = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_WINDOWS: dict[str, Any] = {
    **_GROUPED,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GEMMA: dict[str, Any] = {
    **_WINDOWS,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 32,
}
# SGLang reads their output layer from the file, so that it is there too, equal to the embeddings.
_UNTIED: dict[str, Any] = {"tie_word_embeddings": False}

KINDS: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "tiny-moe": (
        "Qwen3-MoE, grouped-query attention with four experts",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            **_GROUPED,
            **_EXPERTS,
            **_UNTIED,
            "num_experts": 4,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
    ),
    "tiny-mixtral": (
        "Mixtral, grouped-query attention with four experts",
        "MixtralForCausalLM",
        "mixtral",
        {
            **_GROUPED,
            **_UNTIED,
            "intermediate_size": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": None,
        },
    ),
    "tiny-glm": (
        "GLM-4.5, grouped-query attention with shared and routed experts",
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {**_GROUPED, **_SCORED, **_UNTIED, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    ),
    "tiny-mla-moe": (
        "DeepSeek-V3, latent attention with shared and routed experts",
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {
            **{name: value for name, value in _GROUPED.items() if name != "head_dim"},
            **_SCORED,
            "moe_layer_freq": 1,
            "num_key_value_heads": 8,
            "q_lora_rank": 64,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "rope_scaling": None,
            "rope_interleave": True,
        },
    ),
    "tiny-gemma2": (
        "Gemma 2, sliding windows of which SGLang keeps all KV",
        "Gemma2ForCausalLM",
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "tiny-gemma3": (
        "Gemma 3, sliding windows of which SGLang keeps all KV",
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**_GEMMA, "rope_local_base_freq": 10_000.0},
    ),
    "tiny-olmo3": (
        "Olmo 3, sliding windows of which SGLang keeps all KV",
        "Olmo3ForCausalLM",
        "olmo3",
        {**_WINDOWS, "rope_scaling": None},
    ),
    "tiny-spark": (
        "Spark 2.5, sliding windows of which SGLang keeps the last tokens' KV",
        "Spark2_5ForCausalLM",
        "spark2_5",
        {
            **_WINDOWS,
            "sliding_window": 32,
            "is_hybrid_swa": True,
            "hybrid_layer_pattern": [1, 0] * 2,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": 10_000.0}
                for kind in ("sliding_attention", "full_attention")
            },
            "headwise_attn_output_gate": True,
        },
    ),
    "tiny-gpt-oss": (
        "gpt-oss, sliding windows and attention sinks, four experts",
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **_WINDOWS,
            **_UNTIED,
            "sliding_window": 32,
            "intermediate_size": 256,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "swiglu_limit": 7.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "tiny-mimo": (
        "MiMo-V2, sliding windows with sinks and more heads than the other layers, values of another size",
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        {
            **_WINDOWS,
            **_SCORED,
            **_UNTIED,
            "n_shared_experts": 0,
            "head_dim": 48,
            "v_head_dim": 32,
            "num_key_value_heads": 2,
            "sliding_window": 32,
            # SGLang counts the tokens before a token, transformers the token too.
            "sliding_window_size": 31,
            "hybrid_layer_pattern": [1, 0] * 2,
            "swa_num_attention_heads": 8,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 48,
            "swa_v_head_dim": 32,
            "swa_rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            # By layer in transformers, see `Reference`; SGLang takes the fields above.
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "attention_value_scale": 0.707,
            "layernorm_epsilon": 1e-6,
            "moe_layer_freq": [0, 1, 1, 1],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "tiny-step": (
        "Step-3.5, sliding windows with more heads than the other layers, a gate for each head, four experts",
        "Step3p5ForCausalLM",
        "step3p5",
        {
            **_WINDOWS,
            **_UNTIED,
            "sliding_window": 32,
            # Without it, transformers forbids to read `num_attention_heads`, which differ by kind of layer.
            "per_layer_config": {},
            "num_attention_groups": 4,
            "attention_other_setting": {
                "attention_type": "sliding_attention",
                "num_attention_heads": 12,
                "num_attention_groups": 4,
                "head_dim": 32,
            },
            "rope_theta": [10_000.0] * 4,
            "partial_rotary_factors": [1.0, 0.5] * 2,
            "use_head_wise_attn_gate": True,
            "moe_layers_enum": "1,2,3",
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "moe_intermediate_size": 256,
            "moe_router_scaling_factor": 1.0,
            "share_expert_dims": 256,
            "use_moe_router_bias": True,
            "need_fp32_gate": True,
            "norm_expert_weight": True,
            "swiglu_limits": [0.0] * 4,
            "swiglu_limits_shared": [0.0] * 4,
        },
    ),
    "tiny-gemma4": (
        "Gemma 4 (text), sliding windows with smaller heads than the other layers",
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            **_GEMMA,
            "sliding_window": 32,
            # The form that SGLang gives heads of two sizes. For transformers' form see `Reference`.
            "per_layer_config": {},
            "head_dim": 64,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "swa_num_key_value_heads": 4,
            "hidden_size_per_layer_input": 0,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1_000_000.0,
                },
            },
        },
    ),
}
"""Name: summary, architecture, model type, and the fields of config.json that other models lack."""

_FOUR_NORMS = (
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
)
_NORMS = {
    "gemma2": _FOUR_NORMS,
    "gemma3_text": _FOUR_NORMS,
    "gemma4_text": (*_FOUR_NORMS, "layer_scalar"),
    "olmo3": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "falcon_h1": ("input_layernorm", "pre_ff_layernorm"),
    "lfm2": ("operator_norm", "ffn_norm"),
}
NORM_WEIGHTS = {"gemma4_text": {"post_feedforward_layernorm": 8.0, "q_norm": 3.0}}
"""Model type: the weights of norms that are not 1. Gemma 4 would repeat a token else: its embeddings are
large, and its norms add no 1 to their weights as those of Gemma 2 and 3 do."""
FINAL_NORMS = {
    "falcon_h1": "model.final_layernorm",
    "lfm2": "model.embedding_norm",
    "nemotron_h": "model.norm_f",
}
"""Model type: the norm in front of the output layer, where it is not ``model.norm``."""


def norms(config: dict[str, Any], prefix: str) -> Shapes:
    """Weights of the norms around attention and feed-forward of a layer."""
    for name in _NORMS.get(config["model_type"], _FOUR_NORMS[:2]):
        if name == "layer_scalar":
            yield prefix + name, (1,)
        else:
            yield f"{prefix}{name}.weight", (config["hidden_size"],)


def of_layer(config: dict[str, Any], layer: int) -> dict[str, Any]:
    """The configuration with the heads of a layer."""
    if config.get("layer_types", ["full_attention"] * (layer + 1))[layer] != "sliding_attention":
        return config
    own = {name.removeprefix("swa_"): value for name, value in config.items() if name.startswith("swa_")}
    sinks = config.get("add_swa_attention_sink_bias", False)
    return {**config, **own, **config.get("attention_other_setting", {}), "sinks": sinks}


_HEAD_NORMS = ("qwen3_moe", "gemma3_text", "gemma4_text", "glm4_moe", "qwen3_5_text", "qwen3_next", "lfm2")


def head_norms(config: dict[str, Any], prefix: str) -> Shapes:
    """Weights of the norms of queries and keys, where a model has them."""
    head, model_type = config["head_dim"], config["model_type"]
    whole = model_type == "olmo3"  # over all heads at once
    if whole or model_type in _HEAD_NORMS:
        norm = "layernorm" if model_type == "lfm2" else "norm"
        for name, heads in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
            yield f"{prefix}{name}_{norm}.weight", (heads * head if whole else head,)


def spark_attention(config: dict[str, Any], prefix: str) -> Shapes:
    """Weights of an attention whose projections are one, with a gate for each head."""
    hidden, head, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    yield prefix + "q_k_v_proj.weight", ((heads + 2 * config["num_key_value_heads"]) * head, hidden)
    yield prefix + "g_proj.weight", (heads, hidden)
    yield prefix + "out_proj.weight", (hidden, heads * head)


def mimo_attention(config: dict[str, Any], prefix: str) -> Shapes:
    """Weights of an attention whose values have a size of their own, with a sink for each head in windows."""
    hidden, heads, keys = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head, value = config["head_dim"], config["v_head_dim"]
    yield prefix + "q_proj.weight", (heads * head, hidden)
    yield prefix + "k_proj.weight", (keys * head, hidden)
    yield prefix + "v_proj.weight", (keys * value, hidden)
    yield prefix + "o_proj.weight", (hidden, heads * value)
    if config.get("sinks"):
        yield prefix + "attention_sink_bias", (heads,)


def step_attention(config: dict[str, Any], prefix: str) -> Shapes:
    """Weights of an attention with norms of queries and keys, and a gate for each head."""
    hidden, head, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    keys = config["num_attention_groups"] * head
    for name, size in (("q", heads * head), ("k", keys), ("v", keys), ("g", heads)):
        yield f"{prefix}{name}_proj.weight", (size, hidden)
    for name in "qk":
        yield f"{prefix}{name}_norm.weight", (head,)
    yield prefix + "o_proj.weight", (hidden, heads * head)


def _dense(prefix: str, hidden: int, inner: int, names: tuple[str, str, str]) -> Shapes:
    gate, up, down = names
    yield f"{prefix}{gate}.weight", (inner, hidden)
    yield f"{prefix}{up}.weight", (inner, hidden)
    yield f"{prefix}{down}.weight", (hidden, inner)


def _step_experts(config: dict[str, Any], prefix: str) -> Shapes:
    """Step's experts, all in one tensor, and the shared one."""
    hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["moe_num_experts"]
    yield prefix + "moe.gate.weight", (experts, hidden)
    yield prefix + "moe.router_bias", (experts,)
    yield prefix + "moe.gate_proj.weight", (experts, inner, hidden)
    yield prefix + "moe.up_proj.weight", (experts, inner, hidden)
    yield prefix + "moe.down_proj.weight", (experts, hidden, inner)
    names = ("gate_proj", "up_proj", "down_proj")
    yield from _dense(prefix + "share_expert.", hidden, config["share_expert_dims"], names)


def sinks_attention(config: dict[str, Any], prefix: str) -> Shapes:
    """Weights of gpt-oss's attention: biases, and a sink for each head."""
    hidden, head, heads = config["hidden_size"], config["head_dim"], config["num_attention_heads"]
    keys = config["num_key_value_heads"] * head
    for name, size in (("q", heads * head), ("k", keys), ("v", keys)):
        yield f"{prefix}{name}_proj.weight", (size, hidden)
        yield f"{prefix}{name}_proj.bias", (size,)
    yield prefix + "sinks", (heads,)
    yield prefix + "o_proj.weight", (hidden, heads * head)
    yield prefix + "o_proj.bias", (hidden,)


def _fused_experts(config: dict[str, Any], prefix: str) -> Shapes:
    """gpt-oss's experts, all in one tensor."""
    hidden, inner, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield prefix + "router.weight", (experts, hidden)
    yield prefix + "router.bias", (experts,)
    yield prefix + "experts.gate_up_proj", (experts, hidden, 2 * inner)
    yield prefix + "experts.gate_up_proj_bias", (experts, 2 * inner)
    yield prefix + "experts.down_proj", (experts, inner, hidden)
    yield prefix + "experts.down_proj_bias", (experts, hidden)


def feed_forward(config: dict[str, Any], layer: int, prefix: str) -> Shapes:
    """Weights of a layer's feed-forward part, dense or with experts."""
    if config["model_type"] == "gpt_oss":
        yield from _fused_experts(config, prefix + "mlp.")
        return
    if str(layer) in config.get("moe_layers_enum", "").split(","):
        yield from _step_experts(config, prefix)
        return
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    names = ("gate_proj", "up_proj", "down_proj")
    experts = next(
        (config[name] for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in config),
        0,
    )
    if not experts or layer < config.get("first_k_dense_replace", 0):
        part = "feed_forward." if config["model_type"] in ("falcon_h1", "lfm2") else "mlp."
        if config["model_type"] == "lfm2":
            names = ("w1", "w3", "w2")
        yield from _dense(prefix + part, hidden, inner, names)
        return
    if config["model_type"] == "mixtral":
        prefix, names, width = prefix + "block_sparse_moe.", ("w1", "w3", "w2"), inner
    else:
        prefix, width = prefix + "mlp.", config["moe_intermediate_size"]
    yield prefix + "gate.weight", (experts, hidden)
    if config.get("topk_method") == "noaux_tc":
        yield prefix + "gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from _dense(f"{prefix}experts.{expert}.", hidden, width, names)
    if shared := config.get("shared_expert_intermediate_size"):
        yield from _dense(prefix + "shared_expert.", hidden, shared, names)
        yield prefix + "shared_expert_gate.weight", (1, hidden)
    if config.get("n_shared_experts"):
        yield from _dense(prefix + "shared_experts.", hidden, width * config["n_shared_experts"], names)
