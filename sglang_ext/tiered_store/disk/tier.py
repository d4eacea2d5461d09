"""The disk tier: blocks in append-only segments, found through LMDB, verified on every read.

    directory/
      owner.lock        its present user
      index/data.mdb    block key -> run, position     (index.py)
      00000001.seg ...  runs of blocks, layer-major    (segment_format.py)

Failures become misses, counted by reason, with a log line that gives the remedy:

    the medium                           the tier
    -----------------------------------  -------------------------------------------------------------------
    bytes or header do not verify        drops the block or run
    a segment is cut short or gone       drops its runs, at start or when read
    a read error (EIO)                   leaves the run alone for a while, keeps it
    no room (ENOSPC)                     gives up old segments, then refuses puts for a while
    a write or sync error                fails the puts concerned, adds nothing to that segment any more
    read-only                            goes on reading
    the directory is gone or replaced    goes on in a new, empty one; where that is not safe,
                                         reads open files, refuses puts, and has a limit of 0
    the index is damaged or gone         sets it aside and starts empty; `repair` rebuilds it from the
    segments
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_ext.clock import Clock
from sglang_ext.errors import ConfigError
from sglang_ext.folders import own_folder, require_own
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.disk.files import Files
from sglang_ext.tiered_store.disk.index import (
    Change,
    Index,
    IndexDamagedError,
    IndexFailedError,
    Snapshot,
    Watch,
)
from sglang_ext.tiered_store.disk.owner import (
    LOCK_FILE,
    DirectoryOwner,
    Place,
    mounted_kind,
    refuse_network,
    take_anew,
)
from sglang_ext.tiered_store.disk.read import DiskGet, DiskReader
from sglang_ext.tiered_store.disk.reclaimer import Reclaimer
from sglang_ext.tiered_store.disk.segments import SUFFIX, ScanResult, SegmentFiles, file_size
from sglang_ext.tiered_store.disk.speed import choose_io
from sglang_ext.tiered_store.disk.state import DiskConfig, DiskHealth, DiskState, IoMode, Run
from sglang_ext.tiered_store.disk.write import DiskPut, DiskWriter
from sglang_ext.tiered_store.tier import (
    BlockMemory,
    BlockTier,
    Get,
    Ids,
    LayerRead,
    Outcome,
    Put,
    TierStats,
)
from sglang_ext.tiers import Tier

logger = logging.getLogger(__name__)

INDEX_DIRECTORY = "index"
_USABLE_SHARE = 0.9
_READ_ONLY_ERRORS = (errno.EROFS, errno.EACCES, errno.EPERM)


class DiskTier(BlockTier):
    """Blocks on disk. Opening reads the index and no data: under a second per 100,000 blocks.

    Args:
        config: directory, limit and the rest.
        layout: of the blocks that will be put and got. Blocks of other layouts on the disk belong to other
            namespaces; they age and go like the rest.
        files, clock: the system's, or a test's.
        tier: its number among the tiers below memory.
        step: called with the name of each step of a put and of reclaiming as it is done; for crash tests.

    Raises:
        ConfigError: the directory cannot be used, or another process uses it.
    """

    durable = True

    def __init__(
        self,
        config: DiskConfig,
        layout: BlockLayout,
        *,
        files: Files | None = None,
        clock: Clock | None = None,
        step: Callable[[str], None] = lambda name: None,
        tier: Tier = Tier.DISK,
    ) -> None:
        begin = time.monotonic()
        self.tier = tier
        self.layout = layout
        files = files or Files()
        self._owner, readonly = _take(config, files)
        try:
            config = config if readonly else _fitted(config, files)
            io = choose_io(config.path, layout, IoMode.BUFFERED if readonly else config.io)
            self.config = config = dataclasses.replace(config, io=io)
            index, snapshot = _open_index(config, readonly=readonly, step=step)
            segments = SegmentFiles(
                config.path,
                files,
                segment_bytes=config.segment_size,
                direct=config.io is IoMode.DIRECT,
                readonly=readonly,
            )
            self._state = DiskState(
                config,
                layout,
                index,
                segments,
                files=files,
                clock=clock,
                step=step,
                in_place=self._in_place,
                made_anew=self._made_anew,
            )
            self._place = Place.of(config.path)
            if snapshot is None:
                self._state.health = DiskHealth.NO_INDEX
            elif readonly:
                self._state.become_read_only()
            if snapshot is not None:
                self._load(snapshot)
        except BaseException:
            if self._owner:
                self._owner.release()
            raise
        reclaimer = Reclaimer(self._state)
        self._reader = DiskReader(self._state)
        self._writer = DiskWriter(self._state, reclaimer)
        logger.info("disk tier %s: %r, opened in %.3f s", config.path, self, time.monotonic() - begin)

    def _in_place(self) -> bool:
        return self._owner is None or (self._owner.in_place() and self._state.index.in_place())

    def _made_anew(self) -> tuple[Index, SegmentFiles]:
        """An empty directory of ours where the lost one was, as an opening would find it."""
        assert self._owner is not None
        owner = take_anew(self._owner, self._place, self.config.instance)
        try:
            index, snapshot = _loaded(
                self.config.path / INDEX_DIRECTORY, readonly=False, step=self._state.step
            )
            segments = SegmentFiles(
                self.config.path,
                self._state.files,
                segment_bytes=self.config.segment_size,
                direct=self.config.io is IoMode.DIRECT,
                readonly=False,
            )
            segments.scan(snapshot.stores, snapshot.next_segment, {})
        except BaseException:
            if owner is not self._owner:
                owner.release()
            raise
        if owner is not self._owner:
            self._owner.release()
            self._owner = owner
        return index, segments

    @property
    def renewals(self) -> int:
        return self._state.renewals

    def _load(self, snapshot: Snapshot) -> None:
        """Load the runs' rows into memory, and drop rows from the index whose runs the segments lack."""
        state = self._state
        ends: dict[int, int] = {}
        for row, _ in snapshot.runs:
            ends[row.segment] = max(ends.get(row.segment, 0), row.end)
        scan = state.segments.scan(snapshot.stores, snapshot.next_segment, ends)
        gone: set[int] = set()
        for row, use in snapshot.runs:
            segment = state.segments.by_number.get(row.segment)
            if row.segment in scan.unreadable:
                state.unavailable.add(row.run)
            elif segment is None or row.end > scan.short.get(row.segment, row.end):
                gone.add(row.run)
                state.counters.lost_at_start += use.alive
            else:
                state.runs[row.run] = Run(row, use, segment)
        state.next_run = max([snapshot.next_run, *(row.run + 1 for row, _ in snapshot.runs)])
        _report(self.config.path, scan, state.counters.lost_at_start, snapshot.bad_rows)
        if state.health is DiskHealth.OK and gone:
            state.forget_runs(gone)

    # --- the contract ---

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        return self._reader.match(namespace, keys)

    def held(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        return self._reader.held(namespace, keys)

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> DiskPut | Outcome:
        return self._writer.prepare_put(namespace, keys)

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        return self._writer.put_layer(put, layer, memory, ids)

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        return self._writer.complete_puts(puts)

    def abort_put(self, put: Put) -> None:
        self._writer.abort_put(put)

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> DiskGet:
        return self._reader.prepare_get(namespace, keys)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        return self._reader.get_layer(get, layer, memory, ids)

    def complete_get(self, get: Get) -> None:
        self._reader.complete_get(get)

    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        return self._drop([(namespace, key) for key in dict.fromkeys(keys)])

    def clear(self, namespace: bytes | None = None) -> int:
        try:
            return self._drop(self._state.index.keys_in_namespace(namespace))
        except IndexFailedError as error:
            self._state.note_index_failure(error)
            return 0

    def _drop(self, fulls: Sequence[tuple[bytes, bytes]]) -> int:
        state = self._state
        with state.write_lock:
            if state.refusal not in (None, Outcome.FULL):
                return 0
            before = state.index.blocks
            try:
                state.commit(Change(drop_blocks=fulls))
            except IndexFailedError as error:
                state.note_index_failure(error)
                return 0
            state.remove_empty_segments()
            return before - state.index.blocks

    # --- contents, for other parts ---

    def watch(self, watch: Watch) -> None:
        """From now on, call `watch` with the key of every block after it was added or removed."""
        self._state.index.watch = watch

    def names_after(self, place: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        """Up to ``limit`` keys of blocks, and the place to go on from; ``b""`` to begin with, ``None`` at the
        end. From any thread. Blocks added or removed between two calls may be missed: ``watch`` reports them.
        """
        try:
            return self._state.index.names_after(place, limit)
        except IndexFailedError as error:
            self._state.note_index_failure(error)
            return [], None

    def names_in(self, namespace: bytes, first: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        """Like ``names_after``, of one namespace: keys from ``first`` on, and the key to go on from."""
        try:
            return self._state.index.names_in(namespace, first, limit)
        except IndexFailedError as error:
            self._state.note_index_failure(error)
            return [], None

    def stats(self) -> TierStats:
        state = self._state
        with state.lock:
            counters = state.counters
            lost = state.health is DiskHealth.LOST
            return TierStats(
                blocks=sum(run.use.alive for run in state.runs.values()),
                used_bytes=state.segments.used_bytes,
                limit_bytes=0 if lost else self.config.limit_bytes,
                pins=state.pins,
                put=dict(counters.put),
                got=dict(counters.got),
                evicted=counters.evicted,
                extra={
                    "runs": len(state.runs),
                    "segments": len(state.segments.by_number),
                    "index_bytes": state.index.file_bytes,
                    "bytes_written": counters.bytes_written,
                    "bytes_read": counters.bytes_read,
                    "syncs": counters.syncs,
                    "commits": counters.commits,
                    "moved_blocks": counters.moved,
                    "lost_at_start_blocks": counters.lost_at_start,
                    "unavailable_runs": len(state.unavailable),
                },
            )

    @property
    def health(self) -> DiskHealth:
        """The operations that the medium allows now."""
        return self._state.health

    def check(self) -> None:
        """Verify that memory, index and segments agree. Reads no block data. Call while nothing is under
        way.
        """
        state = self._state
        with state.write_lock:
            if state.refusal not in (None, Outcome.FULL):
                return
            found: dict[int, int] = {}
            for namespace, key, number, position in state.index.entries():
                run = state.runs.get(number)
                if run is None:
                    if number in state.unavailable:
                        continue
                    raise AssertionError(f"block {key.hex()} lies in run {number}, which is not known")
                if run.row.namespace != namespace or position >= run.row.blocks:
                    raise AssertionError(f"block {key.hex()} does not lie in run {number}")
                found[number] = found.get(number, 0) + 1
            for number, run in state.runs.items():
                if run.use.alive != found.get(number, 0):
                    raise AssertionError(
                        f"run {number}: {run.use.alive} alive, {found.get(number, 0)} indexed"
                    )
                segment = state.segments.by_number.get(run.row.segment)
                if segment is not run.segment:
                    raise AssertionError(f"run {number} lies in a segment that is not open")
                if run.row.end > segment.end:
                    raise AssertionError(f"run {number} ends behind the end of its segment")
                if state.index.keys_of(number) == ():
                    raise AssertionError(f"run {number} has no sound row in the index")
            self._check_overlap()

    def _check_overlap(self) -> None:
        ends: dict[int, int] = {}
        for run in sorted(self._state.runs.values(), key=lambda r: (r.row.segment, r.row.offset)):
            if run.row.offset < ends.get(run.row.segment, 0):
                raise AssertionError(f"run {run.row.run} overlaps the one before it")
            ends[run.row.segment] = run.row.end

    def close(self) -> None:
        """Note the uses, give back unused room, and let go of the directory."""
        state = self._state
        with state.write_lock:
            if state.health is DiskHealth.CLOSED:
                return
            if state.refusal in (None, Outcome.FULL):
                try:
                    state.commit(Change())
                except IndexFailedError as error:
                    state.note_index_failure(error)
            with state.lock:
                state.health = DiskHealth.CLOSED
                state.segments.close()
                state.runs.clear()
            state.close_index()
            if self._owner:
                self._owner.release()

    def __repr__(self) -> str:
        state = self._state
        return (
            f"<DiskTier {self.config.path} {state.health.value}, {len(state.runs)} runs in "
            f"{len(state.segments.by_number)} segments, {state.segments.used_bytes >> 20} of "
            f"{self.config.limit_bytes >> 20} MiB, {state.pins} pins>"
        )


def _take(config: DiskConfig, files: Files) -> tuple[DirectoryOwner | None, bool]:
    """Take hold of the directory; the owner, and whether it is read-only."""
    if config.limit_bytes < 4 * config.segment_size:
        raise ConfigError(
            f"{config.limit_bytes} bytes hold fewer than four segments of {config.segment_size}",
            field="--kv-disk-size",
            hint="Make it larger",
        )
    try:
        own_folder(config.path, "--kv-disk-path", make=True)
        require_own(config.path, entries_of(config.path), "--kv-disk-path")
        refuse_network(config.path, mounted_kind(config.path.resolve(), files.mountinfo()))
        return DirectoryOwner(config.path, config.instance), False
    except OSError as error:
        if error.errno in _READ_ONLY_ERRORS and config.path.is_dir():
            return None, True
        raise ConfigError(
            f"{config.path} cannot be used: {error.strerror}",
            field="--kv-disk-path",
            hint="Name a directory that this user can write to",
        ) from error


def entries_of(path: Path) -> list[Path]:
    """The files that a disk tier reads in its directory: the lock, the segments, the index and its files. Not
    all of them need be there.
    """
    index = path / INDEX_DIRECTORY
    return [path / LOCK_FILE, *path.glob(f"*{SUFFIX}"), index, *index.glob("*")]


def _fitted(config: DiskConfig, files: Files) -> DiskConfig:
    """The configuration with a limit that the disk can hold. The index needs some of its room too."""
    ours = sum(file_size(file) for file in config.path.glob(f"*{SUFFIX}"))
    try:
        usable = ours + int(files.free_bytes(config.path) * _USABLE_SHARE)
    except OSError:
        return config
    if config.limit_bytes <= usable:
        return config
    fitted = dataclasses.replace(config, limit_bytes=usable)
    if fitted.limit_bytes < 4 * fitted.segment_size:
        raise ConfigError(
            f"the disk of {config.path} has room for {usable} bytes, not for {config.limit_bytes}",
            field="--kv-disk-size",
            hint="Free space there, or name another disk with --kv-disk-path",
        )
    logger.warning(
        "the disk of %s has room for %.1f GiB, so that is the limit, not %.1f GiB; free space there and "
        "restart, or make --kv-disk-size smaller",
        config.path,
        usable / 2**30,
        config.limit_bytes / 2**30,
    )
    return fitted


def _open_index(
    config: DiskConfig, *, readonly: bool, step: Callable[[str], None]
) -> tuple[Index, Snapshot | None]:
    """The index and its contents; a fresh one when the old is damaged, None if no index can be used."""
    path = config.path / INDEX_DIRECTORY
    try:
        return _loaded(path, readonly=readonly, step=step)
    except IndexDamagedError as error:
        logger.error(
            "index %s is damaged (%s): its blocks are not found. Stop the server and run `sglang-ext doctor "
            "--kv-disk-path %s --verify repair` to rebuild it from the segments",
            path,
            error,
            config.path,
        )
    except OSError as error:
        logger.error("index %s cannot be opened: %s; the disk tier is off until a restart", path, error)
        return Index.missing(path), None
    if readonly:
        return Index.missing(path), None
    set_aside(path)
    return _loaded(path, readonly=False, step=step)


def _loaded(path: Path, *, readonly: bool, step: Callable[[str], None]) -> tuple[Index, Snapshot]:
    index = Index(path, readonly=readonly, step=step)
    try:
        return index, index.load()
    except BaseException:
        index.close()
        raise


def set_aside(index: Path) -> Path:
    """Move a damaged index out of the way, so that it can still be looked at; returns its new place."""
    number = 1
    while (target := index.with_name(f"{index.name}.damaged-{number}")).exists():
        number += 1
    index.rename(target)
    return target


def _report(path: Path, scan: ScanResult, lost_blocks: int, bad_rows: int) -> None:
    for number, why in scan.lost.items():
        logger.warning("segment %d of %s: %s; its blocks are computed again", number, path, why)
    for number, size in scan.short.items():
        logger.warning("segment %d of %s ends at %d, too early; what is cut off is lost", number, path, size)
    for number, why in scan.unreadable.items():
        logger.warning(
            "segment %d of %s cannot be read: %s; it is tried again at the next start", number, path, why
        )
    if lost_blocks or bad_rows:
        logger.warning("%s: %d blocks lost, %d damaged rows in the index", path, lost_blocks, bad_rows)
    if scan.foreign:
        logger.warning(
            "%s holds %d segments that its index does not know. To get their blocks back, stop the server "
            "and run `sglang-ext doctor --kv-disk-path %s --verify repair`; otherwise they go when their "
            "room is needed",
            path,
            len(scan.foreign),
            path,
        )
