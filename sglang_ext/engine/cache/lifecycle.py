"""What concerns all tiers of a rank's cache at once: emptying, new weights, waiting, checking, ending."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.engine.cache.listeners import Listeners
    from sglang_ext.engine.events.events import PlacementFeed
    from sglang_ext.engine.peers.peer_kv import PeerKv
    from sglang_ext.engine.prefetch.advice import Advice
    from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
    from sglang_ext.engine.tiers.dram_tier import DramTier
    from sglang_ext.engine.tiers.promotions import Promotions
    from sglang_ext.engine.transfer_thread import TransferThread
    from sglang_ext.engine.weights import Weights
    from sglang_ext.mempool import MemPool
    from sglang_ext.mempool.store import Store

logger = logging.getLogger(__name__)


class CacheLifecycle:
    """The part of the cache that does that. Every part but the tree may be missing."""

    store: Store
    tree: RadixTree
    block_size: int
    token_to_kv_pool_allocator: Any
    dram: DramTier | None
    promotions: Promotions | None
    prefetcher: Prefetcher | None
    advice: Advice | None
    peers: PeerKv | None
    transfers: TransferThread | None
    pool: MemPool | None
    feed: PlacementFeed | None
    listeners: Listeners
    weights: Weights
    _behind_peers: dict[Any, Any]
    hbm: Holder
    _check_when_idle: bool
    _checked_state: str

    def namespace(self, extra_key: str | None, cache_salt: str | None) -> Hashable:
        raise NotImplementedError

    @property
    def keeps_awake(self) -> bool:
        """Whether an idle scheduler must not sleep, because something is brought in ahead of a request, or a
        router is being told all there is.
        """
        brings = self.prefetcher is not None and self.prefetcher.busy
        brings = brings or (self.peers is not None and self.peers.busy)
        brings = brings or (self.advice is not None and self.advice.busy)
        return brings or (self.feed is not None and self.feed.busy)

    def reset(self) -> None:
        """Forget everything in every tier (``/flush_cache``). SGLang empties the pools itself."""
        self.drop_in_flight()
        if self.feed is not None:
            self.feed.clear()
        if self.pool is not None:
            self.pool.reset()
        self.store.clear()
        if self.promotions is not None:
            self.promotions.clear()

    def drop_in_flight(self) -> None:
        """Give up what is on its way between tiers and instances for requests, announced or waiting: returns,
        fetches and loans, hints, prefetches, reads from disk. When this returns, nothing of it arrives.
        """
        self.listeners.before_clear()
        if self.peers is not None:
            self.peers.clear()
        if self.advice is not None:
            self.advice.clear()
        if self.prefetcher is not None:
            self.prefetcher.clear()
        # Requests that wait for a peer would have the disk looked at in the namespace they were queued in.
        self._behind_peers.clear()
        if self.promotions is not None:
            self.promotions.settle()

    def weights_changing(self) -> None:
        """The model's weights are about to change, and may do so until ``weights_changed``.

        Each generation of weights is a namespace, so what older ones computed never matches again. What is
        computed meanwhile, or has begun before, is nobody's (``_namespace_of``).
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
        if self.pool is not None:
            self.pool.namespace = self.namespace(None, None)

    def settle(self) -> None:
        """Wait until no copy reads or writes the pool, which is about to be unmapped."""
        if self.dram is not None:
            self.dram.settle()

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
        """Verify the invariants of tree and tiers. Raises AssertionError naming what is wrong."""
        self.tree.check()
        self.store.check()
        if self.feed is not None:
            self.feed.log.check()
        if self.dram is not None:
            self.dram.check()
        if self.promotions is not None:
            self.promotions.check()

    def release_host_resources(self) -> None:
        """Bring what is in flight to its end, down to the disk."""
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
