"""Reading from a disk tier: pin, read layer by layer straight into place, verify, unpin."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_ext.tiered_store.disk.files import Vectors, can_be_direct, read_fully
from sglang_ext.tiered_store.disk.index import IndexFailedError
from sglang_ext.tiered_store.disk.segment_format import FormatError, checksum
from sglang_ext.tiered_store.disk.state import DiskState, Run
from sglang_ext.tiered_store.tier import (
    BlockMemory,
    Get,
    Ids,
    LayerRead,
    Outcome,
    check_get_layer,
    check_names,
)


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Neighbouring blocks of a prefix that lie in one run. start: the first one's place in the prefix."""

    run: Run
    start: int
    positions: tuple[int, ...]

    def strays(self, keys: Sequence[bytes], found: Sequence[bytes]) -> int | None:
        """The first block of which the run's header (`found`) says that it is another; None when there is
        none.
        """
        for i, position in enumerate(self.positions):
            if found[position] != keys[self.start + i]:
                return i
        return None


@dataclass(slots=True, eq=False)
class DiskGet(Get):
    """A get from disk. pinned: blocks at the start, of which `blocks` are still whole."""

    pieces: tuple[Piece, ...]
    pinned: int
    lock: threading.Lock = field(default_factory=threading.Lock)
    why: Outcome = Outcome.ABSENT
    """Why `blocks` is less than `pinned`."""
    open: bool = True


