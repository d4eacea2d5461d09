"""Pinned memory in which an endpoint stages its GPU's ranges, and the connection on which a peer asks for it.

    reader -> owner   ask     int64 x 4: magic, operation, ranges, grant slot | grant number << 16
                      ranges  int64 x 3 each: region, offset, bytes
    owner -> reader   reply   int64 x 4: magic, status, offset of a slot in the staging region, its generation

    GATHER    the ranges are copied to a slot, side by side
    TAKE      a slot for the peer to write to
    SCATTER   the bytes that were written to that slot go to the ranges, under a grant; the slot is free again
    DONE      the slot is free again; without a reply

A connection has a slot at a time. It proves itself as those of `tcp` do. A thread of the owner answers, in
Python, since it launches kernels.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_ext.compiled import fence
from sglang_ext.disagg.errors import (
    CancelledTransferError,
    PeerGoneError,
    PeerProtocolError,
    TransportUnavailableError,
)
from sglang_ext.disagg.memory import MAX_REGIONS, MemoryKind, RegionTable, SharedMemory
from sglang_ext.disagg.runs import BYTES, REMOTE, REMOTE_AT, Runs
from sglang_ext.disagg.transports import CancelToken, Served
from sglang_ext.disagg.transports.cuda_ipc import DeviceMemory, Ranges
from sglang_ext.disagg.transports.tcp import Connections, TcpServed, TcpTransport

log = logging.getLogger(__name__)

SLOTS: Final = 8
"""For peers, and as many for this endpoint's own reads and writes: a lane has its own slot before it asks for
one there, so that two endpoints that read each other never wait for each other."""
MAX_RANGES: Final = 1 << 16
"""Of one ask."""
_PAGE: Final = 4096
_MAGIC: Final = 0x4B56474154484552
_ASK: Final = struct.Struct("<qqqq")
_REPLY: Final = struct.Struct("<qqqq")
GATHER: Final = 1
TAKE: Final = 2
SCATTER: Final = 3
DONE: Final = 4
OK: Final = 0
BAD_RANGE: Final = 1
NO_GRANT: Final = 2
FAILED: Final = 3
_WAIT: Final = 0.05
"""Seconds between two looks at whether a wait has ended otherwise."""
PATIENCE: Final = 10.0
"""Seconds for which a cancelled write waits for the owner's scatter: milliseconds, unless it is gone."""


