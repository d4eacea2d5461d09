"""Bytes of addresses: writing what is allocated, reading what is granted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sglang_ext.mempool.address import Address, disk_names
from sglang_ext.mempool.regions import ArenaRegion, Rows
from sglang_ext.mempool.tiers import Tiers
from sglang_ext.tiered_store.tier import Outcome
from sglang_ext.tiers import Tier


def write(tiers: Tiers, addresses: Sequence[Address], rows: Rows) -> list[Outcome]:
    """See `MemPool.write`; the addresses have been checked."""
    outcomes = [Outcome.DONE] * len(addresses)
    for tier, region in tiers.regions.items():
        at = _of_tier(addresses, tier)
        if at:
            region.copy_in([addresses[i].place for i in at], rows[at])
    at = _of_tier(addresses, Tier.DISK)
    if at:
        staging = ArenaRegion.of_blocks(tiers.regions[Tier.HBM].layout, 1)
        for i in at:
            digest, key = disk_names(addresses[i].place)
            staging.arena.blocks[0] = rows[i]
            outcomes[i] = tiers.write(digest, [key], staging, [(0,)])
        staging.arena.close()
    return outcomes


def read(tiers: Tiers, addresses: Sequence[Address]) -> tuple[Rows, list[Outcome]]:
    """See `MemPool.read`; the addresses have been checked."""
    size = tiers.regions[Tier.HBM].layout.block_bytes
    rows = np.zeros((len(addresses), size), dtype=np.uint8)
    outcomes = [Outcome.DONE] * len(addresses)
    for tier, region in tiers.regions.items():
        at = _of_tier(addresses, tier)
        if at:
            part = np.empty((len(at), size), dtype=np.uint8)
            region.copy_out([addresses[i].place for i in at], part)
            rows[at] = part
    for i in _of_tier(addresses, Tier.DISK):
        digest, key = disk_names(addresses[i].place)
        outcomes[i] = tiers.read(digest, [key], rows[i : i + 1])[1]
    return rows, outcomes


def _of_tier(addresses: Sequence[Address], tier: Tier) -> list[int]:
    return [i for i, address in enumerate(addresses) if address.tier is tier]
