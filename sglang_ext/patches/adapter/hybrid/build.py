"""Puts the cache of one rank together for a model with windows or recurrent states."""

from __future__ import annotations

import dataclasses
import logging
import secrets
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.config import KvConfig
from sglang_ext.disagg.numa import place_arena
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.engine.events.router_commands import Replies
from sglang_ext.engine.hybrid.disk import ComponentDisk
from sglang_ext.engine.hybrid.memory import ComponentMemory, Dram
from sglang_ext.engine.hybrid.metrics import HybridMetrics
from sglang_ext.engine.hybrid.sizing import shares
from sglang_ext.engine.hybrid.store import HybridStore, StoredComponent
from sglang_ext.engine.model_identity import config_digest, kv_dtype
from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.opening import open_below
from sglang_ext.engine.weights import Weights
from sglang_ext.keys import Namespace
from sglang_ext.patches.adapter.build_disk import weights_reader
from sglang_ext.patches.adapter.build_transfers import (
    accelerator_place,
    hands_over,
    may_fetch,
    rank_on_server,
    returns_by_name,
    specs_of,
    states_shared,
)
from sglang_ext.patches.adapter.building import least_over, mover_for, report_link, uses_adapters
from sglang_ext.patches.adapter.hbm import Drafts
from sglang_ext.patches.adapter.hybrid.build_cluster import join_cluster
from sglang_ext.patches.adapter.hybrid.build_exchange import Exchange, exchange_of
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache
from sglang_ext.patches.adapter.hybrid.handed_over import handed_over_pools
from sglang_ext.patches.adapter.hybrid.linker import StoreLinker, names_of_prompt
from sglang_ext.patches.adapter.hybrid.pools import ComponentPool, component_pools
from sglang_ext.patches.process import PROCESS
from sglang_ext.tiered_store.loading.loader import Loader
from sglang_ext.tiered_store.loading.write_behind import LagPolicy, WriteBehind

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)

_MOST_BACKLOG_BYTES = 1 << 30
_LOAD_BYTES = 64 << 20


def create_hybrid_radix_cache(ctx: TreeCacheBuildContext, config: KvConfig) -> HybridRadixCache:
    """The cache behind ``--radix-cache-backend global`` for such a model.

    Raises:
        ConfigError: see `component_pools`, and the tiers.
    """
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.mem_cache.utils import get_hash_str

    cache = create_unified_radix_cache(ctx, cache_class=HybridRadixCache)
    assert isinstance(cache, HybridRadixCache)
    if ctx.server_args.disaggregation_mode == "decode":
        # No prompt is computed here, and SGLang's tree matches blocks of HBM alone. DRAM has those that go
        # back to prefill.
        cache.chunks = None
        returns = returns_by_name(config, ctx.server_args, adapters=uses_adapters())
        config = dataclasses.replace(config, dram_size=config.dram_size if returns else 0, disk_path=None)
    if cache.chunks is not None:
        forks = cache.chunks.forks
        logger.info(
            "States are kept where prompts fork %d tokens behind the last one, and before a prompt ends "
            "with %d tokens behind it",
            forks.known,
            forks.ahead,
        )
    if not config.dram_size:
        logger.info("Cache of a model with windows or states: HBM only (--kv-dram-size)")
        join_cluster(ctx, config, cache, Ranks(least_over(ctx.params.tp_cache_group), check=config.check))
        return cache
    # SGLang compiles it at the first call: for up to ten seconds, in which the scheduler would stand still.
    get_hash_str([0])
    build = _Building(ctx, config, cache)
    linker = StoreLinker(build.store, build.pools)
    counter = linker.layer_done_counter
    build.kvcache.register_layer_transfer_counter(counter)
    ctx.tp_worker.register_hicache_layer_transfer_counter(counter)
    if hasattr(ctx.params.req_to_token_pool, "register_layer_transfer_counter"):
        ctx.params.req_to_token_pool.register_layer_transfer_counter(counter)
    publish: dict[str, Any] = {}
    if ctx.params.enable_metrics:
        publish["publish"] = HybridMetrics(rank_on_server()).update
    cache.serve(linker, build.weights, check=config.check, **publish)
    join_cluster(ctx, config, cache, build.ranks, build.exchange)
    logger.info(
        "Cache of a model with windows or states: pages of %d tokens, DRAM of %d chunks for %s, %s",
        ctx.params.page_size,
        build.store.dram.slabs.n_chunks,
        ", ".join(f"{part.memory.arena.per_chunk} blocks of {part.component}" for part in build.parts),
        "a disk tier" if build.store.has_disk else "no disk tier (--kv-disk-path)",
    )
    return cache


