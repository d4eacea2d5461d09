"""Copies between the pool and DRAM of one rank, in the order of submission, completed alike on all ranks.

Two queues, each with an order of its own: copies that a forward pass waits for (*loads*), and all others
(*writes* to DRAM, and copies to HBM ahead of requests). This module knows slots and blocks, and nothing of
the tree: a submitter passes a callback that the completion calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.engine.movers.mover import BlockIds, Copied, Mover, Near, Source
from sglang_ext.engine.ranks import Ranks

Done = Callable[[], None]


def _nothing() -> None:
    pass


@dataclass
class CopyCounters:
    """Blocks, since the start."""

    written: int = 0
    loaded: int = 0
    prefetched: int = 0
    """Brought to HBM ahead of a request."""


@dataclass
class _Queue:
    """Submitted copies that are not known to be complete on every rank."""

    pending: deque[tuple[int, Done]] = field(default_factory=deque)
    """Blocks of each, and its callback."""
    completed: int = 0

    def complete(self, upto: int) -> None:
        """Call back for every copy before this number."""
        while self.completed < upto:
            _, done = self.pending.popleft()
            self.completed += 1
            done()


class Copies:
    """See the module's docstring. The scheduler's thread only, unless a method says otherwise.

    Args:
        mover: copies; completes operations of each direction in the order of submission.
        ranks: agree on how many copies are complete.
    """

    def __init__(self, mover: Mover, ranks: Ranks) -> None:
        self.mover = mover
        self._ranks = ranks
        self._writes = _Queue()
        self._loads = _Queue()
        self.counters = CopyCounters()
        ranks.add(self)

    def __repr__(self) -> str:
        return (
            f"Copies(writing={len(self._writes.pending)}, loading={len(self._loads.pending)}, "
            f"{self.counters})"
        )

    # -- that no forward pass waits for -------------------------------------------------------------

    def write(self, slots: Any, blocks: BlockIds, done: Done) -> None:
        """Start copying slots to blocks of DRAM."""
        self.mover.write(slots, blocks)
        self._writes.pending.append((len(blocks), self._written(len(blocks), done)))

    def write_computed(self, slots: Any, blocks: BlockIds, source: Source, copied: Copied) -> None:
        """Start copying KV that a forward pass is about to compute, each layer once it is computed.

        ``copied`` is called for each layer, in another thread.
        """
        self.mover.write(slots, blocks, source, copied)
        self._writes.pending.append((len(blocks), self._written(len(blocks), _nothing)))

    def _written(self, blocks: int, done: Done) -> Done:
        def written() -> None:
            self.counters.written += blocks
            done()

        return written

    def bring(self, slots: Any, blocks: BlockIds, done: Done) -> None:
        """Start copying blocks to slots of HBM ahead of a request, behind all loads that a pass waits for."""

        def brought() -> None:
            self.counters.prefetched += len(blocks)
            done()

        self.mover.bring(slots, blocks)
        self._writes.pending.append((len(blocks), brought))

    def fill(self, slots: Any, blocks: BlockIds, layer: int, place: int, done: Done) -> None:
        """Start copying one layer of blocks to slots of the layer region, behind all loads that a pass waits
        for. See ``Mover.fill``."""
        self.mover.fill(slots, blocks, layer, place)
        self._writes.pending.append((0, done))

    # -- that the next forward pass waits for -------------------------------------------------------

    def load(
        self,
        slots: Any,
        blocks: BlockIds,
        source: Source | None = None,
        *,
        near: Sequence[Near] = (),
        done: Done = _nothing,
    ) -> None:
        """Start copying blocks to slots of HBM.

        Args:
            source: of blocks that still arrive: each layer is copied once it is there. They must stay taken
                until the load is complete.
            near: the parts that are in the layer region.
        """
        self.mover.load(slots, blocks, source, near=near)
        self._loads.pending.append((len(blocks), self._loaded(len(blocks), done)))

    def follow(self, source: Source, blocks: int) -> None:
        """Let the next forward pass wait for a load that does not go through DRAM."""
        self.mover.follow(source)
        self._loads.pending.append((blocks, self._loaded(blocks, _nothing)))

    def _loaded(self, blocks: int, done: Done) -> Done:
        def loaded() -> None:
            self.counters.loaded += blocks
            done()

        return loaded

    # -- the state of both --------------------------------------------------------------------------

    @property
    def loads_submitted(self) -> int:
        """Loads since the start; the ticket of the newest is one less."""
        return self._loads.completed + len(self._loads.pending)

    @property
    def loading(self) -> bool:
        return bool(self._loads.pending)

    @property
    def loading_blocks(self) -> int:
        """Blocks of loads that are not known to be complete."""
        return sum(blocks for blocks, _ in self._loads.pending)

    @property
    def writing(self) -> bool:
        return bool(self._writes.pending)

    @property
    def writes_ended(self) -> int:
        """Copies of the first queue that have ended since the start."""
        return self._writes.completed

    # -- completion ---------------------------------------------------------------------------------

    def propose(self) -> Sequence[int]:
        """How many writes and loads are complete on this rank."""
        if not (self._writes.pending or self._loads.pending):
            return ()
        return self.mover.writes_done(), self.mover.loads_done()

    def look(self) -> None:
        """Complete copies that have ended since the pass began, where no other rank has to agree."""
        if self._ranks.alone:
            self.act(self.propose())

    def act(self, agreed: Sequence[int]) -> None:
        """Complete the copies that have ended on every rank."""
        if agreed:
            self._writes.complete(agreed[0])
            self._loads.complete(agreed[1])

    def settle_oldest_write(self) -> None:
        """Wait for the oldest copy of the first queue, of which there must be one, on every rank."""
        self.mover.wait_writes(self._writes.completed + 1)
        self._writes.complete(self._writes.completed + 1)

    def settle(self) -> None:
        """Wait for every copy under way."""
        if self._writes.pending or self._loads.pending:
            self.mover.settle()
            self._writes.complete(self._writes.completed + len(self._writes.pending))
            self._loads.complete(self.loads_submitted)

    def close(self) -> None:
        """Wait for every copy under way, and end the mover."""
        try:
            self.settle()
        finally:
            self.mover.close()
