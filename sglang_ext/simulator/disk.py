"""A disk without bytes: a tier of blocks by name, in segments of runs, as `DiskTier` lays them out.

A put of blocks is a run, runs follow each other in a segment, and the disk drops whole segments. The real
disk's own function chooses them (`reclaim.choose_victims`). It has no files, no checksums, no index on the
medium, and no faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from sglang_ext.geometry import BlockLayout
from sglang_ext.tiered_store.disk.reclaim import RunFacts, SegmentFacts, Victim, choose_victims
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead, Outcome, Put, TierStats
from sglang_ext.tiers import Tier

SEGMENTS: Final = 16
"""Into which a disk is divided, as `DiskConfig.segment_size` has it."""


@dataclass(eq=False)
class _Run:
    """Blocks that were written together. places: of those that are not dropped."""

    namespace: bytes
    segment: _Segment
    blocks: int
    places: dict[bytes, None]
    last: float
    hits: int = 0
    pins: int = 0


@dataclass(eq=False)
class _Segment:
    """blocks: written to it, dropped ones too."""

    number: int
    blocks: int = 0
    runs: list[_Run] = field(default_factory=list)
    writers: int = 0

    @property
    def busy(self) -> bool:
        return bool(self.writers) or any(run.pins for run in self.runs)


@dataclass(slots=True, eq=False)
class NamedPut(Put):
    """runs: the segment of each run, and its blocks."""

    runs: list[tuple[_Segment, int]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class NamedGet(Get):
    """runs: those that are pinned."""

    runs: tuple[_Run, ...] = ()


class NamedDisk(BlockTier):
    """See the module's docstring.

    Args:
        n_blocks: that fit.
        layout: of a block; of one layer, since layers are not read by themselves.
        wall: the time of uses.
    """

    durable = True
    tier = Tier.DISK

    def __init__(self, n_blocks: int, layout: BlockLayout, wall: Callable[[], float]) -> None:
        self.layout, self._n_blocks, self._wall = layout, n_blocks, wall
        self._segment_blocks = max(1, n_blocks // SEGMENTS)
        self._runs: dict[bytes, _Run] = {}
        """The run of each block."""
        self._segments: dict[int, _Segment] = {}
        self._active: _Segment | None = None
        self._next = 0
        self._put: Counter[Outcome] = Counter()
        self._got: Counter[Outcome] = Counter()
        self.evicted = 0
        """Blocks, since the process began."""
        self._watch: Callable[[Sequence[bytes], Sequence[bytes]], None] = lambda stored, removed: None

    @property
    def used_blocks(self) -> int:
        """Of all segments, dropped blocks too."""
        return sum(segment.blocks for segment in self._segments.values())

    # -- finding ------------------------------------------------------------------------------------

    def match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        count = 0
        for key in keys:
            if key not in self._runs:
                break
            count += 1
        return count

    def held(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        return [key in self._runs for key in keys]

    # -- writing ------------------------------------------------------------------------------------

    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> NamedPut | Outcome:
        missing = [place for place, key in enumerate(keys) if key not in self._runs]
        runs: list[tuple[_Segment, int]] = []
        left, count = min(len(missing), self._n_blocks // 2), 0
        while left:
            blocks = min(left, self._segment_blocks)
            segment = self._room(blocks)
            if segment is None:
                break
            runs.append((segment, blocks))
            left, count = left - blocks, count + blocks
        self._put[Outcome.FULL] += len(missing) - count
        if missing and not count:
            return Outcome.FULL
        return NamedPut(namespace, tuple(keys), tuple(missing[:count]), tuple(missing[count:]), runs)

    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        return Outcome.DONE

    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        for put in puts:
            assert isinstance(put, NamedPut)
            start, wanted = 0, put.wanted
            for segment, blocks in put.runs:
                segment.writers -= 1
                self._add(put.namespace, wanted[start : start + blocks], segment, self._wall(), 0)
                start += blocks
            self._put[Outcome.DONE] += start
            self._watch(wanted, ())
        return [Outcome.DONE] * len(puts)

    def abort_put(self, put: Put) -> None:
        assert isinstance(put, NamedPut)
        for segment, _ in put.runs:
            segment.writers -= 1

    def _add(
        self, namespace: bytes, keys: Sequence[bytes], segment: _Segment, last: float, hits: int
    ) -> None:
        run = _Run(namespace, segment, len(keys), dict.fromkeys(keys), last, hits)
        segment.runs.append(run)
        for key in keys:
            before = self._runs.get(key)
            if before is not None:
                before.places.pop(key, None)
            self._runs[key] = run

    def _room(self, blocks: int) -> _Segment | None:
        """The segment for a run of so many blocks, with its room taken; None if the disk has no room."""
        lacking = self.used_blocks + blocks - self._n_blocks
        if lacking > 0:
            self._reclaim(lacking)
            if self.used_blocks + blocks > self._n_blocks:
                return None
        segment = self._segment_for(blocks)
        segment.writers += 1
        return segment

    def _segment_for(self, blocks: int) -> _Segment:
        active = self._active
        if active is None or (active.blocks and active.blocks + blocks > self._segment_blocks):
            active = self._active = _Segment(self._next)
            self._segments[self._next] = active
            self._next += 1
        active.blocks += blocks
        return active

    # -- giving up segments -------------------------------------------------------------------------

    def _reclaim(self, blocks: int) -> None:
        facts = [
            SegmentFacts(
                segment.number,
                segment.blocks,
                segment.busy,
                tuple(
                    RunFacts(place, run.blocks, len(run.places) / run.blocks, run.last, run.hits)
                    for place, run in enumerate(segment.runs)
                ),
            )
            for segment in self._segments.values()
        ]
        # The real disk begins to reclaim a quarter of a segment before it is full, and moves runs there.
        left = self._segment_blocks // 4
        for victim in choose_victims(facts, blocks, self._wall(), room_for_moves=left):
            self._drop_segment(victim)

    def _drop_segment(self, victim: Victim) -> None:
        segment = self._segments.pop(victim.segment)
        if self._active is segment:
            self._active = None
        for place in victim.move:
            run = segment.runs[place]
            if run.places:
                keys = list(run.places)
                self._add(run.namespace, keys, self._segment_for(len(keys)), run.last, run.hits // 2)
        gone = [key for run in segment.runs for key in run.places]
        for key in gone:
            del self._runs[key]
        self.evicted += len(gone)
        self._watch((), gone)

    # -- reading ------------------------------------------------------------------------------------

    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> NamedGet:
        found = self.match(namespace, keys)
        runs = tuple(dict.fromkeys(self._runs[key] for key in keys[:found]))
        for run in runs:
            run.pins += 1
        return NamedGet(namespace, tuple(keys), found, runs)

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        self._got[Outcome.DONE] += len(ids)
        return LayerRead(len(ids), Outcome.DONE)

    def complete_get(self, get: Get) -> None:
        assert isinstance(get, NamedGet)
        runs, get.runs = get.runs, ()
        for run in runs:
            run.pins -= 1
            run.last = max(run.last, self._wall())
            run.hits += 1

    # -- whole --------------------------------------------------------------------------------------

    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        gone = [key for key in dict.fromkeys(keys) if key in self._runs]
        for key in gone:
            self._runs.pop(key).places.pop(key)
        self._watch((), gone)
        return len(gone)

    def clear(self, namespace: bytes | None = None) -> int:
        return self.drop(b"", [key for key, run in self._runs.items() if namespace in (None, run.namespace)])

    def watch(self, watch: Callable[[Sequence[bytes], Sequence[bytes]], None]) -> None:
        """Call it from now on with the names that come, and those that go."""
        self._watch = watch

    def names(self) -> list[bytes]:
        """Of all blocks."""
        return list(self._runs)

    def restarted(self) -> None:
        """The process has died and starts again: reads and writes under way are gone, the rest is there."""
        for segment in self._segments.values():
            segment.writers = 0
            for run in segment.runs:
                run.pins = 0
        self._active = None
        self.evicted = 0

    def stats(self) -> TierStats:
        size = self.layout.block_bytes
        pins = sum(run.pins for segment in self._segments.values() for run in segment.runs)
        used, limit = self.used_blocks * size, self._n_blocks * size
        return TierStats(len(self._runs), used, limit, pins, dict(self._put), dict(self._got), self.evicted)

    def check(self) -> None:
        assert self.used_blocks <= self._n_blocks, f"{self.used_blocks} of {self._n_blocks} blocks are used"
        alive = 0
        for segment in self._segments.values():
            assert sum(run.blocks for run in segment.runs) <= segment.blocks
            for run in segment.runs:
                alive += len(run.places)
                assert all(self._runs.get(key) is run for key in run.places), "a run has a block of another"
        assert alive == len(self._runs), f"runs have {alive} blocks, the index {len(self._runs)}"

    def close(self) -> None:
        """Nothing is open."""