class DiskReader:
    """The reading half of a disk tier."""

    def __init__(self, state: DiskState) -> None:
        self._state = state

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        return sum(len(piece.positions) for piece in self._find(namespace, keys, pin=False))

    def held(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        """See `BlockTier.held`: all keys in one transaction of the index."""
        state = self._state
        check_names(namespace, keys[:1])
        if not keys or state.index.closed:
            return [False] * len(keys)
        try:
            found = state.index.find(namespace, keys)
        except IndexFailedError as error:
            state.note_index_failure(error)
            return [False] * len(keys)
        with state.lock:
            return [place is not None and self._serves(namespace, *place) for place in found]

    def _serves(self, namespace: bytes, number: int, position: int) -> bool:
        """Whether a run can be read and has the position. With the lock."""
        run = self._state.readable(number)
        return run is not None and position < run.row.blocks and run.row.namespace == namespace

    def _find(self, namespace: bytes, keys: Sequence[bytes], *, pin: bool) -> list[Piece]:
        state = self._state
        check_names(namespace, keys[:1])
        if not keys or state.index.closed:
            return []
        try:
            found = state.index.find_prefix(namespace, keys)
        except IndexFailedError as error:
            state.note_index_failure(error)
            return []
        pieces: list[Piece] = []
        with state.lock:
            for start, number, positions in _by_run(found):
                run = state.readable(number)
                if run is None or max(positions) >= run.row.blocks or run.row.namespace != namespace:
                    break
                if pin and not state.segments.hold(run.segment):
                    break
                pieces.append(Piece(run, start, positions))
            if pin:
                for piece in pieces:
                    piece.run.pins += 1
                    state.pins += len(piece.positions)
        return pieces

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> DiskGet:
        pieces = self._find(namespace, keys, pin=True)
        blocks = sum(len(piece.positions) for piece in pieces)
        with self._state.lock:
            self._state.counters.got[Outcome.ABSENT] += len(keys) - blocks
        return DiskGet(namespace, tuple(keys), blocks, tuple(pieces), blocks)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        state = self._state
        check_get_layer(get, layer, memory, ids, state.layout)
        mine = self._own(get)
        vectors = memory.vectors(layer, ids)
        wanted = min(len(ids), mine.blocks)
        for piece in mine.pieces:
            if piece.start >= wanted:
                break
            count = min(len(piece.positions), wanted - piece.start)
            good, outcome = self._read_piece(mine, piece, count, layer, memory, vectors, ids)
            if outcome is not Outcome.DONE:
                self._fail(mine, piece, good, outcome)
                return LayerRead(min(mine.blocks, len(ids)), outcome)
        wanted = min(wanted, mine.blocks)  # another layer may have failed in the meantime
        return LayerRead(wanted, Outcome.DONE if wanted == len(ids) else mine.why)

    def _read_piece(
        self,
        get: DiskGet,
        piece: Piece,
        count: int,
        layer: int,
        memory: BlockMemory,
        vectors: Vectors,
        ids: Ids,
    ) -> tuple[int, Outcome]:
        """Read and verify one layer of the first `count` blocks of a piece; how many are good, and why no
        more.
        """
        state = self._state
        try:
            header = state.header(piece.run)
            stray = piece.strays(get.keys, header.keys)
            wanted, count = count, min(count, len(piece.positions) if stray is None else stray)
            for first, last in _contiguous(piece.positions[:count]):
                offset = piece.run.row.offset + header.shape.offset(layer, piece.positions[first])
                part = vectors[piece.start + first : piece.start + last]
                got = read_fully(state.files, self._fd(piece.run, part, offset), part, offset)
                whole = got // state.layer_sizes[layer]
                good = self._verify(piece, first, first + whole, header.sums[layer], layer, memory, ids)
                if good < last - first:
                    return first + good, Outcome.DAMAGED
                with state.lock:
                    state.counters.bytes_read += got
        except OSError as error:
            state.log_once(
                "read",
                "cannot read segment %s: %s. Its blocks are computed again; see to the disk if this repeats",
                piece.run.segment.path,
                error,
            )
            return 0, Outcome.IO_ERROR
        except FormatError as error:
            state.log_once(
                "header", "run %d in %s: %s; dropped", piece.run.row.run, piece.run.segment.path, error
            )
            return -1, Outcome.DAMAGED
        # Fewer: the index is damaged and leads to another block.
        return count, Outcome.DONE if count == wanted else Outcome.DAMAGED

    def _fd(self, run: Run, vectors: Vectors, offset: int) -> int:
        """Past the page cache where that can be done and the bytes are not in it: recently written or read
        bytes come from memory in either mode.
        """
        direct, buffered = run.segment.direct_fd, run.segment.fd
        if direct < 0 or not can_be_direct(vectors, offset):
            return buffered
        cached = self._state.files.in_page_cache(buffered, offset, int(vectors[:, 1].sum()))
        return buffered if cached else direct

    def _verify(
        self, piece: Piece, first: int, last: int, sums: np.ndarray, layer: int, memory: BlockMemory, ids: Ids
    ) -> int:
        """How many of the blocks [first, last) of a piece have the bytes that they should have."""
        rows = memory.rows(layer, ids[piece.start + first : piece.start + last])
        for count, (row, position) in enumerate(zip(rows, piece.positions[first:last], strict=True)):
            if checksum(row.data) != int(sums[position]):
                return count
        return last - first

    def _fail(self, get: DiskGet, piece: Piece, good: int, outcome: Outcome) -> None:
        """Shorten a get to its intact blocks, and make sure that later lookups do not find the bad part."""
        state = self._state
        end = piece.start + max(good, 0)
        with get.lock:
            if end >= get.blocks:
                return  # another layer has failed before this block
            get.blocks = end
            get.why = outcome
        if outcome is Outcome.IO_ERROR:
            with state.lock:
                piece.run.quiet_until = state.clock.monotonic() + state.config.retry_seconds
        elif good < 0:
            state.forget_runs({piece.run.row.run})
        else:
            state.log_once(
                "checksum",
                "segment %s: bytes do not verify; the block is dropped and computed again. If this repeats, "
                "run `sglang-ext doctor --kv-disk-path %s` and see to the disk",
                piece.run.segment.path,
                state.config.path,
            )
            state.forget_blocks(get.namespace, [get.keys[end]])

    def complete_get(self, get: Get) -> None:
        state = self._state
        mine = self._own(get)
        now = state.clock.wall()
        used: set[Run] = set()
        with state.lock:
            mine.open = False
            state.counters.got[Outcome.DONE] += mine.blocks
            state.counters.got[mine.why] += mine.pinned - mine.blocks
            state.pins -= mine.pinned
            for piece in mine.pieces:
                run = piece.run
                run.pins -= 1
                run.segment.readers -= 1
                state.segments.finish(run.segment)
                if piece.start < mine.blocks:
                    used.add(run)
            for run in used:
                run.use.last = max(run.use.last, now)
                run.use.hits += 1
                state.used.add(run.row.run)

    def _own(self, get: Get) -> DiskGet:
        if not isinstance(get, DiskGet) or not get.open:
            raise ValueError("this get is not one of this tier, or has ended")
        return get


def _by_run(found: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Group neighbours of the same run: (place of the first, run, positions)."""
    start = 0
    while start < len(found):
        end = start
        while end < len(found) and found[end][0] == found[start][0]:
            end += 1
        yield start, found[start][0], tuple(position for _, position in found[start:end])
        start = end


def _contiguous(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of indices whose positions follow each other."""
    first = 0
    for i in range(1, len(positions) + 1):
        if i == len(positions) or positions[i] != positions[i - 1] + 1:
            yield first, i
            first = i
