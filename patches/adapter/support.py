"""Which servers the global cache backend can serve, decided before anything is built.

The cache keeps the KV of whole prefixes of full-attention layers: one slot per token in one pool, MHA, GQA
or MLA. Whatever keeps KV otherwise, or brings a prefix cache of its own, is refused at start by name, with
what to use instead. So is every mode in which a forward pass would not wait for KV that is being loaded;
``tests/engine/cache/test_hicache_guards.py`` says for each of SGLang's own guards why ours is here, or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_ext.config import KvConfig
from sglang_ext.errors import ConfigError

BACKEND = "global"
FLAG = "--radix-cache-backend global"

_STOCK = f"Start without {FLAG} to use SGLang's own cache"
_POOLS = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
# NGRAM drafts from the text; the others keep a draft model's KV in the same slots, which no tier restores.
_DRAFTLESS = frozenset({None, "NGRAM"})
# Their attention runs eagerly, layer by layer, so that it waits for a layer that is being loaded. In a full
# graph the wait is recorded at capture and never again; tc_piecewise SGLang turns off beside HiCache.
_WAITING_GRAPHS = frozenset({None, "disabled", "breakable"})
_EARLY_WRITES = "SGLANG_ENABLE_PREFILL_WAR_READ_DONE"
_REPLICAS = (
    "Start one server for each replica, behind the router: sglang-ext cluster --colocated N, or "
    "sglang-ext router --worker-urls URL URL"
)


@dataclass(frozen=True)
class Facts:
    """What the decision depends on; the names are SGLang's."""

    is_hybrid_swa: bool = False
    is_hybrid_ssm: bool = False
    is_dsa: bool = False
    kv_pool: str = "MHATokenToKVPool"
    disable_radix_cache: bool = False
    disaggregation_mode: str = "null"
    disaggregation_decode_enable_radix_cache: bool = False
    disaggregation_decode_retraction_backup: str | None = None
    enable_hierarchical_cache: bool = False
    enable_lmcache: bool = False
    enable_flexkv: bool = False
    enable_unified_cache_external_linker: bool = False
    enable_session_radix_cache: bool = False
    enable_streaming_session: bool = False
    enable_unified_memory: bool = False
    enable_hisparse: bool = False
    dcp_enabled: bool = False
    kv_sharded: bool = False
    is_eagle: bool = False
    speculative_algorithm: str | None = None
    radix_eviction_policy: str = "lru"
    dp_size: int = 1
    attn_dp_size: int = 1
    attn_cp_size: int = 1
    pp_size: int = 1
    enable_pdmux: bool = False
    dllm_algorithm: str | None = None
    prefill_graphs: str | None = None
    """The backend of the CUDA graphs for prefill."""
    optimistic_prefill_attempts: int = 0
    prefill_war_read_done: bool = False
    post_capture_kv_sizing: bool = False
    dram: bool = False
    """Whether there is a DRAM tier, from which KV is loaded in front of forward passes."""
    disk: bool = False


def unsupported(facts: Facts) -> str | None:
    """Why the global backend cannot serve this server, with the way out; None when it can."""
    parallelism = unsupported_parallelism(
        FLAG, dp_size=facts.dp_size, attn_dp_size=facts.attn_dp_size, attn_cp_size=facts.attn_cp_size
    )
    return _unsupported_model(facts) or parallelism or _unsupported_flags(facts) or _unwaiting(facts)


def unsupported_parallelism(chosen: str, *, dp_size: int, attn_dp_size: int, attn_cp_size: int) -> str | None:
    """Why this kind of parallelism does not go with the flag ``chosen``, with the way out; None when it does.

    Every replica of data parallelism has a scheduler and a tree of its own, and the server has one name: they
    would take each other's place in the routers' index, and want the same directory on disk. With context
    parallelism the ranks of one prefix would not agree on what each of them has loaded.
    """
    for size, flag, way_out in (
        (dp_size, "--dp-size", _REPLICAS),
        (attn_dp_size, "--attn-dp-size", _REPLICAS),
        (attn_cp_size, "--attn-cp-size", "Use --tp-size instead"),
    ):
        if size > 1:
            return f"{chosen} cannot be combined with {flag} above 1, with DP attention or without. {way_out}"
    return None


