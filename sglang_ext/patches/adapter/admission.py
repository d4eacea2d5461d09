"""Decides whether the backends ``global`` can serve a model with its flags: pure, before weights are loaded.

The cache keeps the KV of whole prefixes of full-attention layers: one slot per token in one pool, MHA, GQA,
MLA or MLA with index keys (DSA), and in the pools of draft models, which have the same slots. Windows in a
pool of their own and recurrent states are kept as components (`patches/adapter/hybrid`). A model that keeps
KV otherwise, or brings a prefix cache of its own, is refused at start by name, with the way out. So is every
mode in which a forward pass would not wait for KV that is being loaded;
``tests/engine/cache/test_hicache_guards.py`` gives for each of SGLang's own guards the refusal here, or why
there is none. ``admission`` takes SGLang's ``ModelConfig`` and the flags, and needs no server.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sglang_ext.geometry import BIDIRECTIONAL
from sglang_ext.keys import GROUP_TOKENS
from sglang_ext.tiered_store.hicache import FIELD as HICACHE_FILES

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

BACKEND = "global"
FLAG = f"--radix-cache-backend {BACKEND}"
TRANSFER_FLAG = f"--disaggregation-transfer-backend {BACKEND}"
WHOLE_WINDOWS = "--disable-hybrid-swa-memory"
"""SGLang's flag with which layers with a sliding window keep the KV of every token, in the one pool."""

_STOCK = f"Start without {FLAG} to use SGLang's own cache"
_STREAMING = (
    "SGLang keeps the KV of a streaming session out of the tree until it ends, so that no tier has it. Drop "
    "that flag"
)
_OTHER_TRANSFER = "Use another transfer backend"
_POOLS = frozenset({"MHATokenToKVPool", "MLATokenToKVPool", "DSATokenToKVPool"})
QSA_POOL = "QSATokenToKVPool"
HYBRID_POOLS = frozenset({"DeepSeekV4TokenToKVPool", "HybridLinearKVPool", QSA_POOL, "SWAKVPool"})
_SMALLEST_PAGE = 16
"""Tokens of a page below which blocks of a page cost more than their bytes."""
# NGRAM drafts from the text, and FROZEN_KV_MTP reads the model's KV.
_WITHOUT_OWN_KV = frozenset({None, "NGRAM", "FROZEN_KV_MTP"})
# With these, SGLang hands over the state from which the draft model goes on.
_MOVED_DRAFTS = frozenset({"EAGLE", "EAGLE3", "NEXTN"})
# The KV of these drafts is in the slots of the model's, and in the same blocks. SGLang calls NEXTN EAGLE.
# With windows or states, `hybrid/pools.py` refuses drafts whose KV is elsewhere.
_PACKED_DRAFTS = frozenset({"DFLASH", "DSPARK", "EAGLE", "EAGLE3", "NEXTN", "STANDALONE"})
_WITHOUT_DRAFTS = f"Use one of {', '.join(sorted(_PACKED_DRAFTS))}, or leave that flag out"
# Their attention runs eagerly, layer by layer, so that it waits for a layer that is being loaded. In a full
# graph the wait is recorded at capture and never again; tc_piecewise SGLang turns off beside HiCache.
_WAITING_GRAPHS = frozenset({None, "disabled", "breakable"})
BY_LAYER = "--kv-transfer-mode push-by-layer"
_DEFERRED_DRAFT_KV = "SGLANG_DSPARK_DEFER_CONTEXT_KV"
_REPLAY = "--enable-encoder-swa-bounded-replay"
_EARLY_WRITES = "SGLANG_ENABLE_PREFILL_WAR_READ_DONE"
_LATE_SIZES = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"
_REPLICAS = (
    "Start one server for each replica, behind the router: sglang-ext cluster --colocated N, or "
    "sglang-ext router --worker-urls URL URL"
)


