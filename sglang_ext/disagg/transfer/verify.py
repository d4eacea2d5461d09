"""The end of a read: whether the blocks still had the offered generations when all of their bytes had landed.

Counters are read one-sidedly, after the data. Where the owner's control region is mapped here (`shm`, and
`cma` too, since the control region is always shared memory), they are compared where they lie; else the
transport reads them into scratch space like any other bytes. The header, which shows that the owner is still
the process that we connected to, is always read by the transport that read the data: a mapping outlives its
owner.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.errors import PeerGoneError, RangeError, StaleReadError, TransferError
from sglang_ext.disagg.generations import (
    HEADER_BYTES,
    changed,
    counter_runs,
    counters_at_a_time,
    header,
)
from sglang_ext.disagg.memory import RegionTable
from sglang_ext.disagg.runs import LOCAL, REMOTE, Ids, Runs, outside
from sglang_ext.disagg.transports import CancelToken, Channel, PeerInfo

SCRATCH_BYTES = 64 + 1024 * (1024 + 8)
"""One slot: 1024 counters at a time by a transport that reads up to 1024 bytes between two of them."""


class Scratch:
    """Places in local region 0 where counters land, shared by all connections of an endpoint.

    A lane that verifies holds one of `slots` places; when all are held it waits, at most as long as it takes
    to find that a peer is gone. One more, for a header alone, belongs to the event loop, which must not wait.
    """

    def __init__(self, first: int, slots: int) -> None:
        self.slots = slots
        self.loops_own = first
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for i in range(slots):
            self._free.put(first + HEADER_BYTES + i * SCRATCH_BYTES)

    @staticmethod
    def nbytes(slots: int) -> int:
        """Bytes that so many slots need."""
        return HEADER_BYTES + slots * SCRATCH_BYTES

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


@dataclass(frozen=True, slots=True)
class Expect:
    """The condition that must still hold after the read: these blocks have these generations.

    table_at: offset of the pool's counters in the owner's region 0.
    """

    table_at: int
    blocks: Ids
    generations: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Check:
    """One read of counters: its runs and where each counter lands, both relative to a scratch slot."""

    runs: Runs
    where: npt.NDArray[np.int64]
    generations: npt.NDArray[np.int64]


class Verifier:
    """Compares generations of one connected owner. Thread-safe: a lane's scratch and socket are its own.

    remote_sizes: bytes of the owner's regions.
    """

    def __init__(
        self,
        info: PeerInfo,
        channel: Channel,
        regions: RegionTable,
        scratch: Scratch,
        remote_sizes: npt.NDArray[np.int64],
    ) -> None:
        self._instance = info.instance
        self._header = header(info.epoch)
        self._channel = channel
        self._regions = regions
        self._scratch = scratch
        self._remote_sizes = remote_sizes
        self._counters = channel.counters
        own = scratch.loops_own
        self._own_runs = header_runs(own)
        self._own = _view(int(regions.bases[0]) + own, HEADER_BYTES)

    def prepare(self, expects: Sequence[Expect]) -> list[Check]:
        """The reads of counters for `expects`, as many at a time as a scratch slot holds; may be done before
        the data have landed. Without any there is still the header, and with a mapped table only that.
        """
        checks: list[Check] = []
        if self._counters is None:
            gap = self._channel.gap
            step = counters_at_a_time(SCRATCH_BYTES, gap)
            for expect in expects:
                for start in range(0, expect.blocks.size, step):
                    blocks = expect.blocks[start : start + step]
                    runs, where = counter_runs(blocks, expect.table_at, 0, 0, SCRATCH_BYTES, gap)
                    checks.append(Check(runs, where, expect.generations[start : start + step]))
        return checks or [_HEADER]

    def verdict(
        self,
        request: str,
        lane: int,
        expects: Sequence[Expect],
        checks: Sequence[Check] | None,
        token: CancelToken,
    ) -> TransferError | None:
        """Why the bytes of a request have to be discarded; None when they match the offer.

        checks: the result of `prepare` for `expects`. Blocks on the transport. A RangeError says that the
        offer names blocks outside of the generation table.
        """
        try:
            stale = 0
            for check in checks or self.prepare(expects):
                stale += self._differing(lane, check, token)
            return stale_error(request, expects, stale + self._mapped(expects))
        except TransferError as error:
            return error

    def verdict_now(self, request: str, expects: Sequence[Expect]) -> TransferError | None:
        """As `verdict`, on the event loop, for a channel with mapped counters: waits for no slot, no peer."""
        try:
            self._channel.read(self._channel.lanes, self._own_runs, _NEVER)
            self._same_epoch(self._own)
            return stale_error(request, expects, self._mapped(expects))
        except TransferError as error:
            return error

    def read_and_compare(self, lane: int, runs: Runs, check: Check, token: CancelToken) -> int:
        """Read the data, then the counters of `check`, with one way to the owner and back; returns how many
        blocks are stale. Raises the errors that `verdict` returns.
        """
        return self._differing(lane, check, token, runs)

    def _mapped(self, expects: Sequence[Expect]) -> int:
        stale = 0
        if self._counters is not None:
            for expect in expects:
                found = changed(self._counters, expect.table_at, expect.blocks, expect.generations)
                if found < 0:
                    raise RangeError(_OUTSIDE)
                stale += found
        return stale

    def _differing(self, lane: int, check: Check, token: CancelToken, data: Runs | None = None) -> int:
        with self._scratch.slot() as at:
            runs = check.runs.copy()
            runs[:, LOCAL + 1] += at
            if outside(runs, REMOTE, self._remote_sizes) >= 0:
                raise RangeError(_OUTSIDE)
            if data is None:
                self._channel.read(lane, runs, token)
            else:
                self._channel.read_then(lane, data, runs, token)
            memory = _view(int(self._regions.bases[0]) + at, SCRATCH_BYTES)
            self._same_epoch(memory)
            found = memory.view(np.int64)[check.where >> 3]
            return int((found != check.generations).sum())

    def _same_epoch(self, memory: npt.NDArray[np.uint8]) -> None:
        if memory[:HEADER_BYTES].tobytes() != self._header:
            raise PeerGoneError(f"{self._instance} restarted: its memory has another epoch")


def stale_error(request: str, expects: Sequence[Expect], stale: int) -> StaleReadError | None:
    """The error of a request of which `stale` blocks were changed; None for 0."""
    return StaleReadError(request, stale, sum(e.blocks.size for e in expects)) if stale else None


def header_runs(scratch_at: int) -> Runs:
    """Runs that read an owner's header: how a new channel is probed."""
    runs, _ = counter_runs(np.empty(0, np.int64), 0, 0, scratch_at, SCRATCH_BYTES)
    return runs


def _view(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes of our own registered memory, as an array."""
    view: npt.NDArray[np.uint8] = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    return view


_HEADER = Check(header_runs(0), np.empty(0, np.int64), np.empty(0, np.int64))
"""The check without expectations: the peer is still the process that we connected to."""
_NEVER = CancelToken()
_OUTSIDE = "the offer names blocks outside of the peer's generation table"
