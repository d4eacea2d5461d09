"""Copies between pool and arena by one kernel: a launch for each layer of a load, one for a step of a write.

A plane of the pool, a layer of the arena's blocks and a staging buffer are *sides*: tables of where the rows
of a token are, on the device. The kernel (`row_kernel`) copies from one side to another. Fragmentation costs
nothing: each run of tokens has its block's number, and no call of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from sglang_ext.engine.movers.layer_copies import Blocks, HostArena, staging_blocks

TILE_WORDS: Final = 4096
"""Of one step of a program: 32 KiB, 16 bytes for each of 256 threads eight times, all under way at once."""
IN_FLIGHT: Final = 128 << 10
"""Bytes of a load that are under way at once: a PCIe link of 55 GB/s has 72 to 110 KiB on it for the 1.3 to
2 microseconds of a read. Computed, not measured."""
LOAD_PROGRAMS: Final = (4, 8)
"""At least and at most. Each takes a multiprocessor from passes while it loads."""
WRITE_PROGRAMS: Final = 16
"""Of a write's gathering, which is short beside the transfer that follows, and of a computed layer."""
_VECTOR_BYTES = 16


@dataclass(frozen=True)
class Tile:
    """The constants of a compiled kernel.

    wide: words of a piece of a row, a power of two; rows: tokens of a step; aligned: words by which all
    addresses and lengths can be divided.
    """

    word: torch.dtype
    wide: int
    rows: int
    aligned: int


@dataclass(frozen=True)
class Side:
    """One end of copies. pieces: int64 on the device, shape (pieces, 4): address, words of the piece, words
    from one unit to the next, words from one token to the next within a unit. unit_tokens: of a unit."""

    pieces: torch.Tensor
    unit_tokens: int


@dataclass(frozen=True)
class Launch:
    """One call of the kernel. Units: int64 on the device, of each run of ``unit_tokens`` tokens."""

    source: Side
    source_units: torch.Tensor
    target: Side
    target_units: torch.Tensor
    tokens: int
    tile: Tile
    programs: int


@dataclass(frozen=True)
class Rows:
    """Rows of a plane, or of ranges, before they are cut into pieces; see `Side`."""

    address: int
    words: int
    unit: int
    token: int


Upload = Callable[[np.ndarray], torch.Tensor]


def launcher() -> Callable[[Launch], None]:
    """The kernel. Raises ImportError where Triton is not installed."""
    from sglang_ext.engine.movers import row_kernel

    return partial(launch, row_kernel)


def launch(kernel: Any, of: Launch) -> None:
    """Queue one copy on the current stream, by the kernel's module. The first of each kind compiles for
    some seconds."""
    tile = of.tile
    kernel.copy_rows[(of.programs,)](
        of.source.pieces,
        of.source_units,
        of.target.pieces,
        of.target_units,
        len(of.source.pieces),
        of.tokens,
        WORD=kernel.WORDS[tile.word],
        WORD_BYTES=tile.word.itemsize,
        SOURCE_TOKENS=of.source.unit_tokens,
        TARGET_TOKENS=of.target.unit_tokens,
        WIDE=tile.wide,
        ROWS=tile.rows,
        ALIGNED=tile.aligned,
        num_warps=kernel.WARPS,
    )