@dataclass(frozen=True)
class Facts:
    """The inputs of the decision, with SGLang's names."""

    caches: bool = True
    """``--radix-cache-backend global``."""
    transfers: bool = False
    """``--disaggregation-transfer-backend global``."""
    is_deepseek_v4: bool = False
    is_minimax_sparse: bool = False
    is_qsa: bool = False
    is_dsa: bool = False
    index_group: int = 1
    """Tokens that share an index key, of a model with DSA."""
    is_hybrid_ssm: bool = False
    is_hybrid_swa: bool = False
    follows_hybrids: bool = True
    """Whether this version of SGLang lets a cache of others be its tree for windows and states."""
    has_whole_layers: bool = True
    """Whether a model with windows has layers without one."""
    has_unlike_windows: bool = False
    """Layers with a window have other heads than the rest, in a form of their own."""
    is_bidirectional: bool = False
    """Tokens attend to those behind them."""
    is_multimodal: bool = False
    block_size: int = GROUP_TOKENS
    kv_with_whole_windows: float | None = None
    """How many times the KV of a long context takes with ``WHOLE_WINDOWS``; None where that does not admit a
    model with sliding windows."""
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
    enable_encoder_swa_bounded_replay: bool = False
    dcp_enabled: bool = False
    enable_kv_cache_sharding: bool = False
    speculative_algorithm: str | None = None
    speculative_draft_window_size: int | None = None
    defers_draft_kv: bool = False
    """DSPARK writes the draft model's KV of a pass in a later pass."""
    radix_eviction_policy: str = "lru"
    dp_size: int = 1
    attn_dp_size: int = 1
    attn_cp_size: int = 1
    enable_dsa_cache_layer_split: bool = False
    pp_size: int = 1
    nnodes: int = 1
    enable_pdmux: bool = False
    dllm_algorithm: str | None = None
    prefill_graphs: str | None = None
    """The backend of the CUDA graphs for prefill."""
    optimistic_prefill_attempts: int = 0
    prefill_war_read_done: bool = False
    post_capture_kv_sizing: bool | None = None
    """``SGLANG_ENABLE_POST_CAPTURE_KV_SIZING``; None where the environment lacks it."""
    is_muse_spark: bool = False
    """SGLang then sets that variable itself where the environment lacks it."""
    by_layer: bool = False
    """``BY_LAYER``."""
    pushes: bool = False
    """``--kv-transfer-mode`` is another one than ``pull``."""
    aggregated: bool = False
    """``--kv-transfer-layout aggregated``."""
    decode_keeps: bool = False
    """``--kv-pd-caching`` 2 or 3."""
    returns: bool = False
    """``--kv-pd-caching`` 3."""
    dram: bool = False
    """Whether there is a DRAM tier, from which KV is loaded in front of forward passes."""
    disk: bool = False
    acked: bool = False
    """``--kv-durability acked``."""
    layer_region: bool = False
    """``--kv-layer-region-size``."""
    hicache: bool = False
    """``--kv-load-policy hicache``."""
    page_size: int | None = None
    """None while SGLang has not resolved it."""
    snapshots_at_ends: bool = False
    """The states of a model are kept where chunks and requests end (``no_buffer``), with pages of a token."""

    @property
    def sizes_kv_late(self) -> bool:
        """Whether SGLang backs the KV pool with memory after it has captured its CUDA graphs."""
        if self.post_capture_kv_sizing is None:
            return self.is_muse_spark
        return self.post_capture_kv_sizing

    @property
    def is_hybrid(self) -> bool:
        """Whether SGLang keeps windows or states beside the KV of every token."""
        return self.is_hybrid_ssm or self.is_hybrid_swa or self.is_deepseek_v4


def admission(config: ModelConfig, flags: Facts) -> str | None:
    """Why the backends cannot serve this model with these flags, with the way out; None when they can."""
    return unsupported(with_model(config, flags))


