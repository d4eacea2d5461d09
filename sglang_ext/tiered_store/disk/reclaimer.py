"""Making room in a disk tier: drop the least valuable segments, after moving their most valuable runs out.

Moved runs are written, synced and committed in the same transaction that forgets the old segment; the old
file goes after that. So no block is ever nowhere, and a crash in between leaves either the old state or the
new.
"""

from __future__ import annotations

import numpy as np

from sglang_ext.tiered_store.disk.files import read_fully, write_bytes, write_fully
from sglang_ext.tiered_store.disk.index import Change, IndexFailedError
from sglang_ext.tiered_store.disk.index_rows import RunRow, RunUse
from sglang_ext.tiered_store.disk.reclaim import RunFacts, SegmentFacts, Victim, choose_victims
from sglang_ext.tiered_store.disk.segment_format import (
    FormatError,
    RunHeader,
    RunShape,
    checksum,
    encode_run_header,
)
from sglang_ext.tiered_store.disk.segments import Segment
from sglang_ext.tiered_store.disk.state import DiskState, Run

_SPARE_PART = 64
"""Fraction of the limit that is freed beyond the requested bytes."""
_INDEX_BYTES = 256 << 10
"""Bytes that a change of the index may need on a full disk: LMDB writes each page that it changes anew."""


