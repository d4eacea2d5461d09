"""The store of one rank: one index, and under it the memory of HBM and DRAM, with what is on its way to them.

Whatever brings KV from elsewhere (a disk, a peer, the other half of a prefill-decode pair, another tier) does
it in the same three steps:

    room = store.reserve(Tier.DRAM, namespace, key, Use.FETCH)   # behind what the tier has already
    ...                                                          # somebody fills room.places
    room.commit()                                                # or room.abort()

What a reservation continues is locked until it ends, so that it can be inserted; what has come to be in the
index meanwhile is kept once. A reservation of `Use.PREFETCH` gives way instead: nothing is locked for it, and
it is given up when the engine needs the memory.

The store counts MemServe's nine calls (table 1) where they are carried out, see `Call`. Everything here
happens in the scheduler's thread, and on every rank in the same order: no decision is taken from anything
that ranks do not have alike.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_ext.keys import TOKEN_BYTES, Tier
from sglang_ext.radix_global import Holder, Match, Node, RadixTree
from sglang_ext.radix_global.node import InsertResult


class Call(enum.StrEnum):
    """A call of table 1, as `sglang_ext_cache_mempool_calls_total` labels it."""

    ALLOC_MEM = "alloc_mem"
    """Memory was set aside for KV to come."""
    FREE_MEM = "free_mem"
    """It was given back without having been inserted."""
    INSERT = "insert"
    """KV that was computed here entered the index."""
    MATCH = "match"
    DELETE = "delete"
    """KV left the index for good."""
    SWAP_OUT = "swap_out"
    """Copies towards DRAM and disk were started."""
    SWAP_IN = "swap_in"
    """Copies towards HBM were started."""
    TRANSFER = "transfer"
    """Another instance's KV was brought into memory that a request owns."""
    TRANSFER_WITH_INSERT = "transfer_with_insert"
    """Another instance's KV was brought here and entered the index."""


class Use(enum.StrEnum):
    """What memory is reserved for."""

    PROMOTION = "promotion"
    """From disk, for a request that waits or was announced."""
    FETCH = "fetch"
    """From a peer."""
    RETURN = "return"
    """From the decode server to which the prompt was handed over."""
    PREFETCH = "prefetch"
    """From DRAM to HBM, for an announced request. Gives way to the engine."""
    OWNER = "owner"
    """Allocated by its owner (`MemPool.alloc_mem`)."""


class Refusal(enum.Enum):
    """Why there is no reservation. Nothing has changed then, but that older blocks may have been evicted."""

    KNOWN = "known"
    """Nothing is lacking."""
    BUDGET = "budget"
    """Its use has as much of the tier as it may have at a time."""
    NO_PARENT = "no_parent"
    """The tier has no copy of what the blocks continue, and has no room to make one."""
    NO_ROOM = "no_room"
    """Nothing of the tier is free, and nothing may be given up for this."""


class StoreTier(Protocol):
    """The memory of a tier, as the store asks for it. `testing.store_contract` holds implementations to it.

    *Taken* blocks are neither free nor in the index. A tier guarantees: `take` hands out no block twice; what
    it evicts for that is not locked; `give_back` accepts taken blocks only. The caller guarantees: every
    taken block is given back or entered, once.
    """

    @property
    def holder(self) -> Holder:
        """Who stands for this tier in the index."""

    @property
    def n_blocks(self) -> int:
        """Blocks that fit."""

    @property
    def taken_blocks(self) -> int:
        """Blocks that are taken now."""

    def reach(self, match: Match) -> tuple[Node, int] | None:
        """Where KV of the tier may go on: a node that it has (or the root), and the blocks up to there.

        May start copies to get there. None when it cannot be had.
        """

    def take(self, blocks: int, *, lose: bool = True, rank: float = -math.inf) -> Any:
        """Up to so many blocks, as `places` of the index: one entry per slot or block. Evicts for them.

        Args:
            lose: last copies may be evicted too.
            rank: otherwise, what was announced with a lower priority may be.
        """

    def count(self, places: Any) -> int:
        """How many blocks these places are."""

    def part(self, places: Any, start: int, end: int) -> Any:
        """The places of blocks `start` to `end`."""

    def give_back(self, places: Any) -> None:
        """Taken blocks are free again."""

    def entered(self, blocks: int) -> None:
        """So many taken blocks are in the index now."""

    def join(self, parts: Sequence[Any]) -> Any:
        """The places of a path, as one address."""

    def onward(self, node: Node, blocks: int) -> None:
        """The last `blocks` blocks up to `node` are new here: start copying them to the tiers below."""


