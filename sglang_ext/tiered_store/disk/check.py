"""Looking after a disk tier's directory while no server uses it: check it, rebuild its index."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sglang_ext.errors import ConfigError, MediumError
from sglang_ext.folders import open_own, own_folder, require_own
from sglang_ext.tiered_store.disk.index import Change, Index, IndexDamagedError
from sglang_ext.tiered_store.disk.index_rows import RunRow, RunUse
from sglang_ext.tiered_store.disk.owner import DirectoryOwner
from sglang_ext.tiered_store.disk.segment_format import (
    PAGE,
    FormatError,
    RunHeader,
    checksum,
    decode_run_header,
    decode_segment_header,
    encode_segment_header,
    header_bytes_of,
    run_offsets,
)
from sglang_ext.tiered_store.disk.segments import SUFFIX, file_size
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY, entries_of, set_aside

_SCAN_BYTES = 16 << 20
_RUNS_PER_COMMIT = 256


class NotOwnError(MediumError):
    """Another user can change the directory, so that a server would refuse it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is wrong. where: file, run or table; blocks: how many are lost by it."""

    where: str
    text: str
    blocks: int = 0


@dataclass
class CheckReport:
    """The findings of a check.

    recoverable: blocks in segments of a lost index, which `repair_directory` brings back.
    dead: blocks that were dropped, or put twice, and whose bytes are still there; that is no problem.
    """

    blocks: int = 0
    runs: int = 0
    segments: int = 0
    data_bytes: int = 0
    index_bytes: int = 0
    free_bytes: int = 0
    recoverable: int = 0
    dead: int = 0
    verified_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.problems and not self.recoverable

    def add(self, where: object, text: str, blocks: int = 0) -> None:
        self.problems.append(Problem(str(where), text, blocks))


@dataclass
class RepairReport:
    """The changes that a repair made. lost: damaged blocks, by reason."""

    runs: int = 0
    blocks: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    set_aside: Path | None = None


def check_directory(path: Path, *, deep: bool = False) -> CheckReport:
    """Compare index and segments; with `deep`, read all data and verify every checksum. Changes nothing.

    Raises:
        ConfigError: a server uses the directory; the text names it.
        MediumError: there is no disk tier at `path`.
    """
    with _held(path):
        report = CheckReport(free_bytes=shutil.disk_usage(path).free)
        stores, known = _check_index(path, report, deep=deep)
        for file in sorted(path.glob(f"*{SUFFIX}")):
            report.segments += 1
            report.data_bytes += file_size(file)
            for header in find_runs(file):
                if header.store not in stores:
                    report.recoverable += len(header.keys)
                elif (header.segment, header.offset) not in known:
                    report.dead += len(header.keys)
        return report


def _check_index(
    path: Path, report: CheckReport, *, deep: bool
) -> tuple[tuple[bytes, ...], set[tuple[int, int]]]:
    """Check every run that the index knows; returns its stores, and the (segment, offset) of the runs."""
    known: set[tuple[int, int]] = set()
    stores: tuple[bytes, ...] = ()
    try:
        index = Index(path / INDEX_DIRECTORY, readonly=True)
    except (IndexDamagedError, OSError) as error:
        report.add(path / INDEX_DIRECTORY, f"cannot be used: {error}")
        return stores, known
    try:
        snapshot = index.load()
        stores = snapshot.stores
        report.index_bytes = index.file_bytes
        report.blocks = index.blocks
        report.runs = len(snapshot.runs)
        if snapshot.bad_rows:
            report.add(index.path, f"{snapshot.bad_rows} rows do not verify")
        alive: dict[int, set[int]] = {row.run: set() for row, _ in snapshot.runs}
        stray = 0
        for *_, run, position in index.entries():
            if run in alive:
                alive[run].add(position)
            else:
                stray += 1
        for row, _ in snapshot.runs:
            known.add((row.segment, row.offset))
            _check_run(path, row, alive[row.run], report, deep=deep)
        if stray:
            report.add(index.path, f"{stray} blocks lead to runs that are not there", stray)
    except IndexDamagedError as error:
        report.add(index.path, str(error))
    finally:
        index.close()
    return stores, known


def _check_run(path: Path, row: RunRow, alive: set[int], report: CheckReport, *, deep: bool) -> None:
    file = path / f"{row.segment:08d}{SUFFIX}"
    where = f"{file.name}, run {row.run}"
    try:
        with os.fdopen(open_own(file, os.O_RDONLY), "rb") as opened:
            if os.fstat(opened.fileno()).st_size < row.end:
                report.add(where, "the segment ends before the run does", len(alive))
                return
            opened.seek(row.offset)
            data = opened.read(row.header_bytes)
            header = decode_run_header(data)
            if checksum(data) != row.seal:
                raise FormatError("it is not the header that the index means")
            if deep:
                report.verified_bytes += row.length
                bad = bad_blocks(opened.fileno(), header) & alive
                if bad:
                    report.add(where, f"{len(bad)} of {row.blocks} blocks do not verify", len(bad))
    except FileNotFoundError:
        report.add(where, "the segment is missing", len(alive))
    except (OSError, FormatError) as error:
        report.add(where, str(error), len(alive))


def bad_blocks(fd: int, header: RunHeader) -> set[int]:
    """Positions of the blocks of a run of which some layer does not verify."""
    bad: set[int] = set()
    for layer, size in enumerate(header.shape.layer_bytes):
        data = os.pread(fd, size * header.shape.blocks, header.offset + header.shape.offset(layer, 0))
        view = memoryview(data)
        for position in range(header.shape.blocks):
            part = view[position * size : (position + 1) * size]
            if len(part) < size or checksum(part) != int(header.sums[layer, position]):
                bad.add(position)
    return bad


def find_runs(file: Path) -> Iterator[RunHeader]:
    """Every run in a segment whose header verifies, found by its magic at page borders, in order."""
    try:
        size = file.stat().st_size
        fd = open_own(file, os.O_RDONLY)
    except OSError:
        return
    try:
        after = PAGE
        for start in range(PAGE, size, _SCAN_BYTES):
            chunk = np.frombuffer(os.pread(fd, min(_SCAN_BYTES, size - start), start), dtype=np.uint8)
            for offset in run_offsets(chunk):
                if start + offset < after:
                    continue  # inside of a run: KV that looks like a header
                header = _header_at(fd, start + offset)
                if header is not None:
                    yield header
                    after = header.offset + header.shape.length
    finally:
        os.close(fd)


def _header_at(fd: int, offset: int) -> RunHeader | None:
    try:
        size = header_bytes_of(os.pread(fd, 16, offset))
        header = decode_run_header(os.pread(fd, size, offset))
    except (OSError, FormatError):
        return None
    return header if header.offset == offset else None


def repair_directory(path: Path) -> RepairReport:
    """Rebuild the index from the segments, verifying all data. The old index is set aside, not deleted.

    Reads every segment once. Blocks that do not verify are left out. Where a key is found twice, the newer
    run serves it. The times of last use start anew where the old index cannot be read.

    Raises:
        ConfigError: a server uses the directory; the text names it.
        MediumError: there is no disk tier at `path`, or the disk cannot be written.
    """
    with _held(path):
        report = RepairReport()
        uses = _old_uses(path)
        try:
            target = path / f"{INDEX_DIRECTORY}.new"
            shutil.rmtree(target, ignore_errors=True)
            index = Index(target)
            try:
                _rebuild(path, index, uses, report)
            finally:
                index.close()
            if (path / INDEX_DIRECTORY).exists():
                report.set_aside = set_aside(path / INDEX_DIRECTORY)
            target.rename(path / INDEX_DIRECTORY)
        except (OSError, IndexDamagedError) as error:
            raise MediumError(
                f"the index of {path} cannot be rebuilt: {error}",
                field="--kv-disk-path",
                hint="Free space on that disk, or look at its health; nothing has been changed",
            ) from error
        return report


def _old_uses(path: Path) -> dict[tuple[int, int], tuple[float, int]]:
    """Last use and hits of the runs of an index that can still be read, by (segment, offset)."""
    with contextlib.suppress(IndexDamagedError, OSError):
        index = Index(path / INDEX_DIRECTORY, readonly=True)
        try:
            return {(row.segment, row.offset): (use.last, use.hits) for row, use in index.load().runs}
        finally:
            index.close()
    return {}


def _rebuild(
    path: Path, index: Index, uses: dict[tuple[int, int], tuple[float, int]], report: RepairReport
) -> None:
    found: list[RunHeader] = []
    numbers = [0]
    for file in sorted(path.glob(f"*{SUFFIX}")):
        if not file.stem.isdigit():
            continue
        number = int(file.stem)
        numbers.append(number)
        runs = [header for header in find_runs(file) if header.segment == number]
        found += runs
        if runs:
            _mend_first_page(file, number, runs[0].store)
    found.sort(key=lambda header: (-header.created, -header.run))  # the newest first: it keeps its keys
    index.load()
    index.take_over(dict.fromkeys(header.store for header in found))
    following = len(found) + 1
    batch: list[tuple[RunRow, set[int], tuple[bytes, ...]]] = []
    # Numbered anew: an index that was lost and begun again has given out the same numbers twice.
    for number, header in zip(range(len(found), 0, -1), found, strict=True):
        row, bad = _row_of(path, header, number)
        report.lost["does not verify"] += len(bad)
        if len(bad) < row.blocks:
            batch.append((row, bad, header.keys))
        if len(batch) >= _RUNS_PER_COMMIT:
            report.runs += _commit(index, batch, following, max(numbers) + 1, uses)
            batch.clear()
    report.runs += _commit(index, batch, following, max(numbers) + 1, uses)
    report.blocks = index.blocks


def _commit(
    index: Index,
    batch: list[tuple[RunRow, set[int], tuple[bytes, ...]]],
    next_run: int,
    next_segment: int,
    uses: dict[tuple[int, int], tuple[float, int]],
) -> int:
    """Add runs to the new index; returns how many of them serve any block."""
    seen: dict[int, RunUse] = {}
    for row, _, _ in batch:
        if (row.segment, row.offset) in uses:
            last, hits = uses[row.segment, row.offset]
            seen[row.run] = RunUse(last, hits, 0)
    alive = index.commit(
        Change(
            add=[(row, keys) for row, _, keys in batch],
            skip={row.run: bad for row, bad, _ in batch},
            uses=seen,
            next_run=next_run,
            next_segment=next_segment,
        )
    )
    return sum(1 for row, _, _ in batch if alive[row.run])


def _row_of(path: Path, header: RunHeader, number: int) -> tuple[RunRow, set[int]]:
    """The index row of a run, and which of its blocks are damaged."""
    file = path / f"{header.segment:08d}{SUFFIX}"
    fd = open_own(file, os.O_RDONLY)
    try:
        bad = bad_blocks(fd, header)
        seal = checksum(os.pread(fd, header.shape.header_bytes, header.offset))
        if os.fstat(fd).st_size < header.offset + header.shape.length:
            bad = set(range(header.shape.blocks))  # cut short: the next start would refuse the whole run
    finally:
        os.close(fd)
    row = RunRow(
        number,
        header.segment,
        header.shape.blocks,
        header.offset,
        header.shape.length,
        header.shape.header_bytes,
        seal,
        header.created,
        header.namespace,
    )
    return row, bad


def _mend_first_page(file: Path, number: int, store: bytes) -> None:
    """Write a segment's first page again if it is damaged; its runs name the store that it belongs to."""
    with os.fdopen(open_own(file, os.O_RDWR), "r+b") as opened:
        try:
            decode_segment_header(opened.read(PAGE))
        except FormatError:
            opened.seek(0)
            opened.write(encode_segment_header(store, number))
            opened.flush()
            os.fdatasync(opened.fileno())


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    if not path.is_dir():
        raise MediumError(f"there is no directory {path}", field="--kv-disk-path", hint="Check the path")
    try:
        own_folder(path, "--kv-disk-path")
        require_own(path, entries_of(path), "--kv-disk-path")
    except ConfigError as error:
        raise NotOwnError(error.message, field=error.field, hint=error.hint) from None
    try:
        owner = DirectoryOwner(path, "doctor")
    except OSError as error:
        raise MediumError(
            f"{path} cannot be locked: {error.strerror}",
            field="--kv-disk-path",
            hint="Make it writable first",
        ) from error
    try:
        yield
    finally:
        owner.release()
