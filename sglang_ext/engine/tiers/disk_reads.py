"""Reads of blocks from disk, for the requests that wait for them (`promotions.py`).

A read begins with a look at the disk, whose result the ranks compare in the next pass. Requests that want the
same blocks share one read. Blocks go to DRAM, or straight to HBM where DRAM has no room for them.

Where the mover supports it, a request need not wait for the whole read: once the lowest layer is in and the
rest is expected to keep ahead of the forward pass, the request is admitted, and the other layers stream
through DRAM to its slots in front of the forward pass (Symphony, section 3.3). Those slots are the request's
own and not the tree's until the pass has ended and every layer has verified; if a layer does not verify, the
whole batch is discarded and runs again (``patches/hooks/restarts.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from sglang_ext.engine.moves.move import MovePlanner, State
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.moves.sources import FromDisk
from sglang_ext.engine.tiers.block_names import pack_names
from sglang_ext.engine.tiers.direct_loads import DirectLoad, DirectLoads
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.load_policy import DiskPolicy, first_blocks
from sglang_ext.engine.tiers.load_report import Reason
from sglang_ext.engine.tiers.promotion import DiskLook, DiskWait, Look, Promotion, Wanted
from sglang_ext.engine.tiers.promotion_results import PromotionResults
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.mempool.ledger import Committed, Use
from sglang_ext.mempool.store import Refusal, Store
from sglang_ext.radix_global import Node
from sglang_ext.tiered_store.loading.loader import Loader
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get
from sglang_ext.tiers import Tier


class DiskReads(MovePlanner):
    """See the module's docstring.

    Args:
        store: hands out DRAM blocks.
        writes: records which nodes are durable.
        tier: the disk.
        loader: reads from it.
        memory: the DRAM arena.
        policy: decides how many blocks to read.
        moves: of the rank.
        stream: whether requests may be admitted before all layers are in.
    """

    def __init__(
        self,
        store: Store,
        dram_tier: DramTier,
        writes: DiskWrites,
        tier: BlockTier,
        loader: Loader,
        memory: BlockMemory,
        policy: DiskPolicy,
        moves: Moves,
        *,
        stream: bool = False,
    ) -> None:
        self._store = store
        self._tree = store.tree
        self._dram_tier = dram_tier
        self._writes = writes
        self._tier = tier
        self._loader = loader
        self._memory = memory
        self.policy = policy
        self._moves = moves
        self._stream = stream and dram_tier.copies.mover.streams
        self.under_way: dict[bytes, Promotion] = {}
        """By the name of the first block."""
        self.results = PromotionResults(tier, policy)
        self._direct = DirectLoads(tier, loader, store, dram_tier, moves, self.results.direct_ended)
        store.add_source(Tier.DISK, self)
        self._disk_look = DiskLook(self._tree, writes.names, tier, policy, loader)

    def __repr__(self) -> str:
        return f"DiskReads({len(self.under_way)})"

    # -- for a request --------------------------------------------------------------------------

    def begin(self, wait: DiskWait) -> None:
        """Look on the disk in the next pass."""
        wait.move = Promotion(planner=self, wanted=wait.wanted, waits=[wait], ahead=wait.wanted.ahead)
        self._moves.want(wait.move)

    def _join(self, promotion: Promotion, wait: DiskWait) -> None:
        wanted = wait.wanted
        promotion.waits.append(wait)
        wait.move = promotion
        wanted.report.shares(promotion.wanted.report)
        if promotion.ahead and not wanted.ahead:
            # From now on a request waits for it.
            promotion.ahead = False
            self._loader.set_priority(promotion.load, wanted.priority)
            patience = self.policy.patience(promotion.blocks, promotion.start)
            promotion.deadline = self._moves.clock.monotonic() + patience

    def expected_s(self, wait: DiskWait) -> float:
        """See `Promotions.expected_s`."""
        promotion = wait.move
        if promotion is None or promotion.state is State.WANTED:
            return 0.0
        before = 0 if not promotion.ahead else self._loader.waiting_bytes
        left = self._loader.bytes_left(promotion.load)
        return self.policy.read_s(promotion.sources, left + before) or 0.0

    def release(self, wait: DiskWait) -> None:
        """The request has been admitted or is gone. A read goes on without it."""
        self._leave(wait)
        wait.unlock(self._tree, self._dram_tier.holder)
        if wait.direct is not None:
            self._direct.drop(wait.direct)
            wait.direct = None

    def _leave(self, wait: DiskWait) -> None:
        """Let the request wait for nothing more. A look of its own ends."""
        move, wait.move = wait.move, None
        if move is None:
            return
        move.waits.remove(wait)
        if move.state is State.WANTED:
            self._drop_look(move)
            self._moves.cancel(move)
        elif move.streams_to == wait.handle:
            self._moves.release(wait.handle)

    def _drop_look(self, promotion: Promotion) -> None:
        look, promotion.look = promotion.look, None
        if look is not None:
            self._disk_look.drop(look)

    # -- in front of the forward pass -------------------------------------------------------------

    def stream(self, move: Promotion, slots: Any) -> None:
        self._store.swap_in(Tier.DISK, move, slots)

    def load(self, what: Any, places: Any, landed: Callable[[], None] | None = None) -> None:
        """Copy the blocks of a move to slots as they arrive."""
        assert landed is None, "the next forward pass waits for a move that streams"
        if isinstance(what, DirectLoad):
            self._direct.load(what, places)
            return
        self._dram_tier.copies.load(places, what.reservation.places, what.load)

    # -- looking and starting -------------------------------------------------------------------

    def offer(self, move: Promotion) -> Sequence[int] | None:
        """The blocks found below DRAM, the blocks worth reading, and whether all of them are in the nearest
        tier.
        """
        look = move.look = self._disk_look.look(move.wanted)
        if look is None:
            self._leave(move.waits[0])
            return None
        nearest = self._tier.parts[0].tier
        return look.found, look.chosen, int(all(tier is nearest for tier, _ in look.sources))

    def offered(self, move: Promotion, agreed: Sequence[int]) -> None:
        """Start to read the blocks that every rank has and finds worth reading."""
        found, chosen, near = agreed
        look, wanted, wait = move.look, move.wanted, move.waits[0]
        assert look is not None
        match = self._tree.match(wanted.namespace, wanted.key)
        if match.blocks != look.blocks:
            # The prompt's prefix in memory has changed since the look: look again in the next pass.
            self._drop_look(move)
            return
        # Blocks from disk can only continue blocks in DRAM, so blocks in HBM alone are copied to DRAM first.
        reached = self._store.reach(Tier.DRAM, match) if found else None
        shared = self.under_way.get(look.names[0])
        if look.get is None or reached is None or shared is not None:
            self._leave(wait)
            if reached is not None and shared is not None:
                self._join(shared, wait)
            return
        move.look = None
        self._disk_look.end(look)
        move.onward = not near
        self._start(move, look, look.get, reached[0], found, chosen)

    def _start(
        self, promotion: Promotion, look: Look, get: Get, parent: Node, found: int, chosen: int
    ) -> None:
        wait, wanted, start = promotion.waits[0], promotion.wanted, look.blocks
        block = self._tree.block_size
        self.results.decided(wanted.report, look, found, chosen, block)
        reservation = self._store.reserve_behind(
            Tier.DRAM,
            wanted.namespace,
            wanted.key,
            Use.PROMOTION,
            parent,
            start,
            chosen,
            lose=not wanted.ahead,
            rank=wanted.rank,
        )
        fits = 0 if isinstance(reservation, Refusal) else reservation.blocks
        if fits < chosen and self._may_stream(wanted):
            self._leave(wait)
            # The blocks go straight to HBM, and continue the same node.
            wait.direct = self._direct.add(wait.handle, wanted.request, parent, start, chosen, get)
            if not isinstance(reservation, Refusal):
                reservation.abort()
            return
        if fits < chosen:
            self.results.counters.no_room += chosen - fits
            wanted.report.came(fits * block, Reason.NO_ROOM)
        if isinstance(reservation, Refusal):
            self._tier.complete_get(get)
            self._leave(wait)
            return
        promotion.names = pack_names(look.names[:fits])
        promotion.sources = first_blocks(look.sources, fits)
        if not wanted.ahead:
            promotion.deadline = self._moves.clock.monotonic() + self.policy.patience(fits, start)
        load = self._loader.load(self._tier, get, self._memory, reservation.places, priority=wanted.priority)
        self._moves.fill(promotion, reservation, FromDisk(self._loader, load))
        self.under_way[look.names[0]] = promotion

    def _may_stream(self, wanted: Wanted) -> bool:
        return self._stream and not wanted.ahead and wanted.request not in self.results.no_streams

    # -- arriving -------------------------------------------------------------------------------

    def late(self, move: Promotion) -> None:
        self._moves.stop(move)

    def may_start(self, move: Promotion) -> bool:
        wanted = move.waits[0].wanted if move.waits else None
        if wanted is not move.wanted or not self._may_stream(wanted):
            return False
        context = (move.start + move.blocks) * self._tree.block_size
        new_tokens = len(wanted.key) // TOKEN_BYTES - context
        left = self._loader.bytes_left(move.load)
        return self.policy.may_start(move.sources, left, new_tokens, context)

    def started(self, move: Promotion) -> None:
        if move.streams_to is None and move.waits:
            self._moves.admit(move, move.waits[0].handle)

    def ended(self, move: Promotion, blocks: int, done: Committed | None) -> None:
        if move.reservation is None:
            return  # the look found nothing to read
        del self.under_way[move.names[0].tobytes()]
        if move.state is State.CANCELLED:
            return
        self.results.ended(move, blocks)
        if done is not None:
            # The tiers below have the blocks that DRAM has gained. Blocks from a farther tier than the
            # nearest are written to the nearest for the next request (`Move.onward`).
            place = done.held
            for node in done.added:
                self._writes.place(node, move.names[place : place + node.blocks])
                place += node.blocks
        block = self._tree.block_size
        tokens = blocks * block
        why = Reason.LATE if move.state is State.LATE else Reason.FAILED
        waits, move.waits = move.waits, []
        # A waiting request is credited with the tokens before a prefetch.
        for wait in sorted(waits, key=lambda each: each.wanted.ahead):
            wait.move = None
            if blocks < move.blocks:
                wait.wanted.report.came(blocks * block, why)
            if done is not None:
                wait.lock(self._tree, self._dram_tier.holder, move.start * block, tokens, done.node)
                tokens = 0  # the others find it in DRAM
        for wait in waits:
            if len(wait.wanted.key) > len(move.wanted.key):
                self.begin(wait)

    @property
    def open(self) -> list[Promotion]:
        """Looks, and reads under way."""
        return cast(list[Promotion], self._moves.of(self))

    def drop_in_flight(self) -> None:
        """Give up every look and every read under way."""
        for move in [*self._moves.of(self), *self._moves.of(self._direct)]:
            self._moves.cancel(move)
