"""Generations: how a reader verifies that the bytes of a one-sided read are the published bytes.

Each block of a pool has a 64-bit counter in memory that peers may read. It is a sequence lock with one
writer, the owner, and readers that never write:

    even   sealed: the bytes are complete and do not change while the number stays
    odd    open: the bytes may change

    owner    open(b): counter odd, THEN the bytes may change; bytes written, THEN seal(b): counter even again
    reader   knows the even number g from the offer; reads all bytes; when all have landed, reads the counter
             one-sidedly; equal to g: the bytes are those of generation g; anything else: discard

Why that is enough. Suppose one byte that the reader took was written after generation g. The owner stored the
counter before that byte (`open` ends with a full fence, and the write of the bytes starts after it). The
reader read the counter after that byte (the transport's `read` has returned, so the loads were done). So
the reader sees the counter that `open` wrote, or a later one; counters only grow; it differs from g.
docs/transfer.md says for each transport why "returned" means "loaded".

A lease alone would not do: it ends by the owner's clock, and a reader that was suspended does not notice.

The table has a header with the owner's epoch, so that a reader can tell a restarted owner, or another
process that took over its pid, from the owner it connected to. A header that does not match means that the
owner is gone.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_ext.compiled import fence, kernel
from sglang_ext.disagg.errors import RangeError
from sglang_ext.disagg.runs import RUN_COLUMNS, Ids, Runs

HEADER_BYTES: Final = 64
MAGIC: Final = b"KVXGEN01"
EPOCH_BYTES: Final = 16
COUNTER_BYTES: Final = 8


def header(epoch: bytes) -> bytes:
    """The first HEADER_BYTES of an owner's control region."""
    if len(epoch) != EPOCH_BYTES:
        raise ValueError(f"an epoch has {EPOCH_BYTES} bytes, got {len(epoch)}")
    return (MAGIC + epoch).ljust(HEADER_BYTES, b"\0")


@kernel
def _bump(counters, blocks, parity):  # type: ignore[no-untyped-def]
    """Add one to each counter whose lowest bit is not `parity`; returns the first block that had it, or
    -1.
    """
    for i in range(blocks.shape[0]):
        if counters[blocks[i]] & 1 == parity:
            return blocks[i]
    for i in range(blocks.shape[0]):
        counters[blocks[i]] += 1
    return -1