def _unwaiting(facts: Facts) -> str | None:
    """Modes in which a batch would read KV before it is there, or KV would be kept before it is written."""
    if facts.enable_pdmux:
        return f"{FLAG} cannot be combined with --enable-pdmux. Drop that flag"
    if facts.dllm_algorithm is not None:
        return f"{FLAG} does not serve diffusion language models (--dllm-algorithm). {_STOCK}"
    if facts.post_capture_kv_sizing:
        return f"{FLAG} cannot be combined with SGLANG_ENABLE_POST_CAPTURE_KV_SIZING=1. Unset that variable"
    if facts.dram and facts.pp_size > 1:
        # Each stage has a tree of its own; nothing keeps completed copies of the stages in step.
        return (
            "--kv-dram-size cannot be combined with --pp-size above 1. "
            "Use --tp-size instead, or do without a DRAM tier"
        )
    if facts.dram and facts.prefill_graphs not in _WAITING_GRAPHS:
        return (
            f"--kv-dram-size cannot be combined with --cuda-graph-backend-prefill {facts.prefill_graphs}. "
            f"Use --cuda-graph-backend-prefill breakable, or disabled"
        )
    if facts.dram and facts.prefill_war_read_done:
        return f"--kv-dram-size cannot be combined with {_EARLY_WRITES}=1. Unset that variable"
    if facts.disk and facts.optimistic_prefill_attempts > 0:
        return "--kv-disk-path cannot be combined with --optimistic-prefill-attempts. Drop one of them"
    return None


def _unsupported_model(facts: Facts) -> str | None:
    kinds = (
        (facts.is_hybrid_swa, "sliding-window attention"),
        (facts.is_hybrid_ssm, "Mamba or other state-space layers"),
        (facts.is_dsa, "sparse attention with an index cache (DSA)"),
    )
    for present, kind in kinds:
        if present:
            return f"{FLAG} does not serve models with {kind}. {_STOCK}"
    if facts.kv_pool not in _POOLS:
        return (
            f"{FLAG} does not serve the KV pool {facts.kv_pool} of this model and --kv-cache-dtype "
            f"(it serves {', '.join(sorted(_POOLS))}). {_STOCK}"
        )
    return None


def _unsupported_flags(facts: Facts) -> str | None:
    if facts.disable_radix_cache:
        if facts.disaggregation_mode == "decode" and not facts.disaggregation_decode_enable_radix_cache:
            return (
                f"{FLAG} on a decode server needs --disaggregation-decode-enable-radix-cache; "
                f"without it SGLang keeps no prefixes there. Add that flag"
            )
        return f"{FLAG} cannot be combined with --disable-radix-cache. Drop one of them"
    if facts.enable_hierarchical_cache:
        return f"{FLAG} cannot be combined with --enable-hierarchical-cache. Use --kv-dram-size instead"
    rivals = (
        (facts.enable_lmcache, "--enable-lmcache", "Use --kv-dram-size instead"),
        (facts.enable_flexkv, "--enable-flexkv", "Use --kv-dram-size instead"),
        (facts.enable_unified_cache_external_linker, "--enable-unified-cache-external-linker", _STOCK),
        (facts.enable_session_radix_cache, "--enable-session-radix-cache", "Drop that flag"),
        (facts.enable_streaming_session, "--enable-streaming-session", "Drop that flag"),
        (facts.enable_unified_memory, "--enable-unified-memory", "Drop that flag"),
        (facts.enable_hisparse, "--enable-hisparse", "Drop that flag"),
        (facts.dcp_enabled, "--dcp-size above 1", "Use --tp-size instead"),
        (facts.kv_sharded, "a KV pool sharded by pages", _STOCK),
    )
    for present, flag, way_out in rivals:
        if present:
            return f"{FLAG} cannot be combined with {flag}. {way_out}"
    if facts.is_eagle or facts.speculative_algorithm not in _DRAFTLESS:
        name = facts.speculative_algorithm or "EAGLE"
        return (
            f"{FLAG} cannot be combined with --speculative-algorithm {name}: the draft model's KV is not "
            f"kept. Use --speculative-algorithm NGRAM, or none"
        )
    if facts.radix_eviction_policy != "lru":
        return (
            f"{FLAG} does not take --radix-eviction-policy {facts.radix_eviction_policy}. "
            f"Use --kv-eviction-policy instead"
        )
    if facts.disaggregation_decode_retraction_backup == "host_pool":
        return (
            f"{FLAG} cannot be combined with --disaggregation-decode-retraction-backup host_pool. "
            f"Use cpu_tensor instead"
        )
    return None


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
        is_hybrid_swa=ctx.is_hybrid_swa,
        is_hybrid_ssm=ctx.is_hybrid_ssm,
        is_dsa=ctx.is_dsa,
        kv_pool=type(allocator.get_kvcache()).__name__,
        disable_radix_cache=ctx.disable_radix_cache,
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
        kv_sharded=page_interleave_shard_size(allocator) > 1,
        is_eagle=ctx.params.is_eagle,
        speculative_algorithm=get_spec().speculative_algorithm,
        radix_eviction_policy=memory.radix_eviction_policy,
        dp_size=parallel.dp_size,
        attn_dp_size=parallel.attn_dp_size,
        attn_cp_size=parallel.attn_cp_size,
        pp_size=parallel.pp_size,
        enable_pdmux=disagg.enable_pdmux,
        dllm_algorithm=get_exec().dllm.dllm_algorithm,
        prefill_graphs=None if graphs is None else str(graphs.prefill.backend),
        optimistic_prefill_attempts=disagg.optimistic_prefill_attempts,
        prefill_war_read_done=_is_wanted(envs.SGLANG_ENABLE_PREFILL_WAR_READ_DONE),
        post_capture_kv_sizing=envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get(),
        dram=bool(config.dram_size),
        disk=config.disk_path is not None,
    )


