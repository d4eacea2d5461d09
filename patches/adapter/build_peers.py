"""Gives each rank of an instance what it fetches with from peers, and lends to them with."""

from __future__ import annotations

import logging
import socket
from typing import Any, Final

import torch

from sglang_ext.config import KvConfig
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.engine.peers.fetch_link import FetchLink, peer_name
from sglang_ext.engine.peers.peer_kv import PeerKv
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.errors import ConfigError, SglangExtError
from sglang_ext.geometry import Geometry
from sglang_ext.keys import Namespace
from sglang_ext.patches.adapter.pd_setup import keys_of, reachable
from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache
from sglang_ext.tiered_store.dram.arena import DramArena

logger = logging.getLogger(__name__)

ADDRESS_BYTES: Final = 512


def may_fetch(config: KvConfig, server_args: Any, *, adapters: bool) -> bool:
    """Whether a server exchanges KV with peers: when a router can tell it to.

    Not with adapters, whose names mean something on one server only. Decode servers do so for requests that
    leave one of them for another; prefill servers, whose requests stay, do not.
    """
    stays = server_args.disaggregation_mode == "prefill"
    return config.router is not None and config.dram_size > 0 and not adapters and not stays


def attach_peers(
    cache: GlobalRadixCache,
    tier: DramTier,
    arena: DramArena,
    geometry: Geometry,
    config: KvConfig,
    server_args: Any,
    identity: Namespace,
    *,
    instance: str,
    epoch: int,
    group: Any,
) -> tuple[str, ...]:
    """Let a rank fetch and lend; returns the addresses of all ranks, none where one cannot listen. Called in
    every rank at once.

    Args:
        identity: of the rank's KV, its shard and weights included.

    Raises:
        ConfigError: the key cannot be read.
    """
    keys = keys_of(config)
    # Routers reach an instance without a key on its own host only.
    host = "127.0.0.1" if keys is None else reachable(server_args.host)
    rank = rank_in(group)
    endpoint = EndpointConfig(
        peer_name(instance, epoch.to_bytes(16, "big")),
        identity.digest().hex(),
        rank=rank,
        bind=host,
        keys=keys,
    )
    link = _link(endpoint, geometry, arena)
    addresses = on_all_ranks("" if link is None else link.address, group)
    if link is None or not all(addresses):
        if link is not None:
            link.close()
        return ()
    cache.peers = PeerKv(
        cache.tree,
        tier,
        link,
        cache.ranks,
        namespace=cache.namespace,
        fresh=lambda: cache.weights.as_started,
        rank=rank,
        endpoints=len(addresses),
    )
    if cache.advice is not None:
        cache.advice.peers = cache.peers
    return addresses


def _link(config: EndpointConfig, geometry: Geometry, arena: DramArena) -> FetchLink | None:
    try:
        if ":" in config.bind:
            raise ConfigError(f"peers are not reached over IPv6 ({config.bind})", field="--host")
        # An address that is not this host's is found out before anything is registered.
        socket.create_server((config.bind, 0)).close()
        return FetchLink(config, geometry, arena)
    except (SglangExtError, OSError) as error:
        logger.warning("KV is neither fetched from other instances nor lent to them: %s", error)
        return None


def rank_in(group: Any) -> int:
    """This process's place among the ranks of ``group``."""
    return 0 if group is None else torch.distributed.get_rank(group)


def on_all_ranks(text: str, group: Any) -> tuple[str, ...]:
    """What each rank says, in the order of ranks."""
    if group is None or torch.distributed.get_world_size(group) == 1:
        return (text,)
    data = text.encode().ljust(ADDRESS_BYTES, b"\0")
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    said = [torch.zeros_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(said, mine, group=group)
    return tuple(bytes(each.tolist()).rstrip(b"\0").decode() for each in said)
