"""Configurations that the global backend refuses, by name and with the way out."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from engine_pools import publish_server_args
from sglang.srt.arg_groups.arg_utils import record_fields
from sglang.srt.environ import envs
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs
from transformers import PretrainedConfig

from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.admission import Facts, unsupported
from sglang_ext.patches.adapter.support import (
    facts_of,
    require_admitted,
    require_movable,
    require_supported,
    wait_for_whole_passes,
    why_not_retracting,
)

PLAIN = SimpleNamespace(
    hf_config=PretrainedConfig(architectures=["LlamaForCausalLM"]),
    is_hybrid_swa=False,
    is_draft_model=False,
    is_multimodal=False,
    linear_attn_registry_result=None,
)
"""The fields of a plain model's ``ModelConfig`` that ``admission`` reads."""

_LATE_SIZES = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    (
        {"is_hybrid_swa": True, "follows_hybrids": False},
        ("sliding-window", "Start without --radix-cache-backend global"),
    ),
    (
        {"is_hybrid_swa": True, "kv_with_whole_windows": 2.0, "follows_hybrids": False},
        ("sliding-window", "--disable-hybrid-swa-memory", "2.0 times the memory", "Or: Start without"),
    ),
    (
        {"is_hybrid_swa": True, "kv_with_whole_windows": 2.0, "disaggregation_mode": "decode"},
        ("--disaggregation-mode", "add --disable-hybrid-swa-memory", "2.0 times the memory"),
    ),
    ({"is_hybrid_ssm": True, "acked": True}, ("--kv-durability acked", "Use disk instead")),
    ({"is_hybrid_ssm": True, "disaggregation_mode": "prefill"}, ("--disaggregation-mode", "states")),
    ({"is_hybrid_ssm": True, "speculative_algorithm": "UNO"}, ("--speculative-algorithm UNO", "Use one of")),
    (
        {"is_hybrid_swa": True, "speculative_algorithm": "DSPARK", "defers_draft_kv": True},
        ("SGLANG_DSPARK_DEFER_CONTEXT_KV=1", "Unset"),
    ),
    (
        {"is_hybrid_swa": True, "disaggregation_mode": "decode", "transfers": True, "page_size": 1},
        ("--disaggregation-mode decode and --page-size 1", "Add --page-size 64"),
    ),
    ({"is_hybrid_swa": True, "pp_size": 2}, ("--pp-size above 1", "sliding windows")),
    ({"is_hybrid_swa": True, "has_whole_layers": False}, ("layers all have sliding windows",)),
    (
        {"is_hybrid_ssm": True, "dram": True, "page_size": 1, "snapshots_at_ends": False},
        ("needs pages of at least 16 tokens",),
    ),
    ({"is_hybrid_swa": True, "dram": True, "page_size": 1}, ("at least 16 tokens", "Add --page-size 64")),
    ({"is_minimax_sparse": True}, ("MSA", "Start without")),
    ({"is_bidirectional": True}, ("bidirectional attention", "--disable-radix-cache")),
    (
        {"is_deepseek_v4": True, "is_hybrid_swa": True, "follows_hybrids": False},
        ("DeepSeek V4", "Start without"),
    ),
    ({"is_hybrid_ssm": True, "follows_hybrids": False}, ("Mamba", "Start without")),
    ({"is_dsa": True, "index_group": 4}, ("index keys (DSA) for groups of 4", "Start without")),
    ({"is_multimodal": True, "block_size": 6}, ("--kv-block-size that 4 divides, not 6", "default")),
    ({"kv_pool": "MHATokenToKVPoolFP4"}, ("MHATokenToKVPoolFP4", "--kv-cache-dtype")),
    ({"disable_radix_cache": True}, ("--disable-radix-cache", "Drop one")),
    (
        {"disable_radix_cache": True, "disaggregation_mode": "decode"},
        ("decode server", "--disaggregation-decode-enable-radix-cache"),
    ),
    ({"enable_hierarchical_cache": True}, ("--enable-hierarchical-cache", "--kv-dram-size")),
    ({"enable_lmcache": True}, ("--enable-lmcache", "--kv-dram-size")),
    ({"enable_flexkv": True}, ("--enable-flexkv", "--kv-dram-size")),
    ({"enable_unified_cache_external_linker": True}, ("--enable-unified-cache-external-linker",)),
    ({"enable_session_radix_cache": True}, ("--enable-session-radix-cache", "Drop that flag")),
    ({"enable_streaming_session": True}, ("--enable-streaming-session", "Drop that flag")),
    ({"enable_unified_memory": True}, ("--enable-unified-memory",)),
    ({"enable_hisparse": True}, ("--enable-hisparse",)),
    ({"dcp_enabled": True}, ("--dcp-size", "--tp-size")),
    ({"enable_kv_cache_sharding": True}, ("--enable-kv-cache-sharding", "Drop that flag")),
    ({"enable_dsa_cache_layer_split": True}, ("--enable-dsa-cache-layer-split", "Drop that flag")),
    ({"speculative_algorithm": "UNO"}, ("--speculative-algorithm UNO", "Use one of DFLASH", "EAGLE, EAGLE3")),
    (
        {"speculative_algorithm": "DFLASH", "speculative_draft_window_size": 512},
        ("--speculative-draft-window-size", "Drop that flag"),
    ),
    (
        {"speculative_algorithm": "DSPARK", "defers_draft_kv": True},
        ("SGLANG_DSPARK_DEFER_CONTEXT_KV=1", "Unset"),
    ),
    (
        {"speculative_algorithm": "EAGLE", "pp_size": 2},
        ("--pp-size above 1", "EAGLE", "--tp-size"),
    ),
    ({"radix_eviction_policy": "lfu"}, ("--radix-eviction-policy lfu", "--kv-eviction-policy")),
    ({"disaggregation_decode_retraction_backup": "host_pool"}, ("host_pool", "cpu_tensor")),
    ({"dp_size": 2, "disaggregation_mode": "prefill"}, ("--dp-size above 1 and --disaggregation-mode",)),
    ({"dp_size": 2, "pp_size": 2}, ("--dp-size above 1 and --pp-size above 1", "--colocated N")),
    ({"dp_size": 2, "nnodes": 2}, ("--dp-size above 1 and --nnodes above 1", "--worker-urls")),
    (
        {"attn_dp_size": 2, "disaggregation_mode": "decode"},
        ("--attn-dp-size above 1 and --disaggregation-mode", "sglang-ext router --worker-urls"),
    ),
    ({"attn_dp_size": 2, "pp_size": 2}, ("--attn-dp-size above 1 and --pp-size above 1", "--colocated N")),
    ({"attn_dp_size": 2, "nnodes": 2}, ("--attn-dp-size above 1 and --nnodes above 1", "--worker-urls")),
    (
        {"attn_dp_size": 2, "speculative_algorithm": "EAGLE"},
        ("--attn-dp-size above 1 and --speculative-algorithm", "Drop one"),
    ),
    *(
        ({"attn_cp_size": 2, **facts}, ("--attn-cp-size above 1", *words))
        for facts, *words in (
            ({"disaggregation_mode": "prefill"}, "--disaggregation-mode", "Use --tp-size"),
            ({"attn_dp_size": 2}, "--attn-dp-size above 1", "Use one of them"),
            ({"dp_size": 2}, "--dp-size above 1", "--colocated N"),
            ({"pp_size": 2}, "--pp-size above 1", "Use one of them"),
            ({"nnodes": 2}, "--nnodes above 1", "Use one node"),
            ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE", "Leave that flag out"),
            ({"acked": True}, "--kv-durability acked", "Use disk instead"),
            ({"hicache": True}, "--kv-load-policy hicache", "Leave that setting out"),
            ({"is_hybrid_swa": True}, "sliding windows", "Use --tp-size"),
            ({"is_hybrid_ssm": True}, "states", "Use --tp-size"),
        )
    ),
    ({"enable_pdmux": True}, ("--enable-pdmux", "Drop that flag")),
    ({"dllm_algorithm": "LowConfidence"}, ("--dllm-algorithm", "Start without")),
    ({"pp_size": 2, "acked": True}, ("--kv-durability acked", "--pp-size above 1", "Use disk")),
    ({"pp_size": 2, "layer_region": True}, ("--kv-layer-region-size", "--pp-size above 1", "Leave")),
    ({"pp_size": 2, "hicache": True}, ("--kv-load-policy hicache", "--pp-size above 1", "Leave that")),
    ({"is_hybrid_swa": True, "hicache": True}, ("--kv-load-policy hicache", "sliding windows", "Leave")),
    ({"is_hybrid_ssm": True, "hicache": True}, ("--kv-load-policy hicache", "states", "Leave that")),
    ({"is_dsa": True, "hicache": True}, ("--kv-load-policy hicache", "index keys (DSA)", "Leave that")),
    (
        {"speculative_algorithm": "EAGLE", "hicache": True},
        ("--kv-load-policy hicache", "--speculative-algorithm EAGLE", "Leave that"),
    ),
    ({"prefill_graphs": "full", "dram": True}, ("--cuda-graph-backend-prefill full", "breakable")),
    ({"prefill_graphs": "tc_piecewise", "dram": True}, ("tc_piecewise", "breakable, or disabled")),
    ({"prefill_war_read_done": True, "dram": True}, ("SGLANG_ENABLE_PREFILL_WAR_READ_DONE", "Unset")),
    ({"post_capture_kv_sizing": True}, ("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1", "Unset")),
    *(
        ({"is_muse_spark": True, "post_capture_kv_sizing": given}, ("for Muse Spark", f"Set {_LATE_SIZES}=0"))
        for given in (None, True)
    ),
    ({"optimistic_prefill_attempts": 1, "disk": True}, ("--optimistic-prefill-attempts", "--kv-disk-path")),
    *(
        ({"caches": False, "transfers": True, **facts}, ("--disaggregation-transfer-backend global", word))
        for facts, word in (
            ({"is_hybrid_ssm": True, "follows_hybrids": False}, "Use another transfer backend"),
            ({"is_hybrid_ssm": True, "returns": True}, "Add --kv-dram-size, by which KV returns"),
            (
                {"is_deepseek_v4": True, "is_hybrid_swa": True, "enable_encoder_swa_bounded_replay": True},
                "--enable-encoder-swa-bounded-replay does not serve models with sliding windows. Leave",
            ),
            ({"is_deepseek_v4": True, "follows_hybrids": False}, "sliding windows of DeepSeek V4"),
            ({"is_hybrid_swa": True, "pushes": True}, "Use --kv-transfer-mode pull"),
            ({"is_hybrid_swa": True, "aggregated": True}, "Use --kv-transfer-layout blocks"),
            ({"is_hybrid_swa": True, "speculative_algorithm": "STANDALONE"}, "--speculative-algorithm"),
            ({"is_hybrid_swa": True, "has_whole_layers": False}, "layers all have sliding windows"),
            (
                {"is_hybrid_ssm": True, "is_dsa": True, "index_group": 4, "follows_hybrids": False},
                "index keys (DSA) for groups of 4",
            ),
            ({"is_dsa": True, "index_group": 4}, "index keys (DSA) for groups of 4"),
            (
                {"is_hybrid_swa": True, "kv_with_whole_windows": 2.0, "returns": True},
                "--disable-hybrid-swa-memory",
            ),
            *(
                ({"decode_keeps": True, **more}, f"{kept}. Use --kv-pd-caching 1, or basic")
                for more, kept in (
                    ({"is_hybrid_swa": True, "has_unlike_windows": True}, "heads of their own"),
                    ({"is_hybrid_swa": True, "is_deepseek_v4": True}, "compressed KV (DeepSeek V4)"),
                    ({"is_hybrid_ssm": True, "is_qsa": True}, "compressed index keys (QSA)"),
                    (
                        {"is_hybrid_ssm": True, "speculative_algorithm": "EAGLE"},
                        "models with states and --speculative-algorithm",
                    ),
                )
            ),
            ({"dp_size": 2, "nnodes": 2}, "--dp-size above 1 and --nnodes above 1"),
            ({"attn_dp_size": 2, "pp_size": 2}, "--attn-dp-size above 1 and --pp-size above 1"),
            ({"attn_dp_size": 2, "is_hybrid_swa": True}, "with --attn-dp-size above 1 does not serve"),
            ({"attn_cp_size": 2}, "--attn-cp-size above 1"),
            (
                {"pp_size": 2, "disaggregation_mode": "decode", "decode_keeps": True},
                "2 or 3 on decode. Use --kv-pd-caching 1, or basic",
            ),
            *(
                ({"pp_size": 2, "disaggregation_mode": "prefill", **more}, way_out)
                for more, way_out in (
                    ({"is_hybrid_swa": True}, "models with sliding windows. Use --tp-size"),
                    ({"pushes": True}, "Use --kv-transfer-mode pull"),
                    ({"aggregated": True}, "Use --kv-transfer-layout blocks"),
                    ({"returns": True}, "Use --kv-pd-caching 2 or 1, or basic"),
                    ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm. Leave that flag out"),
                )
            ),
            ({"nnodes": 2}, "--nnodes above 1"),
            ({"speculative_algorithm": "STANDALONE"}, "Use one of EAGLE, EAGLE3, NEXTN"),
            ({"speculative_algorithm": "FROZEN_KV_MTP"}, "Use one of EAGLE, EAGLE3, NEXTN"),
            ({"speculative_algorithm": "EAGLE", "by_layer": True}, "--kv-transfer-mode pull, or push"),
            ({"post_capture_kv_sizing": True}, "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1"),
            ({"is_muse_spark": True}, "Set SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=0 yourself"),
        )
    ),
]


