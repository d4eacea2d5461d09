"""The segment files of a disk tier: the list of them, the place of the next run, and their removal.

Not safe for threads on its own: the tier calls it under its lock, or its write lock where files are touched.
"""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.tiered_store.disk.files import Files, close_quietly, write_bytes
from sglang_ext.tiered_store.disk.segment_format import (
    PAGE,
    FormatError,
    decode_segment_header,
    encode_segment_header,
)

logger = logging.getLogger(__name__)

SUFFIX = ".seg"


@dataclass(slots=True, eq=False)
class Segment:
    """One file. end: where the next run would go; all that is durable lies below.

    capacity: the maximum size of the file. readers, writers: gets and puts under way in it.
    retired: takes no more runs. removed: unlinked; open only for its readers.
    """

    number: int
    path: Path
    fd: int
    direct_fd: int
    end: int
    capacity: int
    readers: int = 0
    writers: int = 0
    retired: bool = False
    removed: bool = False
    named: bool = False
    """Whether the file's name is durable."""

    @property
    def busy(self) -> bool:
        return bool(self.readers or self.writers)


@dataclass(frozen=True, slots=True)
class ScanResult:
    """Result of the scan at start, for the segments that the index needs.

    lost: those that are gone or are something else now, with the reason.
    unreadable: those that may be there, but cannot be read now.
    short: those that end before the index says, with their size.
    foreign: files of another store, which is what segments look like once their index has been lost.
    """

    lost: Mapping[int, str]
    unreadable: Mapping[int, str]
    short: Mapping[int, int]
    foreign: tuple[Path, ...]


