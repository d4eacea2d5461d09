"""Every place where SGLang looks at ``--enable-hierarchical-cache``, and the equivalent for our cache.

Our cache leaves that flag off, so SGLang does not refuse, turn off or wait for the same things beside it. The
list is compared with SGLang's source: a place that is new, or gone, has to be judged here first.
"""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import sglang.srt
from sglang.srt.managers.tp_worker import BaseTpWorker, TpModelWorker

from sglang_ext.patches.adapter.admission import Facts, unsupported
from sglang_ext.patches.hooks import scheduler as scheduler_calls

FIELD = "enable_hierarchical_cache"
SOURCE = Path(sglang.srt.__path__[0])


@dataclass(frozen=True)
class Judged:
    """Our equivalent of one function's uses of the flag."""

    times: int | tuple[int, ...]
    """How often it names the flag; where supported versions differ, how often each may (0: it has no such
    function, or that does not)."""
    why: str
    refused: Facts | None = None
    """A server that we refuse where SGLang refuses or changes one with HiCache."""
    hook: str | None = None
    """The function of SGLang's at which a hook of ours does what SGLang does for HiCache."""


PASSES_ON = "hands the flag on"
OWN_POOLS = "builds, sizes or measures HiCache's own pools"
CONFLICT = "refuses the flag beside another one"
DRAM = Facts(dram=True)
_SPEC_WORKER = "sglang.srt.speculative.base_spec_worker.BaseSpecWorker"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"

