"""`shm` and `cma`: both ends on one host, no service by the owner.

shm: the owner's pool is shared memory; the reader maps it, for reading only, and copies. Every byte that was
stored here had been loaded before; the full fence at the end of a copy orders those loads before the load of
a counter.

cma: the owner's pool is any memory; the reader calls process_vm_readv with many ranges at a time. The
kernel has copied the bytes when the call returns, and a counter is read by a later call.

Both write by process_vm_writev, past a guard page of the grant (`_guard`), by which the owner fences a writer
that stands still. Stores to mapped memory could not be fenced: a process may be stopped between its look at a
grant and its next store, for any time.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import struct

import numpy as np
import numpy.typing as npt

from sglang_ext.compiled import COMPILED, STREAM_BYTES, fence, kernel, libc
from sglang_ext.disagg.errors import (
    CancelledTransferError,
    PeerGoneError,
    PeerProtocolError,
    TransferError,
    TransportUnavailableError,
)
from sglang_ext.disagg.memory import MAX_REGIONS, PeerMapping, RegionTable
from sglang_ext.disagg.runs import Runs, copy_runs
from sglang_ext.disagg.transports import (
    MAX_GRANTS,
    CancelToken,
    Channel,
    PeerInfo,
    Served,
    Transport,
    TransportName,
    host_identity,
    host_memory_only,
)
from sglang_ext.disagg.transports._guard import GuardPages

IOVECS = 1024
"""Ranges per call, the kernel's limit."""
STEP_BYTES = 4 << 20
"""Bytes between two looks at the cancel flag: under a millisecond."""
ADDRESS = struct.Struct("<Q")
"""Of the guard pages, in the owner's answer."""
INLINE_SHM = 32 << 20
INLINE_CMA = 16 << 20
"""Bytes that the event loop's own thread may read: two or three milliseconds. Two hand-overs between threads
cost 0.2 ms when no other thread wants the GIL or the processor, and up to 10 ms when another thread computes
in Python."""

_readv = libc("process_vm_readv", "int32", "intp", "intp", "intp", "intp", "intp")
_writev = libc("process_vm_writev", "int32", "intp", "intp", "intp", "intp", "intp")
_errno = libc("__errno_location", result="int32*")


@kernel
def _vector(pid, runs, remote_bases, local_bases, iov, flag, guard):  # type: ignore[no-untyped-def]
    """process_vm_readv over all runs, or writev with a guard. 0, -1 when cancelled, or -(1000 + errno).

    iov: int64, shape (2, IOVECS, 2): local and remote vectors of (address, bytes). guard: address of the
    peer's byte that each write begins with; 0 to read.
    """
    n = runs.shape[0]
    i = 0
    done = 0
    while i < n:
        if flag[0]:
            return -1
        count = 0
        total = 0
        if guard:
            # From anywhere: the byte's value does not matter.
            iov[0, 0, 0] = flag.ctypes.data
            iov[1, 0, 0] = guard
            iov[0, 0, 1] = 1
            iov[1, 0, 1] = 1
            count = 1
        j = i
        skip = done
        while j < n and count < iov.shape[1] and total < 4194304:
            take = min(runs[j, 4] - skip, 4194304 - total)
            iov[0, count, 0] = local_bases[runs[j, 2]] + runs[j, 3] + skip
            iov[1, count, 0] = remote_bases[runs[j, 0]] + runs[j, 1] + skip
            iov[0, count, 1] = take
            iov[1, count, 1] = take
            total += take
            count += 1
            j += 1
            skip = 0
        local = iov[0].ctypes.data
        remote = iov[1].ctypes.data
        if guard:
            moved = _writev(pid, local, count, remote, count, 0) - 1
        else:
            moved = _readv(pid, local, count, remote, count, 0)
        if moved <= 0:
            return -(1000 + (_errno()[0] if moved < 0 else 5))
        while moved > 0:
            rest = runs[i, 4] - done
            if moved >= rest:
                moved -= rest
                i += 1
                done = 0
            else:
                done += moved
                moved = 0
    return 0


