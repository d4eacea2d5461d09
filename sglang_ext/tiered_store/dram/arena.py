"""The DRAM arena: one mapping, cut into blocks, handed out and taken back by number.

All blocks have one size: any free block serves any request, however long the arena has been in use. The
lowest free blocks are handed out, so that those of one request stay neighbours where they can: a run of
neighbours is one copy to a GPU, one work request of RDMA and one write to disk. Each block has a generation,
which grows when the block is taken back; it lies in the same mapping as the bytes, so that a one-sided reader
can check it before and after its read and discard bytes that were overwritten in between.

    mapping = [block 0][block 1] ... [block n-1][pad to 8][generation 0] ... [generation n-1]
    block   = [plane 0: token rows][plane 1: token rows] ...        (BlockLayout)

The arena's bookkeeping is guarded by a lock and may be called from any thread; the bytes of a block belong to
the caller that allocated it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.errors import ConfigError
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.dram.memory import ArenaMemory, Bytes, Progress

BlockIds = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint64]

_GENERATION_BYTES = 8
_FLAGS_IN_WORD = 8


def blocks_in(layout: BlockLayout, nbytes: int) -> int:
    """The blocks of an arena of so many bytes."""
    return max(0, nbytes - _GENERATION_BYTES) // (layout.block_bytes + _GENERATION_BYTES)


def bytes_for(layout: BlockLayout, blocks: int) -> int:
    """The bytes with which an arena has so many blocks."""
    return blocks * (layout.block_bytes + _GENERATION_BYTES) + _GENERATION_BYTES


class Arena:
    """Memory as blocks of one layout: their bytes, which belong to the caller that allocated a block.

    Args:
        layout: row bytes per plane and tokens per block.
        block_bytes: from one block to the next; at least those of the layout.
        data: block 0 first, shape (n_blocks * block_bytes,).
    """

    def __init__(
        self, layout: BlockLayout, block_bytes: int, n_blocks: int, memory: ArenaMemory, data: Bytes
    ) -> None:
        self.layout = layout
        self.block_bytes = block_bytes
        self.n_blocks = n_blocks
        self.memory = memory
        self._blocks = data.reshape(n_blocks, block_bytes)

    @property
    def address(self) -> int:
        """Where block 0 starts in this process."""
        return self.memory.address

    @property
    def pinned(self) -> bool:
        return self.memory.pinned

    @property
    def blocks(self) -> Bytes:
        """Bytes of all blocks, shape (n_blocks, block_bytes), without a copy."""
        return self._blocks

    def plane(self, index: int) -> Bytes:
        """Rows of one plane of all blocks, shape (n_blocks, block_tokens, row_bytes), without a copy."""
        start, stop = self.layout.plane_offsets[index : index + 2]
        part = self._blocks[:, start:stop]
        return part.reshape(self.n_blocks, self.layout.block_tokens, self.layout.row_bytes[index], copy=False)

    def layer(self, index: int) -> Bytes:
        """Bytes of one layer of all blocks, shape (n_blocks, layer bytes), without a copy."""
        start, stop = self.layout.layer_offsets[index : index + 2]
        return self._blocks[:, start:stop]

    def _drop_views(self) -> None:
        # Not slices of the old views: those would keep the memory.
        self._blocks = np.empty((0, self.block_bytes), dtype=np.uint8)


class DramArena(Arena):
    """`nbytes` of host memory as blocks of one layout.

    Args:
        layout: row bytes per plane and tokens per block.
        nbytes: size of the whole mapping, generations included; it never grows or shrinks.
        shared: in shared memory, which other processes of the host can map (`memory.fd`).
        pin: register the memory with CUDA if there is a device.
        touch: give every page its memory now; off only where a test wants an arena larger than memory.
        name: for logs and /proc/PID/maps.
        place: says where the memory shall lie, by address and bytes, before it is touched.

    Raises:
        ConfigError: not even one block fits into `nbytes`.
        ArenaMemoryError: the host has less memory.
        PinError: CUDA refused to pin it.
    """

    def __init__(
        self,
        layout: BlockLayout,
        nbytes: int,
        *,
        shared: bool = True,
        pin: bool = True,
        touch: bool = True,
        name: str = "dram",
        place: Callable[[int, int], None] = lambda address, nbytes: None,
        progress: Progress | None = None,
    ) -> None:
        size, n_blocks = layout.block_bytes, blocks_in(layout, nbytes)
        if n_blocks < 1:
            raise ConfigError(
                f"an arena of {nbytes} bytes holds no block of {size} bytes",
                field="--kv-dram-size",
                hint="Make it larger, or lower --kv-block-size",
            )
        start = _generations_at(n_blocks, size)
        memory = ArenaMemory(start + n_blocks * _GENERATION_BYTES, shared=shared, name=name)
        memory.prepare(place=place, touch=touch, pin=pin, progress=progress)
        super().__init__(layout, size, n_blocks, memory, memory.bytes[: n_blocks * size])
        self._generations = memory.bytes[start:].view(np.uint64)
        self._lock = threading.Lock()
        self._free = self.n_blocks
        # Whole words, so that eight used blocks are passed over at once; behind the last block, all are used.
        flags = np.zeros(-(-self.n_blocks // _FLAGS_IN_WORD) * _FLAGS_IN_WORD, dtype=np.bool_)
        flags[: self.n_blocks] = True
        self._is_free, self._free_words = flags[: self.n_blocks], flags.view(np.uint64)
        self._mark = np.zeros(self.n_blocks, dtype=np.int64)  # scratch of _check_ids
        self._closed = False

    # --- bytes ---

    @property
    def generations(self) -> Generations:
        """How often each block has been taken back, shape (n_blocks,). Read only; lies in the mapping."""
        view = self._generations.view()
        view.flags.writeable = False
        return view

    # --- blocks ---

    @property
    def free_blocks(self) -> int:
        return self._free

    @property
    def used_blocks(self) -> int:
        return self.n_blocks - self._free

    @property
    def used_bytes(self) -> int:
        return self.used_blocks * self.block_bytes

    def alloc(self, n: int) -> BlockIds | None:
        """Take the `n` lowest free blocks, all or none.

        Returns:
            Their ids, ascending, shape (n,), int64; None when fewer are free. The bytes are those of before.
        """
        if n < 0:
            raise ValueError(f"alloc({n}): the number of blocks must not be negative")
        with self._lock:
            self._check_open()
            if n > self._free:
                return None
            self._free -= n
            words = np.flatnonzero(self._free_words)[:n]  # each has a free block at least
            flags = self._free_words[words].view(np.bool_).reshape(-1, _FLAGS_IN_WORD)
            rows, columns = np.nonzero(flags)
            ids: BlockIds = words[rows[:n]] * _FLAGS_IN_WORD + columns[:n]
            self._is_free[ids] = False
            return ids

    def free(self, ids: BlockIds | Sequence[int]) -> None:
        """Take blocks back, all or none. Their generations grow, which makes reads under way stale.

        Raises:
            ValueError: an id is out of range, is free already, or is given twice; then none is taken back.
        """
        array = np.ascontiguousarray(ids, dtype=np.int64)
        with self._lock:
            self._check_open()
            self._check_ids(array)
            # Generations first: a reader that sees the new bytes must see the new generation.
            self._generations[array] += np.uint64(1)
            self._is_free[array] = True
            self._free += array.size

    def _check_ids(self, ids: BlockIds) -> None:
        if ids.ndim != 1:
            raise ValueError(f"block ids must have shape (n,), not {ids.shape}")
        if not ids.size:
            return
        if int(ids.min()) < 0 or int(ids.max()) >= self.n_blocks:
            raise ValueError(f"block ids {ids.min()}..{ids.max()} are outside of [0, {self.n_blocks})")
        if self._is_free[ids].any():
            raise ValueError(f"double free of blocks {ids[self._is_free[ids]][:8].tolist()}")
        order = np.arange(ids.size)
        self._mark[ids] = order
        if not np.array_equal(self._mark[ids], order):
            raise ValueError("a block id is given twice in one call of free()")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the arena is closed")

    # --- whole ---

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError naming the violated invariant."""
        with self._lock:
            if int(np.count_nonzero(self._is_free)) != self._free:
                raise AssertionError("the free blocks are not as many as their number says")

    def close(self) -> None:
        """Give the memory back to the system. Views held by others stay valid until they are dropped."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._drop_views()
            self._generations = np.empty(0, dtype=np.uint64)
            self.memory.close()

    def __enter__(self) -> DramArena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"<DramArena {self.used_blocks}/{self.n_blocks} blocks of {self.block_bytes} bytes"
            f"{' pinned' if self.pinned else ''}{' closed' if self._closed else ''}>"
        )


def _generations_at(n_blocks: int, block_bytes: int) -> int:
    """Byte offset of the generations: behind the blocks, aligned so that each is read in one piece."""
    return -(-n_blocks * block_bytes // _GENERATION_BYTES) * _GENERATION_BYTES
