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
from typing import Any, Protocol, TypeAlias

from sglang_ext.radix_global import Evicted, Holder, Node, RadixTree
from sglang_ext.tiers import Tier

Place: TypeAlias = Tier | Holder
"""Where KV lies: a holder, or a tier, which means the holder of its full component."""


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
    holder: Holder
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

    @property
    def tier(self) -> Tier:
        """The tier whose memory it is."""
        return self.holder.tier

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
        self.tiers: dict[Holder, StoreTier] = {}
        """The memory that can be reserved, by its holder in the index."""
        self.evicted: Counter[Holder] = Counter()
        """Blocks that were deleted from each holder, since the start."""
        self._full: dict[Tier, Holder] = {}
        self._open: dict[Reservation, None] = {}
        self._taken: dict[Holder, dict[Use, int]] = {}
        """Blocks that are neither free nor in the index."""
        self._yielding: Counter[Holder] = Counter()

    def add(self, tier: StoreTier) -> None:
        """Let a tier's memory of one component (`tier.holder`) be reserved."""
        holder = tier.holder
        self.tiers[holder] = tier
        if holder.full is None:
            self._full[holder.tier] = holder
        self._taken[holder] = dict.fromkeys(Use, 0)

    def holder_of(self, place: Place) -> Holder:
        """The holder at a place.

        Raises:
            KeyError: no memory of this tier was added.
        """
        return place if isinstance(place, Holder) else self._full[place]

    def tier_at(self, place: Place) -> StoreTier:
        """The memory at a place.

        Raises:
            KeyError: none was added.
        """
        return self.tiers[self.holder_of(place)]

    # -- memory -----------------------------------------------------------------------------------

    def alloc_mem(
        self,
        place: Place,
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
        holder = self.holder_of(place)
        tier = self.tiers[holder]
        places = tier.take(blocks, lose=lose, rank=rank)
        got = tier.count(places)
        if not got or (whole and got < blocks):
            if got:
                tier.give_back(places)
            return None
        self._taken[holder][use] += got
        self.calls[Call.ALLOC_MEM] += 1
        return places

    def free_mem(self, place: Place, places: Any, use: Use) -> None:
        """Give back taken blocks that are not needed."""
        holder = self.holder_of(place)
        tier = self.tiers[holder]
        count = tier.count(places)
        if count:
            tier.give_back(places)
            self._taken[holder][use] -= count
            self.calls[Call.FREE_MEM] += 1

    def attach(self, holder: Holder, nodes: Sequence[Node], places: Any, use: Use) -> None:
        """Put the rows of a window or a state into the index.

        Args:
            nodes: from the top. The tier has their full component.
            places: taken blocks (`alloc_mem`) for all of these nodes, in their order.
            use: the purpose for which the blocks were taken.
        """
        tier = self.tiers[holder]
        start = 0
        for node in nodes:
            end = start + node.blocks_of(holder)
            self.tree.place(node, holder, tier.part(places, start, end))
            start = end
        self._taken[holder][use] -= start

    def delete(self, place: Place, gone: Sequence[Evicted]) -> int:
        """Free the memory of evicted blocks of a place, and of the windows and states that were evicted with
        them. Blocks without a copy in memory leave the index; a copy on disk is found there by its name.
        Returns the number of blocks of the place itself.
        """
        if not gone:
            return 0
        holder = self.holder_of(place)
        given: dict[Holder, list[Any]] = {}
        for each in gone:
            given.setdefault(each.holder, []).append(each.address)
            self.evicted[each.holder] += each.blocks
        for owner, addresses in given.items():
            tier = self.tiers[owner]
            tier.give_back(tier.join(addresses))
        if not all(each.node.placements for each in gone):
            self.calls[Call.DELETE] += 1
        for each in gone:
            if not any(other.tier.in_memory for other in each.node.placements):
                for other in list(each.node.placements):
                    self.tree.remove(each.node, other)
        return sum(each.blocks for each in gone if each.holder is holder)

    def clear(self) -> None:
        """Delete all blocks in memory."""
        # Farthest tiers first; in each, windows and states before the full component.
        for holder in sorted(self.tiers, key=lambda each: (-each.tier.level, each.closed)):
            self.tiers[holder].clear()
        self.calls[Call.DELETE] += 1

    # -- reservations --------------------------------------------------------------------------------

    def open(self, reservation: Reservation) -> None:
        """Enter a reservation, whose blocks were taken."""
        self._open[reservation] = None
        if reservation.parent is None:
            self._yielding[reservation.holder] += reservation.blocks

    def close(self, reservation: Reservation, blocks: int) -> None:
        """End a reservation. The caller enters its first ``blocks`` blocks into the index, and then unlocks
        its parent; the others are freed. Without blocks, the parent is unlocked here.

        Raises:
            ValueError: it has ended before.
        """
        if not reservation.open:
            raise ValueError(f"{reservation!r} has ended already")
        holder = reservation.holder
        reservation.open = False
        del self._open[reservation]
        if reservation.parent is None:
            self._yielding[holder] -= reservation.blocks
        rest = self.tiers[holder].part(reservation.places, blocks, reservation.blocks)
        self.free_mem(holder, rest, reservation.use)
        if not blocks and reservation.parent is not None:
            self.tree.unlock(reservation.parent, holder)

    def entered(self, holder: Holder, blocks: int, use: Use) -> None:
        """Taken blocks are in the index now."""
        self._taken[holder][use] -= blocks

    def reserved(self, place: Place, use: Use | None = None) -> int:
        """Blocks of a place that are taken, for one use or for all. From any thread."""
        holder = place if isinstance(place, Holder) else self._full.get(place)
        taken = {} if holder is None else self._taken[holder]
        return sum(taken.values()) if use is None else taken.get(use, 0)

    def yielding(self, level: Tier) -> int:
        """Blocks of a tier that the engine may take back, at once or when the copies to them have ended."""
        return self._yielding[self._full[level]]

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
        open_blocks: Counter[tuple[Holder, Use]] = Counter()
        for each in self._open:
            open_blocks[each.holder, each.use] += each.blocks
        for holder, uses in self._taken.items():
            for use, count in uses.items():
                reserved = open_blocks[holder, use]
                if count != reserved:
                    raise AssertionError(
                        f"{count} blocks of {_title(holder)} are taken for {use}, {reserved} reserved"
                    )
        for holder, tier in self.tiers.items():
            known = self.tree.blocks_of(holder) + self.reserved(holder)
            if tier.exclusive and known != tier.n_blocks - tier.free_blocks:
                raise AssertionError(
                    f"{tier.n_blocks - tier.free_blocks} blocks of {_title(holder)} are in use, "
                    f"index and ledger know of {known}"
                )

    def __repr__(self) -> str:
        uses = Counter(f"{each.tier.title} {each.use}" for each in self._open)
        return f"Ledger({', '.join(f'{use}: {count}' for use, count in sorted(uses.items()))})"


def _title(holder: Holder) -> str:
    return holder.tier.title if holder.full is None else f"{holder.tier.title} {holder.component!r}"