class _Kernel:
    """Moves bytes between here and the address space of the peer, through the kernel.

    guards: address of the peer's guard pages, one for each slot.
    """

    def __init__(self, regions: RegionTable, peer: PeerInfo, lanes: int, guards: int) -> None:
        self._local = regions
        self._pid = peer.pid
        self._guards = guards
        self._bases = np.zeros(MAX_REGIONS, np.int64)
        self._bases[: len(peer.regions)] = [m.address for m in peer.regions]
        self._iov = [np.zeros((2, IOVECS, 2), np.int64) for _ in range(lanes)]

    def read(self, lane: int, runs: Runs, token: CancelToken) -> None:
        self._move(lane, runs, token, 0)

    def write(self, lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
        """Slot 0 is no grant's, so that its page lets nothing pass."""
        if not 0 <= grant[0] < MAX_GRANTS:
            raise PeerProtocolError(f"no grant has slot {grant[0]}")
        self._move(lane, runs, token, self._guards + grant[0] * mmap.PAGESIZE)

    def _move(self, lane: int, runs: Runs, token: CancelToken, guard: int) -> None:
        code = _vector(self._pid, runs, self._bases, self._local.bases, self._iov[lane], token.flag, guard)
        if code == -1:
            raise CancelledTransferError("cma: the call was cancelled")
        if code:
            raise _cma_error(-code - 1000, writes=bool(guard))
        fence()

    def close(self) -> None:
        self._iov.clear()


class ShmChannel(Channel):
    """Copies from the peer's mapped memory, which cannot be written through the mapping."""

    name = TransportName.SHM
    gap = 0

    def __init__(self, regions: RegionTable, peer: PeerInfo, lanes: int, guards: int) -> None:
        """guards: as `_Kernel` takes it."""
        self.lanes = lanes
        self._local = regions
        self._kernel = _Kernel(regions, peer, lanes, guards)
        self._maps: list[PeerMapping] = []
        self._bases: npt.NDArray[np.int64] = np.zeros(MAX_REGIONS, np.int64)
        # Regions that share a memfd are mapped one by one: mappings are cheap, and each covers exactly the
        # offered range.
        try:
            for i, meta in enumerate(peer.regions):
                if meta.nbytes:
                    mapped = PeerMapping(peer.pid, meta)  # for reading only
                    self._maps.append(mapped)
                    self._bases[i] = mapped.address
                    if i == 0:
                        self.counters = mapped.words()
            self.inline = INLINE_SHM if self.counters is not None else 0
        except BaseException:
            self.close()
            raise

    def read(self, lane: int, runs: Runs, token: CancelToken) -> None:
        if copy_runs(runs, self._local.bases, 2, self._bases, 0, STREAM_BYTES, token.flag):
            raise CancelledTransferError("shm: the copy was cancelled")
        fence()

    def write(self, lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
        self._kernel.write(lane, runs, token, grant)

    def close(self) -> None:
        self.counters = None
        self._kernel.close()
        for mapped in self._maps:
            mapped.close()
        self._maps.clear()


class CmaChannel(Channel):
    """Reads and writes the peer's address space through the kernel."""

    name = TransportName.CMA
    gap = 1024

    def __init__(self, regions: RegionTable, peer: PeerInfo, lanes: int, guards: int) -> None:
        """guards: as `_Kernel` takes it."""
        self.lanes = lanes
        self._kernel = _Kernel(regions, peer, lanes + 1, guards)
        self._control: PeerMapping | None = None
        # The pool may be in any memory, but the owner's counters are in shared memory: mapped here, they cost
        # no call. The process itself proves by its header that it owns them.
        with contextlib.suppress(TransferError):
            if peer.regions and peer.regions[0].fd >= 0:
                self._control = PeerMapping(peer.pid, peer.regions[0])
                self.counters = self._control.words()
        self.inline = INLINE_CMA if self.counters is not None else 0

    def read(self, lane: int, runs: Runs, token: CancelToken) -> None:
        self._kernel.read(lane, runs, token)

    def write(self, lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
        self._kernel.write(lane, runs, token, grant)

    def close(self) -> None:
        self._kernel.close()
        self.counters = None
        if self._control is not None:
            self._control.close()


def _cma_error(number: int, *, writes: bool) -> TransferError:
    if number in (errno.EPERM, errno.EACCES):
        return TransportUnavailableError(
            f"cma: the kernel does not let this process {'write' if writes else 'read'} the peer's memory",
            hint="Run both as the same user; where kernel.yama.ptrace_scope is above 0, set it to 0 or grant "
            "CAP_SYS_PTRACE",
        )
    # ESRCH: no such process. EFAULT: the process is there but the pool is not: it restarted with the same
    # pid. To a writer also: its grant is over.
    what = "the grant is over, or the peer's memory is gone" if writes else "the peer's memory cannot be read"
    return PeerGoneError(f"cma: {what}: {os.strerror(number)}")


def _warm() -> None:
    """Load the compiled loops, or compile them where they are not cached: not while a peer waits."""
    none, zero = np.zeros((0, 5), np.int64), np.zeros(1, np.int64)
    copy_runs(none, zero, 2, zero, 0, STREAM_BYTES, zero)
    _vector(0, none, zero, zero, np.zeros((2, 1, 2), np.int64), zero, 0)
    fence()


class ShmTransport(Transport):
    """See the top of this file. lanes: copies that may run at a time on one channel."""

    name = TransportName.SHM

    def __init__(self, regions: RegionTable, lanes: int = 1) -> None:
        super().__init__(regions)
        self._lanes = lanes
        if COMPILED:
            _warm()

    def unavailable(self) -> str | None:
        return host_memory_only(self.regions) if COMPILED else "numba is missing: pip install numba"

    def offer(self) -> bytes:
        return f"{host_identity()} {os.getpid()}".encode()

    def accept(self, session: bytes, offer: bytes, grants: npt.NDArray[np.int64]) -> tuple[bytes, Served]:
        reason = host_memory_only(self.regions)
        if reason is None and any(r.fd < 0 for r in self.regions):
            reason = "a pool is not in shared memory"
        return _accept(self.name, offer, reason, grants)

    def open(self, peer: PeerInfo, session: bytes, offer: bytes, answer: bytes) -> Channel:
        return ShmChannel(self.regions, peer, self._lanes, _guards(self.name, answer))

    def withdraw(self, offer: bytes) -> None:
        """Nothing was reserved."""

    def close(self) -> None:
        """Nothing is held."""


class GuardedServed(Served):
    """A session of a process on this host, which begins its writes with a guard page of ours."""

    def __init__(self, pid: int, slots: int) -> None:
        """pid: of the peer. slots: how many grants it may have at a time."""
        self.guard = GuardPages(pid, slots)

    def admit(self, slot: int) -> None:
        self.guard.admit(slot)

    def revoke_slot(self, slot: int) -> None:
        self.guard.revoke_slot(slot)

    def fence(self) -> bool:
        """Whether the peer stands still or is gone; a peer that runs is asked."""
        return self.guard.holds

    def close(self) -> None:
        self.guard.close()


class CmaTransport(Transport):
    """See the top of this file. lanes: calls that may run at a time on one channel."""

    name = TransportName.CMA

    def __init__(self, regions: RegionTable, lanes: int = 1) -> None:
        super().__init__(regions)
        self._lanes = lanes
        if COMPILED:
            _warm()

    def unavailable(self) -> str | None:
        if not COMPILED:
            return "numba is missing: pip install numba"
        if (reason := host_memory_only(self.regions)) is not None:
            return reason
        try:
            with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as f:
                scope = int(f.read())
        except (OSError, ValueError):
            return None
        if scope == 0 or (scope < 3 and _has_ptrace_capability()):
            return None
        return f"kernel.yama.ptrace_scope is {scope}: set it to 0 or grant CAP_SYS_PTRACE"

    def offer(self) -> bytes:
        return f"{host_identity()} {os.getpid()}".encode()

    def accept(self, session: bytes, offer: bytes, grants: npt.NDArray[np.int64]) -> tuple[bytes, Served]:
        return _accept(self.name, offer, host_memory_only(self.regions), grants)

    def open(self, peer: PeerInfo, session: bytes, offer: bytes, answer: bytes) -> Channel:
        return CmaChannel(self.regions, peer, self._lanes, _guards(self.name, answer))

    def withdraw(self, offer: bytes) -> None:
        """Nothing was reserved."""

    def close(self) -> None:
        """Nothing is held."""


def _accept(
    name: TransportName, offer: bytes, reason: str | None, grants: npt.NDArray[np.int64]
) -> tuple[bytes, Served]:
    """The answer to a peer on this host: where it finds its guard pages."""
    host, _, pid = offer.rpartition(b" ")
    if host != host_identity().encode():
        reason = "the peer is on another host, or in another pid namespace"
    if reason:
        raise TransportUnavailableError(f"{name}: {reason}")
    if not pid.isdigit():
        raise PeerProtocolError(f"{name}: the offer does not say whose it is")
    served = GuardedServed(int(pid), grants.shape[0])
    return ADDRESS.pack(served.guard.address), served


def _guards(name: TransportName, answer: bytes) -> int:
    if len(answer) != ADDRESS.size:
        raise PeerProtocolError(f"{name}: the answer does not name guard pages")
    address: int = ADDRESS.unpack(answer)[0]
    return address


def _has_ptrace_capability() -> bool:
    cap_sys_ptrace = 19
    with open("/proc/self/status", encoding="ascii") as f:
        effective = next((line.split()[1] for line in f if line.startswith("CapEff")), "0")
    return bool(int(effective, 16) >> cap_sys_ptrace & 1)
