"""Keeping a writer on this host from our memory without its help: a guard page for each session of `cma`.

``process_vm_writev`` goes through its ranges in their order and ends at the first that cannot be written. So
a writer's first range is a byte of the owner's that belongs to the session alone. The owner takes the access
to that page away, and no later call writes anything. There may still be a call that was past that byte; but
not in a thread that stands still: a thread that is stopped has left the kernel, or is about to.
"""

from __future__ import annotations

import ctypes
import mmap

from sglang_ext.disagg.processes import process_born, stands_still

_libc = ctypes.CDLL(None)
_PROT_NONE = 0

_in_use: list[GuardPage] = []
"""Pages stay where they are, without access, as long as a writer that knows their address may live: else
something else might come to lie there."""


class GuardPage:
    """A page of this process that one other process writes to before it writes anything else.

    pid: of the writer.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._born = process_born(pid)
        self._closed = False
        self._page = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        _in_use[:] = [guard for guard in _in_use if not (guard._closed and guard.writer_gone)]
        _in_use.append(self)

    def close(self) -> None:
        """From now on the writer's calls fail; where the kernel refuses that, nothing `holds`."""
        self._closed = _libc.mprotect(ctypes.c_void_p(self.address), mmap.PAGESIZE, _PROT_NONE) == 0

    @property
    def writer_gone(self) -> bool:
        """Whether the writer's process has ended."""
        return self._born == 0 or process_born(self._pid) != self._born

    @property
    def holds(self) -> bool:
        """Whether the writer writes no more for certain: the page is closed, and no call under way."""
        return self._closed and (self.writer_gone or stands_still(self._pid))
