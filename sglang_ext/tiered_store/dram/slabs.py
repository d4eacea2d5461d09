"""One memory for blocks of several sizes: chunks of one size that arenas borrow and give back.

    memory  = [chunk 0][chunk 1] ... [chunk n-1]
    chunk   = blocks of the arena that has borrowed it, or free

Each arena sees the whole memory as an array of its blocks, so that a block has an address by its number
alone; it uses those in chunks that it has borrowed. A chunk goes back when its last block does. Where the
free blocks of an arena are scattered over its chunks, `LentArena.consolidate` moves blocks together until one
chunk is free: at most one chunk's bytes are copied.

Not thread-safe. The bytes of a block belong to the caller that allocated it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_ext.errors import ConfigError
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.dram.arena import Arena, BlockIds
from sglang_ext.tiered_store.dram.memory import ArenaMemory

MOST_CHUNKS: Final = 4096
LEAST_CHUNKS: Final = 16
"""With less memory, a chunk is as small as it can be, at the cost of bytes at its end."""
_WASTE: Final = 1 / 32
"""The part of a chunk that may be lost at its end."""
_LARGEST: Final = 64
"""Blocks of the largest kind in a chunk, at most, before chunks grow with the memory."""
_ALIGNMENT: Final = 512
"""Blocks of a multiple of so many bytes begin at one, as reads past the page cache want."""


def chunking(sizes: Sequence[int], nbytes: int) -> tuple[int, list[int]]:
    """The size of a chunk, and for each kind of block the bytes from one to the next in it.

    The latter depend on the sizes of blocks alone as long as `LEAST_CHUNKS` fit, so that instances with
    unlike memory have them in common.

    Args:
        sizes: bytes of a block of each kind.
        nbytes: of the memory.
    """
    found = [_chunking(sizes, largest) for largest in range(1, _LARGEST + 1)]
    fitting = [each for each in found if nbytes // each[1] >= LEAST_CHUNKS] or found[:1]
    _, chunk, strides = next((each for each in fitting if each[0] <= _WASTE), min(fitting))
    return chunk * max(1, nbytes // (chunk * MOST_CHUNKS)), strides


def _chunking(sizes: Sequence[int], largest: int) -> tuple[float, int, list[int]]:
    """The part that is lost, and as `chunking`, with so many blocks of the largest kind."""
    counts = [largest * max(sizes) // size for size in sizes]
    alignments = [min(size & -size, _ALIGNMENT) for size in sizes]
    unit = math.lcm(*(count * to for count, to in zip(counts, alignments, strict=True)))
    chunk = -(-largest * max(sizes) // unit) * unit
    lost = max(1 - count * size / chunk for count, size in zip(counts, sizes, strict=True))
    return lost, chunk, [chunk // count for count in counts]


class Slabs:
    """The memory, and an arena for each layout.

    Args:
        nbytes: of the memory, which never grows or shrinks.
        shared, pin, touch, name, place: as for `DramArena`.

    Raises:
        ConfigError: not even one chunk for each layout fits.
        ArenaMemoryError, PinError: as for `DramArena`.
    """

    def __init__(
        self,
        layouts: Sequence[BlockLayout],
        nbytes: int,
        *,
        shared: bool = True,
        pin: bool = True,
        touch: bool = True,
        name: str = "dram",
        place: Callable[[int, int], None] = lambda address, nbytes: None,
    ) -> None:
        self.chunk_bytes, strides = chunking([layout.block_bytes for layout in layouts], nbytes)
        self.n_chunks = nbytes // self.chunk_bytes
        if self.n_chunks < len(layouts):
            raise ConfigError(
                f"{nbytes} bytes of DRAM do not hold a block of each component: "
                f"that takes {len(layouts) * self.chunk_bytes}",
                field="--kv-dram-size",
                hint="Make it larger",
            )
        self.memory = ArenaMemory(self.n_chunks * self.chunk_bytes, shared=shared, name=name)
        self.memory.prepare(place=place, touch=touch, pin=pin)
        self._free = list(range(self.n_chunks - 1, -1, -1))
        self.arenas = tuple(LentArena(self, *each) for each in zip(layouts, strides, strict=True))

    def __repr__(self) -> str:
        return f"Slabs({self.free_chunks} of {self.n_chunks} chunks of {self.chunk_bytes} bytes are free)"

    @property
    def free_chunks(self) -> int:
        return len(self._free)

    def borrow(self) -> int:
        """A chunk; there must be a free one."""
        return self._free.pop()

    def give_back(self, chunk: int) -> None:
        self._free.append(chunk)

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming the violated invariant."""
        owned = [*self._free, *(chunk for arena in self.arenas for chunk in arena.chunks)]
        if sorted(owned) != list(range(self.n_chunks)):
            raise AssertionError("a chunk has no owner, or two")
        for arena in self.arenas:
            arena.check()

    def close(self) -> None:
        """Give the memory back to the system. Views held by others stay valid until they are dropped."""
        for arena in self.arenas:
            arena.close()
        self.memory.close()