def with_model(config: ModelConfig, flags: Facts) -> Facts:
    """The facts, extended by the state that the model keeps besides one slot of KV per token."""
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import (
        get_dsa_index_kpool,
        is_deepseek_dsa,
        is_deepseek_v4,
        is_minimax_sparse,
    )

    text = getattr(config.hf_config, "text_config", None) or config.hf_config
    return replace(
        flags,
        is_deepseek_v4=is_deepseek_v4(config.hf_config),
        is_minimax_sparse=is_minimax_sparse(config.hf_config),
        # As SGLang's parse_qsa_profile.
        is_qsa=getattr(text, "indexer_n_heads", None) is not None,
        # As SGLang's apply_muse_spark_env_defaults, which is there from 0.5.23 on.
        is_muse_spark=(config.hf_config.architectures or ("",))[0] == "MuseSparkForConditionalGeneration",
        is_dsa=is_deepseek_dsa(config.hf_config),
        index_group=get_dsa_index_kpool(config.hf_config),
        is_hybrid_ssm=mambaish_config(config) is not None,
        is_hybrid_swa=bool(config.is_hybrid_swa),
        has_whole_layers=not config.is_hybrid_swa or bool(config.full_attention_layer_ids),
        has_unlike_windows=bool(getattr(config, "is_hybrid_swa_compress", False)),
        is_bidirectional=_is_bidirectional(config),
        is_multimodal=config.is_multimodal,
        kv_with_whole_windows=_kv_with_whole_windows(config) if config.is_hybrid_swa else None,
    )


def _is_bidirectional(config: ModelConfig) -> bool:
    described = getattr(config, "embedding_model_spec", None)  # from 0.5.23 on
    both_ways = described is not None and described.bidirectional_attention
    return both_ways or not BIDIRECTIONAL.isdisjoint(config.hf_config.architectures or ())


def _kv_with_whole_windows(config: ModelConfig) -> float | None:
    """All layers over those that keep the KV of every token anyway; None where layers with a window have
    other heads than the rest, which one pool cannot hold, or where SGLang needs its own pool for them."""
    windowed, whole = config.swa_attention_layer_ids, config.full_attention_layer_ids
    widths = (config.swa_head_dim, config.swa_v_head_dim, config.get_swa_num_kv_heads(1))
    uniform = widths == (config.head_dim, config.v_head_dim, config.get_num_kv_heads(1))
    if config.is_hybrid_swa_compress or not uniform or not windowed or not whole:
        return None
    return (len(windowed) + len(whole)) / len(whole)


def unsupported(facts: Facts) -> str | None:
    """The same, where the model's part of the facts is known."""
    if facts.caches:
        reason = (
            _unsupported_model(facts, FLAG, _STOCK)
            or _unsupported_hybrid(facts)
            or _unsupported_parallelism(facts, FLAG)
            or _cut_groups(facts)
            or _unsupported_flags(facts)
            or _unwaiting(facts)
            or _unread(facts)
        )
        if reason is not None:
            return reason
    return _unmovable(facts) if facts.transfers else None


def _cut_groups(facts: Facts) -> str | None:
    """Blocks that end within a group of tokens in which ids of pictures are encoded."""
    if facts.is_multimodal and facts.block_size % GROUP_TOKENS:
        return (
            f"a model that takes pictures needs a --kv-block-size that {GROUP_TOKENS} divides, not "
            f"{facts.block_size}. Use the default"
        )
    return None


def _unmovable(facts: Facts) -> str | None:
    """Why hand-overs between prefill and decode cannot serve the model or the flags."""
    reason = _unsupported_model(facts, TRANSFER_FLAG, _OTHER_TRANSFER)
    reason = reason or _unsupported_parallelism(facts, TRANSFER_FLAG)
    if reason is not None:
        return reason
    if facts.nnodes > 1:
        return f"{TRANSFER_FLAG} does not support --nnodes above 1. Use --tp-size"
    if facts.pp_size > 1 and (reason := _unmovable_stages(facts)) is not None:
        return reason
    if facts.sizes_kv_late:
        return f"{TRANSFER_FLAG} registers the whole pool, of which {_late_sizes(facts)}"
    reason = _unmovable_hybrid(facts)
    if reason is not None:
        return reason
    name = facts.speculative_algorithm
    if name not in _MOVED_DRAFTS | {None, "NGRAM"}:
        return (
            f"{TRANSFER_FLAG} does not move the draft of --speculative-algorithm {name}. Use one of "
            f"{', '.join(sorted(_MOVED_DRAFTS))}, or leave that flag out"
        )
    if facts.by_layer and name in _MOVED_DRAFTS:
        return (
            f"{TRANSFER_FLAG} cannot be combined with {BY_LAYER} and --speculative-algorithm {name}: the "
            f"layers of the draft model are computed after the pass. Use --kv-transfer-mode pull, or push"
        )
    return None


