"""The cache of one rank, without SGLang: its parts, and the operations that concern all its tiers at once.

`patches.adapter.radix_cache` adds the methods that SGLang calls to look up, insert, evict and load.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sglang_ext.engine.cache.faults import CacheFaults
from sglang_ext.engine.cache.listeners import Listeners
from sglang_ext.engine.commands import RankCommandQueue
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.planners import P, Planner, find
from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.hbm_tier import HbmTier
from sglang_ext.engine.tiers.load_policy import Speeds, Unmeasured
from sglang_ext.engine.tiers.promotions import Promotions
from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.engine.weights import Weights
from sglang_ext.mempool.store import Store
from sglang_ext.tiers import Tier

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheParts:
    """The parts of a cache: complete before the cache is made, and unchanged after."""

    store: Store
    """Over an empty tree, whose block size is a multiple of the page size."""
    hbm_tier: HbmTier
    """The cache's slots of this rank's pool."""
    planners: Sequence[Planner] = ()
    """The mechanisms that are on, in the order in which the cache calls and closes them: peers before the
    transfers that they use, all readers of DRAM before DRAM, and DRAM before the disk."""
    speeds: Speeds = field(default_factory=Unmeasured)
    """Of computing and loading."""
    publish: Callable[[RankCache], None] = lambda cache: None
    """Called in each pass of the scheduler; publishes the metrics (`CacheMetrics.update`)."""
    load_min_tokens: int = 0
    """DRAM hits shorter than this are computed instead of loaded."""
    weights: Weights = field(default_factory=Weights)
    """The generation of weights in use."""
    ranks: Ranks = field(default_factory=Ranks)
    """Of the instance; the parts of the tiers are with it already."""
    moves: Moves = field(default_factory=lambda: Moves(Ranks()))
    """Of this rank; they are with `ranks`."""
    commands: RankCommandQueue | None = None
    """For the schedulers of all ranks, in rank 0 of an instance."""
    priority_sign: int = 1
    """-1 where small priorities go first (``--schedule-low-priority-values-first``)."""
    check: bool = False
    """Verify every invariant when the server is idle (slow; for debugging and tests)."""


class RankCache:
    """See the module's docstring. In the scheduler's thread.

    Args:
        allocator: SGLang's, of slots; None for an index alone.
        page_size: tokens of a page of SGLang's pool.
    """

    def __init__(self, parts: CacheParts, allocator: Any, page_size: int) -> None:
        self.token_to_kv_pool_allocator = allocator
        self.page_size = page_size
        self.store = parts.store
        self.tree = parts.store.tree
        self.block_size = self.tree.block_size
        self.hbm_tier = parts.hbm_tier
        self.hbm = parts.hbm_tier.holder
        self.planners = tuple(parts.planners)
        self.write_down = self.find(WriteDown)
        self.dram = None if self.write_down is None else self.write_down.dram
        self.promotions = self.find(Promotions)
        self.transfers = self.find(TransferThread)
        self.peers = self.find(PeerKv)
        self.speeds = parts.speeds
        self._publish = parts.publish
        self.weights = parts.weights
        self.namespace = parts.weights.namespace
        """Where the KV of a tenant's prompts belongs now."""
        self.ranks = parts.ranks
        self.moves = parts.moves
        self.command_queue = parts.commands
        self.listeners = Listeners()
        """Parts that receive the cache's events."""
        self.faults = CacheFaults(strict=parts.check)
        self._check_when_idle = parts.check
        self._checked_state = ""
        # Not "slots": SGLang takes an attribute of that name for the slots of sessions.
        self.slot_ops = parts.hbm_tier.slots
        self.device = torch.device(allocator.device if allocator is not None else "cpu")

    def find(self, kind: type[P]) -> P | None:
        """The planner of a kind; None where its mechanism is off."""
        return find(self.planners, kind)

    def prefill_begins(self, lengths: Sequence[tuple[int, int]], *, loads: bool) -> None:
        """A prefill batch is about to run; its measured cost is weighed against loading."""
        with self.faults.guard("prefill_begins"):
            for planner in self.planners:
                planner.prefill_begins(lengths, loads=loads)

    def prefill_ended(self) -> None:
        """The result of the oldest such batch was processed."""
        with self.faults.guard("prefill_ended"):
            for planner in self.planners:
                planner.prefill_ended()

    def streams_hold(self) -> bool:
        """After a forward pass: whether everything that streamed into it has verified. Only then does the
        KV that it has computed for others count.
        """
        held = self.moves.streams_hold()
        for planner in self.planners:
            planner.pass_ended(held=held)
        return held

    def each_pass(self) -> None:
        """Apply the operations that have completed on every rank, and take the next step of each planner."""
        self.ranks.each_pass()
        for planner in self.planners:
            planner.each_pass()
        self._publish(self)

    @property
    def keeps_awake(self) -> bool:
        """Whether an idle scheduler must not sleep, because KV is brought in ahead of a request, the end of
        an answer is held back, or a snapshot is being sent to a router.
        """
        return any(planner.busy for planner in self.planners)

    @property
    def alarm(self) -> float:
        """The time, by rank 0's clock, at which `expire` must be called; infinite for none."""
        return min((planner.alarm for planner in self.planners), default=math.inf)

    def expire(self, now: float) -> None:
        """Drop expired entries, and begin those that are due. now: rank 0's time."""
        for planner in self.planners:
            planner.expire(now)

    def reset(self) -> None:
        """Forget everything in every tier (``/flush_cache``). SGLang empties the pools itself."""
        self.drop_in_flight()
        for planner in self.planners:
            planner.before_clear()
        self.store.ledger.clear()
        for planner in self.planners:
            planner.clear()

    def drop_in_flight(self) -> None:
        """Give up all transfers between tiers and instances for requests, announced or waiting: returns,
        fetches and exports, hints, prefetches, reads from disk. When this returns, none of their KV arrives.
        """
        self.listeners.before_clear()
        for planner in self.planners:
            planner.drop_in_flight()

    def weights_changing(self) -> None:
        """The model's weights are about to change, and may do so until ``weights_changed``.

        Each generation of weights is a namespace, so KV of older ones never matches again. KV computed
        meanwhile, or by requests that have begun before, belongs to no namespace and is not inserted
        (``RequestRows.namespace_of``).
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
        for planner in self.planners:
            planner.weights_changed(self.weights.generation)

    def settle(self) -> None:
        """Wait until no copy reads or writes the pool, which is about to be unmapped."""
        for planner in self.planners:
            planner.quiesce()

    def blocks_by_tier(self) -> dict[Tier, tuple[int, int]]:
        """Blocks held and blocks that fit, per tier."""
        slots = self.token_to_kv_pool_allocator.size if self.token_to_kv_pool_allocator is not None else 0
        held = {Tier.HBM: (self.tree.blocks_of(self.hbm), slots // self.block_size)}
        for planner in self.planners:
            held.update(planner.blocks())
        return held

    def sanity_check(self) -> None:
        """Called in each idle pass of the scheduler; looks again only after something has changed."""
        for planner in self.planners:
            planner.idle_pass()
        if self._check_when_idle:
            state = repr(self)
            if state != self._checked_state:
                self.check()
                self._checked_state = state

    def check(self) -> None:
        """Verify the invariants of tree and tiers. Raises AssertionError naming the broken one."""
        self.tree.check()
        self.store.ledger.check()
        self.moves.check()
        for planner in self.planners:
            planner.check()

    def release_host_resources(self) -> None:
        """Complete the work in flight, down to the disk, and close all planners."""
        self.listeners.before_end()
        for planner in self.planners:
            planner.close()

    def pretty_print(self) -> None:
        logger.info("%r", self)
        for node in self.tree.nodes():
            logger.info("  %r", node)
