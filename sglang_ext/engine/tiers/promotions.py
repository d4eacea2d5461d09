"""Blocks that a waiting request needs come from disk to DRAM, and are verified, before it is admitted.

The disk index is queried when a request enters the queue. Blocks found there are read into DRAM layer by
layer, lowest layer of all waiting requests first, and enter the tree once all of them verify; meanwhile
requests behind it may go first. From then on they are a DRAM hit like any other, locked until the request is
admitted. Unreadable blocks are computed: a fault of the disk costs time, never an answer.

All methods run in the scheduler's thread, and every rank takes the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from sglang_ext.engine.planners import Planner
from sglang_ext.engine.tiers.disk_reads import DiskReads
from sglang_ext.engine.tiers.promotion import DiskWait, Promoted, Wanted
from sglang_ext.radix_global import RadixTree
from sglang_ext.tiered_store.loading.loader import Loader
from sglang_ext.tiered_store.tier import BlockTier, TierStats
from sglang_ext.tiers import Tier


class Promotions(Planner):
    """The requests that wait for the disk.

    Args:
        tree: the rank's tree.
        tier: the disk.
        loader: reads from it.
        reads: its reads.
    """

    def __init__(self, tree: RadixTree, tier: BlockTier, loader: Loader, reads: DiskReads) -> None:
        self._tree = tree
        self._tier = tier
        self._loader = loader
        self.reads = reads
        self._waits: dict[Hashable, DiskWait] = {}
        self.policy = reads.policy
        self.counters, self.decisions = reads.results.counters, reads.results.decisions

    def begin(self, handle: Hashable, wanted: Wanted) -> DiskWait:
        """Look on the disk for blocks of a prompt that are not in memory, and start reading those that are
        worth it: in the next pass, before any batch is formed.
        """
        self.release(handle)
        wait = self._waits[handle] = DiskWait(handle, wanted)
        self.reads.begin(wait)
        return wait

    def ready(self, handle: Hashable) -> bool:
        """Whether the request need not wait for the disk."""
        return handle not in self._waits or self._waits[handle].ready

    def expected_s(self, handle: Hashable) -> float:
        """Seconds until the blocks for which the request waits have been read, including reads that go first.
        0: unknown.
        """
        wait = self._waits.get(handle)
        return 0.0 if wait is None else self.reads.expected_s(wait)

    def brought(self, handle: Hashable) -> Promoted | None:
        """The KV that a promotion has brought for the request, locked until ``release``; None for none."""
        wait = self._waits.get(handle)
        return None if wait is None else wait.brought(self._tree.block_size)

    def release(self, handle: Hashable) -> None:
        """The request has been admitted or is gone."""
        wait = self._waits.pop(handle, None)
        if wait is not None:
            self.reads.release(wait)

    # -- whole ----------------------------------------------------------------------------------

    def drop_in_flight(self) -> None:
        """Give up every promotion under way and every lock held for a request."""
        for handle in list(self._waits):
            self.release(handle)
        self.reads.drop_in_flight()

    def clear(self) -> None:
        """Give up all promotions, and clear the disk tier."""
        self.drop_in_flight()
        self._tier.clear()

    def close(self) -> None:
        """End, and close the disk. Does not touch the tree."""
        self._loader.close()
        self._tier.close()

    @property
    def block_bytes(self) -> int:
        return self._tier.layout.block_bytes

    def stats(self) -> dict[Tier, TierStats]:
        """The contents and events of each tier below memory."""
        return {part.tier: part.stats() for part in self._tier.parts}

    def blocks(self) -> Mapping[Tier, tuple[int, int]]:
        return {
            tier: (stats.blocks, stats.limit_bytes // self.block_bytes)
            for tier, stats in self.stats().items()
        }

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError that names the inconsistency."""
        waiting = {wait for wait in self._waits.values() if wait.move is not None}
        if waiting != {wait for move in self.reads.open for wait in move.waits}:
            raise AssertionError("requests that wait and promotions under way do not agree")

    def __repr__(self) -> str:
        waiting = sum(wait.move is not None for wait in self._waits.values())
        return f"Promotions({self.reads!r}, waiting={waiting}, {self.counters})"
