"""GPU memory between emulated processes: each pool lies in a memfd (`tensors`), which a handle names.

It does not show the effect of a handle whose memory was freed by its owner, nor whether GPUs reach each
other.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from sglang_ext.engine.movers.row_copies import Launch

HANDLE_BYTES = 64


class IpcRuntime:
    """In place of the product's: a handle names the memfd that holds an allocation."""

    _FORMAT = struct.Struct("<qqq")

    def __init__(self) -> None:
        self._open: dict[int, mmap.mmap] = {}
        self.pinned: dict[int, int] = {}
        self.batch = None

    def allocation(self, address: int) -> tuple[int, int]:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            for line in maps:
                first, last = (int(part, 16) for part in line.split()[0].split("-"))
                if first <= address < last and "memfd:" in line:
                    return first, last - first
        raise RuntimeError("the memory is not in a memfd")

    def handle(self, address: int) -> bytes:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            inode = next(int(f[4]) for f in map(str.split, maps) if int(f[0].split("-")[0], 16) == address)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                facts = os.stat(f"/proc/self/fd/{name}")
                if facts.st_ino == inode and "memfd:" in os.readlink(f"/proc/self/fd/{name}"):
                    return self._FORMAT.pack(os.getpid(), int(name), inode).ljust(HANDLE_BYTES, b"\0")
        raise RuntimeError("the memfd of the memory is closed")

    def open(self, handle: bytes) -> int:
        pid, name, inode = self._FORMAT.unpack(handle[: self._FORMAT.size])
        if pid == os.getpid():
            raise RuntimeError("CUDA maps no handle in the process that made it")
        try:
            fd = os.open(f"/proc/{pid}/fd/{name}", os.O_RDWR)
        except OSError as error:
            raise RuntimeError(str(error)) from None
        try:
            if os.fstat(fd).st_ino != inode:
                raise RuntimeError("the allocation was freed")
            mapped = mmap.mmap(fd, os.fstat(fd).st_size)
        finally:
            os.close(fd)
        address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
        self._open[address] = mapped
        return address

    def close(self, address: int) -> None:
        self._open.pop(address).close()

    def pin(self, address: int, nbytes: int) -> int:
        """Remember it. An address that the emulated GPU sees is the host's."""
        assert address not in self.pinned, "the memory is pinned already"
        self.pinned[address] = nbytes
        return address

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def copy(self, source: int, target: int, nbytes: int, _: int) -> None:
        ctypes.memmove(target, source, nbytes)


def change(module: Any) -> None:
    """Put it in place in `engine.movers.gpu_memory`."""
    module.IpcRuntime = IpcRuntime


def copy_by_host(of: Launch) -> None:
    """A launch of the kernel as copies of the host: Triton's interpreter takes a tenth of a second for 32
    KiB, too long for tests that move some MiB. The kernel itself is tested in the interpreter beside."""
    from sglang_ext.disagg.runs import copy_runs

    size, at = of.tile.word.itemsize, np.arange(of.tokens)
    (from_, units), (to, into) = (of.source, of.source_units), (of.target, of.target_units)
    for here, there in zip(from_.pieces.tolist(), to.pieces.tolist(), strict=True):
        runs = np.zeros((of.tokens, 5), np.int64)
        for column, piece, side, ids in ((1, here, from_, units), (3, there, to, into)):
            unit, token = np.divmod(at, side.unit_tokens)
            runs[:, column] = piece[0] + size * (ids.numpy()[unit] * piece[2] + token * piece[3])
        runs[:, 4] = here[1] * size
        nowhere = np.zeros(1, np.int64)
        copy_runs(runs, nowhere, 2, nowhere, 0, 0, nowhere)
