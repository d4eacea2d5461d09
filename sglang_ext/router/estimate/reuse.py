"""Reuse of blocks by an LRU cache of every size at once: stack distances (Mattson and others, 1970).

The distance of a block is the number of different blocks that were used since its last use, itself included:
an LRU cache with room for so many blocks finds it. Blocks are prefixes. Every use of a block is one of all
before it, and an eviction takes the end of a prefix first, so a chain's blocks have growing distances, and
those with the same last use lie side by side: a request costs a few lookups, however long it is.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

FIRST_SIZE: Final = 1024


class Run(NamedTuple):
    """``blocks`` blocks side by side in a prompt, with the distances ``before + 1``, ``before + 2``, …"""

    before: int
    blocks: int


class Stack:
    """Blocks by their last use."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}
        """Block -> number of its last use."""
        self._ends: dict[Hashable, tuple[int, int]] = {}
        """Last block of a prompt -> (use, blocks of the answer whose names are not known)."""
        self._counts = array("q", bytes(8 * FIRST_SIZE))
        """Use -> blocks whose last use it was."""
        self._sums = np.zeros(FIRST_SIZE + 1, np.int64)  # a Fenwick tree over ``_counts``
        self._uses = 0
        self.blocks = 0
        """Different blocks."""

    def depth(self, names: Sequence[Hashable]) -> int:
        """Leading blocks that were used before."""
        last = self._last
        if not names or names[0] not in last:
            return 0
        return bisect_left(range(len(names)), True, key=lambda at: names[at] not in last)

    def use(self, names: Sequence[Hashable], answer: int = 0) -> list[Run]:
        """Use the blocks of a prompt. Returns the runs of those that were used before, from the front.

        Args:
            names: its blocks, each a prefix.
            answer: further whole blocks that its answer completes, with names that are not known. Of a later
                prompt that goes on where this one ends, they are its next blocks.
        """
        known, now = self.depth(names), self._uses
        self._uses += 1
        if now == len(self._counts):
            self._grow()
        found = list(self._runs(names, known))
        taken = 0
        if known and (end := self._ends.pop(names[known - 1], None)) is not None:
            use, blocks = end
            taken = min(blocks, len(names) - known)
            if found and taken:
                found.append(Run(max(found[-1].before + found[-1].blocks, self._after(use)), taken))
            self._add(use, -blocks)
            self.blocks -= blocks
        for use, count in self._uses_of(names, known):
            self._add(use, -count)
        self._last.update(dict.fromkeys(names, now))
        if names and answer:
            if (former := self._ends.get(names[-1])) is not None:
                self._add(former[0], -former[1])
                self.blocks -= former[1]
            self._ends[names[-1]] = (now, answer)
        self._add(now, len(names) + (answer if names else 0))
        self.blocks += len(names) - known + (answer if names else 0)
        return found

    def _uses_of(self, names: Sequence[Hashable], known: int) -> Iterator[tuple[int, int]]:
        """(last use, blocks) of the leading blocks, side by side."""
        last, at = self._last, 0
        while at < known:
            use, low, high = last[names[at]], at + 1, known
            while low < high:
                middle = (low + high) // 2
                low, high = (middle + 1, high) if last[names[middle]] == use else (low, middle)
            yield use, low - at
            at = low

    def _runs(self, names: Sequence[Hashable], known: int) -> Iterator[Run]:
        for use, count in self._uses_of(names, known):
            yield Run(self._after(use), count)

    def _after(self, use: int) -> int:
        """Blocks whose last use is later."""
        total, at = 0, use + 1
        while at > 0:
            total += int(self._sums[at])
            at -= at & -at
        return self.blocks - total

    def _add(self, use: int, count: int) -> None:
        self._counts[use] += count
        at, size, sums = use + 1, len(self._counts), self._sums
        while at <= size:
            sums[at] += count
            at += at & -at

    def _grow(self) -> None:
        size = 2 * len(self._counts)
        self._counts.extend([0] * (size - len(self._counts)))
        sums = np.zeros(size + 1, np.int64)
        sums[1:] = np.cumsum(np.frombuffer(self._counts, np.int64))
        at = np.arange(1, size + 1)
        self._sums = sums.copy()
        self._sums[1:] = sums[at] - sums[at - (at & -at)]


def found_within(runs: Sequence[Run], size: int) -> int:
    """Blocks of a prompt that a cache with room for ``size`` blocks finds."""
    return sum(min(max(size - run.before, 0), run.blocks) for run in runs)


class Curve:
    """Found blocks by size of the cache, over all prompts of a log."""

    def __init__(self) -> None:
        self._before, self._count = array("q"), array("q")

    def add(self, runs: Sequence[Run]) -> None:
        """Count a prompt."""
        for run in runs:
            self._before.append(run.before)
            self._count.append(run.blocks)

    def found(self, size: int) -> int:
        """Blocks that a cache with room for ``size`` blocks finds."""
        if not self._before:
            return 0
        before, count = np.frombuffer(self._before, np.int64), np.frombuffer(self._count, np.int64)
        return int(np.minimum(np.maximum(size - before, 0), count).sum())

    @property
    def most(self) -> int:
        """Blocks that a cache without a limit finds."""
        return sum(self._count)