JUDGED = {
    ("arg_groups/cuda_graph_hook.py", "disable_tc_piecewise_cudagraph_if_incompatible"): Judged(
        (0, 1), "turns these prefill graphs off", refused=replace(DRAM, prefill_graphs="tc_piecewise")
    ),
    ("arg_groups/dllm_hook.py", "handle_dllm_inference"): Judged(
        2, "turns HiCache off: such batches never start their loads", refused=Facts(dllm_algorithm="any")
    ),
    ("arg_groups/field_order.py", ""): Judged(1, PASSES_ON),
    ("arg_groups/fields/memory.py", "Memory"): Judged(1, PASSES_ON),
    ("arg_groups/hicache_hook.py", "handle_hicache"): Judged(2, OWN_POOLS),
    ("arg_groups/hicache_hook.py", "resolve_hicache_dcp_compatibility"): Judged(
        1, "ranks with slices of a prefix", refused=Facts(dcp_enabled=True)
    ),
    ("arg_groups/kv_cache_hook.py", "handle_cache_compatibility"): Judged(
        2, CONFLICT, refused=Facts(disable_radix_cache=True)
    ),
    ("arg_groups/kv_cache_hook.py", "handle_kv4_compatibility"): Judged(
        1, "FP4 has scales beside its rows", refused=Facts(kv_pool="MHATokenToKVPoolFP4")
    ),
    ("arg_groups/kv_cache_hook.py", "handle_unified_memory_pool"): Judged(
        (0, 1), CONFLICT, refused=Facts(enable_unified_memory=True)
    ),
    ("arg_groups/kv_shard_hook.py", "handle_kv_cache_sharding"): Judged(
        (0, 1, 2), CONFLICT, refused=Facts(enable_kv_cache_sharding=True)
    ),
    ("arg_groups/mamba_hook.py", "handle_int8_mamba_checkpoint"): Judged(
        1, "refuses it, and every cache of others as well"
    ),
    ("arg_groups/model_overrides/deepseek_v2.py", "_dsa_dcp_overrides"): Judged(
        (0, 1), CONFLICT, refused=Facts(is_dsa=True, dcp_enabled=True)
    ),
    ("arg_groups/model_overrides/minicpm.py", "_minicpm_sala_overrides"): Judged(
        1, "such a model has no prefix cache", refused=Facts(disable_radix_cache=True)
    ),
    ("arg_groups/overrides.py", "_step3p_overrides"): Judged(
        1, "sliding windows become whole ones; here they stay in SGLang's own tree"
    ),
    ("arg_groups/pd_disaggregation_hook.py", "_validate_prefill_complete"): Judged(
        (0, 2), "refuses it with a policy that takes no transfer backend but Mooncake"
    ),
    ("arg_groups/serving_hook.py", "handle_other_validations"): Judged(
        1,
        "turns optimistic prefill off beside storage that keeps what it fetches",
        refused=Facts(optimistic_prefill_attempts=1, disk=True),
    ),
    ("beam_search/coordinator.py", "BeamCoordinator.validate_and_init"): Judged(
        1,
        "refuses the request",
        hook="sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init",
    ),
    (
        "distributed/device_communicators/mooncake_transfer_engine.py",
        "maybe_init_shared_mooncake_transfer_engine",
    ): Judged(1, "HiCache's storage over mooncake"),
    ("hardware_backend/npu/utils.py", "set_default_server_args"): Judged(
        1, "how HiCache copies on this device; build.py refuses a DRAM tier on it"
    ),
    ("kernel_plugins/amd/binding.py", ""): Judged((0, 1), "tells kernels of others which features are on"),
    ("kernel_plugins/nvidia/binding.py", ""): Judged((0, 1), "tells kernels of others which features are on"),
    ("managers/schedule_policy.py", "SchedulePolicy.__init__"): Judged(3, "keeps it without using it"),
    ("managers/scheduler.py", "Scheduler.__init__"): Judged(
        6, "hands it on; loads wait for the forward stream, which CudaMover is given"
    ),
    ("managers/scheduler.py", "Scheduler._get_new_batch_prefill_raw"): Judged(
        (1, 2),
        "starts the loads of a batch; a full pool is looked at again",
        hook=f"{_SCHEDULER}._get_new_batch_prefill_raw",
    ),
    ("managers/scheduler.py", "Scheduler._hicache_l3_layout"): Judged((0, 1), OWN_POOLS),
    ("managers/scheduler.py", "Scheduler._process_hicache_events"): Judged(
        1, "asks what has finished", hook=f"{_SCHEDULER}.ingest_requests"
    ),
    ("managers/scheduler.py", "Scheduler.attach_hicache_storage_wrapped"): Judged(
        1, "refuses the call, with ours as well"
    ),
    ("managers/scheduler.py", "Scheduler.clear_hicache_storage_wrapped"): Judged(
        1, "refuses the call, with ours as well"
    ),
    ("managers/scheduler.py", "Scheduler.detach_hicache_storage_wrapped"): Judged(
        1, "refuses the call, with ours as well"
    ),
    ("managers/scheduler.py", "Scheduler.init_metrics_collector"): Judged(2, PASSES_ON),
    ("managers/scheduler.py", "Scheduler.init_schedule_policy"): Judged(1, PASSES_ON),
    ("managers/scheduler.py", "Scheduler.is_fully_idle"): Judged(
        1, "copies in flight put a flush off; our reset waits for them instead"
    ),
    (
        "managers/scheduler_components/metrics_reporter.py",
        "SchedulerMetricsReporter._log_hicache_stats",
    ): Judged(1, OWN_POOLS),
    (
        "mem_cache/allocator/unified_hybrid_swa.py",
        "UnifiedSWATokenToKVPoolAllocator.evict_to_free_tokens",
    ): Judged((0, 1), "which of two pools is evicted from", refused=Facts(enable_unified_memory=True)),
    ("mem_cache/kv_cache_builder.py", "build_kv_cache"): Judged((6, 7), "builds HiCache"),
    ("mem_cache/kv_cache_builder.py", "prepare_hicache_staging"): Judged(1, OWN_POOLS),
    ("mem_cache/kv_cache_builder.py", "resolve_decode_retraction_backup"): Judged(
        1, OWN_POOLS, refused=Facts(disaggregation_decode_retraction_backup="host_pool")
    ),
    ("mem_cache/kv_cache_builder.py", "validate_decode_radix_cache"): Judged(
        (0, 2), CONFLICT, refused=Facts(is_hybrid_swa=True, disaggregation_mode="decode")
    ),
    ("mem_cache/kv_cache_configurator.py", "KVCacheConfigurator._fused_draft_decision"): Judged(
        (0, 1), "where the draft model's KV is", refused=Facts(enable_unified_memory=True)
    ),
    ("mem_cache/kv_cache_configurator.py", "_should_elide_dsa_index_k"): Judged(
        1, "keeps no index keys of layers that have none of their own; their blocks have no plane for them"
    ),
    ("mem_cache/registry.py", "TreeCacheBuildContext"): Judged(1, PASSES_ON),
    ("mem_cache/registry.py", "create_tree_cache"): Judged(1, "one of HiCache's modes needs its own tree"),
    ("mem_cache/registry.py", "create_unified_radix_cache"): Judged(
        1, "builds HiCache", refused=Facts(enable_hierarchical_cache=True)
    ),
    ("model_executor/runner_utils/shared_read_event.py", "maybe_publish_prefill_shared_read_done"): Judged(
        (0, 1),
        "copies of KV wait for the whole pass; `wait_for_whole_passes` has them wait here",
        refused=replace(DRAM, prefill_war_read_done=True),
    ),
    ("observability/metrics_collector.py", "SchedulerMetricsCollector.__init__"): Judged(4, PASSES_ON),
    ("observability/metrics_collector.py", "SchedulerMetricsCollector.init_new"): Judged(3, PASSES_ON),
    ("observability/metrics_collector.py", "SchedulerMetricsCollector.log_stats"): Judged(1, OWN_POOLS),
    ("rust_server/config.py", "_build_server_args"): Judged((0, 2), PASSES_ON),
    ("speculative/base_spec_worker.py", "BaseSpecWorker._build_hicache_draft_plan"): Judged(
        1, "the draft model's KV goes along", hook=f"{_SPEC_WORKER}.init_hicache_draft_plan"
    ),
    (
        "speculative/dspark_components/dspark_worker_v2.py",
        "DSparkWorkerV2._defer_context_kv_eligible",
    ): Judged((0, 1), "the draft model's KV comes later", refused=Facts(defers_draft_kv=True)),
}

