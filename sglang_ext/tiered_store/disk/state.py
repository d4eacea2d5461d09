"""The state that the parts of a disk tier share: its configuration, its runs, its counters and its health.

Two locks. `lock` guards memory and is held for microseconds. `write_lock` serialises everything that changes
the index or the set of segments, and is held across syncs; a thread that holds it may take `lock`, never the
other way round.
"""

from __future__ import annotations

import enum
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.errors import ConfigError
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.disk.files import Files
from sglang_ext.tiered_store.disk.index import Change, Index, IndexDamagedError, IndexFailedError
from sglang_ext.tiered_store.disk.index_rows import RunRow, RunUse
from sglang_ext.tiered_store.disk.segment_format import (
    PAGE,
    FormatError,
    RunHeader,
    checksum,
    decode_run_header,
    layer_sizes,
)
from sglang_ext.tiered_store.disk.segments import Segment, SegmentFiles
from sglang_ext.tiered_store.tier import Outcome

logger = logging.getLogger("sglang_ext.tiered_store.disk.tier")

MIN_SEGMENT_BYTES = 64 << 10
MAX_SEGMENT_BYTES = 256 << 20
MAX_SEGMENTS = 512
_HEADERS_CACHED = 256
_LOG_SECONDS = 60.0
_NAMES_AT_ONCE = 1024


class IoMode(enum.Enum):
    """How segments are read. Writes always go through the page cache and are synced."""

    AUTO = "auto"
    """DIRECT, unless that measures clearly slower at opening (`disk_speed.choose_io`)."""
    BUFFERED = "buffered"
    """Through the page cache."""
    DIRECT = "direct"
    """With O_DIRECT, where addresses allow it and the bytes are not in the page cache anyway: less CPU per
    byte, and no second copy in memory."""


class DiskHealth(enum.Enum):
    """The operations that the medium allows."""

    OK = "ok"
    FULL = "full"
    """Out of room beyond our own limit; writes are tried again after a while."""
    READ_ONLY = "read_only"
    NO_INDEX = "no_index"
    """The index cannot be used; nothing is found and nothing is taken."""
    LOST = "lost"
    """The directory was removed, emptied or replaced while it was in use, and none could be made in its
    place yet. Open files are still read; nothing is taken, as no restart would find it."""
    CLOSED = "closed"


