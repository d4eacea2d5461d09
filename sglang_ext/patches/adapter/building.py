"""The parts that the planners of a rank's cache share, each made when it is first asked for."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from sglang_ext.config import KvConfig
from sglang_ext.disagg.numa import place_arena
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.disagg.transports.select import reasons
from sglang_ext.engine import gpu_link
from sglang_ext.engine.cache.loading import Loading
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.events.events import PlacementFeed
from sglang_ext.engine.events.router_commands import Replies, RouterCommands
from sglang_ext.engine.movers.cuda_mover import CudaMover
from sglang_ext.engine.movers.mover import Mover, ThreadMover
from sglang_ext.engine.movers.slots import slot_ops
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.peers.arena_leases import arena_pool
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.planners import P, Planner
from sglang_ext.engine.ranks import Begin, Later, Least, Ranks
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.opening import open_below
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.engine.weights import Weights
from sglang_ext.errors import ConfigError
from sglang_ext.keys import Namespace
from sglang_ext.mempool.store import Store
from sglang_ext.patches.adapter.build_disk import (
    RankFacts,
    disk_below,
    identity_of,
    weights_reader,
)
from sglang_ext.patches.adapter.build_transfers import (
    accelerator_place,
    context_rank,
    context_ranks,
    endpoint_config,
    hands_over,
    kv_namespace,
    may_fetch,
    on_all_ranks_or_none,
    start_fetching,
    start_transfers,
)
from sglang_ext.patches.adapter.hbm import Drafts, EnginePool
from sglang_ext.patches.adapter.hicache import hicache_store
from sglang_ext.patches.adapter.own_requests import SglangHost
from sglang_ext.patches.process import PROCESS
from sglang_ext.radix_global import Holder, RadixTree, policy_by_name
from sglang_ext.tiered_store.copy import PoolAddresses, PoolCopier, warmup
from sglang_ext.tiered_store.dram.arena import Arena, DramArena, blocks_in, bytes_for
from sglang_ext.tiered_store.tier import BlockTier
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext

logger = logging.getLogger(__name__)


Builders: TypeAlias = Mapping[type[Planner], Callable[["Building"], Planner | None]]
"""The builder of each planner; it returns None where the flags turn the mechanism off."""


class OpenTiers(Protocol):
    """Opens the tiers below memory; see `open_below`."""

    def __call__(self, *, follows: bool) -> BlockTier | None: ...


class Building:
    """A rank's cache while it is put together: each part is made when it is first asked for.

    All ranks ask in the same order, because some parts compare numbers or addresses between the ranks.
    """

    def __init__(self, ctx: TreeCacheBuildContext, config: KvConfig, builders: Builders) -> None:
        self.ctx, self.config = ctx, config
        self.instance = str(config.instance_id)
        self.ranks = ranks_of(ctx, check=config.check)
        # One rank's number for all: an instance has one epoch.
        (self.epoch,) = self.ranks.at_once([secrets.randbits(63)])
        self.store = Store(RadixTree(config.block_size, policy=policy_by_name(config.eviction_policy)))
        self.hbm, self.dram_holder = self.holder(Tier.HBM), self.holder(Tier.DRAM)
        self.kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
        self.drafts = Drafts(PROCESS.drafts)
        self.pool = EnginePool.of(
            self.kvcache,
            ctx.model_config,
            drafts=self.drafts.pools,
            block_tokens=config.block_size,
            page_tokens=ctx.params.page_size,
        )
        self.shard = shard_of(ctx)
        self.host = SglangHost(ctx.params.token_to_kv_pool_allocator)
        first = ctx.tp_rank == ctx.params.pp_rank == context_rank() == 0
        self.commands = RankCommandQueue() if first else None
        self.priority_sign = -1 if small_priorities_first() else 1
        self.fetches = may_fetch(
            config, adapters=uses_adapters(), stages=ctx.params.pp_size, contexts=context_ranks()
        )
        self._builders = builders
        self._made: dict[type[Planner], Planner | None] = {}

    def __repr__(self) -> str:
        return f"Building({self.instance}, {list(self._made.values())})"

    def holder(self, tier: Tier) -> Holder:
        """A tier of this instance in this epoch."""
        return Holder.of(self.instance, self.epoch, tier)

    def find(self, kind: type[P]) -> P | None:
        """The planner of a kind; None where its mechanism is off."""
        if kind not in self._made:
            self._made[kind] = self._builders[kind](self)
        found = self._made[kind]
        assert found is None or isinstance(found, kind)
        return found

    def found(self, kind: type[P]) -> list[P]:
        """The planner of a kind; empty where its mechanism is off."""
        found = self.find(kind)
        return [] if found is None else [found]

    @cached_property
    def moves(self) -> Moves:
        """KV on its way into the rank's memory. The ranks agree on the end of copies first."""
        self.find(WriteDown)
        return Moves(self.ranks)

    @cached_property
    def disk(self) -> BlockTier | None:
        """All tiers below memory, as one."""
        if not self.config.dram_size:
            return None
        layout = self.pool.geometry.layout
        if context_ranks() > 1:
            open_mine = partial(open_below, self.config, self.instance, self.shard, layout)
            return open_in_turn(self.ranks, open_mine, follows=context_rank() > 0)
        store = hicache_store(self.ctx, self.config, self.pool.geometry, model=served_model())
        farther = () if store is None else (store,)
        return open_below(self.config, self.instance, self.shard, layout, farther)

    @cached_property
    def identity(self) -> Namespace | None:
        """The namespace of KV that leaves this process; None where none does."""
        if not self.fetches and self.disk is None:
            return None
        return identity_of(self.ctx, self.pool.geometry, self.shard, self.drafts)

    @cached_property
    def weights(self) -> Weights:
        """The generation of weights in use."""
        if self.identity is None:
            return Weights()
        return Weights(self.identity.weights_version, weights_reader(self.ctx, self.drafts))

    @cached_property
    def arena(self) -> DramArena | None:
        """The memory of the DRAM tier."""
        if not self.config.dram_size:
            return None
        layout = self.pool.geometry.layout
        # A stage with fewer layers has smaller blocks. The trees are alike, so that each has as many blocks.
        (blocks,) = self.ranks.at_once([blocks_in(layout, self.config.dram_size)])
        place = accelerator_place(self.ctx.server_args.device).numa
        return DramArena(
            layout,
            min(self.config.dram_size, bytes_for(layout, blocks)),
            name=f"dram {self.instance} {self.shard}",
            place=partial(place_arena, self.config.numa, place),
        )

    @cached_property
    def most_block_bytes(self) -> int:
        """Bytes of a block in the stage with the most layers."""
        (negative,) = self.ranks.at_once([-self.pool.geometry.layout.block_bytes])
        return -negative

    @cached_property
    def below(self) -> DiskWrites | None:
        """Takes blocks on from DRAM to the disk."""
        if self.disk is None or self.identity is None or self.arena is None:
            return None
        return disk_below(
            self.disk,
            self.config,
            RankFacts(self.instance, self.epoch, adapters=uses_adapters()),
            self.identity,
            self.store.tree,
            self.dram_holder,
            self.arena,
            self.ranks,
            self.weights,
        )

    @property
    def replies(self) -> Replies:
        """Replies to routers; none are sent without routers, and by other ranks than 0."""
        return self.router_commands or Replies()

    @cached_property
    def router_commands(self) -> RouterCommands | None:
        """Commands of routers, and the replies to them; in rank 0."""
        feed = self.find(PlacementFeed)
        if feed is None or self.commands is None:
            return None
        return RouterCommands(self.commands, self.epoch.to_bytes(16, "big"), feed.queue.post)

    @cached_property
    def hbm_tier(self) -> HbmTier:
        """The cache's slots of the pool."""
        allocator = self.ctx.params.token_to_kv_pool_allocator
        slots = slot_ops(torch.device(allocator.device))
        return HbmTier(self.store.ledger, self.hbm, allocator, slots, self.find(WriteDown))

    @cached_property
    def loading(self) -> Loading | None:
        """Brings KV from DRAM to HBM."""
        write_down = self.find(WriteDown)
        if write_down is None:
            return None
        return Loading.over(
            self.store,
            self.hbm_tier,
            write_down,
            self.find(Promotions),
            self.moves,
            self.weights,
            self.ranks,
            always=self.config.load_policy == "always",
        )

    @cached_property
    def transfers_and_endpoints(self) -> tuple[TransferThread | None, tuple[str, ...]]:
        """The transfer thread, and the addresses of all ranks' transfer threads."""
        identity = self.identity if self.fetches else None
        return _transfers_of(self.ctx, self.config, self.pool, self.drafts, self.arena, identity, self.epoch)

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where peers read the ranks' DRAM; none where they may not."""
        return () if self.find(PeerKv) is None else self.transfers_and_endpoints[1]