class _Building:
    """The parts below the tree."""

    def __init__(self, ctx: TreeCacheBuildContext, config: KvConfig, cache: HybridRadixCache) -> None:
        self.ctx, self.config = ctx, config
        self.kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
        self.drafts = Drafts(PROCESS.drafts)
        pairs = cache.tree_core.is_eagle
        self.names = partial(names_of_prompt, page_size=ctx.params.page_size, pairs=pairs)
        self.behind = int(pairs)
        self.window_tokens = cache.sliding_window_size
        self.pools = component_pools(ctx.params, self.window_tokens, self.drafts)
        self.ranks = Ranks(least_over(ctx.params.tp_cache_group), check=config.check)
        self.shard = f"tp{ctx.tp_rank}of{ctx.tp_size}"
        read = weights_reader(ctx, self.drafts)
        adapters = uses_adapters()
        self.fetches = may_fetch(config, adapters=adapters) or returns_by_name(
            config, ctx.server_args, adapters=adapters
        )
        # KV that leaves this process belongs to weights that others can compare with theirs.
        leaves = self.fetches or config.disk_path is not None
        self.weights = Weights(read() if leaves else "", read if leaves else None)
        self._fresh = secrets.token_hex(8)
        self.loader = Loader(_LOAD_BYTES)
        page = ctx.params.page_size
        dram = Dram(
            {pool.component: pool.layout for pool in self.pools},
            config.dram_size,
            page,
            name=f"dram {config.instance_id} tp{ctx.tp_rank}",
            place=partial(place_arena, config.numa, accelerator_place(ctx.server_args.device).numa),
        )
        report_link(self.pools[0].device, pinned=dram.slabs.arenas[0].pinned)
        self.parts = [self._part(pool, dram.memories[pool.component]) for pool in self.pools]
        self.store = HybridStore(dram, self.parts, page, self.ranks, least_tokens=config.load_min_tokens)

    def exchange(self, epoch: bytes, replies: Replies) -> Exchange | None:
        """The exchange of blocks with other instances; None where none is possible. In every rank at once."""
        if not self.fetches:
            return None
        namespaces = {pool.component: self._namespace(pool) for pool in self.pools}
        return exchange_of(
            self.ctx,
            self.config,
            self.store,
            self.weights,
            namespaces,
            epoch,
            self.drafts,
            self.names,
            self.behind,
            self._handed_over(),
            replies.reply_to_fetch,
        )

    def _handed_over(self) -> list[PoolSpec]:
        """The memory that a prefill server hands over by the same thread."""
        if not hands_over(self.ctx.server_args):
            return []
        states = states_shared(self.ctx.model_config)
        return specs_of(handed_over_pools(self.ctx.params, self.window_tokens, self.drafts, states))

    def _part(self, pool: ComponentPool, memory: ComponentMemory) -> StoredComponent:
        name = f"kv-mover-{pool.component}"
        mover = mover_for(self.ctx, pool, pool.planes_by_layer, memory.arena, name=name)
        copies = Copies(mover, Ranks())
        return StoredComponent(pool.component, memory, copies, self._disk(pool, memory))

    def _disk(self, pool: ComponentPool, memory: ComponentMemory) -> ComponentDisk | None:
        config = self.config
        if config.disk_path is None:
            return None
        sizes = {each.component: each.layout.block_bytes for each in self.pools}
        share = shares(config.disk_size, sizes, self.ctx.params.page_size)[pool.component]
        own = dataclasses.replace(
            config,
            disk_path=str(Path(config.disk_path) / str(pool.component)),
            disk_size=share,
        )
        tier = open_below(own, str(config.instance_id), self.shard, pool.layout)
        assert tier is not None
        writer = None
        if config.writes_disk:
            backlog = min(_MOST_BACKLOG_BYTES, config.dram_size // (2 * len(self.pools)))
            writer = WriteBehind(tier, backlog_bytes=backlog, lag=LagPolicy(config.disk_lag))
        return ComponentDisk(memory, tier, self.loader, partial(self._namespace, pool), writer)

    def _namespace(self, pool: ComponentPool) -> bytes | None:
        """The digest of everything but the tokens that a component's bytes depend on."""
        if self.weights.moving:
            return None
        version = self.weights.version(self.weights.generation)
        if version is None or uses_adapters():
            # No later process can verify that it has the same weights.
            version = f"{version}+{self._fresh}.{self.weights.generation}"
        return Namespace(
            model=config_digest(self.ctx.model_config.hf_config, *self.drafts.configs),
            weights_version=version,
            dtype=kv_dtype(self.ctx.model_config, str(self.kvcache.dtype).removeprefix("torch.")),
            geometry=f"{pool.component}:{pool.layout.facts()}:{pool.facts}:{self._kernels}",
            shard=self.shard,
        ).digest()

    @property
    def _kernels(self) -> str:
        """Backends that lay states out differently, and the algorithm that feeds a draft model."""
        args: Any = self.ctx.server_args
        names = [getattr(args, "linear_attn_backend", ""), getattr(args, "mamba_backend", "")]
        if self.drafts.runners:
            names.append(args.speculative_algorithm)
        return ",".join(map(str, names))
