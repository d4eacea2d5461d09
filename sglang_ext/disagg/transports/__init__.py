"""The contract of a transport: one-sided reads and writes of runs between two endpoints.

A `Transport` belongs to an endpoint and serves all of its connections, in both roles. A `Channel` is one
connection, seen from the side that reads and writes. Connecting takes three steps, so that transports with a
handshake of their own need no messages besides CONNECT:

    reader   offer()                    -> blob, in CONNECT
    owner    accept(session, blob)      -> blob, in the answer; starts serving the session
    reader   open(peer, session, blobs) -> Channel; the engine then probes it by reading the owner's header

The caller guarantees
    - Runs lie inside the regions of both sides (the engine checks them against both tables).
    - A lane of a channel is used by one thread at a time. Lanes may run at the same time.
    - Local ranges stay registered and allocated until `read` or `write` has returned or raised.

A channel guarantees
    - `read` returns only when every byte is in place and was loaded from the owner's memory before the
      return: a later read of a generation counter, by any lane, sees at least the value that the owner had
      stored before any of those loads. Generations rely on this; each transport says why it holds.
    - `write` returns only when every byte is visible to the owner's processors.
    - However `read` or `write` ends, no byte of the local ranges changes after that.
    - They block without the GIL, and end soon after `token` is cancelled, with CancelledTransferError.
      (`verbs` first ends the reads and writes that it has posted; that is bounded by the queue pair's
      retries. `cuda_ipc` first ends the step that its GPU has begun.)
    - A peer that is gone is a PeerGoneError, a peer that breaks the protocol a PeerProtocolError. Then the
      channel may be broken, and says so.
"""

from __future__ import annotations

import enum
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.memory import MemoryKind, RegionMeta, RegionTable
from sglang_ext.disagg.runs import Runs

MAX_GRANTS: Final = 4096
"""Grants of one session at a time; a slot each, of which 0 is none's."""


class TransportName(enum.StrEnum):
    """All transports, in the order in which they are preferred. The last one is used only where named."""

    SHM = "shm"
    CMA = "cma"
    CUDA_IPC = "cuda_ipc"
    VERBS = "verbs"
    TCP = "tcp"
    GPUDIRECT = "gpudirect"


TRIED: Final = tuple(name for name in TransportName if name is not TransportName.GPUDIRECT)
"""Where none are named."""


class CancelToken:
    """Stops one `read` or `write`. flag: int64, shape (1,), which compiled loops look at."""

    def __init__(self) -> None:
        self.flag: npt.NDArray[np.int64] = np.zeros(1, np.int64)
        self._lock = threading.Lock()
        self._hook: Callable[[], None] | None = None

    @property
    def cancelled(self) -> bool:
        return bool(self.flag[0])

    def cancel(self) -> None:
        """End the operation soon. May be called from any thread, at any time, more than once."""
        with self._lock:
            self.flag[0] = 1
            hook = self._hook
        if hook is not None:
            hook()

    def on_cancel(self, hook: Callable[[], None] | None) -> None:
        """Another way to wake the operation (it may be blocked in a system call); called at once if it is too
        late.
        """
        with self._lock:
            self._hook = hook
            late = self.cancelled
        if late and hook is not None:
            hook()


@dataclass(frozen=True)
class PeerInfo:
    """The other side's description in CONNECT. host: same text on the same host and pid namespace."""

    instance: str
    epoch: bytes
    host: str
    address: str
    """The host part of the peer's control address, for transports that connect to it."""
    pid: int
    regions: tuple[RegionMeta, ...]


class Channel(ABC):
    """One connection, from the side that reads and writes. See the contract above."""

    name: TransportName
    lanes: int
    """How many reads and writes may run at a time."""
    gap: int = 256
    """Bytes that cost as much as another run: a shorter gap between two counters is read along."""
    counters: npt.NDArray[np.int64] | None = None
    """The owner's control region, where this side has it mapped: generations are compared where they lie. A
    load from it after `read` has returned sees a value at least as new as a `read` would."""
    inline: int = 0
    """Bytes that a read moves in two or three milliseconds without blocking on another thread or process. A
    channel that has any, has `counters` too, and a lane more, number `lanes`: the event loop's own thread
    reads so much at once, which saves the way to a lane and back."""

    @abstractmethod
    def read(self, lane: int, runs: Runs, token: CancelToken) -> None:
        """Copy the remote ranges of `runs` to their local ranges. Blocks."""

    ordered: ClassVar[bool] = False
    """Whether `read_then` is one way to the owner and back, not two."""

    def read_then(self, lane: int, runs: Runs, then: Runs, token: CancelToken) -> None:
        """As `read` of both; whatever `then` names is loaded after every byte of `runs` was."""
        self.read(lane, runs, token)
        self.read(lane, then, token)

    @abstractmethod
    def write(self, lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
        """Copy the local ranges of `runs` to their remote ranges, under a grant (slot, number). Blocks."""

    @property
    def broken(self) -> bool:
        """Whether no further read can succeed on this channel."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Release everything, once no read or write is running."""


class Served(ABC):
    """One session, from the side whose memory is read."""

    @abstractmethod
    def admit(self, slot: int) -> None:
        """The peer may write under a grant, which has this slot."""

    @abstractmethod
    def revoke_slot(self, slot: int) -> None:
        """The grant is over: from now on no write that begins under this slot lands. Called at least once for
        each session that was admitted; transports that look at `grants` before each write need not do
        anything."""

    def landed(self) -> None:
        """The peer's write is complete, and used next. For adapters that write to a GPU, see `verbs`."""
        return

    @abstractmethod
    def fence(self) -> bool:
        """Make sure that nothing the peer has begun to write is still under way, without its help; slots
        were revoked before. False when this transport cannot, now.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop serving the session."""


class Transport(ABC):
    """One way of reaching memory, for one endpoint."""

    name: TransportName

    def __init__(self, regions: RegionTable) -> None:
        self.regions = regions

    @abstractmethod
    def unavailable(self) -> str | None:
        """Why this endpoint cannot use the transport at all, for its host or its regions; None when it can.
        Shown by `sglang-ext doctor`."""

    @abstractmethod
    def offer(self) -> bytes:
        """The blob that the reader sends with CONNECT. May reserve what `open` or `withdraw` will consume."""

    @abstractmethod
    def withdraw(self, offer: bytes) -> None:
        """An offer that was not taken up."""

    @abstractmethod
    def accept(self, session: bytes, offer: bytes, grants: npt.NDArray[np.int64]) -> tuple[bytes, Served]:
        """Begin to serve a reader. grants: numbers of the grants it may write under, by slot; 0 is none.

        Raises:
            TransportUnavailableError: our memory cannot be reached this way, with the reason.
            PeerProtocolError: the offer makes no sense.
        """

    @abstractmethod
    def open(self, peer: PeerInfo, session: bytes, offer: bytes, answer: bytes) -> Channel:
        """Finish the handshake. Blocks; called off the event loop.

        Raises:
            TransportUnavailableError, PeerProtocolError, PeerGoneError
        """

    @abstractmethod
    def close(self) -> None:
        """Release everything, after all sessions and channels are closed."""


def host_memory_only(regions: RegionTable) -> str | None:
    """Why a transport by the processor does not carry these regions; None where all are in host memory."""
    kinds = {r.kind for r in regions} - {MemoryKind.HOST}
    return f"a pool is in {', '.join(sorted(kinds))} memory" if kinds else None


def host_identity() -> str:
    """The same text for two processes exactly when they share a kernel and a pid namespace."""
    import os

    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
        boot = f.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"
