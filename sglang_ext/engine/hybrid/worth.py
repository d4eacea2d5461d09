"""The worth of blocks in DRAM, and the order in which they are given up: pure.

The rule is one for all components, and that of the disk (`tiered_store/disk/reclaim.py`): tokens of computing
that blocks save, for each of their bytes, times the likelihood of their next use. That likelihood is taken as
the number of uses over the time since the last one ("hyperbolic caching"). Time is counted in bytes that DRAM
has taken in, so that it stands still while nothing comes.

Worth shrinks by itself, and so the order of two blocks may change without any event. Those that are equal but
for the time of their last use stay in that order. They share a *level*, of which only the first is looked at.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Final, Generic, TypeVar

USES_CAP: Final = 15
"""Maximum number of uses that count: without it, blocks that were popular long ago would outlive blocks that
are popular now."""
FRESH: Final = 64
"""Blocks that were used while one byte in so many was renewed count as equally recent."""
_SLACK: Final = 64
"""Entries that are out of date, beside as many as there are others, before they are dropped."""
STEPS: Final = 2
"""Levels between a worth and its double."""

Level = int
WORTHLESS: Final[Level] = -(1 << 30)
"""The level of blocks that no resume can use. They go before all others."""


def level_of(tokens: float, nbytes: float, uses: int) -> Level:
    """The level of blocks.

    Args:
        tokens: of computing that they save.
        nbytes: that are gained where they are given up.
        uses: since they came.
    """
    if not tokens:
        return WORTHLESS
    return math.floor(STEPS * math.log2(tokens / nbytes * (1 + min(uses, USES_CAP))))


def worth(level: Level, idle: float) -> float:
    """Worth of a byte that was used last when so many bytes fewer had come in; see `FRESH`."""
    return 0.0 if level == WORTHLESS else float(2.0 ** (level / STEPS) / idle)


T = TypeVar("T")

_Entry = tuple[float, int, T]


class ByWorth(Generic[T]):
    """Pieces in the order of their worth. Each call takes logarithmic time for a number of levels.

    Args:
        fresh: idle time below which pieces count as equally recent.
    """

    def __init__(self, fresh: float) -> None:
        self._fresh = max(1.0, fresh)
        self._levels: dict[Level, list[_Entry[T]]] = {}
        """For each level a heap: the time of the last use, a running number, and the piece."""
        self._current: dict[T, tuple[Level, _Entry[T]]] = {}
        """Entries of heaps that are not these are out of date."""
        self._number = 0

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, piece: T) -> bool:
        return piece in self._current

    def level(self, piece: T) -> Level | None:
        """The level of a piece; None where it is not here."""
        return self._current[piece][0] if piece in self._current else None

    def put(self, piece: T, level: Level, used: float) -> None:
        """Enter a piece, or change its level. used: the time of its last use."""
        old = self._current.get(piece)
        if old is not None and (old[0], old[1][0]) == (level, used):
            return
        self._number += 1
        entry = (used, self._number, piece)
        self._current[piece] = level, entry
        entries = self._levels.setdefault(level, [])
        heapq.heappush(entries, entry)
        if len(entries) > 2 * len(self._current) + _SLACK:
            entries[:] = [each for each in entries if self._is_current(level, each)]
            heapq.heapify(entries)

    def remove(self, piece: T) -> None:
        self._current.pop(piece, None)

    def _is_current(self, level: Level, entry: _Entry[T]) -> bool:
        return self._current.get(entry[2]) == (level, entry)

    def least(self, now: float, may_go: Callable[[T], bool]) -> T | None:
        """The piece that is worth least among those that may go."""
        found, least = None, math.inf
        for level in list(self._levels):
            first = self._first(level, may_go)
            if first is not None:
                value = worth(level, now - first[0] + self._fresh)
                if value < least:
                    found, least = first[2], value
        return found

    def _first(self, level: Level, may_go: Callable[[T], bool]) -> _Entry[T] | None:
        """The entry that was used least recently; the others in front of it stay."""
        entries, staying = self._levels[level], []
        while entries and not (self._is_current(level, entries[0]) and may_go(entries[0][2])):
            entry = heapq.heappop(entries)
            if self._is_current(level, entry):
                staying.append(entry)
        found = entries[0] if entries else None
        for entry in staying:
            heapq.heappush(entries, entry)
        if not entries:
            del self._levels[level]
        return found
