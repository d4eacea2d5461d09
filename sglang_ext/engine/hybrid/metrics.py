"""Publishing the state of a hybrid model's tiers, under the names of the plain cache's metrics.

Blocks of all components count alike, though they differ in size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.hybrid.store import HybridStore
from sglang_ext.engine.metric_table import cache_table
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.rank_metrics import RankMetrics
from sglang_ext.tiers import Tier

UPDATE_SECONDS = 1.0


class HybridMetrics:
    """Publishes the state of one rank's store, at most once in ``UPDATE_SECONDS``.

    Args:
        rank: label that tells the ranks of a server apart.
    """

    def __init__(self, rank: int, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._next = 0.0
        self._metrics = RankMetrics(cache_table(), rank)
        self.registry = self._metrics.registry

    def update(self, store: HybridStore, faults: Mapping[str, int], planners: Sequence[Planner] = ()) -> None:
        """Publish the state of ``store`` and of planners if it is time to."""
        now = self._clock.monotonic()
        if now < self._next:
            return
        self._next = now + UPDATE_SECONDS
        parts, counters = store.parts.values(), store.counters
        self._metrics.set("blocks", sum(len(part.memory) for part in parts), Tier.DRAM.name)
        self._metrics.set("capacity_blocks", store.dram.capacity_blocks, Tier.DRAM.name)
        self._metrics.count_events(
            "dram_blocks",
            {
                "written": counters.saved,
                "skipped": counters.skipped,
                "loaded": counters.loaded,
                "evicted": sum(part.memory.evicted for part in parts),
                "without_kernel": sum(part.copies.mover.blocks_without_kernel for part in parts),
            },
        )
        self._metrics.count_events("faults", faults)
        for planner in planners:
            planner.show(self._metrics)
        disks = [part.disk for part in parts if part.disk is not None]
        if not disks:
            return
        self._metrics.set("blocks", sum(disk.tier.stats().blocks for disk in disks), Tier.DISK.name)
        self._metrics.set("disk_backlog_bytes", sum(disk.pending_bytes for disk in disks))
        self._metrics.count_events(
            "disk_blocks", {"promoted": counters.promoted, "read_failed": counters.unreadable}
        )
