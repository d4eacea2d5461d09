"""Blocks that a waiting request needs come from disk to DRAM, and are verified, before it is admitted.

The disk index is queried when a request enters the queue. Blocks found there are read into DRAM layer by
layer, lowest layer of all waiting requests first, and enter the tree once all of them verify; meanwhile
requests behind it may go first. From then on they are a DRAM hit like any other, locked until the request is
admitted. Unreadable blocks are computed: a fault of the disk costs time, never an answer.

Where the mover supports it, a request need not wait for the whole read: once the lowest layer is in and the
rest is expected to keep ahead of the forward pass, the request is admitted, and the other layers stream
through DRAM to its slots in front of the forward pass (Symphony, section 3.3). Those slots are the request's
own and not the tree's until the pass has ended and every layer has verified; if a layer does not verify, the
whole batch is discarded and runs again (``patches/hooks/restarts.py``).

Requests that want the same blocks share one promotion. All methods run in the scheduler's thread, and every
rank takes the same steps in the same order.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sglang_ext.engine.moves.move import Move, MovePlanner, State
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.moves.sources import FromDisk
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.tiers.block_names import NO_NAMES, Names, pack_names
from sglang_ext.engine.tiers.direct_loads import DirectLoad, DirectLoads
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.load_policy import DiskPolicy, Sources, first_blocks
from sglang_ext.engine.tiers.load_report import LoadDecisions, Reason
from sglang_ext.engine.tiers.promotion import Arrivals, DiskLook, Look, Promoted, Wanted
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.mempool.ledger import Committed, Use
from sglang_ext.mempool.store import Refusal
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiered_store.loading.loader import Load, Loader
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, TierStats
from sglang_ext.tiers import Tier

_REMEMBERED: Final = 256
"""Requests with a failed stream that are remembered; they wait for all layers the next time."""


@dataclass
class PromotionCounters:
    """Blocks, since the start."""

    promoted: int = 0
    recomputed: int = 0
    """Found on disk and left there, because computing is expected to be faster."""
    no_room: int = 0
    """Found on disk and left there, because DRAM is full of blocks in use."""
    read_failed: int = 0
    """Chosen and not read: damaged, unreadable, gone meanwhile; the disk tier counts them by reason."""
    late: int = 0
    """Given up, because reading took longer than computing would have."""
    streamed: int = 0
    """Promoted blocks that streamed during a forward pass instead of delaying it."""
    direct: int = 0
    """Not promoted but brought straight to HBM, because DRAM is full of blocks in use."""


@dataclass(eq=False, kw_only=True)
class Promotion(Move):
    """Blocks of a prompt that go from disk to DRAM; while it is wanted, the look for them.

    handle: the request that began it. look: of this pass; None after the ranks have agreed on it.
    """

    handle: Hashable
    wanted: Wanted
    look: Look | None = None
    names: Names = field(default_factory=lambda: NO_NAMES)
    sources: Sources = ()
    """The tiers that have the blocks."""
    handles: dict[Hashable, Wanted] = field(default_factory=dict)
    """The requests that wait for it."""
    ahead: bool = False
    """A prefetch, for which no request waits yet: it gives way to all other reads, without a deadline."""

    @property
    def load(self) -> Load:
        """The read that fills it."""
        assert isinstance(self.source, FromDisk)
        return self.source.load


class Promotions(Planner, MovePlanner):
    """See the module's docstring.

    Args:
        tree: the rank's tree.
        dram_tier: hands out DRAM blocks.
        dram: the holder that stands for this rank's DRAM.
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
        tree: RadixTree,
        dram_tier: DramTier,
        dram: Holder,
        writes: DiskWrites,
        tier: BlockTier,
        loader: Loader,
        memory: BlockMemory,
        policy: DiskPolicy,
        moves: Moves,
        *,
        stream: bool = False,
    ) -> None:
        self._tree = tree
        self._dram_tier = dram_tier
        self._dram = dram
        self._writes = writes
        self._tier = tier
        self._loader = loader
        self._memory = memory
        self._names = writes.names
        self.policy = policy
        self._moves = moves
        self._stream = stream and dram_tier.copies.mover.streams
        self._no_streams: deque[Hashable] = deque(maxlen=_REMEMBERED)
        self._clock = moves.clock
        self._wanted: dict[Hashable, Promotion] = {}
        """The promotions that look on the disk in the next pass, by request."""
        self._under_way: dict[bytes, Promotion] = {}
        """By the name of the first block."""
        self._waiting: dict[Hashable, Promotion] = {}
        self._arrivals = Arrivals(tree, dram)
        self._direct = DirectLoads(tier, loader, dram_tier, moves, self._direct_ended)
        dram_tier.store.add_source(Tier.DISK, self)
        self._disk_look = DiskLook(tree, writes.names, tier, policy, loader)
        self.counters = PromotionCounters()
        self.decisions = {part.tier: LoadDecisions() for part in tier.parts}
        """By the tier of the first block found."""

    # -- for a request --------------------------------------------------------------------------

    def begin(self, handle: Hashable, wanted: Wanted) -> None:
        """Look on the disk for blocks of a prompt that are not in memory, and start reading those that are
        worth it: in the next pass, before any batch is formed.
        """
        self._direct.drop(handle)
        self._drop_wanted(handle)
        promotion = Promotion(planner=self, handle=handle, wanted=wanted, ahead=wanted.ahead)
        self._wanted[handle] = promotion
        self._moves.want(promotion)

    def _join(self, promotion: Promotion, handle: Hashable, wanted: Wanted) -> None:
        promotion.handles[handle] = wanted
        self._waiting[handle] = promotion
        wanted.report.shares(promotion.wanted.report)
        if promotion.ahead and not wanted.ahead:
            # From now on a request waits for it.
            promotion.ahead = False
            self._loader.set_priority(promotion.load, wanted.priority)
            patience = self.policy.patience(promotion.blocks, promotion.start)
            promotion.deadline = self._clock.monotonic() + patience

    def ready(self, handle: Hashable) -> bool:
        """Whether the request need not wait for the disk."""
        promotion = self._waiting.get(handle)
        return handle not in self._wanted and (promotion is None or promotion.streams_to == handle)

    def expected_s(self, handle: Hashable) -> float:
        """Seconds until the blocks for which the request waits have been read, including reads that go first.
        0: unknown.
        """
        promotion = self._waiting.get(handle)
        if promotion is None:
            return 0.0
        before = 0 if not promotion.ahead else self._loader.waiting_bytes
        left = self._loader.bytes_left(promotion.load)
        return self.policy.read_s(promotion.sources, left + before) or 0.0

    def brought(self, handle: Hashable) -> Promoted | None:
        """The KV that a promotion has brought for the request, locked until ``release``; None for none."""
        block = self._tree.block_size
        direct = self._direct.get(handle)
        if direct is not None:
            return Promoted(direct.start * block, direct.blocks * block, direct.parent)
        promotion = self._waiting.get(handle)
        if promotion is not None and promotion.streams_to == handle:
            assert promotion.reservation is not None
            assert promotion.reservation.parent is not None
            return Promoted(promotion.start * block, promotion.blocks * block, promotion.reservation.parent)
        return self._arrivals.get(handle)

    def release(self, handle: Hashable) -> None:
        """The request has been admitted or is gone."""
        self._drop_wanted(handle)
        waiting = self._waiting.pop(handle, None)
        if waiting is not None:
            del waiting.handles[handle]
            if waiting.streams_to == handle:
                self._moves.release(handle)
        self._arrivals.release(handle)
        self._direct.drop(handle)

    def _drop_wanted(self, handle: Hashable) -> None:
        promotion = self._wanted.pop(handle, None)
        if promotion is not None:
            self._drop_look(promotion)
            self._moves.cancel(promotion)

    # -- in front of the forward pass -------------------------------------------------------------

    def stream(self, move: Promotion, slots: Any) -> None:
        self._dram_tier.store.swap_in(Tier.DISK, move, slots)

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
            self._drop_wanted(move.handle)
            return None
        return look.found, look.chosen, int(self._is_near(look.sources))

    def _drop_look(self, promotion: Promotion) -> None:
        look, promotion.look = promotion.look, None
        if look is not None:
            self._disk_look.drop(look)

    def offered(self, move: Promotion, agreed: Sequence[int]) -> None:
        """Start to read the blocks that every rank has and finds worth reading."""
        found, chosen, near = agreed
        look, wanted = move.look, move.wanted
        assert look is not None
        match = self._tree.match(wanted.namespace, wanted.key)
        if match.blocks != look.blocks:
            # The prompt's prefix in memory has changed since the look: look again in the next pass.
            self._drop_look(move)
            return
        # Blocks from disk can only continue blocks in DRAM, so blocks in HBM alone are copied to DRAM first.
        reached = self._dram_tier.store.reach(Tier.DRAM, match) if found else None
        shared = self._under_way.get(look.names[0])
        if look.get is None or reached is None or shared is not None:
            self._drop_wanted(move.handle)
            if reached is not None and shared is not None:
                self._join(shared, move.handle, wanted)
            return
        move.look = None
        self._disk_look.end(look)
        del self._wanted[move.handle]
        move.onward = not near
        self._start(move, look, look.get, reached[0], found, chosen)

    def _start(
        self, promotion: Promotion, look: Look, get: Get, parent: Node, found: int, chosen: int
    ) -> None:
        handle, wanted, start = promotion.handle, promotion.wanted, look.blocks
        self.counters.recomputed += found - chosen
        if look.decision is not None:
            decision = dataclasses.replace(look.decision, blocks=chosen)
            sizes = self._tree.block_size, self._tier.layout.block_bytes
            wanted.report.decided(found, decision, *sizes, first_blocks(look.sources, found))
            self.decisions[look.sources[0][0]].note(wanted.report)
        reservation = self._dram_tier.store.reserve_behind(
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
            # The blocks go straight to HBM, and continue the same node.
            self._direct.add(handle, wanted.request, parent, start, chosen, get)
            if not isinstance(reservation, Refusal):
                reservation.abort()
            self._moves.cancel(promotion)
            return
        if fits < chosen:
            self.counters.no_room += chosen - fits
            wanted.report.came(fits * self._tree.block_size, Reason.NO_ROOM)
        if isinstance(reservation, Refusal):
            self._tier.complete_get(get)
            self._moves.cancel(promotion)
            return
        promotion.names = pack_names(look.names[:fits])
        promotion.sources = first_blocks(look.sources, fits)
        promotion.deadline = math.inf
        if not wanted.ahead:
            promotion.deadline = self._clock.monotonic() + self.policy.patience(fits, start)
        load = self._loader.load(self._tier, get, self._memory, reservation.places, priority=wanted.priority)
        self._moves.fill(promotion, reservation, FromDisk(self._loader, load))
        promotion.handles[handle] = wanted
        self._waiting[handle] = self._under_way[look.names[0]] = promotion

    def _is_near(self, sources: Sources) -> bool:
        return all(tier is self._tier.parts[0].tier for tier, _ in sources)

    def _may_stream(self, wanted: Wanted) -> bool:
        return self._stream and not wanted.ahead and wanted.request not in self._no_streams

    # -- arriving -------------------------------------------------------------------------------

    def late(self, move: Promotion) -> None:
        self._moves.stop(move)

    def may_start(self, move: Promotion) -> bool:
        wanted = next(iter(move.handles.values()), None)
        if wanted is not move.wanted or not self._may_stream(wanted):
            return False
        context = (move.start + move.blocks) * self._tree.block_size
        new_tokens = len(wanted.key) // TOKEN_BYTES - context
        left = self._loader.bytes_left(move.load)
        return self.policy.may_start(move.sources, left, new_tokens, context)

    def started(self, move: Promotion) -> None:
        if move.streams_to is None and move.handles:
            self._moves.admit(move, next(iter(move.handles)))

    def _direct_ended(self, load: DirectLoad, blocks: int) -> None:
        if blocks == load.blocks:
            self.counters.direct += blocks
        else:
            self.counters.read_failed += load.blocks
            self._no_streams.append(load.request)

    def ended(self, move: Promotion, blocks: int, done: Committed | None) -> None:
        if move.reservation is None:
            return  # the look found nothing to read
        del self._under_way[move.names[0].tobytes()]
        if move.state is not State.CANCELLED:
            self._read(move, blocks, done)

    def _read(self, promotion: Promotion, blocks: int, done: Committed | None) -> None:
        """Every rank has read so many blocks of it."""
        late, lost = promotion.state is State.LATE, promotion.blocks - blocks
        if late:
            self.counters.late += lost
        else:
            self.counters.read_failed += lost
            if not promotion.wanted.ahead:  # a prefetch queues behind other reads: its time is no measure
                self.policy.measured(first_blocks(promotion.sources, blocks), promotion.load.seconds)
        self.counters.promoted += blocks
        if promotion.streamed and not lost:
            self.counters.streamed += blocks
        elif promotion.streamed:
            self._no_streams.append(promotion.wanted.request)
        if done is not None:
            self._place(promotion, done)
        block = self._tree.block_size
        tokens = blocks * block
        # A waiting request is credited with the tokens before a prefetch.
        for handle, wanted in sorted(promotion.handles.items(), key=lambda item: item[1].ahead):
            del self._waiting[handle]
            if lost:
                wanted.report.came(blocks * block, Reason.LATE if late else Reason.FAILED)
            if done is not None:
                self._arrivals.add(handle, promotion.start * block, tokens, done.node)
                tokens = 0  # the others find it in DRAM
        for handle, wanted in promotion.handles.items():
            if len(wanted.key) > len(promotion.wanted.key):
                self.begin(handle, wanted)

    def _place(self, promotion: Promotion, done: Committed) -> None:
        """Record that the tiers below have the blocks that DRAM has gained. Blocks from a farther tier than
        the nearest are written to the nearest for the next request (`Move.onward`).
        """
        place = done.held
        for node in done.added:
            self._writes.place(node, promotion.names[place : place + node.blocks])
            place += node.blocks

    # -- whole ----------------------------------------------------------------------------------

    @property
    def reading(self) -> bool:
        return bool(self._wanted or self._under_way)

    def drop_in_flight(self) -> None:
        """Give up every promotion under way and every lock held for a request."""
        for handle in [*self._wanted, *self._arrivals.handles, *self._direct.handles]:
            self.release(handle)
        self._waiting.clear()
        for move in [*self._moves.of(self), *self._moves.of(self._direct)]:
            self._moves.cancel(move)

    def clear(self) -> None:
        """Give up all promotions, and clear the disk tier."""
        self.drop_in_flight()
        self._tier.clear()

    def close(self) -> None:
        """End, and close the disk. Does not touch the tree."""
        self._loader.close()
        self._tier.close()

    @property
    def block_bytes(self) -> int:
        return self._tier.layout.block_bytes

    def stats(self) -> dict[Tier, TierStats]:
        """The contents and events of each tier below memory."""
        return {part.tier: part.stats() for part in self._tier.parts}

    def blocks(self) -> Mapping[Tier, tuple[int, int]]:
        return {
            tier: (stats.blocks, stats.limit_bytes // self.block_bytes)
            for tier, stats in self.stats().items()
        }

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError that names the inconsistency."""
        waiting = {handle for promotion in self._under_way.values() for handle in promotion.handles}
        if waiting != self._waiting.keys():
            raise AssertionError("requests that wait and promotions under way do not agree")

    def __repr__(self) -> str:
        return f"Promotions(under_way={len(self._under_way)}, waiting={len(self._waiting)}, {self.counters})"
