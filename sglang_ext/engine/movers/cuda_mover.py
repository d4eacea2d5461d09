"""The mover for pools in GPU memory: copies on two streams of their own, from and to a pinned arena.

Nothing here waits on the host. A load queues, for each layer, the transfer of that layer of all blocks
into a staging buffer and its scatter into the pool, and records an event; the forward pass waits for a
layer by making its stream wait for the event. A write gathers whole blocks into a staging buffer on the
device, in the arena's layout, and copies runs of neighbouring blocks to the host in one transfer each.

Ordering with the engine's streams: every copy starts after all work queued so far on the forward stream and
on the scheduler's. A batch under way may still write to slots that were freed and have now been given to a
load; and it may be writing the last token of a request whose end the batch before it has reported, while the
scheduler's stream follows a graph only until it has read its inputs. The scheduler's stream makes the slots.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.engine.movers.bandwidth import Bandwidth
from sglang_ext.engine.movers.mover import (
    BlockIds,
    Copied,
    LayerSink,
    MoverError,
    Near,
    Source,
    of_blocks,
    rest_of,
)
from sglang_ext.geometry import BlockLayout

STAGING_BYTES = 64 << 20
"""Device memory that one step of a write may use for staging."""

_HOST_TO_DEVICE = 1
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class HostArena(Protocol):
    """The part of the DRAM arena that the mover needs."""

    layout: BlockLayout
    n_blocks: int
    block_bytes: int

    @property
    def address(self) -> int: ...

    @property
    def pinned(self) -> bool: ...

    @property
    def blocks(self) -> npt.NDArray[np.uint8]: ...


@dataclass
class _Load:
    nbytes: int
    begun: Any
    """Event at its beginning, with timing as the last layer's."""
    events: list[Any]
    """One per layer."""


def runs_of_blocks(blocks: BlockIds) -> Iterator[tuple[int, int, int]]:
    """Neighbouring ids as runs: (position in ``blocks``, first id, count)."""
    if not len(blocks):
        return
    borders = np.flatnonzero(np.diff(blocks) != 1) + 1
    starts = [0, *borders.tolist()]
    ends = [*borders.tolist(), len(blocks)]
    for start, end in zip(starts, ends, strict=True):
        yield start, int(blocks[start]), end - start


