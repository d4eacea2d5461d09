"""Keeping a writer on this host from our memory without its help: a guard page for each grant of a session.

``process_vm_writev`` goes through its ranges in their order and ends at the first that cannot be written. So
a writer's first range is a byte of the owner's that belongs to the grant alone. The owner takes the access
to that page away, and no later call writes anything. There may still be a call that was past that byte; but
not in a thread that stands still: a thread that is stopped has left the kernel, or is about to.
"""

from __future__ import annotations

import ctypes
import mmap

from sglang_ext.disagg.processes import process_born, stands_still

_libc = ctypes.CDLL(None, use_errno=True)
_PROT_NONE = 0
_PROT_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_PAGE = mmap.PAGESIZE

_in_use: list[GuardPages] = []
"""Pages stay where they are, without access, as long as a writer that knows their address may live: else
something else might come to lie there."""


class GuardPages:
    """Pages of this process, one per slot, to which one other process writes before it writes anything else.

    They are address space only: a page costs memory while its slot is open, and no other can be written to.
    pid: of the writer.
    """

    def __init__(self, pid: int, slots: int) -> None:
        self._pid = pid
        self._born = process_born(pid)
        self._slots = slots
        self._open: set[int] = set()
        self._failed = self._closed = False
        self._pages = mmap.mmap(-1, slots * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._pages))
        self._protect(0, slots, _PROT_NONE)
        _in_use[:] = [guard for guard in _in_use if not (guard._closed and guard.writer_gone)]
        _in_use.append(self)

    def __repr__(self) -> str:
        return f"<GuardPages pid={self._pid} open={len(self._open)} closed={self._closed}>"

    def admit(self, slot: int) -> None:
        """Writes under this slot pass, unless the session is over."""
        if not self._closed:
            self._open.add(slot)
            self._protect(slot, 1, _PROT_WRITE)

    def revoke_slot(self, slot: int) -> None:
        """Calls under this slot that begin from now on fail before they write."""
        if slot in self._open:
            self._open.discard(slot)
            # Its memory goes first; the page reads as zero from then on, and no code reads it.
            self._pages.madvise(mmap.MADV_DONTNEED, slot * _PAGE, _PAGE)
            self._protect(slot, 1, _PROT_NONE)

    def close(self) -> None:
        """The session is over: revoke all slots, and admit no other."""
        self._closed = True
        self._open.clear()
        self._protect(0, self._slots, _PROT_NONE)

    def _protect(self, slot: int, count: int, access: int) -> None:
        where = ctypes.c_void_p(self.address + slot * _PAGE)
        if _libc.mprotect(where, count * _PAGE, access) != 0 and access == _PROT_NONE:
            self._failed = True

    @property
    def writer_gone(self) -> bool:
        """Whether the writer's process has ended."""
        return self._born == 0 or process_born(self._pid) != self._born

    @property
    def holds(self) -> bool:
        """Whether no call of the writer is under way. The kernel refuses it all slots that are not open, or
        else nothing holds before the writer has ended."""
        return self.writer_gone or (not self._failed and stands_still(self._pid))
