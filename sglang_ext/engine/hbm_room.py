"""The part of SGLang's pool that the cache has: how much it is, and how it is given back.

What goes first: blocks brought ahead of a request, then those with a copy in DRAM or on disk, both of which
lose nothing; then what a copy under way lets go; and only then last copies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_ext.engine.dram_tier import DramTier
from sglang_ext.engine.prefetched import Prefetched
from sglang_ext.engine.slots import SlotOps
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
        self.prefetched: Prefetched | None = None
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
        gone: list[Evicted] = []
        surrendered = 0
        if self._dram is not None:
            self._dram.drain()
            missing -= self._evict_for_free(missing, self._dram, gone)
            if missing > 0 and (self._dram.writing or self.arriving()):
                self._dram.settle()
                surrendered = self.surrender()
                missing -= surrendered // self._tree.block_size
                missing -= self._evict_for_free(missing, self._dram, gone)
        if missing > 0:
            gone += self._tree.evict(self._hbm, missing)
        return surrendered + self._give_back(gone)

    def _evict_for_free(self, blocks: int, dram: DramTier, gone: list[Evicted]) -> int:
        before = len(gone)
        if self.prefetched is not None:
            gone += self.prefetched.give_up(blocks)
        left = blocks - sum(evicted.blocks for evicted in gone[before:])
        if left > 0:
            gone += self._tree.evict(self._hbm, left, only=dram.has_copy)
        return sum(evicted.blocks for evicted in gone[before:])

    def evict_copies(self, tokens: int, unused_since: float) -> int:
        """Give back up to so many slots of blocks that have a copy and were not used since then."""
        dram = self._dram
        if dram is None:
            return 0

        def may_go(node: Node) -> bool:
            return node.last_access < unused_since and dram.has_copy(node)

        return self._give_back(self._tree.evict(self._hbm, -(-tokens // self._tree.block_size), only=may_go))

    def _give_back(self, gone: list[Evicted]) -> int:
        if self._dram is not None:
            self._dram.left_memory(gone)
        if gone and self._allocator is not None:
            self.free_slots([evicted.address for evicted in gone])
        return sum(evicted.blocks for evicted in gone) * self._tree.block_size

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