class SegmentFiles:
    """All segments of one directory.

    Args:
        segment_bytes: size of a file; a new one is begun where a run would not fit.
        direct: also open files with O_DIRECT, for reads.
    """

    def __init__(
        self, path: Path, files: Files, *, segment_bytes: int, direct: bool, readonly: bool = False
    ) -> None:
        self.path = path
        self.files = files
        self.segment_bytes = segment_bytes
        self.direct = direct
        self.readonly = readonly
        self.store = b""
        self._stores: frozenset[bytes] = frozenset()
        self.next_number = 1
        self.active: Segment | None = None
        self.by_number: dict[int, Segment] = {}
        self.foreign: list[tuple[Path, int]] = []
        """Segments of a lost index, and their sizes. They count as used, and go first when room is needed."""

    @property
    def used_bytes(self) -> int:
        """Bytes of runs and of the dead space inside files."""
        used = sum(segment.end for segment in self.by_number.values())
        return used + sum(size for _, size in self.foreign)

    def drop_foreign(self) -> int:
        """Remove the oldest segment of a lost index; returns the bytes gained, 0 when there is none."""
        if not self.foreign:
            return 0
        path, gained = self.foreign.pop(0)
        logger.warning("removing %s, a segment of a lost index, to make room", path)
        self._remove_file(path)
        return gained

    def name(self, number: int) -> Path:
        return self.path / f"{number:08d}{SUFFIX}"

    # --- at start ---

    def scan(self, stores: Sequence[bytes], next_number: int, ends: Mapping[int, int]) -> ScanResult:
        """Open the segments that the index knows; remove the remains of a crash.

        Args:
            stores: id of the store, and of stores whose segments it has taken over; files of others are left
                alone.
            ends: segment -> where its last committed run ends. Bytes beyond belong to puts that were never
                completed, and are given back.
        """
        self.store = stores[0]
        self._stores = frozenset(stores)
        lost: dict[int, str] = {}
        unreadable: dict[int, str] = {}
        short: dict[int, int] = {}
        foreign: list[Path] = []
        highest = 0
        for path in sorted(self.path.glob(f"*{SUFFIX}")):
            number = int(path.stem) if path.stem.isdigit() else 0
            highest = max(highest, number)
            known = ends.get(number)
            try:
                problem = self._problem(path, number, needed=known is not None)
                if problem is None and known is not None:
                    size = self._adopt(path, number, known)
                    if size < known:
                        short[number] = size
                    continue
            except OSError as error:
                unreadable[number] = str(error.strerror)
                continue
            if problem is None or path.stat().st_size < PAGE:
                self._remove_file(path)  # ours, and nothing in it was ever completed
            else:
                foreign.append(path)
                if known is not None:
                    lost[number] = str(problem)
        for number in ends:
            if number not in self.by_number and number not in lost and number not in unreadable:
                lost[number] = "the file is missing"
        self.next_number = max(next_number, highest + 1)
        self._choose_active()
        self.foreign = [(path, file_size(path)) for path in foreign if is_segment(path)]
        return ScanResult(lost, unreadable, short, tuple(foreign))

    def _problem(self, path: Path, number: int, *, needed: bool) -> str | None:
        """Why a file is not one of ours; None when it is. Raises OSError if the file cannot be examined.

        A damaged first page is no reason to give up a segment that the index needs: runs prove themselves.
        """
        fd = self.files.open(path)
        try:
            store, found = decode_segment_header(self.files.pread(fd, PAGE, 0))
        except FormatError as error:
            if needed:
                logger.warning("segment %s: first page: %s; its runs are used all the same", path, error)
            return None if needed else str(error)
        finally:
            close_quietly(self.files, fd)
        if store not in self._stores or found != number:
            return "it belongs to another store"
        return None

    def _adopt(self, path: Path, number: int, end: int) -> int:
        """Open a known segment and cut off its unfinished tail; returns its size before."""
        fd = self.files.open(path, write=not self.readonly)
        size = self.files.size(fd)
        if size > end and not self.readonly:
            try:
                self.files.truncate(fd, end)
            except OSError as error:
                logger.warning("cannot give back the unused end of %s: %s", path, error)
        segment = Segment(number, path, fd, self._open_direct(path), end, max(end, self.segment_bytes))
        segment.named = True
        segment.retired = size < end
        self.by_number[number] = segment
        return size

    def _choose_active(self) -> None:
        """Go on in the newest segment if there is much room left in it, instead of leaving it short for
        good.
        """
        newest = max(self.by_number.values(), key=lambda s: s.number, default=None)
        for segment in self.by_number.values():
            segment.retired = segment.retired or segment is not newest
        if newest and not newest.retired and not self.readonly and newest.end < newest.capacity // 2:
            try:
                self.files.truncate(newest.fd, newest.capacity)
            except OSError:
                newest.retired = True
            else:
                self.active = newest
        elif newest:
            newest.retired = True

    def _open_direct(self, path: Path) -> int:
        if not self.direct:
            return -1
        try:
            return self.files.open(path, direct=True)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the file system has no O_DIRECT
                logger.warning("cannot open %s past the page cache: %s", path, error)
            return -1

    # --- growing ---

    def reserve(self, length: int) -> tuple[Segment, int]:
        """Room for a run at the end of the active segment, or of a new one: the segment and the offset.

        Raises:
            OSError: a new file could not be made.
        """
        active = self.active
        if active is None or active.retired or active.end + length > active.capacity:
            if active is not None:
                active.retired = True
            active = self.active = self._create(max(self.segment_bytes, PAGE + length))
        offset = active.end
        active.end += length
        active.writers += 1
        return active, offset

    def release(self, segment: Segment, offset: int, length: int, *, keep: bool) -> None:
        """End a reservation. Space that is not kept is returned if it is the file's last, else it stays as
        dead space.
        """
        segment.writers -= 1
        if not keep and segment.end == offset + length and not segment.removed:
            segment.end = offset

    def _create(self, capacity: int) -> Segment:
        number = self.next_number
        path = self.name(number)
        fd = self.files.open(path, write=True, create=True)
        try:
            write_bytes(self.files, fd, encode_segment_header(self.store, number), 0)
            # The full size at once, as a hole: later syncs then have no size to write.
            self.files.truncate(fd, capacity)
        except OSError:
            close_quietly(self.files, fd)
            with contextlib.suppress(OSError):
                self.files.unlink(path)
            raise
        self.next_number = number + 1
        segment = Segment(number, path, fd, self._open_direct(path), PAGE, capacity)
        self.by_number[number] = segment
        return segment

    def sync(self, segment: Segment) -> None:
        """Make all that was written to a segment durable, its name included. Raises OSError.

        After a failed sync the kernel may have dropped the pages that it could not write: the caller gives up
        every put in the segment, and nothing is added to it any more.
        """
        try:
            if not segment.path.exists():
                raise FileNotFoundError(errno.ENOENT, "the segment was removed", str(segment.path))
            self.files.fdatasync(segment.fd)
            if not segment.named:
                self.files.sync_directory(self.path)
                segment.named = True
        except OSError:
            segment.retired = True
            raise

    # --- reading ---

    def hold(self, segment: Segment) -> bool:
        """Keep a segment open for one more reader, until its `finish`. Whether it can be read."""
        segment.readers += 1
        return True

    # --- ending ---

    def remove(self, segment: Segment) -> None:
        """Unlink a segment. Its readers keep it open; `finish` closes it after the last."""
        segment.removed = segment.retired = True
        if self.active is segment:
            self.active = None
        self.by_number.pop(segment.number, None)
        self._remove_file(segment.path)
        self.finish(segment)

    def finish(self, segment: Segment) -> None:
        """Close a removed segment if no read or write is using it."""
        if segment.removed and not segment.busy and segment.fd >= 0:
            close_quietly(self.files, segment.fd)
            close_quietly(self.files, segment.direct_fd)
            segment.fd = segment.direct_fd = -1

    def _remove_file(self, path: Path) -> None:
        if self.readonly:
            return
        try:
            self.files.unlink(path)
        except OSError as error:
            logger.warning("cannot remove segment %s: %s; remove it by hand", path, error)

    def close(self) -> None:
        """Close all files, giving back unused ends. Segments with readers are closed by `finish`."""
        for segment in self.by_number.values():
            if not self.readonly and segment is self.active:
                with contextlib.suppress(OSError):
                    self.files.truncate(segment.fd, segment.end)
            segment.removed = True  # from here on; the file stays
            self.finish(segment)
        self.by_number.clear()
        self.active = None


def file_size(path: Path) -> int:
    """Bytes of a file, 0 when there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def is_segment(path: Path) -> bool:
    """Whether a file starts as one of our segments, of whatever store."""
    try:
        with path.open("rb") as file:
            decode_segment_header(file.read(PAGE))
    except (OSError, FormatError):
        return False
    return True
