"""The one mapping under a DRAM arena: huge pages, touched pages, shared memory, pinning.

Private memory gets transparent huge pages. Shared memory is a memfd: it has no name, so nothing is left
behind by a process that is killed, and another process of the host maps it through `/proc/PID/fd/FD` or by
receiving the descriptor. Linux gives a memfd huge pages only where the administrator allows it
(`/sys/kernel/mm/transparent_hugepage/shmem_enabled`), which is why `huge_bytes()` reports the bytes that huge
pages really back.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.errors import MediumError

logger = logging.getLogger(__name__)

HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_TOUCH_CHUNK = 256 << 20
_PROGRESS_SECONDS = 2.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.restype = ctypes.c_int

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) while memory is touched."""


class ArenaMemoryError(MediumError):
    """The host cannot give the memory that was asked for; the hint says which setting to lower."""


class PinError(MediumError):
    """CUDA is there but refused to pin the memory; the hint gives the remedy."""


class ArenaMemory:
    """`nbytes` of zeroed memory, mapped once, at an address that never changes.

    shared: in a memfd that other processes can map; private otherwise.
    """

    def __init__(self, nbytes: int, *, shared: bool, name: str = "arena") -> None:
        if nbytes < 1:
            raise ValueError(f"arena of {nbytes} bytes; it must have at least one")
        self.nbytes = nbytes
        self.name = name
        self.pinned = False
        self._fd = -1
        self._unpin: Callable[[], None] | None = None
        self._map: mmap.mmap | None = None
        length = -(-nbytes // HUGE_PAGE) * HUGE_PAGE
        available = available_bytes()
        if length > available:
            raise _too_large(nbytes, f"{available / 2**30:.2f} GiB are available")
        offset = 0
        try:
            if shared:
                self._fd = os.memfd_create(f"sglang-ext-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                os.fchmod(self._fd, 0o600)
                os.ftruncate(self._fd, length)
                # A process that maps memory which then shrinks would be killed by reading past its new end.
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                self._map = mmap.mmap(self._fd, length, mmap.MAP_SHARED)
            else:
                self._map = mmap.mmap(-1, length + HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            self.close()
            raise _too_large(nbytes, str(error.strerror)) from error
        whole: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        if not shared:
            offset = -whole.ctypes.data % HUGE_PAGE
        self._whole: Bytes | None = whole[offset : offset + length]
        self.address = int(self._whole.ctypes.data)
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            self._map.madvise(mmap.MADV_HUGEPAGE)
        with contextlib.suppress(
            OSError
        ):  # keep KV out of core dumps: they are large, and prompts are private
            self._map.madvise(mmap.MADV_DONTDUMP)

    @property
    def bytes(self) -> Bytes:
        """All of the memory, shape (nbytes,)."""
        if self._whole is None:
            raise ValueError(f"arena {self.name} is closed")
        return self._whole[: self.nbytes]

    @property
    def fd(self) -> int:
        """The sealed memfd that holds the memory from its first byte on; -1 where it is private or closed."""
        return self._fd

    def prepare(
        self,
        *,
        place: Callable[[int, int], None] = lambda address, nbytes: None,
        touch: bool = True,
        pin: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Place, touch and pin the memory before its first use; closed where that fails.

        Args:
            place: says where the memory shall lie, by address and bytes, before it is touched.

        Raises:
            ArenaMemoryError: as `touch`.
            PinError: as `pin`.
        """
        try:
            place(self.address, self.nbytes)
            if touch:
                self.touch(progress=progress)
            if pin:
                self.pin()
        except BaseException:
            self.close()
            raise

    def touch(self, *, threads: int = 0, progress: Progress | None = None) -> None:
        """Give every page its memory now: no copy pays for a page fault, and lack of memory shows here.

        Args:
            threads: how many touch at once; 0 means one per core, at most 8.
            progress: called about every two seconds; without one, large arenas log theirs.

        Raises:
            ArenaMemoryError: the host or the container has less memory than that.
        """
        length = len(self._whole) if self._whole is not None else 0
        starts = range(0, length, _TOUCH_CHUNK)
        report = progress or (self._log_progress if length > 8 * _TOUCH_CHUNK else None)
        workers = threads or min(8, os.cpu_count() or 1)
        done, last = 0, time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(workers, "arena-touch") as pool:
            futures = [pool.submit(self._touch, start, min(_TOUCH_CHUNK, length - start)) for start in starts]
            try:
                for future in concurrent.futures.as_completed(futures):
                    done += future.result()
                    if report and (time.monotonic() - last >= _PROGRESS_SECONDS or done == length):
                        last = time.monotonic()
                        report(done, length)
            except OSError as error:
                for future in futures:
                    future.cancel()
                raise _too_large(self.nbytes, str(error.strerror)) from error

    def _touch(self, start: int, length: int) -> int:
        if _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE) == 0:
            return length
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # EINVAL: this kernel does not know the advice
            raise OSError(code, os.strerror(code))
        assert self._whole is not None
        self._whole[start : start + length : mmap.PAGESIZE] = 0
        return length

    def _log_progress(self, done: int, total: int) -> None:
        logger.info("arena %s: %d of %d MiB touched", self.name, done >> 20, total >> 20)

    def pin(self) -> bool:
        """Pin the memory for CUDA, so that copies to and from the GPU are asynchronous and fast.

        Returns False, having done nothing, where there is no CUDA device.

        Raises:
            PinError: CUDA refused.
        """
        runtime = _cuda_runtime()
        if runtime is None or self._whole is None:
            return False
        length = len(self._whole)
        code = int(runtime.cudaHostRegister(self.address, length, 1))  # 1: portable, for every CUDA context
        if code != 0:
            raise PinError(
                f"CUDA could not pin {length >> 20} MiB for arena {self.name} (cudaHostRegister: {code})",
                field="--kv-dram-size",
                hint="Raise the locked-memory limit (`ulimit -l unlimited`, or --ulimit memlock=-1 for a "
                "container), or make the arena smaller",
            )
        address = self.address
        self._unpin = lambda: runtime.cudaHostUnregister(address)
        self.pinned = True
        return True

    def huge_bytes(self) -> int:
        """Bytes of this mapping that lie on huge pages now, from /proc/self/smaps."""
        wanted = False
        total = 0
        with (
            contextlib.suppress(OSError),
            open("/proc/self/smaps", encoding="utf-8", errors="replace") as smaps,
        ):
            for line in smaps:
                first = line.split(None, 1)[0]
                if "-" in first and not first.endswith(":"):
                    low, high = (int(part, 16) for part in first.split("-"))
                    wanted = low < self.address + self.nbytes and high > self.address
                elif wanted and first in ("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"):
                    total += int(line.split()[1]) << 10
        return total

    def close(self) -> None:
        """Give the memory back. Views that others still hold keep it mapped until they go."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
            self.pinned = False
        self._whole = None
        self._map = None  # unmapped with the last view of it
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __repr__(self) -> str:
        kind = "private" if self._fd < 0 else "shared"
        return f"<ArenaMemory {self.name} {self.nbytes >> 20} MiB {kind}{' pinned' if self.pinned else ''}>"


def _cuda_runtime() -> Any:
    """torch's cudart binding, or None without torch or without a device. Imported here: torch is optional."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    return torch.cuda.cudart()


def available_bytes() -> int:
    """Memory that this process could still get: the host's, or its container's where that is less."""
    limits = []
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="utf-8") as meminfo:
        limits += [int(line.split()[1]) << 10 for line in meminfo if line.startswith("MemAvailable:")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with (
            contextlib.suppress(OSError, ValueError),
            open(limit, encoding="utf-8") as most,
            open(used, encoding="utf-8") as now,
        ):
            limits.append(int(most.read()) - int(now.read()))
    return min(limits, default=1 << 62)


def _too_large(nbytes: int, why: str) -> ArenaMemoryError:
    return ArenaMemoryError(
        f"the host cannot give {nbytes / 2**30:.2f} GiB for the DRAM arena ({why})",
        field="--kv-dram-size",
        hint="Make it smaller, or raise the memory limit of the container",
    )