@pytest.mark.parametrize(
    ("facts", "words"), REFUSED, ids=lambda x: next(iter(x)) if isinstance(x, dict) else ""
)
def test_it_is_refused_by_name_with_the_way_out(facts: dict[str, Any], words: tuple[str, ...]) -> None:
    reason = unsupported(Facts(**facts))
    assert reason is not None
    for word in words:
        assert word in reason


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"kv_pool": "MLATokenToKVPool"},
        {"speculative_algorithm": "NGRAM"},
        {"is_muse_spark": True, "is_hybrid_swa": True, "post_capture_kv_sizing": False},
        {"is_hybrid_ssm": True, "speculative_algorithm": "NGRAM", "dram": True, "page_size": 64},
        {"is_hybrid_swa": True, "speculative_algorithm": "EAGLE", "dram": True, "page_size": 64},
        {"speculative_algorithm": "EAGLE", "dram": True, "disk": True},
        {"speculative_algorithm": "STANDALONE"},
        {"speculative_algorithm": "DFLASH", "dram": True},
        {"speculative_algorithm": "DSPARK", "dram": True},
        {"is_dsa": True, "kv_pool": "DSATokenToKVPool", "dram": True},
        {"is_dsa": True, "kv_pool": "DSATokenToKVPool", "caches": False, "transfers": True},
        {"is_hybrid_swa": True, "kv_pool": "SWAKVPool", "dram": True, "disk": True, "page_size": 64},
        {"is_hybrid_ssm": True, "kv_pool": "HybridLinearKVPool", "page_size": 1, "snapshots_at_ends": True},
        {"is_deepseek_v4": True, "is_hybrid_swa": True, "kv_pool": "DeepSeekV4TokenToKVPool", "dram": True},
        {"is_hybrid_swa": True, "kv_pool": "SWAKVPool", "disaggregation_mode": "prefill", "transfers": True},
        {"is_hybrid_swa": True, "kv_pool": "SWAKVPool", "caches": False, "transfers": True},
        {"is_hybrid_ssm": True, "kv_pool": "HybridLinearKVPool", "caches": False, "transfers": True},
        {
            "is_hybrid_swa": True,
            "kv_pool": "SWAKVPool",
            "disaggregation_mode": "decode",
            "transfers": True,
            "decode_keeps": True,
            "page_size": 16,
        },
        {"is_hybrid_ssm": True, "caches": False, "transfers": True, "speculative_algorithm": "NEXTN"},
        {"is_hybrid_ssm": True, "is_dsa": True, "index_group": 4, "caches": False, "transfers": True},
        {"is_hybrid_ssm": True, "is_qsa": True, "kv_pool": "QSATokenToKVPool", "dram": True, "page_size": 64},
        {"is_deepseek_v4": True, "is_hybrid_swa": True, "caches": False, "transfers": True},
        {"disaggregation_mode": "prefill"},
        {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True},
        {"disaggregation_decode_retraction_backup": "cpu_tensor"},
        {"dram": True, "disk": True},
        {"prefill_graphs": "breakable", "dram": True},
        {"prefill_graphs": "disabled", "dram": True},
        {"prefill_graphs": "full"},
        {"pp_size": 2, "dram": True, "disk": True},
        {"nnodes": 2},
        {"dp_size": 2, "dram": True, "disk": True, "nnodes": 1},
        {"dp_size": 2, "is_hybrid_swa": True, "dram": True, "page_size": 16},
        {"attn_dp_size": 2, "dram": True, "disk": True},
        {"attn_cp_size": 2, "dram": True, "disk": True, "speculative_algorithm": "NGRAM"},
        {"attn_cp_size": 2, "is_dsa": True, "kv_pool": "DSATokenToKVPool", "dram": True, "disk": True},
        {"caches": False, "disable_radix_cache": True, "is_hybrid_ssm": True},
        {"caches": False, "transfers": True, "disable_radix_cache": True},
        {
            "transfers": True,
            "pp_size": 2,
            "disaggregation_mode": "prefill",
            "decode_keeps": True,
            "dram": True,
        },
        {"caches": False, "transfers": True, "pp_size": 2, "disaggregation_mode": "decode"},
        {"transfers": True, "dp_size": 2, "disaggregation_mode": "decode", "dram": True, "returns": True},
        {"transfers": True, "attn_dp_size": 2, "disaggregation_mode": "prefill", "dram": True},
        {"prefill_war_read_done": True},
        {"optimistic_prefill_attempts": 1, "dram": True},
    ],
)
def test_what_is_served(facts: dict[str, Any]) -> None:
    assert unsupported(Facts(**facts)) is None


