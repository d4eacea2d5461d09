"""A rank of prefill context parallelism in a process of its own, over a cache as a server's scheduler builds
it: `context_process.py JSON`.

Serves each line of stdin, token ids in JSON, as a request, and prints a line of JSON after it: the tokens
and blocks that it has loaded, written to disk and read from there since its start. A wrong row ends it.
"""

# ruff: noqa: E402 - SGLang is imported by a prepared process
from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).parent / "oracle")]

from sglang_ext.patches.cpu import runtime

runtime.prepare_process(os.environ)

import torch
from engine_pools import PoolKind, Pools, publish_server_args
from engine_scheduler import Settings, SimulatedScheduler
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.runtime_context import get_context, get_parallel
from transformers import PretrainedConfig

from sglang_ext.config import KvConfig
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.patches.adapter.build import create_global_radix_cache
from sglang_ext.tiered_store.tier import Outcome

BLOCK = 16
AFTER = 300
"""Passes after a request, in which its KV is written."""


class Worker:
    """SGLang's model worker, as the cache sees it. Ranks have other weights behind attention."""

    def __init__(self, rank: int) -> None:
        model = torch.nn.Linear(4, 4, bias=False)
        torch.nn.init.constant_(model.weight, 1.0 + rank)
        self.model_runner = SimpleNamespace(model=model, forward_stream=None)
        self.gate: Any = None

    def register_hicache_layer_transfer_counter(self, gate: Any) -> None:
        self.gate = gate


def built(options: dict[str, Any]) -> tuple[Any, Pools, Worker]:
    """The cache of a rank, its pools, and its worker."""
    rank, ranks = options["rank"], options["ranks"]
    publish_server_args()
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{options['meeting']}", rank=rank, world_size=ranks
    )
    group = torch.distributed.group.WORLD
    get_parallel().override_permanently(
        tp_size=ranks,
        tp_rank=rank,
        attn_cp_size=ranks,
        attn_cp_rank=rank,
        attn_tp_size=1,
        attn_tp_rank=0,
        attn_dp_size=1,
        attn_dp_rank=0,
        moe_ep_size=1,
        moe_dp_size=1,
        moe_tp_size=ranks,
        pp_size=1,
        pp_rank=0,
        dp_rank=0,
        tp_group=SimpleNamespace(cpu_group=group, world_size=ranks),
    )
    pools = Pools(PoolKind("mla", BLOCK, layers=3), 64 * BLOCK, block=BLOCK, rows=6, context=1024)
    params = pools.params()
    params.tp_cache_group = group
    worker = Worker(rank)
    context = _context(params, worker, rank, ranks)
    config = KvConfig(
        dram_size=options["dram"],
        disk_path=options["disk"],
        disk_size=64 << 20,
        load_policy="always",
        load_min_tokens=0,
        check=True,
        instance_id="here",
    )
    return create_global_radix_cache(context, config), pools, worker


def _context(params: Any, worker: Worker, rank: int, ranks: int) -> Any:
    """SGLang's ``TreeCacheBuildContext``."""
    model = SimpleNamespace(
        hf_config=PretrainedConfig(architectures=["DeepseekV2ForCausalLM"]),
        is_hybrid_swa=False,
        is_draft_model=False,
        is_multimodal=False,
        linear_attn_registry_result=None,
        num_hidden_layers=3,
        dtype=torch.float32,
        get_total_num_kv_heads=lambda: 1,
    )
    return TreeCacheBuildContext(
        server_args=get_context().server_args,
        params=params,
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        enable_hierarchical_cache=False,
        disable_radix_cache=False,
        tp_worker=worker,
        model_config=model,  # type: ignore[arg-type]
        tp_size=ranks,
        tp_rank=rank,
        tp_group=None,
    )


def main() -> None:
    cache, pools, worker = built(json.loads(sys.argv[1]))
    scheduler = SimulatedScheduler(pools, cache, worker.gate, Settings(chunk=64))
    reads = cache.find(Promotions).reads
    disk, writes = reads._tier, reads._writes
    for line in sys.stdin:
        req = scheduler.submit(json.loads(line), new_tokens=1)
        passes = 0
        while passes < AFTER:  # ranks make as many passes
            scheduler.step()
            passes += scheduler.idle
            time.sleep(0.001 * scheduler.idle)
        assert req.finished()
        assert not cache.faults.counts, cache.faults
        stats = disk.stats()
        seen = {
            "loaded": scheduler.loaded_tokens,
            "durable": writes.counters.written,
            "put": stats.put.get(Outcome.DONE, 0),
            "got": stats.got.get(Outcome.DONE, 0),
            "commands": cache.command_queue is not None,
        }
        print(json.dumps(seen), flush=True)
    cache.release_host_resources()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
