"""The cache's Prometheus metrics, in the scheduler process; the server's ``/metrics`` shows them.

SGLang runs Prometheus in its multi-process mode, in which every process writes its values to files that the
HTTP process reads. A metric therefore has to be made after SGLang has set that mode up, and reaches
``/metrics`` from whatever registry it is in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.cache.rank_cache import RankCache
from sglang_ext.engine.tiers.load_report import LoadDecisions
from sglang_ext.mempool.store import Call
from sglang_ext.stages import REQUEST_BUCKETS, metric_name
from sglang_ext.tiers import Tier, tiers_below

UPDATE_SECONDS = 1.0


class CacheMetrics:
    """Publishes the state of one rank's cache, at most once in ``UPDATE_SECONDS``.

    Args:
        rank: label that tells the ranks of a server apart.
        clock: seconds, monotonic.
    """

    def __init__(self, rank: int, clock: Clock | None = None) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        registry = CollectorRegistry()
        self._clock = clock or SystemClock()
        self._next = 0.0
        self._rank = str(rank)
        self._seen: dict[tuple[str, str], int] = {}
        self._decided: dict[tuple[str, str, str], int] = {}

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(
                metric_name("cache", name),
                text,
                [*labels, "tp_rank"],
                registry=registry,
                multiprocess_mode="mostrecent",
            )

        def events(name: str, text: str) -> Counter:
            return Counter(metric_name("cache", name), text, ["event", "tp_rank"], registry=registry)

        self._blocks = gauge("blocks", "Blocks that a tier holds.", "tier")
        self._capacity = gauge("capacity_blocks", "Blocks that a tier can hold.", "tier")
        self._announced = gauge("announced_prompts", "Prompts whose requests are expected (hints).")
        self._deferred = gauge(
            "deferred_prompts",
            "Of them, those that get no HBM yet because their requests come later (earliest_s).",
        )
        self._region = gauge(
            "layer_region_blocks",
            "Blocks of HBM that hold the lowest layers of announced sessions instead of whole blocks.",
        )
        self._spilled = {
            "blocks": gauge("spilled_blocks", "Blocks of DRAM that are kept for other instances."),
            "bytes": gauge("spilled_bytes", "Bytes of DRAM that are kept for other instances."),
        }
        self._backlog = gauge("disk_backlog_bytes", "Bytes in DRAM that wait to be written to disk.")
        self._weighed = {
            tier: gauge(
                f"{tier.name}_weighed_seconds",
                f"The newest decision to load from {tier.title} or to compute: how long each was expected to "
                "take.",
                "way",
            )
            for tier in tiers_below(Tier.HBM)
        }
        self._decisions = Counter(
            metric_name("cache", "load_decisions"),
            "Requests whose KV was found in a tier below HBM, by what was decided: load, compute, or both "
            "(the head is loaded while the tail is computed), and why.",
            ["tier", "decision", "reason", "tp_rank"],
            registry=registry,
        )
        self._tier_blocks = Counter(
            metric_name("cache", "tier_blocks"),
            "Blocks that a tier below DRAM was to take (put) or to give (got), by how that ended, and those "
            "that it evicted.",
            ["tier", "event", "tp_rank"],
            registry=registry,
        )
        self._answers = Counter(
            metric_name("cache", "acked_answers"),
            "Answers whose end waited for the disk (--kv-durability acked), by what it was told with: "
            "durable, behind (as the flag allows), late, refused (by the disk), lost, or uncached.",
            ["end", "tp_rank"],
            registry=registry,
        )
        self._waits = Histogram(
            metric_name("cache", "durability_wait_seconds"),
            "How long ends of answers were held back until they were durable.",
            ["tp_rank"],
            buckets=REQUEST_BUCKETS,
            registry=registry,
        )
        self._fetched = Counter(
            metric_name("cache", "fetched_bytes"),
            "Bytes of KV read from other instances, by the transport that brought them.",
            ["transport", "tp_rank"],
            registry=registry,
        )
        self._calls = Counter(
            metric_name("cache", "mempool_calls"),
            "Calls of the memory pool (MemServe, table 1).",
            ["call", "tp_rank"],
            registry=registry,
        )
        for call in Call:
            self._calls.labels(call.value, self._rank)
        self._faults = Counter(
            metric_name("cache", "faults"),
            "Calls of SGLang's scheduler that failed in the cache, and were treated as a miss.",
            ["call", "tp_rank"],
            registry=registry,
        )
        self._events = {
            "prefetch": events(
                "prefetches",
                "Prompts that were to be brought to HBM ahead of their request, by how that ended.",
            ),
            "announced": events(
                "announced_blocks",
                "Blocks of announced prompts: given up although they were held back (given_up), in any tier, "
                "and computed ahead of their request (computed).",
            ),
            "layers": events(
                "layer_region_block_layers",
                "Single layers of blocks in HBM: brought ahead of a request (filled), copied to its slots "
                "when it was admitted (used), or given up for something else (given_up).",
            ),
            "retraction": events(
                "retractions",
                "Running requests that gave way to one of a higher priority (retracted) and run again "
                "(resumed); requests of a higher priority that waited instead, because that was expected to "
                "be short (avoided); decisions that failed (error).",
            ),
            "retracted": events(
                "retracted_tokens",
                "Tokens of retracted requests that run again: their KV was found, or recomputed.",
            ),
            "dram": events(
                "dram_blocks",
                "Blocks written to DRAM, loaded from it, brought to HBM ahead of a request (prefetched), "
                "evicted from it, or skipped because it was full of locked blocks.",
            ),
            "spilled": events(
                "spilled_blocks_events",
                "Blocks of other instances: kept for them in idle DRAM, used by requests here, exported to "
                "peers again, or given up because the DRAM was needed.",
            ),
            "peers": events(
                "peers",
                "KV from other instances: blocks fetched from them (fetch_streamed: those of them that the "
                "other one computed meanwhile) and exported to them (exported, not_exported, given_back; "
                "from_disk: read for that), "
                "or computed for them (span_computed, span_failed), and fetches by how they ended.",
            ),
            "disk": events(
                "disk_blocks",
                "Blocks written below DRAM, not written because that was behind (write_skipped) or refused "
                "them (write_failed); found there and promoted to DRAM (streamed: those of them that a "
                "forward pass did not wait for) or brought straight to HBM, left for computing (recomputed, "
                "no_room), not readable (read_failed) or given up (late).",
            ),
        }

    def update(self, cache: RankCache) -> None:
        """Publish ``cache``'s state if it is time to."""
        now = self._clock.monotonic()
        if now < self._next:
            return
        self._next = now + UPDATE_SECONDS
        for call, count in cache.store.calls.items():
            self._calls.labels(call.value, self._rank).inc(count - self._seen.get(("calls", call), 0))
            self._seen["calls", call] = count
        self._count_faults(cache.faults.counts)
        for tier, (used, capacity) in cache.blocks_by_tier().items():
            self._blocks.labels(tier.name, self._rank).set(used)
            self._capacity.labels(tier.name, self._rank).set(capacity)
        if cache.dram is not None:
            self._count("dram", dataclasses.asdict(cache.dram.counters))
            self._count("spilled", dataclasses.asdict(cache.dram.spilled.counters))
            self._spilled["blocks"].labels(self._rank).set(cache.dram.spilled.shown)
            self._spilled["bytes"].labels(self._rank).set(cache.dram.spilled.shown * cache.dram.block_bytes)
            if cache.dram.region is not None:
                self._count("layers", dataclasses.asdict(cache.dram.region.counters))
                self._region.labels(self._rank).set(cache.dram.region.blocks)
            if cache.dram.below is not None:
                self._count("disk", dataclasses.asdict(cache.dram.below.counters))
                self._backlog.labels(self._rank).set(cache.dram.below.pending_bytes)
        if cache.promotions is not None:
            self._count("disk", dataclasses.asdict(cache.promotions.counters))
            for tier, decisions in cache.promotions.decisions.items():
                self._decide(tier, decisions)
            for tier, stats in cache.promotions.stats().items():
                for what, counts in (("put", stats.put), ("got", stats.got)):
                    for outcome, count in counts.items():
                        self._count_tier(tier, f"{what}_{outcome.value}", count)
                self._count_tier(tier, "evicted", stats.evicted)
        if cache.load_back is not None:
            self._decide(Tier.DRAM, cache.load_back.decisions)
        if cache.retraction is not None:
            counted = dataclasses.asdict(cache.retraction.counters)
            tokens = {name: counted.pop(f"{name}_tokens") for name in ("found", "recomputed")}
            self._count("retraction", counted)
            self._count("retracted", tokens)
        if cache.answers is not None:
            for end, count in cache.answers.counters.items():
                self._answers.labels(end.value, self._rank).inc(
                    count - self._seen.get(("answers", end.value), 0)
                )
                self._seen["answers", end.value] = count
            while cache.answers.waits:
                self._waits.labels(self._rank).observe(cache.answers.waits.popleft())
        if cache.peers is not None:
            self._count("peers", cache.peers.fetches.counts())
            self._count("peers", dataclasses.asdict(cache.peers.exports.counters))
            self._count("peers", dataclasses.asdict(cache.peers.spans.counters))
            for transport, count in cache.peers.transport_bytes.items():
                more = count - self._seen.get(("bytes", transport), 0)
                self._fetched.labels(transport, self._rank).inc(max(0, more))
                self._seen["bytes", transport] = count
        if cache.prefetcher is not None:
            self._count("prefetch", {end.value: count for end, count in cache.prefetcher.counters.items()})
            self._announced.labels(self._rank).set(len(cache.prefetcher.retention))
            self._deferred.labels(self._rank).set(cache.prefetcher.resting)
            self._count("announced", {"given_up": cache.prefetcher.retention.given_up})
        if cache.advice is not None and cache.advice.computes is not None:
            self._count("announced", {"computed": cache.advice.computes.blocks})

    def _count_faults(self, counts: Mapping[str, int]) -> None:
        for call, count in counts.items():
            self._faults.labels(call, self._rank).inc(count - self._seen.get(("faults", call), 0))
            self._seen["faults", call] = count

    def _count_tier(self, tier: Tier, event: str, count: int) -> None:
        more = count - self._seen.get((tier.name, event), 0)
        if more > 0:
            self._tier_blocks.labels(tier.name, event, self._rank).inc(more)
            self._seen[tier.name, event] = count

    def _decide(self, tier: Tier, decisions: LoadDecisions) -> None:
        for (decision, reason), count in decisions.counts.items():
            more = count - self._decided.get((tier.name, decision, reason), 0)
            if more:
                self._decisions.labels(tier.name, decision, reason, self._rank).inc(more)
                self._decided[tier.name, decision, reason] = count
        last = decisions.last
        if last is not None:
            for way, seconds in (("load", last.load_seconds), ("compute", last.compute_seconds)):
                if seconds is not None:
                    self._weighed[tier].labels(way, self._rank).set(seconds)

    def _count(self, tier: str, counters: Mapping[str, int]) -> None:
        for event, count in counters.items():
            more = count - self._seen.get((tier, event), 0)
            if more:
                self._events[tier].labels(event, self._rank).inc(more)
                self._seen[tier, event] = count