class CudaMover:
    """See the module's docstring and the contract ``mover.Mover``.

    Args:
        planes: the pool's tensors by local layer, as ``hbm.pool_planes`` returns them.
        arena: pinned, with the layout of the pool's blocks.
        forward_stream: the stream on which the engine runs the model.
    """

    streams = False

    def __init__(
        self, planes: list[list[torch.Tensor]], arena: HostArena, forward_stream: torch.cuda.Stream
    ) -> None:
        if not arena.pinned:
            raise MoverError("the arena is not pinned; copies to and from the GPU would block the engine")
        self._layout = arena.layout
        self._arena = arena
        self._host = torch.from_numpy(arena.blocks)
        word = word_of(arena.layout, arena.block_bytes)
        self._planes = [[word_rows(plane, word) for plane in layer] for layer in planes]
        self._device = planes[0][0].device
        self._forward_stream = forward_stream
        # A pass waits for loads: their kernels must not queue behind all of those of a batch under way.
        self._load_stream = torch.cuda.Stream(self._device, priority=-1)
        self._write_stream = torch.cuda.Stream(self._device)
        self._copy_2d = _memcpy_2d()
        self._loads: deque[_Load] = deque()
        self._writes: deque[Any] = deque()
        self._loads_done = 0
        self._writes_done = 0
        self._rate = Bandwidth()

    def write(
        self,
        slots: torch.Tensor,
        blocks: BlockIds,
        source: Source | None = None,
        copied: Copied | None = None,
    ) -> int:
        assert source is None, "this mover does not stream"
        self._follow_engine(self._write_stream, slots)
        step = max(1, STAGING_BYTES // self._arena.block_bytes)
        tokens = self._layout.block_tokens
        with torch.cuda.stream(self._write_stream):
            for start in range(0, len(blocks), step):
                part = blocks[start : start + step]
                staging = gather_blocks(
                    self._planes,
                    self._layout,
                    slots[start * tokens : (start + len(part)) * tokens],
                    self._arena.block_bytes,
                )
                for position, first, count in runs_of_blocks(part):
                    target = self._host[first : first + count]
                    target.copy_(staging[position : position + count], non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._write_stream)
        self._writes.append(event)
        return self._writes_done + len(self._writes) - 1

    def load(
        self,
        slots: torch.Tensor,
        blocks: BlockIds,
        source: Source | None = None,
        near: Sequence[Near] = (),
    ) -> int:
        if source is not None:
            raise ValueError("this mover loads only what is complete")
        self._loads.append(self._copy_in(self._load_stream, slots, blocks, near))
        return self._loads_done + len(self._loads) - 1

    def bring(self, slots: torch.Tensor, blocks: BlockIds) -> int:
        """Copies on the stream of the writes, for which no forward pass waits."""
        self._writes.append(self._copy_in(self._write_stream, slots, blocks).events[-1])
        return self._writes_done + len(self._writes) - 1

    def fill(self, slots: torch.Tensor, blocks: BlockIds, layer: int, place: int) -> int:
        """On the stream of the writes, as ``bring``."""
        stream = self._write_stream
        self._follow_engine(stream, slots)
        with torch.cuda.stream(stream):
            self._copy_layer(stream, slots, list(runs_of_blocks(blocks)), len(blocks), layer, place)
            event = torch.cuda.Event()
            event.record(stream)
        self._writes.append(event)
        return self._writes_done + len(self._writes) - 1

    @property
    def load_bytes_per_second(self) -> float | None:
        return self._rate.bytes_per_second

    def _follow_engine(self, stream: torch.cuda.Stream, slots: torch.Tensor) -> None:
        """Make later work on a stream wait for the passes that may still write to these slots, and for the
        slots themselves."""
        stream.wait_stream(self._forward_stream)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        slots.record_stream(stream)

    def _copy_in(
        self, stream: torch.cuda.Stream, slots: torch.Tensor, blocks: BlockIds, near: Sequence[Near] = ()
    ) -> _Load:
        """Queue the copy of arena blocks to the pool, layer by layer, on a stream."""
        self._follow_engine(stream, slots)
        runs, count = list(runs_of_blocks(blocks)), len(blocks)
        within = {layer: (parts, far) for layer, parts, far in rest_of(near, count)}
        uploaded: dict[bytes, torch.Tensor] = {}

        def slots_at(positions: BlockIds) -> torch.Tensor:
            """Of these blocks; layers with the same ones share an upload."""
            key = positions.tobytes()
            if key not in uploaded:
                uploaded[key] = of_blocks(slots, self._on_device(positions), count)
            return uploaded[key]

        last = self._layout.n_layers - 1
        load = _Load(0, torch.cuda.Event(enable_timing=True), [])
        with torch.cuda.stream(stream):
            load.begun.record(stream)
            for layer in range(self._layout.n_layers):
                parts, far = within.get(layer, ((), None))
                for part in parts:
                    copy_within(
                        self._planes[part.place],
                        self._planes[layer],
                        part.slots,
                        slots_at(part.positions),
                    )
                if layer not in within:
                    load.nbytes += self._copy_layer(stream, slots, runs, count, layer, layer)
                elif far is not None:
                    rest = list(runs_of_blocks(blocks[far]))
                    load.nbytes += self._copy_layer(stream, slots_at(far), rest, len(far), layer, layer)
                event = torch.cuda.Event(enable_timing=layer == last)
                event.record(stream)
                load.events.append(event)
        return load

    def _on_device(self, positions: BlockIds) -> torch.Tensor:
        """Copied on the current stream. From pinned memory: from any other, the host waits for the stream."""
        return torch.from_numpy(positions).pin_memory().to(self._device, non_blocking=True)

    def _copy_layer(
        self,
        stream: torch.cuda.Stream,
        slots: torch.Tensor,
        runs: Sequence[tuple[int, int, int]],
        count: int,
        layer: int,
        place: int,
    ) -> int:
        """Queue one layer of arena blocks, to the planes of layer ``place``. Returns its bytes."""
        size = self._layout.layer_bytes(layer)
        # Let go at the end: the allocator gives it to later work of this stream only.
        staging = torch.empty((count, size), dtype=torch.uint8, device=self._device)
        for position, first, blocks in runs:
            self._copy_layer_in(stream, staging, layer, position, first, blocks)
        scatter_layer(self._planes[place], self._layout, staging, slots)
        return count * size

    def _copy_layer_in(
        self,
        stream: torch.cuda.Stream,
        staging: torch.Tensor,
        layer: int,
        position: int,
        first: int,
        count: int,
    ) -> None:
        """One layer of neighbouring arena blocks: rows that lie a whole block apart."""
        block_bytes, size = self._arena.block_bytes, self._layout.layer_bytes(layer)
        source = self._arena.address + first * block_bytes + self._layout.layer_offsets[layer]
        status = self._copy_2d(
            ctypes.c_void_p(staging.data_ptr() + position * size),
            ctypes.c_size_t(size),
            ctypes.c_void_p(source),
            ctypes.c_size_t(block_bytes),
            ctypes.c_size_t(size),
            ctypes.c_size_t(count),
            ctypes.c_int(_HOST_TO_DEVICE),
            ctypes.c_void_p(stream.cuda_stream),
        )
        if status != 0:
            raise MoverError(f"cudaMemcpy2DAsync failed with CUDA error {status}")

    def writes_done(self) -> int:
        while self._writes and self._writes[0].query():
            self._writes.popleft()
            self._writes_done += 1
        return self._writes_done

    def follow(self, source: Source) -> int:
        raise ValueError("this mover loads only what is complete")

    def into(self, slots: torch.Tensor) -> LayerSink:
        raise ValueError("this mover loads only from the arena")

    def loads_done(self) -> int:
        while self._loads and self._loads[0].events[-1].query():
            load = self._loads.popleft()
            # Nothing for a load that was near as a whole.
            self._rate.observe(load.nbytes, load.begun.elapsed_time(load.events[-1]) / 1000)
            self._loads_done += 1
        return self._loads_done

    def wait_layer(self, ticket: int, layer: int) -> None:
        position = ticket - self._loads_done
        if position >= 0:
            # Loads share a stream, so the newest one's layer comes after everything of those before.
            torch.cuda.current_stream(self._device).wait_event(self._loads[position].events[layer])

    def wait_writes(self, count: int) -> None:
        while self._writes and self._writes_done < count:
            self._writes.popleft().synchronize()
            self._writes_done += 1

    def settle(self) -> None:
        self._load_stream.synchronize()
        self._write_stream.synchronize()
        self.writes_done()
        self.loads_done()

    def close(self) -> None:
        self.settle()

    def __repr__(self) -> str:
        return (
            f"CudaMover(loads={self._loads_done}+{len(self._loads)}, "
            f"writes={self._writes_done}+{len(self._writes)})"
        )


def word_of(layout: BlockLayout, block_bytes: int) -> torch.dtype:
    """The widest type of which all rows and blocks are made: an index kernel moves one element at a time."""
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


def _memcpy_2d() -> Any:
    """``cudaMemcpy2DAsync`` of the runtime that torch has loaded; torch has no call for pitched copies."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split()[-1] for line in maps if "libcudart" in line}
    for path in sorted(paths):
        function = ctypes.CDLL(path).cudaMemcpy2DAsync
        function.restype = ctypes.c_int
        return function
    raise MoverError("no libcudart is loaded; torch was built without CUDA")