@dataclass(frozen=True)
class DiskConfig:
    """Configuration of a disk tier.

    path: its directory, for this rank alone.
    limit_bytes: the most its segments may take; the index takes some 150 bytes per block beside that.
    segment_bytes: size of a segment file. 0 for a sixteenth of the limit, at most 256 MiB, but no less than
        makes 512 of them: each is an open file.
    io: how segments are read.
    instance: this instance's name, for the owner's note.
    retry_seconds: how long to leave a medium alone that was full or failed to read a run.
    """

    path: Path
    limit_bytes: int
    segment_bytes: int = 0
    io: IoMode = IoMode.BUFFERED
    instance: str = "unnamed"
    retry_seconds: float = 30.0

    @property
    def segment_size(self) -> int:
        few = max(MAX_SEGMENT_BYTES, self.limit_bytes // MAX_SEGMENTS)
        size = self.segment_bytes or min(few, self.limit_bytes // 16)
        return max(MIN_SEGMENT_BYTES, size // PAGE * PAGE)

    @property
    def soft_limit_bytes(self) -> int:
        """Where reclaiming starts: the space above it is room to move runs that are worth keeping."""
        return self.limit_bytes - self.segment_size // 4


@dataclass(slots=True, eq=False)
class Run:
    """A run in memory. pins: gets that hold it. quiet_until: not to be read before, after a read error."""

    row: RunRow
    use: RunUse
    segment: Segment
    pins: int = 0
    quiet_until: float = 0.0


@dataclass
class DiskCounters:
    """Since the start; blocks unless the name says otherwise."""

    put: Counter[Outcome] = field(default_factory=Counter)
    got: Counter[Outcome] = field(default_factory=Counter)
    bytes_written: int = 0
    bytes_read: int = 0
    syncs: int = 0
    commits: int = 0
    evicted: int = 0
    moved: int = 0
    lost_at_start: int = 0


class DiskState:
    """See the module. Created by `disk.py`, used by its reader, its writer and its reclaimer."""

    def __init__(
        self,
        config: DiskConfig,
        layout: BlockLayout,
        index: Index,
        segments: SegmentFiles,
        *,
        files: Files,
        clock: Clock | None = None,
        step: Callable[[str], None] = lambda name: None,
        in_place: Callable[[], bool] = lambda: True,
        made_anew: Callable[[], tuple[Index, SegmentFiles]] | None = None,
    ) -> None:
        self.config = config
        self.layout = layout
        self.layer_sizes = layer_sizes(layout)
        self.index = index
        self.segments = segments
        self.files = files
        self.clock = clock or SystemClock()
        self.step = step
        self._in_place = in_place
        """Whether the directory is still the directory that was opened."""
        self._made_anew = made_anew
        """Makes a directory in place of a lost one, or raises an exception with the reason."""
        self._try_at = 0.0
        """When to try that again."""
        self.renewals = 0
        """How often the directory was made anew: everything from before is lost."""
        self._left: list[Index] = []
        """Indexes of directories that are lost. Lookups in other threads may still be in them."""
        self.lock = threading.Lock()
        self.write_lock = threading.Lock()
        self.health = DiskHealth.OK
        self.full_until = 0.0
        self.runs: dict[int, Run] = {}
        self.unavailable: set[int] = set()
        """Runs in the index whose segment cannot be read now. Their blocks may be put again."""
        self.next_run = 1
        self.used: set[int] = set()
        """Runs whose use has changed since the last commit."""
        self.counters = DiskCounters()
        self.pins = 0
        self._headers: OrderedDict[int, RunHeader] = OrderedDict()
        self._logged: dict[str, float] = {}

    # --- health ---

    @property
    def refusal(self) -> Outcome | None:
        """Why nothing can be put now; None when it can."""
        if self.health is DiskHealth.CLOSED:
            return Outcome.CLOSED
        if self.health is DiskHealth.READ_ONLY:
            return Outcome.READ_ONLY
        if self.health in (DiskHealth.NO_INDEX, DiskHealth.LOST):
            return Outcome.IO_ERROR
        if self.health is DiskHealth.FULL and self.clock.monotonic() < self.full_until:
            return Outcome.FULL
        return None

    def look(self) -> None:
        """See whether the directory is still there; without it the tier takes nothing."""
        if self._in_place():
            return
        with self.lock:
            if self.health in (DiskHealth.LOST, DiskHealth.CLOSED):
                return
            self.health = DiskHealth.LOST
        logger.error(
            "%s was removed, emptied or replaced while the server used it: what the disk tier had is lost",
            self.config.path,
        )

    def begin_anew(self) -> None:
        """Go on in a new directory where the old one is lost, if that is safe. Tries again after a while."""
        with self.write_lock:
            if self.health is not DiskHealth.LOST or self.clock.monotonic() < self._try_at:
                return
            self._try_at = self.clock.monotonic() + self.config.retry_seconds
            try:
                assert self._made_anew is not None
                index, segments = self._made_anew()
            except (ConfigError, OSError, IndexDamagedError) as error:
                logger.error(
                    "the disk tier is off: %s cannot be made anew: %s. New blocks stay in memory only",
                    self.config.path,
                    error,
                )
                return
            before = self._swap(index, segments)
            logger.warning("the disk tier goes on in a new directory at %s", self.config.path)
            self._tell_lost(before)

    def _swap(self, index: Index, segments: SegmentFiles) -> Index:
        """Go on with these, and with nothing in memory of the others; returns the former index."""
        with self.lock:
            before, index.watch = self.index, self.index.watch
            # Numbers are never given twice: gets under way still have the former runs.
            segments.next_number = max(segments.next_number, self.segments.next_number)
            self.segments.close()
            self.index, self.segments = index, segments
            self.runs = {}
            self.unavailable.clear()
            self.used.clear()
            self._headers.clear()
            self._left.append(before)
            self.renewals += 1
            self.health = DiskHealth.OK
        return before

    def _tell_lost(self, index: Index) -> None:
        place: bytes | None = b""
        while place is not None and index.watch is not None:
            try:
                names, place = index.names_after(place, _NAMES_AT_ONCE)
            except IndexFailedError:
                return
            index.watch([], names)

    def close_index(self) -> None:
        """Close the index, and those of directories that are lost."""
        for index in (self.index, *self._left):
            index.close()

    def note_full(self, what: str) -> None:
        """The file system has no room. Puts are refused for a while, then tried again."""
        with self.lock:
            self.full_until = self.clock.monotonic() + self.config.retry_seconds
            if self.health is DiskHealth.OK:
                self.health = DiskHealth.FULL
        self.log_once(
            "full",
            "no room on the disk of %s (%s): new blocks stay in memory only. Free space there, or make "
            "--kv-disk-size smaller; %.1f GiB are ours",
            self.config.path,
            what,
            self.segments.used_bytes / 2**30,
        )

    def note_room(self) -> None:
        """A write went through."""
        with self.lock:
            if self.health is DiskHealth.FULL:
                self.health = DiskHealth.OK
                self._logged.pop("full", None)

    def become_read_only(self) -> None:
        """The file system takes no writes any more; its contents are still read."""
        with self.lock:
            if self.health in (DiskHealth.OK, DiskHealth.FULL):
                self.health = DiskHealth.READ_ONLY
        self.log_once(
            "read_only",
            "the disk of %s is read-only: blocks on it are used, new ones stay in memory only. Mount it for "
            "writing (an error of the disk may have made the kernel change it) and restart",
            self.config.path,
        )

    def log_once(self, cause: str, message: str, *args: object) -> None:
        """Log a warning, the same cause at most once a minute: a failing disk fails for every block."""
        now = self.clock.monotonic()
        with self.lock:
            if now - self._logged.get(cause, -_LOG_SECONDS) < _LOG_SECONDS:
                return
            self._logged[cause] = now
        logger.warning(message, *args)

    # --- runs ---

    def readable(self, run: int) -> Run | None:
        """The run, if it is there and not left alone after an error. Call under `lock`."""
        found = self.runs.get(run)
        if found is None or (found.quiet_until and self.clock.monotonic() < found.quiet_until):
            return None
        return found

    def header(self, run: Run) -> RunHeader:
        """A run's header, read and verified, from memory if it was used lately.

        Raises:
            FormatError: it does not verify, or is not the header that the index means.
            OSError: it could not be read.
        """
        row = run.row
        with self.lock:
            cached = self._headers.get(row.run)
            if cached is not None:
                self._headers.move_to_end(row.run)
                return cached
        data = self.files.pread(run.segment.fd, row.header_bytes, row.offset)
        header = decode_run_header(data)
        if checksum(data) != row.seal or header.namespace != row.namespace:
            raise FormatError("it is not the header that the index means")
        if header.shape.layer_bytes != self.layer_sizes:
            raise FormatError("it was written with another layout")
        self.remember_header(row.run, header)
        return header

    def remember_header(self, run: int, header: RunHeader) -> None:
        """Keep a header that has just been read or written."""
        with self.lock:
            self._headers[run] = header
            while len(self._headers) > _HEADERS_CACHED:
                self._headers.popitem(last=False)

    # --- changes ---

    def commit(self, change: Change) -> dict[int, int]:
        """Commit a change with the uses noted since the last one, and bring memory up to date.

        Call under `write_lock`. The caller publishes added runs, since it has their segments.

        Raises:
            IndexFailedError: nothing has changed.
        """
        with self.lock:
            used = {number: self.runs[number].use for number in self.used if number in self.runs}
            change.serves = lambda run: self.readable(run) is not None
            change.next_run, change.next_segment = self.next_run, self.segments.next_number
        change.uses = used
        alive = self.index.commit(change)
        with self.lock:
            self.counters.commits += 1
            self.used -= used.keys()
            for number, count in alive.items():
                run = self.runs.get(number)
                if run is not None:
                    run.use.alive = count
                    if not count:
                        self._forget(number)
                elif not count:
                    self.unavailable.discard(number)
        return alive

    def _forget(self, number: int) -> None:
        self.runs.pop(number, None)
        self._headers.pop(number, None)

    def forget_blocks(self, namespace: bytes, keys: Iterable[bytes]) -> None:
        """Drop blocks that turned out to be damaged, and runs and segments that are empty then."""
        with self.write_lock:
            if self.refusal not in (None, Outcome.FULL):
                return
            try:
                self.commit(Change(drop_blocks=[(namespace, key) for key in keys]))
            except IndexFailedError as error:
                self.note_index_failure(error)
                return
            self.remove_empty_segments()

    def forget_runs(self, numbers: set[int]) -> None:
        """Drop whole runs. As `forget_blocks`."""
        with self.write_lock:
            if self.refusal not in (None, Outcome.FULL):
                return
            try:
                self.commit(Change(replace=numbers))
            except IndexFailedError as error:
                self.note_index_failure(error)
                return
            self.remove_empty_segments()

    def note_index_failure(self, error: IndexFailedError) -> Outcome:
        """A change could not be committed. The rows concerned stay unchanged."""
        if error.full:
            self.note_full("index")
            return Outcome.FULL
        self.log_once(
            "index",
            "index of %s failed: %s. If it repeats, stop the server and run `sglang-ext doctor "
            "--kv-disk-path %s`",
            self.config.path,
            error,
            self.config.path,
        )
        return Outcome.IO_ERROR

    def remove_empty_segments(self) -> None:
        """Unlink segments in which nothing is alive. Call under `write_lock`."""
        with self.lock:
            alive = {run.row.segment for run in self.runs.values()}
            empty = [
                segment
                for segment in self.segments.by_number.values()
                if segment.number not in alive and not segment.writers and segment.end > PAGE
            ]
            for segment in empty:
                self.segments.remove(segment)
