"""The system calls that a disk tier makes on its segments, in one object, so that tests can make them fail.

Bytes go straight between a file and scattered memory: `vectors` are (address, length) pairs as `struct iovec`
has them, which costs no Python object per block. All calls drop the GIL while the kernel works.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sglang_ext.folders import open_own

Vectors = npt.NDArray[np.uint64]
"""Shape (n, 2), C order: address and bytes."""

IOV_MAX = 1024  # Linux's limit per call
PAGE_CACHE_PAGE = os.sysconf("SC_PAGE_SIZE")
DIRECT_ALIGN = 512
"""The alignment of addresses, lengths and offsets that O_DIRECT needs on the devices in use; larger ones
answer EINVAL."""

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("preadv", "pwritev"):
    _function = getattr(_libc, _name)
    _function.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
    _function.restype = ctypes.c_ssize_t
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_libc.sync_file_range.restype = ctypes.c_int
_SYNC_FILE_RANGE_WRITE = 2
_libc.syscall.restype = ctypes.c_long
_CACHESTAT = 451
"""The number of cachestat(2), Linux 6.5 and later, the same on all architectures."""


class _CacheStatRange(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _CacheStat(ctypes.Structure):
    _fields_ = [
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    ]


class Files:
    """The real thing. Every method raises OSError as the system call does."""

    def mountinfo(self) -> str:
        """The mount table as this process sees it (/proc/self/mountinfo)."""
        return os.fsdecode(Path("/proc/self/mountinfo").read_bytes())

    def open(self, path: Path, *, write: bool = False, create: bool = False, direct: bool = False) -> int:
        """Open a segment; `create` demands that it does not exist yet."""
        flags = os.O_RDWR if write else os.O_RDONLY
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        flags |= os.O_DIRECT if direct else 0
        return open_own(path, flags)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, vectors: Vectors, offset: int) -> int:
        """One preadv of at most `IOV_MAX` vectors; returns the bytes read, 0 at the end of the file."""
        return _vectored(_libc.preadv, fd, vectors, offset)

    def pwritev(self, fd: int, vectors: Vectors, offset: int) -> int:
        """One pwritev of at most `IOV_MAX` vectors; returns the bytes written."""
        return _vectored(_libc.pwritev, fd, vectors, offset)

    def start_writeback(self, fd: int, offset: int, size: int) -> None:
        """Let the disk begin with dirty pages, so that the sync later finds most of them written. A hint
        only.
        """
        _libc.sync_file_range(fd, offset, size, _SYNC_FILE_RANGE_WRITE)

    def in_page_cache(self, fd: int, offset: int, size: int) -> bool:
        """Whether the page cache holds all of a range, so that reading it costs no access to the disk. False
        where the kernel does not report it (before Linux 6.5).
        """
        asked, found = _CacheStatRange(offset, size), _CacheStat()
        if _libc.syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(found), 0) < 0:
            return False
        first, end = offset // PAGE_CACHE_PAGE, -(-(offset + size) // PAGE_CACHE_PAGE)
        return int(found.cached) >= end - first

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        """Read up to `size` bytes; for headers."""
        return os.pread(fd, size, offset)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        """Write; returns the bytes written. For headers."""
        return os.pwrite(fd, data, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def unlink(self, path: Path) -> None:
        path.unlink()

    def sync_directory(self, path: Path) -> None:
        """Make names in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def free_bytes(self, path: Path) -> int:
        """Bytes that this user may still write to the file system of `path`."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize


def _vectored(call: Callable[..., int], fd: int, vectors: Vectors, offset: int) -> int:
    done = int(call(fd, vectors.ctypes.data, len(vectors), offset))
    if done < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return done


def read_fully(files: Files, fd: int, vectors: Vectors, offset: int) -> int:
    """Read into all of `vectors`; returns the bytes read, fewer only where the file ends."""
    return _fully(files.preadv, fd, vectors, offset)


def write_fully(files: Files, fd: int, vectors: Vectors, offset: int) -> None:
    """Write all of `vectors`. Raises OSError, with ENOSPC where the kernel takes fewer bytes than that."""
    if _fully(files.pwritev, fd, vectors, offset) < int(vectors[:, 1].sum()):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def write_bytes(files: Files, fd: int, data: bytes, offset: int) -> None:
    """Write all of `data`. Raises OSError as `write_fully`."""
    done = 0
    while done < len(data):
        count = files.pwrite(fd, data[done:], offset + done)
        if count <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done += count


def _fully(call: Callable[[int, Vectors, int], int], fd: int, vectors: Vectors, offset: int) -> int:
    total = 0
    for start in range(0, len(vectors), IOV_MAX):
        part = np.ascontiguousarray(vectors[start : start + IOV_MAX])
        wanted = int(part[:, 1].sum())
        done = 0
        while done < wanted:
            try:
                count = call(fd, part, offset + total)
            except InterruptedError:
                continue
            if count <= 0:
                return total
            done += count
            total += count
            if done < wanted:
                part = _after(part, count)
    return total


def _after(vectors: Vectors, count: int) -> Vectors:
    """The rest of the vectors after a transfer of `count` bytes."""
    ends = np.cumsum(vectors[:, 1])
    first = int(np.searchsorted(ends, count, side="right"))
    rest = vectors[first:].copy()
    into = np.uint64(count - (int(ends[first - 1]) if first else 0))
    rest[0, 0] += into
    rest[0, 1] -= into
    return rest


def can_be_direct(vectors: Vectors, offset: int) -> bool:
    """Whether O_DIRECT takes these addresses, lengths and offset."""
    return offset % DIRECT_ALIGN == 0 and not (vectors % DIRECT_ALIGN).any()


def close_quietly(files: Files, fd: int) -> None:
    """Close where an error changes nothing: the data is synced, or given up."""
    if fd >= 0:
        with contextlib.suppress(OSError):
            files.close(fd)
