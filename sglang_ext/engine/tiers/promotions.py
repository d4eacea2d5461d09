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
import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.ranks import NOT_YET, Ranks
from sglang_ext.engine.tiers.block_names import Names, pack_names
from sglang_ext.engine.tiers.direct_loads import DirectLoad, DirectLoads
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.load_policy import DiskPolicy, Sources, first_blocks
from sglang_ext.engine.tiers.load_report import LoadDecisions, Reason
from sglang_ext.engine.tiers.promotion import DiskLook, Look, Promoted, Wanted
from sglang_ext.errors import InternalError
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.mempool.store import Refusal, Reservation, Use
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.tiered_store.loading.loader import Load, Loader
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, TierStats
from sglang_ext.tiers import Tier

logger = logging.getLogger(__name__)

_MAY_START: Final = 0
_OVER: Final = 1
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


@dataclass(eq=False)
class Promotion:
    wanted: Wanted
    reservation: Reservation
    """The blocks of DRAM that it fills, behind the node that they continue."""
    names: Names
    load: Load
    deadline: float
    sources: Sources
    """The tiers that have the blocks."""
    onward: bool = False
    """The blocks are written on to the nearest tier, because some rank lacks some of them there."""
    handles: dict[Hashable, Wanted] = field(default_factory=dict)
    late: bool = False
    streams_to: Hashable = None
    """The request that was admitted before all layers were in."""
    ahead: bool = False
    """A prefetch, for which no request waits yet: it gives way to all other reads, without a deadline."""
    streaming: bool = False
    """Its forward pass is reading the blocks, which must not be given back before it has ended."""


