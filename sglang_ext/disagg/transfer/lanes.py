"""Lanes: the threads of one connection that move bytes. A lane blocks in its transport without the GIL, and
has a thread from its first job on.

    put(piece) ─> queue of the lane with least to do ─> read or write ─> ended(lane, piece, error)
    check(request, lane) ───────────────────────────────────────────> verify(lane, request)

The callbacks run on the lane's thread.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from sglang_ext.disagg.errors import PeerGoneError, TransferError
from sglang_ext.disagg.transfer.transactions import Direction, Piece
from sglang_ext.disagg.transports import CancelToken, Channel

log = logging.getLogger(__name__)

_Job = Piece | str | None
"""A piece to move, a request to verify, or the end."""
VERIFICATION_LOAD = 4096
"""Bytes that a verification counts as: few, but the lane waits for them as for any."""


class Lanes:
    """The lanes of one channel.

    lock: guards these lanes, and also the state that the callbacks guard with it; every method but `close` is
        called under it.
    read: moves a piece of a read. ended: takes a piece that was moved, or was not; called without the lock,
        exactly once per piece that was put and not dropped.
    verify: takes a request. broke: called with an error that none of them expected.
    """

    def __init__(
        self,
        channel: Channel,
        lock: threading.Lock,
        *,
        read: Callable[[int, Piece, CancelToken], None],
        ended: Callable[[int, Piece, TransferError | None], None],
        verify: Callable[[int, str], None],
        broke: Callable[[PeerGoneError], object],
    ) -> None:
        self._channel = channel
        self._lock = lock
        self._read = read
        self._on_ended = ended
        self._on_verify = verify
        self._on_broke = broke
        self._tokens: dict[int, tuple[Piece, CancelToken]] = {}
        self._running: set[int] = set()
        self._lane_of: dict[int, int] = {}
        self._queues: list[queue.SimpleQueue[_Job]] = [queue.SimpleQueue() for _ in range(channel.lanes)]
        self._load = [0] * channel.lanes
        self._threads: dict[int, threading.Thread] = {}

    @property
    def under_way(self) -> list[tuple[Piece, CancelToken]]:
        """Pieces that were put and have not ended."""
        return list(self._tokens.values())

    @property
    def idle(self) -> bool:
        """Whether no piece is under way."""
        return not self._tokens

    def put(self, piece: Piece) -> None:
        """Have a piece moved."""
        self._tokens[piece.number] = (piece, CancelToken())
        lane = self._load.index(min(self._load))
        self._load[lane] += piece.nbytes
        self._lane_of[piece.number] = lane
        self._give(lane, piece)

    def check(self, request: str, lane: int) -> None:
        """Have a lane verify a request, after the work that it already has."""
        self._load[lane] += VERIFICATION_LOAD
        self._give(lane, request)

    def stop(self, piece: Piece, token: CancelToken) -> bool:
        """Cancel a piece. True when no lane has begun it, and so it has ended: its lane may be held up by
        another for long.
        """
        token.cancel()
        if piece.number in self._running:
            return False
        self._forget(piece)
        return True

    def close(self) -> None:
        """End the threads, after the work that they have. Blocks."""
        with self._lock:
            threads = dict(self._threads)
        for lane, thread in threads.items():
            self._queues[lane].put(None)
            thread.join()

    def _give(self, lane: int, job: _Job) -> None:
        self._queues[lane].put(job)
        if lane not in self._threads:
            name = f"kv-{self._channel.name}-{lane}"
            self._threads[lane] = threading.Thread(target=self._lane, args=(lane,), name=name, daemon=True)
            self._threads[lane].start()

    def _lane(self, lane: int) -> None:
        jobs = self._queues[lane]
        while (job := jobs.get()) is not None:
            try:
                if isinstance(job, Piece):
                    self._move(lane, job)
                else:
                    try:
                        self._on_verify(lane, job)
                    finally:
                        with self._lock:
                            self._load[lane] -= VERIFICATION_LOAD
            except Exception as error:
                # A lane must not die silently: whatever it was, the peer is unusable, and says so.
                log.exception("lane %d of %s failed", lane, self._channel.name)
                self._on_broke(PeerGoneError(f"a lane failed: {error!r}"))

    def _move(self, lane: int, piece: Piece) -> None:
        with self._lock:
            if piece.number not in self._tokens:
                return  # dropped while it waited for this lane
            token = self._tokens[piece.number][1]
            self._running.add(piece.number)
        error: TransferError | None = None
        try:
            if piece.direction is Direction.READ:
                self._read(lane, piece, token)
            else:
                self._channel.write(lane, piece.runs, token, piece.grant)
        except TransferError as failure:
            error = failure
        except BaseException as failure:
            error = PeerGoneError(f"{self._channel.name}: {failure!r}")
            raise
        finally:
            with self._lock:
                self._running.discard(piece.number)
                self._forget(piece)
            self._on_ended(lane, piece, error)

    def _forget(self, piece: Piece) -> None:
        del self._tokens[piece.number]
        self._load[self._lane_of.pop(piece.number)] -= piece.nbytes
