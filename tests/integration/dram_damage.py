"""Damages the DRAM tier of a running server from outside: its arena is shared memory, open to its user."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
from huge_values import make_last_huge

from sglang_ext.cluster.guard import descendants

LINE = 64
"""Bytes, of which `last_change` looks at all."""


def arena_files(server_pid: int) -> list[Path]:
    """The DRAM arenas of a server's processes, as files that can be opened."""
    found: dict[int, Path] = {}
    for pid in [server_pid, *descendants(server_pid)]:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(link)
            except OSError:
                continue
            # A file that is open for reading only is a peer's, mapped to fetch from it.
            if target.startswith("/memfd:sglang-ext-dram") and link.lstat().st_mode & 0o200:
                # A process forked from the scheduler has the same file.
                found.setdefault(link.stat().st_ino, link)
    return list(found.values())


def snapshot(arena: Path) -> npt.NDArray[np.uint8]:
    """The arena's bytes now."""
    return np.fromfile(arena, dtype=np.uint8)


def flip_bit(arena: Path, offset: int, bit: int) -> None:
    """Invert one bit of the byte at ``offset``."""
    with arena.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[offset] ^= 1 << bit


def make_huge(arena: Path, offset: int) -> int:
    """Make a float32 value huge, the last one up to ``offset`` that can be. The last plane of a block has
    values, not keys. Returns the offset of the byte of which bit 6 was inverted."""
    return 4 * make_last_huge(np.memmap(arena, np.float32, "r+", shape=(offset // 4 + 1,))) + 3


def last_change(arena: Path, before: npt.NDArray[np.uint8]) -> int:
    """The offset of the last byte of KV that has changed; 0 while none has or more are changing.

    Behind the blocks of an arena are their generations, of which a byte changes where a block is given up: of
    KV, most bytes of a line change.
    """
    now = snapshot(arena)
    changed = (now != before)[: now.size // LINE * LINE].reshape(-1, LINE)
    lines = np.flatnonzero(changed.sum(axis=1) > LINE // 2)
    if not lines.size or not np.array_equal(now, snapshot(arena)):
        return 0
    return int(lines[-1]) * LINE + int(np.flatnonzero(changed[lines[-1]])[-1])
