"""Puts the cache of one rank together, from what SGLang's scheduler knows when it starts."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.config import KvConfig, check_block_size
from sglang_ext.disagg.numa import place_arena
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.engine.cache.metrics import CacheMetrics
from sglang_ext.engine.cache.rank_cache import CacheParts
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.events.agent import AgentFacts
from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.engine.events.router_commands import RouterCommands
from sglang_ext.engine.model_identity import weights_digest
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.cuda_mover import CudaMover
from sglang_ext.engine.movers.mover import LayerGate, Mover, ThreadMover
from sglang_ext.engine.peers.fetch_link import arena_pool
from sglang_ext.engine.ranks import Least, Ranks
from sglang_ext.engine.retraction import DEFAULT_WAIT_SECONDS, Retraction
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.opening import open_below
from sglang_ext.engine.tiers.retention import pressure_policy_by_name
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.engine.weights import Weights
from sglang_ext.errors import ConfigError
from sglang_ext.keys import Namespace
from sglang_ext.mempool.store import Store
from sglang_ext.patches.adapter.build_agent import attach_agent, naming_of
from sglang_ext.patches.adapter.build_disk import (
    RankFacts,
    acked_by,
    disk_below,
    identity_of,
    names_on,
    promotions_from,
)
from sglang_ext.patches.adapter.build_transfers import (
    accelerator_place,
    endpoint_config,
    handover_settings,
    hands_over,
    kv_namespace,
    make_peers,
    may_fetch,
    on_all_ranks_or_none,
    start_fetching,
    start_transfers,
)
from sglang_ext.patches.adapter.compute_ahead import compute_ahead
from sglang_ext.patches.adapter.hbm import EnginePool, layer_map
from sglang_ext.patches.adapter.own_requests import SglangHost
from sglang_ext.patches.adapter.pd_setup import settings_of
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.patches.adapter.support import (
    require_computing,
    require_retracting,
    require_supported,
    wait_for_whole_passes,
    why_not_retracting,
)
from sglang_ext.radix_global import Holder, RadixTree, policy_by_name
from sglang_ext.tiered_store.copy import PoolCopier, warmup
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiers import Tier, all_tiers

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)


def create_global_radix_cache(ctx: TreeCacheBuildContext, config: KvConfig) -> GlobalRadixCache:
    """The factory behind ``--radix-cache-backend global``.

    Raises:
        ConfigError: model or flags are not supported; names the flag and what to use instead.
    """
    require_supported(ctx, config)
    wait_for_whole_passes(config)
    if config.advisory_compute:
        require_computing(ctx.server_args)
    if config.retract_wait is not None:
        require_retracting(ctx.server_args)
    check_block_size(config, ctx.params.page_size)
    params = ctx.params
    instance = str(config.instance_id)
    ranks = Ranks(least_over(params.tp_cache_group), check=config.check)
    # One rank's number for all: an instance has one epoch.
    (epoch,) = ranks.at_once([secrets.randbits(63)])
    tree = RadixTree(config.block_size, policy=policy_by_name(config.eviction_policy))
    store = Store(tree)
    hbm = Holder.of(instance, epoch, Tier.HBM)
    kvcache = params.token_to_kv_pool_allocator.get_kvcache()
    pool = EnginePool.of(
        kvcache, ctx.model_config, block_tokens=config.block_size, page_tokens=params.page_size
    )
    geometry = pool.geometry
    dram = write_down = promotions = answers = arena = below = disk = feed = router_commands = peers = None
    splits = False
    host = SglangHost(params.token_to_kv_pool_allocator)
    commands = RankCommandQueue() if ctx.tp_rank == 0 and params.pp_rank == 0 else None
    shard = f"tp{ctx.tp_rank}of{ctx.tp_size}"
    fetches = may_fetch(config, adapters=_uses_adapters())
    if config.dram_for_others and not fetches:
        raise ConfigError(
            "KV of LoRA adapters is not fetched from other servers, nor kept for them",
            field="--kv-dram-size for-others",
            hint="Leave it out, or start without --enable-lora",
        )
    if config.dram_size:
        disk = open_below(config, instance, shard, geometry.layout)
    identity, weights = None, Weights()
    if fetches or disk is not None:
        identity = identity_of(ctx, geometry, shard)
        runner = ctx.tp_worker.model_runner
        weights = Weights(identity.weights_version, lambda: weights_digest(runner.model))
    if config.dram_size:
        arena = DramArena(
            geometry.layout,
            config.dram_size,
            name=f"dram {instance} tp{ctx.tp_rank}",
            place=partial(place_arena, config.numa, accelerator_place(ctx.server_args.device).numa),
        )
        mover = _mover_for(ctx, pool, arena)
        holder = Holder.of(instance, epoch, Tier.DRAM)
        if disk is not None and identity is not None:
            facts = RankFacts(instance, epoch, adapters=_uses_adapters())
            below = disk_below(disk, config, facts, identity, tree, holder, arena, ranks, weights)
    names = below.names if below is not None else None
    if config.router is not None and commands is not None:
        holders = [Holder.of(instance, epoch, tier) for tier in all_tiers() if tier.in_memory]
        feed = PlacementFeed(tree, holders, names.weights if names is not None else str)
        router_commands = RouterCommands(commands, epoch.to_bytes(16, "big"), feed.post)
    if arena is not None:
        observer = None if feed is None else feed.log
        dram = DramTier(
            store,
            hbm,
            holder,
            arena,
            Copies(mover, ranks),
            below=below,
            observer=observer,
            pressure=pressure_policy_by_name(config.pressure_policy),
            layers=config.layer_region_bytes,
            for_others=config.dram_for_others // arena.block_bytes if fetches else 0,
        )
        write_down = WriteDown(store, hbm, dram, observer=observer, enabled=config.writes_dram)
        if disk is not None and below is not None:
            # What has been pushed while it was computed cannot be taken back.
            mode = ctx.server_args.disaggregation_mode
            stream = mode == "null" or config.transfer_mode != "push-by-layer"
            promotions = promotions_from(disk, below, config, tree, dram, holder, arena, ranks, stream=stream)
            answers = acked_by(disk, below, config, tree, write_down, ranks)
        gate = LayerGate(mover, layer_map([pool]).n_layers)
        kvcache.register_layer_transfer_counter(gate)
        ctx.tp_worker.register_hicache_layer_transfer_counter(gate)
    transfers, addresses = _transfers_of(ctx, config, pool, arena, identity if fetches else None, epoch)
    endpoints: tuple[str, ...] = ()
    if fetches and write_down is not None and transfers is not None:
        endpoints = addresses
        tell = None if router_commands is None else router_commands.reply_to_fetch
        splits = write_down.dram.copies.streams and ctx.server_args.disaggregation_mode == "null"
        peers = make_peers(
            write_down,
            transfers,
            weights,
            ranks,
            endpoints=len(endpoints),
            disk=promotions,
            tell=tell,
            host=host if splits else None,
        )

    cache = GlobalRadixCache(
        params,
        CacheParts(
            store,
            hbm,
            write_down,
            promotions,
            answers=answers,
            retraction=_retraction(ctx, config, ranks),
            transfers=transfers,
            peers=peers,
            feed=feed,
            tell=None if router_commands is None else router_commands.reply_to_hint,
            computes=compute_ahead if config.advisory_compute else None,
            publish=CacheMetrics(ctx.tp_rank).update if params.enable_metrics else None,
            load_min_tokens=config.load_min_tokens,
            load_always=config.load_policy == "always",
            weights=weights,
            ranks=ranks,
            commands=commands,
            priority_sign=-1 if _small_priorities_first() else 1,
            check=config.check,
        ),
        host,
        router_commands,
    )
    if router_commands is not None:
        attach_agent(
            cache,
            ctx.server_args,
            config,
            AgentFacts(
                instance, epoch.to_bytes(16, "big"), config.block_size, naming_of(names) if names else None
            ),
            router_commands=router_commands,
            named=names_on(disk),
            namespace=dataclasses.replace(identity, shard="")
            if identity is not None
            else identity_of(ctx, geometry, "", weights=False),
            settings=settings_of(ctx.model_config, kvcache),
            handover=handover_settings(config, ctx.server_args, params.page_size),
            endpoints=endpoints,
            splits=splits,
        )
    logger.info(
        "Global KV cache of instance %s, epoch %x: blocks of %d tokens, %s, %s, eviction %s",
        instance,
        epoch,
        config.block_size,
        f"DRAM for {arena.n_blocks * config.block_size} tokens" if arena else "no DRAM tier (--kv-dram-size)",
        f"below {disk!r}" if disk is not None else "no disk tier (--kv-disk-path)",
        config.eviction_policy,
    )
    return cache


def _transfers_of(
    ctx: TreeCacheBuildContext,
    config: KvConfig,
    pool: EnginePool,
    arena: DramArena | None,
    identity: Namespace | None,
    epoch: int,
) -> tuple[TransferThread | None, tuple[str, ...]]:
    """The transfer thread of a rank that fetches, whose KV is of an identity then, or hands over; and where
    all ranks are asked. None where one that only fetches cannot listen.

    Raises:
        ConfigError: it hands over, and cannot.
    """
    handing_over = hands_over(ctx.server_args)
    fetching = identity is not None and arena is not None
    if not fetching and not handing_over:
        return None, ()
    kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    endpoint = endpoint_config(
        config,
        ctx.server_args,
        kv_namespace(kvcache, ctx.model_config),
        epoch=epoch.to_bytes(16, "big"),
        rank=ctx.tp_rank,
    )
    dram: PoolSpec | None = None
    if arena is not None and (fetching or config.pd_caching == "3"):
        dram = arena_pool(arena, pool.geometry, identity.digest().hex() if identity is not None else "")
    transfers: TransferThread | None
    if handing_over or dram is None:
        transfers = start_transfers(endpoint, config, pool, dram)
    else:
        transfers = start_fetching(endpoint, dram)
    return on_all_ranks_or_none(transfers, ctx.params.tp_cache_group)


def _retraction(ctx: TreeCacheBuildContext, config: KvConfig, ranks: Ranks) -> Retraction | None:
    if why_not_retracting(ctx.server_args) is not None:
        return None
    wait = DEFAULT_WAIT_SECONDS if config.retract_wait is None else config.retract_wait
    return Retraction(wait, ranks)


def _small_priorities_first() -> bool:
    from sglang.srt.runtime_context import get_schedule

    return bool(get_schedule().schedule_low_priority_values_first)


def _uses_adapters() -> bool:
    from sglang.srt.runtime_context import get_lora

    lora = get_lora()
    return bool(lora.enable_lora or lora.lora_paths)


def _mover_for(ctx: TreeCacheBuildContext, pool: EnginePool, arena: DramArena) -> Mover:
    device = pool.device
    if device.type == "cpu":
        warmup()
        return ThreadMover(PoolCopier(pool.geometry, arena), layer_map([pool]).n_layers)
    if device.type == "cuda":
        return CudaMover(pool.planes, arena, ctx.tp_worker.model_runner.forward_stream)
    raise ConfigError(
        f"the DRAM tier does not support KV pools on {device.type}",
        field="--kv-dram-size",
        hint="Set it to 0",
    )


def least_over(group: Any) -> Least | None:
    """How the ranks of ``group`` compare their numbers; None where there is one."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return None

    def least(numbers: Sequence[int]) -> Sequence[int]:
        vector = torch.tensor(numbers, dtype=torch.int64)
        torch.distributed.all_reduce(vector, op=torch.distributed.ReduceOp.MIN, group=group)
        found: list[int] = vector.tolist()
        return found

    return least
