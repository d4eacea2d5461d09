"""Holds: the longest cached prefix of a prompt, kept where it is (match), and brought to HBM (swap_in)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.mempool.address import Address, AddressError, disk_place
from sglang_ext.mempool.grants import Hold
from sglang_ext.tiered_store.tier import Outcome
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.mempool.pool import MemPool


@dataclass(frozen=True, slots=True)
class Swapped:
    """What became of one address: where the block is in HBM, or why it is a miss."""

    address: Address | None
    outcome: Outcome


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


def swap_in(pool: MemPool, addresses: Sequence[Address]) -> list[Swapped]:
    """See `MemPool.swap_in`."""
    holds: dict[int, Hold] = {}
    ends: dict[int, int] = {}
    for address in addresses:
        grant = pool.ledger.grant_of(address)
        if not isinstance(grant, Hold):
            raise AddressError(
                f"{address} is allocated memory, which is not in the index", hint="Insert it first"
            )
        holds[grant.number] = grant
        ends[grant.number] = max(ends.get(grant.number, 0), grant.positions[address] + 1)
    reached = {number: _bring_in(pool, hold, ends[number]) for number, hold in holds.items()}
    found: list[Swapped] = []
    for address in addresses:
        hold = holds[address.grant]
        position = hold.positions[address]
        count, outcome = reached[address.grant]
        if position < count:
            found.append(Swapped(hold.addresses[position], Outcome.DONE))
        else:
            found.append(Swapped(None, outcome))
    return found


def _bring_in(pool: MemPool, hold: Hold, blocks: int) -> tuple[int, Outcome]:
    """HBM gets the first `blocks` blocks of a hold; how many it has then, and why not the next."""
    tiers = pool.tiers
    count, outcome = tiers.bring_in(hold.namespace, hold.key[: blocks * tiers.step])
    path = tiers.tree.match(hold.namespace, hold.key[: count * tiers.step]).path
    hold.lock(tiers.tree, tiers.last(path, Tier.HBM), tiers.holders[Tier.HBM])
    for i, place in enumerate(tiers.held(path, Tier.HBM)):
        address = pool.ledger.address(Tier.HBM, place, hold)
        hold.addresses[i] = address
        hold.positions[address] = i
    return count, outcome