class RowCopies:
    """`LayerCopies` by the kernel. Making one compiles it, and takes the staging memory of writes.

    Args:
        planes: the pool's rows of words by local layer (`layer_copies.word_rows`).
        address: of the arena, for kernels.
        upload: copies an array to the device, on the current stream.
        write_stream: on which alone `gather` is called.

    Raises:
        Exception: whatever Triton or CUDA raises where the kernel cannot be compiled or launched.
    """

    def __init__(
        self,
        planes: list[list[torch.Tensor]],
        arena: HostArena,
        address: int,
        upload: Upload,
        write_stream: torch.cuda.Stream,
    ) -> None:
        self._launch = launcher()
        layout = arena.layout
        self._tokens, word = layout.block_tokens, planes[0][0].dtype
        rows = _rows_of(planes, arena, address, word)
        with torch.cuda.stream(write_stream):
            shape = staging_blocks(arena), arena.block_bytes
            self._staging = torch.empty(shape, dtype=torch.uint8, device=planes[0][0].device)
        there = self._staging.data_ptr() - address
        rows["staging"] = [replace(row, address=row.address + there) for row in rows["arena"]]
        self.tile = _tile(list(itertools.chain(*rows.values())), word)
        tables = {name: pieces_of(side, self.tile.wide, word.itemsize) for name, side in rows.items()}
        # Made on the current stream, which all copies follow.
        self._tables = {name: upload(np.concatenate(table)) for name, table in tables.items()}
        self._ends = [0, *itertools.accumulate(len(table) for table in tables["pool"])]
        self._layout = layout
        self._positions = upload(np.arange(len(self._staging), dtype=np.int64))
        longest = max(row.words for row in rows["pool"])
        under_way = self.tile.rows * min(longest, self.tile.wide) * word.itemsize
        least, most = LOAD_PROGRAMS
        self._load_programs = min(max(least, -(-IN_FLIGHT // under_way)), most)
        self._compile()

    def load(self, slots: torch.Tensor, blocks: Blocks, layer: int, place: int) -> None:
        self._compare(layer, place)
        source, target = self._side("arena", layer), self._side("pool", place)
        self._copy(source, blocks.on_device, target, slots, self._load_programs)

    def store(self, slots: torch.Tensor, blocks: Blocks, layer: int) -> None:
        """The kernel writes to the arena, so that no staging memory is taken while a pass runs."""
        source, target = self._side("pool", layer), self._side("arena", layer)
        self._copy(source, slots, target, blocks.on_device, WRITE_PROGRAMS)

    def within(self, place: int, layer: int, slots: torch.Tensor, to: torch.Tensor) -> None:
        self._compare(layer, place)
        self._copy(self._side("pool", place), slots, self._side("pool", layer), to, self._load_programs)

    def gather(self, slots: torch.Tensor, blocks: int) -> torch.Tensor:
        positions = self._positions[:blocks]
        self._copy(self._side("pool"), slots, self._side("staging"), positions, WRITE_PROGRAMS)
        return self._staging[:blocks]

    def _compare(self, layer: int, place: int) -> None:
        if self._layout.layers[layer] != self._layout.layers[place]:
            raise ValueError(f"rows of layer {layer} do not fit in the planes of layer {place}")

    def _side(self, name: str, layer: int | None = None) -> Side:
        """Of one layer, or of all."""
        table = self._tables[name]
        if layer is not None:
            first, last = self._layout.first_plane[layer : layer + 2]
            table = table[self._ends[first] : self._ends[last]]
        return Side(table, 1 if name == "pool" else self._tokens)

    def _copy(
        self, source: Side, here: torch.Tensor, target: Side, there: torch.Tensor, programs: int
    ) -> None:
        tokens = len(here) * source.unit_tokens
        if tokens != len(there) * target.unit_tokens:
            raise ValueError(f"{tokens} tokens do not go to {len(there)} units of {target.unit_tokens}")
        for units in (here, there):
            if units.dtype is not torch.int64 or not units.is_contiguous():
                raise ValueError(f"slots are {units.dtype}, stride {units.stride()}; dense int64 is needed")
        self._launch(Launch(source, here, target, there, tokens, self.tile, programs))

    def _compile(self) -> None:
        """Compile each kind of copy, and load it into the GPU, before a request waits for it."""
        nothing = self._positions[:0]
        self._copy(self._side("arena", 0), nothing, self._side("pool", 0), nothing, self._load_programs)
        self._copy(self._side("pool", 0), nothing, self._side("pool", 0), nothing, self._load_programs)
        self._copy(self._side("pool"), nothing, self._side("staging"), nothing, WRITE_PROGRAMS)


def _rows_of(
    planes: Sequence[Sequence[torch.Tensor]], arena: HostArena, address: int, word: torch.dtype
) -> dict[str, list[Rows]]:
    """The rows of all planes in the pool and in the arena, in the order of planes."""
    layout, size = arena.layout, word.itemsize
    flat = [plane for layer in planes for plane in layer]
    pool = [Rows(plane.data_ptr(), plane.shape[1], plane.stride(0), 0) for plane in flat]
    blocks = [
        Rows(address + offset, row // size, arena.block_bytes // size, row // size)
        for offset, row in zip(layout.plane_offsets[:-1], layout.row_bytes, strict=True)
    ]
    if [row.words for row in pool] != [row.words for row in blocks]:
        raise ValueError("the rows of the pool are not those of the arena's blocks")
    return {"pool": pool, "arena": blocks}


def _tile(rows: Sequence[Rows], word: torch.dtype) -> Tile:
    """For rows of all sides."""
    longest = max(row.words for row in rows)
    wide = min(1 << (longest - 1).bit_length(), TILE_WORDS)
    lengths = [each for row in rows for each in (row.words, row.unit, row.token)]
    vector = math.gcd(_VECTOR_BYTES, *(row.address for row in rows), *(n * word.itemsize for n in lengths))
    aligned = _VECTOR_BYTES // word.itemsize if vector == _VECTOR_BYTES else 1
    return Tile(word, wide, TILE_WORDS // wide, aligned)


def pieces_of(rows: Sequence[Rows], wide: int, word_bytes: int) -> list[np.ndarray]:
    """For each of the rows, its pieces of at most ``wide`` words as a table of int64, see `Side`."""
    return [
        np.array(
            [
                (row.address + at * word_bytes, min(wide, row.words - at), row.unit, row.token)
                for at in range(0, row.words, wide)
            ],
            np.int64,
        )
        for row in rows
    ]