def _unmovable_stages(facts: Facts) -> str | None:
    """Why hand-overs cannot serve the stages of a pipeline; None when they can: each gives and takes the
    layers that it has, when the whole request is computed."""
    keeps = facts.disaggregation_mode == "decode" and facts.decode_keeps
    for present, flag, way_out in (
        (facts.is_hybrid, f"models with {_kind(facts)}", "Use --tp-size"),
        # The first stage alone would know how much decode has of a prompt.
        (facts.pushes, "--kv-transfer-mode push or push-by-layer", "Use --kv-transfer-mode pull"),
        (facts.aggregated, "--kv-transfer-layout aggregated", "Use --kv-transfer-layout blocks"),
        # A stage would wait for blocks from its own disk or DRAM, and the others would not know.
        (keeps, "--kv-pd-caching 2 or 3 on decode", "Use --kv-pd-caching 1, or basic"),
        (facts.returns, "--kv-pd-caching 3", "Use --kv-pd-caching 2 or 1, or basic"),
        (facts.speculative_algorithm is not None, "--speculative-algorithm", "Leave that flag out"),
    ):
        if present:
            return f"{TRANSFER_FLAG} does not support --pp-size above 1 with {flag}. {way_out}"
    return None


def _unmovable_hybrid(facts: Facts) -> str | None:
    """Why hand-overs cannot serve windows or states; None when they can. Blocks of their pools are read
    beside the pages."""
    if not facts.is_hybrid:
        return None
    if not facts.has_whole_layers:
        return (
            f"{TRANSFER_FLAG} does not serve models whose layers all have {_kind(facts)}. {_OTHER_TRANSFER}"
        )
    if facts.decode_keeps and (kept := _not_kept_by_decode(facts)):
        reason = f"{TRANSFER_FLAG} with --kv-pd-caching 2 or 3 does not serve {kept}"
        return f"{reason}. Use --kv-pd-caching 1, or basic{_whole_windows(facts)}"
    for present, flag, way_out in (
        (
            facts.returns and not facts.dram,
            "--kv-pd-caching 3 and no --kv-dram-size",
            "Add --kv-dram-size, by which KV returns, or use --kv-pd-caching 2, 1 or basic",
        ),
        (facts.pushes, "--kv-transfer-mode push or push-by-layer", "Use --kv-transfer-mode pull"),
        (facts.aggregated, "--kv-transfer-layout aggregated", "Use --kv-transfer-layout blocks"),
        (facts.attn_dp_size > 1, "--attn-dp-size above 1", _REPLICAS),
        # Prefill then has the window of a request in a ring, in which two pages may be one.
        (facts.enable_encoder_swa_bounded_replay, _REPLAY, "Leave that flag out"),
    ):
        if present:
            reason = f"{TRANSFER_FLAG} with {flag} does not serve models with {_kind(facts)}. {way_out}"
            return reason + _whole_windows(facts)
    return None


def _late_sizes(facts: Facts) -> str:
    """The end of a refusal, with the way out."""
    if facts.is_muse_spark:
        return f"{_LATE_SIZES}=1 backs a part. SGLang sets it for Muse Spark. Set {_LATE_SIZES}=0 yourself"
    return f"{_LATE_SIZES}=1 backs a part. Unset that variable"


