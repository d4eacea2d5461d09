"""The DRAM tier of one rank: written through in the background, loaded back in front of the forward pass.

A block gets its DRAM placement when its copy is submitted, and the tree's DRAM lock holds it until the copy
is complete. Nothing reads it before: the block is in HBM meanwhile, which is where every match prefers it,
and HBM gives up a block whose copy is under way only after waiting for it. So a placement in the tree is
always readable when it is needed, and losing the HBM copy later costs nothing.

With a disk below, a complete block goes on to it before its lock ends, and eviction takes blocks that are on
disk before any others.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Container, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from sglang_ext.engine.ranks import Ranks
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.layer_region import Cell, LayerRegion
from sglang_ext.engine.tiers.mover import BlockIds, Copied, LayerSink, Mover, Near, Source
from sglang_ext.engine.tiers.retention import Announced, Retention, weakest_first
from sglang_ext.engine.tiers.spilled import Spilled
from sglang_ext.geometry import BlockLayout
from sglang_ext.mempool.store import Store
from sglang_ext.own_functions import SortKey
from sglang_ext.radix_global import Evicted, Holder, Match, Node
from sglang_ext.radix_global.observer import CopyObserver, Unobserved
from sglang_ext.tiers import Tier

logger = logging.getLogger(__name__)


class Arena(Protocol):
    """The part of the DRAM arena that the tier needs."""

    n_blocks: int
    layout: BlockLayout

    @property
    def block_bytes(self) -> int: ...

    @property
    def free_blocks(self) -> int: ...

    def alloc(self, n: int) -> BlockIds | None: ...

    def free(self, ids: BlockIds) -> None: ...

    def check(self) -> None: ...


@dataclass
class DramCounters:
    """Blocks, since the start."""

    written: int = 0
    loaded: int = 0
    evicted: int = 0
    skipped: int = 0
    """Not written: everything in the arena was locked."""
    prefetched: int = 0
    """Brought to HBM ahead of a request."""


@dataclass
class _Queue:
    """A queue of submitted operations, completed in order."""

    pending: deque[tuple[Node | None, int]] = field(default_factory=deque)
    """The last node of each, and its blocks when it was submitted; no node for blocks outside of the tree."""
    landed: deque[Callable[[], None]] = field(default_factory=deque)
    """Of the writes without a node: whom to tell."""
    completed: int = 0


class DramTier:
    """See the module's docstring. Called by the scheduler thread only.

    Args:
        store: of the rank; this tier adds and removes placements of ``dram`` in its tree.
        hbm, dram: the holders that stand for this rank's two tiers.
        arena: hands out blocks.
        mover: copies; completes operations of each direction in the order of submission.
        ranks: agree on how many operations are complete.
        below: takes complete blocks on to disk; ``None`` without a disk.
        copies: is told of copies under way.
        write: whether anything new is written at all; what is there is found and loaded in any case.
        pressure: which announced session gives way first.
        layers: most bytes of HBM for the lowest layers of announced sessions (`layer_region`); 0 for none,
            None for as much as is good.
        for_others: blocks that may be kept for other instances (`spilled`).
    """

    def __init__(
        self,
        store: Store,
        hbm: Holder,
        dram: Holder,
        arena: Arena,
        mover: Mover,
        ranks: Ranks,
        *,
        below: DiskWrites | None = None,
        copies: CopyObserver | None = None,
        write: bool = True,
        pressure: Callable[[Announced], SortKey] = weakest_first,
        layers: int | None = 0,
        for_others: int = 0,
    ) -> None:
        self.store = store
        self._tree = store.tree
        self._hbm = hbm
        self._dram = dram
        self._arena = arena
        self._mover = mover
        self.below = below
        self._write_new = write
        # Holds nothing: its locks mark what is being copied, on the right nodes however they are split.
        self._copying = Holder.of(f"{dram.instance} DRAM writes", dram.epoch, dram.tier)
        self._writes = _Queue()
        self._loads = _Queue()
        self.counters = DramCounters()
        self._copies = copies or Unobserved()
        marker = Holder.of(f"{hbm.instance} announced requests", hbm.epoch, hbm.tier)
        self.retention = Retention(store.tree, marker, pressure)
        """What is held back for requests that were announced, here and in HBM."""
        self.spilled = Spilled(store.tree, hbm, dram, self.retention, for_others)
        """What is kept for other instances, and goes before anything else."""
        self.region: LayerRegion | None = None
        if layers != 0 and LayerRegion.fits(arena.layout):
            self.region = LayerRegion(store, arena.layout, layers, self.retention.knows)
        self._reading: deque[tuple[int, Sequence[Near]]] = deque()
        """Loads under way that copy from the region, by number."""
        store.add(Tier.DRAM, self)
        store.add_source(Tier.DRAM, self)
        self._ranks = ranks
        ranks.add(self)

    @property
    def source(self) -> Holder:
        """HBM, from where it is filled."""
        return self._hbm

    # -- HBM to DRAM ----------------------------------------------------------------------------

    def write_through(self, node: Node, *, always: bool = False) -> bool:
        """Start copying what of the prefix ending at ``node`` is not in DRAM, its beginning first.

        Evicts older blocks for it. Where nothing more can go, the rest is skipped and counted. ``always``:
        also where nothing is written by itself. Whether anything was begun.
        """
        if not self._write_new and not always:
            return False
        before = len(self._writes.pending)
        missing: list[Node] = []
        while node.parent is not None and self._dram not in node.placements:
            missing.append(node)
            node = node.parent
        # What the copy continues must not be evicted to make room for it.
        self._tree.lock(node, self._dram)
        try:
            while missing and self._write(missing[-1]):
                missing.pop()
        finally:
            self._tree.unlock(node, self._dram)
        self.counters.skipped += sum(left.blocks for left in missing)
        return len(self._writes.pending) > before

    def _write(self, node: Node) -> bool:
        """Submit one node, or as much of its beginning as fits. True when all of it was."""
        self._make_room(node.blocks)
        fits = min(node.blocks, self._arena.free_blocks)
        if fits == 0:
            return False
        part = node if fits == node.blocks else self._tree.split(node, fits)
        blocks = self._arena.alloc(fits)
        assert blocks is not None
        self._copies.copy_begins(part, self._dram)
        self._tree.place(part, self._dram, blocks)
        self._tree.lock(part, self._dram)
        self._tree.lock(part, self._copying)
        self._mover.write(part.placements[self._hbm], blocks)
        self._writes.pending.append((part, fits))
        return part is node

    def _make_room(self, blocks: int, *, lose: bool = True, rank: float = -math.inf) -> None:
        shortage = blocks - self._arena.free_blocks
        if shortage > 0:
            shortage -= self._delete(self.spilled.give_up(shortage))
        if shortage > 0 and self.below is not None:
            # Durable before free: these cost nothing but a read.
            shortage -= self._evict(shortage, only=self.below.durable)
            shortage -= self._give_up(shortage, self.below.durable, below=math.inf if lose else rank)
        if shortage > 0 and lose:
            shortage -= self._evict(shortage)
            shortage -= self._give_up(shortage, lambda node: True)
            self._evict(shortage, spare=())

    def _evict(
        self,
        blocks: int,
        only: Callable[[Node], bool] | None = None,
        spare: Container[Node] | None = None,
    ) -> int:
        """What is announced stays, unless ``spare`` says otherwise."""
        if spare is None:
            spare = self.retention
        return self._delete(self._tree.evict(self._dram, blocks, only=only, spare=spare))

    def _give_up(self, blocks: int, may_go: Callable[[Node], bool], below: float = math.inf) -> int:
        return self._delete(self.retention.give_up(self._dram, blocks, may_go, below=below))

    def _delete(self, gone: Sequence[Evicted]) -> int:
        count = self.store.delete(Tier.DRAM, gone)
        self.counters.evicted += count
        return count

    def has_copy(self, node: Node) -> bool:
        """Whether a complete copy of ``node`` is in DRAM or on disk, so that HBM may give it up for free.

        Asked of the last HBM node of a prefix only: a mark on it then means its own copy.
        """
        if self._dram in node.placements:
            # While it is being copied the slots are read, even if the disk has it already.
            return not node.locks.get(self._copying)
        return self.below is not None and self.below.durable(node)

    def incomplete(self) -> set[Node]:
        """Nodes whose copy in DRAM is still being made, and must not be read."""
        found: set[Node] = set()
        for last, blocks in self._writes.pending:
            node = last
            while node is not None and blocks > 0:
                found.add(node)
                blocks -= node.blocks
                node = node.parent
        return found

    def take(self, blocks: int, *, lose: bool = True, rank: float = -math.inf) -> BlockIds:
        """Up to so many blocks of the arena, for somebody who fills them, and inserts or returns them.

        Evicts older blocks for them. Unless ``lose``, only what is on disk too and was not announced, or with
        a lower priority than ``rank``.
        """
        self._make_room(blocks, lose=lose, rank=rank)
        taken = self._arena.alloc(min(blocks, self._arena.free_blocks))
        assert taken is not None
        return taken

    def room_for_others(self, namespace: Hashable, key: bytes) -> int:
        """How many leading blocks of a prompt, those that are here included, there is room for in what nobody
        has and what is kept for others longer. 0 for no more than is here.
        """
        found = self._tree.match(namespace, key)
        if found.path and self._dram not in found.node.placements:
            return 0  # what is in HBM only is this instance's own, and newer
        wanted = len(key) // self._tree.block_bytes - found.blocks
        # What they continue must not go for them.
        if found.path:
            self._tree.lock(found.node, self._dram)
        try:
            self._delete(self.spilled.make_room(wanted, self._arena.free_blocks))
        finally:
            if found.path:
                self._tree.unlock(found.node, self._dram)
        fits = min(wanted, self._arena.free_blocks, self.spilled.limit - self.spilled.blocks)
        return found.blocks + fits if fits > 0 else 0

    def give_back(self, places: BlockIds) -> None:
        """Blocks that were taken, or were in the tree, and are not needed."""
        if len(places):
            if self.region is not None:
                self.region.forget(places)
            self._arena.free(places)

    def reach(self, match: Match) -> tuple[Node, int] | None:
        """Where a match ends, once DRAM has what HBM has of it, also where nothing is written by itself."""
        node = match.node
        if not node.is_root and self._dram not in node.placements:
            self.store.swap_out(Tier.HBM, node, always=True)
            if self._dram not in node.placements:
                return None
        return node, match.blocks

    def count(self, places: BlockIds) -> int:
        """How many blocks these are."""
        return len(places)

    def part(self, places: BlockIds, start: int, end: int) -> BlockIds:
        """Some of these blocks."""
        return places[start:end]

    def join(self, parts: Sequence[BlockIds]) -> BlockIds:
        """The blocks of a path."""
        return np.concatenate(parts)

    def onward(self, node: Node, blocks: int, *, always: bool = False) -> bool:
        """Blocks that are new here go on to disk."""
        if self.below is None:
            return False
        self._tree.lock(node, self._dram)
        return self.below.submit(node, blocks)

    def push_on(self, path: Sequence[Node]) -> None:
        """Start what of a path, from its top, has not begun to go down, because there was no room for it."""
        in_hbm = [node for node in path if self._hbm in node.placements]
        if in_hbm and self._dram not in in_hbm[-1].placements:
            self.write_through(in_hbm[-1])
        below, last = self.below, None
        for node in path:
            if self._dram not in node.placements or node.locks.get(self._copying):
                break
            last = node
        if below is not None and last is not None and below.left_out(last):
            self._tree.lock(last, self._dram)
            below.submit(last, 0)

    # -- DRAM to HBM ----------------------------------------------------------------------------

    def load(self, what: list[Node], places: Any, landed: Callable[[], None] | None = None) -> None:
        """Start copying nodes (a path, from the top, all in DRAM) to slots, which become their HBM.

        Both copies stay locked until the load is complete. With ``landed``, it comes behind everything that
        somebody waits for; the slots stay the caller's, and no batch waits for them. It is called when they
        have the bytes; until then the nodes stay locked for DRAM.
        """
        nodes, slots, last = what, places, what[-1]
        blocks = np.concatenate([node.placements[self._dram] for node in nodes])
        if landed is not None:

            def brought() -> None:
                self._tree.unlock(last, self._dram)
                self.counters.prefetched += len(blocks)
                landed()

            self._tree.lock(last, self._dram)
            self._mover.bring(slots, blocks)
            self._writes.pending.append((None, len(blocks)))
            self._writes.landed.append(brought)
            return
        unit = len(slots) // len(blocks)
        start = 0
        for node in nodes:
            end = start + node.blocks * unit
            self._copies.copy_begins(node, self._hbm)
            self._tree.place(node, self._hbm, slots[start:end])
            start = end
        self._tree.lock(last, self._dram)
        self._tree.lock(last, self._hbm)
        near = () if self.region is None else self.region.near(blocks)
        if near:
            self._reading.append((self.loads_submitted(), near))
        self._mover.load(slots, blocks, near=near)
        self._loads.pending.append((last, len(blocks)))

    def fill(self, last: Node, cell: Cell, slots: Any, landed: Callable[[], None]) -> None:
        """Start copying what a cell of the region is for, behind everything that somebody waits for.

        last: node of DRAM at or after the blocks, which stay locked until ``landed`` is called.
        """

        def filled() -> None:
            self._tree.unlock(last, self._dram)
            landed()

        self._tree.lock(last, self._dram)
        self._mover.fill(slots, cell.ids, cell.layer, cell.place)
        self._writes.pending.append((None, 0))
        self._writes.landed.append(filled)

    @property
    def load_bytes_per_second(self) -> float | None:
        """How fast loads are copied; ``None`` before the first."""
        return self._mover.load_bytes_per_second

    @property
    def streams(self) -> bool:
        """Whether blocks can be loaded while they still arrive."""
        return self._mover.streams

    def stream(self, ids: BlockIds, slots: Any, source: Source) -> None:
        """Start copying blocks that were taken and are still being filled, each layer once it is there.

        They stay taken until the load is complete, which the caller finds out by waiting for its layers.
        """
        self._mover.load(slots, ids, source)
        self._loads.pending.append((None, len(ids)))

    def write_computed(self, slots: Any, ids: BlockIds, source: Source, copied: Copied) -> None:
        """Start copying what a forward pass is about to compute to blocks that were taken, each layer once it
        is computed. ``copied`` is told of each layer, in another thread.
        """

        def written() -> None:
            self.counters.written += len(ids)

        self._mover.write(slots, ids, source, copied)
        self._writes.pending.append((None, len(ids)))
        self._writes.landed.append(written)

    def check_copies(self) -> None:
        """Raises MoverError where copying has failed, so that nothing more of it comes."""
        self._mover.writes_done()

    def into(self, slots: Any) -> LayerSink:
        """What copies layers from staging buffers to ``slots``."""
        return self._mover.into(slots)

    def follow(self, source: Source, blocks: int) -> None:
        """Let the next forward pass wait for a load that passes by this tier."""
        self._mover.follow(source)
        self._loads.pending.append((None, blocks))

    def loads_submitted(self) -> int:
        """How many loads there have been; the ticket of the newest is one less."""
        return self._loads.completed + len(self._loads.pending)

    @property
    def loading(self) -> bool:
        return bool(self._loads.pending)

    @property
    def loading_blocks(self) -> int:
        """Blocks of loads that are not known to be complete."""
        return sum(blocks for _, blocks in self._loads.pending)

    @property
    def writing(self) -> bool:
        return bool(self._writes.pending)

    @property
    def copies_ended(self) -> int:
        """Copies to DRAM, and those ahead of requests to HBM, that have ended since the start."""
        return self._writes.completed

    # -- completion -----------------------------------------------------------------------------

    def propose(self) -> Sequence[int]:
        """How many writes and loads are complete here."""
        if not (self._writes.pending or self._loads.pending):
            return ()
        return self._mover.writes_done(), self._mover.loads_done()

    def look(self) -> None:
        """Take note of what has completed since the pass began, where no other rank has to be asked."""
        if self._ranks.alone:
            self.act(self.propose())

    def act(self, agreed: Sequence[int]) -> None:
        """Take note of operations that have completed on every rank."""
        if agreed:
            self._complete_writes(agreed[0])
            self._complete_loads(agreed[1])

    def settle(self) -> None:
        """Wait for every operation under way."""
        if self._writes.pending or self._loads.pending:
            self._mover.settle()
            self._complete_writes(self._writes.completed + len(self._writes.pending))
            self._complete_loads(self.loads_submitted())

    def _complete_writes(self, upto: int) -> None:
        while self._writes.completed < upto:
            node, blocks = self._writes.pending.popleft()
            self._writes.completed += 1
            if node is None:
                self._writes.landed.popleft()()
                continue
            self._tree.unlock(node, self._copying)
            self._copies.copy_ended(node, blocks, self._dram)
            self.counters.written += blocks
            self.store.swap_out(Tier.DRAM, node, blocks)
            self._tree.unlock(node, self._dram)

    def _complete_loads(self, upto: int) -> None:
        while self._loads.completed < upto:
            node, blocks = self._loads.pending.popleft()
            self._loads.completed += 1
            if node is not None:
                self._tree.unlock(node, self._dram)
                self._tree.unlock(node, self._hbm)
                self._copies.copy_ended(node, blocks, self._hbm)
            self.counters.loaded += blocks
        while self._reading and self._reading[0][0] < upto:
            assert self.region is not None
            self.region.read(self._reading.popleft()[1])

    @property
    def holder(self) -> Holder:
        """Who stands for this tier in the tree."""
        return self._dram

    @property
    def arena(self) -> Arena:
        return self._arena

    @property
    def block_bytes(self) -> int:
        return self._arena.block_bytes

    @property
    def exclusive(self) -> bool:
        """The arena is the tier's alone."""
        return True

    @property
    def n_blocks(self) -> int:
        """Blocks that fit."""
        return self._arena.n_blocks

    @property
    def free_blocks(self) -> int:
        """Blocks of the arena that nobody has."""
        return self._arena.free_blocks

    @property
    def used_blocks(self) -> int:
        return self._arena.n_blocks - self._arena.free_blocks

    # -- whole ----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Forget every block; the tree has been emptied or is about to be."""
        self.settle()
        if self.region is not None:
            self.region.clear()
        self.spilled.clear()
        if self.below is not None:
            self.below.settle()
            self.below.clear()
        for node in self._tree.nodes():
            if self._dram in node.placements:
                self._arena.free(node.placements[self._dram])
        self._tree.drop_holder(self._dram)

    def close(self) -> None:
        """Finish every copy under way, down to the disk, and end."""
        try:
            self.settle()
        finally:
            self._mover.close()
            if self.below is not None:
                self.below.close()

    def check(self) -> None:
        """Verify the arena. Raises AssertionError naming what is wrong. `Store.check` compares it."""
        self._arena.check()
        self.spilled.check()
        if self.region is not None:
            self.region.check()

    def __repr__(self) -> str:
        return (
            f"DramTier({self.used_blocks}/{self.n_blocks} blocks, writing={len(self._writes.pending)}, "
            f"loading={len(self._loads.pending)}, {self.counters})"
        )
