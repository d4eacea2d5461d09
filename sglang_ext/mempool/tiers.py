"""Blocks of the index on their way between HBM, DRAM and disk, for calls that wait for the copies.

A block goes down by copy, publication, and only then the end of the upper copy; so it is never nowhere. Each
tier has whole prefixes only: what goes down takes along what lies before it. In the tree, HBM and DRAM are
holders with addresses; DISK is a note on a block in one of them that says under which keys it was written,
and is looked up before it is relied upon, because the disk tier drops blocks by itself. What is on disk alone
is found by its keys, also after a restart.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_ext.keys import BLOCK_KEY_BYTES, TOKEN_BYTES, block_keys
from sglang_ext.mempool.address import Place
from sglang_ext.mempool.regions import ArenaRegion, Region, Rows, chunks, move
from sglang_ext.mempool.store import Refusal, Store, Use
from sglang_ext.radix_global import Holder, Match, Node
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Ids, Outcome, Put
from sglang_ext.tiers import Tier

Digest = Callable[[Hashable], bytes]
Keys = npt.NDArray[np.void]
"""Block keys, shape (blocks,): the note of the disk on a node, which the tree can cut like any address."""

_KEY = np.dtype((np.void, BLOCK_KEY_BYTES))


@dataclass
class TierCounters:
    """Blocks, since the start.

    lost: evicted without a copy elsewhere. misses: not brought in, by reason. refused: not taken by the disk.
    """

    copied_down: int = 0
    written: int = 0
    brought_in: int = 0
    evicted: int = 0
    lost: int = 0
    misses: Counter[Outcome] = field(default_factory=Counter)
    refused: Counter[Outcome] = field(default_factory=Counter)


class Tiers:
    """See the module.

    Args:
        store: of the rank. HBM and DRAM placements are in the form of their region's `pack`.
        holders: by tier.
        regions: HBM, and DRAM if there is any. Those that the store does not know yet must be arenas, and
            become its tiers.
        disk: the tier below; None for none.
        digest: namespace of the tree to namespace of the disk.
        settle: returns when nobody copies blocks any more.
    """

    def __init__(
        self,
        store: Store,
        holders: Mapping[Tier, Holder],
        regions: Mapping[Tier, Region],
        disk: BlockTier | None,
        digest: Digest,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self.tree = store.tree
        self.holders = holders
        self.regions = regions
        self.disk = disk
        self.digest = digest
        self.step = self.tree.block_size * TOKEN_BYTES
        self.counters = TierCounters()
        self._settle = settle
        for level, region in regions.items():
            if level not in store.tiers:
                assert isinstance(region, ArenaRegion)
                store.add(level, ArenaTier(self, level, region))

    # -- looking --------------------------------------------------------------------------------

    def held(self, path: Sequence[Node], tier: Tier) -> list[Place]:
        """Places of the leading blocks of a path that a tier has."""
        holder = self.holders[tier]
        found: list[Place] = []
        for node in path:
            if holder not in node.placements:
                break
            found += self.regions[tier].unpack(node.placements[holder], node.blocks)
        return found

    def last(self, path: Sequence[Node], tier: Tier) -> Node:
        """The last node of a path that a tier has; the root when it has none."""
        holder = self.holders[tier]
        return next((node for node in reversed(path) if holder in node.placements), self.tree.root)

    def on_disk(self, node: Node) -> bool:
        """Whether the disk has all blocks of a node now."""
        note = node.placements.get(self.holders[Tier.DISK])
        if note is None or self.disk is None:
            return False
        return self.disk.match(self.digest(node.namespace), unpack_keys(note)) == node.blocks

    def has_copy(self, tier: Tier) -> Callable[[Node], bool]:
        """Whether a node would still be somewhere if `tier` gave it up."""
        other = self.holders[Tier.DRAM if tier is Tier.HBM else Tier.HBM]
        return lambda node: other in node.placements or self.on_disk(node)

    def keys(self, namespace: Hashable, path: Sequence[Node], key: bytes) -> list[bytes]:
        """Block keys of what of `key` lies behind `path`."""
        start = sum(len(node.key) for node in path)
        if path and (note := path[-1].placements.get(self.holders[Tier.DISK])) is not None:
            return block_keys(self.digest(namespace), key[start:], self.tree.block_size, note[-1].tobytes())
        return block_keys(self.digest(namespace), key, self.tree.block_size)[start // self.step :]

    # -- owners' memory -------------------------------------------------------------------------

    def take(self, tier: Tier, blocks: int) -> list[Place] | None:
        """So many blocks for an owner, evicting for them. None, and nothing evicted, when that is not
        enough.
        """
        if self.store.available(tier) < blocks:
            return None
        taken = self.store.alloc_mem(tier, blocks, Use.OWNER, whole=True) if blocks else None
        if taken is None:
            return None if blocks else []
        places = self.regions[tier].unpack(taken, blocks)
        self.regions[tier].open(places)
        return places

    def publish(
        self,
        tier: Tier,
        namespace: Hashable,
        key: bytes,
        places: Sequence[Place],
        *,
        priority: int = 0,
        same_request: bool = False,
        received: bool = False,
    ) -> None:
        """Enter that a tier has the leading blocks of `key` at `places`, those that it had included; what is
        new of them was an owner's. received: from another instance.
        """
        (self.store.transfer_with_insert if received else self.store.insert)(
            tier,
            namespace,
            key[: len(places) * self.step],
            self.regions[tier].pack(places),
            priority=priority,
            same_request=same_request,
            use=Use.OWNER,
        )

    # -- down -----------------------------------------------------------------------------------

    def give_up(self, tier: Tier, blocks: int, only: Callable[[Node], bool] | None) -> int:
        """Evict from a tier, least recently used first. Returns the blocks that became free."""
        copied = self.has_copy(tier)
        gone = self.tree.evict(self.holders[tier], blocks, only=only)
        self.counters.lost += sum(each.blocks for each in gone if only is None and not copied(each.node))
        freed = self.store.delete(tier, gone)
        self.counters.evicted += freed
        return freed

    def move_down(self, tier: Tier, blocks: int) -> int:
        """Move the least recently used blocks of a tier to the tiers below. Returns how many became free."""
        freed = 0
        while freed < blocks:
            below = [self._copy_down(tier, node) for node in self._next_to_go(tier, blocks - freed)]
            if not any(below):
                break
            self._settle()
            now = self.give_up(tier, blocks - freed, self.has_copy(tier))
            if not now:
                break
            freed += now
        return freed

    def _next_to_go(self, tier: Tier, blocks: int) -> list[Node]:
        """What eviction would take first, without taking it."""
        found: list[Node] = []

        def look(node: Node) -> bool:
            if sum(each.blocks for each in found) < blocks:
                found.append(node)
            return False

        self.tree.evict(self.holders[tier], blocks, only=look)
        return found

    def _copy_down(self, tier: Tier, node: Node) -> bool:
        """Have a copy of a node, and of all before it, below `tier`, or begin one."""
        if self.has_copy(tier)(node):
            return True
        self.tree.lock(node, self.holders[tier])
        try:
            return self.store.swap_out(tier, node, node.blocks, always=True)
        finally:
            self.tree.unlock(node, self.holders[tier])

    def cover_dram(self, node: Node) -> bool:
        """Copy a path that HBM has to DRAM, as far as it is not there. All of it or nothing."""
        if Tier.DRAM not in self.regions:
            return False
        path = path_to(node)
        before = self.last(path, Tier.DRAM)
        start = sum(each.blocks for each in path_to(before))
        key = b"".join(each.key for each in path)
        missing = len(key) // self.step - start
        if not missing:
            return True
        reservation = self.store.reserve_behind(
            Tier.DRAM, node.namespace, key, Use.SWAP_OUT, before, start, missing, whole=True, lose=False
        )
        if isinstance(reservation, Refusal):
            return False
        # Looked at after: making room may have cut nodes of the path.
        source = self.held(path_to(node), Tier.HBM)[start:]
        dram = self.regions[Tier.DRAM]
        move(self.regions[Tier.HBM], source, dram, dram.unpack(reservation.places, reservation.blocks))
        reservation.commit(onward=False)
        self.counters.copied_down += missing
        return True

    def cover_disk(self, node: Node) -> bool:
        """Write a path to disk, as far as it is not there."""
        if self.disk is None:
            return False
        holder = self.holders[Tier.DISK]
        path = path_to(node)
        for index, each in enumerate(path):
            if self.on_disk(each):
                continue
            self.tree.remove(each, holder)  # the disk has dropped it since it was noted
            keys = self.keys(node.namespace, path[:index], b"".join(n.key for n in path[: index + 1]))
            tier = Tier.HBM if self.holders[Tier.HBM] in each.placements else Tier.DRAM
            places = self.regions[tier].unpack(each.placements[self.holders[tier]], each.blocks)
            outcome = self.write(self.digest(node.namespace), keys, self.regions[tier], places)
            if outcome is not Outcome.DONE:
                return False
            self.tree.place(each, holder, pack_keys(keys))
        return True

    def write(self, digest: bytes, keys: list[bytes], region: Region, places: Sequence[Place]) -> Outcome:
        """Put blocks of one prefix on disk, with one sync for all. `DONE` when every one can be found."""
        assert self.disk is not None
        puts: list[Put] = []
        outcome = Outcome.DONE
        for part in chunks(len(keys)):
            put = self.disk.prepare_put(digest, keys[part])
            if isinstance(put, Outcome):
                outcome = put
            else:
                puts.append(put)
                outcome = Outcome.FULL if put.refused else self._fill(put, region, places[part])
            if outcome is not Outcome.DONE:
                break
        if outcome is Outcome.DONE:
            outcome = next((o for o in self.disk.complete_puts(puts) if o is not Outcome.DONE), outcome)
        else:
            for put in puts:
                self.disk.abort_put(put)
        if outcome is Outcome.DONE and self.disk.match(digest, keys) < len(keys):
            outcome = Outcome.FULL  # room for these was made of each other
        if outcome is Outcome.DONE:
            self.counters.written += len(keys)
        else:
            self.counters.refused[outcome] += len(keys)
        return outcome

    def _fill(self, put: Put, region: Region, places: Sequence[Place]) -> Outcome:
        assert self.disk is not None
        if not put.missing:
            return Outcome.DONE
        wanted = [places[position] for position in put.missing]
        if isinstance(region, ArenaRegion):
            memory, ids = BlockMemory.of_arena(region.arena), region.pack(wanted)
        else:
            rows = np.empty((len(wanted), region.layout.block_bytes), dtype=np.uint8)
            region.copy_out(wanted, rows)
            memory, ids = BlockMemory.of_blocks(region.layout, rows), np.arange(len(wanted))
        for layer in range(region.layout.n_layers):
            outcome = self.disk.put_layer(put, layer, memory, ids)
            if outcome is not Outcome.DONE:
                return outcome
        return Outcome.DONE

    # -- up -------------------------------------------------------------------------------------

    def bring_in(self, namespace: Hashable, key: bytes) -> tuple[int, Outcome]:
        """Bring the whole blocks of `key` into HBM, as many as there are copies and room for.

        The caller holds what it wants of them. Returns how many leading blocks HBM has then, and why the next
        is missing.
        """
        path = self.tree.match(namespace, key).path
        total = len(key) // self.step
        before = len(self.held(path, Tier.HBM))
        locked = (self.last(path, Tier.DRAM), self.holders[Tier.DRAM])
        self.tree.lock(*locked)
        try:
            self.store.tiers[Tier.HBM].make_room(total - before)
            reservation = self.store.reserve(Tier.HBM, namespace, key, Use.SWAP_IN, lose=False)
            if isinstance(reservation, Refusal):
                got, outcome = 0, Outcome.DONE if reservation is Refusal.KNOWN else Outcome.FULL
            else:
                places = self.regions[Tier.HBM].unpack(reservation.places, reservation.blocks)
                got, outcome = self._copy_up(namespace, key, before, places)
                if outcome is Outcome.DONE and before + got < total:
                    outcome = Outcome.FULL
                reservation.commit(got, onward=False)
        finally:
            self.tree.unlock(*locked)
        self.counters.brought_in += got
        self.counters.misses[outcome] += total - before - got
        return before + got, outcome

    def _copy_up(
        self, namespace: Hashable, key: bytes, start: int, places: list[Place]
    ) -> tuple[int, Outcome]:
        """Fill HBM places with the blocks from `start` on; how many were, and why not the next."""
        path = self.tree.match(namespace, key).path
        hbm = self.regions[Tier.HBM]
        got = 0
        if Tier.DRAM in self.regions:
            in_dram = self.held(path, Tier.DRAM)[start : start + len(places)]
            got = len(in_dram)
            move(self.regions[Tier.DRAM], in_dram, hbm, places[:got])
        if got == len(places):
            return got, Outcome.DONE
        if self.disk is None:
            return got, Outcome.ABSENT
        keys = self.keys(namespace, (), key)[start + got : start + len(places)]
        for part in chunks(len(keys)):
            rows = np.empty((part.stop - part.start, hbm.layout.block_bytes), dtype=np.uint8)
            read, outcome = self.read(self.digest(namespace), keys[part], rows)
            targets = places[got : got + read]
            hbm.copy_in(targets, rows[:read])
            got += read
            if outcome is not Outcome.DONE:
                return got, outcome
        return got, Outcome.DONE

    def read(self, digest: bytes, keys: Sequence[bytes], rows: Rows) -> tuple[int, Outcome]:
        """Read blocks of one prefix from disk, verified. Returns how many rows hold one, and why not the
        next.
        """
        assert self.disk is not None
        get = self.disk.prepare_get(digest, keys)
        outcome = Outcome.DONE if get.blocks == len(keys) else Outcome.ABSENT
        try:
            memory = BlockMemory.of_blocks(self.disk.layout, rows)
            for layer in range(self.disk.layout.n_layers):
                ids: Ids = np.arange(get.blocks)
                got = self.disk.get_layer(get, layer, memory, ids)
                if got.outcome is not Outcome.DONE:
                    outcome = got.outcome
            return get.blocks, outcome
        finally:
            self.disk.complete_get(get)


class ArenaTier:
    """An arena as a tier of the store: the memory of a pool without an engine.

    Making room costs a copy where it can: first goes what is in another tier, then blocks are copied down,
    and last copies only where they may be lost. Nothing goes down by itself.
    """

    exclusive = True

    def __init__(self, tiers: Tiers, level: Tier, region: ArenaRegion) -> None:
        self._tiers = tiers
        self._level = level
        self._arena = region.arena
        self.holder = tiers.holders[level]

    @property
    def n_blocks(self) -> int:
        return self._arena.n_blocks

    @property
    def free_blocks(self) -> int:
        return self._arena.free_blocks

    def reach(self, match: Match) -> tuple[Node, int]:
        """The last node of a match that the tier has."""
        path = [node for node in match.path if self.holder in node.placements]
        return (path[-1] if path else self._tiers.tree.root), sum(node.blocks for node in path)

    def make_room(self, blocks: int, *, unused_since: float = math.inf, priority: int = 0) -> None:
        """Give up what has a copy elsewhere. There are no hints."""
        if blocks > self.free_blocks:
            self._tiers.give_up(self._level, blocks - self.free_blocks, self._tiers.has_copy(self._level))

    def take(self, blocks: int, *, lose: bool = True, rank: float = -math.inf) -> Ids:
        self.make_room(blocks)
        if blocks > self.free_blocks:
            self._tiers.move_down(self._level, blocks - self.free_blocks)
        if blocks > self.free_blocks and lose:
            self._tiers.give_up(self._level, blocks - self.free_blocks, None)
        taken = self._arena.alloc(min(blocks, self.free_blocks))
        assert taken is not None
        return taken

    def count(self, places: Ids) -> int:
        return len(places)

    def part(self, places: Ids, start: int, end: int) -> Ids:
        return places[start:end]

    def give_back(self, places: Ids) -> None:
        self._arena.free(places)

    def join(self, parts: Sequence[Ids]) -> Ids:
        return np.concatenate(parts)

    def onward(self, node: Node, blocks: int, *, always: bool = False) -> bool:
        """Copy to DRAM, or to disk where that is full; complete on return."""
        down = always and self._level is Tier.HBM and self._tiers.cover_dram(node)
        return down or (always and self._tiers.cover_disk(node))

    def clear(self) -> None:
        for node in self._tiers.tree.nodes():
            if self.holder in node.placements:
                self._arena.free(node.placements[self.holder])
        self._tiers.tree.drop_holder(self.holder)


def path_to(node: Node) -> list[Node]:
    """The nodes from the top to `node`."""
    path: list[Node] = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    path.reverse()
    return path


def pack_keys(keys: Sequence[bytes]) -> Keys:
    """Block keys as the index notes them."""
    return np.frombuffer(b"".join(keys), dtype=_KEY)


def unpack_keys(keys: Keys) -> list[bytes]:
    """The block keys of a note."""
    return [key.tobytes() for key in keys]