FORWARDS = {
    "forward_batch_generation": "sets the consumer itself",
    "forward_batch_embedding": "hooked",
    "forward_batch_split_prefill": "refused: --enable-pdmux",
}
"""Every way in which a worker runs a batch; each must first set the loads that the batch waits for."""


def test_every_guard_of_sglangs_is_judged() -> None:
    found = places(SOURCE)
    assert set(found) <= set(JUDGED)
    for place, judged in JUDGED.items():
        times = judged.times if isinstance(judged.times, tuple) else (judged.times,)
        assert found[place] in times, place


def test_a_guard_that_is_new_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "new.py").write_text(
        f"class New:\n    async def mode(self, {FIELD}):\n        return run(self.{FIELD}, {FIELD}=1)\n"
        f"def other():\n    return getattr(args, {FIELD!r}) and args.{FIELD}_else\n"
    )
    assert places(tmp_path) == {("new.py", "New.mode"): 3, ("new.py", "other"): 1}


@pytest.mark.parametrize("place", JUDGED, ids=":".join)
def test_what_is_said_to_stand_there_does(place: tuple[str, str]) -> None:
    judged = JUDGED[place]
    if judged.refused is not None:
        assert unsupported(judged.refused) is not None
    if judged.hook is not None:
        assert judged.hook in scheduler_calls.PATCH.targets


def test_every_forward_pass_says_which_loads_it_waits_for() -> None:
    found = {name for name in vars(BaseTpWorker) | vars(TpModelWorker) if name.startswith("forward_")}
    assert found == set(FORWARDS)
    source = inspect.getsource(inspect.unwrap(TpModelWorker.forward_batch_generation))
    assert "self.set_hicache_consumer(batch.hicache_consumer_index)" in source
    hooked = f"{BaseTpWorker.__module__}.BaseTpWorker.forward_batch_embedding"
    assert hooked in scheduler_calls.PATCH.targets
    assert unsupported(Facts(enable_pdmux=True)) is not None


def places(root: Path) -> Counter[tuple[str, str]]:
    """How often each function below ``root`` names the flag, by file and by dotted name of the function."""
    found: Counter[tuple[str, str]] = Counter()
    for path in root.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if FIELD not in text:
            continue
        for where in _named(ast.parse(text), ()):
            found[path.relative_to(root).as_posix(), where] += 1
    return found


def _named(node: ast.AST, inside: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        inside = (*inside, node.name)
    names = {
        ast.Attribute: "attr",
        ast.Name: "id",
        ast.arg: "arg",
        ast.keyword: "arg",
        ast.Constant: "value",
    }
    attribute = names.get(type(node))
    if attribute is not None and getattr(node, attribute) == FIELD:
        yield ".".join(inside)
    for child in ast.iter_child_nodes(node):
        yield from _named(child, inside)
