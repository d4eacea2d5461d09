"""Matching: the longest cached prefix of a prompt, held where it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from sglang_ext.mempool.address import disk_place
from sglang_ext.mempool.grants import Hold
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.mempool.pool import MemPool


def match(pool: MemPool, namespace: Hashable, key: bytes, owner: str, end: Callable[[Hold], None]) -> Hold:
    """See `MemPool.match`. Locks in each tier what the hold has of it; pins what is only on disk."""
    tiers = pool.tiers
    path = tiers.store.match(namespace, key).path
    hold = pool.ledger.hold(owner, namespace, end)
    places = [(Tier.HBM, place) for place in tiers.held(path, Tier.HBM)]
    for tier in tiers.regions:
        held = tiers.held(path, tier)
        if tier is Tier.HBM or len(held) > len(places):
            places += [(tier, place) for place in held[len(places) :]]
            hold.lock(tiers.tree, tiers.last(path, tier), tiers.holders[tier])
    if tiers.disk is not None and (len(places) + 1) * tiers.step <= len(key):
        keys = tiers.keys(namespace, path, key)
        pin = tiers.disk.prepare_get(tiers.digest(namespace), keys)
        hold.pins.append(pin)
        places += [(Tier.DISK, disk_place(tiers.digest(namespace), k)) for k in keys[: pin.blocks]]
    hold.key = key[: len(places) * tiers.step]
    hold.addresses = [pool.ledger.address(tier, place, hold) for tier, place in places]
    hold.positions = {address: i for i, address in enumerate(hold.addresses)}
    return hold
