"""A GPU's memory between processes: handles of allocations, and copies of ranges by the kernel of loads.

It is the `DeviceMemory` of the transport `cuda_ipc` (`disagg/transports/cuda_ipc.py`). Ranges have
any lengths; the kernel copies rows of one length. So each range is cut into rows of `ROW_BYTES`, which one
launch copies, and a rest, which a second one copies in rows of the rests' common divisor: of KV, whole
tokens.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.disagg.errors import TransportUnavailableError
from sglang_ext.disagg.memory import HANDLE_BYTES
from sglang_ext.engine.movers import row_copies
from sglang_ext.engine.movers.batch_copies import batch_copy
from sglang_ext.engine.movers.layer_copies import cuda_library
from sglang_ext.engine.movers.mover import MoverError
from sglang_ext.engine.movers.row_copies import TILE_WORDS, Launch, Rows, Side, Tile, pieces_of

log = logging.getLogger(__name__)

ROW_BYTES: Final = 8 << 10
PROGRAMS: Final = 16
"""Of a copy between GPUs: 512 KiB under way. NVLink at 450 GB/s has about so much on it in a microsecond.
Computed, not measured."""
WIDTHS: Final = (16, 128, 1024, TILE_WORDS)
"""Words of a piece of a row: few, as the kernel is compiled for each."""
_WORDS: Final = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_VECTOR_BYTES: Final = 16
_LAZY_PEER_ACCESS: Final = 1
_DMA_BUF: Final = 1
_CURRENT_DEVICE: Final = 0
_TO_OWNER: Final = 100
_PORTABLE: Final = 1
"""Pinned for every context."""
_DEFAULT_KIND: Final = 4
"""The runtime sees by the addresses where both sides are."""

Ranges = npt.NDArray[np.int64]
"""Shape (n, 3): address of the source, address of the target, bytes."""


@dataclass(frozen=True)
class RowBatch:
    """Rows of one length for one launch. sources, targets: int64, in units of ``aligned`` words from address
    0 on."""

    sources: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    words: int
    tile: Tile

    @property
    def pieces(self) -> npt.NDArray[np.int64]:
        """Of a row, for either side."""
        row = Rows(0, self.words, self.tile.aligned, 0)
        return pieces_of([row], self.tile.wide, self.tile.word.itemsize)[0]


def batches_of(ranges: Ranges) -> list[RowBatch]:
    """The launches that copy some ranges."""
    whole, rest = np.divmod(ranges[:, 2], ROW_BYTES)
    made = []
    if whole.any():
        made.append(_batch(ranges[:, :2], whole, ROW_BYTES))
    if rest.any():
        short = np.flatnonzero(rest)
        row = int(np.gcd.reduce(rest[short]))
        starts = ranges[short, :2] + (whole[short] * ROW_BYTES)[:, None]
        made.append(_batch(starts, rest[short] // row, row))
    return made


def _batch(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], row_bytes: int) -> RowBatch:
    """``counts`` rows of so many bytes from each pair of addresses on."""
    used = starts[counts > 0]
    common = int(np.gcd.reduce(np.append(used.ravel(), row_bytes)))
    size = next(size for size in _WORDS if common % size == 0)
    aligned = _VECTOR_BYTES // size if common % _VECTOR_BYTES == 0 else 1
    before = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(int(counts.sum())) - before) * row_bytes
    addresses = np.repeat(starts, counts, axis=0) + offsets[:, None]
    units = addresses // (size * aligned)
    words = row_bytes // size
    wide = next((wide for wide in WIDTHS if wide >= words), TILE_WORDS)
    tile = Tile(_WORDS[size], wide, TILE_WORDS // wide, aligned)
    return RowBatch(units[:, 0], units[:, 1], words, tile)


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class IpcRuntime:
    """The calls of CUDA's runtime and driver for memory between processes. Errors are MoverError."""

    def __init__(self) -> None:
        self._runtime = cuda_library()
        self.batch = batch_copy(self._runtime)
        """Many copies by one call; None before CUDA 12.8."""
        try:
            self._driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MoverError(str(error)) from None

    def allocation(self, address: int) -> tuple[int, int]:
        """Start and bytes of the allocation that holds an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        status = self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        self._check("cuMemGetAddressRange", status)
        return int(base.value), int(size.value)

    def handle(self, address: int) -> bytes:
        """Of the allocation that holds an address."""
        handle = _Handle()
        status = self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(address))
        self._check("cudaIpcGetMemHandle", status)
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        """Map another process's allocation: its address here."""
        found = ctypes.c_void_p()
        given = _Handle((ctypes.c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
        status = self._runtime.cudaIpcOpenMemHandle(
            ctypes.byref(found), given, ctypes.c_uint(_LAZY_PEER_ACCESS)
        )
        self._check("cudaIpcOpenMemHandle", status)
        assert found.value is not None
        return found.value

    def close(self, address: int) -> None:
        """Unmap it."""
        self._check("cudaIpcCloseMemHandle", self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address)))

    def copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Queue a copy between any memory of GPUs and hosts."""
        status = self._runtime.cudaMemcpyAsync(
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(_DEFAULT_KIND),
            ctypes.c_void_p(stream),
        )
        self._check("cudaMemcpyAsync", status)

    def dmabuf(self, address: int, nbytes: int) -> int:
        """A descriptor of a dma-buf with this memory, of whole pages."""
        fd = ctypes.c_int(-1)
        status = self._driver.cuMemGetHandleForAddressRange(
            ctypes.byref(fd), ctypes.c_uint64(address), ctypes.c_size_t(nbytes), ctypes.c_int(_DMA_BUF), 0
        )
        self._check("cuMemGetHandleForAddressRange", status)
        return fd.value

    def flush(self) -> None:
        """Order what adapters have written before kernels to come."""
        status = self._runtime.cudaDeviceFlushGPUDirectRDMAWrites(
            ctypes.c_int(_CURRENT_DEVICE), ctypes.c_int(_TO_OWNER)
        )
        self._check("cudaDeviceFlushGPUDirectRDMAWrites", status)

    def pin(self, address: int, nbytes: int) -> int:
        """Pin host memory; its address for kernels."""
        place = ctypes.c_void_p(address)
        status = self._runtime.cudaHostRegister(place, ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE))
        self._check("cudaHostRegister", status)
        found = ctypes.c_void_p()
        status = self._runtime.cudaHostGetDevicePointer(ctypes.byref(found), place, ctypes.c_uint(0))
        self._check("cudaHostGetDevicePointer", status)
        assert found.value is not None
        return found.value

    def unpin(self, address: int) -> None:
        """Let go of it."""
        self._check("cudaHostUnregister", self._runtime.cudaHostUnregister(ctypes.c_void_p(address)))

    def _check(self, call: str, status: int) -> None:
        if status == 0:
            return
        self._runtime.cudaGetLastError()  # else torch would report it at its next call
        raise MoverError(f"{call} failed with CUDA error {status}")


class GpuMemory:
    """`DeviceMemory` of one GPU. Each thread that copies has a stream of high priority.

    Args:
        index: of the GPU, as torch counts.
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._streams = threading.local()
        self._launching = threading.Lock()
        """Threads that need the same kernel have it compiled once."""
        self._launch: Callable[[Launch], None] | None = None
        self._runtime: IpcRuntime | None = None
        self._pinned: list[tuple[int, int, int]] = []
        """Start and end of pinned memory, and what kernels add to its addresses."""
        self._buffers: list[torch.Tensor] = []
        """Memory of the GPU that no `gather` uses now."""

    def prepare(self) -> None:
        """Load the runtime, and compile the kernel for rows that begin at 16 bytes, as those of KV do.

        Raises:
            TransportUnavailableError: there is no runtime.
        """
        try:
            self._runtime = self._runtime or IpcRuntime()
        except RuntimeError as error:
            raise TransportUnavailableError(f"cuda_ipc: {error}") from None
        try:
            launch, none = row_copies.launcher(), np.empty(0, np.int64)
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream()):
                for wide in WIDTHS[:-1]:
                    tile = Tile(torch.int64, wide, TILE_WORDS // wide, _VECTOR_BYTES // 8)
                    self._queue(launch, RowBatch(none, none, wide, tile))
            self._launch = launch
        except Exception as error:  # noqa: BLE001 - Triton and CUDA raise many kinds
            self._without_kernel(error)

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that holds an address, and where in it the address is.

        Raises:
            TransportUnavailableError: it has none, as allocations have that can grow.
        """
        assert self._runtime is not None, "prepare comes first"
        try:
            with torch.cuda.device(self._device):
                base, _ = self._runtime.allocation(address)
                return self._runtime.handle(base), address - base
        except RuntimeError as error:
            raise TransportUnavailableError(
                f"cuda_ipc: a pool cannot be shared: {error}",
                hint="Without expandable_segments in PYTORCH_CUDA_ALLOC_CONF, and --enable-memory-saver",
            ) from None

    def open(self, handle: bytes) -> tuple[int, int]:
        """Map the allocation of another process: its address here, and its bytes.

        Raises:
            TransportUnavailableError: this GPU does not reach it.
        """
        assert self._runtime is not None, "prepare comes first"
        if len(handle) != HANDLE_BYTES:
            raise TransportUnavailableError(f"cuda_ipc: a handle has {len(handle)} bytes")
        try:
            with torch.cuda.device(self._device):
                address = self._runtime.open(handle)
                try:
                    return address, self._runtime.allocation(address)[1]
                except RuntimeError:
                    self._runtime.close(address)
                    raise
        except RuntimeError as error:
            raise TransportUnavailableError(
                f"cuda_ipc: the peer's GPU memory cannot be mapped: {error}",
                hint="GPUs of a pair need peer access (nvidia-smi topo -p2p r), containers --ipc=host",
            ) from None

    def close(self, address: int) -> None:
        """Unmap what `open` has mapped."""
        assert self._runtime is not None, "prepare comes first"
        with torch.cuda.device(self._device):
            self._runtime.close(address)

    def copy(self, ranges: Ranges) -> None:
        """Copy between addresses of GPUs. Returns when every byte was loaded and stored."""
        launch = self._launch
        if launch is None:
            self.copy_mixed(ranges)
            return
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream()), self._all_of_it():
                for batch in batches_of(ranges):
                    self._queue(launch, batch)
        except Exception as error:  # noqa: BLE001 - a row of another kind compiles another kernel
            self._without_kernel(error)
            self.copy_mixed(ranges)

    def dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        """A descriptor of a dma-buf with this memory, to be closed by the caller, and where in it it begins.

        Raises:
            TransportUnavailableError: the driver makes none.
        """
        assert self._runtime is not None, "prepare comes first"
        first = address - address % mmap.PAGESIZE
        end = address + nbytes
        try:
            with torch.cuda.device(self._device):
                return self._runtime.dmabuf(first, end - first + -end % mmap.PAGESIZE), address - first
        except RuntimeError as error:
            raise TransportUnavailableError(f"GPU memory has no dma-buf: {error}") from None

    def flush(self) -> None:
        """Order what adapters have written to this GPU's memory before kernels that are launched later."""
        assert self._runtime is not None, "prepare comes first"
        with torch.cuda.device(self._device):
            self._runtime.flush()

    def pin(self, address: int, nbytes: int) -> None:
        """Make host memory the target of `gather` and the source of `scatter`.

        Raises:
            TransportUnavailableError: CUDA refuses.
        """
        assert self._runtime is not None, "prepare comes first"
        try:
            with torch.cuda.device(self._device):
                seen = self._runtime.pin(address, nbytes)
        except RuntimeError as error:
            raise TransportUnavailableError(
                f"{nbytes >> 20} MiB of host memory cannot be pinned: {error}",
                hint="Raise the memlock limit (ulimit -l unlimited)",
            ) from None
        self._pinned.append((address, address + nbytes, seen - address))

    def unpin(self, address: int) -> None:
        """Before the memory that `pin` was given is freed."""
        assert self._runtime is not None, "prepare comes first"
        self._pinned = [each for each in self._pinned if each[0] != address]
        self._buffers.clear()
        with torch.cuda.device(self._device):
            self._runtime.unpin(address)

    def gather(self, ranges: Ranges) -> None:
        """Copy from this GPU to pinned memory, where the ranges lie side by side in their order. Returns when
        every byte is there.

        A kernel collects them in the GPU's memory, and one transfer takes them over: kernels do not store to
        host memory, as in a write to DRAM.
        """
        launch, runtime = self._launch, self._runtime
        assert runtime is not None, "prepare comes first"
        if launch is None:
            self.copy_mixed(ranges)
            return
        nbytes, target = int(ranges[:, 2].sum()), int(ranges[0, 1])
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.stream(self._stream()),
                self._buffer(nbytes) as at,
            ):
                collected = ranges + np.array((0, at - target, 0))
                with self._all_of_it():
                    for batch in batches_of(collected):
                        self._queue(launch, batch)
                    runtime.copy(at, target, nbytes, self._stream().cuda_stream)
        except Exception as error:  # noqa: BLE001 - as in `copy`
            self._without_kernel(error)
            self.copy_mixed(ranges)

    def scatter(self, ranges: Ranges) -> None:
        """Copy from pinned memory to this GPU, by a kernel that reads it in place. Returns when every byte is
        there."""
        first = int(ranges[0, 0])
        shift = next((shift for start, end, shift in self._pinned if start <= first < end), None)
        if shift is None:
            raise MoverError("the source is not pinned")
        if self._launch is None:
            self.copy_mixed(ranges)
        else:
            self.copy(ranges + np.array((shift, 0, 0)))

    @contextmanager
    def _buffer(self, nbytes: int) -> Iterator[int]:
        """Address of a buffer in GPU memory, for one `gather` at a time. As many are kept as were in
        use at once: at most one for each slot of pinned memory, and as large."""
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = None
        if buffer is None or buffer.nbytes < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        try:
            yield buffer.data_ptr()
        finally:
            self._buffers.append(buffer)

    def copy_mixed(self, ranges: Ranges) -> None:
        """As `copy`, where either side may be host memory: by one call, before CUDA 12.8 by one for each
        range."""
        assert self._runtime is not None, "prepare comes first"
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream()), self._all_of_it():
            stream = self._stream().cuda_stream
            if self._runtime.batch is not None:
                self._runtime.batch(ranges[:, 0], ranges[:, 1], ranges[:, 2], stream)
                return
            for source, target, nbytes in ranges.tolist():
                self._runtime.copy(source, target, nbytes, stream)

    def _queue(self, launch: Callable[[Launch], None], batch: RowBatch) -> None:
        # Let go when this returns: the allocator gives their memory to later work of this stream only.
        sources, targets, pieces = (
            torch.from_numpy(np.ascontiguousarray(each)).pin_memory().to(self._device, non_blocking=True)
            for each in (batch.sources, batch.targets, batch.pieces)
        )
        rows, side = len(batch.sources), Side(pieces, 1)
        tiles = -(-rows // batch.tile.rows) * len(pieces)
        programs = max(1, min(PROGRAMS, tiles))
        with self._launching:
            launch(Launch(side, sources, side, targets, rows, batch.tile, programs))

    @contextmanager
    def _all_of_it(self) -> Iterator[None]:
        """Leaves nothing under way on this thread's stream, also where a call of several failed."""
        try:
            yield
        finally:
            event = torch.cuda.Event(blocking=True)
            event.record(self._stream())
            event.synchronize()

    def _without_kernel(self, error: Exception) -> None:
        self._launch = None
        log.warning("cuda_ipc copies without a kernel, more slowly: %s: %s", type(error).__name__, error)

    def _stream(self) -> Any:
        if not hasattr(self._streams, "own"):
            self._streams.own = torch.cuda.Stream(self._device, priority=-1)
        return self._streams.own
