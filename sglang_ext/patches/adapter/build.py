"""Puts the cache of one rank together, from what SGLang's scheduler knows when it starts."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Final

from sglang_ext.addresses import of_replica
from sglang_ext.config import KvConfig, check_block_size
from sglang_ext.engine.cache.metrics import CacheMetrics
from sglang_ext.engine.cache.rank_cache import CacheParts
from sglang_ext.engine.events.agent import AgentFacts
from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.engine.events.router_commands import RouterCommands
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.mover import LayerGate
from sglang_ext.engine.peers.computed_spans import ComputedSpans
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.prefetch.advice import Advice, fetch_nothing
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.prefetch.layer_fill import LayerFill
from sglang_ext.engine.retraction import DEFAULT_WAIT_SECONDS, Retraction
from sglang_ext.engine.tiers.acked_answers import AckedAnswers
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.load_back import LoadBack
from sglang_ext.engine.tiers.load_policy import Unmeasured
from sglang_ext.engine.tiers.prefill_clock import PrefillClock
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.retention import pressure_policy_by_name
from sglang_ext.engine.tiers.spilled import Spilled
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.errors import ConfigError
from sglang_ext.patches.adapter.admission import unexchanged
from sglang_ext.patches.adapter.build_agent import attach_agent, naming_of
from sglang_ext.patches.adapter.build_disk import (
    acked_by,
    identity_of,
    names_on,
    promotions_from,
)
from sglang_ext.patches.adapter.build_transfers import (
    context_ranks,
    dp_rank,
    engine_rank,
    engine_ranks,
    handover_settings,
    in_step,
    make_peers,
    rank_on_server,
)
from sglang_ext.patches.adapter.building import Builders, Building, mover_for, report_link, uses_adapters
from sglang_ext.patches.adapter.compute_ahead import ComputeAhead
from sglang_ext.patches.adapter.hybrid.pools import has_components
from sglang_ext.patches.adapter.pd.pd_setup import settings_of
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.patches.adapter.support import (
    require_computing,
    require_retracting,
    require_supported,
    wait_for_whole_passes,
    why_not_retracting,
)
from sglang_ext.radix_global.observer import UNOBSERVED
from sglang_ext.tiers import all_tiers

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache

logger = logging.getLogger(__name__)


def create_global_radix_cache(
    ctx: TreeCacheBuildContext, config: KvConfig
) -> GlobalRadixCache | HybridRadixCache:
    """The factory behind ``--radix-cache-backend global``.

    Raises:
        ConfigError: model or flags are not supported; names the flag and what to use instead.
    """
    _require(ctx, config)
    # With DP attention, a replica has some of the ranks that share the rest of the model.
    ctx = dataclasses.replace(ctx, tp_rank=engine_rank(), tp_size=engine_ranks())
    config = of_replica(config, dp_rank())
    if has_components(ctx):
        from sglang_ext.patches.adapter.hybrid.build import create_hybrid_radix_cache

        return create_hybrid_radix_cache(ctx, config)
    build = Building(ctx, config, PLANNERS)
    planners = [found for kind in PLANNERS if (found := build.find(kind)) is not None]
    commands = build.router_commands
    cache = GlobalRadixCache(
        ctx.params,
        CacheParts(
            build.store,
            build.hbm_tier,
            planners,
            speeds=Unmeasured() if build.loading is None else build.loading.speeds,
            publish=CacheMetrics(rank_on_server()).update
            if ctx.params.enable_metrics
            else lambda cache: None,
            load_min_tokens=config.load_min_tokens,
            weights=build.weights,
            ranks=build.ranks,
            moves=build.moves,
            commands=build.commands,
            priority_sign=build.priority_sign,
            check=config.check,
        ),
        build.host,
        build.replies,
    )
    if commands is not None:
        _attach_agent(build, cache, commands)
    arena, disk = build.arena, build.disk
    logger.info(
        "Global KV cache of instance %s, epoch %x: blocks of %d tokens, %s, %s, eviction %s",
        build.instance,
        build.epoch,
        config.block_size,
        f"DRAM for {arena.n_blocks * config.block_size} tokens" if arena else "no DRAM tier (--kv-dram-size)",
        f"below {disk!r}" if disk is not None else "no disk tier (--kv-disk-path)",
        config.eviction_policy,
    )
    return cache


def _require(ctx: TreeCacheBuildContext, config: KvConfig) -> None:
    """Raise ConfigError unless SGLang, the model and the flags support each other."""
    require_supported(ctx, config)
    wait_for_whole_passes(config)
    if config.advisory_compute:
        require_computing(ctx.server_args)
    if config.retract_wait is not None:
        require_retracting(ctx.server_args)
    if not has_components(ctx):  # where a page is a block
        check_block_size(config, ctx.params.page_size)
    own = unexchanged(adapters=uses_adapters(), stages=ctx.params.pp_size, contexts=context_ranks())
    if config.dram_for_others and own is not None:
        raise ConfigError(
            f"KV of {own[0]} is not fetched from other servers, nor kept for them",
            field="--kv-dram-size for-others",
            hint=f"Leave it out, or start without {own[1]}",
        )


def _write_down(build: Building) -> WriteDown | None:
    if build.arena is None:
        return None
    config, ctx = build.config, build.ctx
    # In this order on every rank: both add parts to `Ranks`, and rank 0's feed already needs the tiers below.
    below = build.below
    feed = build.find(PlacementFeed)
    observer = UNOBSERVED if feed is None else feed.log
    mover = mover_for(ctx, build.pool.geometry, build.pool.planes, build.arena)
    report_link(build.pool.device, pinned=build.arena.pinned)
    dram = DramTier(
        build.store.ledger,
        build.hbm,
        build.dram_holder,
        build.arena,
        Copies(mover, build.ranks),
        below=() if below is None else (below,),
        observer=observer,
        pressure=pressure_policy_by_name(config.pressure_policy),
        block_bytes=build.most_block_bytes,
    )
    gate = LayerGate(mover, build.pool.geometry.n_layers)
    build.kvcache.register_layer_transfer_counter(gate)
    behind = build.kvcache.layer_num
    for pool in build.drafts.pools:
        pool.register_layer_transfer_counter(gate.behind(behind))
        behind += pool.layer_num
    ctx.tp_worker.register_hicache_layer_transfer_counter(gate)
    write_down = WriteDown(build.hbm, dram, observer=observer, enabled=config.writes_dram)
    write_down.serve(build.store)
    return write_down


def _spilled(build: Building) -> Spilled | None:
    write_down = build.find(WriteDown)
    if write_down is None or build.find(PeerKv) is None or not build.config.dram_for_others:
        return None
    blocks = build.config.dram_for_others // write_down.dram.block_bytes
    return Spilled(write_down.dram, blocks, build.moves.clock)


def _promotions(build: Building) -> Promotions | None:
    write_down, arena, config = build.find(WriteDown), build.arena, build.config
    if write_down is None or arena is None or build.disk is None or build.below is None:
        return None
    # KV that was pushed to decode while it was computed cannot be taken back; nor can work of other stages.
    pushed = build.ctx.server_args.disaggregation_mode != "null" and config.transfer_mode == "push-by-layer"
    # On a GPU, blocks go to others once the pass has asked for its last layer; a draft's layers come later.
    draft_on_gpu = bool(build.drafts.runners) and build.pool.device.type != "cpu"
    stream = not pushed and not draft_on_gpu and build.ctx.params.pp_size == 1
    return promotions_from(
        build.disk,
        build.below,
        config,
        build.store,
        write_down.dram,
        arena,
        build.moves,
        stream=stream,
    )


def _acked(build: Building) -> AckedAnswers | None:
    write_down = build.find(WriteDown)
    if write_down is None or build.disk is None or build.below is None:
        return None
    return acked_by(build.disk, build.below, build.config, build.store.tree, write_down, build.ranks)


def _transfers(build: Building) -> TransferThread | None:
    # The thread listens from its start on. Whatever may refuse the start of the server is made before.
    for kind in (WriteDown, Promotions, AckedAnswers):
        build.find(kind)
    return build.transfers_and_endpoints[0]


def _peers(build: Building) -> PeerKv | None:
    transfers, write_down = build.find(TransferThread), build.find(WriteDown)
    if not build.fetches or write_down is None or transfers is None:
        return None
    return make_peers(
        build.store,
        write_down,
        transfers,
        build.weights,
        build.ranks,
        build.moves,
        endpoints=len(build.transfers_and_endpoints[1]),
        below=build.found(Promotions),
        on_result=build.replies.reply_to_fetch,
    )


def _computed_spans(build: Building) -> ComputedSpans | None:
    peers, write_down = build.find(PeerKv), build.find(WriteDown)
    if peers is None or write_down is None or build.ctx.server_args.disaggregation_mode != "null":
        return None
    if in_step():  # with those of other replicas, for which a pass could wait that waits for a peer's
        return None
    dram = write_down.dram
    # The KV of a draft model is computed after the pass whose layers a span follows.
    if not dram.copies.mover.streams or build.drafts.runners:
        return None
    return ComputedSpans(
        build.store, dram, peers.leases, peers.exports, build.moves.clock, build.host, peers.wanted
    )


def _load_back(build: Building) -> LoadBack | None:
    return None if build.loading is None else build.loading.load_back


def _prefill_clock(build: Building) -> PrefillClock | None:
    return None if build.loading is None else build.loading.prefill_clock


def _prefetcher(build: Building) -> Prefetcher | None:
    return None if build.loading is None else build.loading.prefetcher


def _layer_fill(build: Building) -> LayerFill | None:
    write_down = build.find(WriteDown)
    if build.loading is None or build.arena is None or write_down is None:
        return None
    return LayerFill.over(
        build.config.layer_region_bytes,
        build.arena.layout,
        build.store,
        write_down.dram,
        build.hbm_tier,
        build.loading.prefetcher,
        build.loading.speeds,
        build.loading.prefill_clock,
    )


def _advice(build: Building) -> Advice | None:
    prefetcher = build.find(Prefetcher)
    if prefetcher is None:
        return None
    peers = build.find(PeerKv)
    return Advice(
        prefetcher,
        build.replies.reply_to_hint,
        fetch_ahead=fetch_nothing if peers is None else peers.fetch_ahead,
        rest=build.found(ComputeAhead),
        priority_sign=build.priority_sign,
    )


def _compute_ahead(build: Building) -> ComputeAhead | None:
    prefetcher = build.find(Prefetcher)
    if prefetcher is None or not build.config.advisory_compute:
        return None
    return ComputeAhead(
        build.store.tree,
        build.hbm,
        build.hbm_tier,
        prefetcher,
        build.weights.namespace,
        build.host,
        build.replies.reply_to_hint,
    )


def _retraction(build: Building) -> Retraction | None:
    config = build.config
    if why_not_retracting(build.ctx.server_args) is not None:
        return None
    wait = DEFAULT_WAIT_SECONDS if config.retract_wait is None else config.retract_wait
    return Retraction(wait, build.ranks)


def _feed(build: Building) -> PlacementFeed | None:
    if build.config.router is None or build.commands is None:
        return None
    holders = [build.holder(tier) for tier in all_tiers() if tier.in_memory]
    names = None if build.below is None else build.below.names
    return PlacementFeed(build.store.tree, holders, names.weights if names is not None else str)


PLANNERS: Final[Builders] = {
    ComputedSpans: _computed_spans,  # the same as PeerKv, on a server that prefills and decodes
    PeerKv: _peers,  # --kv-router and --kv-dram-size
    TransferThread: _transfers,  # the same, or --disaggregation-mode
    PrefillClock: _prefill_clock,  # --kv-dram-size
    LoadBack: _load_back,  # --kv-dram-size
    Prefetcher: _prefetcher,  # --kv-dram-size
    LayerFill: _layer_fill,  # --kv-layer-region-size
    Advice: _advice,  # --kv-dram-size
    ComputeAhead: _compute_ahead,  # --kv-advisory-compute
    WriteDown: _write_down,  # --kv-dram-size
    Spilled: _spilled,  # --kv-dram-size for-others
    Promotions: _promotions,  # --kv-disk-path or another tier below DRAM
    AckedAnswers: _acked,  # --kv-durability acked
    Retraction: _retraction,  # on where SGLang's flags allow it
    PlacementFeed: _feed,  # --kv-router, in rank 0
}
"""Each planner and its builder, which returns None where the flags turn the mechanism off; in the order in
which the cache calls its planners (`CacheParts.planners`)."""


def _attach_agent(build: Building, cache: GlobalRadixCache, commands: RouterCommands) -> None:
    """Start the agent of the instance; see `attach_agent`."""
    ctx, config, names = build.ctx, build.config, None if build.below is None else build.below.names
    epoch = build.epoch.to_bytes(16, "big")
    attach_agent(
        cache,
        ctx.server_args,
        config,
        AgentFacts(build.instance, epoch, config.block_size, naming_of(names) if names else None),
        router_commands=commands,
        named=names_on(build.disk),
        namespace=dataclasses.replace(build.identity, shard="")
        if build.identity is not None
        else identity_of(ctx, build.pool.geometry, "", build.drafts, weights=False),
        settings=settings_of(ctx.model_config, build.kvcache, build.drafts),
        handover=handover_settings(config, ctx.server_args, ctx.params.page_size),
        endpoints=build.endpoints,
        splits=build.find(ComputedSpans) is not None,
    )
