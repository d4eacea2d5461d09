"""The cache of one rank, without SGLang: its parts, and the operations that concern all its tiers at once.

`patches.adapter.radix_cache` adds the methods that SGLang calls to look up, insert, evict and load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from sglang_ext.engine.cache.faults import CacheFaults
from sglang_ext.engine.cache.listeners import Listeners
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.movers.slots import slot_ops
from sglang_ext.engine.prefetch.advice import Advice, Computes, Tell
from sglang_ext.engine.prefetch.due_times import MoveRate
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.prefetch.layer_fill import LayerFill
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.retraction import Retraction
from sglang_ext.engine.tiers.acked_answers import AckedAnswers
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.load_back import LoadBack
from sglang_ext.engine.tiers.load_policy import AgreedSpeeds, DramPolicy, PrefillCost
from sglang_ext.engine.tiers.prefill_clock import PrefillClock
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.weights import Weights
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Holder
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.engine.events.events import PlacementFeed
    from sglang_ext.engine.peers.peer_kv import PeerKv
    from sglang_ext.engine.transfer_thread import TransferThread

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheParts:
    """The parts of a cache: complete before the cache is made, and unchanged after."""

    store: Store
    """Over an empty tree, whose block size is a multiple of the page size."""
    hbm: Holder
    """Stands for this rank's pool."""
    write_down: WriteDown | None = None
    """Copies to DRAM and from there to disk; ``None`` for HBM only."""
    promotions: Promotions | None = None
    """Bring blocks from disk to DRAM; ``None`` without a disk."""
    answers: AckedAnswers | None = None
    """Decides which answers are durable; ``None`` where the ends of answers do not wait for that."""
    retraction: Retraction | None = None
    """Decides which requests give way to requests of a higher priority; ``None`` where that is left to
    SGLang.
    """
    transfers: TransferThread | None = None
    """Moves KV to and from other servers; ``None`` where none are known. The cache ends it."""
    peers: PeerKv | None = None
    """Fetches from other instances and exports to them; ``None`` where that is not possible."""
    feed: PlacementFeed | None = None
    """Sends changes of the tiers to routers; ``None`` without any."""
    tell: Tell | None = None
    """Receives the results of hints; in rank 0, where there are routers."""
    computes: Callable[[RankCache], Computes] | None = None
    """Makes the part that computes announced prompts ahead of their requests; ``None`` where that is not
    wanted.
    """
    publish: Callable[[RankCache], None] | None = None
    """Called in each pass of the scheduler; publishes the metrics (`CacheMetrics.update`)."""
    load_min_tokens: int = 0
    """DRAM hits shorter than this are computed instead of loaded."""
    load_always: bool = False
    """Longer ones are not weighed against computing."""
    weights: Weights = field(default_factory=Weights)
    """The generation of weights in use."""
    ranks: Ranks = field(default_factory=Ranks)
    """Of the instance; the parts of the tiers are with it already."""
    commands: RankCommandQueue | None = None
    """For the schedulers of all ranks, in rank 0 of an instance."""
    priority_sign: int = 1
    """-1 where small priorities go first (``--schedule-low-priority-values-first``)."""
    takes_hints: bool = True
    """Bring KV up for announced requests, where there is DRAM to bring it from."""
    check: bool = False
    """Verify every invariant when the server is idle (slow; for debugging and tests)."""


