"""Publishing the state of a rank's cache as metrics (`engine.metric_table`)."""

from __future__ import annotations

import dataclasses

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.cache.rank_cache import RankCache
from sglang_ext.engine.metric_table import cache_table, weighed
from sglang_ext.engine.prefetch.hbm_prefetch import Prefetcher
from sglang_ext.engine.rank_metrics import RankMetrics
from sglang_ext.engine.retraction import Retraction
from sglang_ext.engine.tiers.acked_answers import AckedAnswers
from sglang_ext.engine.tiers.load_back import LoadBack
from sglang_ext.engine.tiers.load_report import LoadDecisions
from sglang_ext.mempool.ledger import Call
from sglang_ext.tiers import Tier

UPDATE_SECONDS = 1.0


class CacheMetrics:
    """Publishes the state of one rank's cache, at most once in ``UPDATE_SECONDS``.

    Args:
        rank: label that tells the ranks of a server apart.
    """

    def __init__(self, rank: int, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._next = 0.0
        self._metrics = RankMetrics(cache_table(), rank)
        self.registry = self._metrics.registry
        self._metrics.count_events("mempool_calls", dict.fromkeys(Call, 0))

    def update(self, cache: RankCache) -> None:
        """Publish ``cache``'s state if it is time to."""
        now = self._clock.monotonic()
        if now < self._next:
            return
        self._next = now + UPDATE_SECONDS
        self._metrics.count_events("mempool_calls", cache.store.calls)
        self._metrics.count_events("faults", cache.faults.counts)
        for tier, (used, capacity) in cache.blocks_by_tier().items():
            self._metrics.set("blocks", used, tier.name)
            self._metrics.set("capacity_blocks", capacity, tier.name)
        self._show_dram(cache)
        self._show_promotions(cache)
        load_back = cache.find(LoadBack)
        if load_back is not None:
            self._decide(Tier.DRAM, load_back.decisions)
        self._show_retraction(cache.find(Retraction))
        self._show_answers(cache.find(AckedAnswers))
        self._show_prefetches(cache.find(Prefetcher))
        for planner in cache.planners:
            planner.show(self._metrics)

    def _show_retraction(self, retraction: Retraction | None) -> None:
        if retraction is not None:
            counted = dataclasses.asdict(retraction.counters)
            tokens = {name: counted.pop(f"{name}_tokens") for name in ("found", "recomputed")}
            self._metrics.count_events("retractions", counted)
            self._metrics.count_events("retracted_tokens", tokens)

    def _show_answers(self, answers: AckedAnswers | None) -> None:
        if answers is not None:
            self._metrics.count_events("acked_answers", answers.counters)
            while answers.waits:
                self._metrics.observe("durability_wait_seconds", answers.waits.popleft())

    def _show_prefetches(self, prefetcher: Prefetcher | None) -> None:
        if prefetcher is not None:
            self._metrics.count_events("prefetches", prefetcher.counters)
            self._metrics.set("announced_prompts", len(prefetcher.retention))
            self._metrics.set("deferred_prompts", prefetcher.prompts.resting)
            self._metrics.count_events("announced_blocks", {"given_up": prefetcher.retention.given_up})

    def _show_dram(self, cache: RankCache) -> None:
        write_down = cache.write_down
        if write_down is None:
            return
        dram = write_down.dram
        blocks = dataclasses.asdict(dram.copies.counters)
        blocks |= {"evicted": dram.evicted, "skipped": write_down.skipped}
        blocks["without_kernel"] = dram.copies.mover.blocks_without_kernel
        self._metrics.count_events("dram_blocks", blocks)
        for disk in dram.below:
            self._metrics.count_events("disk_blocks", dataclasses.asdict(disk.counters))
            self._metrics.set("disk_backlog_bytes", disk.pending_bytes)

    def _show_promotions(self, cache: RankCache) -> None:
        if cache.promotions is None:
            return
        self._metrics.count_events("disk_blocks", dataclasses.asdict(cache.promotions.counters))
        for tier, decisions in cache.promotions.decisions.items():
            self._decide(tier, decisions)
        for tier, stats in cache.promotions.stats().items():
            for verb, counts in (("put", stats.put), ("got", stats.got)):
                for outcome, count in counts.items():
                    self._metrics.count("tier_blocks", count, tier.name, f"{verb}_{outcome.value}")
            self._metrics.count("tier_blocks", stats.evicted, tier.name, "evicted")

    def _decide(self, tier: Tier, decisions: LoadDecisions) -> None:
        for (decision, reason), count in decisions.counts.items():
            self._metrics.count("load_decisions", count, tier.name, decision, reason)
        last = decisions.last
        if last is not None:
            for way, seconds in (("load", last.load_seconds), ("compute", last.compute_seconds)):
                if seconds is not None:
                    self._metrics.set(weighed(tier), seconds, way)
