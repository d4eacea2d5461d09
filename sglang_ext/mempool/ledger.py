"""The ledger of a rank's memory: for each tier, the blocks that are neither free nor in the index.

Every block of a tier is free, in the index, or taken: in the ledger, under the use it was taken for, and in
most cases in an open reservation. The tiers that evict their blocks, and the store above them, share the
ledger; it calls a tier only to take blocks, and to free them.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_ext.radix_global import Evicted, Holder, Node, RadixTree
from sglang_ext.tiers import Tier


class Call(enum.StrEnum):
    """A call of table 1, as `sglang_ext_cache_mempool_calls_total` labels it."""

    ALLOC_MEM = "alloc_mem"
    """Memory was set aside for KV to come."""
    FREE_MEM = "free_mem"
    """Memory was given back without having been inserted."""
    INSERT = "insert"
    """KV that was computed here entered the index."""
    MATCH = "match"
    DELETE = "delete"
    """KV that is in no other tier left the index."""
    SWAP_OUT = "swap_out"
    """Copies towards DRAM and disk were started."""
    SWAP_IN = "swap_in"
    """Copies towards HBM were started, or have come from disk to DRAM."""
    TRANSFER = "transfer"
    """Another instance's KV is brought into memory that a request owns."""
    TRANSFER_WITH_INSERT = "transfer_with_insert"
    """Another instance's KV entered the index."""


class Use(enum.StrEnum):
    """The purpose of a reservation."""

    PROMOTION = "promotion"
    """From disk, for a request that waits or was announced."""
    FETCH = "fetch"
    """From a peer."""
    SPAN = "span"
    """From the forward pass that computes it for a peer, which reads it meanwhile."""
    RETURN = "return"
    """From the decode server to which the prompt was handed over."""
    PREFETCH = "prefetch"
    """From DRAM to HBM, for an announced request. Gives way to the engine."""
    LAYERS = "layers"
    """For the lowest layers of announced sessions. Gives way to the engine."""
    LOAD = "load"
    """From DRAM to HBM, for a request that waits at a decode server."""


class StoreTier(Protocol):
    """The memory of a tier, as the store uses it. `testing.store_contract` checks implementations.

    *Taken* blocks are neither free nor in the index. A tier guarantees: `take` hands out no block twice; the
    blocks that it evicts to make room are unlocked, and leave by `Ledger.delete`. The caller guarantees:
    every taken block is given back or inserted, once.
    """

    @property
    def holder(self) -> Holder:
        """The holder that represents this tier in the index."""

    @property
    def exclusive(self) -> bool:
        """Whether the store alone uses the tier: every block is free, in the index, or in the ledger."""

    @property
    def n_blocks(self) -> int:
        """Blocks that fit."""

    @property
    def free_blocks(self) -> int:
        """Free blocks."""

    def take(self, blocks: int, *, lose: bool = True, rank: float = -math.inf) -> Any:
        """Take up to `blocks` blocks, as `places` of the index: one entry per slot or block. Evicts older
        blocks to make room.

        Args:
            lose: last copies may be evicted too.
            rank: without `lose`, announced blocks of a lower priority may be evicted.
        """

    def count(self, places: Any) -> int:
        """The number of blocks at these places."""

    def part(self, places: Any, start: int, end: int) -> Any:
        """The places of blocks `start` to `end`."""

    def give_back(self, places: Any) -> None:
        """Free blocks that were taken, or were in the index."""

    def join(self, parts: Sequence[Any]) -> Any:
        """The places of a path, as one address."""

    def clear(self) -> None:
        """Give up every block, with those in the index."""


@dataclass(frozen=True)
class Committed:
    """The result of a commit.

    node: at which the committed blocks end. fresh: blocks that are new in the index. held: blocks of the
    reservation that had entered the index in the meantime, whose memory is free again. added: nodes that the
    tier has gained, from the top.
    """

    node: Node
    fresh: int
    held: int
    added: Sequence[Node] = ()


@dataclass(eq=False)
class Reservation:
    """Memory of a tier for the blocks of `key` from `start` on. Ends with `commit` or `abort`, once.

    Made by `Store.reserve`. places: as the index keeps them.
    """

    ledger: Ledger
    commits: Callable[[Reservation, int, bool], Committed | None]
    """Inserts the first blocks, copied onward or not, and frees the rest."""
    tier: Tier
    use: Use
    namespace: Hashable
    key: bytes
    start: int
    places: Any
    blocks: int
    parent: Node | None
    """The node that the blocks continue, locked; None where the reservation gives way."""
    open: bool = True
    gives_way: bool = False
    """No copy to it is under way any more, so that the engine may take its memory back at once."""
    on_surrender: Callable[[], None] = field(default=lambda: None)
    """Called when the engine has taken its memory back."""

    def commit(self, blocks: int | None = None, *, onward: bool = True) -> Committed | None:
        """Insert the first `blocks` blocks (None: all), which are filled, and give back the rest.

        Args:
            onward: copy them to the tiers below too.

        Returns:
            None when no block could be inserted: none was filled, or (where the reservation gives way) the
            prefix was evicted meanwhile. All memory is given back then.
        """
        return self.commits(self, self.blocks if blocks is None else blocks, onward)

    def abort(self) -> None:
        """Give the memory back unfilled. No write to it may be under way."""
        self.ledger.close(self, 0)


