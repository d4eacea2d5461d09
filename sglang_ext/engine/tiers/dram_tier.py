"""The DRAM tier of one rank: its blocks, the order in which they go, and loads of nodes back to HBM.

Blocks that are also on disk are evicted before any others. ``write_down`` fills the tier from HBM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from sglang_ext.engine.movers.copies import Copies
from sglang_ext.engine.movers.mover import BlockIds, Near
from sglang_ext.engine.tiers.disk_writes import DiskWrites
from sglang_ext.engine.tiers.retention import Announced, Retention, weakest_first
from sglang_ext.geometry import BlockLayout
from sglang_ext.mempool.ledger import Ledger
from sglang_ext.own_functions import SortKey
from sglang_ext.radix_global import Evicted, Holder, Node
from sglang_ext.radix_global.observer import UNOBSERVED, CopyObserver
from sglang_ext.tiers import Tier


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


class NearCopies(Protocol):
    """A mechanism that keeps copies of single layers of DRAM blocks in HBM."""

    def near(self, ids: BlockIds) -> Sequence[Near]:
        """The parts of blocks about to be loaded that it has. They stay until `read`."""

    def read(self, near: Sequence[Near]) -> None:
        """A load of these parts is complete."""

    def forget(self, ids: BlockIds) -> None:
        """Drop the copies of blocks that leave DRAM."""


class Guests(Protocol):
    """A mechanism that keeps KV of other instances in idle blocks of DRAM, which are evicted first."""

    @property
    def limit(self) -> int:
        """Blocks that may be kept."""

    @property
    def shown(self) -> int:
        """Blocks that are kept; from any thread."""

    def room_for(self, namespace: Hashable, key: bytes) -> int:
        """The number of leading blocks of a prompt, including those already here, that may be kept. 0 if
        no further block fits.
        """

    def add(self, namespace: Hashable, key: bytes, start: int, blocks: int) -> None:
        """Keep ``blocks`` blocks of a prompt's ``key`` from ``start`` on for others."""

    def give_up(self, blocks: int) -> Sequence[Evicted]:
        """Take up to ``blocks`` blocks from DRAM; the caller frees them."""

    def on_export(self, nodes: Sequence[Node]) -> None:
        """These nodes are exported to another instance."""