def _is_wanted(variable: Any) -> bool:
    """Whether the user has set it, as some versions of SGLang do by default."""
    return bool(variable.is_set() and variable.get())


def wait_for_whole_passes(config: KvConfig) -> None:
    """Have the schedule stream wait until a forward pass has ended, as SGLang does beside HiCache: copies to
    DRAM wait for that stream only."""
    from sglang.srt.environ import envs

    if config.dram_size:
        envs.SGLANG_ENABLE_PREFILL_WAR_READ_DONE.set(False)


def given_facts(server_args: Any, config: KvConfig) -> Facts:
    """What the command line and the environment say of modes, before SGLang has resolved anything."""
    from sglang.srt.environ import envs

    graphs = getattr(server_args, "cuda_graph_config", None)
    prefill = graphs.get("prefill") if isinstance(graphs, Mapping) else None
    in_json = prefill.get("backend") if isinstance(prefill, Mapping) else None
    return Facts(
        dp_size=getattr(server_args, "dp_size", 1),
        attn_dp_size=getattr(server_args, "attn_dp_size", 1),
        attn_cp_size=getattr(server_args, "attn_cp_size", 1),
        pp_size=getattr(server_args, "pp_size", 1),
        enable_pdmux=getattr(server_args, "enable_pdmux", False),
        dllm_algorithm=getattr(server_args, "dllm_algorithm", None),
        prefill_graphs=in_json or getattr(server_args, "cuda_graph_backend_prefill", None),
        optimistic_prefill_attempts=getattr(server_args, "optimistic_prefill_attempts", 0),
        prefill_war_read_done=_is_wanted(envs.SGLANG_ENABLE_PREFILL_WAR_READ_DONE),
        post_capture_kv_sizing=envs.SGLANG_ENABLE_POST_CAPTURE_KV_SIZING.get(),
        dram=bool(config.dram_size),
        disk=config.disk_path is not None,
    )


def require_supported(ctx: Any, config: KvConfig) -> None:
    """Refuse a server that the global backend cannot serve.

    Raises:
        ConfigError: naming what is in the way and what to use instead.
    """
    reason = unsupported(facts_of(ctx, config))
    if reason is not None:
        raise ConfigError(reason)


def require_supported_flags(server_args: Any, config: KvConfig) -> None:
    """Refuse flags before anything is loaded; ``require_supported`` decides again on what has become of them.

    Raises:
        ConfigError: naming what is in the way and what to use instead.
    """
    reason = unsupported(given_facts(server_args, config))
    if reason is not None:
        raise ConfigError(reason)
    if config.advisory_compute:
        require_computing(server_args)
    if config.retract_wait is not None:
        require_retracting(server_args)


def require_supported_parallelism(server_args: Any, chosen: str) -> None:
    """Refuse what ``unsupported_parallelism`` names, before anything is loaded.

    Raises:
        ConfigError: naming what is in the way and what to use instead.
    """
    facts = given_facts(server_args, KvConfig())
    reason = unsupported_parallelism(
        chosen, dp_size=facts.dp_size, attn_dp_size=facts.attn_dp_size, attn_cp_size=facts.attn_cp_size
    )
    if reason is not None:
        raise ConfigError(reason)


def require_supported_model(server_args: Any) -> None:
    """Refuse a model by its configuration alone, before the weights are loaded.

    ``require_supported`` decides again when the pools are there; this spares a user the wait. A model whose
    configuration cannot be read is left to SGLang, which says what is wrong with it.

    Raises:
        ConfigError: naming what is in the way and what to use instead.
    """
    from sglang.srt.configs.model_config import ModelConfig

    try:
        model = ModelConfig.from_server_args(server_args)
    except Exception:  # noqa: BLE001 - whatever it is, SGLang meets it next and reports it
        return
    reason = unsupported(Facts(is_hybrid_swa=model.is_hybrid_swa))
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
        return "nobody is retracted with --disable-priority-preemption", "Drop one of the two"
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
