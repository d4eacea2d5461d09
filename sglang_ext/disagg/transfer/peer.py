"""The reading (and writing) side of one connection: TRANSFER, and the first half of COMPLETE.

The event loop queues and reports; the lanes move bytes. A lane is a thread: it blocks in a transport
without the GIL, and when the last piece of a request has landed it reads the generations there and then,
without a hop back.

    transfer() ─> queue ─pump─> lane threads ─> landed, verified ─call_soon_threadsafe─> future of the request

The event loop's own thread reads small transfers that do not block (`Channel.inline`, `express`).

Rules: a request's future is resolved exactly once, and not before the queue has forgotten the request or
all of its bytes are in place and verified: the waiting caller may then free or use the local ranges. The
first error of a request is reported.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.errors import (
    CancelledTransferError,
    PeerGoneError,
    RangeError,
    RefusedError,
    TransferDeadlineError,
    TransferError,
)
from sglang_ext.disagg.memory import RegionTable
from sglang_ext.disagg.runs import Runs, survey
from sglang_ext.disagg.transfer.express import NEVER, Express, Transfer
from sglang_ext.disagg.transfer.lanes import Lanes
from sglang_ext.disagg.transfer.peer_state import PeerStats, Phase, Request
from sglang_ext.disagg.transfer.transactions import Batch, Direction, Piece, TransactionQueue
from sglang_ext.disagg.transfer.verify import Expect, Scratch, Verifier, stale_error
from sglang_ext.disagg.transports import CancelToken, Channel, PeerInfo

log = logging.getLogger(__name__)


class Peer:
    """One connected owner.

    channel: how its memory is reached. scratch: where counters land.
    piece_bytes: how much a lane moves at a time. inline_bytes: bytes that the event loop's own thread reads
    at once when no lane is at work, as far as the channel allows it. Belongs to the event loop it was made
    in; not thread-safe.
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
        inline_bytes: int = 0,
    ) -> None:
        self.info = info
        self.channel = channel
        self.stats = PeerStats()
        self._regions = regions
        self._remote_sizes: npt.NDArray[np.int64] = np.array([m.nbytes for m in info.regions], np.int64)
        self._verifier = Verifier(info, channel, regions, scratch, self._remote_sizes)
        self.queue = TransactionQueue(piece_bytes, coalescing=coalescing)
        self._express = Express(channel, self._verifier, self.stats, self.queue)
        self._inline_bytes = min(channel.inline, inline_bytes)
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._requests: dict[str, Request] = {}
        self._pump_scheduled = False
        self._gone: TransferError | None = None
        self._revoked: set[int] = set()
        """Grants under which nothing may be written any more."""
        self._closed = False
        self._lanes = Lanes(
            channel,
            self._lock,
            read=self._read,
            ended=self._ended,
            verify=self._check_generations,
            broke=lambda error: self._loop.call_soon_threadsafe(self.fail, error),
        )

    def __repr__(self) -> str:
        return f"<Peer {self.info.instance} by {self.channel.name} {self.queue!r} gone={self._gone}>"

    @property
    def gone(self) -> TransferError | None:
        """Why nothing more can be read from this peer; None while it can."""
        return self._gone

    @property
    def closed(self) -> bool:
        """Whether it has been closed, or is about to be."""
        return self._closed

    def transfer(
        self,
        request: str,
        runs: Runs,
        *,
        expect: Expect | None = None,
        direction: Direction = Direction.READ,
        grant: tuple[int, int] = (0, 0),
    ) -> None:
        """TRANSFER: queue runs of a request. Posted in this turn of the event loop, merged with the other
        queued transfers.

        Raises:
            RangeError: a run leaves a region of either side. PeerGoneError: the peer is gone. RefusedError:
            it has revoked the grant.
        """
        if self._gone is not None:
            raise PeerGoneError(str(self._gone))
        if direction is Direction.WRITE and grant[1] in self._revoked:
            raise RefusedError("grant", "the receiver has revoked it")
        bad, nbytes = survey(runs, self._remote_sizes, self._regions.sizes)
        if bad >= 0:
            raise RangeError(f"run {bad} {runs[bad].tolist()} leaves its region")
        self._schedule()
        new = Transfer(request, runs, nbytes, expect, direction, grant)
        small = direction is Direction.READ and nbytes <= self._inline_bytes
        if small and not self._requests and self._express.waiting is None:
            self._express.waiting = new
        else:
            self._enqueue(self._express.take())
            self._enqueue(new)

    async def landed(self, request: str, deadline: float) -> None:
        """Queue the request's COMPLETE, and return when all its bytes are in place and their generations
        verified.

        deadline: on the event loop's clock. However this ends, nothing writes to the local ranges after it.

        Raises:
            StaleReadError, TransferDeadlineError, PeerGoneError, PeerProtocolError: discard the bytes.
        """
        alone = self._express.waiting
        if alone is not None and alone.request == request:
            try:
                self._express.read()
            except TransferError as error:
                if self.channel.broken:
                    self.fail(error)
                raise
            return
        self._enqueue(self._express.take())
        with self._lock:
            known = self._known(request)
            ready = self.queue.complete(request)
            if ready and not self._inline_bytes:
                self._verify(request, known, 0)
        if self.channel.ordered and known.checks is None:
            known.checks = self._verifier.prepare(known.expects)
        if ready and self._inline_bytes:
            self._verify_inline(request)
        # At once: the lanes copy while we prepare the verification.
        self._pump()
        cancelled: asyncio.CancelledError | None = None
        if not known.landed.done():
            cancelled = await self._wait(request, known, deadline)
        self._requests.pop(request, None)
        failure = known.landed.exception()
        assert failure is None or isinstance(failure, TransferError)
        self.stats.count(failure)
        if cancelled is not None:
            raise cancelled
        if failure is not None:
            raise failure

    async def _wait(self, request: str, known: Request, deadline: float) -> asyncio.CancelledError | None:
        """Until the request is over; returns a cancellation, which ends it but does not cut the wait."""
        if known.checks is None:
            known.checks = self._verifier.prepare(known.expects)
        late = TransferDeadlineError(f"request {request!r} from {self.info.instance} did not end in time")
        timer = self._loop.call_at(deadline, self._abort, request, late, True)
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
        return cancelled

    async def drop(self, request: str) -> None:
        """Give up a request that will have no COMPLETE; returns when nothing writes to its local ranges."""
        self._enqueue(self._express.take())
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
        self._enqueue(self._express.take())
        for request in list(self._requests):
            self._abort(request, error, True)

    async def stop_writes(self, grant: int) -> None:
        """End every write under a grant, and refuse those to come; returns when none is running."""
        self._revoked.add(grant)
        self._enqueue(self._express.take())
        affected = [request for request, known in self._requests.items() if grant in known.grants]
        waiting = [self._requests[request].landed for request in affected]
        for request in affected:
            self._abort(request, RefusedError("grant", "the receiver has revoked it"), True)
        await asyncio.gather(*waiting, return_exceptions=True)

    async def close(self) -> None:
        """End everything, then release the channel."""
        if self._closed:
            return
        self._closed = True
        self.fail(PeerGoneError("disconnected"))
        await asyncio.to_thread(self._lanes.close)
        self.channel.close()

    def check(self) -> None:
        """Verify the queue, and that all under way is in it."""
        with self._lock:
            self.queue.check()
            assert self._lanes.idle or not self.queue.idle, "a lane moves a piece of no request"

    def _known(self, request: str) -> Request:
        known = self._requests.get(request)
        if known is None:
            known = self._requests[request] = Request(self._loop.create_future())
            # Retrieved by `landed`, or never when the request is dropped before.
            known.landed.add_done_callback(lambda f: f.cancelled() or f.exception())
        return known

    def _enqueue(self, transfer: Transfer | None) -> None:
        if transfer is not None:
            with self._lock:
                known = self._known(transfer.request)
                if transfer.direction is Direction.WRITE:
                    known.grants.add(transfer.grant[1])
                self.queue.transfer(transfer.request, transfer.runs, transfer.direction, transfer.grant)
                if transfer.expect is not None:
                    known.expects.append(transfer.expect)

    def _schedule(self) -> None:
        # One pump per turn of the loop: transfers queued in the same turn are coalesced with each other.
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_scheduled = False
        self._enqueue(self._express.take())
        while True:
            with self._lock:
                batch = self.queue.take()
                if batch is None:
                    return
                self.stats.runs += batch.uncoalesced
                self.stats.transactions += batch.coalesced
                size = sum(piece.nbytes for piece in batch.pieces)
                self.stats.bytes += size
                inline = (
                    size <= self._inline_bytes
                    and self._lanes.idle
                    and batch.pieces[0].direction is Direction.READ
                )
                if not inline:
                    for piece in batch.pieces:
                        self._lanes.put(piece)
            if inline:
                self._read_inline(batch)

    def _read_inline(self, batch: Batch) -> None:
        """Read a small batch here and now; no other callback of the event loop can come between."""
        for piece in batch.pieces:
            error: TransferError | None = None
            try:
                self.channel.read(self.channel.lanes, piece.runs, NEVER)
            except TransferError as failure:
                error = failure
            except Exception as failure:
                log.exception("a read of %s failed", self.info.instance)
                error = PeerGoneError(f"{self.channel.name}: {failure!r}")
                self._gone = self._gone or error
            with self._lock:
                landed = self._settle(piece, error)
            for request in landed:
                self._verify_inline(request)
            if error is not None or self.channel.broken:
                self._report(piece.requests, error)

    def _verify_inline(self, request: str) -> None:
        known = self._requests[request]
        known.phase = Phase.VERIFYING
        self._verified(request, known, self._verifier.verdict_now(request, known.expects))
        self._report((request,), None)

    def _read(self, lane: int, piece: Piece, token: CancelToken) -> None:
        """On a lane: move a piece, and with the last one of a request its counters, if that saves a way."""
        known: Request | None = None
        if self.channel.ordered:
            with self._lock:
                request = self.queue.ends(piece)
                known = self._requests.get(request) if request is not None else None
        if known is None or known.checks is None or len(known.checks) != 1:
            self.channel.read(lane, piece.runs, token)
        else:
            known.stale = self._verifier.read_and_compare(lane, piece.runs, known.checks[0], token)

    def _ended(self, lane: int, piece: Piece, error: TransferError | None) -> None:
        """On a lane: its piece has been moved, or was not."""
        compared: list[tuple[str, Request, int]] = []
        with self._lock:
            for request in self._settle(piece, error):
                known = self._requests[request]
                if known.stale is None:
                    self._verify(request, known, lane)
                else:
                    known.phase = Phase.VERIFYING
                    compared.append((request, known, known.stale))
        for request, known, stale in compared:
            self._verified(request, known, stale_error(request, known.expects, stale))
        self._loop.call_soon_threadsafe(self._report, piece.requests, error)

    def _settle(self, piece: Piece, error: TransferError | None) -> tuple[str, ...]:
        """A piece has ended; returns the requests that have landed by it. Under the lock."""
        if error is None:
            return self.queue.landed(piece)
        for request in self.queue.failed(piece):
            known = self._requests.get(request)
            if known is not None and known.error is None:
                known.error = error
        return ()

    def _verify(self, request: str, known: Request, lane: int) -> None:
        known.phase = Phase.VERIFYING
        self._lanes.check(request, lane)

    def _check_generations(self, lane: int, request: str) -> None:
        known = self._requests.get(request)
        if known is None or known.phase is not Phase.VERIFYING:
            return
        error = known.error
        if error is None:
            error = self._verifier.verdict(request, lane, known.expects, known.checks, known.token)
        self._verified(request, known, error)
        self._loop.call_soon_threadsafe(self._report, (request,), error)

    def _verified(self, request: str, known: Request, error: TransferError | None) -> None:
        with self._lock:
            known.phase = Phase.DONE
            known.error = known.error or error
            if self.queue.state(request) is not None:
                self.queue.acknowledged(request)

    def _report(self, requests: Collection[str], error: TransferError | None) -> None:
        """On the event loop: resolve the futures of requests that are over."""
        for request in requests:
            known = self._requests.get(request)
            if known is None or known.landed.done():
                continue
            with self._lock:
                over = self.queue.state(request) is None and (
                    known.phase is not Phase.VERIFYING or known.error is not None
                )
                failure = known.error
            if over and failure is not None:
                known.landed.set_exception(failure)
            elif over and known.phase is Phase.DONE:
                known.landed.set_result(None)
        if self.channel.broken and self._gone is None:
            self.fail(error or PeerGoneError(f"{self.channel.name}: the channel broke"))

    def _abort(self, request: str, error: TransferError, shared: bool) -> None:
        """End a request. shared: also stop pieces that hold bytes of others, which then fail too."""
        known = self._requests.get(request)
        if known is None or known.landed.done():
            return
        touched = {request}
        with self._lock:
            if known.phase is Phase.DONE:
                return
            known.error = known.error or error
            stop = {p.number for p in self.queue.cancel(request)}
            for piece, token in self._lanes.under_way:
                if piece.number not in stop and not (shared and request in piece.requests):
                    continue
                if self._lanes.stop(piece, token):
                    self._settle(piece, error)
                    touched |= piece.requests
        known.token.cancel()
        self._report(touched, None)
