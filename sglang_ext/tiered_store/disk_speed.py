"""How fast a disk is, as a disk tier would use it."""

from __future__ import annotations

import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes per second: one large sequential write, synced, and reading it back past the page cache if
    possible.
    """

    write: float
    read: float
    direct: bool


def measure_disk(path: Path, nbytes: int = 256 << 20) -> DiskSpeed:
    """Write and read a file of `nbytes` at `path`, and remove it. Raises OSError."""
    chunk = 4 << 20
    buffer = mmap.mmap(-1, chunk)  # page-aligned, as O_DIRECT wants it
    buffer.write(os.urandom(chunk))
    file = path / f"speed-{os.getpid()}.tmp"
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        begin = time.perf_counter()
        for offset in range(0, nbytes, chunk):
            os.pwrite(fd, buffer, offset)
        os.fdatasync(fd)
        write = nbytes / (time.perf_counter() - begin)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        try:
            read_fd, direct = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC), True
        except OSError:
            read_fd, direct = os.dup(fd), False
        try:
            begin = time.perf_counter()
            for offset in range(0, nbytes, chunk):
                os.preadv(read_fd, [buffer], offset)
            read = nbytes / (time.perf_counter() - begin)
        finally:
            os.close(read_fd)
    finally:
        os.close(fd)
        file.unlink()
        buffer.close()
    return DiskSpeed(write, read, direct)