class Promotions(Planner):
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
        ranks: agree on the blocks that were found, and on those that have arrived.
        stream: whether requests may be admitted before all layers are in.
        clock: seconds, monotonic.
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
        ranks: Ranks,
        *,
        stream: bool = False,
        clock: Clock | None = None,
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
        self._ranks = ranks
        self._stream = stream and dram_tier.copies.streams
        self._no_streams: deque[Hashable] = deque(maxlen=_REMEMBERED)
        self._clock = clock or SystemClock()
        self._wanted: dict[Hashable, Wanted] = {}
        """Requests for which to look on the disk in the next pass."""
        self._proposed: tuple[list[Look], list[Promotion]] = ([], [])
        """The looks and promotions on which the ranks agree in this pass."""
        self._under_way: dict[bytes, Promotion] = {}
        """By the name of the first block."""
        self._waiting: dict[Hashable, Promotion] = {}
        self._arrived: dict[Hashable, Promoted] = {}
        self._streams: list[Promotion] = []
        """Promotions on which the next forward pass depends."""
        self._direct = DirectLoads(tier, loader, dram_tier)
        dram_tier.store.add_source(Tier.DISK, self)
        self._disk_look = DiskLook(tree, writes.names, tier, policy)
        ranks.add(self)
        self.counters = PromotionCounters()
        self.decisions = {part.tier: LoadDecisions() for part in tier.parts}
        """By the tier of the first block found."""

    # -- for a request --------------------------------------------------------------------------

    def begin(self, handle: Hashable, wanted: Wanted) -> None:
        """Look on the disk for blocks of a prompt that are not in memory, and start reading those that are
        worth it: in the next pass, before any batch is formed.
        """
        self._drop_straight(handle)
        self._wanted[handle] = wanted

    def _join(self, promotion: Promotion, handle: Hashable, wanted: Wanted) -> None:
        promotion.handles[handle] = wanted
        self._waiting[handle] = promotion
        wanted.report.shares(promotion.wanted.report)
        if promotion.ahead and not wanted.ahead:
            # From now on a request waits for it.
            promotion.ahead = False
            self._loader.set_priority(promotion.load, wanted.priority)
            patience = self.policy.patience(promotion.reservation.blocks, promotion.reservation.start)
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
            reservation = promotion.reservation
            assert reservation.parent is not None
            return Promoted(reservation.start * block, reservation.blocks * block, reservation.parent)
        return self._arrived.get(handle)

    def release(self, handle: Hashable) -> None:
        """The request has been admitted or is gone."""
        self._wanted.pop(handle, None)
        waiting = self._waiting.pop(handle, None)
        if waiting is not None:
            del waiting.handles[handle]
        arrived = self._arrived.pop(handle, None)
        if arrived is not None:
            self._tree.unlock(arrived.node, self._dram)
        self._drop_straight(handle)

    def _drop_straight(self, handle: Hashable) -> None:
        direct = self._direct.drop(handle)
        if direct is not None:
            self._tree.unlock(direct.parent, self._dram)

    # -- in front of the forward pass -------------------------------------------------------------

    def blocks_to_stream(self, handle: Hashable, in_memory: int) -> int:
        """The number of blocks that may stream to the request after the ``in_memory`` blocks of the tree."""
        direct = self._direct.get(handle)
        if direct is not None:
            return direct.blocks if direct.start == in_memory else 0
        promotion = self._waiting.get(handle)
        if promotion is None or promotion.streams_to != handle or promotion.reservation.start != in_memory:
            return 0
        return promotion.reservation.blocks

    def load(self, what: Hashable, places: Any, landed: Callable[[], None] | None = None) -> None:
        """Copy the blocks of ``blocks_to_stream`` of a handle to slots as they arrive."""
        assert landed is None, "what streams is waited for"
        handle, slots = what, places
        if self._direct.stream(handle, slots):
            return
        promotion = self._waiting[handle]
        promotion.streaming = True
        self._streams.append(promotion)
        self._dram_tier.copies.load(slots, promotion.reservation.places, promotion.load)

    def streams_hold(self) -> bool:
        """After a forward pass: whether all blocks that streamed into it were complete and verified."""
        if not (self._streams or self._direct.streams):
            return True
        streams, directs = self._streams, list(self._direct.streamed())
        self._streams = []
        whole = self._ranks.at_once(
            [int(self._streamed(promotion) == promotion.reservation.blocks) for promotion in streams]
            + [int(blocks == direct.blocks) for direct, blocks in directs]
        )
        for promotion, held in zip(streams, whole, strict=False):
            promotion.streaming = False
            if held:
                self.counters.streamed += promotion.reservation.blocks
                # The blocks enter the tree before the request inserts its own, and are not copied again.
                self._finish(promotion, promotion.reservation.blocks)
            else:
                self._no_streams.append(promotion.wanted.request)
        for (direct, _), held in zip(directs, whole[len(streams) :], strict=True):
            if held:
                self.counters.direct += direct.blocks
            else:
                self.counters.read_failed += direct.blocks
                self._no_streams.append(direct.request)
        return all(whole)

    def _streamed(self, promotion: Promotion) -> int:
        try:
            return promotion.load.wait(self._tier.layout.n_layers - 1).blocks
        except InternalError:
            return 0  # _blocks_read reports it

    # -- looking and starting -------------------------------------------------------------------

    def propose(self) -> Sequence[int]:
        """For each look below DRAM: the blocks found, the blocks worth reading, and whether all of them are
        in the nearest tier. For each promotion: whether it is late, and its progress: `NOT_YET`,
        `_MAY_START`, or `_OVER` plus the blocks read.
        """
        if not (self._wanted or self._under_way):
            return ()
        looks: list[Look] = []
        under_way = [each for each in self._under_way.values() if not each.streaming]
        waiting_bytes, said = self._loader.waiting_bytes, []
        for handle, wanted in list(self._wanted.items()):
            look = self._disk_look.look(handle, wanted, waiting_bytes)
            if look is None:
                del self._wanted[handle]
                continue
            looks.append(look)
            waiting_bytes += look.chosen * self._tier.layout.block_bytes
            said += [look.found, look.chosen, int(self._is_near(look.sources))]
        now = self._clock.monotonic()
        for promotion in under_way:
            said += [int(not promotion.late and now > promotion.deadline), self._progress(promotion)]
        self._proposed = (looks, under_way)
        return said

    def act(self, agreed: Sequence[int]) -> None:
        """Start and finish the promotions that all ranks are able to."""
        if not agreed:
            return
        looks, under_way = self._proposed
        self._proposed = ([], [])
        found, rest = agreed[: 3 * len(looks)], agreed[3 * len(looks) :]
        for look, said in zip(looks, zip(found[::3], found[1::3], found[2::3], strict=True), strict=True):
            if self._wanted.get(look.handle) is not look.wanted:
                self._unpin(look)
            else:
                self._found(look, *said)
        for promotion, late, progress in zip(under_way, rest[::2], rest[1::2], strict=True):
            if late:
                promotion.late = True
                promotion.streams_to = None
                self._loader.cancel(promotion.load)
            if progress >= _OVER:
                self._finish(promotion, progress - _OVER)
            elif progress == _MAY_START and not late and promotion.streams_to is None:
                promotion.streams_to = next(iter(promotion.handles))

    def _unpin(self, look: Look) -> None:
        if look.get is not None:
            self._tier.complete_get(look.get)

    def _found(self, look: Look, found: int, chosen: int, near: int) -> None:
        """Below DRAM every rank has ``found`` blocks, of which ``chosen`` are worth reading. near: whether
        every rank has all of them in the nearest tier."""
        handle, wanted = look.handle, look.wanted
        match = self._tree.match(wanted.namespace, wanted.key)
        if match.blocks != look.blocks:
            # The prompt's prefix in memory has changed since the look: look again in the next pass.
            self._unpin(look)
            return
        del self._wanted[handle]
        # Blocks from disk can only continue blocks in DRAM, so blocks in HBM alone are copied to DRAM first.
        reached = self._dram_tier.store.reach(Tier.DRAM, match) if found else None
        shared = self._under_way.get(look.names[0])
        if look.get is None or reached is None or shared is not None:
            self._unpin(look)
            if reached is not None and shared is not None:
                self._join(shared, handle, wanted)
            return
        promotion = self._start(look, look.get, reached[0], found, chosen)
        if promotion is not None:
            promotion.onward = not near
            promotion.handles[handle] = wanted
            self._waiting[handle] = self._under_way[look.names[0]] = promotion

    def _start(self, look: Look, get: Get, parent: Node, found: int, chosen: int) -> Promotion | None:
        handle, wanted, start = look.handle, look.wanted, look.blocks
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
            self._tree.lock(parent, self._dram)
            if not isinstance(reservation, Refusal):
                reservation.abort()
            self._direct.add(handle, DirectLoad(parent, wanted.request, start, chosen, get))
            return None
        if fits < chosen:
            self.counters.no_room += chosen - fits
            wanted.report.came(fits * self._tree.block_size, Reason.NO_ROOM)
        if isinstance(reservation, Refusal):
            self._tier.complete_get(get)
            return None
        patience = math.inf if wanted.ahead else self.policy.patience(fits, start)
        return Promotion(
            wanted,
            reservation,
            pack_names(look.names[:fits]),
            self._loader.load(self._tier, get, self._memory, reservation.places, priority=wanted.priority),
            deadline=self._clock.monotonic() + patience,
            sources=first_blocks(look.sources, fits),
            ahead=wanted.ahead,
        )

    def _is_near(self, sources: Sources) -> bool:
        return all(tier is self._tier.parts[0].tier for tier, _ in sources)

    def _may_stream(self, wanted: Wanted) -> bool:
        return self._stream and not wanted.ahead and wanted.request not in self._no_streams

    # -- arriving -------------------------------------------------------------------------------

    def _progress(self, promotion: Promotion) -> int:
        if promotion.load.over:
            return _OVER + self._blocks_read(promotion)
        return _MAY_START if self._may_start(promotion) else NOT_YET

    def _may_start(self, promotion: Promotion) -> bool:
        wanted = next(iter(promotion.handles.values()), None)
        if wanted is not promotion.wanted or promotion.late or not promotion.load.arrived(0):
            return False
        if not self._may_stream(wanted):
            return False
        context = (promotion.reservation.start + promotion.reservation.blocks) * self._tree.block_size
        new_tokens = len(wanted.key) // TOKEN_BYTES - context
        left = self._loader.bytes_left(promotion.load)
        return self.policy.may_start(promotion.sources, left, new_tokens, context)

    def _finish(self, promotion: Promotion, blocks: int) -> None:
        """It has ended, and every rank has read so many blocks."""
        del self._under_way[promotion.names[0].tobytes()]
        lost = promotion.reservation.blocks - blocks
        if promotion.late:
            self.counters.late += lost
        else:
            self.counters.read_failed += lost
            if not promotion.wanted.ahead:  # a prefetch queues behind other reads: its time is no measure
                self.policy.measured(first_blocks(promotion.sources, blocks), promotion.load.seconds)
        self.counters.promoted += blocks
        node = self._insert(promotion, blocks)
        block = self._tree.block_size
        tokens = blocks * block
        # A waiting request is credited with the tokens before a prefetch.
        for handle, wanted in sorted(promotion.handles.items(), key=lambda item: item[1].ahead):
            del self._waiting[handle]
            if lost:
                wanted.report.came(blocks * block, Reason.LATE if promotion.late else Reason.FAILED)
            if node is not None:
                self._arrive(handle, promotion.reservation.start * block, tokens, node)
                tokens = 0  # the others find it in DRAM
        for handle, wanted in promotion.handles.items():
            if len(wanted.key) > len(promotion.wanted.key):
                self.begin(handle, wanted)

    def _blocks_read(self, promotion: Promotion) -> int:
        try:
            return promotion.load.result().blocks
        except InternalError:
            logger.exception("reading from disk failed in a way that is not the disk's; computing instead")
            return 0

    def _arrive(self, handle: Hashable, start: int, tokens: int, node: Node) -> None:
        self._tree.lock(node, self._dram)
        before = self._arrived.get(handle)
        if before is not None:
            self._tree.unlock(before.node, self._dram)
            start, tokens = before.start, start - before.start + tokens
        self._arrived[handle] = Promoted(start, tokens, node)

    def _insert(self, promotion: Promotion, blocks: int) -> Node | None:
        """Insert arrived blocks into the tree, with their placements below DRAM. Returns the node at which
        they end.

        Blocks from a farther tier than the nearest are written to the nearest for the next request.
        """
        done = promotion.reservation.commit(blocks, onward=promotion.onward)
        if done is None:
            return None
        place = done.held
        for node in done.added:
            self._writes.place(node, promotion.names[place : place + node.blocks])
            place += node.blocks
        return done.node

    # -- whole ----------------------------------------------------------------------------------

    @property
    def reading(self) -> bool:
        return bool(self._wanted or self._under_way)

    def drop_in_flight(self) -> None:
        """Give up every promotion under way and every lock held for a request."""
        self._streams.clear()
        self._wanted.clear()
        for promotion in list(self._under_way.values()):
            promotion.late = True
            self._loader.cancel(promotion.load)
            try:
                promotion.load.result()
            except InternalError:
                logger.exception("reading from disk failed in a way that is not the disk's")
            del self._under_way[promotion.names[0].tobytes()]
            promotion.reservation.abort()
        self._waiting.clear()
        for handle in [*self._arrived, *self._direct.handles]:
            self.release(handle)

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
