"""The model families that are admitted, by SGLang's own configuration of each: no server, no weights."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
from transformers import CONFIG_MAPPING, PretrainedConfig

from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.admission import WHOLE_WINDOWS, Facts, admission, with_model
from sglang_ext.patches.adapter.support import require_admitted

CACHE = Facts()
TRANSFER = Facts(caches=False, transfers=True)
PUSHING = replace(TRANSFER, pushes=True)
OLDER = replace(CACHE, follows_hybrids=False)
"""A version of SGLang whose tree for windows and states may not be extended."""
OLDER_TRANSFER = replace(TRANSFER, follows_hybrids=False)

ADMITTED: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "LlamaForCausalLM", {}),
    ("qwen2", "Qwen2ForCausalLM", {}),
    ("qwen3", "Qwen3ForCausalLM", {}),
    ("qwen3_moe", "Qwen3MoeForCausalLM", {}),
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", {}),
    ("qwen3_vl", "Qwen3VLForConditionalGeneration", {}),
    ("deepseek_v3", "DeepseekV3ForCausalLM", {}),
    ("glm4_moe", "Glm4MoeForCausalLM", {}),
    ("gemma2", "Gemma2ForCausalLM", {}),
    ("gemma3_text", "Gemma3ForCausalLM", {}),
    ("olmo3", "Olmo3ForCausalLM", {}),
    ("exaone4", "Exaone4ForCausalLM", {}),
    ("cohere2", "Cohere2ForCausalLM", {}),
    ("mistral", "MistralForCausalLM", {}),
    ("mixtral", "MixtralForCausalLM", {}),
    ("phi3", "Phi3ForCausalLM", {}),
    ("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {}),
]
RECURRENT: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3_next", "Qwen3NextForCausalLM", {}),
    ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", {}),
    ("nemotron_h", "NemotronHForCausalLM", {}),
    ("falcon_h1", "FalconH1ForCausalLM", {}),
    ("lfm2", "Lfm2ForCausalLM", {}),
    ("granitemoehybrid", "GraniteMoeHybridForCausalLM", {}),
]
INDEXED: list[tuple[str, str, dict[str, Any]]] = [
    ("deepseek_v3", "DeepseekV32ForCausalLM", {"index_topk": 2048, "index_head_dim": 128}),
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM", {"index_topk": 2048}),
]
WINDOWED: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt_oss", "GptOssForCausalLM", {}),
    ("llama4", "Llama4ForConditionalGeneration", {}),
]
"""Not kept by decode without ``WHOLE_WINDOWS``."""


def model(folder: Path, kind: str, architecture: str, more: dict[str, Any], **given: Any) -> ModelConfig:
    """SGLang's configuration of a model of this kind; no weights are there."""
    made = _CONFIG_REGISTRY.get(kind) or CONFIG_MAPPING[kind]
    values = made(**more).to_dict() | {"architectures": [architecture], "model_type": kind} | more
    (folder / "config.json").write_text(json.dumps(values, default=str))
    return ModelConfig(model_path=str(folder), **given)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


@pytest.mark.parametrize("flags", [CACHE, TRANSFER], ids=["cache", "transfer"])
@pytest.mark.parametrize(("kind", "architecture", "more"), ADMITTED, ids=[a for _, a, _ in ADMITTED])
def test_plain_models_are_admitted(
    kind: str, architecture: str, more: dict[str, Any], flags: Facts, tmp_path: Path
) -> None:
    config = model(tmp_path, kind, architecture, more)
    assert admission(config, flags) is None
    assert "--nnodes" in str(admission(config, replace(flags, transfers=True, nnodes=2)))


@pytest.mark.parametrize(("kind", "architecture", "more"), RECURRENT, ids=[a for _, a, _ in RECURRENT])
def test_states_are_kept_and_moved_from_a_version_on(
    kind: str, architecture: str, more: dict[str, Any], tmp_path: Path
) -> None:
    config = model(tmp_path, kind, architecture, more)
    assert admission(config, CACHE) is None
    assert admission(config, TRANSFER) is None
    for flags, way_out in ((OLDER, "Start without"), (OLDER_TRANSFER, "another transfer backend")):
        reason = str(admission(config, flags))
        assert "Mamba" in reason
        assert way_out in reason
        assert WHOLE_WINDOWS not in reason


