"""Allocation: memory of a tier for an owner, and back; and the bytes of addresses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from sglang_ext.errors import ConfigError, UserError
from sglang_ext.mempool.address import Address, MemType, Place, disk_names, disk_place
from sglang_ext.mempool.grants import Ledger
from sglang_ext.mempool.regions import ArenaRegion, OutOfBlocksError, Rows
from sglang_ext.mempool.store import Use
from sglang_ext.mempool.tiers import Tiers
from sglang_ext.tiered_store.tier import Outcome
from sglang_ext.tiers import Tier, tier_named


class Memory:
    """What `MemPool` allocates and frees. On disk, what is allocated has keys of its own: a number each, in a
    namespace that nobody else has.
    """

    def __init__(self, tiers: Tiers, ledger: Ledger) -> None:
        self._tiers = tiers
        self._ledger = ledger
        self._disk_files = 0
        self._own_disk = hashlib.blake2b(
            f"{ledger.instance}/{ledger.epoch:x}".encode(), digest_size=16
        ).digest()

    def alloc(self, size: int, type: MemType, id: str) -> list[Address]:
        """See `MemPool.alloc_mem`."""
        if size < 0:
            raise UserError(f"size is {size}; it must not be negative", field="size")
        if type is MemType.DISK:
            self._require(Tier.DISK)
            return self._ledger.allocate(id, [(Tier.DISK, self._disk_place()) for _ in range(size)])
        if type is not MemType.MIXED:
            tier = tier_named(type.value)
            return self._ledger.allocate(id, [(tier, place) for place in self.take(tier, size)])
        self._require(Tier.DRAM)
        hbm = self._tiers.store.tiers[Tier.HBM]
        hbm.make_room(size)
        first = min(size, hbm.free_blocks)
        rest = self.take(Tier.DRAM, size - first, beside=f" beside {first} in HBM")
        places = [(Tier.HBM, place) for place in self.take(Tier.HBM, first)]
        return self._ledger.allocate(id, places + [(Tier.DRAM, place) for place in rest])

    def take(self, tier: Tier, blocks: int, beside: str = "") -> list[Place]:
        """Blocks of a tier, without a grant. Raises as `alloc_mem`."""
        self._require(tier)
        places = self._tiers.take(tier, blocks)
        if places is None:
            memory, store = self._tiers.store.tiers[tier], self._tiers.store
            cached = store.tree.blocks_of(memory.holder)
            raise OutOfBlocksError(
                f"{blocks} blocks of {tier.title} asked for{beside}, {memory.free_blocks} of "
                f"{memory.n_blocks} are free and {store.available(tier) - memory.free_blocks} of "
                f"{cached} cached ones may go",
                hint="Free or release what is not needed, ask for fewer, or make the tier larger",
            )
        return places

    def _require(self, tier: Tier) -> None:
        """Raises ConfigError when the pool has no such tier."""
        if tier not in self._tiers.regions and (tier is not Tier.DISK or self._tiers.disk is None):
            raise ConfigError(
                f"this pool has no {tier.title}", field="type", hint="Give it one, or ask for HBM"
            )

    def _disk_place(self) -> Place:
        self._disk_files += 1
        return disk_place(self._own_disk, self._disk_files.to_bytes(16, "big"))

    def give_back(self, addresses: Sequence[Address]) -> None:
        """Free checked addresses at once."""
        self._ledger.take_back(addresses)
        for tier, region in self._tiers.regions.items():
            places = [address.place for address in addresses if address.tier is tier]
            if places:
                self._tiers.store.free_mem(tier, region.pack(places), Use.OWNER)
        on_disk = [address for address in addresses if address.tier is Tier.DISK]
        for address in on_disk:
            digest, key = disk_names(address.place)
            if self._tiers.disk is not None:
                self._tiers.disk.drop(digest, [key])


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