@dataclass(frozen=True)
class Committed:
    """What a commit has put into the index.

    node: at which the committed blocks end. fresh: blocks that were not there; held: of the reservation,
    those that somebody else had inserted first, whose memory is free again. added: nodes that the tier has
    gained, from the top.
    """

    node: Node
    fresh: int
    held: int
    added: Sequence[Node] = ()


@dataclass(eq=False)
class Reservation:
    """Memory of a tier for the blocks of `key` from `start` on. Ends with `commit` or `abort`, once.

    Made by `Store.reserve`. places: as the index keeps them. source: the instance whose KV it is for, where
    it comes from one.
    """

    store: Store
    tier: Tier
    use: Use
    namespace: Hashable
    key: bytes
    start: int
    places: Any
    blocks: int
    parent: Node | None
    """What the blocks continue, locked; None where it gives way."""
    source: str = ""
    open: bool = True
    gives_way: bool = False
    """Nobody fills it any more, so that the engine may take its memory back at once."""
    on_surrender: Callable[[], None] = field(default=lambda: None)
    """Told when the engine has taken its memory back."""

    def commit(self, blocks: int | None = None, *, onward: bool = True) -> Committed | None:
        """Its first `blocks` blocks (None: all) are filled: insert them, and give back the rest.

        Args:
            onward: copy them to the tiers below too.

        Returns:
            None when none could be inserted: none was filled, or (where it gives way) what they continue was
            given up meanwhile. All is given back then.
        """
        return self.store.end(self, self.blocks if blocks is None else blocks, onward=onward)

    def abort(self) -> None:
        """It will not be filled, and nothing writes there any more: give it back."""
        self.store.end(self, 0)


