"""Hangs the tiers below memory of one rank below its DRAM tier."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_ext.config import KvConfig
from sglang_ext.engine.events.agent import ListsNames
from sglang_ext.engine.model_identity import config_digest, kv_dtype, weights_digest
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.acked_answers import AckedAnswers
from sglang_ext.engine.tiers.block_names import BlockNames, FollowsPrompts
from sglang_ext.engine.tiers.disk_reads import DiskReads
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.load_policy import DiskPolicy
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.weights import Weights
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import Geometry
from sglang_ext.keys import Namespace
from sglang_ext.mempool.store import Store
from sglang_ext.patches.adapter.build_transfers import context_ranks, in_step
from sglang_ext.patches.adapter.hbm import Drafts
from sglang_ext.patches.adapter.pd.pd_setup import on_all_ranks
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiered_store.dram.arena import DramArena
from sglang_ext.tiered_store.loading.loader import Loader
from sglang_ext.tiered_store.loading.write_behind import LagPolicy, WriteBehind
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier
from sglang_ext.tiers import Tier

logger = logging.getLogger(__name__)

_MOST_BACKLOG_BYTES = 1 << 30
_LOAD_BYTES = 64 << 20
"""Bytes being read at once: enough to keep a disk busy with reads of a whole layer each."""


@dataclass(frozen=True)
class RankFacts:
    """Facts about the rank that names of blocks depend on. adapters: whether LoRA is on."""

    instance: str
    epoch: int
    adapters: bool = False


def weights_reader(ctx: Any, drafts: Drafts) -> Callable[[], str]:
    """Returns what digests the weights as they are, on which the KV of this rank depends: those of its model
    and of its draft models, whose KV is in a block too. Where ranks share all layers but attention, as the
    replicas of DP attention and the ranks with the same KV (``--attn-cp-size``) do, those of all ranks of the
    server, in all of them at once, so that they have the same digest.

    The reader raises when weights cannot be read, on all ranks.
    """
    models = [ctx.tp_worker.model_runner.model, *drafts.models]
    if not in_step() and context_ranks() == 1:
        return partial(weights_digest, *models)
    from sglang.srt.runtime_context import get_parallel

    group = get_parallel().tp_group.cpu_group

    def read() -> str:
        try:
            own = weights_digest(*models)
        except Exception:
            logger.exception("the weights of this rank cannot be read")
            own = ""
        parts = on_all_ranks(own.encode(), group)
        if not all(parts):
            raise RuntimeError("the weights of a rank cannot be read")
        return hashlib.blake2b(b" ".join(parts), digest_size=16, person=b"kv-weights-all").hexdigest()

    return read


def identity_of(
    ctx: Any, geometry: Geometry, shard: str, drafts: Drafts, *, weights: bool = True
) -> Namespace:
    """The properties that all KV of this rank shares with KV that may take its place.

    weights: read them all, which is what tells them apart; without, the identity is for people.
    """
    return Namespace(
        model=config_digest(ctx.model_config.hf_config, *drafts.configs),
        weights_version=weights_reader(ctx, drafts)() if weights else "",
        dtype=kv_dtype(ctx.model_config, geometry.planes[0].dtype),
        geometry=geometry.layout.facts(),
        shard=shard,
    )


def names_on(disk: BlockTier | None) -> dict[Tier, ListsNames]:
    """The tiers below memory that can list their blocks."""
    parts = () if disk is None else disk.parts
    return {part.tier: part for part in parts if isinstance(part, ListsNames)}


def disk_below(
    disk: BlockTier,
    config: KvConfig,
    facts: RankFacts,
    identity: Namespace,
    tree: RadixTree,
    dram: Holder,
    arena: DramArena,
    ranks: Ranks,
    weights: Weights,
) -> DiskWrites:
    """The writes that take blocks on from DRAM to ``disk``."""
    holder = Holder.of(facts.instance, facts.epoch, Tier.DISK)
    names = BlockNames(
        identity,
        tree.block_size,
        holder,
        f"{facts.epoch:x}",
        adapters=facts.adapters,
        weights=weights,
        followers=[part for part in disk.parts if isinstance(part, FollowsPrompts)],
    )
    writer = WriteBehind(
        disk,
        backlog_bytes=min(_MOST_BACKLOG_BYTES, arena.n_blocks * arena.block_bytes // 2),
        lag=LagPolicy(config.disk_lag),
    )
    return DiskWrites(
        tree,
        dram,
        holder,
        names,
        writer,
        BlockMemory.of_arena(arena),
        ranks,
        write=config.writes_disk,
        renewals=lambda: sum(part.renewals for part in disk.parts),
    )


def promotions_from(
    disk: BlockTier,
    below: DiskWrites,
    config: KvConfig,
    store: Store,
    dram_tier: DramTier,
    arena: DramArena,
    moves: Moves,
    *,
    stream: bool,
) -> Promotions:
    """Promotions from ``disk`` to DRAM, and on to the forward pass where that can ``stream``."""
    stream = stream and dram_tier.copies.mover.streams and config.disk_admission == "first-layer"
    policy = DiskPolicy(
        config.block_size,
        arena.block_bytes,
        least_tokens=config.load_min_tokens,
        always=config.load_policy == "always",
        overlaps=stream,
    )
    loader, memory = Loader(_LOAD_BYTES), BlockMemory.of_arena(arena)
    reads = DiskReads(store, dram_tier, below, disk, loader, memory, policy, moves, stream=stream)
    return Promotions(store.tree, disk, loader, reads)


def acked_by(
    disk: BlockTier, below: DiskWrites, config: KvConfig, tree: RadixTree, write_down: WriteDown, ranks: Ranks
) -> AckedAnswers | None:
    """The record of durable answers, where the ends of answers wait for the disk; None elsewhere.

    Raises:
        ConfigError: blocks on ``disk`` would not be found after a restart.
    """
    if config.acked_behind is None:
        return None
    for lost, why, way_out in (
        (
            not disk.durable,
            f"{disk.tier.title} does not outlive the server",
            "Choose another tier below DRAM",
        ),
        (below.names.adapters, "a restart does not find the KV of LoRA adapters", "Drop --enable-lora"),
    ):
        if lost:
            raise ConfigError(
                why, field="--kv-durability", hint=f"{way_out}, or choose disk instead of acked"
            )
    return AckedAnswers(
        tree,
        write_down,
        below,
        disk,
        ranks,
        behind=config.acked_behind,
        timeout=config.durability_timeout,
    )