class DramTier:
    """See the module's docstring. Called by the scheduler thread only.

    Args:
        ledger: of the rank; this tier adds and removes placements of ``dram`` in its tree.
        copies: between the pool and the arena.
        below: take complete blocks on to disk; none without a disk.
        observer: notified of loads under way.
        pressure: orders announced sessions; the smallest gives way first.
        block_bytes: of a block, by which ranks decide alike; by default those of the arena.
    """

    exclusive = True
    """The arena is the tier's alone."""

    def __init__(
        self,
        ledger: Ledger,
        hbm: Holder,
        dram: Holder,
        arena: Arena,
        copies: Copies,
        *,
        below: Sequence[DiskWrites] = (),
        observer: CopyObserver = UNOBSERVED,
        pressure: Callable[[Announced], SortKey] = weakest_first,
        block_bytes: int | None = None,
    ) -> None:
        self.ledger = ledger
        self._tree = ledger.tree
        self._hbm = self.source = hbm
        self._dram = self.holder = dram
        self._arena = arena
        self.n_blocks, self.block_bytes = arena.n_blocks, block_bytes or arena.block_bytes
        self.copies = copies
        self.below = below
        self._observer = observer
        marker = Holder.of(f"{hbm.instance} announced requests", hbm.epoch, hbm.tier)
        self.retention = Retention(ledger.tree, marker, pressure)
        """Blocks that are held back for announced requests, here and in HBM."""
        self.guests: list[Guests] = []
        """Mechanisms that keep blocks for other instances; these are evicted before all others."""
        self.near: list[NearCopies] = []
        """Mechanisms that keep copies of its blocks in HBM, from which loads copy."""
        self.near_layers = 0
        """Single layers of blocks that loads have found there, since the start."""
        ledger.add(self)

    # -- memory ---------------------------------------------------------------------------------

    def _make_room(self, blocks: int, *, lose: bool = True, rank: float = -math.inf) -> None:
        shortage = blocks - self._arena.free_blocks
        for guests in self.guests:
            shortage -= self.delete(guests.give_up(shortage))
        # Durable blocks go first: losing them costs only a read from disk.
        for disk in self.below if shortage > 0 else ():
            shortage -= self._evict(shortage, only=disk.durable)
            shortage -= self._give_up(shortage, disk.durable, below=math.inf if lose else rank)
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
        """Evict blocks. ``spare``: nodes that stay; None for the announced ones."""
        if blocks <= 0:
            return 0
        if spare is None:
            spare = self.retention
        return self.delete(self._tree.evict(self._dram, blocks, only=only, spare=spare))

    def _give_up(self, blocks: int, may_go: Callable[[Node], bool], below: float = math.inf) -> int:
        if blocks <= 0:
            return 0
        return self.delete(self.retention.give_up(self._dram, blocks, may_go, below=below))

    def delete(self, gone: Sequence[Evicted]) -> int:
        """Free the memory of evicted blocks; see `Ledger.delete`."""
        return self.ledger.delete(Tier.DRAM, gone)

    def take(self, blocks: int, *, lose: bool = True, rank: float = -math.inf) -> BlockIds:
        """Take up to ``blocks`` blocks of the arena; the caller fills them, and inserts or returns them.

        Evicts older blocks to make room. Unless ``lose``, it evicts only blocks that are on disk too, and
        that were not announced or have a lower priority than ``rank``.
        """
        self._make_room(blocks, lose=lose, rank=rank)
        taken = self._arena.alloc(min(blocks, self._arena.free_blocks))
        assert taken is not None
        return taken

    def give_back(self, places: BlockIds) -> None:
        """Free blocks that were taken, or were in the tree, and are not needed."""
        if len(places):
            for copies in self.near:
                copies.forget(places)
            self._arena.free(places)

    def count(self, places: BlockIds) -> int:
        """The number of blocks."""
        return len(places)

    def part(self, places: BlockIds, start: int, end: int) -> BlockIds:
        """Some of these blocks."""
        return places[start:end]

    def join(self, parts: Sequence[BlockIds]) -> BlockIds:
        """The blocks of a path."""
        return np.concatenate(parts)

    # -- DRAM to HBM ----------------------------------------------------------------------------

    def split(self, path: Iterable[Node]) -> tuple[list[Node], list[Node]]:
        """The nodes of a path, from the top, that HBM has, and those after them that `load` takes."""
        in_hbm: list[Node] = []
        below: list[Node] = []
        for node in path:
            if self._hbm in node.placements:
                in_hbm.append(node)
            elif self._dram in node.placements:
                below.append(node)
            else:
                break
        return in_hbm, below

    def load(self, what: list[Node], places: Any, landed: Callable[[], None] | None = None) -> None:
        """Start copying nodes (a path, from the top, all in DRAM) to slots, which become their HBM.

        Both copies stay locked until the load is complete. With ``landed``, the load runs behind all loads
        that a forward pass waits for; the slots stay the caller's, and no batch waits for them. ``landed`` is
        called when the slots have the bytes; until then the nodes stay locked for DRAM.
        """
        nodes, slots, last = what, places, what[-1]
        blocks = np.concatenate([node.placements[self._dram] for node in nodes])
        self._tree.lock(last, self._dram)
        if landed is not None:

            def brought() -> None:
                self._tree.unlock(last, self._dram)
                landed()

            self.copies.bring(slots, blocks, brought)
            return
        unit = len(slots) // len(blocks)
        start = 0
        for node in nodes:
            end = start + node.blocks * unit
            self._observer.copy_begins(node, self._hbm)
            self._tree.place(node, self._hbm, slots[start:end])
            start = end
        self._tree.lock(last, self._hbm)
        found = [(copies, copies.near(blocks)) for copies in self.near]
        near = [part for _, parts in found for part in parts]
        self.near_layers += sum(len(part.positions) for part in near)
        self.copies.load(slots, blocks, near=near, done=partial(self._loaded, last, len(blocks), found))

    def _loaded(self, last: Node, blocks: int, near: Sequence[tuple[NearCopies, Sequence[Near]]]) -> None:
        self._tree.unlock(last, self._dram)
        self._tree.unlock(last, self._hbm)
        self._observer.copy_ended(last, blocks, self._hbm)
        for copies, parts in near:
            copies.read(parts)

    @property
    def free_blocks(self) -> int:
        """Free blocks of the arena."""
        return self._arena.free_blocks

    @property
    def used_blocks(self) -> int:
        return self._arena.n_blocks - self._arena.free_blocks

    @property
    def evicted(self) -> int:
        """Blocks that were evicted, since the start."""
        return self.ledger.evicted[Tier.DRAM]

    # -- whole ----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop every block; the tree has been emptied or is about to be."""
        self.copies.settle()
        for disk in self.below:
            disk.settle()
            disk.clear()
        for node in self._tree.nodes():
            if self._dram in node.placements:
                self._arena.free(node.placements[self._dram])
        self._tree.drop_holder(self._dram)

    def close(self) -> None:
        """Finish every copy under way, down to the disk, and end."""
        try:
            self.copies.close()
        finally:
            for disk in self.below:
                disk.close()

    def check(self) -> None:
        """Verify the arena. Raises AssertionError that names the inconsistency. `Store.check` compares the
        arena with the tree.
        """
        self._arena.check()

    def __repr__(self) -> str:
        return f"DramTier({self.used_blocks}/{self.n_blocks} blocks, {self.evicted} evicted, {self.copies!r})"