class Ledger:
    """See the module's docstring.

    Args:
        tree: the index.
    """

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self.calls = dict.fromkeys(Call, 0)
        """Calls of table 1, since the start."""
        self.tiers: dict[Tier, StoreTier] = {}
        """Tiers whose memory can be reserved."""
        self.evicted: Counter[Tier] = Counter()
        """Blocks that were deleted from each tier, since the start."""
        self._open: dict[Reservation, None] = {}
        self._taken: dict[Tier, dict[Use, int]] = {}
        """Blocks that are neither free nor in the index."""
        self._yielding: Counter[Tier] = Counter()

    def add(self, tier: StoreTier) -> None:
        """Let a tier's memory be reserved."""
        level = tier.holder.tier
        self.tiers[level] = tier
        self._taken[level] = dict.fromkeys(Use, 0)

    # -- memory -----------------------------------------------------------------------------------

    def alloc_mem(
        self,
        level: Tier,
        blocks: int,
        use: Use,
        *,
        whole: bool = False,
        lose: bool = True,
        rank: float = -math.inf,
    ) -> Any | None:
        """Take up to `blocks` blocks of a tier (`whole`: all of them or none). The caller gives them back
        (`free_mem`) or has them inserted. Returns None for no blocks. See `StoreTier.take`.
        """
        tier = self.tiers[level]
        places = tier.take(blocks, lose=lose, rank=rank)
        got = tier.count(places)
        if not got or (whole and got < blocks):
            if got:
                tier.give_back(places)
            return None
        self._taken[level][use] += got
        self.calls[Call.ALLOC_MEM] += 1
        return places

    def free_mem(self, level: Tier, places: Any, use: Use) -> None:
        """Give back taken blocks that are not needed."""
        tier = self.tiers[level]
        count = tier.count(places)
        if count:
            tier.give_back(places)
            self._taken[level][use] -= count
            self.calls[Call.FREE_MEM] += 1

    def delete(self, level: Tier, gone: Sequence[Evicted]) -> int:
        """Free the memory of evicted blocks of a tier. Blocks without a copy in memory leave the index; a
        copy on disk is found there by its name. Returns the number of blocks.
        """
        if not gone:
            return 0
        tier = self.tiers[level]
        tier.give_back(tier.join([each.address for each in gone]))
        blocks, whole = 0, True
        for each in gone:
            blocks += each.blocks
            whole = whole and bool(each.node.placements)
        if not whole:
            self.calls[Call.DELETE] += 1
        for each in gone:
            for holder in each.node.placements:
                if holder.tier.in_memory:
                    break
            else:
                for holder in list(each.node.placements):
                    self.tree.remove(each.node, holder)
        self.evicted[level] += blocks
        return blocks

    def clear(self) -> None:
        """Delete all blocks in memory, those of the farthest tier first."""
        for level in sorted(self.tiers, reverse=True):
            self.tiers[level].clear()
        self.calls[Call.DELETE] += 1

    # -- reservations --------------------------------------------------------------------------------

    def open(self, reservation: Reservation) -> None:
        """Enter a reservation, whose blocks were taken."""
        self._open[reservation] = None
        if reservation.parent is None:
            self._yielding[reservation.tier] += reservation.blocks

    def close(self, reservation: Reservation, blocks: int) -> None:
        """End a reservation. The caller enters its first ``blocks`` blocks into the index, and then unlocks
        its parent; the others are freed. Without blocks, the parent is unlocked here.

        Raises:
            ValueError: it has ended before.
        """
        if not reservation.open:
            raise ValueError(f"{reservation!r} has ended already")
        level = reservation.tier
        reservation.open = False
        del self._open[reservation]
        if reservation.parent is None:
            self._yielding[level] -= reservation.blocks
        tier = self.tiers[level]
        rest = tier.part(reservation.places, blocks, reservation.blocks)
        self.free_mem(level, rest, reservation.use)
        if not blocks and reservation.parent is not None:
            self.tree.unlock(reservation.parent, tier.holder)

    def entered(self, level: Tier, blocks: int, use: Use) -> None:
        """Taken blocks are in the index now."""
        self._taken[level][use] -= blocks

    def reserved(self, level: Tier, use: Use | None = None) -> int:
        """Blocks of a tier that are taken, for one use or for all. From any thread."""
        taken = self._taken.get(level, {})
        return sum(taken.values()) if use is None else taken.get(use, 0)

    def yielding(self, level: Tier) -> int:
        """Blocks of a tier that the engine may take back, at once or when the copies to them have ended."""
        return self._yielding.get(level, 0)

    def surrender(self, level: Tier) -> int:
        """Give memory back to the engine: all reservations that give way and have no copy under way. Returns
        the number of blocks.
        """
        going = [each for each in self._open if each.tier is level and each.gives_way]
        for each in going:
            each.abort()
            each.on_surrender()
        return sum(each.blocks for each in going)

    @property
    def reservations(self) -> list[Reservation]:
        """Reservations that have not ended."""
        return list(self._open)

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError that names the inconsistency."""
        open_blocks: Counter[tuple[Tier, Use]] = Counter()
        for each in self._open:
            open_blocks[each.tier, each.use] += each.blocks
        for level, uses in self._taken.items():
            for use, count in uses.items():
                reserved = open_blocks[level, use]
                if count != reserved:
                    raise AssertionError(
                        f"{count} blocks of {level.title} are taken for {use}, {reserved} reserved"
                    )
        for level, tier in self.tiers.items():
            known = self.tree.blocks_of(tier.holder) + self.reserved(level)
            if tier.exclusive and known != tier.n_blocks - tier.free_blocks:
                raise AssertionError(
                    f"{tier.n_blocks - tier.free_blocks} blocks of {level.title} are in use, "
                    f"index and ledger know of {known}"
                )

    def __repr__(self) -> str:
        uses = Counter(f"{each.tier.title} {each.use}" for each in self._open)
        return f"Ledger({', '.join(f'{use}: {count}' for use, count in sorted(uses.items()))})"
