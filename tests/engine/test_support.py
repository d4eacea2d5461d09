"""What the global backend refuses, by name and with the way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sglang_ext.engine.support import Facts, unsupported

REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"is_hybrid_swa": True}, ("sliding-window", "Start without --radix-cache-backend global")),
    ({"is_hybrid_ssm": True}, ("Mamba", "Start without")),
    ({"is_dsa": True}, ("DSA", "Start without")),
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
    ({"kv_sharded": True}, ("sharded",)),
    ({"is_eagle": True, "speculative_algorithm": "EAGLE"}, ("--speculative-algorithm EAGLE", "NGRAM")),
    ({"speculative_algorithm": "STANDALONE"}, ("--speculative-algorithm STANDALONE", "NGRAM")),
    ({"radix_eviction_policy": "lfu"}, ("--radix-eviction-policy lfu", "--kv-eviction-policy")),
    ({"disaggregation_decode_retraction_backup": "host_pool"}, ("host_pool", "cpu_tensor")),
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
        {"disaggregation_mode": "prefill"},
        {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True},
        {"disaggregation_decode_retraction_backup": "cpu_tensor"},
    ],
)
def test_what_is_served(facts: dict[str, Any]) -> None:
    assert unsupported(Facts(**facts)) is None


def test_every_fact_matters() -> None:
    """A fact that no refusal depends on would be a check that was forgotten."""
    tried = {name for facts, _ in REFUSED for name in facts} | {"disaggregation_decode_enable_radix_cache"}
    assert tried == {field.name for field in dataclasses.fields(Facts)}
