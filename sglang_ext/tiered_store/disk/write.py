"""Writing to a disk tier: layer by layer into reserved room, then header, sync, index, in that order.

    reserve room -> write layers -> write header -> fdatasync -> commit the index (synced) -> publish

A crash before the commit leaves bytes that no index row leads to, which the next start gives back. A crash
after it leaves everything. `DONE` is returned after the commit only.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from sglang_ext.tiered_store.disk.files import write_bytes, write_fully
from sglang_ext.tiered_store.disk.index import Change, IndexFailedError
from sglang_ext.tiered_store.disk.index_rows import RunRow, RunUse
from sglang_ext.tiered_store.disk.reclaimer import Reclaimer
from sglang_ext.tiered_store.disk.segment_format import (
    PAGE,
    RunHeader,
    RunShape,
    Sums,
    checksum,
    encode_run_header,
    largest_run,
)
from sglang_ext.tiered_store.disk.segments import Segment
from sglang_ext.tiered_store.disk.state import DiskHealth, DiskState, Run
from sglang_ext.tiered_store.tier import BlockMemory, Ids, Outcome, Put, check_names, check_put_layer


@dataclass(slots=True, eq=False)
class NewRun:
    """A run that is being written.

    first: place of its first block among the missing ones of its put.
    serves: whether the index leads to it, once it is complete; not if other runs have all of its blocks by
        now.
    """

    first: int
    keys: tuple[bytes, ...]
    shape: RunShape
    sums: Sums
    number: int = 0
    segment: Segment | None = None
    offset: int = 0
    serves: bool = False


@dataclass(slots=True, eq=False)
class DiskPut(Put):
    """A put to disk. layers: those written so far. renewals: of the tier when it was prepared; a directory
    that was made anew since then lacks the blocks that the put relies on.
    """

    runs: list[NewRun]
    renewals: int
    layers: set[int] = field(default_factory=set)
    reserved: bool = False
    failed: Outcome | None = None
    open: bool = True


class DiskWriter:
    """The writing half of a disk tier."""

    def __init__(self, state: DiskState, reclaimer: Reclaimer) -> None:
        self._state = state
        self._reclaimer = reclaimer
        # A run has to fit into a segment, and a put into a part of the tier.
        self._run_blocks = largest_run(state.layout, state.config.segment_size - PAGE)

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> DiskPut | Outcome:
        state = self._state
        check_names(namespace, keys)
        state.look()
        if state.health is DiskHealth.LOST:
            state.begin_anew()
        renewals, refusal = state.renewals, state.refusal
        if refusal is None:
            try:
                missing = self._missing(namespace, keys)
            except IndexFailedError as error:
                refusal = state.note_index_failure(error)
        if refusal is not None:
            with state.lock:
                state.counters.put[refusal] += len(keys)
            return refusal
        runs, count = self._plan(keys, missing)
        with state.lock:
            state.counters.put[Outcome.FULL] += len(missing) - count
        if missing and not count:
            return Outcome.FULL
        return DiskPut(namespace, tuple(keys), tuple(missing[:count]), tuple(missing[count:]), runs, renewals)

    def _missing(self, namespace: bytes, keys: Sequence[bytes]) -> list[int]:
        state = self._state
        found = state.index.find(namespace, keys)
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        with state.lock:
            return [
                i
                for i, (key, place) in enumerate(zip(keys, found, strict=True))
                if first[key] == i and (place is None or state.readable(place[0]) is None)
            ]

    def _plan(self, keys: Sequence[bytes], missing: Sequence[int]) -> tuple[list[NewRun], int]:
        """Cut missing blocks into runs; how many blocks they take together, at most half of the tier."""
        state = self._state
        runs: list[NewRun] = []
        count, left = 0, state.config.soft_limit_bytes // 2
        while count < len(missing) and self._run_blocks:
            blocks = min(self._run_blocks, len(missing) - count)
            shape = RunShape.of(state.layer_sizes, blocks)
            if shape.length + PAGE > left:
                blocks = min(blocks, largest_run(state.layout, left - PAGE))
                if not blocks:
                    break
                shape = RunShape.of(state.layer_sizes, blocks)
            left -= shape.length + PAGE
            wanted = tuple(keys[i] for i in missing[count : count + blocks])
            sums = np.zeros((len(state.layer_sizes), blocks), dtype=np.uint64)
            runs.append(NewRun(count, wanted, shape, sums))
            count += blocks
        return runs, count

    # --- layers ---

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        state = self._state
        check_put_layer(put, layer, memory, ids, state.layout)
        mine = self._own(put)
        vectors = memory.vectors(layer, ids)
        if mine.failed is None and not mine.reserved:
            mine.failed = self._reserve(mine)
        for run in mine.runs:
            if mine.failed is not None:
                break
            part = slice(run.first, run.first + run.shape.blocks)
            for i, row in enumerate(memory.rows(layer, ids[part])):
                run.sums[layer, i] = checksum(row.data)
            assert run.segment is not None
            mine.failed = self._write(run, run.segment, layer, vectors[part])
        if mine.failed is not None:
            return mine.failed
        mine.layers.add(layer)
        state.step("layer_written")
        return Outcome.DONE

    def _reserve(self, put: DiskPut) -> Outcome | None:
        """Find room for all runs of a put; why there is none, if there is none."""
        state = self._state
        with state.write_lock:
            if state.refusal is not None:
                return state.refusal
            if put.renewals != state.renewals:
                return Outcome.IO_ERROR
            need = sum(run.shape.length + PAGE for run in put.runs)
            if not self._reclaimer.make_room(need):
                return Outcome.FULL
            try:
                for run in put.runs:
                    self._with_room(need, functools.partial(self._place, run))
            except OSError as error:
                outcome = self._write_error(error)
                self._release(put)
                return outcome
            put.reserved = True
        state.step("reserved")
        return None

    def _place(self, run: NewRun) -> None:
        state = self._state
        with state.lock:
            run.segment, run.offset = state.segments.reserve(run.shape.length)
            run.number = state.next_run
            state.next_run += 1

    def _with_room(self, need: int, write: Callable[[], None]) -> None:
        """Do a write; if the disk is full, once more after old segments have been given up.

        Call under `write_lock`.
        """
        try:
            write()
        except OSError as error:
            if error.errno != errno.ENOSPC or not self._reclaimer.free_disk(need):
                raise
            write()

    def _write(self, run: NewRun, segment: Segment, layer: int, vectors: np.ndarray) -> Outcome | None:
        state = self._state
        offset = run.offset + run.shape.offset(layer, 0)
        try:
            try:
                write_fully(state.files, segment.fd, vectors, offset)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                with state.write_lock:
                    need = run.shape.length
                    self._with_room(need, lambda: write_fully(state.files, segment.fd, vectors, offset))
        except OSError as error:
            return self._write_error(error)
        written = int(vectors[:, 1].sum())
        state.files.start_writeback(segment.fd, offset, written)
        with state.lock:
            state.counters.bytes_written += written
        return None

    def _write_error(self, error: OSError) -> Outcome:
        state = self._state
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            state.note_full(str(error.strerror))
            return Outcome.FULL
        if error.errno == errno.EROFS:
            state.become_read_only()
            return Outcome.READ_ONLY
        state.log_once(
            "write",
            "cannot write to %s: %s. Blocks stay in memory only; see to the disk if this repeats",
            state.config.path,
            error,
        )
        return Outcome.IO_ERROR

    # --- completion ---

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        state = self._state
        mine = [self._own(put) for put in puts]
        for put in mine:
            if put.missing and len(put.layers) < state.layout.n_layers:
                raise ValueError(f"put has {len(put.layers)} of {state.layout.n_layers} layers")
        with state.write_lock:
            if state.refusal is Outcome.CLOSED:
                outcomes = dict.fromkeys(mine, Outcome.CLOSED)
            else:
                outcomes = self._complete(mine)
            for put in mine:
                self._end(put, outcomes[put])
        return [outcomes[put] for put in mine]

    def _complete(self, puts: Sequence[DiskPut]) -> dict[DiskPut, Outcome]:
        state = self._state
        outcomes = {put: Outcome.DONE if put.renewals == state.renewals else Outcome.IO_ERROR for put in puts}
        written = [put for put in puts if put.missing and outcomes[put] is Outcome.DONE]
        headers: dict[NewRun, tuple[RunRow, RunHeader]] = {}
        created = state.clock.wall()
        for put in written:
            try:
                for run in put.runs:
                    headers[run] = self._write_header(put, run, created)
            except OSError as error:
                outcomes[put] = self._write_error(error)
        state.step("header_written")
        self._sync(written, outcomes)
        state.step("data_synced")
        state.look()
        if written and state.health is DiskHealth.LOST:
            return dict.fromkeys(puts, Outcome.IO_ERROR)
        good = [put for put in written if outcomes[put] is Outcome.DONE]
        if good:
            rows = [(headers[run][0], run.keys) for put in good for run in put.runs]
            try:
                alive = self._commit(Change(add=rows))
            except IndexFailedError as error:
                outcomes.update(dict.fromkeys(good, state.note_index_failure(error)))
            else:
                state.step("index_committed")
                state.note_room()
                self._publish((run for put in good for run in put.runs), headers, alive)
                state.step("published")
        return outcomes

    def _commit(self, change: Change) -> dict[int, int]:
        """Commit; if the index finds no room on the disk, once more after old segments have been given up."""
        try:
            return self._state.commit(change)
        except IndexFailedError as error:
            if not error.full or not self._reclaimer.free_disk(0):
                raise
            return self._state.commit(change)

    def _write_header(self, put: DiskPut, run: NewRun, created: float) -> tuple[RunRow, RunHeader]:
        state = self._state
        assert run.segment is not None
        segment = run.segment
        header = RunHeader(
            state.segments.store,
            segment.number,
            run.offset,
            run.number,
            created,
            put.namespace,
            run.keys,
            run.sums,
            run.shape,
        )
        data = encode_run_header(header)
        self._with_room(run.shape.length, lambda: write_bytes(state.files, segment.fd, data, run.offset))
        row = RunRow(
            run.number,
            segment.number,
            run.shape.blocks,
            run.offset,
            run.shape.length,
            run.shape.header_bytes,
            checksum(data),
            created,
            put.namespace,
        )
        return row, header

    def _sync(self, puts: Iterable[DiskPut], outcomes: dict[DiskPut, Outcome]) -> None:
        """Sync every segment that puts lie in. A put whose segment cannot be synced has failed."""
        state = self._state
        synced: dict[Segment, Outcome] = {}
        for put in puts:
            for run in put.runs:
                assert run.segment is not None
                if run.segment not in synced:
                    try:
                        state.segments.sync(run.segment)
                        synced[run.segment] = Outcome.DONE
                    except OSError as error:
                        synced[run.segment] = self._write_error(error)
                    state.counters.syncs += 1
                if outcomes[put] is Outcome.DONE:
                    outcomes[put] = synced[run.segment]

    def _publish(
        self,
        runs: Iterable[NewRun],
        headers: dict[NewRun, tuple[RunRow, RunHeader]],
        alive: dict[int, int],
    ) -> None:
        state = self._state
        for run in runs:
            row, header = headers[run]
            assert run.segment is not None
            with state.lock:
                run.serves = alive[row.run] > 0
                if run.serves:
                    use = RunUse(row.created, 0, alive[row.run])
                    state.runs[row.run] = Run(row, use, run.segment)
            state.remember_header(row.run, header)

    def abort_put(self, put: Put) -> None:
        mine = self._own(put)
        with self._state.write_lock:
            self._end(mine, mine.failed or Outcome.ABSENT)

    def _end(self, put: DiskPut, outcome: Outcome) -> None:
        put.open = False
        if put.reserved:
            self._release(put)
        if put.missing and outcome is not Outcome.ABSENT:
            with self._state.lock:
                self._state.counters.put[outcome] += len(put.missing)

    def _release(self, put: DiskPut) -> None:
        state = self._state
        with state.lock:
            for run in reversed(put.runs):
                if run.segment is not None:
                    state.segments.release(run.segment, run.offset, run.shape.length, keep=run.serves)
                    state.segments.finish(run.segment)
                    run.segment = None

    def _own(self, put: Put) -> DiskPut:
        if not isinstance(put, DiskPut) or not put.open:
            raise ValueError("this put is not one of this tier, or has ended")
        return put
