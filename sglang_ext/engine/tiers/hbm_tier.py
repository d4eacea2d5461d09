"""Cache-owned slots of SGLang's KV pool: accounting and eviction.

Blocks are evicted in this order: first blocks with a copy in DRAM or on disk, which lose nothing: those that
have been in no use for longest, then those of announced sessions whose requests are far off, then others;
then the layers of announced sessions above the lowest (`Lent`), and blocks that become free when the copies
under way end; then whole blocks of announced sessions that have a copy too, and the sessions' lowest layers;
and only then last copies, the announced ones last again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sglang_ext.engine.tiers.write_down import WriteDown
from sglang_ext.mempool.ledger import Ledger
from sglang_ext.radix_global import Holder, Node
from sglang_ext.tiers import Tier

if TYPE_CHECKING:
    import torch

    from sglang_ext.engine.movers.slots import SlotOps


class Lent(Protocol):
    """A mechanism that keeps single layers of announced sessions in blocks of HBM."""

    def give_up(self, blocks: int, *, above: int = -1) -> int:
        """Give back at least ``blocks`` blocks, where it has so many. Returns the number of blocks.

        Args:
            above: keep layers up to this one.
        """


class HbmTier:
    """See the module's docstring. Sizes are tokens, but for those of a `StoreTier`, which are blocks.

    Args:
        allocator: SGLang's, of slots; None for an index alone.
        slots: how the tree keeps them.
        below: copies its blocks to DRAM; None without DRAM.
    """

    exclusive = False
    """Requests own slots of the pool too."""

    def __init__(
        self, ledger: Ledger, hbm: Holder, allocator: Any, slots: SlotOps, below: WriteDown | None
    ) -> None:
        self._ledger = ledger
        self._tree = ledger.tree
        self._hbm = self.holder = hbm
        self._allocator = allocator
        self.slots = slots
        self._below = below
        self.retention = None if below is None else below.dram.retention
        """Blocks that are held back for announced requests."""
        self.lent: list[Lent] = []
        """Mechanisms that have blocks of it and give them back on demand."""
        ledger.add(self)

    @property
    def total(self) -> int:
        """Slots that the cache owns: neither free nor a request's."""
        return (self._tree.blocks_of(self._hbm) + self._ledger.reserved(Tier.HBM)) * self._tree.block_size

    @property
    def protected(self) -> int:
        """Cache-owned slots that may not be evicted now."""
        pinned = self._ledger.reserved(Tier.HBM) - self._ledger.yielding(Tier.HBM)
        return (self._tree.locked_blocks_of(self._hbm) + pinned) * self._tree.block_size

    @property
    def evictable(self) -> int:
        """Cache-owned slots that may be evicted now: ``total`` without ``protected``."""
        blocks = self._tree.unlocked_blocks_of(self._hbm) + self._ledger.yielding(Tier.HBM)
        return blocks * self._tree.block_size

    @property
    def usable(self) -> int:
        """Slots that are free, or may be evicted now."""
        return int(self._allocator.available_size()) + self.evictable

    @property
    def free(self) -> int:
        """Free slots."""
        return int(self._allocator.available_size())

    def evict(self, tokens: int) -> int:
        """Evict blocks to free at least ``tokens`` slots, where so many may go. Returns the slots freed."""
        missing = -(-tokens // self._tree.block_size)
        freed = 0
        below = self._below
        if below is not None:
            copies = below.dram.copies
            copies.look()
            freed = self._evict_paused(missing, below.has_copy)
            freed += self._evict(missing - freed, below.has_copy)
            freed += self._give_up_layers(missing - freed, above=0)
            # No longer than needed: a write waits for the pass before it.
            while freed < missing and copies.writing:
                copies.settle_oldest_write()
                freed += self._evict(missing - freed, below.has_copy)
            if freed < missing and self._ledger.yielding(Tier.HBM):
                copies.settle()
                freed += self._evict(missing - freed, below.has_copy)
                if freed < missing:
                    freed += self._ledger.surrender(Tier.HBM)
            freed += self._give_up_layers(missing - freed, above=0)
            freed += self._give_up(missing - freed, below.has_copy)
            freed += self._give_up_layers(missing - freed)
        if freed < missing:
            freed += self._evict(missing - freed, None)
            freed += self._give_up(missing - freed, lambda node: True)
            freed += self._ledger.delete(Tier.HBM, self._tree.evict(self._hbm, missing - freed))
        return freed * self._tree.block_size

    def make_room(self, blocks: int, *, unused_since: float = math.inf, priority: int = 0) -> None:
        """Free slots for up to ``blocks`` blocks of an expected request, by evicting blocks that have a copy:
        those that were not used since ``unused_since``, and those held back for hints of lower priority.
        """
        below = self._below
        missing = blocks - self.free_blocks
        if below is None or missing <= 0:
            return

        def may_go(node: Node) -> bool:
            return node.last_access < unused_since and below.has_copy(node)

        missing -= self._evict(missing, may_go)
        self._give_up(missing, below.has_copy, below=priority)

    def _evict(self, blocks: int, only: Callable[[Node], bool] | None) -> int:
        """Evict blocks that were not announced."""
        if blocks <= 0:
            return 0
        gone = self._tree.evict(self._hbm, blocks, only=only, spare=self.retention or ())
        return self._ledger.delete(Tier.HBM, gone)

    def _evict_paused(self, blocks: int, has_copy: Callable[[Node], bool]) -> int:
        """Evict blocks of announced sessions whose requests are far off, after those that were in no use
        since the first of these sessions was announced."""
        retention = self.retention
        since = math.inf if retention is None else retention.deferred_since()
        if retention is None or since == math.inf or blocks <= 0:
            return 0
        freed = self._evict(blocks, lambda node: node.last_access < since and has_copy(node))
        gone = retention.give_up_deferred(self._hbm, blocks - freed, has_copy)
        return freed + self._ledger.delete(Tier.HBM, gone)

    def _give_up(self, blocks: int, may_go: Callable[[Node], bool], below: float = math.inf) -> int:
        """Evict announced blocks."""
        if self.retention is None or blocks <= 0:
            return 0
        gone = self.retention.give_up(self._hbm, blocks, may_go, below=below, deferred_first=True)
        return self._ledger.delete(Tier.HBM, gone)

    def _give_up_layers(self, blocks: int, above: int = -1) -> int:
        """Take back blocks that are lent."""
        return sum(lent.give_up(blocks, above=above) for lent in self.lent) if self.lent else 0

    def thin_out(self, blocks: int, priority: int) -> None:
        """Free slots for ``blocks`` blocks, for the lowest layers of several sessions, by evicting whole
        blocks of announced sessions whose priority is not higher, where there is a copy.
        """
        if self._below is not None and blocks > self.free_blocks:
            self._give_up(blocks - self.free_blocks, self._below.has_copy, below=priority + 1)

    def allocate(self, tokens: int) -> torch.Tensor | None:
        """Allocate slots, evicting blocks to make room; None when too few can be freed."""
        shortage = tokens - self.free
        if shortage > 0:
            self.evict(shortage)
        return self.take_free(tokens)

    def take_free(self, tokens: int) -> torch.Tensor | None:
        """Allocate free slots without evicting; None when too few are free."""
        slots: torch.Tensor | None = self._allocator.alloc(tokens)
        return slots

    # -- as a tier of the store -------------------------------------------------------------------

    @property
    def n_blocks(self) -> int:
        """Blocks that fit."""
        return int(self._allocator.size) // self._tree.block_size

    @property
    def free_blocks(self) -> int:
        """Whole blocks of free slots."""
        return self.free // self._tree.block_size

    def take(self, blocks: int, *, lose: bool = True, rank: float = -math.inf) -> Any:
        """Take slots of up to ``blocks`` blocks. Unless ``lose``, only free slots (see ``make_room``)."""
        step = self._tree.block_size
        if lose and blocks * step > self.free:
            self.evict(blocks * step - self.free)
        fits = min(blocks, self.free // step) * step
        slots = self.take_free(fits) if fits else None
        return self.slots.keep(self.slots.join([]) if slots is None else slots)

    def count(self, places: Any) -> int:
        """The number of blocks at these slots."""
        return len(places) // self._tree.block_size

    def part(self, places: Any, start: int, end: int) -> Any:
        """The slots of some of these blocks."""
        return places[start * self._tree.block_size : end * self._tree.block_size]

    def give_back(self, places: Any) -> None:
        """Return slots, in the form in which the tree keeps them, to SGLang."""
        if len(places) and self._allocator is not None:
            self._allocator.free_segment(self.slots.join([places]), start_pos=0)

    def join(self, parts: Sequence[Any]) -> Any:
        """The slots of a path."""
        return self.slots.keep(self.slots.join(parts))

    def clear(self) -> None:
        """Drop every block from the tree. SGLang empties its pools itself."""
        self._tree.drop_holder(self._hbm)