class LentArena(Arena):
    """Blocks of one layout in borrowed chunks."""

    def __init__(self, slabs: Slabs, layout: BlockLayout, block_bytes: int) -> None:
        self.per_chunk = slabs.chunk_bytes // block_bytes
        n_blocks = slabs.n_chunks * self.per_chunk
        super().__init__(layout, block_bytes, n_blocks, slabs.memory, slabs.memory.bytes)
        self._slabs = slabs
        self.chunks: dict[int, list[int]] = {}
        """Borrowed, and the free blocks of each."""
        self._used = np.zeros(n_blocks, np.bool_)
        self.free_blocks = 0
        """In borrowed chunks."""

    def __repr__(self) -> str:
        return (
            f"LentArena({self.used_blocks} blocks of {self.block_bytes} bytes in {len(self.chunks)} chunks)"
        )

    @property
    def used_blocks(self) -> int:
        return len(self.chunks) * self.per_chunk - self.free_blocks

    @property
    def available(self) -> int:
        """Blocks that can be taken: those that are free, and those of free chunks."""
        return self.free_blocks + self._slabs.free_chunks * self.per_chunk

    @property
    def lacks_for_a_chunk(self) -> int:
        """How many more free blocks there must be so that a chunk could be freed by `consolidate`; 1 where
        there are enough."""
        return max(1, self.per_chunk - self.free_blocks)

    def alloc(self, count: int) -> BlockIds | None:
        """Take blocks, all or none: from the fullest chunks, and from new ones.

        Returns:
            Their ids, shape (count,); None when fewer are free. The bytes are whatever was there before.
        """
        if count > self.available:
            return None
        taken: list[int] = []
        for chunk in sorted(self._with_free(), key=lambda chunk: len(self.chunks[chunk])):
            if len(taken) == count:
                break
            taken += self._take(chunk, count - len(taken))
        while len(taken) < count:
            chunk, per = self._slabs.borrow(), self.per_chunk
            self.chunks[chunk] = list(range((chunk + 1) * per - 1, chunk * per - 1, -1))
            self.free_blocks += per
            taken += self._take(chunk, count - len(taken))
        ids = np.array(taken, np.int64)
        self._used[ids] = True
        return ids

    def _with_free(self) -> list[int]:
        return [chunk for chunk, free in self.chunks.items() if free] if self.free_blocks else []

    def _take(self, chunk: int, most: int) -> list[int]:
        free = self.chunks[chunk]
        free.sort(reverse=True)  # neighbours are copied in one piece
        taken = free[: -most - 1 : -1]
        del free[len(free) - len(taken) :]
        self.free_blocks -= len(taken)
        return taken

    def free(self, ids: BlockIds | Sequence[int]) -> None:
        """Take blocks back, all or none; chunks without blocks are given back.

        Raises:
            ValueError: an id is free already, or is given twice.
        """
        array = np.asarray(ids, np.int64)
        if not self._used[array].all() or len(np.unique(array)) != len(array):
            raise ValueError(f"double free of blocks among {array[:8].tolist()}")
        self._used[array] = False
        owners = array // self.per_chunk
        for chunk in np.unique(owners).tolist():
            free = self.chunks[chunk]
            free += array[owners == chunk].tolist()
            self.free_blocks += int((owners == chunk).sum())
            if len(free) == self.per_chunk:
                self._give_back(chunk)

    def _give_back(self, chunk: int) -> None:
        self.free_blocks -= len(self.chunks.pop(chunk))
        self._slabs.give_back(chunk)

    def consolidate(self, fixed: npt.NDArray[np.bool_]) -> tuple[BlockIds, BlockIds] | None:
        """Free a chunk by moving its blocks to free blocks of others: the chunk with the fewest used blocks.

        Args:
            fixed: for each block, whether it must stay where it is. Shape (n_blocks,).

        Returns:
            the blocks that were moved, and where to; None where no chunk can be freed so.
        """
        per = self.per_chunk
        if self.free_blocks < per:
            return None
        for chunk in sorted(self._with_free(), key=lambda chunk: -len(self.chunks[chunk])):
            own = np.arange(chunk * per, (chunk + 1) * per)
            moved = own[self._used[own]]
            if fixed[moved].any():
                continue
            free = self.chunks.pop(chunk)
            self.free_blocks -= len(free)
            to = self.alloc(len(moved))
            assert to is not None, "the others have as many free blocks"
            for source, target in zip(moved.tolist(), to.tolist(), strict=True):
                self._blocks[target] = self._blocks[source]
            self._used[moved] = False
            self._slabs.give_back(chunk)
            return moved, to
        return None

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming the violated invariant."""
        free = [block for blocks in self.chunks.values() for block in blocks]
        if len(set(free)) != len(free) or len(free) != self.free_blocks or self._used[free].any():
            raise AssertionError("a block is free twice, or both free and used")
        if int(self._used.sum()) != self.used_blocks:
            raise AssertionError("used and free blocks do not add up")
        if {block // self.per_chunk for block in [*free, *np.flatnonzero(self._used).tolist()]} != {
            *self.chunks
        }:
            raise AssertionError("a block lies in a chunk that is not borrowed, or a chunk has none")

    def close(self) -> None:
        self._drop_views()
