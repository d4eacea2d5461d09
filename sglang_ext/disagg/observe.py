"""Metrics of an endpoint, in the Prometheus form. Counters go on when a peer leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sglang_ext.disagg.transfer import Endpoint
from sglang_ext.metrics import metric_name

_HELP = {
    "bytes": "Bytes asked for, by transport",
    "runs": "Contiguous ranges asked for before coalescing",
    "transactions": "Contiguous ranges posted after coalescing",
    "completed": "Requests whose bytes landed and were verified",
    "stale": "Requests discarded because a block changed generation",
    "failed": "Requests that ended with another error",
}


class EndpointMetrics(Collector):
    """Reads an endpoint's state when it is scraped; costs nothing in between."""

    def __init__(self, endpoint: Endpoint, registry: CollectorRegistry) -> None:
        self._endpoint = endpoint
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """One family per count of `PeerStats`, and gauges of pools, leases and grants."""
        totals = self._endpoint.totals()
        for name, text in _HELP.items():
            counter = CounterMetricFamily(metric_name("transfer", name), text, labels=["transport"])
            for transport, stats in totals.items():
                counter.add_metric([transport], dataclasses.asdict(stats)[name])
            yield counter
        peers = GaugeMetricFamily(
            metric_name("transfer", "peers"), "Connected ranks, by the transport in use", labels=["transport"]
        )
        for transport in sorted(
            {link.peer.channel.name for i in self._endpoint.instances for link in i.links}
        ):
            count = sum(
                link.peer.channel.name == transport for i in self._endpoint.instances for link in i.links
            )
            peers.add_metric([transport], count)
        yield peers
        pinned = GaugeMetricFamily(
            metric_name("transfer", "leased_blocks"), "Blocks that leases hold", labels=["pool"]
        )
        granted = GaugeMetricFamily(
            metric_name("transfer", "granted_blocks"), "Blocks that peers may be writing", labels=["pool"]
        )
        for name, pool in self._endpoint.pools.items():
            pinned.add_metric([name], pool.pinned)
            granted.add_metric([name], pool.granted)
        yield pinned
        yield granted
        sessions = GaugeMetricFamily(metric_name("transfer", "sessions"), "Connected readers")
        sessions.add_metric([], len(self._endpoint.owner.sessions))
        yield sessions