def given_args(**given: Any) -> SimpleNamespace:
    """A command line that chooses the cache. It names no model, so that flags alone decide."""
    return SimpleNamespace(radix_cache_backend="global", **given)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache"),
        ({"enable_lmcache": True}, "--enable-lmcache"),
        ({"speculative_algorithm": "uno"}, "--speculative-algorithm UNO"),
        ({"radix_eviction_policy": "lfu"}, "--radix-eviction-policy lfu"),
        ({"disable_radix_cache": True}, "--disable-radix-cache"),
        ({"dcp_size": 2}, "--dcp-size above 1"),
        ({"dp_size": 2, "disaggregation_mode": "prefill"}, "--dp-size"),
        ({"dp_size": 2, "enable_dp_attention": True, "speculative_algorithm": "EAGLE"}, "--attn-dp-size"),
        ({"attn_dp_size": 2, "disaggregation_mode": "prefill"}, "--attn-dp-size"),
        ({"attn_cp_size": 2, "pp_size": 2}, "--attn-cp-size"),
        ({"enable_prefill_cp": True, "tp_size": 8, "speculative_algorithm": "EAGLE"}, "--attn-cp-size"),
        ({"pp_size": 2, "speculative_algorithm": "eagle"}, "--pp-size"),
        ({"enable_pdmux": True}, "--enable-pdmux"),
        ({"dllm_algorithm": "LowConfidence"}, "--dllm-algorithm"),
        ({"cuda_graph_backend_prefill": "full"}, "--cuda-graph-backend-prefill full"),
        ({"cuda_graph_config": {"prefill": {"backend": "full"}}}, "--cuda-graph-backend-prefill full"),
        ({"optimistic_prefill_attempts": 2}, "--optimistic-prefill-attempts"),
    ],
)
def test_the_command_line_is_refused_before_anything_is_loaded(given: dict[str, Any], word: str) -> None:
    config = KvConfig(dram_size=1, disk_path="/somewhere")
    fields = {field.name for field in record_fields(ServerArgs)} | {"attn_dp_size"}
    assert set(given) <= fields, "SGLang calls it so"
    require_admitted(given_args(), config)
    require_admitted(given_args(cuda_graph_config={"decode": {"backend": "full"}}), config)
    with pytest.raises(ConfigError, match=word):
        require_admitted(given_args(**given), config)


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"dp_size": 2}, "--dp-size or --attn-dp-size above 1"),
        ({"attn_dp_size": 2}, "--dp-size or --attn-dp-size above 1"),
        ({"pp_size": 2}, "--pp-size above 1"),
        ({"attn_cp_size": 2}, "--attn-cp-size above 1"),
    ],
)
def test_computing_ahead_is_refused_where_requests_of_our_own_have_no_place(
    given: dict[str, Any], flag: str
) -> None:
    config = KvConfig(dram_size=1, router="http://127.0.0.1:1", advisory_compute=True)
    served = {"disaggregation_mode": "null", "tokenizer_worker_num": 1}
    assert set(given) <= {field.name for field in record_fields(ServerArgs)}
    require_admitted(given_args(**served), config)
    require_admitted(given_args(**given), replace(config, advisory_compute=False))
    with pytest.raises(ConfigError, match=f"--kv-advisory-compute: .*Drop one of .* and {flag}"):
        require_admitted(given_args(**served | given), config)
    with pytest.raises(ConfigError, match="Give --kv-router and --kv-dram-size too"):
        KvConfig(advisory_compute=True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"enable_priority_scheduling": False}, "--enable-priority-scheduling.*Add that flag"),
        ({"disable_priority_preemption": True}, "--disable-priority-preemption.*Drop"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode.*Drop"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode.*Drop"),
        ({"pp_size": 2}, "--pp-size above 1.*--tp-size"),
        ({"speculative_algorithm": "NGRAM"}, "--speculative-algorithm.*Drop"),
    ],
)
def test_retraction_is_refused_where_sglang_decides_alone(given: dict[str, Any], words: str) -> None:
    served = given_args(enable_priority_scheduling=True)
    assert set(given) <= {field.name for field in record_fields(ServerArgs)}
    require_admitted(served, KvConfig(retract_wait=0.0))
    assert why_not_retracting(served) is None
    other = SimpleNamespace(**vars(served) | given)
    assert why_not_retracting(other) is not None
    require_admitted(other, KvConfig())
    with pytest.raises(ConfigError, match=f"--kv-retract-wait: .*{words}"):
        require_admitted(other, KvConfig(retract_wait=0.0))