def _not_kept_by_decode(facts: Facts) -> str:
    """The name of KV that decode's tree cannot keep; empty where it can. SGLang refuses pools of two kinds of
    heads, and compressed KV but in its unified layout; the others are not proven."""
    for present, name in (
        (facts.has_unlike_windows, "models whose layers with a window have heads of their own"),
        (facts.is_deepseek_v4, "compressed KV (DeepSeek V4)"),
        (facts.is_qsa, "compressed index keys (QSA)"),
        (facts.index_group > 1, f"index keys (DSA) for groups of {facts.index_group} tokens"),
        (facts.speculative_algorithm is not None, f"models with {_kind(facts)} and --speculative-algorithm"),
    ):
        if present:
            return name
    return ""


def _kind(facts: Facts) -> str:
    return "states" if facts.is_hybrid_ssm else "sliding windows"


def _unsupported_parallelism(facts: Facts, chosen: str) -> str | None:
    """Why this kind of parallelism does not go with the flag ``chosen``, with the way out; None when it does.

    A replica is an instance of its own. With DP attention all replicas step together; one whose pass waits
    for KV delays the others only, because nothing that it waits for needs a step of theirs.
    """
    if facts.attn_cp_size > 1 and (reason := _unsupported_context(facts, chosen)) is not None:
        return reason
    for size, flag in ((facts.dp_size, "--dp-size"), (facts.attn_dp_size, "--attn-dp-size")):
        if size == 1:
            continue
        other_backend = facts.disaggregation_mode != "null" and not facts.transfers
        for present, other in (
            (other_backend, "--disaggregation-mode by another transfer backend"),
            (facts.pp_size > 1, "--pp-size above 1"),
            (facts.nnodes > 1, "--nnodes above 1"),
        ):
            if present:
                return f"{chosen} cannot be combined with {flag} above 1 and {other}. {_REPLICAS}"
    if facts.attn_dp_size > 1 and facts.speculative_algorithm is not None:
        return (
            f"{chosen} cannot be combined with --attn-dp-size above 1 and --speculative-algorithm. "
            f"Drop one of them"
        )
    return None


def unexchanged(*, adapters: bool, stages: int, contexts: int) -> tuple[str, str] | None:
    """The KV that a server exchanges with no peer, and the flag that has it so; None where it does.

    Names of adapters mean something on one server only. With stages of a pipeline, `Exports` acts on its
    state of the moment, not on its proposal. Each of the ranks with the same KV reads from one of the peer's.

    Args:
        stages, contexts: sizes of pipeline and prefill context parallelism.
    """
    for present, of, flag in (
        (adapters, "LoRA adapters", "--enable-lora"),
        (stages > 1, "stages", "--pp-size"),
        (contexts > 1, "ranks that share the tokens of a prompt", "--attn-cp-size"),
    ):
        if present:
            return of, flag
    return None


def _unsupported_context(facts: Facts, chosen: str) -> str | None:
    """Why prefill context parallelism does not go with the flag ``chosen``; None when it does.

    Its ranks share the tokens of a prompt while it is computed, and gather the KV, so that each has that of
    all tokens: one of them writes to disk. Caches that keep another part of it in each rank are refused
    elsewhere.
    """
    if chosen == TRANSFER_FLAG:
        return f"{chosen} cannot be combined with --attn-cp-size above 1. Use --tp-size instead"
    name = facts.speculative_algorithm
    for present, flag, way_out in (
        (facts.disaggregation_mode != "null", "--disaggregation-mode", "Use --tp-size instead"),
        (facts.attn_dp_size > 1, "--attn-dp-size above 1", "Use one of them"),
        (facts.dp_size > 1, "--dp-size above 1", _REPLICAS),
        (facts.pp_size > 1, "--pp-size above 1", "Use one of them"),
        # Ranks on another host do not see the writing rank's directory.
        (facts.nnodes > 1, "--nnodes above 1", "Use one node"),
        # SGLang runs some drafts without context parallelism, as ranks that share heads.
        (name not in {None, "NGRAM"}, f"--speculative-algorithm {name}", "Leave that flag out"),
        (facts.acked, "--kv-durability acked", "Use disk instead"),
    ):
        if present:
            return f"{chosen} cannot be combined with --attn-cp-size above 1 and {flag}. {way_out}"
    return None


