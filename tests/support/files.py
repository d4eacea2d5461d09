"""A disk that misbehaves: `Files` with faults, for tests of the disk tier."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections import Counter
from pathlib import Path

from sglang_ext.tiered_store.disk.files import Files, Vectors

READS = ("preadv", "pread")
WRITES = ("pwritev", "pwrite", "truncate")


class FaultyFiles(Files):
    """Fails system calls on demand, or at random.

    fail: method -> errno; every call of that method fails until the entry is taken out.
    rate: chance of each call in `random_methods` to fail with EIO, from `seed`.
    short: largest number of bytes that a vectored call moves, as a kernel may do; 0 for no limit.
    calls: how often each method was called; log: (method, file name) in order.
    """

    def __init__(self, *, seed: int = 0, rate: float = 0.0) -> None:
        self.fail: dict[str, int] = {}
        self.rate = rate
        self.random_methods = (*READS, *WRITES, "fdatasync", "open")
        self.codes = (errno.EIO,)
        self.short = 0
        self.calls: Counter[str] = Counter()
        self.log: list[tuple[str, str]] = []
        self.faults = 0
        self._names: dict[int, str] = {}
        self._random = random.Random(seed)
        self._lock = threading.Lock()

    def _enter(self, method: str, fd: int = -1) -> None:
        with self._lock:
            self.calls[method] += 1
            self.log.append((method, self._names.get(fd, "")))
            code = self.fail.get(method, 0)
            if not code and method in self.random_methods and self._random.random() < self.rate:
                code = self._random.choice(self.codes)
            self.faults += bool(code)
        if code:
            raise OSError(code, os.strerror(code))

    def _shortened(self, vectors: Vectors) -> Vectors:
        """The beginning of `vectors`, at most `short` bytes of it."""
        if not self.short or int(vectors[0, 1]) <= self.short:
            return vectors[:1] if self.short else vectors
        part = vectors[:1].copy()
        part[0, 1] = self.short
        return part

    def open(self, path: Path, *, write: bool = False, create: bool = False, direct: bool = False) -> int:
        self._enter("open")
        fd = super().open(path, write=write, create=create, direct=direct)
        with self._lock:
            self._names[fd] = path.name
        return fd

    def preadv(self, fd: int, vectors: Vectors, offset: int) -> int:
        self._enter("preadv", fd)
        return super().preadv(fd, self._shortened(vectors), offset)

    def pwritev(self, fd: int, vectors: Vectors, offset: int) -> int:
        self._enter("pwritev", fd)
        return super().pwritev(fd, self._shortened(vectors), offset)

    def pread(self, fd: int, size: int, offset: int) -> bytes:
        self._enter("pread", fd)
        return super().pread(fd, size, offset)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        self._enter("pwrite", fd)
        return super().pwrite(fd, data[: self.short] if self.short else data, offset)

    def fdatasync(self, fd: int) -> None:
        self._enter("fdatasync", fd)
        super().fdatasync(fd)

    def truncate(self, fd: int, size: int) -> None:
        self._enter("truncate", fd)
        super().truncate(fd, size)

    def unlink(self, path: Path) -> None:
        self._enter("unlink")
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self._enter("sync_directory")
        super().sync_directory(path)