class Store:
    """See the module's docstring.

    Args:
        tree: the rank's index.
    """

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self.calls: Counter[Call] = Counter()
        """Calls of table 1, since the start."""
        self._step = tree.block_size * TOKEN_BYTES
        self._tiers: dict[Tier, StoreTier] = {}
        self._open: dict[Reservation, None] = {}
        self._reserved: Counter[tuple[Tier, Use]] = Counter()
        """Blocks."""
        self._yielding: Counter[Tier] = Counter()

    def add(self, level: Tier, tier: StoreTier) -> None:
        """Let a tier's memory be reserved by its name."""
        self._tiers[level] = tier

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
        """Memory for what a tier lacks of the whole blocks of a prompt.

        Args:
            level: the tier.
            namespace, key: of the prompt, encoded, as far as it is to be brought.
            use: what for.
            whole: all of it or nothing; otherwise as many leading blocks as there is room for.
            share: at most one part in so many of the tier is reserved for this use at a time.
            lose, rank: see `StoreTier.take`.
            source: the instance whose KV it is.
        """
        tier = self._tiers[level]
        total = len(key) // self._step
        match = self.tree.match(namespace, key)
        if match.blocks >= total and level is not Tier.HBM:
            return Refusal.KNOWN
        reached = tier.reach(match)
        if reached is None:
            return Refusal.NO_PARENT
        parent, start = reached
        wanted = total - start
        if wanted <= 0:
            return Refusal.KNOWN
        if share > 1:
            left = tier.n_blocks // share - self.reserved(level, use)
            if left < (wanted if whole else 1):
                return Refusal.BUDGET
            wanted = min(wanted, left)
        found = self.reserve_behind(
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
        return found

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
        """As `reserve`, for so many blocks behind a node of the tier, `start` blocks into the prompt."""
        tier = self._tiers[level]
        # What the blocks continue must not be evicted to make room for them.
        self.tree.lock(parent, tier.holder)
        places = tier.take(blocks, lose=lose, rank=rank)
        got = tier.count(places)
        if not got or (whole and got < blocks):
            tier.give_back(places)
            self.tree.unlock(parent, tier.holder)
            return Refusal.NO_ROOM
        found = Reservation(self, level, use, namespace, key, start, places, got, parent, source)
        self._enter(found)
        return found

    def reserve_spare(
        self, level: Tier, namespace: Hashable, key: bytes, use: Use, start: int, blocks: int
    ) -> Reservation | Refusal:
        """What is free of a tier, for `blocks` blocks of `key` from `start` on, all or nothing. It gives way:
        nothing is locked for it, and the engine takes it back when it needs memory.
        """
        tier = self._tiers[level]
        places = tier.take(blocks, lose=False)
        got = tier.count(places)
        if not got or got < blocks:
            tier.give_back(places)
            return Refusal.NO_ROOM
        found = Reservation(self, level, use, namespace, key, start, places, got, None)
        self._enter(found)
        return found

    def _enter(self, reservation: Reservation) -> None:
        self._open[reservation] = None
        self._count(reservation, reservation.blocks)
        self.calls[Call.ALLOC_MEM] += 1

    def _count(self, reservation: Reservation, blocks: int) -> None:
        self._reserved[reservation.tier, reservation.use] += blocks
        if reservation.parent is None:
            self._yielding[reservation.tier] += blocks

    def end(self, reservation: Reservation, blocks: int, *, onward: bool = True) -> Committed | None:
        """See `Reservation.commit` and `abort`."""
        if not reservation.open:
            raise ValueError(f"{reservation!r} has ended already")
        tier = self._tiers[reservation.tier]
        reservation.open = False
        del self._open[reservation]
        self._count(reservation, -reservation.blocks)
        above = self._above(reservation, tier) if blocks else None
        if above is None:
            blocks = 0
        if blocks < reservation.blocks:
            tier.give_back(tier.part(reservation.places, blocks, reservation.blocks))
        done: Committed | None = None
        if above is not None:
            done = self._insert(reservation, tier, above, blocks)
            if onward and done.fresh:
                tier.onward(done.node, done.fresh)
        if reservation.parent is not None:
            self.tree.unlock(reservation.parent, tier.holder)
        if done is None:
            self.calls[Call.FREE_MEM] += 1
        elif reservation.use in (Use.FETCH, Use.RETURN):
            self.calls[Call.TRANSFER_WITH_INSERT] += 1
        return done

    def _above(self, reservation: Reservation, tier: StoreTier) -> list[Any] | None:
        """The places of what the tier has before a reservation's blocks; None where it has too little."""
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
        """Put what has arrived into the index, where somebody may have put it in the meantime."""
        start, places = reservation.start, tier.part(reservation.places, 0, blocks)
        key = reservation.key[: (start + blocks) * self._step]
        result: InsertResult = self.tree.insert(
            reservation.namespace, key, tier.holder, tier.join([*above, places]), same_request=True
        )
        held = result.held_blocks - start
        if held:
            tier.give_back(tier.part(places, 0, held))
        tier.entered(blocks - held)
        return Committed(result.node, blocks - held, held, result.added)

    # -- what is reserved -------------------------------------------------------------------------

    def reserved(self, level: Tier, use: Use | None = None) -> int:
        """Blocks of a tier that are reserved, for one use or for all. From any thread."""
        return sum(self._reserved[level, each] for each in (Use if use is None else (use,)))

    def yielding(self, level: Tier) -> int:
        """Blocks of it that the engine may take back, at once or when the copies to them have ended."""
        return self._yielding[level]

    def surrender(self, level: Tier) -> int:
        """The engine needs memory: give up what nobody fills any more of what gives way. How many blocks."""
        going = [each for each in self._open if each.tier is level and each.gives_way]
        for each in going:
            each.abort()
            each.on_surrender()
        return sum(each.blocks for each in going)

    @property
    def reservations(self) -> list[Reservation]:
        """Those that have not ended."""
        return list(self._open)

    def owns(self, level: Tier, blocks: int) -> None:
        """Owners have so many blocks more of a tier, or fewer."""
        self._reserved[level, Use.OWNER] += blocks

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming what is wrong."""
        for level, tier in self._tiers.items():
            if tier.taken_blocks != self.reserved(level):
                raise AssertionError(
                    f"{tier.taken_blocks} blocks of {level.name} are taken, {self.reserved(level)} reserved"
                )

    def __repr__(self) -> str:
        uses = Counter(f"{each.tier.name} {each.use}" for each in self._open)
        return f"Store({', '.join(f'{use}: {count}' for use, count in sorted(uses.items()))})"
