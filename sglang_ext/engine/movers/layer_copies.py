"""Copies from and to a GPU's pool: the interface for movers, and copies without kernels of our own.

Everything is queued on the current stream, and nothing waits on the host.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.engine.movers.batch_copies import batch_copy
from sglang_ext.engine.movers.mover import BlockIds, MoverError
from sglang_ext.geometry import BlockLayout

STAGING_BYTES: Final = 64 << 20
"""Device memory that a copy may use for staging."""

_BY_ADDRESS = 4
"""``cudaMemcpyDefault``: the addresses say which side is the host."""
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class HostArena(Protocol):
    """The part of the DRAM arena that copies need."""

    layout: BlockLayout
    n_blocks: int
    block_bytes: int

    @property
    def address(self) -> int: ...

    @property
    def pinned(self) -> bool: ...

    @property
    def blocks(self) -> npt.NDArray[np.uint8]: ...


class Blocks:
    """Blocks of the arena, as the host and the device know them. upload: copies ids to the device."""

    def __init__(self, ids: BlockIds, upload: Callable[[BlockIds], torch.Tensor]) -> None:
        self.ids = ids
        self._upload = upload

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def on_device(self) -> torch.Tensor:
        """int64; its memory belongs to the stream that is current when it is first asked for."""
        return self._upload(self.ids)


class LayerCopies(Protocol):
    """Copies between arena and pool, on the current stream. ``slots`` are int64, one for each token."""

    def load(self, slots: torch.Tensor, blocks: Blocks, layer: int, place: int) -> None:
        """One layer of blocks to the planes of layer ``place``."""

    def within(self, place: int, layer: int, slots: torch.Tensor, to: torch.Tensor) -> None:
        """The rows at ``slots`` of the planes of layer ``place`` to the rows ``to`` of those of ``layer``."""

    def store(self, slots: torch.Tensor, blocks: Blocks, layer: int) -> None:
        """One layer of the tokens at ``slots`` to blocks."""

    def gather(self, slots: torch.Tensor, blocks: int) -> torch.Tensor:
        """Tokens as whole blocks in the arena's layout: bytes, shape (blocks, bytes of a block). Later work
        of this stream may use the memory for something else. blocks: at most `staging_blocks`.
        """


def staging_blocks(arena: HostArena) -> int:
    """The number of blocks that one step of a write gathers."""
    return min(max(1, STAGING_BYTES // arena.block_bytes), arena.n_blocks)


def cuda_library() -> ctypes.CDLL:
    """The runtime that torch has loaded. Raises MoverError where torch has none."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libcudart" in line})
    if not paths:
        raise MoverError("no libcudart is loaded; torch was built without CUDA")
    return ctypes.CDLL(paths[0])


class CudaRuntime:
    """Calls of the runtime that torch has loaded, for which torch has none."""

    def __init__(self) -> None:
        self._library = cuda_library()
        self.batch = batch_copy(self._library)
        """Many copies by one call; None before CUDA 12.8."""

    def copy_2d(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        width: int,
        rows: int,
        stream: int,
    ) -> None:
        """``cudaMemcpy2DAsync``: rows that lie further apart than they are wide."""
        status = self._library.cudaMemcpy2DAsync(
            ctypes.c_void_p(target),
            ctypes.c_size_t(target_pitch),
            ctypes.c_void_p(source),
            ctypes.c_size_t(source_pitch),
            ctypes.c_size_t(width),
            ctypes.c_size_t(rows),
            ctypes.c_int(_BY_ADDRESS),
            ctypes.c_void_p(stream),
        )
        if status != 0:
            raise MoverError(f"cudaMemcpy2DAsync failed with CUDA error {status}")

    def mapped(self, address: int) -> int:
        """The address of pinned host memory for kernels."""
        found = ctypes.c_void_p()
        status = self._library.cudaHostGetDevicePointer(
            ctypes.byref(found), ctypes.c_void_p(address), ctypes.c_uint(0)
        )
        if status != 0 or found.value is None:
            raise MoverError(f"cudaHostGetDevicePointer failed with CUDA error {status}")
        return found.value


