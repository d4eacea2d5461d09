"""The DRAM of one rank: blocks of all components by name, in one memory.

The same rows of a model always have the same name, so a name that is there needs no second copy. A block is
entered once its bytes are complete; until then, and while something reads it, it is locked.

Where a component needs room, the blocks that are worth least go (`paths`, `worth`), of any component.
Memory passes from one to another by whole chunks (`tiered_store/dram/slabs.py`): blocks that are not locked
may then move to another place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from sglang_ext.engine.hybrid.components import FULL, Component, Flags
from sglang_ext.engine.hybrid.paths import Name, Paths, Piece
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.dram.arena import BlockIds
from sglang_ext.tiered_store.dram.slabs import LentArena, Slabs

Changed = Callable[[Sequence[Name], bool], None]
"""Called with names that are held from now on, or that are not any more."""

_SCATTERED: Final = 2
"""Of a component whose free blocks would fill so many chunks, and free none, no more is given up."""


class Dram:
    """See the module's docstring. In the scheduler's thread.

    Args:
        layouts: of the components' blocks, `FULL` first.
        nbytes: of the memory.
        block_tokens: tokens of a block.
        options: as for `Slabs`.
    """

    def __init__(
        self, layouts: Mapping[Component, BlockLayout], nbytes: int, block_tokens: int, **options: Any
    ) -> None:
        self.slabs = Slabs(list(layouts.values()), nbytes, **options)
        self.paths = Paths(
            {component: layout.block_bytes for component, layout in layouts.items()}, block_tokens, nbytes
        )
        self.memories = {
            component: ComponentMemory(component, arena, self)
            for component, arena in zip(layouts, self.slabs.arenas, strict=True)
        }

    def __repr__(self) -> str:
        return f"Dram({self.slabs}, {list(self.memories.values())})"

    @property
    def nbytes(self) -> int:
        return self.slabs.n_chunks * self.slabs.chunk_bytes

    @property
    def capacity_blocks(self) -> int:
        """Blocks of all components that fit if free chunks go to `FULL`."""
        free = self.slabs.free_chunks * self.memories[FULL].arena.per_chunk
        lent = (len(arena.chunks) * arena.per_chunk for arena in self.slabs.arenas)
        return free + sum(lent)

    def make_room(self, memory: ComponentMemory, count: int) -> bool:
        """Give up the blocks that are worth least until a component can take so many; False where too much
        is locked."""
        locked = sum(each.locked_blocks * each.arena.block_bytes for each in self.memories.values())
        if count * memory.arena.block_bytes > self.nbytes - locked:
            return False
        in_use: set[Piece] = set()
        stuck: set[Component] = set()
        """Components of which more free blocks would not help."""

        def may_go(piece: Piece) -> bool:
            return piece not in in_use and piece.component not in stuck

        while memory.arena.available < count:
            if any(
                self._give_chunk_back(each, stuck) for each in self.memories.values() if each is not memory
            ):
                continue
            piece = self.paths.least(may_go)
            if piece is None:
                return False
            owner = self.memories[piece.component]
            wanted = count - memory.arena.available if owner is memory else owner.arena.lacks_for_a_chunk
            if not owner.give_up(piece, wanted):
                in_use.add(piece)
        return True

    def _give_chunk_back(self, memory: ComponentMemory, stuck: set[Component]) -> bool:
        """Free a chunk of a component that has as many free blocks."""
        arena = memory.arena
        if arena.free_blocks < arena.per_chunk:
            return False
        if memory.consolidate():
            return True
        if arena.free_blocks >= _SCATTERED * arena.per_chunk:
            stuck.add(memory.component)
        return False

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming the violated invariant."""
        self.slabs.check()
        self.paths.check({component: memory.names for component, memory in self.memories.items()})
        for memory in self.memories.values():
            memory.check()

    def close(self) -> None:
        self.slabs.close()


