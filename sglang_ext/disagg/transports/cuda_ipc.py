"""`cuda_ipc`: pools in GPU memory on one host, mapped by CUDA's handles; no service by the owner.

The owner's regions carry a handle of each allocation. The reader maps every allocation once and reads by a
kernel on its own GPU, which loads the owner's memory directly (over NVLink or PCIe, or within one GPU) and
stores into the reader's pool. `read` waits for the event behind its launches: then every byte was loaded, and
a full fence orders that before the load of a counter from the owner's control region, which is shared memory,
mapped here.

Writes are stores by a kernel of the writer, and no guard stands before a kernel that is queued. So the owner
takes the grant out of a table that the writer looks at before each launch, and frees the blocks only when the
writer has said that nothing is under way, or has ended. A writer that stands still is not enough: its GPU
goes on.

CUDA's handles give the right to write too, and the driver knows no other: as between all members of a
cluster, it is our code that keeps to grants.
"""

from __future__ import annotations

import os
import struct
import threading
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.compiled import COMPILED, STREAM_BYTES, fence
from sglang_ext.disagg.errors import (
    CancelledTransferError,
    PeerGoneError,
    PeerProtocolError,
    TransportUnavailableError,
)
from sglang_ext.disagg.memory import (
    MAX_REGIONS,
    MemoryKind,
    PeerMapping,
    RegionMeta,
    RegionTable,
    SharedMemory,
)
from sglang_ext.disagg.processes import has_ended, process_born
from sglang_ext.disagg.runs import BYTES, LOCAL, LOCAL_AT, REMOTE, REMOTE_AT, Runs, copy_runs, steps
from sglang_ext.disagg.transports import (
    MAX_GRANTS,
    CancelToken,
    Channel,
    PeerInfo,
    Served,
    Transport,
    TransportName,
    host_identity,
)

STEP_BYTES: Final = 64 << 20
"""Bytes between two looks at the cancel flag and the grant: about a millisecond over PCIe."""
_TABLE: Final = struct.Struct("<IQQ")
"""The table of grants in the owner's answer: descriptor, device and inode of its memfd."""

Ranges = npt.NDArray[np.int64]
"""Shape (n, 3), C order: address of the source, address of the target, bytes."""


class DeviceMemory(Protocol):
    """This rank's GPU: `engine.movers.gpu_memory` has its driver. Thread-safe."""

    def prepare(self) -> None:
        """Make ready what `copy` needs. Blocks for as long as a compiler takes.

        Raises:
            TransportUnavailableError: there is no such thing here.
        """

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle of the allocation that holds an address, and where in it the address is.

        Raises:
            TransportUnavailableError: its memory has no handle.
        """

    def open(self, handle: bytes) -> tuple[int, int]:
        """Map the allocation of another process: its address here, and its bytes.

        Raises:
            TransportUnavailableError: this GPU does not reach it.
        """

    def close(self, address: int) -> None:
        """Unmap what `open` has mapped, once no copy of it is under way."""

    def copy(self, ranges: Ranges) -> None:
        """Copy between addresses of GPUs. Returns when every byte was loaded and stored."""

    def copy_mixed(self, ranges: Ranges) -> None:
        """As `copy`, where either side may be host memory."""

    def dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        """A descriptor of a dma-buf with this memory, to be closed by the caller, and where in it it begins.

        Raises:
            TransportUnavailableError: the driver makes none.
        """

    def flush(self) -> None:
        """Order what adapters have written to this GPU's memory before kernels that are launched later."""

    def pin(self, address: int, nbytes: int) -> None:
        """Make host memory the target of `gather` and the source of `scatter`.

        Raises:
            TransportUnavailableError: CUDA refuses.
        """

    def unpin(self, address: int) -> None:
        """Before the memory that `pin` was given is freed."""

    def gather(self, ranges: Ranges) -> None:
        """Copy from this GPU to pinned memory, where the ranges lie side by side in their order. Returns when
        every byte is there."""

    def scatter(self, ranges: Ranges) -> None:
        """Copy from pinned memory to this GPU. Returns when every byte is there."""