def _transfers_of(
    ctx: TreeCacheBuildContext,
    config: KvConfig,
    pool: EnginePool,
    drafts: Drafts,
    arena: DramArena | None,
    identity: Namespace | None,
    epoch: int,
) -> tuple[TransferThread | None, tuple[str, ...]]:
    """The transfer thread of a rank that fetches, whose KV is of an identity then, or hands over; and where
    all ranks are asked. None where a rank that only fetches cannot listen.

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
        kv_namespace(kvcache, ctx.model_config, drafts),
        epoch=epoch.to_bytes(16, "big"),
        rank=ctx.params.pp_rank * ctx.tp_size + ctx.tp_rank,
    )
    memory: list[PoolSpec] = []
    if arena is not None and (fetching or config.pd_caching == "3"):
        namespace = identity.digest().hex() if identity is not None else ""
        memory = [arena_pool(arena, pool.geometry, namespace)]
    transfers: TransferThread | None
    if handing_over:
        transfers = start_transfers(endpoint, config, pool, memory)
    else:
        transfers = start_fetching(endpoint, memory)
    return on_all_ranks_or_none(transfers, ctx.params.tp_cache_group)


def open_in_turn(ranks: Ranks, open_tiers: OpenTiers, *, follows: bool) -> BlockTier | None:
    """The tiers below memory of a rank that shares its KV with others: of those, the first opens and writes
    them, and the others follow. Called in every rank at once.

    Raises:
        ConfigError: they cannot be opened, in this rank or in the writing one.
    """
    opened = None
    try:
        opened = None if follows else open_tiers(follows=False)
    except BaseException:
        ranks.at_once([0])  # the others wait for it
        raise
    if ranks.at_once([1]) != [1]:
        if opened is not None:
            opened.close()
        raise ConfigError(
            "the rank that writes to the tiers below DRAM cannot open them",
            field="--kv-disk-path",
            hint="See what it has logged",
        )
    return open_tiers(follows=True) if follows else opened


def small_priorities_first() -> bool:
    from sglang.srt.runtime_context import get_schedule

    return bool(get_schedule().schedule_low_priority_values_first)


def served_model() -> str:
    """The name of the model in answers, by default its path."""
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().served_model_name or "")


def uses_adapters() -> bool:
    from sglang.srt.runtime_context import get_lora

    lora = get_lora()
    return bool(lora.enable_lora or lora.lora_paths)


def shard_of(ctx: TreeCacheBuildContext) -> str:
    """The part of the model that this rank has, as its directory on disk is called; ranks with the same KV
    (``--attn-cp-size``) share one.
    """
    stage = f"pp{ctx.params.pp_rank}of{ctx.params.pp_size}" if ctx.params.pp_size > 1 else ""
    return f"tp{ctx.tp_rank}of{ctx.tp_size}{stage}"


def ranks_of(ctx: TreeCacheBuildContext, *, check: bool) -> Ranks:
    """The ranks of this instance, of all stages. Called in every rank at once.

    Without replicas, SGLang's group of a stage's ranks has those that share a prompt's tokens, too.
    """
    params = ctx.params
    if params.pp_size == 1:
        return Ranks(least_over(params.tp_cache_group), check=check)
    # Of our own: comparisons under way must not meet SGLang's collectives.
    group = torch.distributed.new_group(backend="gloo")
    # SGLang's `pp_loop_size`, the batches under way.
    passes = params.pp_size + ctx.server_args.pp_async_batch_depth
    return Ranks(least_over(group), later=Later(_begin_over(group), passes), check=check)


def _begin_over(group: Any) -> Begin:
    def begin(numbers: Sequence[int]) -> Callable[[], Sequence[int]]:
        vector = torch.tensor(numbers, dtype=torch.int64)
        work = torch.distributed.all_reduce(
            vector, op=torch.distributed.ReduceOp.MIN, group=group, async_op=True
        )

        def result() -> Sequence[int]:
            work.wait()
            found: list[int] = vector.tolist()
            return found

        return result

    return begin


def mover_for(
    ctx: TreeCacheBuildContext,
    rows: PoolAddresses,
    planes: list[list[torch.Tensor]],
    arena: Arena,
    *,
    name: str = "kv-mover",
) -> Mover:
    """The mover between a pool and its memory in DRAM, by the device of the pool.

    Args:
        rows: the pool's planes by address. planes: the same as tensors, by local layer.
        name: of its thread, if it has one.

    Raises:
        ConfigError: there is no mover for this device.
    """
    device = planes[0][0].device.type
    if device == "cpu":
        warmup()
        return ThreadMover(PoolCopier(rows, arena), rows.layout.n_layers, name=name)
    if device == "cuda":
        return CudaMover(planes, arena, ctx.tp_worker.model_runner.forward_stream)
    raise ConfigError(
        f"the DRAM tier does not support KV pools on {device}", field="--kv-dram-size", hint="Set it to 0"
    )


def report_link(device: torch.device, *, pinned: bool) -> None:
    """Log the rates of the link to a GPU, where the pool is in its memory. pinned: whether DRAM is."""
    if device.type == "cuda":
        gpu_link.report(reasons, pinned=pinned)


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
