"""Pools that SGLang sizes itself, from a model's config.json and from that of its draft model."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from engine_pools import PoolKind
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator, _PoolSizes
from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig
from sglang.srt.runtime_context import get_schedule, get_server_args
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from transformers import CONFIG_MAPPING


@dataclass(frozen=True)
class Checkpoint:
    """The config.json of a model: the defaults of its kind in transformers, but for the fields given here.

    Args:
        kind: ``model_type``.
        architecture: the first of ``architectures``.
        fields: of the configuration, or of its ``text_config``.
    """

    kind: str
    architecture: str
    fields: dict[str, Any] = field(default_factory=dict, hash=False)

    def config(self, *, draft: bool = False) -> ModelConfig:
        """SGLang's configuration of the model, or of the draft model that the same files have."""
        kind = CONFIG_MAPPING[self.kind]
        fields = {"text_config": self.fields} if "text_config" in kind.sub_configs else self.fields
        made = kind(**fields).to_dict() | {"architectures": [self.architecture]}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(made, default=str))
            return ModelConfig(folder, is_draft_model=draft)

    def pool(self, tokens: int, page: int, *, algorithm: str, draft: bool = False) -> Any:
        """The KV pool that SGLang makes for the model, or for the draft model, in bfloat16 on one rank."""
        config = self.config(draft=draft)
        layers = resolve_layer_indices(model=SimpleNamespace(), model_config=config, is_draft_worker=draft)
        known = {
            "device": "cpu",
            "gpu_id": 0,
            "attn_dp_size": 1,
            "pp_size": 1,
            "model_config": config,
            "server_args": get_server_args(),
            "kv_cache_dtype": torch.bfloat16,
            "model_dtype": torch.bfloat16,
            "page_size": page,
            "spec_algorithm": SpeculativeAlgorithm[algorithm],
            "is_draft_worker": draft,
            "post_capture_kv_active": False,
            "spec_aux_config": SpecAuxHiddenStateConfig(),
            "is_hybrid_swa": config.is_hybrid_swa,
            "is_hybrid_swa_compress": False,
            "use_mla_backend": config.attention_arch == AttentionArch.MLA,
            "layer_info": layers,
        }
        fields = (each.name for each in dataclasses.fields(KVCacheConfigurator) if each.init)
        sizes = dict.fromkeys(_PoolSizes.__struct_fields__)
        with get_schedule().override(page_size=page):
            return KVCacheConfigurator(**{name: known.get(name) for name in fields})._build_token_to_kv_pool(
                sizes=_PoolSizes(**sizes | {"max_total_num_tokens": tokens, "max_running_requests": 4}),
                is_dsa_model=False,
                is_dsv4_model=False,
                req_to_token_pool=None,
            )


@dataclass(frozen=True)
class ConfiguredKind(PoolKind):
    """The pools of a model and of its draft model as SGLang sizes them. ``layers`` and ``draft_layers`` say
    how many they are.

    Args:
        model: the model.
        draft: the draft model, or the model again where its files have layers for one (MTP).
        draft: the draft model; the model itself where its files have layers for it (MTP).
    """

    model: Checkpoint = field(kw_only=True)
    draft: Checkpoint | None = None
    algorithm: str = "EAGLE"

    def build(self, tokens: int, device: str = "cpu") -> Any:
        pool = self.model.pool(tokens, self.page, algorithm=self.algorithm)
        assert pool.layer_num == self.layers
        return pool

    def build_drafts(self, tokens: int) -> list[Any]:
        if self.draft is None:
            return []
        pool = self.draft.pool(tokens, self.page, algorithm=self.algorithm, draft=True)
        assert pool.layer_num == self.draft_layers
        return [pool]