class _Mapped:
    """The regions of a peer, mapped here.

    bases, on_device: by region, where its bytes are here, and whether they are a GPU's.
    """

    def __init__(self, device: DeviceMemory, peer: PeerInfo) -> None:
        self._device = device
        self._host: list[PeerMapping] = []
        self._opened: dict[bytes, tuple[int, int]] = {}
        self.bases: npt.NDArray[np.int64] = np.zeros(MAX_REGIONS, np.int64)
        self.on_device = np.zeros(MAX_REGIONS, np.bool_)
        self.counters: npt.NDArray[np.int64] | None = None
        try:
            for i, meta in enumerate(peer.regions):
                if meta.nbytes:
                    self.on_device[i] = meta.kind is MemoryKind.CUDA
                    place = self._on_device if self.on_device[i] else self._on_host
                    self.bases[i] = place(peer, meta)
                    if i == 0 and not self.on_device[i]:
                        self.counters = self._host[0].words()
        except BaseException:
            self.close()
            raise

    def _on_host(self, peer: PeerInfo, meta: RegionMeta) -> int:
        if meta.fd < 0:
            raise TransportUnavailableError("cuda_ipc: a pool there in host memory is not in shared memory")
        self._host.append(PeerMapping(peer.pid, meta))
        return self._host[-1].address

    def _on_device(self, peer: PeerInfo, meta: RegionMeta) -> int:
        if peer.pid == os.getpid():
            return meta.address  # CUDA maps no handle in the process that made it
        if not meta.handle:
            raise PeerProtocolError("cuda_ipc: a pool in GPU memory has no handle")
        if meta.handle not in self._opened:
            self._opened[meta.handle] = self._device.open(meta.handle)
        address, nbytes = self._opened[meta.handle]
        if meta.handle_at + meta.nbytes > nbytes:
            raise PeerProtocolError(f"cuda_ipc: a region ends beyond the {nbytes} bytes of its allocation")
        return address + meta.handle_at

    def close(self) -> None:
        """Unmap everything."""
        self.counters = None
        opened, self._opened = self._opened, {}
        for address, _ in opened.values():
            self._device.close(address)
        for mapping in self._host:
            mapping.close()
        self._host.clear()