def _unwaiting(facts: Facts) -> str | None:
    """Modes in which a batch would read KV before it is there, or KV would be kept before it is written."""
    if facts.enable_pdmux:
        return f"{FLAG} cannot be combined with --enable-pdmux. Drop that flag"
    if facts.dllm_algorithm is not None:
        return f"{FLAG} does not serve diffusion language models (--dllm-algorithm). {_STOCK}"
    if facts.sizes_kv_late:
        return f"{FLAG} keeps prefixes of the whole pool, of which {_late_sizes(facts)}"
    if facts.pp_size > 1:
        for present, flag, way_out in (
            # The first stage holds the ends of answers back, and does not know the disks of the others.
            (facts.acked, "--kv-durability acked", "Use disk instead"),
            # Stages with other layers would keep other ones.
            (facts.layer_region, "--kv-layer-region-size", "Leave that flag out"),
        ):
            if present:
                return f"{flag} cannot be combined with --pp-size above 1. {way_out}"
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


def _unread(facts: Facts) -> str | None:
    """KV that HiCache keeps in other files than those that we read: one for each page and rank."""
    if not facts.hicache:
        return None
    for present, unread in (
        (facts.is_hybrid, f"models with {_kind(facts)}, which HiCache keeps in files of their own"),
        (facts.is_dsa, "models with index keys (DSA), which HiCache keeps in files of their own"),
        (
            facts.speculative_algorithm in _PACKED_DRAFTS,
            f"--speculative-algorithm {facts.speculative_algorithm}: HiCache keeps the draft model's KV in "
            f"files of its own",
        ),
        (facts.pp_size > 1, "--pp-size above 1, with which a file has the layers of one stage"),
        (facts.attn_cp_size > 1, "--attn-cp-size above 1, with which the names of files have the rank"),
    ):
        if present:
            return f"{HICACHE_FILES} does not support {unread}. Leave that setting out"
    return None


def _unsupported_hybrid(facts: Facts) -> str | None:
    """Why the tiers below SGLang's own tree cannot serve windows or states; None when they can."""
    if not facts.is_hybrid:
        return None
    kind = _kind(facts)
    apart = facts.disaggregation_mode != "null"
    if not facts.has_whole_layers:
        return f"{FLAG} does not serve models whose layers all have {kind}. {_STOCK}"
    for present, flag, way_out in (
        (apart and not facts.transfers, "--disaggregation-mode", _STOCK),
        # SGLang then has decode's windows begin where its cached prefix ends.
        (
            facts.disaggregation_mode == "decode" and facts.is_hybrid_swa and facts.page_size == 1,
            "--disaggregation-mode decode and --page-size 1",
            "Add --page-size 64",
        ),
        (facts.acked, "--kv-durability acked", "Use disk instead"),
        (facts.pp_size > 1, "--pp-size above 1", "Use --tp-size instead"),
        # The ranks may share the heads of states.
        (facts.attn_cp_size > 1, "--attn-cp-size above 1", "Use --tp-size instead"),
    ):
        if present:
            return f"{FLAG} with {flag} does not serve models with {kind}. {way_out}{_whole_windows(facts)}"
    small = facts.page_size is not None and facts.page_size < _SMALLEST_PAGE
    if facts.dram and small and not facts.snapshots_at_ends:
        return (
            f"--kv-dram-size with {kind} needs pages of at least {_SMALLEST_PAGE} tokens: a page is a block. "
            f"Add --page-size 64"
        )
    return None


