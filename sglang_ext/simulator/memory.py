"""Memory that has no bytes: the places of blocks in HBM and DRAM are counted, and the tree's nodes name them.

The engine's tiers take these where a server has SGLang's allocator of slots, its tensors, and the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.errors import InternalError
from sglang_ext.geometry import BlockLayout


class SlotCount:
    """SGLang's allocator of slots, as `HbmTier` uses it. A run of slots is a range of its length.

    Args:
        size: slots, one for each token.
    """

    device = "cpu"

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = size

    def available_size(self) -> int:
        return self._free

    def alloc(self, tokens: int) -> range | None:
        if tokens > self._free:
            return None
        self._free -= tokens
        return range(tokens)

    def free_segment(self, slots: Sequence[Any], *, start_pos: int) -> None:
        self._free += len(slots)
        if self._free > self.size:
            raise InternalError(f"{self._free} of {self.size} slots are free")


class CountedSlots:
    """`SlotOps` over such runs."""

    def keep(self, row: range) -> range:
        return row

    def join(self, parts: Sequence[range]) -> range:
        return range(sum(map(len, parts)))


class BlockCount:
    """The DRAM arena, as `DramTier` uses it (its `Arena`).

    Args:
        n_blocks: that fit.
        layout: of a block.
    """

    def __init__(self, n_blocks: int, layout: BlockLayout) -> None:
        self.n_blocks, self.layout = n_blocks, layout
        self._free = n_blocks

    @property
    def block_bytes(self) -> int:
        return sum(self.layout.row_bytes) * self.layout.block_tokens

    @property
    def free_blocks(self) -> int:
        return self._free

    def alloc(self, n: int) -> npt.NDArray[np.int64] | None:
        if n > self._free:
            return None
        self._free -= n
        return np.zeros(n, np.int64)

    def free(self, ids: npt.NDArray[np.int64]) -> None:
        self._free += len(ids)

    def check(self) -> None:
        assert 0 <= self._free <= self.n_blocks, f"{self._free} of {self.n_blocks} blocks are free"
