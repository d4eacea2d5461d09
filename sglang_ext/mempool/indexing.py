"""Insertion: blocks of an owner become the index's. Deletion: a prompt leaves every tier.

A tier of the index has whole prefixes only. So HBM takes the given HBM blocks as far as they follow without a
gap on what it has; whatever lies behind goes to DRAM (blocks on disk: to disk), which first gets copies of
what it lacks before that.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_ext.errors import UserError
from sglang_ext.mempool.address import Address, AddressError, Place, disk_names
from sglang_ext.mempool.grants import Hold
from sglang_ext.mempool.regions import ArenaRegion, move
from sglang_ext.mempool.tiers import Tiers, unpack_keys
from sglang_ext.radix_global import Node
from sglang_ext.tiered_store.tier import Outcome
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    from sglang_ext.mempool.pool import MemPool


@dataclass(frozen=True, slots=True)
class Inserted:
    """What an insertion changed, in blocks.

    blocks: whole blocks of the prompt. new: that the index did not have. freed: given blocks that it did not
        need, because it had them, or had to copy them into another tier.
    outcome: `DONE`, or why given blocks on disk could not be indexed.
    """

    blocks: int
    new: int
    freed: int
    outcome: Outcome = Outcome.DONE


@dataclass(frozen=True, slots=True)
class Plan:
    """Which tier takes which blocks. given: by position, what the caller owns.

    held_hbm, held_dram: how many leading blocks each tier has; hbm, dram: and afterwards.
    copies: positions that DRAM gets by a copy.
    """

    given: Mapping[int, Address]
    blocks: int
    held_hbm: int
    held_dram: int
    hbm: int
    dram: int
    copies: tuple[int, ...]

    @property
    def known(self) -> int:
        return max(self.held_hbm, self.held_dram)

    @property
    def known_after(self) -> int:
        return max(self.hbm, self.dram)


def plan(given: Mapping[int, Address], blocks: int, held_hbm: int, held_dram: int) -> Plan:
    """Decide where each block goes. No I/O.

    Raises:
        UserError: a block on disk lies before one that is not.
    """
    hbm = held_hbm
    while hbm in given and given[hbm].tier is Tier.HBM:
        hbm += 1
    end, known = blocks, max(hbm, held_dram)
    while end > known and given[end - 1].tier is Tier.DISK:
        end -= 1
    for i in range(known, end):
        if given[i].tier is Tier.DISK:
            raise UserError(
                f"block {i} is on disk, and a block after it is not",
                field="addresses",
                hint="Give disk blocks at the end of a prompt only",
            )
    dram = end if end > known else held_dram
    copies = tuple(i for i in range(held_dram, dram) if i not in given or given[i].tier is not Tier.DRAM)
    return Plan(given, blocks, held_hbm, held_dram, hbm, dram, copies)


def insert(
    pool: MemPool,
    namespace: Hashable,
    key: bytes,
    addresses: Sequence[Address],
    priority: int,
    *,
    received: bool = False,
) -> Inserted:
    """See `MemPool.insert`. received: from another instance."""
    tiers = pool.tiers
    key = key[: len(key) // tiers.step * tiers.step]
    found = tiers.tree.match(namespace, key)
    given = _given(pool, namespace, key, addresses, found.blocks)
    locks = [(tiers.last(found.path, tier), tiers.holders[tier]) for tier in tiers.regions]
    for node, holder in locks:
        tiers.tree.lock(node, holder)
    try:
        held = {tier: tiers.held(found.path, tier) for tier in tiers.regions}
        decided = plan(
            given,
            len(key) // tiers.step,
            len(held[Tier.HBM]),
            len(held.get(Tier.DRAM, ())),
        )
        used = _carry_out(pool, namespace, key, decided, held, priority=priority, received=received)
        pool.ledger.take_back([given[i] for i in used])
        on_disk = [given[i] for i in range(decided.known_after, decided.blocks)]
        outcome = _to_disk(tiers, namespace, key, on_disk) if on_disk else Outcome.DONE
    finally:
        for node, holder in locks:
            tiers.tree.unlock(node, holder)
    unused = [address for i, address in given.items() if i not in used]
    pool.memory.give_back(unused)
    return Inserted(decided.blocks, decided.blocks - decided.known, len(unused), outcome)


def _given(
    pool: MemPool, namespace: Hashable, key: bytes, addresses: Sequence[Address], known: int
) -> dict[int, Address]:
    """What the caller owns of the blocks of `key`, by position; checked."""
    step = pool.tiers.step
    blocks = len(key) // step
    first = blocks - len(addresses)
    if first < 0:
        raise UserError(
            f"{len(addresses)} addresses for {blocks} whole blocks of {pool.layout.block_tokens} tokens",
            field="addresses",
            hint="Keep the block that is not full yet",
        )
    if known < first:
        raise UserError(
            f"blocks {known} to {first - 1} of the prompt are neither given nor cached in HBM or DRAM",
            field="addresses",
            hint="Give them too, or swap them in first",
        )
    if len(set(addresses)) != len(addresses):
        raise AddressError("an address is given twice", field="addresses")
    given: dict[int, Address] = {}
    for i, address in enumerate(addresses, first):
        grant = pool.ledger.grant_of(address)
        if not isinstance(grant, Hold):
            if pool.ledger.busy[address]:
                raise AddressError(f"{address} is being transferred", hint="Await that first")
            given[i] = address
            continue
        here = grant.namespace == namespace and grant.key[: (i + 1) * step] == key[: (i + 1) * step]
        if grant.positions[address] != i or not here or i >= known:
            raise AddressError(f"{address} is held for another place than block {i} of this prompt")
    return given


def _carry_out(
    pool: MemPool,
    namespace: Hashable,
    key: bytes,
    decided: Plan,
    held: dict[Tier, list[Place]],
    *,
    priority: int,
    received: bool,
) -> set[int]:
    """Copy, then publish. Returns the positions of given blocks that the index has taken over."""
    tiers = pool.tiers
    given = decided.given
    hbm = held[Tier.HBM] + [given[i].place for i in range(decided.held_hbm, decided.hbm)]
    if decided.dram > decided.held_dram:
        # Room first: it is all that can fail.
        places = dict(zip(decided.copies, pool.memory.take(Tier.DRAM, len(decided.copies)), strict=True))
        sources = [hbm[i] if i < decided.hbm else given[i].place for i in decided.copies]
        move(tiers.regions[Tier.HBM], sources, tiers.regions[Tier.DRAM], list(places.values()))
        places |= {i: given[i].place for i in range(decided.held_dram, decided.dram) if i not in places}
        dram = held[Tier.DRAM] + [places[i] for i in range(decided.held_dram, decided.dram)]
        tiers.publish(Tier.DRAM, namespace, key, dram, priority=priority, received=received)
    if decided.hbm > decided.held_hbm:
        again = decided.dram > decided.held_dram
        tiers.publish(Tier.HBM, namespace, key, hbm, priority=priority, same_request=again, received=received)
    taken_hbm = range(decided.held_hbm, decided.hbm)
    taken_dram = set(range(decided.held_dram, decided.dram)) - set(decided.copies)
    return {*taken_hbm, *taken_dram}


def _to_disk(tiers: Tiers, namespace: Hashable, key: bytes, given: Sequence[Address]) -> Outcome:
    """Put the last blocks of `key`, which an owner has on disk, under their keys there."""
    disk = tiers.disk
    assert disk is not None
    before = tiers.tree.match(namespace, key).path
    if before and not tiers.cover_disk(before[-1]):
        return Outcome.FULL
    names = tiers.keys(namespace, (), key)[-len(given) :]
    staging = ArenaRegion.of_blocks(disk.layout, 1)
    for address, name in zip(given, names, strict=True):
        digest, own = disk_names(address.place)
        read, outcome = tiers.read(digest, [own], staging.arena.blocks[:1])
        if read:
            outcome = tiers.write(tiers.digest(namespace), [name], staging, [(0,)])
        if outcome is not Outcome.DONE:
            return outcome
    return Outcome.DONE


def delete(
    tiers: Tiers, namespace: Hashable, key: bytes, *, continuations: bool, spared: Container[bytes]
) -> int:
    """See `MemPool.delete`. spared: block keys that holds need on disk."""
    path = list(tiers.tree.match(namespace, key).path)
    gone = 0
    if continuations and path:
        # From the ends, so that no tier is left with a hole; what is held keeps what lies before it.
        for node in list(_below(path[-1])):
            if not node.locks and not node.children:
                gone += _forget(tiers, node, spared)
    while path and not path[-1].locks and not path[-1].children:
        gone += _forget(tiers, path.pop(), spared)
    if tiers.disk is not None:
        kept = sum(node.blocks for node in path)
        _drop(tiers, namespace, tiers.keys(namespace, (), key)[kept:], spared)
    return gone


def _forget(tiers: Tiers, node: Node, spared: Container[bytes]) -> int:
    """Take an end of a prefix out of every tier; the blocks that were freed in HBM and DRAM."""
    for gone in tiers.tree.remove(node, tiers.holders[Tier.DISK]):
        if tiers.disk is not None:
            _drop(tiers, node.namespace, unpack_keys(gone.address), spared)
    return sum(
        tiers.store.delete(tier, tiers.tree.remove(node, tiers.holders[tier])) for tier in tiers.regions
    )


def _drop(tiers: Tiers, namespace: Hashable, keys: list[bytes], spared: Container[bytes]) -> None:
    assert tiers.disk is not None
    tiers.disk.drop(tiers.digest(namespace), [key for key in keys if key not in spared])


def _below(node: Node) -> Iterator[Node]:
    """What continues a node, ends first."""
    for child in list(node.children.values()):
        yield from _below(child)
        yield child
