"""The disk tier of another process on this host, as a second reader of its directory.

The ranks of prefill context parallelism have the same KV. One of them owns the directory, and writes. The
others read it: its index by LMDB's own locks, its segments as files. A put is done here at once, without a
byte written; whether the block is on disk is the owner's answer, and the ranks go by the least of theirs
(`engine/ranks.py`).

The owner may remove a segment at any time. A get opens the segments that it reads, and keeps them open until
it ends. A block that no longer exists by then, or does not verify, is a miss; the owner reads the same
blocks, and drops damaged ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_ext.clock import Clock
from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.disk.files import Files
from sglang_ext.tiered_store.disk.index import Index, IndexDamagedError, IndexFailedError
from sglang_ext.tiered_store.disk.index_rows import RunUse
from sglang_ext.tiered_store.disk.read import DiskGet, DiskReader
from sglang_ext.tiered_store.disk.segments import Segment, SegmentFiles
from sglang_ext.tiered_store.disk.state import DiskConfig, DiskHealth, DiskState, Run
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from sglang_ext.tiered_store.tier import (
    BlockMemory,
    BlockTier,
    Get,
    Ids,
    LayerRead,
    Outcome,
    Put,
    TierStats,
    check_names,
    check_put_layer,
)
from sglang_ext.tiers import Tier

_MOST_RUNS = 1 << 16
"""Rows of the index that are kept in memory."""

OpenIndex = Callable[[Path], Index]


def open_shared(path: Path) -> Index:
    """The index of a directory that another process writes.

    Raises:
        IndexDamagedError, OSError: it cannot be read.
    """
    return Index(path, shared=True)


class FollowedDisk(BlockTier):
    """See the module's docstring.

    Args:
        config: as the owner's, which has the directory open.
        layout: of the blocks.
        open_index: opens the index, again where the owner had to begin anew.
        files, clock: the system's, or a test's.
        tier: its number among the tiers below memory.
    """

    durable = True

    def __init__(
        self,
        config: DiskConfig,
        layout: BlockLayout,
        *,
        open_index: OpenIndex = open_shared,
        files: Files | None = None,
        clock: Clock | None = None,
        tier: Tier = Tier.DISK,
    ) -> None:
        self.tier = tier
        self.layout = layout
        self.config = config
        files = files or Files()
        self._state = _FollowedState(config, layout, open_index, files=files, clock=clock)
        self._reader = DiskReader(self._state)

    # --- the contract ---

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        self._state.follow()
        return self._reader.match(namespace, keys)

    def held(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        self._state.follow()
        return self._reader.held(namespace, keys)

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> Put | Outcome:
        check_names(namespace, keys)
        return Outcome.CLOSED if self._closed else Put(namespace, tuple(keys), (), ())

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        check_put_layer(put, layer, memory, ids, self.layout)
        return Outcome.CLOSED if self._closed else Outcome.DONE

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        return [Outcome.CLOSED if self._closed else Outcome.DONE] * len(puts)

    def abort_put(self, put: Put) -> None:
        pass

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> DiskGet:
        self._state.follow()
        return self._reader.prepare_get(namespace, keys)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        return self._reader.get_layer(get, layer, memory, ids)

    def complete_get(self, get: Get) -> None:
        self._reader.complete_get(get)
        with self._state.lock:
            self._state.used.clear()  # the owner notes the uses

    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        return 0

    def clear(self, namespace: bytes | None = None) -> int:
        return 0

    def stats(self) -> TierStats:
        """Of this reader. The owner counts the bytes on disk, and the blocks that were put there."""
        state = self._state
        with state.lock:
            return TierStats(
                blocks=0,
                used_bytes=0,
                limit_bytes=0,
                pins=state.pins,
                put={},
                got=dict(state.counters.got),
                extra={"bytes_read": state.counters.bytes_read},
            )

    def check(self) -> None:
        """Verify that the segments which are open are those being read."""
        with self._state.lock:
            for segment in self._state.segments.by_number.values():
                if (segment.fd >= 0) != bool(segment.readers):
                    raise AssertionError(f"{segment.path} has {segment.readers} readers, and fd {segment.fd}")

    def close(self) -> None:
        state = self._state
        with state.lock:
            if self._closed:
                return
            state.health = DiskHealth.CLOSED
        state.close_index()

    @property
    def _closed(self) -> bool:
        return self._state.health is DiskHealth.CLOSED

    def __repr__(self) -> str:
        return f"<FollowedDisk {self.config.path} {self._state.health.value}, {self._state.pins} pins>"


class _FollowedSegments(SegmentFiles):
    """Segments as gets read them: open from `hold` to the last reader's `finish`."""

    def segment(self, number: int) -> Segment:
        found = self.by_number.get(number)
        if found is None:
            found = Segment(number, self.name(number), -1, -1, 0, 0, retired=True, removed=True)
            self.by_number[number] = found
        return found

    def hold(self, segment: Segment) -> bool:
        if segment.fd < 0:
            try:
                segment.fd = self.files.open(segment.path)
            except OSError:
                return False
        return super().hold(segment)


class _FollowedState(DiskState):
    """The runs of a directory that another process writes, as its index has them. Changes nothing there.

    The owner never gives a number of a run or segment twice while it runs.
    """

    def __init__(
        self,
        config: DiskConfig,
        layout: BlockLayout,
        open_index: OpenIndex,
        *,
        files: Files,
        clock: Clock | None,
    ) -> None:
        self._index_path = config.path / INDEX_DIRECTORY
        self._open_index = open_index
        segments = _FollowedSegments(
            config.path, files, segment_bytes=config.segment_size, direct=False, readonly=True
        )
        self._segments = segments
        super().__init__(config, layout, self._opened(), segments, files=files, clock=clock)
        self.health = DiskHealth.READ_ONLY

    def _opened(self) -> Index:
        try:
            return self._open_index(self._index_path)
        except (IndexDamagedError, OSError) as error:
            self._unopened = str(error)
            return Index.missing(self._index_path)

    def follow(self) -> None:
        """Go on with the owner's present index, where it had to begin anew."""
        if self.index.in_place() and not self.index.closed:
            return
        if self.health is DiskHealth.CLOSED or self.clock.monotonic() < self._try_at:
            return
        index = self._opened()
        if index.closed:
            self._try_at = self.clock.monotonic() + self.config.retry_seconds
            self.log_once("index", "the index of %s cannot be read: %s", self.config.path, self._unopened)
            return
        with self.lock:
            # Lookups in other threads may still be in the former one.
            self._left.append(self.index)
            self.index = index
            self.runs.clear()

    def readable(self, run: int) -> Run | None:
        """As the owner's, from the index: a run of which it still lists a block is there."""
        found = super().readable(run)
        if found is not None or run in self.runs:
            return found
        try:
            row = self.index.row_of(run)
        except IndexFailedError:
            return None
        if row is None:
            return None
        if len(self.runs) >= _MOST_RUNS:
            self.runs.clear()
        found = Run(row, RunUse(row.created, 0, row.blocks), self._segments.segment(row.segment))
        self.runs[run] = found
        return found
