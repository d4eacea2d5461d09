"""Reads the facts for ``admission`` from command line, environment and SGLang's contexts, and refuses.

A command line is checked before anything is loaded. The factory checks again, with the flags as SGLang has
resolved them and on the KV pool, which depends on the platform; programs without a command line are checked
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.admission import BACKEND, Facts, admission, unsupported
from sglang_ext.patches.versions import follows_hybrids, installed_sglang_version

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


def facts_of(ctx: Any, config: KvConfig) -> Facts:
    """The facts in a ``TreeCacheBuildContext`` and in the configuration of this scheduler process."""
    from sglang.srt.environ import envs
    from sglang.srt.mem_cache.allocator.page_interleave import page_interleave_shard_size
    from sglang.srt.runtime_context import (
        get_disagg,
        get_exec,
        get_memory,
        get_parallel,
        get_serving,
        get_spec,
    )

    memory, disagg, parallel = get_memory(), get_disagg(), get_parallel()
    graphs = get_exec().graph.cuda_graph_config
    allocator = ctx.params.token_to_kv_pool_allocator
    return Facts(
        kv_pool=type(allocator.get_kvcache()).__name__,
        disable_radix_cache=ctx.disable_radix_cache,
        transfers=disagg.disaggregation_mode != "null" and disagg.disaggregation_transfer_backend == BACKEND,
        disaggregation_mode=disagg.disaggregation_mode,
        disaggregation_decode_enable_radix_cache=disagg.disaggregation_decode_enable_radix_cache,
        disaggregation_decode_retraction_backup=disagg.disaggregation_decode_retraction_backup,
        enable_hierarchical_cache=ctx.enable_hierarchical_cache,
        enable_lmcache=memory.enable_lmcache,
        enable_flexkv=memory.enable_flexkv,
        enable_unified_cache_external_linker=memory.enable_unified_cache_external_linker,
        enable_session_radix_cache=memory.enable_session_radix_cache,
        enable_streaming_session=get_serving().enable_streaming_session,
        enable_unified_memory=memory.enable_unified_memory,
        enable_hisparse=memory.enable_hisparse,
        dcp_enabled=parallel.dcp_enabled,
        enable_kv_cache_sharding=page_interleave_shard_size(allocator) > 1,
        speculative_algorithm=get_spec().speculative_algorithm,
        speculative_draft_window_size=get_spec().speculative_draft_window_size,
        defers_draft_kv=_defers_draft_kv(),
        enable_encoder_swa_bounded_replay=_replays_windows(),
        radix_eviction_policy=memory.radix_eviction_policy,
        **_replicas(parallel),
        attn_cp_size=parallel.attn_cp_size,
        enable_dsa_cache_layer_split=getattr(parallel, "enable_dsa_cache_layer_split", False),
        pp_size=parallel.pp_size,
        enable_pdmux=disagg.enable_pdmux,
        dllm_algorithm=get_exec().dllm.dllm_algorithm,
        prefill_graphs=None if graphs is None else str(graphs.prefill.backend),
        optimistic_prefill_attempts=disagg.optimistic_prefill_attempts,
        prefill_war_read_done=_is_wanted(envs.SGLANG_ENABLE_PREFILL_WAR_READ_DONE),
        post_capture_kv_sizing=_late_sizes(),
        block_size=config.block_size,
        page_size=ctx.params.page_size,
        snapshots_at_ends=not ctx.params.enable_mamba_extra_buffer,
        **_of_config(config),
    )


def _replicas(parallel: Any) -> dict[str, Any]:
    """The replicas of a server. Before 0.5.22, SGLang counts those with DP attention as both kinds."""
    if parallel.attn_dp_size > 1:
        return {"attn_dp_size": parallel.attn_dp_size}
    return {"dp_size": parallel.dp_size}


def _of_config(config: KvConfig) -> dict[str, Any]:
    """Facts of our own flags."""
    return {
        "follows_hybrids": follows_hybrids(installed_sglang_version()),
        "dram": bool(config.dram_size),
        "disk": config.disk_path is not None,
        "acked": config.acked_behind is not None,
        "layer_region": config.layer_region_bytes != 0,
        "hicache": config.hicache is not None,
        "by_layer": config.transfer_mode == "push-by-layer",
        "pushes": config.transfer_mode != "pull",
        "aggregated": config.transfer_layout == "aggregated",
        "decode_keeps": config.pd_caching in ("2", "3"),
        "returns": config.pd_caching == "3",
    }


def _is_wanted(variable: Any) -> bool:
    """Whether the user has set it, as some versions of SGLang do by default."""
    return bool(variable.is_set() and variable.get())


def _late_sizes() -> bool | None:
    from sglang.srt.environ import envs

    variable = envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING
    return bool(variable.get()) if variable.is_set() or variable.get() else None


def _defers_draft_kv() -> bool:
    from sglang.srt.environ import envs

    variable = getattr(envs, "SGLANG_DSPARK_DEFER_CONTEXT_KV", None)  # from 0.5.23 on
    return variable is not None and bool(variable.get())


def _replays_windows() -> bool:
    from sglang.srt.runtime_context import get_exec

    features = getattr(get_exec(), "features", None)
    return bool(getattr(features, "enable_encoder_swa_bounded_replay", False))  # from 0.5.23 on


def wait_for_whole_passes(config: KvConfig) -> None:
    """Have the schedule stream wait until a forward pass has ended, as SGLang does beside HiCache: copies to
    DRAM wait for that stream only."""
    from sglang.srt.environ import envs

    if config.dram_size:
        envs.SGLANG_ENABLE_PREFILL_WAR_READ_DONE.set(False)


_SAME_NAMES = (
    "attn_cp_size",
    "attn_dp_size",
    "disable_radix_cache",
    "disaggregation_decode_enable_radix_cache",
    "disaggregation_decode_retraction_backup",
    "disaggregation_mode",
    "dllm_algorithm",
    "dp_size",
    "enable_dsa_cache_layer_split",
    "enable_encoder_swa_bounded_replay",
    "enable_flexkv",
    "enable_hierarchical_cache",
    "enable_hisparse",
    "enable_kv_cache_sharding",
    "enable_lmcache",
    "enable_pdmux",
    "enable_session_radix_cache",
    "enable_streaming_session",
    "enable_unified_cache_external_linker",
    "enable_unified_memory",
    "nnodes",
    "optimistic_prefill_attempts",
    "pp_size",
    "radix_eviction_policy",
    "speculative_draft_window_size",
)


def given_facts(server_args: Any, config: KvConfig) -> Facts:
    """The facts in the command line and the environment, before SGLang has resolved anything."""
    from sglang.srt.environ import envs

    graphs = getattr(server_args, "cuda_graph_config", None)
    prefill = graphs.get("prefill") if isinstance(graphs, Mapping) else None
    in_json = prefill.get("backend") if isinstance(prefill, Mapping) else None
    algorithm = getattr(server_args, "speculative_algorithm", None)
    same = {name: value for name in _SAME_NAMES if (value := getattr(server_args, name, None)) is not None}
    if getattr(server_args, "enable_dp_attention", False):  # --attn-dp-size as it was called before
        same["attn_dp_size"] = max(same.get("attn_dp_size", 1), same.pop("dp_size", 1))
    if getattr(server_args, "enable_prefill_cp", False) and same.get("attn_cp_size", 1) == 1:
        # As SGLang resolves it with DSA; other models have no context parallelism by that flag alone.
        ranks = getattr(server_args, "tp_size", None) or 1
        same["attn_cp_size"] = max(1, ranks // same.get("attn_dp_size", 1))
    return Facts(
        **same,
        caches=getattr(server_args, "radix_cache_backend", None) == BACKEND,
        transfers=getattr(server_args, "disaggregation_transfer_backend", None) == BACKEND,
        dcp_enabled=(getattr(server_args, "dcp_size", None) or 1) > 1,
        speculative_algorithm=algorithm and algorithm.upper(),
        defers_draft_kv=_defers_draft_kv(),
        prefill_graphs=in_json or getattr(server_args, "cuda_graph_backend_prefill", None),
        prefill_war_read_done=_is_wanted(envs.SGLANG_ENABLE_PREFILL_WAR_READ_DONE),
        post_capture_kv_sizing=_late_sizes(),
        block_size=config.block_size,
        **_of_config(config),
    )


def require_supported(ctx: Any, config: KvConfig) -> None:
    """Refuse a server that the cache cannot serve, by its flags as SGLang has resolved them.

    Raises:
        ConfigError: naming the obstacle and the alternative.
    """
    _refuse(admission(ctx.model_config, facts_of(ctx, config)))


def require_movable(model: ModelConfig, server_args: Any, parallel: Any, config: KvConfig) -> None:
    """Refuse a server whose KV the transfer backend cannot move.

    Args:
        model: SGLang's ``ModelConfig``.
        server_args: SGLang's, resolved.
        parallel: SGLang's ``get_parallel()``, where one flag may have set the size of another.

    Raises:
        ConfigError: naming the obstacle and the alternative.
    """
    flags = replace(
        given_facts(server_args, config),
        caches=False,
        transfers=True,
        **_replicas(parallel),
        attn_cp_size=parallel.attn_cp_size,
    )
    _refuse(admission(model, flags))


def require_admitted(server_args: Any, config: KvConfig) -> None:
    """Refuse a command line before anything is loaded: its flags, and the model by its configuration alone.

    A model whose configuration cannot be read is left to SGLang, which reports the fault.

    Raises:
        ConfigError: naming the obstacle and the alternative.
    """
    from sglang.srt.configs.model_config import ModelConfig

    flags = given_facts(server_args, config)
    _refuse(unsupported(flags))
    try:
        model = ModelConfig.from_server_args(server_args)
    except Exception:  # noqa: BLE001 - whatever it is, SGLang meets it next and reports it
        pass
    else:
        _refuse(admission(model, flags))
    if not flags.caches:
        return
    if config.advisory_compute:
        require_computing(server_args)
    if config.retract_wait is not None:
        require_retracting(server_args)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise ConfigError(reason)


def require_computing(server_args: Any) -> None:
    """Whether requests of our own can be put into the scheduler (``compute_ahead``).

    Raises:
        ConfigError: they cannot.
    """
    for present, flag, way_out in (
        (
            getattr(server_args, "disaggregation_mode", "null") != "null",
            "--disaggregation-mode",
            "requests of a pair belong to two servers",
        ),
        (
            getattr(server_args, "tokenizer_worker_num", 1) > 1,
            "--tokenizer-worker-num",
            "answers are sorted by tokenizer process",
        ),
        (
            getattr(server_args, "dp_size", 1) > 1 or getattr(server_args, "attn_dp_size", 1) > 1,
            "--dp-size or --attn-dp-size above 1",
            "a replica's idle time does not show that the server is idle",
        ),
        (
            getattr(server_args, "pp_size", 1) > 1,
            "--pp-size above 1",
            "stages are idle at other times",
        ),
        (
            getattr(server_args, "attn_cp_size", 1) > 1,
            "--attn-cp-size above 1",
            "no test has such a server compute ahead",
        ),
    ):
        if present:
            raise ConfigError(
                f"nothing can be computed ahead with {flag}: {way_out}",
                field="--kv-advisory-compute",
                hint=f"Drop one of --kv-advisory-compute and {flag}",
            )


def why_not_retracting(server_args: Any) -> tuple[str, str] | None:
    """Why SGLang alone decides who is preempted, and the way out; None where `retracting` does."""
    given = partial(getattr, server_args)
    if not given("enable_priority_scheduling", False):
        return "requests have no priorities without --enable-priority-scheduling", "Add that flag"
    if given("disable_priority_preemption", False):
        return "--disable-priority-preemption keeps every running request", "Drop one of the two"
    if given("disaggregation_mode", "null") != "null":
        # Prefill runs nothing that could give way; decode admits in SGLang's own order.
        return "requests are not retracted for others with --disaggregation-mode", "Drop this flag"
    if given("pp_size", 1) > 1:
        # Each stage measures its own steps, and they would decide differently.
        return "the stages would not agree with --pp-size above 1", "Use --tp-size instead"
    if given("speculative_algorithm", None) is not None:
        return "requests do not go on from their KV with --speculative-algorithm", "Drop one of the two"
    return None


def require_retracting(server_args: Any) -> None:
    """Whether `retracting` decides who gives way.

    Raises:
        ConfigError: it does not.
    """
    found = why_not_retracting(server_args)
    if found is not None:
        raise ConfigError(found[0], field="--kv-retract-wait", hint=found[1])