class ComponentMemory:
    """The blocks of one component. In the scheduler's thread."""

    def __init__(self, component: Component, arena: LentArena, dram: Dram) -> None:
        self.component = component
        self.arena = arena
        self._dram = dram
        self._blocks: dict[Name, int] = {}
        self._names: dict[int, Name] = {}
        self._locks = np.zeros(arena.n_blocks, np.int32)
        self.locked_blocks = 0
        self.evicted = 0
        self._changed: Changed = lambda names, held: None

    def __repr__(self) -> str:
        return f"ComponentMemory({len(self._blocks)} blocks of {self.component})"

    def __contains__(self, name: Name) -> bool:
        return name in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def names(self) -> Sequence[Name]:
        return list(self._blocks)

    def observe(self, changed: Changed) -> None:
        """Have names reported that come or go from now on."""
        self._changed = changed

    def held(self, names: Sequence[Name]) -> Flags:
        """For each name, whether its block is here."""
        blocks = self._blocks
        return np.fromiter((name in blocks for name in names), np.bool_, len(names))

    def take(self, names: Sequence[Name]) -> BlockIds | None:
        """The blocks of these names, locked; None where one is not here."""
        found = [self._blocks.get(name, -1) for name in names]
        if -1 in found:
            return None
        ids = np.array(found, np.int64)
        self.lock(ids)
        return ids

    def reserve(self, count: int) -> BlockIds | None:
        """Blocks to fill, locked. Others are given up for them; None where too many are locked."""
        if not self._dram.make_room(self, count):
            return None
        ids = self.arena.alloc(count)
        assert ids is not None
        self.lock(ids)
        return ids

    def give_up(self, piece: Piece, most: int) -> int:
        """Forget blocks of a piece in its order, up to the first that is locked. Returns how many."""
        going: list[Name] = []
        for name in reversed(piece.names):
            if len(going) == most or self._locks[self._blocks[name]]:
                break
            going.append(name)
        if going:
            self._forget(going)
            self.evicted += len(going)
        return len(going)

    def _forget(self, names: Sequence[Name]) -> None:
        self._dram.paths.left(self.component, names)
        blocks = [self._blocks.pop(name) for name in names]
        for block in blocks:
            del self._names[block]
        self._changed(names, False)
        self.arena.free([block for block in blocks if not self._locks[block]])

    def consolidate(self) -> bool:
        """Move blocks together so that a chunk is free for other components; False where locks forbid it."""
        moved = self.arena.consolidate(self._locks > 0)
        if moved is None:
            return False
        for block, to in zip(*(ids.tolist() for ids in moved), strict=True):
            name = self._names[to] = self._names.pop(block)
            self._blocks[name] = to
        return True

    def enter(self, names: Sequence[Name], ids: BlockIds, path: Sequence[Name]) -> None:
        """These blocks are complete. Where a name is known, the new block goes when it is unlocked.

        Args:
            path: successive blocks of a prefix, these among them.
        """
        new = []
        for name, block in zip(names, ids.tolist(), strict=True):
            if name not in self._blocks:
                self._blocks[name] = block
                self._names[block] = name
                new.append(name)
        self._dram.paths.entered(self.component, path, set(new))
        self._changed(new, True)

    def lock(self, ids: BlockIds) -> None:
        self.locked_blocks += int((self._locks[ids] == 0).sum())
        self._locks[ids] += 1

    def unlock(self, ids: BlockIds) -> None:
        """Release one lock of each; blocks without a name are free then."""
        self._locks[ids] -= 1
        free = ids[self._locks[ids] == 0].tolist()
        self.locked_blocks -= len(free)
        self.arena.free([block for block in free if block not in self._names])

    def clear(self) -> None:
        """Forget every name. Blocks that are locked are free when they are unlocked."""
        self._forget(list(self._blocks))

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming the violated invariant."""
        if {block: name for name, block in self._blocks.items()} != self._names:
            raise AssertionError("names and blocks do not agree")
        if (self._locks < 0).any() or self.locked_blocks != np.count_nonzero(self._locks):
            raise AssertionError("a block was unlocked more often than locked")
        locked = set(np.flatnonzero(self._locks).tolist())
        if len(locked | self._names.keys()) != self.arena.used_blocks:
            raise AssertionError("a block is taken that has neither a name nor a lock")
