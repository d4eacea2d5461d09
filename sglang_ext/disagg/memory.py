"""Registered memory: the ranges that peers may reach, by region index and offset, and shared memory to put
pools in.

Region 0 of every endpoint is its control region: header, generation counters, scratch. Regions live as long
as their endpoint. Nothing outside a registered region is ever read or written: runs are checked against the
region table of their own side before a transport sees them, and a transport that serves requests itself
checks them again.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.errors import PeerGoneError, RangeError, TransportUnavailableError

MAX_REGIONS: Final = 4096
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class MemoryKind(enum.StrEnum):
    """Where a region's bytes are, which decides the transports that reach it."""

    HOST = "host"
    CUDA = "cuda"


Offset = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
HANDLE_BYTES: Final = 64
"""Of a handle of CUDA."""
Handle = Annotated[bytes, msgspec.Meta(max_length=HANDLE_BYTES)]


class RegionMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A region as CONNECT carries it.

    fd: -1, or the owner's descriptor of the sealed memfd that holds it. handle, handle_at: of CUDA, by which
    others map the allocation in GPU memory that holds it, and where in that it begins; empty without one.
    """

    address: Offset
    nbytes: Offset
    kind: MemoryKind
    fd: int
    fd_offset: Offset
    device: Offset
    inode: Offset
    handle: Handle = b""
    handle_at: Offset = 0


class SharedMemory:
    """Memory that peers on this host can map: a memfd, sealed against resizing, gone with its last user.

    It has no name in any file system, so that nothing is left behind when a process is killed. Peers open it
    through /proc. The seals make mapping it safe for a peer: if the owner could still shrink the
    memory, a process reading past the new end would be killed.
    """

    def __init__(self, nbytes: int, name: str = "kv") -> None:
        if nbytes < 1:
            raise ValueError("shared memory needs at least one byte")
        self.nbytes = nbytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, nbytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            # Populated now: touching fresh pages on the path of a transfer would cost more than the copy.
            self._map = mmap.mmap(self.fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self.fd)
            raise
        # An instance that is never closed leaks no descriptor.
        self._close_fd = weakref.finalize(self, os.close, self.fd)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = int(self.array.ctypes.data)

    def __repr__(self) -> str:
        return f"<SharedMemory {self.nbytes} bytes>"

    def close(self) -> None:
        """Give the memory up. Views of `array` that are still held keep the pages until they go."""
        if self.fd < 0:
            return
        self._close_fd()
        self.fd = -1
        self.array = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


@dataclass(frozen=True)
class Region:
    """One registered range. keep: whatever owns the memory, held so that it outlives the registration."""

    index: int
    address: int
    nbytes: int
    kind: MemoryKind
    fd: int
    fd_offset: int
    keep: object
    handle: bytes = b""
    handle_at: int = 0


class RegionTable:
    """The regions of one endpoint.

    bases, sizes: int64, shape (MAX_REGIONS,): address and bytes by index, size 0 where an index is free.
    """

    def __init__(self) -> None:
        self.bases: npt.NDArray[np.int64] = np.zeros(MAX_REGIONS, np.int64)
        self.sizes: npt.NDArray[np.int64] = np.zeros(MAX_REGIONS, np.int64)
        self._regions: dict[int, Region] = {}

    def __repr__(self) -> str:
        return f"<RegionTable regions={len(self)} bytes={int(self.sizes.sum())}>"

    def __len__(self) -> int:
        return len(self._regions)

    def __iter__(self) -> Iterator[Region]:
        return iter([self._regions[i] for i in sorted(self._regions)])

    def add(
        self,
        address: int,
        nbytes: int,
        *,
        kind: MemoryKind = MemoryKind.HOST,
        fd: int = -1,
        fd_offset: int = 0,
        keep: object = None,
    ) -> Region:
        """Register a range that peers may reach. fd: the sealed memfd that holds it at fd_offset, if one
        does.

        Raises:
            RangeError: the range is empty, or the table is full.
        """
        if address <= 0 or nbytes <= 0:
            raise RangeError(f"cannot register {nbytes} bytes at {address:#x}")
        index = next((i for i in range(MAX_REGIONS) if i not in self._regions), -1)
        if index < 0:
            raise RangeError(f"all {MAX_REGIONS} regions are in use; register larger ranges")
        region = Region(index, address, nbytes, kind, fd, fd_offset, keep)
        self._regions[index] = region
        self.bases[index] = address
        self.sizes[index] = nbytes
        return region

    def describe(self, index: int, handle: bytes, handle_at: int) -> None:
        """From now on peers hear by which handle they map a region, see `RegionMeta`."""
        self._regions[index] = replace(self._regions[index], handle=handle, handle_at=handle_at)

    def locate(self, address: int, nbytes: int) -> tuple[int, int]:
        """(region, offset) of a range.

        Raises:
            RangeError: no single region holds all of it.
        """
        return locate([(r.index, r.address, r.nbytes) for r in self._regions.values()], address, nbytes)

    def on_host(self) -> RegionTable:
        """The regions in host memory as they are now, under their indices; all others have 0 bytes."""
        table = RegionTable()
        for region in self:
            if region.kind is MemoryKind.HOST:
                table._regions[region.index] = region
                table.bases[region.index], table.sizes[region.index] = region.address, region.nbytes
        return table

    def metas(self) -> tuple[RegionMeta, ...]:
        """The regions as described in CONNECT, index by index; free indices have 0 bytes."""
        return tuple(
            _meta(self._regions[i]) if i in self._regions else RegionMeta(0, 0, MemoryKind.HOST, -1, 0, 0, 0)
            for i in range(max(self._regions, default=-1) + 1)
        )

    def check(self) -> None:
        """Verify that the arrays agree with the regions."""
        for i in range(MAX_REGIONS):
            region = self._regions.get(i)
            assert self.sizes[i] == (region.nbytes if region else 0), f"size of region {i}"
            assert region is None or self.bases[i] == region.address, f"base of region {i}"


def locate(regions: list[tuple[int, int, int]], address: int, nbytes: int) -> tuple[int, int]:
    """(region, offset) of a range among (index, address, bytes); RangeError when no single one holds it."""
    for index, base, size in regions:
        if base <= address and address + nbytes <= base + size:
            return index, address - base
    raise RangeError(f"{nbytes} bytes at {address:#x} are not inside one registered region")


def _meta(region: Region) -> RegionMeta:
    device = inode = 0
    if region.fd >= 0:
        facts = os.fstat(region.fd)
        device, inode = facts.st_dev, facts.st_ino
    return RegionMeta(
        region.address,
        region.nbytes,
        region.kind,
        region.fd,
        region.fd_offset,
        device,
        inode,
        region.handle,
        region.handle_at,
    )


POPULATE_BYTES: Final = 256 << 20
"""Up to this size a peer's region is mapped with all of its pages. A larger one would take seconds, and pages
of it that its owner has never touched would be given memory."""


class PeerMapping:
    """A peer's shared region, mapped here for reading. Stays readable when the peer dies."""

    def __init__(self, pid: int, meta: RegionMeta) -> None:
        """Map the region `meta` of process `pid`.

        Raises:
            TransportUnavailableError: the peer's descriptors cannot be opened from here, with the reason.
            PeerGoneError: there is another file behind the descriptor now: the pid was taken over.
        """
        path = f"/proc/{pid}/fd/{meta.fd}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise TransportUnavailableError(
                f"shm: cannot open {path}: {error.strerror}",
                hint="Run both as the same user, in the same pid namespace",
            ) from None
        try:
            facts = os.fstat(fd)
            if (facts.st_dev, facts.st_ino) != (meta.device, meta.inode):
                raise PeerGoneError(f"shm: {path} is not the memory that the peer described")
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:
                seals = 0
            if seals & _SEALS != _SEALS or meta.fd_offset + meta.nbytes > facts.st_size:
                raise TransportUnavailableError("shm: the peer's memory is not sealed against resizing")
            low = meta.fd_offset - meta.fd_offset % mmap.ALLOCATIONGRANULARITY
            length = meta.fd_offset + meta.nbytes - low
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if length <= POPULATE_BYTES else 0)
            self._map: mmap.mmap | None = mmap.mmap(fd, length, flags=flags, prot=mmap.PROT_READ, offset=low)
        finally:
            os.close(fd)
        self.nbytes = meta.nbytes
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data) + meta.fd_offset - low

    def words(self) -> npt.NDArray[np.int64] | None:
        """The region as int64, without the remainder at its end; None when it is not aligned to them.

        Only to be read, though numpy's flags do not forbid writes: compiled loops take arrays of one kind.
        Unmapped only when this view is gone too.
        """
        if self.address % 8:
            return None
        memory = (ctypes.c_int64 * (self.nbytes // 8)).from_address(self.address)
        memory.keep = self._map  # type: ignore[attr-defined]
        words: npt.NDArray[np.int64] = np.ctypeslib.as_array(memory)
        return words

    def close(self) -> None:
        """Unmap, once no view of `words` is left."""
        self._map = None