class CudaIpcChannel(Channel):
    """Reads and writes the peer's mapped memory by kernels of this GPU."""

    name = TransportName.CUDA_IPC
    gap = 0

    def __init__(
        self, regions: RegionTable, device: DeviceMemory, peer: PeerInfo, lanes: int, table: RegionMeta
    ) -> None:
        """table: where the peer has the grants of this session."""
        self.lanes = lanes
        self._regions, self._device = regions, device
        self._local_on_device = np.zeros(MAX_REGIONS, np.bool_)
        self._local_on_device[[region.index for region in regions if region.kind is MemoryKind.CUDA]] = True
        self._pid, self._born = peer.pid, process_born(peer.pid)
        self._gone = False
        self._grants: npt.NDArray[np.int64] | None = None
        self._mapped = _Mapped(device, peer)
        try:
            self._table = PeerMapping(peer.pid, table)
            self._grants = self._table.words()
        except BaseException:
            self._mapped.close()
            raise
        self.counters = self._mapped.counters

    def read(self, lane: int, runs: Runs, token: CancelToken) -> None:
        there, here = self._mapped.on_device[runs[:, REMOTE]], self._local_on_device[runs[:, LOCAL]]
        on_host = ~(there | here)
        if on_host.any():
            part = np.ascontiguousarray(runs[on_host])
            bases = self._regions.bases, self._mapped.bases
            if copy_runs(part, bases[0], LOCAL, bases[1], REMOTE, STREAM_BYTES, token.flag):
                raise _cancelled()
        if not on_host.all():
            self._by_gpu(runs[~on_host], token, None)
        fence()
        self._must_live()

    def write(self, lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
        if not 0 < grant[0] < MAX_GRANTS or not grant[1]:
            raise PeerGoneError(f"cuda_ipc: no grant has slot {grant[0]} and number {grant[1]}")
        self._by_gpu(runs, token, grant)
        fence()
        self._must_live()

    def _by_gpu(self, runs: Runs, token: CancelToken, grant: tuple[int, int] | None) -> None:
        """Copy in steps; each is over when the next begins, and when this returns or raises."""
        for rows in steps(runs, STEP_BYTES):
            if token.cancelled:
                raise _cancelled()
            if grant is not None and (self._grants is None or self._grants[grant[0]] != grant[1]):
                raise PeerGoneError("cuda_ipc: the grant is over")
            self._step(rows, writes=grant is not None)

    def _step(self, runs: Runs, *, writes: bool) -> None:
        there = self._mapped.bases[runs[:, REMOTE]] + runs[:, REMOTE_AT]
        here = self._regions.bases[runs[:, LOCAL]] + runs[:, LOCAL_AT]
        source, target = (here, there) if writes else (there, here)
        ranges = np.stack([source, target, runs[:, BYTES]], 1)
        both = self._mapped.on_device[runs[:, REMOTE]] & self._local_on_device[runs[:, LOCAL]]
        try:
            if both.any():
                self._device.copy(ranges[both])
            if not both.all():
                self._device.copy_mixed(ranges[~both])
        except RuntimeError as error:
            # After an error of a kernel no call of this process' driver succeeds.
            self._gone = True
            raise PeerGoneError(f"cuda_ipc: {error}") from None

    def _must_live(self) -> None:
        """A mapping outlives the owner's process, whose counters say nothing about the bytes any more."""
        if self._born == 0 or process_born(self._pid) != self._born:
            self._gone = True
            raise PeerGoneError("cuda_ipc: the peer's process has ended")

    @property
    def broken(self) -> bool:
        return self._gone

    def close(self) -> None:
        self.counters = self._grants = None
        self._table.close()
        self._mapped.close()


def _cancelled() -> CancelledTransferError:
    return CancelledTransferError("cuda_ipc: the copy was cancelled")


class CudaIpcServed(Served):
    """A session of a process on this host. Its grants are in memory that the peer maps for reading."""

    def __init__(self, pid: int, grants: npt.NDArray[np.int64]) -> None:
        self._pid, self._born = pid, process_born(pid)
        self._numbers = grants
        self._memory = SharedMemory(grants.nbytes, "kv-grants")
        self._table: npt.NDArray[np.int64] = self._memory.array.view(np.int64)

    @property
    def answer(self) -> bytes:
        """Where the peer finds the grants."""
        facts = os.fstat(self._memory.fd)
        return _TABLE.pack(self._memory.fd, facts.st_dev, facts.st_ino)

    def admit(self, slot: int) -> None:
        if self._memory.fd >= 0:
            self._table[slot] = self._numbers[slot]

    def revoke_slot(self, slot: int) -> None:
        self._table[slot] = 0
        fence()

    def fence(self) -> bool:
        """Whether the peer has ended, and its kernels with it; a peer that lives is asked."""
        return has_ended(self._pid, self._born)

    def close(self) -> None:
        self._table[:] = 0
        fence()
        self._memory.close()


class CudaIpcTransport(Transport):
    """See the top of this file. device: this rank's GPU; None where nothing here knows one."""

    name = TransportName.CUDA_IPC

    def __init__(self, regions: RegionTable, lanes: int = 1, device: DeviceMemory | None = None) -> None:
        super().__init__(regions)
        self._lanes = lanes
        self._device = device
        self._ready = False
        self._lock = threading.Lock()

    def unavailable(self) -> str | None:
        if not COMPILED:
            return "numba is missing: pip install numba"
        pools = [region for region in self.regions if region.kind is MemoryKind.CUDA]
        if not pools:
            return "no pool is in GPU memory"
        if any(region.kind is MemoryKind.HOST and region.fd < 0 for region in self.regions):
            return "a pool in host memory is not in shared memory"
        if self._device is None:
            return "CUDA is not used by this process"
        with self._lock:
            try:
                if not self._ready:
                    self._device.prepare()
                    for region in pools:
                        self.regions.describe(region.index, *self._device.export(region.address))
                    self._ready = True
            except TransportUnavailableError as error:
                return str(error)
        return None

    def offer(self) -> bytes:
        return f"{host_identity()} {os.getpid()}".encode()

    def withdraw(self, offer: bytes) -> None:
        """Nothing was reserved."""

    def accept(self, session: bytes, offer: bytes, grants: npt.NDArray[np.int64]) -> tuple[bytes, Served]:
        reason = self.unavailable()
        host, _, pid = offer.rpartition(b" ")
        if reason is None and host != host_identity().encode():
            reason = "the peer is on another host, or in another pid namespace"
        if reason is not None:
            raise TransportUnavailableError(f"cuda_ipc: {reason.removeprefix('cuda_ipc: ')}")
        if not pid.isdigit():
            raise PeerProtocolError("cuda_ipc: the offer does not say whose it is")
        served = CudaIpcServed(int(pid), grants)
        return served.answer, served

    def open(self, peer: PeerInfo, session: bytes, offer: bytes, answer: bytes) -> Channel:
        if len(answer) != _TABLE.size:
            raise PeerProtocolError("cuda_ipc: the answer does not name a table of grants")
        fd, device, inode = _TABLE.unpack(answer)
        table = RegionMeta(0, MAX_GRANTS * 8, MemoryKind.HOST, fd, 0, device, inode)
        if self._device is None:
            raise TransportUnavailableError("cuda_ipc: CUDA is not used by this process")
        return CudaIpcChannel(self.regions, self._device, peer, self._lanes, table)

    def close(self) -> None:
        """Nothing is held."""
