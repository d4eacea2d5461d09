"""Flags and variables of earlier versions, and their replacements: refused by name (`flagged.py`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

SERVE: Mapping[str, str] = MappingProxyType(
    {
        "--kv-transfer-coalescing": "the variable SGLANG_EXT_KV_TRANSFER_COALESCING",
        "--kv-stage-times": "the variable SGLANG_EXT_KV_STAGE_TIMES",
        "--kv-transfer-staging-size": "--kv-transfer-layout aggregated,staging=SIZE",
        "SGLANG_EXT_KV_TRANSFER_STAGING_SIZE": "SGLANG_EXT_KV_TRANSFER_LAYOUT=aggregated,staging=SIZE",
        "--kv-layer-cache-layers": "--kv-layer-cache-size SIZE,layers=N",
        "SGLANG_EXT_KV_LAYER_CACHE_LAYERS": "SGLANG_EXT_KV_LAYER_CACHE_SIZE=SIZE,layers=N",
        "--kv-durability-timeout": "--kv-durability acked,timeout=SECONDS",
        "SGLANG_EXT_KV_DURABILITY_TIMEOUT": "SGLANG_EXT_KV_DURABILITY=acked,timeout=SECONDS",
        "--kv-disk-lag": "--kv-disk-io auto,lag=wait",
        "SGLANG_EXT_KV_DISK_LAG": "SGLANG_EXT_KV_DISK_IO=auto,lag=wait",
        "--kv-disk-admission": "--kv-disk-io auto,admission=complete",
        "SGLANG_EXT_KV_DISK_ADMISSION": "SGLANG_EXT_KV_DISK_IO=auto,admission=complete",
        "--kv-load-min-tokens": "--kv-load-policy auto,min-tokens=TOKENS",
        "SGLANG_EXT_KV_LOAD_MIN_TOKENS": "SGLANG_EXT_KV_LOAD_POLICY=auto,min-tokens=TOKENS",
        "--kv-dram-for-others": "--kv-dram-size SIZE,for-others=SIZE",
        "SGLANG_EXT_KV_DRAM_FOR_OTHERS": "SGLANG_EXT_KV_DRAM_SIZE=SIZE,for-others=SIZE",
        "--kv-pressure-policy": "--kv-eviction-policy lru,pressure=NAME",
        "SGLANG_EXT_KV_PRESSURE_POLICY": "SGLANG_EXT_KV_EVICTION_POLICY=lru,pressure=NAME",
        "--kv-agent-port": "--kv-ports agent=PORT or --kv-ports FIRST-LAST,agent=PORT",
        "SGLANG_EXT_KV_AGENT_PORT": "SGLANG_EXT_KV_PORTS=agent=PORT",
    }
)
ROUTER: Mapping[str, str] = MappingProxyType(
    {
        "--queue-weight": "the variable SGLANG_EXT_ROUTER_QUEUE_WEIGHT",
        "--exec-weight": "the variable SGLANG_EXT_ROUTER_EXEC_WEIGHT",
        "--balance-cache-factor": "the variable SGLANG_EXT_ROUTER_BALANCE_CACHE_FACTOR",
        "--no-cache-details": "the variable SGLANG_EXT_ROUTER_CACHE_DETAILS=0",
        "--session-keys": "--client-rules FILE with a row [[session]] for each",
        "--session-header": "--client-rules FILE with a row [[session]] header = NAME",
        "--session-field": "--client-rules FILE with a row [[session]] field = NAME",
        "--session-cookie": "--client-rules FILE with a row [[session]] cookie = NAME",
        "--hints-per-second": "--tenant-limits hints-per-second=NUMBER",
        "--hints-live": "--tenant-limits hints-live=N",
        "--hint-tokens": "--tenant-limits hint-tokens=TOKENS",
        "--hint-bytes": "--tenant-limits hint-bytes=SIZE",
        "--document-blocks-per-tenant": "--tenant-limits document-blocks=BLOCKS",
        "--document-bytes-per-tenant": "--tenant-limits document-bytes=SIZE",
        "--spill-blocks-per-tenant": "--tenant-limits spill-blocks=BLOCKS",
        "--client-bytes-per-minute": "--tenant-limits bytes-per-minute=SIZE",
        "--client-tokenizing-share": "--tenant-limits tokenizing-share=NUMBER",
        "--tree-max-bytes": "--memory-limits tree=SIZE",
        "--tokenizer-cache-bytes": "--memory-limits tokenizer-cache=SIZE",
        "--session-memory-bytes": "--memory-limits sessions=SIZE",
        "--document-blocks": "--memory-limits document-blocks=BLOCKS",
        "--document-bytes": "--memory-limits documents=SIZE",
        "--explain-max-bytes": "--memory-limits explain=SIZE",
        "--max-total-payload-bytes": "--memory-limits bodies=SIZE",
        "--max-header-bytes": "--memory-limits request-head=SIZE",
        "--connect-timeout-secs": "--time-limits connect=SECONDS",
        "--silence-secs": "--time-limits silence=SECONDS",
        "--index-wait-secs": "--time-limits index-wait=SECONDS",
        "--header-timeout-secs": "--time-limits request-head=SECONDS",
        "--keep-alive-secs": "--time-limits keep-alive=SECONDS",
        "--tree-ttl-secs": "--time-limits prefix-ttl=SECONDS",
        "--hint-ttl-secs": "--time-limits hint-ttl=SECONDS",
        "--document-ttl-secs": "--time-limits document-ttl=SECONDS",
        "--role-dwell-secs": "--role-controller on,dwell=SECONDS",
        "--retry-budget": "--max-retries 3,budget=NUMBER",
        "--log-format": "--log-level info,format=json",
        "--max-connections": "--max-concurrent-requests 4096,connections=N",
    }
)
CLUSTER: Mapping[str, str] = MappingProxyType(
    {
        "--start-timeout-secs": "--time-limits start=SECONDS",
        "--stop-timeout-secs": "--time-limits stop=SECONDS",
    }
)
CALIBRATE: Mapping[str, str] = MappingProxyType(
    {
        "--longest": "--measure longest=TOKENS",
        "--lengths": "--measure lengths=N",
        "--rounds": "--measure rounds=N",
        "--no-operators": "--measure operators=off",
        "--start-timeout-secs": "--measure start-timeout=SECONDS",
        "--dram": "--links dram=GB/S",
        "--disk": "--links disk=GB/S",
        "--transfer": "--links transfer=GB/S",
        "--api-key": "the variable SGLANG_EXT_WORKER_API_KEY",
    }
)
ROUTER_ADDRESS: Mapping[str, str] = MappingProxyType(
    {
        "--api-key": "the variable SGLANG_EXT_API_KEY",
        "--ca-file": "the variable SSL_CERT_FILE",
    }
)
TOP: Mapping[str, str] = MappingProxyType({"--once": "--interval 0"})
DOCTOR: Mapping[str, str] = MappingProxyType(
    {
        "--deep": "--verify deep",
        "--repair": "--verify repair",
        "--listen-secs": "--listen :PORT,for=SECONDS",
    }
)
