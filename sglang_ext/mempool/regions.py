"""The memory of a tier, in blocks: what the pool asks of HBM, and arenas: DRAM, and HBM too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.errors import ConfigError, MediumError
from sglang_ext.geometry import BlockLayout, Geometry
from sglang_ext.mempool.address import Place
from sglang_ext.tiered_store.dram.arena import DramArena

Rows = npt.NDArray[np.uint8]
"""Whole blocks in host memory, one after the other: contiguous, shape (blocks, block bytes)."""

Ids = npt.NDArray[np.int64]
Opening = Callable[[Ids], None]

_COPY_BLOCKS = 64


class OutOfBlocksError(MediumError):
    """A tier has no room, and nothing in it may go."""


class Region(Protocol):
    """The bytes of one tier, and how its blocks are named: in the index, in addresses, at an endpoint.

    The pool guarantees: what is copied is not freed meanwhile; one thread. A region guarantees: copies are
    complete when they return; `opening` is called before the bytes of blocks may change, so that peers that
    read them one-sidedly can tell.
    """

    opening: Opening | None

    @property
    def layout(self) -> BlockLayout: ...

    @property
    def borrowed(self) -> bool:
        """Whether an engine writes to it without telling; see `PoolSpec.borrowed`."""

    def pack(self, places: Sequence[Place]) -> Any:
        """Places as the index keeps them: a sequence with equally many entries for each block."""

    def unpack(self, address: Any, blocks: int) -> list[Place]:
        """The places of a node's `blocks` blocks."""

    @property
    def ids_per_block(self) -> int:
        """Blocks of an `Endpoint`'s pool, which may be pages, in one block."""

    def to_ids(self, places: Sequence[Place]) -> Ids:
        """Places as the blocks of an `Endpoint`'s pool."""

    def from_ids(self, ids: Ids) -> list[Place]:
        """Blocks of an `Endpoint`'s pool as places."""

    def spec(self, name: str, geometry: Geometry) -> PoolSpec:
        """As a pool of an endpoint.

        Raises:
            ConfigError: the geometry is not of these bytes.
        """

    def open(self, places: Sequence[Place]) -> None:
        """Somebody, here or a peer, is about to write to these blocks."""

    def copy_out(self, places: Sequence[Place], rows: Rows) -> None:
        """Copy blocks into host memory."""

    def copy_in(self, places: Sequence[Place], rows: Rows) -> None:
        """Copy blocks from host memory."""


class ArenaRegion:
    """A block-first arena as a region. A place is (block,), and the index keeps int64 of shape (blocks,)."""

    ids_per_block = 1

    def __init__(self, arena: DramArena, *, borrowed: bool = False) -> None:
        self.arena = arena
        self.borrowed = borrowed
        self.opening: Opening | None = None

    @property
    def layout(self) -> BlockLayout:
        return self.arena.layout

    @staticmethod
    def of_blocks(layout: BlockLayout, blocks: int, *, name: str = "region") -> ArenaRegion:
        """`blocks` blocks in private memory of this process: the HBM of a pool without an engine."""
        size = blocks * (layout.block_bytes + 8) + 16
        return ArenaRegion(DramArena(layout, size, shared=False, pin=False, touch=False, name=name))

    def pack(self, places: Sequence[Place]) -> Ids:
        return np.array([place[0] for place in places], dtype=np.int64)

    def unpack(self, address: Any, blocks: int) -> list[Place]:
        return self.from_ids(address)

    def to_ids(self, places: Sequence[Place]) -> Ids:
        return self.pack(places)

    def from_ids(self, ids: Ids) -> list[Place]:
        return [(block,) for block in ids.tolist()]

    def spec(self, name: str, geometry: Geometry) -> PoolSpec:
        arena = self.arena
        if geometry.layout != self.layout:
            raise ConfigError(f"{name} is not an arena of this geometry", field="geometry")
        return PoolSpec.of_arena(name, geometry, arena, arena.n_blocks, self.borrowed)

    def open(self, places: Sequence[Place]) -> None:
        if self.opening is not None:
            self.opening(self.pack(places))

    def copy_out(self, places: Sequence[Place], rows: Rows) -> None:
        np.take(self.arena.blocks, self.pack(places), axis=0, out=rows)

    def copy_in(self, places: Sequence[Place], rows: Rows) -> None:
        self.open(places)
        self.arena.blocks[self.pack(places)] = rows

    def __repr__(self) -> str:
        return f"<ArenaRegion {self.arena!r}>"


def move(source: Region, froms: Sequence[Place], target: Region, tos: Sequence[Place]) -> None:
    """Copy blocks from one region into another, through a small buffer."""
    rows = np.empty((min(len(froms), _COPY_BLOCKS), source.layout.block_bytes), dtype=np.uint8)
    for start in range(0, len(froms), _COPY_BLOCKS):
        part = froms[start : start + _COPY_BLOCKS]
        source.copy_out(part, rows[: len(part)])
        target.copy_in(tos[start : start + _COPY_BLOCKS], rows[: len(part)])


def chunks(count: int) -> Iterator[slice]:
    """`count` blocks in parts that are copied at a time."""
    for start in range(0, count, _COPY_BLOCKS):
        yield slice(start, min(count, start + _COPY_BLOCKS))