class GenerationTable:
    """The counters of one pool, in memory that the caller owns and registers.

    counters: int64, shape (blocks,), a view of the owner's control region. All blocks start open (1): nothing
    has been written yet.
    """

    def __init__(self, counters: npt.NDArray[np.int64]) -> None:
        if counters.dtype != np.int64 or counters.ndim != 1 or not counters.flags.c_contiguous:
            raise ValueError("generation counters must be a contiguous int64 vector")
        self._counters = counters
        self._counters[:] = 1
        # Loads the compiled loops before they are needed.
        none = np.empty(0, np.int64)
        _bump(self._counters, none, 0)
        changed(none, HEADER_BYTES, none, none)

    def __len__(self) -> int:
        return int(self._counters.shape[0])

    def __repr__(self) -> str:
        sealed = int((self._counters & 1 == 0).sum())
        return f"<GenerationTable sealed={sealed} open={len(self) - sealed}>"

    def open(self, blocks: Ids) -> None:
        """Announce that the bytes of `blocks` are about to change. Returns before any of them may.

        Raises:
            RangeError: an id is out of range, named twice, or already open.
        """
        self._move(blocks, 1)
        fence()

    def seal(self, blocks: Ids) -> npt.NDArray[np.int64]:
        """Announce that the bytes of `blocks` are written; returns their generations, to be published."""
        fence()
        blocks = self._move(blocks, 0)
        generations: npt.NDArray[np.int64] = self._counters[blocks]
        return generations

    def current(self, blocks: Ids) -> npt.NDArray[np.int64]:
        """The counters of `blocks` now."""
        counters: npt.NDArray[np.int64] = self._counters[self._valid(blocks)]
        return counters

    def is_sealed(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        """A mask of the `blocks` that may be published."""
        sealed: npt.NDArray[np.bool_] = self._counters[self._valid(blocks)] & 1 == 0
        return sealed

    def check(self) -> None:
        """Verify the table: counters are positive (they start at 1 and only grow)."""
        if len(self) and int(self._counters.min()) < 1:
            raise AssertionError("a generation counter is not positive: something else wrote to the table")

    def _valid(self, blocks: Ids) -> Ids:
        blocks = np.asarray(blocks, np.int64)
        if blocks.size and (int(blocks.min()) < 0 or int(blocks.max()) >= len(self)):
            raise RangeError(f"block ids must lie in [0, {len(self)})")
        return blocks

    def _move(self, blocks: Ids, parity: int) -> Ids:
        blocks = self._valid(blocks)
        if np.unique(blocks).size != blocks.size:
            raise RangeError("a block is named twice")
        bad = _bump(self._counters, blocks, parity)
        if bad >= 0:
            raise RangeError(f"block {bad} is already {'open' if parity else 'sealed'}")
        return blocks


def counter_runs(
    blocks: Ids, table_at: int, scratch_region: int, scratch_at: int, scratch_bytes: int, gap: int = 0
) -> tuple[Runs, npt.NDArray[np.int64]]:
    """Runs that read the header and the counters of `blocks` into a scratch region.

    table_at: offset of the pool's first counter in the owner's control region, which is region 0.
    gap: bytes between two counters up to which they are read in one run, since the transport moves so many in
        the time that another run takes; 0 never sorts.
    Returns the runs, and the offset in the scratch region where each block's counter will lie; the header
    lies at `scratch_at`.

    Raises:
        RangeError: the scratch space is too small; ask for the counters in parts (see `counters_at_a_time`).
    """
    if blocks.size == 0:
        return np.array([(0, 0, scratch_region, scratch_at, HEADER_BYTES)], np.int64), blocks
    low = int(blocks.min())
    span = (int(blocks.max()) - low + 1) * COUNTER_BYTES
    if span <= blocks.size * (gap + COUNTER_BYTES):
        first = np.array([low * COUNTER_BYTES], np.int64)
        sizes = np.array([span], np.int64)
        places = np.array([HEADER_BYTES], np.int64)
        where = (scratch_at + HEADER_BYTES) + (blocks - low) * COUNTER_BYTES
    elif gap == 0:
        first = blocks * COUNTER_BYTES
        sizes = np.full(blocks.size, COUNTER_BYTES, np.int64)
        places = HEADER_BYTES + np.arange(blocks.size, dtype=np.int64) * COUNTER_BYTES
        where = scratch_at + places
    else:
        order = np.argsort(blocks, kind="stable")
        ordered = blocks[order] * COUNTER_BYTES
        new = np.diff(ordered, prepend=-(gap + COUNTER_BYTES + 1)) > gap + COUNTER_BYTES
        starts = np.flatnonzero(new)
        first = ordered[starts]
        sizes = ordered[np.append(starts[1:], ordered.size) - 1] - first + COUNTER_BYTES
        places = HEADER_BYTES + np.cumsum(sizes) - sizes
        run_of = np.cumsum(new) - 1
        where = np.empty(blocks.size, np.int64)
        where[order] = scratch_at + places[run_of] + (ordered - first[run_of])
    if HEADER_BYTES + int(sizes.sum()) > scratch_bytes:
        raise RangeError(f"{blocks.size} counters need {int(sizes.sum())} bytes, got {scratch_bytes}")
    runs = np.empty((sizes.size + 1, RUN_COLUMNS), np.int64)
    runs[0] = (0, 0, scratch_region, scratch_at, HEADER_BYTES)
    runs[1:, 0], runs[1:, 1] = 0, table_at + first
    runs[1:, 2], runs[1:, 3], runs[1:, 4] = scratch_region, scratch_at + places, sizes
    return runs, where


@kernel
def _changed(counters, first, blocks, generations):  # type: ignore[no-untyped-def]
    found = 0
    for i in range(blocks.shape[0]):
        k = first + blocks[i]
        if blocks[i] < 0 or k < 0 or k >= counters.shape[0]:
            return -1
        if counters[k] != generations[i]:
            found += 1
    return found


def changed(
    counters: npt.NDArray[np.int64], table_at: int, blocks: Ids, generations: npt.NDArray[np.int64]
) -> int:
    """How many of `blocks` have another counter now than `generations`; -1 when one lies outside.

    counters: an owner's control region, mapped here. table_at: offset of the pool's first counter, in bytes.
    The caller has fenced: the data were loaded before.
    """
    if table_at < HEADER_BYTES or table_at % COUNTER_BYTES or blocks.size != generations.size:
        return -1
    return int(_changed(counters, table_at // COUNTER_BYTES, blocks, generations))


def counters_at_a_time(scratch_bytes: int, gap: int) -> int:
    """How many counters `counter_runs` can always read with so much scratch; at least one."""
    return max(1, (scratch_bytes - HEADER_BYTES) // (gap + COUNTER_BYTES))
