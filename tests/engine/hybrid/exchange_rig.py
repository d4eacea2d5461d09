"""Has a rank exchange the blocks of its store with other instances in the same process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_movers import until

from sglang_ext.clock import Clock
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.disagg.transports import TransportName
from sglang_ext.engine.hybrid.components import Component
from sglang_ext.engine.hybrid.exports import NamedExports, NamesOf, component_pool, leases_of, pool_name
from sglang_ext.engine.hybrid.fetches import NamedFetches
from sglang_ext.engine.hybrid.store import HybridStore
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.pd.messages import MESSAGES
from sglang_ext.engine.peers.fetch_link import FetchLink, peer_name
from sglang_ext.engine.peers.fetch_results import FetchResult
from sglang_ext.engine.peers.peer_kv import Peers
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.engine.weights import Weights
from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import Export, Fetch, FetchSpan, Source

EPOCH = b"e" * 16


class Exchange:
    """One rank's endpoint, exports and fetches.

    Args:
        facts: of each component's namespace; those that are not given are like other servers'.
        rank: the number of the rank, and how many there are.
        handed_over: more pools of the endpoint.
    """

    def __init__(
        self,
        store: HybridStore,
        weights: Weights,
        names: NamesOf,
        clock: Clock,
        *,
        number: int,
        facts: Mapping[Component, str] | None = None,
        rank: tuple[int, int] = (0, 1),
        handed_over: Sequence[PoolSpec] = (),
        behind: int = 0,
    ) -> None:
        pools = [
            component_pool(component, part.memory.arena, (facts or {}).get(component, "same"))
            for component, part in store.parts.items()
        ]
        config = EndpointConfig(
            peer_name(f"server {number}", EPOCH),
            "model",
            rank=rank[0],
            transports=(TransportName.TCP,),
            heartbeat=0.5,
            dead_after=30.0,
        )
        self.transfers = TransferThread(config, [*handed_over, *pools], messages=MESSAGES)
        self.results: list[FetchResult] = []
        moves = Moves(store.ranks, clock=clock)
        link = FetchLink(self.transfers, [pool_name(component) for component in store.parts])
        self.exports = NamedExports(store, leases_of(store, self.transfers), store.ranks, clock, names)
        self.fetches = NamedFetches(store, link, moves, store.ranks, names, least_blocks=store.least_blocks)
        self.peers = Peers(
            self.exports,
            self.fetches,
            link,
            clock,
            store.block_tokens,
            namespace=weights.namespace,
            fresh=lambda: weights.as_started,
            on_result=self.results.append,
            rank=rank[0],
            endpoints=rank[1],
            behind=behind,
        )

    @property
    def address(self) -> str:
        return self.transfers.endpoint.address

    def export(self, tokens: Sequence[int], seconds: float = 10.0, **tenant: str) -> None:
        self.peers.takes_command(Export("export", encode_tokens(list(tokens)), ttl_s=seconds, **tenant), 0.0)

    def fetch(
        self, owners: Sequence[tuple[str, ...]], tokens: Sequence[int], wait_s: float = 30.0, **tenant: str
    ) -> None:
        """A span from each owner, which has these endpoints."""
        spans = tuple(FetchSpan(Source(owner, "export"), len(tokens)) for owner in owners)
        message = Fetch("r1", encode_tokens(list(tokens)), spans, wait_s=wait_s, **tenant)
        self.peers.takes_command(message, 0.0)

    def offered(self) -> Any:
        """The fetch under way, once the owner has answered."""
        (fetch,) = self.fetches._active
        until(lambda: fetch.job.offered is not None, "the offer")
        return fetch

    def close(self) -> None:
        self.peers.close()
        self.transfers.close()