class PlainCopies:
    """Copies by calls of the runtime and torch's index kernels, through staging buffers. A call for each
    layer (`BatchCopy`; before CUDA 12.8 for each run of neighbouring blocks), and kernels for each plane: for
    where `RowCopies` cannot be used.

    Args:
        planes: the pool's rows of words by local layer (`word_rows`).
    """

    def __init__(self, planes: list[list[torch.Tensor]], arena: HostArena, runtime: CudaRuntime) -> None:
        self._planes, self._arena, self._layout, self._runtime = planes, arena, arena.layout, runtime
        self._device = planes[0][0].device

    def load(self, slots: torch.Tensor, blocks: Blocks, layer: int, place: int) -> None:
        size = self._layout.layer_bytes(layer)
        step, tokens = max(1, STAGING_BYTES // size), self._layout.block_tokens
        for start in range(0, len(blocks), step):
            ids = blocks.ids[start : start + step]
            # Let go at the end: the allocator gives it to later work of this stream only.
            staging = torch.empty((len(ids), size), dtype=torch.uint8, device=self._device)
            self._copy_runs(staging, layer, ids, to_host=False)
            part = slots[start * tokens : (start + len(ids)) * tokens]
            scatter_layer(self._planes[place], self._layout, staging, part)

    def store(self, slots: torch.Tensor, blocks: Blocks, layer: int) -> None:
        size = self._layout.layer_bytes(layer)
        step, tokens = max(1, STAGING_BYTES // size), self._layout.block_tokens
        for start in range(0, len(blocks), step):
            ids = blocks.ids[start : start + step]
            part = slots[start * tokens : (start + len(ids)) * tokens]
            self._copy_runs(gather_layer(self._planes[layer], part, len(ids)), layer, ids, to_host=True)

    def _copy_runs(self, staging: torch.Tensor, layer: int, ids: BlockIds, *, to_host: bool) -> None:
        """One layer of arena blocks, side by side in ``staging``: by one call, else by one for each run of
        neighbours, whose rows lie a whole block apart."""
        pitch, size = self._arena.block_bytes, self._layout.layer_bytes(layer)
        stream = torch.cuda.current_stream(self._device).cuda_stream
        if (batch := self._runtime.batch) is not None:
            blocks = self._arena.address + ids * pitch + self._layout.layer_offsets[layer]
            places = staging.data_ptr() + np.arange(len(ids)) * size
            source, target = (places, blocks) if to_host else (blocks, places)
            batch(source, target, np.full(len(ids), size), stream)
            return
        for position, first, count in runs_of_blocks(ids):
            here = staging.data_ptr() + position * size
            there = self._arena.address + first * pitch + self._layout.layer_offsets[layer]
            if to_host:
                self._runtime.copy_2d(there, pitch, here, size, size, count, stream)
            else:
                self._runtime.copy_2d(here, size, there, pitch, size, count, stream)

    def within(self, place: int, layer: int, slots: torch.Tensor, to: torch.Tensor) -> None:
        copy_within(self._planes[place], self._planes[layer], slots, to)

    def gather(self, slots: torch.Tensor, blocks: int) -> torch.Tensor:
        return gather_blocks(self._planes, self._layout, slots, self._arena.block_bytes)


def runs_of_blocks(blocks: BlockIds) -> Iterator[tuple[int, int, int]]:
    """Neighbouring ids as runs: (position in ``blocks``, first id, count)."""
    if not len(blocks):
        return
    borders = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = [0, *borders.tolist()]
    ends = [*borders.tolist(), len(blocks)]
    for start, end in zip(starts, ends, strict=True):
        yield start, int(blocks[start]), end - start


def word_of(layout: BlockLayout, block_bytes: int) -> torch.dtype:
    """The widest type of which all rows and blocks are made: kernels move one element at a time."""
    size = math.gcd(block_bytes, *layout.row_bytes)
    return next(word for word in _WORDS if size % word.itemsize == 0)


def word_rows(plane: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """A plane as words, shape (slots, row bytes / word size), without a copy."""
    return plane.view(plane.shape[0], -1).view(word)


def gather_blocks(
    planes: list[list[torch.Tensor]], layout: BlockLayout, slots: torch.Tensor, block_bytes: int
) -> torch.Tensor:
    """The tokens at ``slots`` as whole blocks in the arena's layout: bytes, shape (blocks, block bytes).

    Args:
        planes: rows of words by local layer.
        slots: int64, ``block_tokens`` for each block.
        block_bytes: from one block to the next; at least those of the layout.
    """
    blocks = len(slots) // layout.block_tokens
    flat = [plane for layer in planes for plane in layer]
    word = flat[0].dtype
    staging = torch.empty((blocks, block_bytes // word.itemsize), dtype=word, device=slots.device)
    for index, plane in enumerate(flat):
        start, stop = (offset // word.itemsize for offset in layout.plane_offsets[index : index + 2])
        staging[:, start:stop] = plane.index_select(0, slots).view(blocks, stop - start)
    return staging.view(torch.uint8)


def gather_layer(planes: list[torch.Tensor], slots: torch.Tensor, blocks: int) -> torch.Tensor:
    """One layer of the tokens at ``slots``: bytes, shape (blocks, layer bytes)."""
    parts = [plane.index_select(0, slots).view(blocks, -1) for plane in planes]
    return torch.cat(parts, dim=1).view(torch.uint8)


def scatter_layer(
    planes: list[torch.Tensor], layout: BlockLayout, staging: torch.Tensor, slots: torch.Tensor
) -> None:
    """Put one layer of some blocks, bytes of shape (blocks, layer bytes), into the pool at ``slots``."""
    start, words = 0, staging.view(planes[0].dtype)
    for plane in planes:
        row = plane.shape[1]
        stop = start + row * layout.block_tokens
        plane.index_copy_(0, slots, words[:, start:stop].reshape(len(slots), row))
        start = stop


def copy_within(
    source: list[torch.Tensor], target: list[torch.Tensor], slots: torch.Tensor, to: torch.Tensor
) -> None:
    """Copy the rows at ``slots`` of one layer's planes to the rows ``to`` of another's."""
    for here, there in zip(source, target, strict=True):
        there.index_copy_(0, to, here.index_select(0, slots))