class PinnedArena:
    """Slots of pinned memory, in one region of the endpoint. Thread-safe.

    Each slot has a generation behind its bytes, which grows when the slot is given to another: a peer that
    reads too late sees that in it. Behind that is a word where the generation of a peer's slot lands.
    """

    def __init__(self, regions: RegionTable, device: DeviceMemory, nbytes: int) -> None:
        self.device = device
        self.slot_bytes = max(16 * _PAGE, nbytes // (2 * SLOTS) // _PAGE * _PAGE)
        self._stride = self.slot_bytes + _PAGE
        memory = self._memory = SharedMemory(2 * SLOTS * self._stride, "kv-pinned")
        self._words = memory.array.view(np.int64)
        self.region = regions.add(memory.address, memory.nbytes, fd=memory.fd, keep=memory).index
        self._free = {serving: list(range(SLOTS)) for serving in (False, True)}
        self._aside: list[tuple[int, Callable[[], bool]]] = []
        self._changed = threading.Condition()
        self._preparing = threading.Lock()
        self._reason: str | None = "not prepared"
        self.users = 0
        """How many transports use it. It is freed when all of them are closed."""

    def __repr__(self) -> str:
        free = ", ".join(f"{len(self._free[serving])} free of {SLOTS}" for serving in (False, True))
        return f"<PinnedArena {self._memory.nbytes} bytes {free} aside={len(self._aside)}>"

    def unavailable(self) -> str | None:
        """Pin it, once; why that cannot be."""
        with self._preparing:
            if self._reason == "not prepared":
                try:
                    self.device.prepare()
                    self.device.pin(self._memory.address, self._memory.nbytes)
                    self._reason = None
                except TransportUnavailableError as error:
                    self._reason = str(error)
            return self._reason

    @property
    def idle(self) -> bool:
        """Whether every slot is free."""
        return all(len(free) == SLOTS for free in self._free.values())

    def take(self, ended: Callable[[], bool], *, serving: bool = False) -> int | None:
        """The offset of a slot in the region, waited for; None when `ended` says so meanwhile."""
        with self._changed:
            while not ended():
                self._reclaim()
                if self._free[serving]:
                    at = (self._free[serving].pop() + SLOTS * serving) * self._stride
                    self._age(at)
                    return at
                self._changed.wait(_WAIT)
        return None

    @contextmanager
    def own(self, token: CancelToken) -> Iterator[int]:
        """A slot for one step of a lane."""
        at = self.take(lambda: token.cancelled)
        if at is None:
            raise CancelledTransferError("the transfer was cancelled")
        try:
            yield at
        finally:
            self.give(at)

    def give(self, at: int) -> None:
        """Nothing here uses the slot any more; a peer that still reads it will see another generation."""
        with self._changed:
            self._age(at)
            number = at // self._stride
            self._free[number >= SLOTS].append(number % SLOTS)
            self._changed.notify()

    def set_aside(self, at: int, over: Callable[[], bool]) -> None:
        """A peer may still write to the slot: free it once `over` says no."""
        with self._changed:
            self._aside.append((at, over))

    def address(self, at: int) -> int:
        """Of a slot."""
        return self._memory.address + at

    def generation_at(self, at: int) -> int:
        """Where in the region the slot's own generation is."""
        return at + self.slot_bytes

    def landing_at(self, at: int) -> int:
        """Where the generation of a peer's slot lands."""
        return at + self.slot_bytes + 8

    def word(self, at: int) -> int:
        """The word at an offset in the region."""
        return int(self._words[at // 8])

    def close(self) -> None:
        """One of `users` has closed."""
        self.users -= 1
        if self.users == 0:
            if self._reason is None:
                self.device.unpin(self._memory.address)
            self._words = np.empty(0, np.int64)
            self._memory.close()

    def _age(self, at: int) -> None:
        self._words[self.generation_at(at) // 8] += 1
        fence()

    def _reclaim(self) -> None:
        over = [entry for entry in self._aside if entry[1]()]
        self._aside = [entry for entry in self._aside if entry not in over]
        for at, _ in over:
            self.give(at)


class _Turn:
    """The slot that a connection has."""

    def __init__(self, arena: PinnedArena) -> None:
        self._arena = arena
        self.at: int | None = None
        self.writes = False
        """Whether the peer may be writing to it."""

    def take(self, ended: Callable[[], bool], *, writes: bool) -> int:
        self.give()
        self.at = self._arena.take(ended, serving=True)
        if self.at is None:
            raise ConnectionAbortedError("the session is over")
        self.writes = writes
        return self.at

    def give(self) -> None:
        if self.at is not None:
            self._arena.give(self.at)
            self.at = None

    def abandon(self, over: Callable[[], bool]) -> None:
        """The connection has ended, in the middle of anything."""
        if self.at is not None and self.writes:
            self._arena.set_aside(self.at, over)
        else:
            self.give()


class GatherServed(TcpServed):
    """Answers one reader's asks. carrier: the session of the transport that carries staged bytes."""

    carrier: Served | None = None
    ended = False
    """Whether the carrier's session has ended."""

    def __init__(self, owner: GatherTransport, session: bytes, grants: npt.NDArray[np.int64]) -> None:
        super().__init__(owner, session, grants)
        self._arena, self._own, self._of_session = owner.arena, owner.own, grants
        self._device_regions = owner.device_regions

    def _serve(self, sock: socket.socket, flag: npt.NDArray[np.int64]) -> None:
        turn = _Turn(self._arena)
        try:
            while True:
                self._answer(sock, turn, lambda: bool(flag[0]))
        except OSError:
            pass
        except Exception:
            log.exception("a peer's asks are not answered any more")
        finally:
            turn.abandon(lambda: self.ended and self.carrier is not None and self.carrier.fence())
            sock.close()

    def _answer(self, sock: socket.socket, turn: _Turn, ended: Callable[[], bool]) -> None:
        magic, operation, count, grant = _ASK.unpack(receive(sock, _ASK.size))
        if magic != _MAGIC or not 0 <= count <= MAX_RANGES:
            raise ConnectionAbortedError("not an ask")
        ranges = np.frombuffer(receive(sock, 24 * count), np.int64).reshape(-1, 3)
        if operation == DONE:
            turn.give()
            return
        at, status = turn.at or 0, OK
        if operation in (GATHER, TAKE):
            at = turn.take(ended, writes=operation == TAKE)
        if operation != TAKE:
            status = self._copy(at, ranges, grant if operation == SCATTER else None, turn)
        generation = self._arena.word(self._arena.generation_at(at))
        if operation == SCATTER:
            turn.give()
        sock.sendall(_REPLY.pack(_MAGIC, status, at, generation))

    def _copy(self, at: int, ranges: Ranges, grant: int | None, turn: _Turn) -> int:
        """Gather to a slot, or scatter from it under a grant; returns the status."""
        region, offset, nbytes = ranges.T
        known = (region >= 0) & (region < MAX_REGIONS)
        sizes = np.where(known & self._device_regions[region * known], self._own.sizes[region * known], -1)
        inside = (nbytes > 0) & (offset >= 0) & (offset <= sizes - nbytes)
        if not len(ranges) or not inside.all() or nbytes.sum() > self._arena.slot_bytes:
            return BAD_RANGE
        here = self._arena.address(at) + packed(nbytes)
        there = self._own.bases[region] + offset
        try:
            if grant is None:
                self._arena.device.gather(np.stack([there, here, nbytes], 1))
                return OK
            slot, number = grant & 0xFFFF, grant >> 16
            allowed = 0 < slot < len(self._of_session) and number > 0 and self._of_session[slot] == number
            if not allowed or turn.at is None or not turn.writes:
                return NO_GRANT
            self._arena.device.scatter(np.stack([here, there, nbytes], 1))
        except RuntimeError as error:
            log.warning("a peer's ranges could not be staged: %s", error)
            return FAILED
        return OK


class GatherTransport(TcpTransport):
    """Takes the connections of asks; not a transport of its own.

    regions: in host memory, see `TcpTransport`. own: all regions of the endpoint.
    """

    def __init__(
        self, arena: PinnedArena, own: RegionTable, regions: RegionTable, bind: str, ports: Sequence[int]
    ) -> None:
        self.arena, self.own = arena, own
        self.device_regions = on_device(own)
        super().__init__(regions, bind, 1, ports)

    def _serving(self, session: bytes, grants: npt.NDArray[np.int64]) -> GatherServed:
        return GatherServed(self, session, grants)


class Asks:
    """A reader's connections for asks, one per lane.

    nbytes: of the owner's staging region; slot_bytes: of a slot there.
    """

    def __init__(self, connections: Connections, nbytes: int, slot_bytes: int) -> None:
        self._connections = connections
        self._last = nbytes - slot_bytes - 8
        self.slot_bytes = slot_bytes

    def gather(self, lane: int, runs: Runs, token: CancelToken) -> tuple[int, int]:
        """Have the remote ranges of `runs` gathered: the slot's offset in the staging region, and its
        generation."""
        return self._ask(lane, GATHER, runs, token)

    def take(self, lane: int, token: CancelToken) -> int:
        """The offset of a slot to write to."""
        return self._ask(lane, TAKE, None, token)[0]

    def scatter(self, lane: int, runs: Runs, token: CancelToken, grant: tuple[int, int]) -> None:
        """Have the bytes that were written to the slot put into the remote ranges, under a grant."""
        self._ask(lane, SCATTER, runs, token, grant[0] | grant[1] << 16)

    def done(self, lane: int) -> None:
        """The slot is not used any more. Raises nothing."""
        sock = self._connections.made(lane)
        if sock is not None:
            with suppress(OSError):
                sock.sendall(_ASK.pack(_MAGIC, DONE, 0, 0))

    def _ask(
        self, lane: int, operation: int, runs: Runs | None, token: CancelToken, grant: int = 0
    ) -> tuple[int, int]:
        ranges = b"" if runs is None else runs[:, [REMOTE, REMOTE_AT, BYTES]].tobytes()
        sock = self._connections.get(lane, token)
        try:
            sock.sendall(_ASK.pack(_MAGIC, operation, len(ranges) // 24, grant) + ranges)
            # A peer that writes to a slot, or has it scattered, says how that has ended; a slot that it only
            # reads may be given to another at any time.
            reply = _reply(sock, token, 0.0 if operation == GATHER else PATIENCE)
        except OSError as error:
            self._connections.drop(lane)
            raise PeerGoneError(f"the peer stages no more: {error}") from None
        except CancelledTransferError:
            self._connections.drop(lane)
            raise
        magic, status, at, generation = _REPLY.unpack(reply)
        if magic != _MAGIC or status not in (OK, NO_GRANT, FAILED) or not 0 <= at <= self._last:
            self._connections.drop(lane)
            raise PeerProtocolError(f"the peer's reply to an ask is not the protocol (status {status})")
        if status != OK:
            text = "the grant is over" if status == NO_GRANT else "its GPU does not copy any more"
            raise PeerGoneError(f"the peer cannot stage: {text}")
        return at, generation

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()


def on_device(regions: RegionTable) -> npt.NDArray[np.bool_]:
    """By region, whether it is in GPU memory."""
    found = np.zeros(MAX_REGIONS, np.bool_)
    found[[region.index for region in regions if region.kind is MemoryKind.CUDA]] = True
    return found


def packed(nbytes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where ranges begin that lie side by side."""
    return np.cumsum(nbytes) - nbytes


def _reply(sock: socket.socket, token: CancelToken, patience: float) -> bytes:
    """A reply, waited for until it comes, or so many seconds after the token was cancelled."""
    arrives, since = select.poll(), 0.0
    arrives.register(sock, select.POLLIN)
    while not arrives.poll(1000 * _WAIT):
        if token.cancelled:
            since += _WAIT
            if since > patience:
                raise CancelledTransferError("the transfer was cancelled")
    return receive(sock, _REPLY.size)


def receive(sock: socket.socket, n: int) -> bytes:
    """So many bytes of a connection. Raises OSError."""
    data = bytearray()
    while len(data) < n:
        part = sock.recv(min(n - len(data), 1 << 20))
        if not part:
            raise ConnectionResetError("closed by the peer")
        data += part
    return bytes(data)
