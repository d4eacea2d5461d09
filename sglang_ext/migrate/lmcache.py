"""Settings of LMCache: keys of its configuration file, and in upper case with `LMCACHE_` its variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from sglang_ext.migrate.rules import NoEqualError, Rule, Words, choice, each, no_equal, nothing, to

VARIABLE: Final = "LMCACHE_"
_PEERS = "servers that register with a router (--kv-router URL) fetch KV from each other"
_PD = (
    "start servers with --disaggregation-mode prefill and decode and "
    "--disaggregation-transfer-backend global, or sglang-ext cluster --prefill 1 --decode 1"
)
_BLEND = "only whole prefixes are used again: KV that is blended is not what the model would have computed"
_OWN = "code of others is not loaded into the cache"
_HIDDEN = "only KV is kept"


def _size(gigabytes: str) -> str:
    return f"{float(gigabytes):g}GB"


def _folder(given: Words) -> Words:
    path = urlsplit(given[0]).path if given[0].startswith("file:") else given[0]
    return ["--kv-disk-path", path.rstrip("/") or "/"]


def _local_cpu(given: Words) -> Words:
    if given[0].lower() in ("false", "0", "no"):
        raise NoEqualError("a disk tier needs a DRAM tier: give --kv-dram-size")
    return []


LMCACHE: Final[Mapping[str, Rule]] = {
    "use_experimental": nothing("there is one version"),
    "chunk_size": nothing("blocks have 16 tokens, `--kv-block-size`"),
    "local_cpu": Rule(_local_cpu, "nothing", "true is so with `--kv-dram-size`; false has no equal"),
    "max_local_cpu_size": to("--kv-dram-size", "per rank", convert=_size),
    "local_disk": Rule(_folder, "`--kv-disk-path`", "each server needs its own"),
    "max_local_disk_size": to("--kv-disk-size", "per rank", convert=_size, setting=True),
    "min_retrieve_tokens": to(
        "--kv-load-policy", "its setting min-tokens", convert=lambda n: f"min-tokens={n}", setting=True
    ),
    "numa_mode": choice(
        "--kv-numa", {"auto": "auto", "null": "", "None": ""}, "give --kv-numa auto, none or a node"
    ),
    "cache_policy": choice(
        "--kv-eviction-policy",
        {"LRU": "", "lru": ""},
        "there are lru and slru; others are functions of your own, given as package.module:function",
    ),
    **each(
        (
            *("reserve_local_cpu_size", "local_disk_path_sharding", "remote_serde", "use_layerwise"),
            *("save_decode_cache", "pre_caching_hash_algorithm", "save_unfull_chunk", "py_enable_gc"),
            *("enable_async_loading", "enable_lazy_memory_allocator", "lazy_memory_initial_ratio"),
            *("lazy_memory_expand_trigger_ratio", "lazy_memory_step_ratio", "lazy_memory_safe_size"),
            *("pin_timeout_sec", "pin_check_interval_sec", "blocking_timeout_secs", "lookup_timeout_ms"),
            *("hit_miss_ratio", "lookup_server_worker_ids", "enable_scheduler_bypass_lookup"),
            *("use_gpu_connector_v3", "mp_host", "mp_port", "cost_aware_half_life_seconds"),
            *("cost_aware_ewma_alpha", "lmcache_worker_heartbeat_delay_time"),
            "lmcache_worker_heartbeat_time",
        ),
        nothing("it is always so here, or tunes a mechanism that is not there"),
    ),
    **each(
        (
            *("enable_p2p", "p2p_host", "p2p_init_ports", "p2p_lookup_ports", "transfer_channel"),
            *("enable_controller", "lmcache_instance_id", "controller_pull_url", "controller_reply_url"),
            *("controller_url", "lmcache_worker_ports", "lmcache_worker_port", "lmcache_worker_ids"),
            *("remote_url", "remote_storage_plugins", "external_lookup_client", "store_location"),
            "retrieve_locations",
        ),
        no_equal(_PEERS, setting=True),
    ),
    **each(
        (
            *("enable_pd", "enable_xpyd", "pd_role", "pd_buffer_size", "pd_buffer_device", "pd_peer_host"),
            *("pd_peer_init_port", "pd_peer_alloc_port", "pd_peer_query_port", "pd_proxy_host"),
            *("pd_proxy_port", "pd_allocation_timeout_sec", "pd_shutdown_timeout_sec"),
            *("pd_condition_poll_interval_sec", "pd_max_prefill_len", "pd_backend_mode"),
            *("pd_skip_proxy_notification", "pd_bidirectional", "nixl_peer_host", "nixl_peer_init_port"),
            *("nixl_peer_alloc_port", "nixl_peer_port", "nixl_proxy_host", "nixl_proxy_port", "nixl_role"),
            *("nixl_backends", "nixl_buffer_size", "nixl_buffer_device"),
        ),
        no_equal(_PD, setting=True),
    ),
    **each(
        (
            *("enable_blending", "blend_recompute_ratios", "blend_thresholds", "blend_check_layers"),
            *("blend_min_tokens", "blend_special_str"),
        ),
        no_equal(_BLEND, setting=True),
    ),
    **each(
        ("gds_path", "gds_path_sharding", "gds_buffer_size", "use_gds", "gds_backend"),
        no_equal("disks are read through host memory: give --kv-disk-path DIR", setting=True),
    ),
    **each(
        ("maru_path", "maru_pool_size", "local_cpu_use_hugepages"),
        no_equal("the DRAM tier is shared memory with pages of the system's size", setting=True),
    ),
    **each(
        ("runtime_plugin_locations", "plugin_locations", "storage_plugins", "external_backends",
         "script_allowed_imports", "extra_config", "audit_actual_remote_url"),
        no_equal(_OWN, setting=True),
    ),
    **each(
        ("enable_hidden_state_cache", "max_hidden_state_cpu_size", "hidden_state_layers",
         "hidden_states_retrieve_mode"),
        no_equal(_HIDDEN, setting=True),
    ),
    **each(
        ("internal_api_server_enabled", "internal_api_server_host", "internal_api_server_port_start",
         "internal_api_server_include_index_list", "internal_api_server_socket_path_prefix",
         "enable_chunk_statistics", "chunk_statistics_auto_start_statistics",
         "chunk_statistics_auto_exit_timeout_hours", "chunk_statistics_auto_exit_target_unique_chunks",
         "chunk_statistics_strategy"),
        nothing("/metrics and the router's /cluster tell"),
    ),
    "enable_kv_events": no_equal(
        "servers tell routers of their KV themselves (--kv-router URL)", setting=True
    ),
    "priority_limit": no_equal("requests of all priorities are kept", setting=True),
    **each(
        ("remote_config_url", "app_id"), no_equal("flags come from the command line only", setting=True)
    ),
}  # fmt: skip
"""By the keys of LMCache's configuration."""
