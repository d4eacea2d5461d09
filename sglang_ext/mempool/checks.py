"""What must be true of a memory pool at any time."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from sglang_ext.mempool.grants import Hold
from sglang_ext.mempool.regions import ArenaRegion
from sglang_ext.mempool.store import Use
from sglang_ext.mempool.tiers import path_to
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.mempool.pool import MemPool


def check(pool: MemPool) -> None:
    """See `MemPool.check`."""
    tiers = pool.tiers
    tiers.tree.check()
    tiers.store.check()
    pool.ledger.check()
    memory = {tiers.holders[tier] for tier in tiers.regions}
    for node in tiers.tree.nodes():
        if not memory & node.placements.keys():
            raise AssertionError(f"{node!r} is in no memory of this pool")
    for tier, region in tiers.regions.items():
        _check_places(pool, tier)
        if isinstance(region, ArenaRegion):
            region.arena.check()
    for hold in pool.ledger.holds():
        _check_hold(pool, hold)


def _check_places(pool: MemPool, tier: Tier) -> None:
    """Every place has one owner: the index, or whoever allocated it."""
    region, holder = pool.tiers.regions[tier], pool.tiers.holders[tier]
    owners: Counter[int] = Counter()
    for node in pool.tiers.tree.nodes():
        if holder in node.placements:
            for place in region.unpack(node.placements[holder], node.blocks):
                owners.update(place)
    allocated = [address for address in pool.ledger.allocated() if address.tier is tier]
    for address in allocated:
        owners.update(address.place)
    twice = [word for word, count in owners.items() if count > 1]
    if twice:
        raise AssertionError(f"{tier.title} {twice[0]} is owned twice")
    known = pool.store.reserved(tier, Use.OWNER)
    if len(allocated) != known:
        raise AssertionError(
            f"owners have {len(allocated)} blocks of {tier.title}, the store knows of {known}"
        )


def _check_hold(pool: MemPool, hold: Hold) -> None:
    """What a hold says is in memory is there, in the index, and locked."""
    for i, address in enumerate(hold.addresses):
        if hold.positions.get(address) != i:
            raise AssertionError(f"hold {hold.number} does not know its own block {i}")
    for tier in pool.tiers.regions:
        locked = [node for node, holder in hold.locks if holder is pool.tiers.holders[tier]]
        held = max((pool.tiers.held(path_to(node), tier) for node in locked), key=len, default=[])
        for address, i in hold.positions.items():
            if address.tier is tier and (i >= len(held) or held[i] != address.place):
                raise AssertionError(f"hold {hold.number}: block {i} is not at {address}")