def _whole_windows(facts: Facts) -> str:
    if facts.is_hybrid_ssm or facts.is_deepseek_v4 or facts.kv_with_whole_windows is None:
        return ""
    return (
        f". Or add {WHOLE_WINDOWS}, with which layers with a window keep the KV of every token: that of a "
        f"long context takes up to {facts.kv_with_whole_windows:.1f} times the memory"
    )


def _unsupported_model(facts: Facts, chosen: str, way_out: str) -> str | None:
    hybrids = not facts.follows_hybrids
    kinds = (
        # Before the kinds that these are made of.
        (hybrids and facts.is_deepseek_v4, "the compressed KV and sliding windows of DeepSeek V4"),
        (facts.is_minimax_sparse, "sparse attention with an index cache (MSA)"),
        # The keys of an unfinished group are in memory of the request, which no tier keeps. With states, a
        # prompt is resumed after whole pages, and those after whole groups.
        (
            facts.is_dsa and facts.index_group > 1 and (hybrids or not facts.is_hybrid_ssm),
            f"index keys (DSA) for groups of {facts.index_group} tokens",
        ),
        (hybrids and facts.is_hybrid_ssm, "Mamba or other state-space layers"),
        (hybrids and facts.is_hybrid_swa, "sliding-window attention"),
    )
    found = [kind for present, kind in kinds if present]
    if facts.is_bidirectional:
        return (
            f"{chosen} does not serve models with bidirectional attention: KV of a prefix depends on the "
            f"tokens behind it. Start without {FLAG}, and with --disable-radix-cache: without that flag, the "
            f"server ends at the second prompt with the same beginning"
        )
    if found == ["sliding-window attention"] and facts.kv_with_whole_windows is not None:
        return (
            f"{chosen} does not serve models with {found[0]}. Add {WHOLE_WINDOWS}, with which layers "
            f"with a window keep the KV of every token: that of a long context takes up to "
            f"{facts.kv_with_whole_windows:.1f} times the memory. Or: {way_out}"
        )
    if found:
        return f"{chosen} does not serve models with {found[0]}. {way_out}"
    if facts.kv_pool not in (_POOLS | HYBRID_POOLS if facts.is_hybrid else _POOLS):
        return (
            f"{chosen} does not serve the KV pool {facts.kv_pool} of this model and --kv-cache-dtype "
            f"(it serves {', '.join(sorted(_POOLS))}). {way_out}"
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
        (facts.enable_streaming_session, "--enable-streaming-session", _STREAMING),
        (facts.enable_unified_memory, "--enable-unified-memory", "Drop that flag"),
        (facts.enable_hisparse, "--enable-hisparse", "Drop that flag"),
        (facts.dcp_enabled, "--dcp-size above 1", "Use --tp-size instead"),
        (facts.enable_kv_cache_sharding, "--enable-kv-cache-sharding", "Drop that flag"),
        (facts.enable_dsa_cache_layer_split, "--enable-dsa-cache-layer-split", "Drop that flag"),
    )
    for present, flag, way_out in rivals:
        if present:
            return f"{FLAG} cannot be combined with {flag}. {way_out}"
    if facts.speculative_algorithm not in _WITHOUT_OWN_KV | _PACKED_DRAFTS:
        return (
            f"{FLAG} cannot be combined with --speculative-algorithm {facts.speculative_algorithm}: the "
            f"draft model's KV is not kept. {_WITHOUT_DRAFTS}"
        )
    if facts.speculative_algorithm in _PACKED_DRAFTS and facts.pp_size > 1:
        return (
            f"{FLAG} cannot be combined with --pp-size above 1 and --speculative-algorithm "
            f"{facts.speculative_algorithm}: the last stage alone has the draft model. Use --tp-size instead"
        )
    if facts.speculative_draft_window_size is not None:
        return (
            f"{FLAG} cannot be combined with --speculative-draft-window-size: the draft model then keeps its "
            f"KV by request. Drop that flag"
        )
    if facts.defers_draft_kv:
        return f"{FLAG} cannot be combined with {_DEFERRED_DRAFT_KV}=1. Unset that variable"
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
