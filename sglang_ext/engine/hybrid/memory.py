"""The DRAM of one component: blocks by name, of which the least recently used are given up first.

The same rows of a model always have the same name, so a name that is there needs no second copy. A block is
entered once its bytes are complete; until then, and while something reads it, it is locked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from sglang_ext.engine.hybrid.components import Flags
from sglang_ext.tiered_store.dram.arena import BlockIds, DramArena

Name = bytes
"""Of a prefix that ends where the block ends (`names.page_names`)."""

Changed = Callable[[Sequence[Name], bool], None]
"""Called with names that are held from now on, or that are not any more."""


class ComponentMemory:
    """See the module's docstring. In the scheduler's thread."""

    def __init__(self, arena: DramArena) -> None:
        self.arena = arena
        self._blocks: OrderedDict[Name, int] = OrderedDict()
        """The least recently used first."""
        self._names: dict[int, Name] = {}
        self._locks = np.zeros(arena.n_blocks, np.int32)
        self.evicted = 0
        self._changed: Changed = lambda names, held: None

    def __repr__(self) -> str:
        return f"ComponentMemory({len(self._blocks)} of {self.arena.n_blocks} blocks)"

    def __contains__(self, name: Name) -> bool:
        return name in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def observe(self, changed: Changed) -> None:
        """Have names reported that come or go from now on."""
        self._changed = changed

    def held(self, names: Sequence[Name]) -> Flags:
        """For each name, whether its block is here."""
        blocks = self._blocks
        return np.fromiter((name in blocks for name in names), np.bool_, len(names))

    def touch(self, names: Sequence[Name]) -> None:
        """These blocks of one prefix are in use. Its end is given up before its beginning."""
        for name in reversed(names):
            if name in self._blocks:
                self._blocks.move_to_end(name)

    def take(self, names: Sequence[Name]) -> BlockIds | None:
        """The blocks of these names, locked; None where one is not here."""
        found = [self._blocks.get(name, -1) for name in names]
        if -1 in found:
            return None
        ids = np.array(found, np.int64)
        self._locks[ids] += 1
        return ids

    def reserve(self, count: int) -> BlockIds | None:
        """Blocks to fill, locked. Others are given up for them; None where too many are locked."""
        short = count - self.arena.free_blocks
        if short > 0 and not self._evict(short):
            return None
        ids = self.arena.alloc(count)
        assert ids is not None
        self._locks[ids] += 1
        return ids

    def _evict(self, count: int) -> bool:
        going = []
        for name, block in self._blocks.items():
            if not self._locks[block]:
                going.append(name)
                if len(going) == count:
                    self._forget(going)
                    self.evicted += count
                    return True
        return False

    def _forget(self, names: Sequence[Name]) -> None:
        blocks = [self._blocks.pop(name) for name in names]
        for block in blocks:
            del self._names[block]
        self._changed(names, False)
        self.arena.free([block for block in blocks if not self._locks[block]])

    def enter(self, names: Sequence[Name], ids: BlockIds) -> None:
        """These blocks are complete. Where a name is known, the new block goes when it is unlocked."""
        new = []
        for name, block in zip(names, ids.tolist(), strict=True):
            if name not in self._blocks:
                self._blocks[name] = block
                self._names[block] = name
                new.append(name)
        self.touch(names)
        self._changed(new, True)

    def lock(self, ids: BlockIds) -> None:
        self._locks[ids] += 1

    def unlock(self, ids: BlockIds) -> None:
        """Release one lock of each; blocks without a name are free then."""
        self._locks[ids] -= 1
        self.arena.free(
            [block for block in ids.tolist() if not self._locks[block] and block not in self._names]
        )

    def clear(self) -> None:
        """Forget every name. Blocks that are locked are free when they are unlocked."""
        self._forget(list(self._blocks))

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming the violated invariant."""
        self.arena.check()
        if {block: name for name, block in self._blocks.items()} != self._names:
            raise AssertionError("names and blocks do not agree")
        if (self._locks < 0).any():
            raise AssertionError("a block was unlocked more often than locked")
        locked = set(np.flatnonzero(self._locks).tolist())
        if len(locked | self._names.keys()) != self.arena.used_blocks:
            raise AssertionError("a block is taken that has neither a name nor a lock")
