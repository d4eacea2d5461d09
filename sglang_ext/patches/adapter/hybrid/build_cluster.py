"""Makes the cache of a model with windows or states a member of a cluster: index, hints, and its agent."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.config import KvConfig, check_block_size
from sglang_ext.engine.cache.refusals import Refusals
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.events.agent import AgentFacts
from sglang_ext.engine.events.router_commands import Replies, RouterCommands
from sglang_ext.engine.hybrid.names import LEAST_PAGE, ListsNamespace, PartNames, naming_of_pages
from sglang_ext.engine.hybrid.store import HybridStore
from sglang_ext.engine.model_identity import config_digest, kv_dtype
from sglang_ext.engine.peers.peer_kv import Peers
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.prefetch.advice import Advice, fetch_nothing
from sglang_ext.engine.prefetch.disk_hints import DiskHints, Known
from sglang_ext.engine.ranks import Ranks
from sglang_ext.keys import Namespace, decode_tokens
from sglang_ext.patches.adapter.build_agent import attach_agent
from sglang_ext.patches.adapter.build_transfers import handover_settings
from sglang_ext.patches.adapter.building import uses_adapters
from sglang_ext.patches.adapter.hbm import Drafts
from sglang_ext.patches.adapter.hybrid.announcing import Announcing
from sglang_ext.patches.adapter.hybrid.build_exchange import Exchange
from sglang_ext.patches.adapter.hybrid.linker import names_of_key
from sglang_ext.patches.adapter.pd.pd_setup import settings_of
from sglang_ext.patches.process import PROCESS
from sglang_ext.protocol.agent import Naming
from sglang_ext.radix_global import Holder
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

    from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache


START = str(0)
"""The name of the weights of the start, as `Announcing` publishes it: their generation."""
MakeExchange: TypeAlias = Callable[[bytes, Replies], Exchange | None]
"""Makes a rank's exchange with other instances, by the epoch of its own."""


def join_cluster(
    ctx: TreeCacheBuildContext,
    config: KvConfig,
    cache: HybridRadixCache,
    ranks: Ranks,
    make_exchange: MakeExchange = lambda epoch, replies: None,
) -> None:
    """Have routers know the instance of a cache, which is empty, and other instances exchange blocks with it.

    Raises:
        ConfigError: see `check_block_size` and `attach_agent`.
    """
    if config.router is None:
        _exchange_alone(ctx, cache, ranks, make_exchange)
        return
    check_block_size(config, ctx.params.page_size)
    # One rank's number for all: an instance has one epoch.
    (epoch,) = ranks.at_once([secrets.randbits(63)])
    announcing = commands = None
    replies = Replies()
    # Requests of a decode server find nothing in its DRAM, from which KV returns to prefill.
    store = None if ctx.server_args.disaggregation_mode == "decode" else cache.store
    named: dict[Tier, PartNames] = {}
    if ctx.tp_rank == 0 and ctx.params.pp_rank == 0:
        named = names_below(store, lambda: cache.weights.generation == 0)
        announcing, commands = _announcing(config, cache, store, epoch, named), RankCommandQueue()
        replies = RouterCommands(commands, epoch.to_bytes(16, "big"), announcing.feed.queue.post)
    exchange = make_exchange(epoch.to_bytes(16, "big"), replies)
    hints = hints_of(cache, store, replies, None if exchange is None else exchange.peers)
    # A planner that carries out more commands of routers goes in front of the refusals.
    planners: list[Planner] = [Refusals(replies, hints=bool(hints)), *hints]
    if exchange is not None:
        planners = [exchange.peers, exchange.transfers, *planners]
    if announcing is not None:
        planners += [announcing, announcing.feed]
    cache.join(planners, announcing, commands, replies=replies, ranks=ranks)
    if isinstance(replies, RouterCommands):
        kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
        naming = _naming(store, named, pairs=cache.tree_core.is_eagle)
        if naming is None:
            for names in named.values():
                names.watch(lambda stored, removed: None)
        attach_agent(
            cache,
            ctx.server_args,
            config,
            AgentFacts(str(config.instance_id), epoch.to_bytes(16, "big"), config.block_size, naming),
            router_commands=replies,
            named=named if naming is not None else {},
            keeps_states=cache.chunks is not None,
            namespace=_identity(ctx, cache),
            settings=settings_of(ctx.model_config, kvcache, Drafts(PROCESS.drafts)),
            handover=handover_settings(config, ctx.server_args, ctx.params.page_size),
            endpoints=() if exchange is None else exchange.endpoints,
        )