@pytest.mark.parametrize(
    "variable", ["SGLANG_ENABLE_PREFILL_WAR_READ_DONE", "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"]
)
def test_the_environment_is_refused_too(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ConfigError, match=variable):
        require_admitted(given_args(), KvConfig(dram_size=1))


def test_sglang_sets_late_sizes_for_muse_spark_alone() -> None:
    """``with_model`` knows the same architecture, before SGLang has set the variable."""
    hook = pytest.importorskip("sglang.srt.arg_groups.muse_spark_hook")
    assert hook.MUSE_SPARK_ARCHITECTURES == ("MuseSparkForConditionalGeneration",)
    assert dict(hook.MUSE_SPARK_ENV_DEFAULTS)[envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING] is True


def test_passes_are_waited_for_where_sglang_does_not_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    variable = envs.SGLANG_ENABLE_PREFILL_WAR_READ_DONE
    monkeypatch.setattr(variable, "default", True)
    monkeypatch.setenv(variable.name, "1")
    monkeypatch.delenv(variable.name)
    require_admitted(given_args(), KvConfig(dram_size=1))
    wait_for_whole_passes(KvConfig())
    assert variable.get()
    wait_for_whole_passes(KvConfig(dram_size=1))
    assert not variable.get()


def test_what_sglang_made_of_the_flags_is_looked_at_again() -> None:
    """In the scheduler, once a flag of one mode may have set another one (as --dwdp-size sets --dp-size)."""
    publish_server_args()
    pool = SimpleNamespace(get_kvcache=lambda: object.__new__(MHATokenToKVPool), page_size=1)
    ctx = SimpleNamespace(
        params=SimpleNamespace(token_to_kv_pool_allocator=pool, page_size=1, enable_mamba_extra_buffer=False),
        disable_radix_cache=False,
        enable_hierarchical_cache=False,
        model_config=PLAIN,
    )
    assert unsupported(facts_of(ctx, KvConfig(dram_size=1))) is None
    get_context().override("test", enable_pdmux=True)
    with pytest.raises(ConfigError, match="--enable-pdmux"):
        require_supported(ctx, KvConfig(dram_size=1))
    publish_server_args()
    get_context().override(
        "test",
        cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend="full")),
    )
    require_supported(ctx, KvConfig())
    with pytest.raises(ConfigError, match="--cuda-graph-backend-prefill full"):
        require_supported(ctx, KvConfig(dram_size=1))
    publish_server_args()


