"""Publishing the state of a rank's agent as metrics (`engine.metric_table`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_ext.disagg.transports.rails import Rail
from sglang_ext.engine.metric_table import PD
from sglang_ext.engine.pd.messages import ReturnEnd
from sglang_ext.engine.rank_metrics import RankMetrics


@dataclass(frozen=True)
class AgentState:
    """The present state of one rank's agent, and its counts since it was started.

    live: by side, hand-overs that have not ended. ends: by side and by how. transport_bytes, transactions:
    read from peers, and in how many ranges. returns: by side and outcome. returned_tokens: given (decode),
    got (prefill). metadata_rows: of SGLang's buffers, in use. set_aside: by tier, tokens of places that
    returns are to fill. unfenced_pages: of pushes that are over, whose writers have not yet confirmed that
    they stopped. prefill_servers: at decode, `connected` ones, and `awaited` ones, which are on a router's
    list and not connected. connects: by why (`PrefillPeers`). rail: the RDMA adapter in use. calls: of the
    memory pool, that named another instance. pushed: pages times layers that this rank wrote to decode, by
    when.
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
    """Publishes an agent's state.

    Args:
        rank: label that tells the ranks of a server apart.
    """

    def __init__(self, rank: int) -> None:
        self._metrics = RankMetrics(PD, rank)
        self.registry = self._metrics.registry

    def update(self, state: AgentState) -> None:
        """Publish it."""
        metrics = self._metrics
        for side, live in state.live.items():
            metrics.set("live_handovers", live, side)
        metrics.set("leased_pages", state.leased_pages)
        metrics.set("unfenced_pages", state.unfenced_pages)
        metrics.set("metadata_rows", state.metadata_rows)
        for tier, tokens in state.set_aside.items():
            metrics.set("set_aside_tokens", tokens, tier)
        for server_state, servers in state.prefill_servers.items():
            metrics.set("prefill_servers", servers, server_state)
        if state.rail is not None:
            metrics.set("rdma_device", 1, str(state.rail.nic), state.rail.why)
        for side, ends in state.ends.items():
            for end, total in ends.items():
                metrics.count("handovers", total, side, end)
        for side, outcomes in state.returns.items():
            for outcome, total in outcomes.items():
                metrics.count("returns", total, side, outcome)
        metrics.count("returned_tokens", state.returned_tokens)
        for name, totals in (
            ("connects", state.connects),
            ("mempool_calls", state.calls),
            ("pushed_layers", state.pushed),
            ("transactions", state.transactions),
            ("read_bytes", state.transport_bytes),
        ):
            for label, total in totals.items():
                metrics.count(name, total, label)
