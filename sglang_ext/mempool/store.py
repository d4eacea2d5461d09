"""The store of one rank: one index, and under it the memory of HBM and DRAM, with KV on its way to them.

KV from elsewhere (a disk, a peer, the other half of a prefill-decode pair, another tier) always arrives in
the same three steps:

    reservation = store.reserve(Tier.DRAM, namespace, key, Use.FETCH)  # behind the tier's blocks of the key
    ...                                                                # copy KV to reservation.places
    reservation.commit()                                               # or reservation.abort()

A reservation locks the prefix that it continues until it ends, so that its blocks can be inserted. Blocks
that have entered the index in the meantime are kept once. A reservation of `Use.PREFETCH` gives way instead:
it locks nothing, and is given up when the engine needs the memory.

MemServe's nine calls (table 1) are methods of the store and of its ledger, by key and by tier, and are
counted as they are carried out, see `Call`. Every block that is neither free nor in the index is in the
ledger (`ledger.py`). The store calls tiers and the mechanisms that copy between them; tiers and `WriteDown`
call the ledger, and never the store. All methods run in the scheduler's thread, and on every rank in the
same order: decisions depend only on state that all ranks share. Calls that name another instance are in
`remote.py`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Hashable
from typing import Any, Protocol

from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.mempool.ledger import Call, Committed, Ledger, Reservation, StoreTier, Use
from sglang_ext.radix_global import Match, Node, RadixTree
from sglang_ext.radix_global.node import InsertResult
from sglang_ext.tiers import Tier

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


class Store:
    """See the module's docstring."""

    def __init__(self, tree: RadixTree) -> None:
        self.tree = tree
        self.ledger = Ledger(tree)
        """The memory of the tiers."""
        self.calls = self.ledger.calls
        self._step = tree.block_size * TOKEN_BYTES
        self._sources: dict[Tier, Source] = {}
        self._down: dict[Tier, CopiesDown] = {}

    def add_source(self, level: Tier, source: Source) -> None:
        """Let KV be loaded from there by its name."""
        self._sources[level] = source

    def copy_down(self, level: Tier, copies: CopiesDown) -> None:
        """Let blocks of this tier be copied to the one below."""
        self._down[level] = copies

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
        holder = self.ledger.tiers[level].holder
        result: InsertResult = self.tree.insert(namespace, key, holder, places, priority=priority)
        self.swap_out(level, result.node, result.new_blocks)
        return result

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

    def transfer(self) -> None:
        """Count another instance's KV that is to be read into slots of a request. The engine owns them;
        they are not in the ledger.
        """
        self.calls[Call.TRANSFER] += 1

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
    ) -> Reservation | Refusal:
        """Reserve memory for the whole blocks of a prompt that a tier lacks.

        Args:
            namespace, key: of the prompt, encoded, as far as its KV is to be brought.
            use: the purpose of the memory.
            whole: all blocks or none; otherwise as many leading blocks as there is room for.
            share: at most one part in so many of the tier is reserved for this use at a time.
            lose, rank: see `StoreTier.take`.
        """
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
            left = self.ledger.tiers[level].n_blocks // share - self.ledger.reserved(level, use)
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
        )

    def reach(self, level: Tier, match: Match) -> tuple[Node, int] | None:
        """Where KV of a tier may continue a match: a node that the tier has (or the root), and the number of
        blocks up to that node. In HBM, KV continues HBM's own part of the match. A tier below first copies
        the rest of the match from the tier above, so that KV continues the end of the match; None where there
        is no room for that copy.
        """
        holder, node = self.ledger.tiers[level].holder, match.node
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
    ) -> Reservation | Refusal:
        """Like `reserve`, for `blocks` blocks behind a node of the tier, `start` blocks into the prompt."""
        tier = self.ledger.tiers[level]
        # The prefix that the blocks continue must not be evicted to make room for them.
        self.tree.lock(parent, tier.holder)
        places = self.ledger.alloc_mem(level, blocks, use, whole=whole, lose=lose, rank=rank)
        if places is None:
            self.tree.unlock(parent, tier.holder)
            return Refusal.NO_ROOM
        return self._open(level, use, namespace, key, start, places, tier.count(places), parent)

    def reserve_spare(
        self, level: Tier, namespace: Hashable, key: bytes, use: Use, start: int, blocks: int
    ) -> Reservation | Refusal:
        """Reserve free memory of a tier for `blocks` blocks of `key` from `start` on, all or nothing. The
        reservation gives way: it locks nothing, and the engine takes the memory back when needed.
        """
        places = self.ledger.alloc_mem(level, blocks, use, whole=True, lose=False) if blocks else None
        if places is None:
            return Refusal.NO_ROOM
        return self._open(level, use, namespace, key, start, places, blocks, None)

    def _open(self, level: Tier, use: Use, *what: Any) -> Reservation:
        reservation = Reservation(self.ledger, self._commit, level, use, *what)
        self.ledger.open(reservation)
        return reservation

    def _commit(self, reservation: Reservation, blocks: int, onward: bool) -> Committed | None:
        """See `Reservation.commit`."""
        tier = self.ledger.tiers[reservation.tier]
        above = self._above(reservation, tier) if blocks and reservation.open else None
        if above is None:
            self.ledger.close(reservation, 0)
            return None
        self.ledger.close(reservation, blocks)
        done = self._insert(reservation, tier, above, blocks)
        if onward and done.fresh:
            self.swap_out(reservation.tier, done.node, done.fresh)
        if reservation.parent is not None:
            self.tree.unlock(reservation.parent, tier.holder)
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
        level, use, start = reservation.tier, reservation.use, reservation.start
        places = tier.part(reservation.places, 0, blocks)
        key = reservation.key[: (start + blocks) * self._step]
        result: InsertResult = self.tree.insert(
            reservation.namespace, key, tier.holder, tier.join([*above, places]), same_request=True
        )
        held = result.held_blocks - start
        self.ledger.free_mem(level, tier.part(places, 0, held), use)
        self.ledger.entered(level, blocks - held, use)
        if use in _COMMITTED:
            self.calls[_COMMITTED[use]] += 1
        return Committed(result.node, blocks - held, held, result.added)

    def __repr__(self) -> str:
        return f"Store({self.ledger!r})"