def test_hand_overs_look_at_what_has_become_of_the_flags() -> None:
    """With ``--kv-pd-caching basic`` too, where there is no cache of ours."""
    parallel = SimpleNamespace(dp_size=1, attn_dp_size=1, attn_cp_size=1)
    args = SimpleNamespace(radix_cache_backend=None, disable_radix_cache=True, pp_size=1, nnodes=1)
    require_movable(PLAIN, args, parallel, KvConfig())
    replicas = SimpleNamespace(**vars(parallel) | {"dp_size": 2})
    require_movable(PLAIN, args, replicas, KvConfig())
    staged = SimpleNamespace(**vars(args) | {"pp_size": 2})
    with pytest.raises(ConfigError, match=r"transfer-backend global .*--dp-size above 1.*sglang-ext cluster"):
        require_movable(PLAIN, staged, replicas, KvConfig())
    both = SimpleNamespace(**vars(parallel) | {"dp_size": 2, "attn_dp_size": 2})
    with pytest.raises(ConfigError, match="--attn-dp-size above 1"):
        require_movable(PLAIN, staged, both, KvConfig())  # as SGLang before 0.5.22 counts DP attention
    with pytest.raises(ConfigError, match="--nnodes above 1"):
        require_movable(PLAIN, SimpleNamespace(**vars(args) | {"nnodes": 2}), parallel, KvConfig())


def test_every_fact_matters() -> None:
    """A fact that no refusal depends on would be a check that was forgotten."""
    tried = {name for facts, _ in REFUSED for name in facts} | {"disaggregation_decode_enable_radix_cache"}
    assert tried == {field.name for field in dataclasses.fields(Facts)}
