"""Puts together a rank's exchange of windows, states and KV with other instances, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.clock import SystemClock
from sglang_ext.config import KvConfig
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.engine.hybrid.components import Component
from sglang_ext.engine.hybrid.exports import NamedExports, NamesOf, component_pool, leases_of, pool_name
from sglang_ext.engine.hybrid.fetches import NamedFetches
from sglang_ext.engine.hybrid.store import HybridStore
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.peers.fetch_link import FetchLink
from sglang_ext.engine.peers.fetch_results import FetchResult
from sglang_ext.engine.peers.peer_kv import Peers
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.engine.weights import Weights
from sglang_ext.patches.adapter.build_transfers import (
    endpoint_config,
    kv_namespace,
    on_all_ranks_or_none,
    start_fetching,
)
from sglang_ext.patches.adapter.hbm import Drafts

if TYPE_CHECKING:
    from sglang.srt.mem_cache.registry import TreeCacheBuildContext


@dataclass(frozen=True)
class Exchange:
    """The parts of a rank that exchange blocks. endpoints: the addresses of all ranks."""

    peers: Peers
    transfers: TransferThread
    endpoints: tuple[str, ...]


def exchange_of(
    ctx: TreeCacheBuildContext,
    config: KvConfig,
    store: HybridStore,
    weights: Weights,
    namespaces: Mapping[Component, bytes | None],
    epoch: bytes,
    drafts: Drafts,
    names: NamesOf,
    behind: int,
    handed_over: Sequence[PoolSpec],
    on_result: Callable[[FetchResult], None],
) -> Exchange | None:
    """The exchange of a rank; None where a rank of the instance cannot listen. In every rank at once.

    Args:
        namespaces: of each component, the digest of everything but the tokens that its bytes depend on.
        names: as SGLang's tree names pages.
        behind: how many tokens after a page are part of its name.
        handed_over: memory from which the same thread hands requests over to decode servers.
        on_result: replies to routers, in rank 0.
    """
    kvcache = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    model = kv_namespace(kvcache, ctx.model_config, drafts)
    pools = [
        component_pool(component, part.memory.arena, (namespaces[component] or b"").hex())
        for component, part in store.parts.items()
    ]
    config_of_endpoint = endpoint_config(config, ctx.server_args, model, epoch=epoch, rank=ctx.tp_rank)
    transfers, endpoints = on_all_ranks_or_none(
        start_fetching(config_of_endpoint, [*handed_over, *pools]), ctx.params.tp_cache_group
    )
    if transfers is None:
        return None
    clock = SystemClock()
    moves = Moves(store.ranks, clock=clock)
    link = FetchLink(transfers, [pool_name(component) for component in store.parts])
    fetches = NamedFetches(store, link, moves, store.ranks, names, least_blocks=store.least_blocks)
    peers = Peers(
        NamedExports(store, leases_of(store, transfers), store.ranks, clock, names),
        fetches,
        link,
        clock,
        store.block_tokens,
        namespace=weights.namespace,
        fresh=lambda: weights.as_started,
        on_result=on_result,
        rank=ctx.tp_rank,
        endpoints=len(endpoints),
        behind=behind,
    )
    return Exchange(peers, transfers, endpoints)
