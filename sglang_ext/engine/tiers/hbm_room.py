"""The part of SGLang's pool that the cache has: how much it is, and how it is given back.

What goes first: blocks with a copy in DRAM or on disk, which lose nothing; then what a copy under way lets
go; then what is held back for requests that were announced, where it has a copy too; and only then last
copies, the announced ones last again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.engine.tiers.dram_tier import DramTier
from sglang_ext.engine.tiers.retention import Retention
from sglang_ext.engine.tiers.slots import SlotOps
from sglang_ext.radix_global import Evicted, Holder, Node, RadixTree


class HbmRoom:
    """See the module's docstring. Sizes are tokens.

    Args:
        tree: the rank's tree.
        hbm: the holder that stands for the pool.
        allocator: SGLang's, of slots; None for an index alone.
        slots: how the tree keeps them.
        dram: the tier below, if there is one.
    """

    def __init__(
        self, tree: RadixTree, hbm: Holder, allocator: Any, slots: SlotOps, dram: DramTier | None
    ) -> None:
        self._tree = tree
        self._hbm = hbm
        self._allocator = allocator
        self._slots = slots
        self._dram = dram
        self.hinted: Retention | None = None
        """What is held back for requests that were announced."""
        self.arriving: Callable[[], int] = int
        """Tokens whose slots are being filled ahead of a request: neither free nor in the tree, given up when
        SGLang allocates.
        """
        self.surrender: Callable[[], int] = int
        """Frees those slots, if no copy to them is under way. How many."""
        self.owned: Callable[[], int] = int
        """Tokens that owners of a memory pool have: neither free nor in the tree, and not to be given up."""

    @property
    def total(self) -> int:
        """What is neither free nor a request's."""
        return self._tree.blocks_of(self._hbm) * self._tree.block_size + self.arriving() + self.owned()

    @property
    def protected(self) -> int:
        """What of it may not be given up now."""
        return self._tree.locked_blocks_of(self._hbm) * self._tree.block_size + self.owned()

    @property
    def free(self) -> int:
        """Slots that nobody has."""
        return int(self._allocator.available_size())

    def evict(self, tokens: int) -> int:
        """Give back at least so many slots, where so many may go. Returns how many did."""
        missing = -(-tokens // self._tree.block_size)
        freed = 0
        dram = self._dram
        if dram is not None:
            dram.drain()
            freed = self._evict(missing, dram.has_copy)
            if freed < missing and (dram.writing or self.arriving()):
                dram.settle()
                freed += self._evict(missing - freed, dram.has_copy)
                if freed < missing:
                    freed += self.surrender() // self._tree.block_size
            freed += self._give_up(missing - freed, dram.has_copy)
        if freed < missing:
            freed += self._evict(missing - freed, None)
            freed += self._give_up(missing - freed, lambda node: True)
            freed += self._free(self._tree.evict(self._hbm, missing - freed))
        return freed * self._tree.block_size

    def make_room(self, tokens: int, *, unused_since: float, priority: int) -> None:
        """Give back up to so many slots for what is expected: blocks that have a copy.

        Those that were not used since then, and what is held back for hints of lower priority.
        """
        dram = self._dram
        if dram is None:
            return

        def may_go(node: Node) -> bool:
            return node.last_access < unused_since and dram.has_copy(node)

        missing = -(-tokens // self._tree.block_size)
        missing -= self._evict(missing, may_go)
        self._give_up(missing, dram.has_copy, below=priority)

    def _evict(self, blocks: int, only: Callable[[Node], bool] | None) -> int:
        """Blocks of what nobody has announced."""
        return self._free(self._tree.evict(self._hbm, blocks, only=only, spare=self.hinted or ()))

    def _give_up(self, blocks: int, may_go: Callable[[Node], bool], below: float = math.inf) -> int:
        """Blocks of what was announced."""
        if self.hinted is None:
            return 0
        return self._free(self.hinted.give_up(self._hbm, blocks, may_go, below=below))

    def _free(self, gone: list[Evicted]) -> int:
        """Blocks that left the tree go back to SGLang. How many."""
        if self._dram is not None:
            self._dram.left_memory(gone)
        if gone and self._allocator is not None:
            self.free_slots([evicted.address for evicted in gone])
        return sum(evicted.blocks for evicted in gone)

    def free_slots(self, kept: list[Any]) -> None:
        """Slots in the form in which the tree keeps them go back to SGLang."""
        self._allocator.free_segment(self._slots.join(kept), start_pos=0)

    def allocate(self, tokens: int) -> torch.Tensor | None:
        """Slots, evicting for them; None when there are not so many."""
        shortage = tokens - self.free
        if shortage > 0:
            self.evict(shortage)
        return self.take_free(tokens)

    def take_free(self, tokens: int) -> torch.Tensor | None:
        """Slots that are free now; None when there are not so many."""
        slots: torch.Tensor | None = self._allocator.alloc(tokens)
        return slots
