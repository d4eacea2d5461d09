"""Which servers the global cache backend can serve, decided before anything is built.

The cache keeps the KV of whole prefixes of full-attention layers: one slot per token in one pool, MHA, GQA
or MLA. Whatever keeps KV otherwise, or brings a prefix cache of its own, is refused at start by name, with
what to use instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_ext.errors import ConfigError

BACKEND = "global"
FLAG = "--radix-cache-backend global"

_STOCK = f"Start without {FLAG} to use SGLang's own cache"
_POOLS = frozenset({"MHATokenToKVPool", "MLATokenToKVPool"})
# NGRAM drafts from the text; the others keep a draft model's KV in the same slots, which no tier restores.
_DRAFTLESS = frozenset({None, "NGRAM"})


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


def unsupported(facts: Facts) -> str | None:
    """Why the global backend cannot serve this server, with the way out; None when it can."""
    return _unsupported_model(facts) or _unsupported_flags(facts)


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


def facts_of(ctx: Any) -> Facts:
    """The facts in a ``TreeCacheBuildContext`` and in the configuration of this scheduler process."""
    from sglang.srt.mem_cache.allocator.page_interleave import page_interleave_shard_size
    from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel, get_serving, get_spec

    memory, disagg = get_memory(), get_disagg()
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
        dcp_enabled=get_parallel().dcp_enabled,
        kv_sharded=page_interleave_shard_size(allocator) > 1,
        is_eagle=ctx.params.is_eagle,
        speculative_algorithm=get_spec().speculative_algorithm,
        radix_eviction_policy=memory.radix_eviction_policy,
    )


def require_supported(ctx: Any) -> None:
    """Refuse a server that the global backend cannot serve.

    Raises:
        ConfigError: naming what is in the way and what to use instead.
    """
    reason = unsupported(facts_of(ctx))
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
            server_args.disaggregation_mode != "null",
            "--disaggregation-mode",
            "requests of a pair belong to two servers",
        ),
        (
            getattr(server_args, "tokenizer_worker_num", 1) > 1,
            "--tokenizer-worker-num",
            "answers are sorted by tokenizer process",
        ),
        (server_args.dp_size > 1, "--dp-size", "each replica has requests of its own"),
    ):
        if present:
            raise ConfigError(
                f"nothing can be computed ahead with {flag}: {way_out}",
                field="--kv-advisory-compute",
                hint=f"Drop one of --kv-advisory-compute and {flag}",
            )