class Reclaimer:
    """Called under the tier's `write_lock`."""

    def __init__(self, state: DiskState) -> None:
        self._state = state

    def make_room(self, need: int) -> bool:
        """Bring the segments down so far that `need` bytes more stay within the limit. Whether that
        succeeded.
        """
        state = self._state
        config = state.config
        while state.segments.used_bytes + need > config.soft_limit_bytes and state.segments.drop_foreign():
            pass
        if state.segments.used_bytes + need <= config.soft_limit_bytes:
            return True
        # Weighing all runs costs time, so some room more than is needed is made at once.
        target = config.soft_limit_bytes - need - config.limit_bytes // _SPARE_PART
        for _ in range(len(state.segments.by_number) + 1):
            excess = state.segments.used_bytes - target
            left = max(0, config.limit_bytes - state.segments.used_bytes)
            victims = choose_victims(self._facts(), excess, state.clock.wall(), room_for_moves=left)
            if excess <= 0 or not victims or not all(self._drop(victim) for victim in victims):
                break
        return state.segments.used_bytes + need <= config.soft_limit_bytes

    def free_disk(self, need: int) -> bool:
        """The file system is full below our own limit: give `need` bytes back to it, and some for the index.

        Whether anything was given back.
        """
        state = self._state
        need += _INDEX_BYTES
        if state.segments.drop_foreign() >= need:
            return True
        victims = choose_victims(self._facts(), need, state.clock.wall())
        dropped = [self._drop(victim, emergency=True) for victim in victims]
        if any(dropped):
            state.log_once(
                "shrink",
                "the disk of %s is full: %d segments of older blocks were given up. Free space there, or "
                "make --kv-disk-size smaller",
                state.config.path,
                sum(dropped),
            )
        return any(dropped)

    def _facts(self) -> list[SegmentFacts]:
        state = self._state
        with state.lock:
            everything = list(state.runs.items())
            segments = list(state.segments.by_number.values())
        runs: dict[int, list[RunFacts]] = {}
        for number, run in everything:
            facts = RunFacts(
                number, run.row.length, run.use.alive / run.row.blocks, run.use.last, run.use.hits
            )
            runs.setdefault(run.row.segment, []).append(facts)
        return [SegmentFacts(s.number, s.end, s.busy, tuple(runs.get(s.number, ()))) for s in segments]

    def _drop(self, victim: Victim, *, emergency: bool = False) -> bool:
        """Drop one segment. In an emergency the file goes first: the index may need its room to be
        written.
        """
        state = self._state
        with state.lock:
            segment = state.segments.by_number[victim.segment]
            if segment.busy and not emergency:
                return False  # a read began since it was chosen
            segment.retired = True
            if state.segments.active is segment:
                state.segments.active = None
            doomed = {number: run for number, run in state.runs.items() if run.segment is segment}
            before = sum(run.use.alive for run in doomed.values())
        added = (
            [] if emergency else self._move([doomed[number] for number in victim.move if number in doomed])
        )
        change = Change(replace=set(doomed), add=[(row, header.keys) for row, header, _ in added])
        if emergency:
            self._unlink(segment)
        try:
            alive = state.commit(change)
        except IndexFailedError as error:
            state.note_index_failure(error)
            self._end_moves(added, keep=False)
            if emergency:
                with state.lock:  # the rows lead nowhere now; the next start drops them
                    for number in doomed:
                        state.runs.pop(number, None)
            return emergency
        self._end_moves(added, keep=True)
        for row, header, target in added:
            with state.lock:
                if alive[row.run]:
                    old = max(
                        (run.use for run in doomed.values() if run.row.run in victim.move),
                        key=lambda use: use.last,
                    )
                    state.runs[row.run] = Run(row, RunUse(old.last, old.hits // 2, alive[row.run]), target)
            state.remember_header(row.run, header)
        moved = sum(alive[row.run] for row, _, _ in added)
        with state.lock:
            state.counters.moved += moved
            state.counters.evicted += before - moved
        state.step("index_dropped")
        if not emergency:
            self._unlink(segment)
        state.step("unlinked")
        return True

    def _unlink(self, segment: Segment) -> None:
        state = self._state
        with state.lock:
            state.segments.remove(segment)

    def _end_moves(self, added: list[tuple[RunRow, RunHeader, Segment]], *, keep: bool) -> None:
        state = self._state
        with state.lock:
            for row, _, target in added:
                state.segments.release(target, row.offset, row.length, keep=keep)

    def _move(self, runs: list[Run]) -> list[tuple[RunRow, RunHeader, Segment]]:
        """Copy the living blocks of runs to the newest segment, synced. Runs that cannot be copied are left
        out."""
        added: list[tuple[RunRow, RunHeader, Segment]] = []
        for run in runs:
            try:
                copy = self._copy(run)
            except (OSError, FormatError, IndexFailedError):
                continue
            if copy is not None:
                added.append(copy)
        self._state.step("moved")
        return added

    def _copy(self, run: Run) -> tuple[RunRow, RunHeader, Segment] | None:
        state = self._state
        header = state.header(run)
        places = state.index.find(run.row.namespace, header.keys)
        alive = [i for i, place in enumerate(places) if place == (run.row.run, i)]
        if not alive:
            return None
        shape = RunShape.of(state.layer_sizes, len(alive))
        with state.lock:
            target, offset = state.segments.reserve(shape.length)
            number = state.next_run
            state.next_run += 1
        try:
            for layer, size in enumerate(state.layer_sizes):
                rows = np.empty((run.row.blocks, size), dtype=np.uint8)
                vectors = np.array([(rows.ctypes.data, rows.nbytes)], dtype=np.uint64)
                start = run.row.offset + header.shape.offset(layer, 0)
                if read_fully(state.files, run.segment.fd, vectors, start) < rows.nbytes:
                    raise FormatError("the segment is cut short")
                if any(checksum(rows[i].data) != int(header.sums[layer, i]) for i in alive):
                    raise FormatError("bytes do not verify")
                kept = np.ascontiguousarray(rows[alive])
                vectors = np.array([(kept.ctypes.data, kept.nbytes)], dtype=np.uint64)
                write_fully(state.files, target.fd, vectors, offset + shape.offset(layer, 0))
            moved = RunHeader(
                state.segments.store,
                target.number,
                offset,
                number,
                run.row.created,
                run.row.namespace,
                tuple(header.keys[i] for i in alive),
                np.ascontiguousarray(header.sums[:, alive]),
                shape,
            )
            data = encode_run_header(moved)
            write_bytes(state.files, target.fd, data, offset)
            state.segments.sync(target)
        except (OSError, FormatError):
            with state.lock:
                state.segments.release(target, offset, shape.length, keep=False)
            raise
        row = RunRow(
            number,
            target.number,
            shape.blocks,
            offset,
            shape.length,
            shape.header_bytes,
            checksum(data),
            run.row.created,
            run.row.namespace,
        )
        return row, moved, target
