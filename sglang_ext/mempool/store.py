"""The store of one rank: one index, and under it the memory of HBM and DRAM, with KV on its way to them.

KV from elsewhere (a disk, a peer, the other half of a prefill-decode pair, another tier) always arrives in
the same three steps:

    reservation = store.reserve(Tier.DRAM, namespace, key, Use.FETCH)  # behind the tier's blocks of the key
    ...                                                                # copy KV to reservation.places
    reservation.commit()                                               # or reservation.abort()

A reservation locks the prefix that it continues until it ends, so that its blocks can be inserted. Blocks
that have entered the index in the meantime are kept once. A reservation of `Use.PREFETCH` gives way instead:
it locks nothing, and is given up when the engine needs the memory.

MemServe's nine calls (table 1) are methods of the store, by key and by place, and are counted as they are
carried out, see `Call`. A place is a holder (a component in a tier), or a tier, which means the holder of its
full component. Every block that is neither free nor in the index is in the store's ledger, and nowhere else.
All methods run in the scheduler's thread, and on every rank in the same order: decisions depend only on state
that all ranks share. Calls that name another instance are in `remote.py`.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.radix_global import Evicted, Holder, Match, Node, RadixTree
from sglang_ext.radix_global.node import InsertResult
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


_COMMITTED = {
    Use.PROMOTION: Call.SWAP_IN,
    Use.FETCH: Call.TRANSFER_WITH_INSERT,
    Use.RETURN: Call.TRANSFER_WITH_INSERT,
    Use.SPAN: Call.SWAP_OUT,
}
"""The call as which the commit of a reservation is counted, by use. The other uses were counted when their
copy began."""
_MATCH, _INSERT = Call.MATCH, Call.INSERT
# Every request counts these two, and attribute access on an enum is slow.


class Refusal(enum.Enum):
    """Why there is no reservation. The store is unchanged then, except that older blocks may have been
    evicted.
    """

    KNOWN = "known"
    """The tier lacks no block of the prompt."""
    BUDGET = "budget"
    """The use has as much of the tier as it may have at a time."""
    NO_PARENT = "no_parent"
    """The tier has no copy of the prefix that the blocks continue, and no room to make one."""
    NO_ROOM = "no_room"
    """No block of the tier is free, and none may be evicted for this use."""


class StoreTier(Protocol):
    """The memory of a tier, as the store uses it. `testing.store_contract` checks implementations.

    *Taken* blocks are neither free nor in the index. A tier guarantees: `take` hands out no block twice; the
    blocks that it evicts to make room are unlocked, and leave by `Store.delete`. The caller guarantees: every
    taken block is given back or inserted, once.
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


class CopiesDown(Protocol):
    """Copies blocks of one tier to the tier below it."""

    def __call__(self, node: Node, blocks: int, *, always: bool = False) -> bool:
        """Start copying the last `blocks` blocks up to `node`, which are new in the tier, and the blocks
        before them that the tier below lacks too. Returns whether a copy was started.

        Args:
            always: also where new blocks are not copied by themselves.
        """


