"""How fast a disk is, as a disk tier would use it, and which way of reading suits it."""

from __future__ import annotations

import logging
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.disk.files import DIRECT_ALIGN
from sglang_ext.tiered_store.disk.state import IoMode

logger = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
READERS = 4
"""Reads of a piece under way at once, as the loader has them."""
CHOOSING_BYTES = 64 << 20
"""Bytes that `choose_io` writes, and reads twice in each mode: half a second on an SSD."""
ROUNDS = 2
"""Of reading in each way, by turns; the faster one counts, because others may use the disk meanwhile."""
CLEARLY = 1.2


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes per second. write: one large sequential write, synced. buffered: reading it back through the page
    cache, after its pages were dropped from there. direct: reading it back with O_DIRECT; None where the file
    system has no such thing.
    """

    write: float
    buffered: float
    direct: float | None

    @property
    def io(self) -> IoMode:
        """The way to read that suits this disk: O_DIRECT, which takes less of the CPU and keeps the page
        cache for others, unless it is clearly slower.
        """
        slower = self.direct is None or self.buffered > CLEARLY * self.direct
        return IoMode.BUFFERED if slower else IoMode.DIRECT


def measure_disk(path: Path, nbytes: int = 256 << 20) -> DiskSpeed:
    """Write and read a file of about `nbytes` at `path`, and remove it. Raises OSError."""
    pieces = max(READERS, nbytes // PIECE_BYTES)
    nbytes = pieces * PIECE_BYTES
    buffers = [mmap.mmap(-1, PIECE_BYTES) for _ in range(READERS)]  # page-aligned, as O_DIRECT wants it
    buffers[0].write(os.urandom(PIECE_BYTES))
    file = path / f"speed-{os.getpid()}.tmp"
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        begin = time.perf_counter()
        for piece in range(pieces):
            os.pwrite(fd, buffers[0], piece * PIECE_BYTES)
        os.fdatasync(fd)
        write = nbytes / (time.perf_counter() - begin)
        try:
            direct_fd = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            direct_fd = -1
        took: dict[int, list[float]] = {}
        try:
            for each in (fd, direct_fd) * ROUNDS:
                if each >= 0:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    took.setdefault(each, []).append(_read(each, pieces, buffers))
        finally:
            if direct_fd >= 0:
                os.close(direct_fd)
        buffered = nbytes / min(took[fd])
        direct = nbytes / min(took[direct_fd]) if direct_fd >= 0 else None
    finally:
        os.close(fd)
        file.unlink()
        for buffer in buffers:
            buffer.close()
    return DiskSpeed(write, buffered, direct)


def _read(fd: int, pieces: int, buffers: list[mmap.mmap]) -> float:
    """Seconds to read all pieces, each reader every so-many-th."""

    def read(reader: int) -> None:
        for piece in range(reader, pieces, READERS):
            os.preadv(fd, [buffers[reader]], piece * PIECE_BYTES)

    with ThreadPoolExecutor(READERS) as pool:
        begin = time.perf_counter()
        list(pool.map(read, range(READERS)))
        return time.perf_counter() - begin


def direct_obstacle(layout: BlockLayout) -> str:
    """Why blocks of a layout cannot be read with O_DIRECT; empty when they can."""
    odd = [n for layer in range(layout.n_layers) if (n := layout.layer_bytes(layer)) % DIRECT_ALIGN]
    return f"a layer of a block has {odd[0]} bytes, no multiple of {DIRECT_ALIGN}" if odd else ""


def choose_io(path: Path, layout: BlockLayout, asked: IoMode) -> IoMode:
    """`asked`, or for `IoMode.AUTO` the way in which the disk of `path` is read faster.

    Measures by writing `CHOOSING_BYTES` and reading them both ways. Where that cannot be done (no room, a
    medium that is read-only), or blocks cannot be read with O_DIRECT, reads are buffered.
    """
    obstacle = direct_obstacle(layout)
    if asked is IoMode.BUFFERED or (asked is IoMode.AUTO and obstacle):
        return IoMode.BUFFERED
    if asked is IoMode.DIRECT:
        if obstacle:
            logger.warning("--kv-disk-io direct: %s; read through the page cache instead", obstacle)
            return IoMode.BUFFERED
        return asked
    try:
        speed = measure_disk(path, CHOOSING_BYTES)
    except OSError as error:
        logger.info("%s: reads are buffered, their speed could not be measured: %s", path, error)
        return IoMode.BUFFERED
    logger.info(
        "%s: reads are %s: %.2f GB/s through the page cache (cold), %s with O_DIRECT",
        path,
        speed.io.value,
        speed.buffered / 1e9,
        "impossible" if speed.direct is None else f"{speed.direct / 1e9:.2f}",
    )
    return speed.io
