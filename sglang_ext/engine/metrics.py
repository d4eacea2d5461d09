"""The cache's Prometheus metrics, in the scheduler process; the server's ``/metrics`` shows them.

SGLang runs Prometheus in its multi-process mode, in which every process writes its values to files that the
HTTP process reads. A metric therefore has to be made after SGLang has set that mode up, and reaches
``/metrics`` from whatever registry it is in.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.dram_tier import DramCounters
from sglang_ext.metrics import metric_name

if TYPE_CHECKING:
    from sglang_ext.engine.radix_cache import GlobalRadixCache

UPDATE_SECONDS = 1.0


class CacheMetrics:
    """Publishes the state of one rank's cache, at most once in ``UPDATE_SECONDS``.

    Args:
        rank: label that tells the ranks of a server apart.
        clock: seconds, monotonic.
    """

    def __init__(self, rank: int, clock: Clock | None = None) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        registry = CollectorRegistry()
        self._clock = clock or SystemClock()
        self._next = 0.0
        self._rank = str(rank)
        self._seen = DramCounters()
        self._blocks = Gauge(
            metric_name("cache", "blocks"),
            "Blocks that a tier holds.",
            ["tier", "tp_rank"],
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._capacity = Gauge(
            metric_name("cache", "capacity_blocks"),
            "Blocks that a tier can hold.",
            ["tier", "tp_rank"],
            registry=registry,
            multiprocess_mode="mostrecent",
        )
        self._moved = Counter(
            metric_name("cache", "dram_blocks"),
            "Blocks written to DRAM, loaded from it, evicted from it, or skipped because it was full of "
            "locked blocks.",
            ["event", "tp_rank"],
            registry=registry,
        )

    def update(self, cache: GlobalRadixCache) -> None:
        """Publish ``cache``'s state if it is time to."""
        now = self._clock.monotonic()
        if now < self._next:
            return
        self._next = now + UPDATE_SECONDS
        held = cache.blocks_by_tier()
        for tier, (used, capacity) in held.items():
            self._blocks.labels(tier.name.lower(), self._rank).set(used)
            self._capacity.labels(tier.name.lower(), self._rank).set(capacity)
        if cache.dram is None:
            return
        now_counted = dataclasses.replace(cache.dram.counters)
        for field in dataclasses.fields(DramCounters):
            more = getattr(now_counted, field.name) - getattr(self._seen, field.name)
            if more:
                self._moved.labels(field.name, self._rank).inc(more)
        self._seen = now_counted