def _exchange_alone(
    ctx: TreeCacheBuildContext, cache: HybridRadixCache, ranks: Ranks, make_exchange: MakeExchange
) -> None:
    """Exchange blocks with instances that no router names: the blocks that decode returns to prefill."""
    (epoch,) = ranks.at_once([secrets.randbits(63)])
    exchange = make_exchange(epoch.to_bytes(16, "big"), Replies())
    if exchange is not None:
        first = ctx.tp_rank == 0 and ctx.params.pp_rank == 0
        commands = RankCommandQueue() if first else None
        cache.join([exchange.peers, exchange.transfers], commands=commands)


def _announcing(
    config: KvConfig,
    cache: HybridRadixCache,
    store: HybridStore | None,
    epoch: int,
    named: Mapping[Tier, PartNames],
) -> Announcing:
    tiers = [Tier.HBM] if store is None else [Tier.HBM, Tier.DRAM]
    if named:
        tiers.append(Tier.DISK)
    holders = {tier: Holder.of(str(config.instance_id), epoch, tier) for tier in tiers}
    return Announcing(cache, holders, config.block_size, store)


def names_below(store: HybridStore | None, in_use: Callable[[], bool]) -> dict[Tier, PartNames]:
    """The tiers below DRAM in which each component can list its blocks. in_use: as for `PartNames`."""
    disks = [] if store is None else [part.disk for part in store.parts.values() if part.disk is not None]
    listed = [
        {tier.tier: tier for tier in disk.tier.parts if isinstance(tier, ListsNamespace)} for disk in disks
    ]
    return {
        tier: PartNames([(disk, each[tier]) for disk, each in zip(disks, listed, strict=True)], in_use)
        for tier in (listed[0] if listed else ())
        if all(tier in each for each in listed)
    }


def _naming(store: HybridStore | None, named: Mapping[Tier, PartNames], *, pairs: bool) -> Naming | None:
    """The names by which routers find pages on disk; None where there are none."""
    if store is None or not named or store.block_tokens < LEAST_PAGE:
        return None
    return naming_of_pages(store, START, pairs=pairs, adapters=uses_adapters())


def hints_of(
    cache: HybridRadixCache, store: HybridStore | None, replies: Replies, peers: Peers | None
) -> list[Planner]:
    """The planners of advisory requests; none without DRAM, to which a hint could bring anything."""
    if store is None:
        return []
    from sglang_ext.patches.adapter.building import small_priorities_first

    def lookup(tokens: bytes, extra_key: str | None, cache_salt: str | None) -> Known:
        ids = decode_tokens(tokens)
        if cache.weights.moving or not len(ids) or ids.min() < 0:
            return Known(0, ())  # ids of pictures cannot be had back from an encoded prompt
        key = RadixKey(array("q", ids.tolist()), cache.extra_key_of(extra_key), cache_salt=cache_salt)
        names = names_of_key(key, cache.page_size, pairs=cache.tree_core.is_eagle)
        found = cache.match_prefix(MatchPrefixParams(key=key)).device_prefix_len
        return Known(found, names[found // cache.page_size :])

    hints = DiskHints(store, lookup)
    fetch = fetch_nothing if peers is None else peers.fetch_ahead
    sign = -1 if small_priorities_first() else 1
    return [hints, Advice(hints, replies.reply_to_hint, fetch_ahead=fetch, priority_sign=sign)]


def _identity(ctx: TreeCacheBuildContext, cache: HybridRadixCache) -> Namespace:
    """The properties that KV of this instance shares with KV that may take its place."""
    kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    parts = () if cache.store is None else cache.store.parts.values()
    return Namespace(
        model=config_digest(ctx.model_config.hf_config, *Drafts(PROCESS.drafts).configs),
        weights_version=cache.weights.version(0) or "",
        dtype=kv_dtype(ctx.model_config, str(kvcache.dtype).removeprefix("torch.")),
        geometry=",".join(f"{part.component}:{part.memory.arena.layout.facts()}" for part in parts),
        shard="",
    )