@pytest.mark.parametrize(("kind", "architecture", "more"), INDEXED, ids=[a for _, a, _ in INDEXED])
def test_index_keys_are_kept_and_moved(
    kind: str, architecture: str, more: dict[str, Any], tmp_path: Path
) -> None:
    config = model(tmp_path, kind, architecture, more)
    assert admission(config, CACHE) is None
    assert admission(config, TRANSFER) is None


def test_index_keys_of_groups_of_tokens_are_refused(tmp_path: Path) -> None:
    kind, architecture, more = INDEXED[0]
    config = model(tmp_path, kind, architecture, more | {"index_kpool": 4})
    for flags in (CACHE, TRANSFER):
        assert "groups of 4 tokens" in str(admission(config, flags))


@pytest.mark.parametrize("flags", [OLDER, PUSHING], ids=["cache", "transfer"])
@pytest.mark.parametrize(("kind", "architecture", "more"), WINDOWED, ids=[a for _, a, _ in WINDOWED])
def test_the_flag_that_admits_sliding_windows_is_named_and_admits_them(
    kind: str, architecture: str, more: dict[str, Any], flags: Facts, tmp_path: Path
) -> None:
    config = model(tmp_path, kind, architecture, more)
    assert admission(config, CACHE) is None
    assert admission(config, TRANSFER) is None
    reason = str(admission(config, flags))
    assert ("sliding-window" if flags.caches else "sliding windows") in reason
    assert f"dd {WHOLE_WINDOWS}" in reason
    assert " times the memory" in reason
    assert admission(model(tmp_path, kind, architecture, more, disable_hybrid_swa_memory=True), flags) is None


@pytest.mark.parametrize(
    ("architecture", "more", "word"),
    [
        ("DeepseekV4ForCausalLM", {}, "DeepSeek V4"),
        ("MiniMaxM3SparseForConditionalGeneration", {}, "MSA"),
        ("Glm5NextForConditionalGeneration", {}, "index keys (DSA) for groups of 4 tokens"),
    ],
)
def test_kinds_of_sparse_attention_are_known_by_their_configuration(
    architecture: str, more: dict[str, Any], word: str
) -> None:
    reason = admission(configured(architecture, index_topk=2048, index_kpool=4, **more), OLDER)
    assert reason is not None
    assert word in reason


@pytest.mark.parametrize(
    "more",
    [
        {"indexer_n_heads": 4},
        {"text_config": PretrainedConfig(indexer_n_heads=4, num_attention_heads=8)},
    ],
    ids=["text", "with pictures"],
)
def test_compressed_index_keys_are_known_by_their_configuration(more: dict[str, Any]) -> None:
    assert with_model(configured("Qwen4ExpForConditionalGeneration", **more), OLDER).is_qsa
    assert not with_model(configured("Qwen3_5ForConditionalGeneration"), OLDER).is_qsa


def configured(architecture: str, **more: Any) -> Any:
    """A model by the fields by which SGLang decides: such configurations cannot be built from defaults."""
    return SimpleNamespace(
        hf_config=PretrainedConfig(architectures=[architecture], **more),
        is_hybrid_swa=False,
        is_multimodal=False,
        is_draft_model=False,
        linear_attn_registry_result=None,
    )


@pytest.mark.parametrize(
    "other", [{"is_hybrid_swa_compress": True}, {"swa_head_dim": 32}, {"full_attention_layer_ids": []}]
)
def test_the_flag_is_not_named_where_one_pool_cannot_hold_both_kinds(
    other: dict[str, Any], tmp_path: Path
) -> None:
    config = model(tmp_path, *WINDOWED[0])
    vars(config).update(other)
    reason = str(admission(config, OLDER))
    assert "sliding-window" in reason
    assert WHOLE_WINDOWS not in reason


def test_a_command_line_is_refused_before_the_weights_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = model(tmp_path, "lfm2", "Lfm2ForCausalLM", {})
    monkeypatch.setattr(ModelConfig, "from_server_args", staticmethod(lambda args: config))
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(ConfigError, match="with --kv-pd-caching 3 and no --kv-dram-size does not serve"):
        require_admitted(SimpleNamespace(disaggregation_transfer_backend="global"), KvConfig())
    require_admitted(SimpleNamespace(radix_cache_backend="global"), KvConfig())
    require_admitted(SimpleNamespace(radix_cache_backend=None), KvConfig())
