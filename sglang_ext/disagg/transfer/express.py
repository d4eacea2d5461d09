"""The short way of a small read: one transfer and its COMPLETE, and nothing else to merge them with.

Queue, lanes and futures cost as much as a copy of some MiB. So a small transfer that comes while nothing is
there waits outside of the queue. If its own COMPLETE is the next thing to come, it is read here and now, by
the event loop's own thread; whatever else comes first has it queued like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_ext.disagg.errors import TransferError
from sglang_ext.disagg.runs import Runs, coalesce
from sglang_ext.disagg.transfer.peer_state import PeerStats
from sglang_ext.disagg.transfer.transactions import Direction, TransactionQueue
from sglang_ext.disagg.transfer.verify import Expect, Verifier
from sglang_ext.disagg.transports import CancelToken, Channel

NEVER = CancelToken()
"""For reads that are over before anything could cancel them."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """A transfer that is not queued yet. nbytes: of all runs. grant: of a write."""

    request: str
    runs: Runs
    nbytes: int
    expect: Expect | None
    direction: Direction
    grant: tuple[int, int]


class Express:
    """At most one transfer of a connection, on the event loop.

    waiting: the transfer, None when there is none. stats: where it is counted. queue: the queue that it
        bypasses.
    """

    def __init__(
        self, channel: Channel, verifier: Verifier, stats: PeerStats, queue: TransactionQueue
    ) -> None:
        self._channel = channel
        self._verifier = verifier
        self._stats = stats
        self._queue = queue
        self.waiting: Transfer | None = None

    def take(self) -> Transfer | None:
        """Hand the waiting transfer back to the queue; None when there is none."""
        taken, self.waiting = self.waiting, None
        return taken

    def read(self) -> None:
        """Read the waiting transfer, and compare its generations. Blocks for as long as the bytes take.

        Raises:
            StaleReadError, PeerGoneError: discard the bytes.
        """
        alone = self.take()
        assert alone is not None
        runs = coalesce(alone.runs)[0] if self._queue.coalescing else alone.runs
        stats, lane = self._stats, self._channel.lanes
        stats.runs += alone.runs.shape[0]
        stats.transactions += runs.shape[0]
        stats.bytes += alone.nbytes
        try:
            self._channel.read(lane, runs, NEVER)
        except TransferError:
            stats.failed += 1
            raise
        expects = () if alone.expect is None else (alone.expect,)
        error = self._verifier.verdict_now(alone.request, expects)
        stats.count(error)
        if error is not None:
            raise error
