"""Copies new blocks to the tier below, in the background: from HBM to DRAM, and from there to disk.

A block gets its DRAM placement when its copy is submitted, and the tree's DRAM lock holds it until the copy
is complete. No load reads it before: the block is in HBM meanwhile, which every match prefers, and HBM gives
up a block whose copy is under way only after waiting for it. So a placement in the tree is always readable
when it is needed, and losing the HBM copy later costs nothing.

With a disk, a complete block goes on to it before its lock ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from sglang_ext.engine.movers.mover import BlockIds
from sglang_ext.engine.planners import Planner
from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.mempool.ledger import Call
from sglang_ext.mempool.store import Store
from sglang_ext.radix_global import Holder, Node
from sglang_ext.radix_global.observer import UNOBSERVED, CopyObserver
from sglang_ext.tiers import Tier


class WriteDown(Planner):
    """See the module's docstring. Called by the scheduler thread only.

    Args:
        observer: notified of copies under way.
        enabled: whether new blocks are copied without a request to do so.
    """

    def __init__(
        self,
        hbm: Holder,
        dram: DramTier,
        *,
        observer: CopyObserver = UNOBSERVED,
        enabled: bool = True,
    ) -> None:
        self._ledger = dram.ledger
        self._tree = dram.ledger.tree
        self._hbm = hbm
        self.dram = dram
        self._dram = dram.holder
        # Has no placements. Its locks mark the nodes that are being copied, also after nodes are split.
        self._copying = Holder.of(f"{self._dram.instance} DRAM writes", self._dram.epoch, self._dram.tier)
        self._pending: deque[tuple[Node, int]] = deque()
        """The nodes of copies to DRAM under way, each with its blocks when it was submitted."""
        self._observer = observer
        self._enabled = enabled
        self.skipped = 0
        """Blocks that were not copied because all of the arena was locked."""

    def serve(self, store: Store) -> None:
        """Let the store copy new blocks down, and load blocks from DRAM."""
        store.copy_down(Tier.HBM, self.to_dram)
        store.copy_down(Tier.DRAM, self.to_disk)
        store.add_source(Tier.DRAM, self.dram)

    def __repr__(self) -> str:
        return f"WriteDown({len(self._pending)} under way, {self.skipped} blocks skipped)"

    # -- HBM to DRAM --------------------------------------------------------------------------------

    def to_dram(self, node: Node, blocks: int = 0, *, always: bool = False) -> bool:
        """Start copying the part of the prefix ending at ``node`` that DRAM lacks, its beginning first.

        Evicts older blocks for it. Where there is no room, the rest is skipped and counted.

        Args:
            always: also where new blocks are not copied by themselves.

        Returns:
            Whether a copy was started.
        """
        if not self._enabled and not always:
            return False
        missing: list[Node] = []
        while node.parent is not None and self._dram not in node.placements:
            missing.append(node)
            node = node.parent
        if not missing:
            return False
        slots: list[Any] = []
        places: list[BlockIds] = []
        # The copy's parent must not be evicted to make room for it.
        self._tree.lock(node, self._dram)
        try:
            while missing and self._place(missing[-1], slots, places):
                missing.pop()
        finally:
            self._tree.unlock(node, self._dram)
            if places:  # one copy for all: on a GPU each has its own kernels
                written = partial(self._written, len(places))
                self.dram.copies.write(_joined(slots), np.concatenate(places), written)
        self.skipped += sum(left.blocks for left in missing)
        return bool(places)

    def _place(self, node: Node, slots: list[Any], places: list[BlockIds]) -> bool:
        """Enter one node, or as much of its beginning as fits, in DRAM, and add it to a copy.

        Returns:
            Whether all of it was entered.
        """
        blocks = self.dram.take(node.blocks)
        fits = len(blocks)
        if fits == 0:
            return False
        part = node if fits == node.blocks else self._tree.split(node, fits)
        self._observer.copy_begins(part, self._dram)
        self._tree.place(part, self._dram, blocks)
        self._tree.lock(part, self._dram)
        self._tree.lock(part, self._copying)
        slots.append(part.placements[self._hbm])
        places.append(blocks)
        self._pending.append((part, fits))
        return part is node

    def _written(self, nodes: int) -> None:
        """The oldest copy to DRAM, of so many nodes, is complete on every rank."""
        for _ in range(nodes):
            node, blocks = self._pending.popleft()
            self._tree.unlock(node, self._copying)
            self._observer.copy_ended(node, blocks, self._dram)
            if self.to_disk(node, blocks):
                self._ledger.calls[Call.SWAP_OUT] += 1
            self._tree.unlock(node, self._dram)

    # -- DRAM to disk -------------------------------------------------------------------------------

    def to_disk(self, node: Node, blocks: int, *, always: bool = False) -> bool:
        """Write the last ``blocks`` blocks up to ``node`` to disk. Returns whether a write was started."""
        started = False
        for disk in self.dram.below:
            self._tree.lock(node, self._dram)
            started |= disk.submit(node, blocks)
        return started

    # -- as a planner -------------------------------------------------------------------------------

    def quiesce(self) -> None:
        self.dram.copies.settle()

    def check(self) -> None:
        self.dram.check()

    def close(self) -> None:
        """Finish every copy under way, down to the disk, and end."""
        self.dram.close()

    def blocks(self) -> Mapping[Tier, tuple[int, int]]:
        return {Tier.DRAM: (self.dram.used_blocks, self.dram.n_blocks)}

    # -- both ---------------------------------------------------------------------------------------

    def push(self, path: Sequence[Node]) -> None:
        """Start the copies of a path, given from its top, that were left out because there was no room."""
        in_hbm = [node for node in path if self._hbm in node.placements]
        if in_hbm and self._dram not in in_hbm[-1].placements:
            self.to_dram(in_hbm[-1])
        last = None
        for node in path:
            if self._dram not in node.placements or node.locks.get(self._copying):
                break
            last = node
        if last is not None and any(disk.left_out(last) for disk in self.dram.below):
            self.to_disk(last, 0)

    def has_copy(self, node: Node) -> bool:
        """Whether DRAM or the disk has a complete copy of ``node``, so that HBM may give it up for free.

        Call it with the last HBM node of a prefix only: a mark on that node then means its own copy.
        """
        if self._dram in node.placements:
            # While it is being copied the slots are read, even if the disk has it already.
            return not node.locks.get(self._copying)
        return any(disk.durable(node) for disk in self.dram.below)

    def incomplete(self) -> set[Node]:
        """Nodes whose copy to DRAM is under way, and must not be read."""
        found: set[Node] = set()
        for last, blocks in self._pending:
            node: Node | None = last
            while node is not None and blocks > 0:
                found.add(node)
                blocks -= node.blocks
                node = node.parent
        return found


def _joined(parts: Sequence[Any]) -> Any:
    """Kept runs of slots, of which there is at least one, as one."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], (np.ndarray, range)):
        return np.concatenate(parts)
    import torch  # a simulated instance, which has no tensors, does without it

    return torch.cat(list(parts))