class Source(Protocol):
    """A tier from which KV is loaded into HBM."""

    def load(self, what: Any, places: Any, landed: Callable[[], None] | None = None) -> None:
        """Start copying to places of HBM; the next forward pass waits for the copy. With `landed`, the copy
        runs at low priority behind all copies that a forward pass waits for, and `landed` is called when it
        is complete.
        """


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

    Made by `Store.reserve`. places: as the index keeps them. source: the instance that sends the KV, if any.
    """

    store: Store
    holder: Holder
    use: Use
    namespace: Hashable
    key: bytes
    start: int
    places: Any
    blocks: int
    parent: Node | None
    """The node that the blocks continue, locked; None where the reservation gives way."""
    source: str = ""
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
        return self.store.end(self, self.blocks if blocks is None else blocks, onward=onward)

    def abort(self) -> None:
        """Give the memory back unfilled. No write to it may be under way."""
        self.store.end(self, 0)


@dataclass(eq=False)
class Incoming:
    """Another instance's KV on its way into memory that a request owns. Made by `Store.transfer`.

    source: the instance.
    """

    store: Store
    tier: Tier
    tokens: int
    source: str
    open: bool = True

    def end(self) -> None:
        """The KV has arrived, or will not come. May be called twice."""
        if self.open:
            self.open = False
            self.store.incoming.remove(self)


class Store:
    """See the module's docstring."""

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self.calls = dict.fromkeys(Call, 0)
        """Calls of table 1, since the start."""
        self.incoming: list[Incoming] = []
        """KV on its way into memory of requests."""
        self._step = tree.block_size * TOKEN_BYTES
        self.tiers: dict[Holder, StoreTier] = {}
        """The memory that can be reserved, by its holder in the index."""
        self.evicted: Counter[Holder] = Counter()
        """Blocks that were deleted from each holder, since the start."""
        self._full: dict[Tier, Holder] = {}
        self._sources: dict[Tier, Source] = {}
        self._down: dict[Tier, CopiesDown] = {}
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

    def add_source(self, level: Tier, source: Source) -> None:
        """Let KV be loaded from there by its name."""
        self._sources[level] = source

    def copy_down(self, level: Tier, copies: CopiesDown) -> None:
        """Let blocks of this tier be copied to the one below."""
        self._down[level] = copies

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

    # -- the index --------------------------------------------------------------------------------

    def match(self, namespace: Hashable, key: bytes) -> Match:
        """The longest known prefix of a prompt, as of now. The caller locks the nodes that must stay."""
        self.calls[_MATCH] += 1
        return self.tree.match(namespace, key)

    def insert(
        self,
        level: Tier,
        namespace: Hashable,
        key: bytes,
        places: Any,
        *,
        priority: int = 0,
        call: Call = _INSERT,
    ) -> InsertResult:
        """Put KV that was computed here into the index; new blocks are copied to the tier below.

        Args:
            places: of all whole blocks of `key`, including those that the tier had in the index before. The
                index keeps the old places of these; the places given for them stay the caller's.
            priority: see `RadixTree.insert`.
            call: the call as which the insertion is counted.
        """
        self.calls[call] += 1
        holder = self._full[level]
        result: InsertResult = self.tree.insert(namespace, key, holder, places, priority=priority)
        self.swap_out(level, result.node, result.new_blocks)
        return result

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

    # -- between tiers ----------------------------------------------------------------------------

    def swap_out(self, level: Tier, node: Node, blocks: int = 0, *, always: bool = False) -> bool:
        """Copy the part of the path to `node` that the tier below lacks; see `CopiesDown`."""
        down = self._down.get(level)
        started = down is not None and down(node, blocks, always=always)
        if started:
            self.calls[Call.SWAP_OUT] += 1
        return started

    def swap_in(self, level: Tier, what: Any, places: Any, landed: Callable[[], None] | None = None) -> None:
        """Copy from a tier to places of HBM; see `Source.load`. `what` names the KV: from DRAM the nodes of a
        path, from the top; from disk the handle of a request whose blocks are ready.
        """
        self._sources[level].load(what, places, landed)
        self.calls[Call.SWAP_IN] += 1

    # -- between instances ------------------------------------------------------------------------

    def transfer(self, level: Tier, tokens: int, source: str) -> Incoming:
        """Register `tokens` tokens of another instance's KV on their way into memory that a request owns.
        That memory belongs to the engine and is not in the ledger.
        """
        found = Incoming(self, level, tokens, source)
        self.incoming.append(found)
        self.calls[Call.TRANSFER] += 1
        return found

    def transfer_with_insert(
        self, level: Tier, namespace: Hashable, key: bytes, places: Any, **how: Any
    ) -> InsertResult:
        """Like `insert`, for KV that another instance has computed."""
        return self.insert(level, namespace, key, places, call=Call.TRANSFER_WITH_INSERT, **how)

    # -- reserving ------------------------------------------------------------------------------

    def reserve(
        self,
        level: Tier,
        namespace: Hashable,
        key: bytes,
        use: Use,
        *,
        whole: bool = False,
        share: int = 1,
        lose: bool = True,
        rank: float = -math.inf,
        source: str = "",
    ) -> Reservation | Refusal:
        """Reserve memory for the whole blocks of a prompt that a tier lacks.

        Args:
            namespace, key: of the prompt, encoded, as far as its KV is to be brought.
            use: the purpose of the memory.
            whole: all blocks or none; otherwise as many leading blocks as there is room for.
            share: at most one part in so many of the tier is reserved for this use at a time.
            lose, rank: see `StoreTier.take`.
            source: the instance that sends the KV.
        """
        holder = self._full[level]
        total = len(key) // self._step
        match = self.tree.match(namespace, key)
        if match.blocks >= total and level is not Tier.HBM:
            return Refusal.KNOWN
        reached = self.reach(level, match)
        if reached is None:
            return Refusal.NO_PARENT
        parent, start = reached
        wanted = total - start
        if wanted <= 0:
            return Refusal.KNOWN
        if share > 1:
            left = self.tiers[holder].n_blocks // share - self.reserved(holder, use)
            if left < (wanted if whole else 1):
                return Refusal.BUDGET
            wanted = min(wanted, left)
        return self.reserve_behind(
            level,
            namespace,
            key,
            use,
            parent,
            start,
            wanted,
            whole=whole,
            lose=lose,
            rank=rank,
            source=source,
        )

    def reach(self, level: Tier, match: Match) -> tuple[Node, int] | None:
        """Where KV of a tier may continue a match: a node that the tier has (or the root), and the number of
        blocks up to that node. In HBM, KV continues HBM's own part of the match. A tier below first copies
        the rest of the match from the tier above, so that KV continues the end of the match; None where there
        is no room for that copy.
        """
        holder, node = self._full[level], match.node
        if level is Tier.HBM:
            path = [each for each in match.path if holder in each.placements]
            return (path[-1] if path else self.tree.root), sum(each.blocks for each in path)
        if not node.is_root and holder not in node.placements:
            self.swap_out(Tier.HBM, node, always=True)
            if holder not in node.placements:
                return None
        return node, match.blocks

    def reserve_behind(
        self,
        level: Tier,
        namespace: Hashable,
        key: bytes,
        use: Use,
        parent: Node,
        start: int,
        blocks: int,
        *,
        whole: bool = False,
        lose: bool = True,
        rank: float = -math.inf,
        source: str = "",
    ) -> Reservation | Refusal:
        """Like `reserve`, for `blocks` blocks behind a node of the tier, `start` blocks into the prompt."""
        holder = self._full[level]
        # The prefix that the blocks continue must not be evicted to make room for them.
        self.tree.lock(parent, holder)
        places = self.alloc_mem(holder, blocks, use, whole=whole, lose=lose, rank=rank)
        if places is None:
            self.tree.unlock(parent, holder)
            return Refusal.NO_ROOM
        count = self.tiers[holder].count(places)
        found = Reservation(self, holder, use, namespace, key, start, places, count, parent, source)
        self._open[found] = None
        return found

    def reserve_spare(
        self, level: Tier, namespace: Hashable, key: bytes, use: Use, start: int, blocks: int
    ) -> Reservation | Refusal:
        """Reserve free memory of a tier for `blocks` blocks of `key` from `start` on, all or nothing. The
        reservation gives way: it locks nothing, and the engine takes the memory back when needed.
        """
        holder = self._full[level]
        places = self.alloc_mem(holder, blocks, use, whole=True, lose=False) if blocks else None
        if places is None:
            return Refusal.NO_ROOM
        found = Reservation(self, holder, use, namespace, key, start, places, blocks, None)
        self._open[found] = None
        self._yielding[holder] += blocks
        return found

    def end(self, reservation: Reservation, blocks: int, *, onward: bool = True) -> Committed | None:
        """See `Reservation.commit` and `abort`."""
        if not reservation.open:
            raise ValueError(f"{reservation!r} has ended already")
        holder, use, places = reservation.holder, reservation.use, reservation.places
        tier = self.tiers[holder]
        reservation.open = False
        del self._open[reservation]
        if reservation.parent is None:
            self._yielding[holder] -= reservation.blocks
        above = self._above(reservation, tier) if blocks else None
        if above is None:
            blocks = 0
        self.free_mem(holder, tier.part(places, blocks, reservation.blocks), use)
        done: Committed | None = None
        if above is not None:
            done = self._insert(reservation, tier, above, blocks)
            if onward and done.fresh:
                self.swap_out(holder.tier, done.node, done.fresh)
        if reservation.parent is not None:
            self.tree.unlock(reservation.parent, holder)
        return done

    def _above(self, reservation: Reservation, tier: StoreTier) -> list[Any] | None:
        """The tier's places of the blocks before a reservation's; None where the tier lacks some of them."""
        holder = tier.holder
        above: list[Any] = []
        if reservation.parent is not None:
            node = reservation.parent
            while node.parent is not None:
                above.append(node.placements[holder])
                node = node.parent
            above.reverse()
            return above
        found = self.tree.match(reservation.namespace, reservation.key[: reservation.start * self._step])
        if found.blocks < reservation.start or (found.path and holder not in found.node.placements):
            return None
        return [node.placements[holder] for node in found.path]

    def _insert(self, reservation: Reservation, tier: StoreTier, above: list[Any], blocks: int) -> Committed:
        """Insert arrived blocks into the index, which may have gained some of them in the meantime."""
        holder, use, start = reservation.holder, reservation.use, reservation.start
        places = tier.part(reservation.places, 0, blocks)
        key = reservation.key[: (start + blocks) * self._step]
        result: InsertResult = self.tree.insert(
            reservation.namespace, key, holder, tier.join([*above, places]), same_request=True
        )
        held = result.held_blocks - start
        self.free_mem(holder, tier.part(places, 0, held), use)
        self._taken[holder][use] -= blocks - held
        if use in _COMMITTED:
            self.calls[_COMMITTED[use]] += 1
        return Committed(result.node, blocks - held, held, result.added)

    # -- the ledger ---------------------------------------------------------------------------------

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
        uses += Counter(f"{each.tier.title} transfer" for each in self.incoming)
        return f"Store({', '.join(f'{use}: {count}' for use, count in sorted(uses.items()))})"


def _title(holder: Holder) -> str:
    return holder.tier.title if holder.full is None else f"{holder.tier.title} {holder.component!r}"
