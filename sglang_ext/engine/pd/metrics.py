"""Metrics of hand-overs, in the scheduler process; see `engine.metrics` for how they reach ``/metrics``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_ext.disagg.transports.rails import Rail
from sglang_ext.engine.pd.messages import ReturnEnd
from sglang_ext.stages import metric_name


@dataclass(frozen=True)
class AgentState:
    """What one rank's agent is doing, and what it has done since it was started.

    live: by side, hand-overs that have not ended. ends: by side and by how. transport_bytes, transactions:
    read from peers, and in how many ranges.
    returns: by side and outcome. returned_tokens: given (decode), got (prefill). metadata_rows: of SGLang's
    buffers, in use. set_aside: by tier, tokens of places that returns are to fill. unfenced_pages: of pushes
    that are over, whose writers have not yet said that they stopped. prefill_servers: at decode, `connected`
    ones, and such that are `awaited` because routers tell of them. connects: by why (`PrefillPeers`).
    rail: the RDMA adapter in use. calls: of the memory pool, that named another instance.
    pushed: pages times layers that this rank wrote to decode, by when.
    """

    live: Mapping[str, int]
    ends: Mapping[str, Mapping[str, int]]
    leased_pages: int
    unfenced_pages: int = 0
    transport_bytes: Mapping[str, int] = field(default_factory=dict)
    transactions: Mapping[str, int] = field(default_factory=dict)
    returns: Mapping[str, Mapping[ReturnEnd, int]] = field(default_factory=dict)
    returned_tokens: int = 0
    metadata_rows: int = 0
    set_aside: Mapping[str, int] = field(default_factory=dict)
    prefill_servers: Mapping[str, int] = field(default_factory=dict)
    connects: Mapping[str, int] = field(default_factory=dict)
    rail: Rail | None = None
    calls: Mapping[str, int] = field(default_factory=dict)
    pushed: Mapping[str, int] = field(default_factory=dict)


class AgentMetrics:
    """Publishes an agent's state."""

    def __init__(self, rank: int) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge

        registry = CollectorRegistry()
        self._rank = str(rank)
        self._seen: dict[tuple[str, ...], int] = {}

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            name = metric_name("pd", name)
            return Gauge(name, text, [*labels, "tp_rank"], registry=registry, multiprocess_mode="mostrecent")

        self._live = gauge("live_handovers", "Requests whose hand-over has not ended.", "side")
        self._leased = gauge("leased_pages", "Pages that peers may be reading.")
        self._unfenced = gauge(
            "unfenced_pages",
            "Pages of pushes that are over, kept until their writer is known to have stopped.",
        )
        self._metadata = gauge("metadata_rows", "Rows of SGLang's metadata buffers that requests have.")
        self._aside = gauge(
            "set_aside_tokens", "Memory that KV on its way back is to fill, in tokens.", "tier"
        )
        self._servers = gauge(
            "prefill_servers",
            "Prefill servers that this decode rank is connected to, and such that it tries to reach.",
            "state",
        )
        self._rail = gauge(
            "rdma_device", "1 for the RDMA device and port that this rank uses, and why.", "device", "why"
        )
        self._connects = Counter(
            metric_name("pd", "connects"),
            "Connections made to prefill servers: ahead of requests, or while a request waited.",
            ["why", "tp_rank"],
            registry=registry,
        )
        self._ends = Counter(
            metric_name("pd", "handovers"),
            "Hand-overs that have ended: released (prefill) and held (decode) are good, fault, abort, "
            "peer_abort and peer_dead are not.",
            ["side", "end", "tp_rank"],
            registry=registry,
        )
        self._bytes = Counter(
            metric_name("pd", "read_bytes"),
            "Bytes of KV read from other servers.",
            ["transport", "tp_rank"],
            registry=registry,
        )
        self._transactions = Counter(
            metric_name("pd", "transactions"),
            "Ranges of KV read from other servers, after coalescing.",
            ["transport", "tp_rank"],
            registry=registry,
        )
        self._calls = Counter(
            metric_name("pd", "mempool_calls"),
            "Calls of the memory pool that named another instance (MemServe, table 1).",
            ["call", "tp_rank"],
            registry=registry,
        )
        self._pushed = Counter(
            metric_name("pd", "pushed_layers"),
            "Pages times layers written to decode, of hand-overs that ended well: ahead of the end of their "
            "request's computation (push by layer), or after it.",
            ["when", "tp_rank"],
            registry=registry,
        )
        self._returns = Counter(
            metric_name("pd", "returns"),
            "Requests whose KV went back to prefill (returned), or why not.",
            ["side", "outcome", "tp_rank"],
            registry=registry,
        )
        self._returned = Counter(
            metric_name("pd", "returned_tokens"),
            "Tokens of KV that went back from decode to prefill.",
            ["tp_rank"],
            registry=registry,
        )

    def update(self, state: AgentState) -> None:
        """Publish it."""
        for side, live in state.live.items():
            self._live.labels(side, self._rank).set(live)
        self._leased.labels(self._rank).set(state.leased_pages)
        self._unfenced.labels(self._rank).set(state.unfenced_pages)
        self._metadata.labels(self._rank).set(state.metadata_rows)
        for tier, tokens in state.set_aside.items():
            self._aside.labels(tier, self._rank).set(tokens)
        for server_state, servers in state.prefill_servers.items():
            self._servers.labels(server_state, self._rank).set(servers)
        if state.rail is not None:
            self._rail.labels(str(state.rail.nic), state.rail.why, self._rank).set(1)
        for why, count in state.connects.items():
            self._connects.labels(why, self._rank).inc(self._more(count, "connects", why))
        for side, ends in state.ends.items():
            for end, count in ends.items():
                self._ends.labels(side, end, self._rank).inc(self._more(count, side, end))
        for side, outcomes in state.returns.items():
            for outcome, count in outcomes.items():
                self._returns.labels(side, outcome, self._rank).inc(
                    self._more(count, "return", side, outcome)
                )
        for call, count in state.calls.items():
            self._calls.labels(call, self._rank).inc(self._more(count, "calls", call))
        for when, count in state.pushed.items():
            self._pushed.labels(when, self._rank).inc(self._more(count, "pushed", when))
        self._returned.labels(self._rank).inc(self._more(state.returned_tokens, "returned"))
        for transport, count in state.transactions.items():
            more = self._more(count, "transactions", transport)
            self._transactions.labels(transport, self._rank).inc(more)
        for transport, count in state.transport_bytes.items():
            self._bytes.labels(transport, self._rank).inc(self._more(count, "bytes", transport))

    def _more(self, count: int, *key: str) -> int:
        before, self._seen[key] = self._seen.get(key, 0), count
        return max(0, count - before)
