"""Where prefill puts what comes back: slots of HBM, or blocks of DRAM where HBM is short.

A place is set aside in the scheduler's thread, filled one-sidedly by somebody else, and then kept or given
up, again in the scheduler's thread. Until then what it continues stays locked.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sglang_ext.disagg.runs import Ids
from sglang_ext.engine.pd.leases import POOL
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.promotion import insert_behind
from sglang_ext.radix_global import Node

if TYPE_CHECKING:
    from sglang_ext.engine.cache.view import RankCache

DRAM_POOL = "dram"
"""Of an agent's endpoint: the DRAM arena, in blocks of the cache."""
BUDGET = 4
"""At most one part of so many of a tier is set aside for returns."""


class Blocks:
    """A rank's cache, as returns use it. In the scheduler's thread only."""

    def __init__(self, cache: RankCache) -> None:
        self.cache = cache
        self._hbm = cache.hbm
        self.step = cache.block_size
        self.page = cache.page_size

    def held(self, namespace: Hashable, key: bytes) -> tuple[Node, list[Any], int]:
        """What HBM has of a prompt: the last node, the slots of each node, and how many blocks."""
        _, path, _ = self.cache.tree.match(namespace, key)
        path = [node for node in path if self._hbm in node.placements]
        node = path[-1] if path else self.cache.tree.root
        return node, [each.placements[self._hbm] for each in path], sum(each.blocks for each in path)

    def lock(self, node: Node) -> None:
        self.cache.tree.lock(node, self._hbm)

    def unlock(self, node: Node) -> None:
        self.cache.tree.unlock(node, self._hbm)

    def pages(self, slots: Any) -> Ids:
        """Pages of slots, which are whole pages."""
        found: Ids = np.asarray(slots.tolist() if hasattr(slots, "tolist") else slots, np.int64)
        pages: Ids = found[:: self.page] // self.page
        return pages

    def pages_of(self, key: bytes) -> int:
        """How many pages the whole blocks of a prompt are."""
        pages: int = len(key) // self.cache.tree.block_bytes * self.step // self.page
        return pages

    def insert(self, namespace: Hashable, key: bytes, slots: Any, skip: int) -> int:
        """Insert a prompt whose blocks after the first `skip` are in `slots`; how many tokens are new.

        What of it has come to be there meanwhile is freed.
        """
        ops = self.cache.room
        _, parts, held = self.held(namespace, key)
        kept = self.cache.slot_ops.keep(slots)
        if held > skip:
            gone = min(held - skip, len(kept) // self.step) * self.step
            ops.free_slots([kept[:gone]])
            kept = kept[gone:]
        fresh = len(kept)
        if fresh:
            whole = self.cache.slot_ops.keep(self.cache.slot_ops.join([*parts, kept]))
            result = self.cache.tree.insert(namespace, key, self._hbm, whole)
            if self.cache.dram is not None:
                self.cache.dram.write_through(result.node)
        return fresh


class Reservation(Protocol):
    """Room for the blocks of a prompt after the first `start`."""

    start: int
    pool: str
    """Which of the endpoint's pools it is in."""

    @property
    def ids(self) -> Ids:
        """Its blocks there."""

    def keep(self) -> int:
        """All of it is filled: insert it. How many tokens of it are new."""

    def give_up(self) -> None:
        """It will not be filled, and nothing writes there."""


@dataclass(eq=False)
class HbmReservation:
    """Slots of the engine's pool."""

    room: Reservations
    namespace: Hashable
    key: bytes
    start: int
    node: Node
    slots: Any
    pool: str = POOL

    @property
    def ids(self) -> Ids:
        return self.room.blocks.pages(self.slots)

    def keep(self) -> int:
        self.room.slots_aside -= len(self.slots)
        fresh = self.room.blocks.insert(self.namespace, self.key, self.slots, self.start)
        self.room.blocks.unlock(self.node)
        return fresh

    def give_up(self) -> None:
        self.room.slots_aside -= len(self.slots)
        cache = self.room.blocks.cache
        cache.room.free_slots([cache.slot_ops.keep(self.slots)])
        self.room.blocks.unlock(self.node)


@dataclass(eq=False)
class DramReservation:
    """Blocks of the DRAM arena."""

    room: Reservations
    tier: DramTier
    namespace: Hashable
    key: bytes
    start: int
    parent: Node
    taken: Ids
    pool: str = DRAM_POOL

    @property
    def ids(self) -> Ids:
        return self.taken

    def keep(self) -> int:
        tree, tier = self.room.blocks.cache.tree, self.tier
        self.room.blocks_aside -= len(self.ids)
        result = insert_behind(tree, tier.holder, self.parent, self.namespace, self.key, self.ids)
        # What has come to be there meanwhile is there once.
        held = result.held_blocks - self.start
        tier.give_back(self.ids[:held])
        fresh = len(self.ids) - held
        tier.inserted(fresh)
        if tier.below is not None and result.added:
            tree.lock(result.node, tier.holder)
            tier.below.submit(result.node, fresh)
        tree.unlock(self.parent, tier.holder)
        return fresh * tree.block_size

    def give_up(self) -> None:
        self.room.blocks_aside -= len(self.ids)
        self.tier.give_back(self.ids)
        self.room.blocks.cache.tree.unlock(self.parent, self.tier.holder)


class Reservations:
    """Sets places aside, within a budget of each tier.

    into_dram: whether the endpoint has the DRAM arena as a pool.
    """

    def __init__(self, blocks: Blocks, *, into_dram: bool = False) -> None:
        self.blocks = blocks
        self._into_dram = into_dram
        self.slots_aside = 0
        """Slots of HBM that are nobody else's now."""
        self.blocks_aside = 0
        """Blocks of DRAM."""
        self.dram_budget = BUDGET
        room = blocks.cache.room
        others = room.owned
        room.owned = lambda: others() + self.slots_aside

    def take(self, namespace: Hashable, key: bytes, *, busy: bool) -> Reservation | str:
        """Room for what is lacking of a prompt's whole blocks, or why not: `known`, `budget`, `memory`.

        busy: whether requests wait for memory, which come first.
        """
        cache = self.blocks.cache
        node, _, start = self.blocks.held(namespace, key)
        missing = (len(key) // cache.tree.block_bytes - start) * self.blocks.step
        if missing <= 0:
            return "known"
        if (self.slots_aside + missing) * BUDGET > cache.token_to_kv_pool_allocator.size:
            return "budget"
        if not (busy and cache.room.free < missing):
            self.blocks.lock(node)
            slots = cache.room.allocate(missing)
            if slots is not None:
                self.slots_aside += missing
                return HbmReservation(self, namespace, key, start, node, slots)
            self.blocks.unlock(node)
        return self._in_dram(namespace, key)

    def _in_dram(self, namespace: Hashable, key: bytes) -> Reservation | str:
        cache, tier = self.blocks.cache, self.blocks.cache.dram
        if tier is None or not self._into_dram:
            return "memory"
        match = cache.tree.match(namespace, key)
        missing = len(key) // cache.tree.block_bytes - match.blocks
        if missing <= 0:
            return "known"  # DRAM has what HBM has not
        if (self.blocks_aside + missing) * self.dram_budget > tier.n_blocks:
            return "budget"
        node = match.node
        if not node.is_root and tier.holder not in node.placements:
            # What comes can only continue what DRAM has.
            tier.write_through(node, always=True)
            if tier.holder not in node.placements:
                return "memory"
        cache.tree.lock(node, tier.holder)
        ids = tier.take(missing)
        if len(ids) < missing:
            tier.give_back(ids)
            cache.tree.unlock(node, tier.holder)
            return "memory"
        self.blocks_aside += missing
        return DramReservation(self, tier, namespace, key, match.blocks, node, ids)
