"""The reading (and writing) side of one connection: TRANSFER, and the first half of COMPLETE.

The event loop queues and reports; the lanes move bytes. A lane is a thread: it blocks in a transport
without the GIL, and when the last piece of a request has landed it reads the generations there and then,
without a hop back.

    transfer() ─> queue ─pump─> lane threads ─> landed, verified ─call_soon_threadsafe─> future of the request

Rules: a request's future is resolved exactly once, and not before the queue has forgotten the request or
all of its bytes are in place and verified: whoever waited may then free or use the local ranges. The first
error of a request is the one that is reported.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.errors import (
    CancelledTransferError,
    PeerGoneError,
    RangeError,
    StaleReadError,
    TransferDeadlineError,
    TransferError,
)
from sglang_ext.disagg.generations import HEADER_BYTES, counter_runs, counters_at_a_time, header
from sglang_ext.disagg.memory import RegionTable
from sglang_ext.disagg.runs import LOCAL, REMOTE, Ids, Runs, outside, total_bytes
from sglang_ext.disagg.transactions import Direction, Piece, TransactionQueue
from sglang_ext.disagg.transports import CancelToken, Channel, PeerInfo

log = logging.getLogger(__name__)

SCRATCH_BYTES = 64 + 1024 * (1024 + 8)
"""One slot: 1024 counters at a time by a transport that reads up to 1024 bytes between two of them."""


class Scratch:
    """Slots in local region 0 where counters land, shared by all lanes of an endpoint.

    A lane that verifies holds one; when all are held it waits, at most as long as it takes to find that a
    peer is gone.
    """

    def __init__(self, first: int, slots: int) -> None:
        self.slots = slots
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(slots):
            self._free.put(first + i * SCRATCH_BYTES)

    @property
    def free(self) -> int:
        """Slots that no lane holds."""
        return self._free.qsize()

    @contextlib.contextmanager
    def slot(self) -> Iterator[int]:
        """The offset of a slot, in region 0."""
        at = self._free.get()
        try:
            yield at
        finally:
            self._free.put(at)


@dataclass(frozen=True)
class Expect:
    """What must still hold after the read: these blocks have these generations.

    table_at: offset of the pool's counters in the owner's region 0.
    """

    table_at: int
    blocks: Ids
    generations: npt.NDArray[np.int64]


@dataclass(slots=True)
class PeerStats:
    """Counts since the connection was made; `runs` are before, `transactions` after coalescing."""

    bytes: int = 0
    runs: int = 0
    transactions: int = 0
    completed: int = 0
    stale: int = 0
    failed: int = 0

    def add(self, other: PeerStats) -> None:
        """Add another's counts to these."""
        for name in ("bytes", "runs", "transactions", "completed", "stale", "failed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


@dataclass(frozen=True, slots=True)
class _Check:
    """One read of counters: its runs and where each counter lands, both relative to a scratch slot."""

    runs: Runs
    where: npt.NDArray[np.int64]
    generations: npt.NDArray[np.int64]


class _Phase(enum.Enum):
    MOVING = "moving"
    VERIFYING = "verifying"
    DONE = "done"


@dataclass(slots=True, eq=False)
class _Request:
    landed: asyncio.Future[None]
    expects: list[Expect] = field(default_factory=list)
    checks: list[_Check] | None = None
    """How to read the counters of `expects`; None until it is prepared."""
    phase: _Phase = _Phase.MOVING
    error: TransferError | None = None
    token: CancelToken = field(default_factory=CancelToken)
    """Stops the verification."""


_Job = Piece | str | None
"""A piece to move, a request to verify, or the end."""


class Peer:
    """One connected owner.

    channel: how its memory is reached. scratch: where counters land.
    piece_bytes: how much a lane moves at a time. Belongs to the event loop it was made in; not thread-safe.
    """

    def __init__(
        self,
        info: PeerInfo,
        channel: Channel,
        regions: RegionTable,
        scratch: Scratch,
        *,
        piece_bytes: int = 8 << 20,
        coalescing: bool = True,
    ) -> None:
        self.info = info
        self.channel = channel
        self.stats = PeerStats()
        self._regions = regions
        self._scratch = scratch
        self.coalescing = coalescing
        self._remote_sizes: npt.NDArray[np.int64] = np.array([m.nbytes for m in info.regions], np.int64)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._queue = TransactionQueue(piece_bytes, coalescing=coalescing)
        self._requests: dict[str, _Request] = {}
        self._tokens: dict[int, tuple[Piece, CancelToken]] = {}
        self._running: set[int] = set()
        self._lane_of: dict[int, int] = {}
        self._pump_scheduled = False
        self._gone: TransferError | None = None
        self._closed = False
        self._inbox: list[queue.SimpleQueue[_Job]] = [queue.SimpleQueue() for _ in range(channel.lanes)]
        self._load = [0] * channel.lanes
        self._threads = [
            threading.Thread(target=self._lane, args=(i,), name=f"kv-{channel.name}-{i}", daemon=True)
            for i in range(channel.lanes)
        ]
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"<Peer {self.info.instance} by {self.channel.name} {self._queue!r} gone={self._gone}>"

    @property
    def gone(self) -> TransferError | None:
        """Why nothing more can be read from this peer; None while it can."""
        return self._gone

    def transfer(
        self,
        request: str,
        runs: Runs,
        *,
        expect: Expect | None = None,
        direction: Direction = Direction.READ,
        grant: tuple[int, int] = (0, 0),
    ) -> None:
        """TRANSFER: queue runs of a request. Posted in this turn of the event loop, merged with what else
        is queued.

        Raises:
            RangeError: a run leaves a region of either side. PeerGoneError: the peer is gone.
        """
        if self._gone is not None:
            raise PeerGoneError(str(self._gone))
        for side, sizes in ((REMOTE, self._remote_sizes), (LOCAL, self._regions.sizes)):
            bad = outside(runs, side, sizes)
            if bad >= 0:
                raise RangeError(f"run {bad} {runs[bad].tolist()} leaves its region")
        with self._lock:
            known = self._known(request)
            self._queue.transfer(request, runs, direction, grant)
            if expect is not None:
                known.expects.append(expect)
        self._schedule()

    async def landed(self, request: str, deadline: float) -> None:
        """Queue the request's COMPLETE, and return when all its bytes are in place and their generations
        verified.

        deadline: on the event loop's clock. However this ends, nothing writes to the local ranges after it.

        Raises:
            StaleReadError, TransferDeadlineError, PeerGoneError, PeerProtocolError: discard the bytes.
        """
        with self._lock:
            known = self._known(request)
            if self._queue.complete(request):
                self._verify(request, known, 0)
        # At once: the lanes copy while we prepare what comes after the copy.
        self._pump()
        known.checks = [c for expect in known.expects for c in self._checks(expect)]
        timer = self._loop.call_at(deadline, self._expire, request)
        cancelled: asyncio.CancelledError | None = None
        try:
            while not known.landed.done():
                try:
                    await asyncio.shield(known.landed)
                except asyncio.CancelledError as interruption:
                    cancelled = interruption
                    self._abort(request, CancelledTransferError(f"request {request!r} was cancelled"), False)
                except TransferError:
                    break
        finally:
            timer.cancel()
            self._requests.pop(request, None)
        failure = known.landed.exception()
        if failure is None:
            self.stats.completed += 1
        elif isinstance(failure, StaleReadError):
            self.stats.stale += 1
        else:
            self.stats.failed += 1
        if cancelled is not None:
            raise cancelled
        if failure is not None:
            raise failure

    async def drop(self, request: str) -> None:
        """Give up a request that will have no COMPLETE; returns when nothing writes to its local ranges."""
        known = self._requests.get(request)
        if known is None:
            return
        self._abort(request, CancelledTransferError(f"request {request!r} was dropped"), False)
        await asyncio.wait([known.landed])
        self._requests.pop(request, None)

    def fail(self, error: TransferError) -> None:
        """The peer is gone: end every request with `error`, stop every lane's work."""
        if self._gone is None:
            self._gone = error
        for request in list(self._requests):
            self._abort(request, error, True)

    async def stop_writes(self, grant: int) -> None:
        """End every write under a grant; returns when none is running."""
        with self._lock:
            affected = {
                r for piece, _ in self._tokens.values() if piece.grant[1] == grant for r in piece.requests
            }
            waiting = [self._requests[r].landed for r in affected if r in self._requests]
        for request in affected:
            self._abort(request, PeerGoneError("the receiver revoked the grant"), True)
        await asyncio.gather(*waiting, return_exceptions=True)

    async def close(self) -> None:
        """End everything, then release the channel."""
        if self._closed:
            return
        self._closed = True
        self.fail(PeerGoneError("disconnected"))
        for inbox in self._inbox:
            inbox.put(None)
        await asyncio.to_thread(self._join)
        self.channel.close()

    def check(self) -> None:
        """Verify the queue, and that every piece under way has a token and the other way round."""
        with self._lock:
            self._queue.check()
            for piece, _ in self._tokens.values():
                assert piece.requests, f"piece {piece.number} is nobody's"

    def _join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _known(self, request: str) -> _Request:
        known = self._requests.get(request)
        if known is None:
            known = self._requests[request] = _Request(self._loop.create_future())
            # Looked at by `landed`, or by nobody when the request is dropped before.
            known.landed.add_done_callback(lambda f: f.cancelled() or f.exception())
        return known

    def _schedule(self) -> None:
        # One pump per turn of the loop: transfers queued in the same turn are coalesced with each other.
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        with self._lock:
            while (batch := self._queue.take()) is not None:
                self.stats.runs += batch.uncoalesced
                self.stats.transactions += batch.coalesced
                for piece in batch.pieces:
                    size = total_bytes(piece.runs)
                    self.stats.bytes += size
                    self._tokens[piece.number] = (piece, CancelToken())
                    lane = self._load.index(min(self._load))
                    self._load[lane] += size
                    self._lane_of[piece.number] = lane
                    self._inbox[lane].put(piece)

    def _lane(self, lane: int) -> None:
        inbox = self._inbox[lane]
        while (job := inbox.get()) is not None:
            try:
                if isinstance(job, Piece):
                    self._move(lane, job)
                else:
                    self._check_generations(lane, job)
            except Exception as error:
                # A lane must not die silently: whatever it was, the peer is unusable, and says so.
                log.exception("lane %d of %s failed", lane, self.info.instance)
                self._loop.call_soon_threadsafe(self.fail, PeerGoneError(f"a lane failed: {error!r}"))

    def _move(self, lane: int, piece: Piece) -> None:
        with self._lock:
            if piece.number not in self._tokens:
                return  # dropped while it waited for this lane
            token = self._tokens[piece.number][1]
            self._running.add(piece.number)
        error: TransferError | None = None
        try:
            if piece.direction is Direction.READ:
                self.channel.read(lane, piece.runs, token)
            else:
                self.channel.write(lane, piece.runs, token, piece.grant)
        except TransferError as failure:
            error = failure
        except BaseException as failure:
            error = PeerGoneError(f"{self.channel.name}: {failure!r}")
            raise
        finally:
            self._ended(lane, piece, error)

    def _ended(self, lane: int, piece: Piece, error: TransferError | None) -> None:
        with self._lock:
            del self._tokens[piece.number]
            self._running.discard(piece.number)
            self._lane_of.pop(piece.number, None)
            self._load[lane] -= total_bytes(piece.runs)
            if error is None:
                for request in self._queue.landed(piece):
                    self._verify(request, self._requests[request], lane)
            else:
                for request in self._queue.failed(piece):
                    known = self._requests.get(request)
                    if known is not None and known.error is None:
                        known.error = error
        self._loop.call_soon_threadsafe(self._report, piece.requests, error)

    def _verify(self, request: str, known: _Request, lane: int) -> None:
        known.phase = _Phase.VERIFYING
        self._inbox[lane].put(request)

    def _check_generations(self, lane: int, request: str) -> None:
        known = self._requests.get(request)
        if known is None or known.phase is not _Phase.VERIFYING:
            return
        error = known.error
        try:
            if error is None:
                checks = known.checks
                if checks is None:
                    checks = [c for expect in known.expects for c in self._checks(expect)]
                stale = sum(self._stale(lane, check, known.token) for check in checks or [_HEADER])
                if stale:
                    raise StaleReadError(request, stale, sum(e.blocks.size for e in known.expects))
        except TransferError as failure:
            error = failure
        with self._lock:
            known.phase = _Phase.DONE
            known.error = known.error or error
            if self._queue.state(request) is not None:
                self._queue.acknowledged(request)
        self._loop.call_soon_threadsafe(self._report, frozenset((request,)), error)

    def _checks(self, expect: Expect) -> list[_Check]:
        """Reads of the counters of `expect`, as many at a time as a scratch slot holds."""
        gap = self.channel.gap
        step = counters_at_a_time(SCRATCH_BYTES, gap)
        checks: list[_Check] = []
        for start in range(0, expect.blocks.size, step):
            blocks = expect.blocks[start : start + step]
            runs, where = counter_runs(blocks, expect.table_at, 0, 0, SCRATCH_BYTES, gap)
            checks.append(_Check(runs, where, expect.generations[start : start + step]))
        return checks

    def _stale(self, lane: int, check: _Check, token: CancelToken) -> int:
        """How many blocks have another generation now; read by the transport, after the data."""
        with self._scratch.slot() as at:
            runs = check.runs.copy()
            runs[:, LOCAL + 1] += at
            if outside(runs, REMOTE, self._remote_sizes) >= 0:
                raise RangeError("the offer names blocks outside of the peer's generation table")
            self.channel.read(lane, runs, token)
            memory = _view(int(self._regions.bases[0]) + at, SCRATCH_BYTES)
            if memory[:HEADER_BYTES].tobytes() != header(self.info.epoch):
                raise PeerGoneError(f"{self.info.instance} restarted: its memory has another epoch")
            found = memory.view(np.int64)[check.where >> 3]
            return int((found != check.generations).sum())

    def _report(self, requests: frozenset[str], error: TransferError | None) -> None:
        """On the event loop: resolve the futures of requests that are over."""
        for request in requests:
            known = self._requests.get(request)
            if known is None or known.landed.done():
                continue
            with self._lock:
                over = self._queue.state(request) is None and (
                    known.phase is not _Phase.VERIFYING or known.error is not None
                )
                failure = known.error
            if over and failure is not None:
                known.landed.set_exception(failure)
            elif over and known.phase is _Phase.DONE:
                known.landed.set_result(None)
        if self.channel.broken and self._gone is None:
            self.fail(error or PeerGoneError(f"{self.channel.name}: the channel broke"))

    def _expire(self, request: str) -> None:
        error = TransferDeadlineError(f"request {request!r} from {self.info.instance} did not end in time")
        self._abort(request, error, True)

    def _abort(self, request: str, error: TransferError, shared: bool) -> None:
        """End a request. shared: also stop pieces that hold bytes of others, which then fail too."""
        known = self._requests.get(request)
        if known is None or known.landed.done():
            return
        touched = {request}
        with self._lock:
            if known.phase is _Phase.DONE:
                return
            known.error = known.error or error
            stop = {p.number for p in self._queue.cancel(request)}
            for piece, token in list(self._tokens.values()):
                if piece.number not in stop and not (shared and request in piece.requests):
                    continue
                token.cancel()
                if piece.number not in self._running:
                    touched |= self._drop(piece, error)
        known.token.cancel()
        self._report(frozenset(touched), None)

    def _drop(self, piece: Piece, error: TransferError) -> frozenset[str]:
        """A piece that no lane has begun ends at once: its lane may be held up by another for long."""
        del self._tokens[piece.number]
        self._load[self._lane_of.pop(piece.number)] -= total_bytes(piece.runs)
        for request in self._queue.failed(piece):
            known = self._requests.get(request)
            if known is not None and known.error is None:
                known.error = error
        return piece.requests


def _view(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes of our own registered memory, as an array."""
    import ctypes

    view: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return view


def header_runs(scratch_at: int) -> Runs:
    """Runs that read an owner's header: how a new channel is probed."""
    runs, _ = counter_runs(np.empty(0, np.int64), 0, 0, scratch_at, SCRATCH_BYTES)
    return runs


_HEADER = _Check(header_runs(0), np.empty(0, np.int64), np.empty(0, np.int64))
"""What is read when nothing is expected: that the peer is still the one we connected to."""
