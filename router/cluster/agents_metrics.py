"""What can be seen of the agents' channels and of the index: gauges, brought up to date when asked for."""

from __future__ import annotations

from sglang_ext.router.cluster.agents import Agents
from sglang_ext.router.cluster.members_view import fills_of
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.telemetry.observability import RouterMetrics


def show_agents(agents: Agents, fleet: Fleet, metrics: RouterMetrics) -> None:
    """Have the metrics of agents and index shown with the others."""
    told = {
        "events": metrics.gauge("index_events", "Placement events applied, since the start", "instance"),
        "gaps": metrics.gauge("index_gaps", "How often events were missing, since the start", "instance"),
        "snapshots": metrics.gauge("index_snapshots", "Snapshots taken in, since the start", "instance"),
    }
    blocks = metrics.gauge("index_blocks", "Blocks that an instance tells to hold", "instance", "where")
    partial = metrics.gauge(
        "index_partial", "1 when the instance holds more than the index could keep", "instance"
    )

    requests = metrics.gauge(
        "instance_requests", "Requests that an instance says it has", "instance", "state"
    )
    tiers = metrics.gauge("tier_blocks", "Blocks that a tier holds or can hold", "instance", "tier", "what")

    def refresh() -> None:
        ours = (*told.values(), blocks, partial, requests, tiers)
        for gauge in (*ours, metrics.event_lag, metrics.index_trusted):
            gauge.clear()
        for name, beat in agents.beats().items():
            requests.labels(name, "running").set(beat.load.running)
            requests.labels(name, "queued").set(beat.load.queued)
            for tier, fill in fills_of(beat).items():
                tiers.labels(name, tier.name, "used").set(fill.used)
                tiers.labels(name, tier.name, "size").set(fill.size)
        for name in fleet.rows:
            metrics.index_trusted.labels(name).set(agents.index.trusted(name))
        for name, counters in agents.counters().items():
            for what, gauge in told.items():
                gauge.labels(name).set(getattr(counters, what))
            metrics.event_lag.labels(name).set(counters.lag_s)
            replica = agents.index.replica(name)
            if replica is not None:
                blocks.labels(name, "memory").set(replica.blocks)
                for tier, names in replica.named.items():
                    blocks.labels(name, tier.name).set(len(names))
                partial.labels(name).set(replica.partial)

    metrics.on_refresh.append(refresh)