class RankCache:
    """See the module's docstring. In the scheduler's thread; every part but the tree may be missing.

    Args:
        parts: of the cache.
        allocator: SGLang's, of slots; None for an index alone.
        page_size: tokens of a page of SGLang's pool.
    """

    def __init__(self, parts: CacheParts, allocator: Any, page_size: int) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.page_size = page_size
        self.store = parts.store
        self.tree = parts.store.tree
        self.block_size = self.tree.block_size
        self.hbm = parts.hbm
        self.write_down = parts.write_down
        self.dram = dram = None if parts.write_down is None else parts.write_down.dram
        self.promotions = promotions = parts.promotions
        self.answers = parts.answers
        self.retraction = parts.retraction
        self.transfers = parts.transfers
        self.peers = parts.peers
        self.feed = parts.feed
        self._publish = parts.publish
        self.weights = parts.weights
        self.namespace = parts.weights.namespace
        """Where the KV of a tenant's prompts belongs now."""
        self.ranks = parts.ranks
        self.command_queue = parts.commands
        self.listeners = Listeners()
        """Parts that receive the cache's events."""
        self.faults = CacheFaults(strict=parts.check)
        self._check_when_idle = parts.check
        self._checked_state = ""
        self.device = torch.device(allocator.device if allocator is not None else "cpu")
        # Not "slots": SGLang takes an attribute of that name for the slots of sessions.
        self.slot_ops = slot_ops(self.device)
        self.hbm_tier = HbmTier(self.store, self.hbm, allocator, self.slot_ops, parts.write_down)
        self.prefill_clock: PrefillClock | None = None
        self.speeds: AgreedSpeeds | None = None
        """Of computing and loading, as the ranks have agreed; None without DRAM."""
        self.load_back: LoadBack | None = None
        self.prefetcher: Prefetcher | None = None
        self.advice: Advice | None = None
        """Takes hints at coming requests."""
        if dram is not None:
            cost = promotions.policy.cost if promotions is not None else PrefillCost()
            self.prefill_clock = PrefillClock(cost)
            speeds = self.speeds = AgreedSpeeds(cost, lambda: dram.copies.load_bytes_per_second, parts.ranks)
            policy = DramPolicy(self.block_size, dram.block_bytes, always=parts.load_always, speeds=speeds)
            self.load_back = LoadBack(
                self.store,
                dram,
                promotions,
                None if parts.peers is None else parts.peers.fetches,
                self.hbm,
                self.hbm_tier,
                self.slot_ops,
                policy,
            )
            layers: LayerFill | None = None
            if dram.region is not None:
                layers = LayerFill(
                    self.store, self.hbm, dram, dram.region, self.hbm_tier, speeds, self.prefill_clock
                )
            self.prefetcher = Prefetcher(
                self.store,
                self.hbm,
                dram,
                self.hbm_tier,
                promotions,
                self.namespace,
                rate=MoveRate(parts.ranks),
                layers=layers,
            )
            if parts.takes_hints:
                self.advice = Advice(
                    self.prefetcher,
                    parts.tell,
                    peers=parts.peers,
                    computes=None if parts.computes is None else parts.computes(self),
                    priority_sign=parts.priority_sign,
                )

    def prefill_begins(self, lengths: Sequence[tuple[int, int]], *, loads: bool) -> None:
        """A prefill batch is about to run; its measured cost is weighed against loading."""
        if self.prefill_clock is not None:
            with self.faults.guard("prefill_begins"):
                self.prefill_clock.begins(lengths, loads=loads)

    def prefill_ended(self) -> None:
        """The result of the oldest such batch was processed."""
        if self.prefill_clock is not None:
            with self.faults.guard("prefill_ended"):
                self.prefill_clock.ended()

    def each_pass(self) -> None:
        """Apply the operations that have completed on every rank, and go on with prefetches and fetches."""
        self.ranks.each_pass()
        if self.peers is not None:
            self.peers.report()
        if self.prefetcher is not None:
            self.prefetcher.drain()
        if self.advice is not None:
            self.advice.drain()
        if self.feed is not None:
            self.feed.publish()
        if self._publish is not None:
            self._publish(self)

    @property
    def keeps_awake(self) -> bool:
        """Whether an idle scheduler must not sleep, because KV is brought in ahead of a request, the end of
        an answer is held back, or a snapshot is being sent to a router.
        """
        brings = self.prefetcher is not None and self.prefetcher.busy
        brings = brings or (self.peers is not None and self.peers.busy)
        brings = brings or (self.advice is not None and self.advice.busy)
        brings = brings or (self.answers is not None and self.answers.holding)
        return brings or (self.feed is not None and self.feed.busy)

    def reset(self) -> None:
        """Forget everything in every tier (``/flush_cache``). SGLang empties the pools itself."""
        self.drop_in_flight()
        if self.feed is not None:
            self.feed.clear()
        self.store.clear()
        if self.promotions is not None:
            self.promotions.clear()

    def drop_in_flight(self) -> None:
        """Give up all transfers between tiers and instances for requests, announced or waiting: returns,
        fetches and exports, hints, prefetches, reads from disk. When this returns, none of their KV arrives.
        """
        self.listeners.before_clear()
        if self.peers is not None:
            self.peers.clear()
        if self.advice is not None:
            self.advice.clear()
        if self.prefetcher is not None:
            self.prefetcher.clear()
        if self.promotions is not None:
            self.promotions.settle()

    def weights_changing(self) -> None:
        """The model's weights are about to change, and may do so until ``weights_changed``.

        Each generation of weights is a namespace, so KV of older ones never matches again. KV computed
        meanwhile, or by requests that have begun before, belongs to no namespace (``namespace_of``) and is
        not inserted.
        """
        if not self.weights.moving:
            self.weights.begin()
            self._new_generation()

    def weights_changed(self) -> None:
        """The weights stay as they are now. Every rank is called at once."""
        self.weights.settle()
        self._new_generation()

    def _new_generation(self) -> None:
        self.drop_in_flight()
        if self.feed is not None:
            self.feed.clear(self.weights.generation)

    def settle(self) -> None:
        """Wait until no copy reads or writes the pool, which is about to be unmapped."""
        if self.dram is not None:
            self.dram.copies.settle()

    def blocks_by_tier(self) -> dict[Tier, tuple[int, int]]:
        """Blocks held and blocks that fit, per tier."""
        slots = self.token_to_kv_pool_allocator.size if self.token_to_kv_pool_allocator is not None else 0
        held = {Tier.HBM: (self.tree.blocks_of(self.hbm), slots // self.block_size)}
        if self.dram is not None:
            held[Tier.DRAM] = (self.dram.used_blocks, self.dram.n_blocks)
        if self.promotions is not None:
            for tier, stats in self.promotions.stats().items():
                held[tier] = (stats.blocks, stats.limit_bytes // self.promotions.block_bytes)
        return held

    def sanity_check(self) -> None:
        """Called in each idle pass of the scheduler; looks again only after something has changed."""
        if self.feed is not None:
            self.feed.publish(idle=True)
        if self._check_when_idle:
            state = repr(self)
            if state != self._checked_state:
                self.check()
                self._checked_state = state

    def check(self) -> None:
        """Verify the invariants of tree and tiers. Raises AssertionError naming the broken one."""
        self.tree.check()
        self.store.check()
        if self.feed is not None:
            self.feed.log.check()
        if self.dram is not None:
            self.dram.check()
        if self.promotions is not None:
            self.promotions.check()

    def release_host_resources(self) -> None:
        """Complete the work in flight, down to the disk, and close all parts."""
        self.listeners.before_end()
        if self.peers is not None:
            self.peers.close()
        if self.transfers is not None:
            self.transfers.close()
        if self.dram is not None:
            self.dram.close()
        if self.promotions is not None:
            self.promotions.close()

    def pretty_print(self) -> None:
        logger.info("%r", self)
        for node in self.tree.nodes():
            logger.info("  %r", node)
