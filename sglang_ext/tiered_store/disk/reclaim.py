"""Choose the segments that a full disk tier drops. A plain function on plain data: no I/O, no clock.

The value of a run is the work that its blocks save, weighted by the likelihood of their next use: bytes alive
x times used, over the time since the last use. Runs of a segment that are worth far more than the rest of the
tier may be moved to the newest segment, as far as there is room: a hot system prompt must not go down with
the cold prompts that were written beside it. The segment goes first that loses the least value for each byte
gained, so age and dead space both count against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HITS_CAP = 15
"""Maximum number of uses that count: without it, a run that was popular long ago would outlive runs that are
popular now."""
FRESH_SECONDS = 60.0
"""Runs used within this time count as equally recent."""
MOVE_FACTOR = 4.0
"""A run is moved when it is worth this many times the median segment, byte for byte."""
MOVE_SHARE = 0.25
"""The largest part of a segment that is moved; beyond it, moving costs more writing than it saves."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run. nbytes: its length; alive: the part of its blocks still in the index, 0 to
    1.
    """

    run: int
    nbytes: int
    alive: float
    last: float
    hits: int

    def value(self, now: float) -> float:
        """Bytes alive x uses / seconds since the last use."""
        idle = max(0.0, now - self.last) + FRESH_SECONDS
        return self.nbytes * self.alive * (1 + min(self.hits, HITS_CAP)) / idle


@dataclass(frozen=True, slots=True)
class SegmentFacts:
    """Facts about a segment. busy: being read or written, so that it cannot go now."""

    segment: int
    nbytes: int
    busy: bool
    runs: tuple[RunFacts, ...]

    def density(self, now: float) -> float:
        """Value per byte, dead space included."""
        return sum(run.value(now) for run in self.runs) / max(1, self.nbytes)


@dataclass(frozen=True, slots=True)
class Victim:
    """A segment to drop, and the runs of it to move first, most valuable first."""

    segment: int
    move: tuple[int, ...]


def choose_victims(
    segments: Sequence[SegmentFacts], need: int, now: float, *, room_for_moves: int = 0
) -> list[Victim]:
    """Segments that go, in order, until `need` bytes are gained, as far as there are any that may go.

    Args:
        need: bytes to gain, after moves.
        now: the clock that `RunFacts.last` was read from.
        room_for_moves: bytes that moves may take before anything is gained.
    """
    densities = sorted(s.density(now) for s in segments)
    median = densities[len(densities) // 2] if densities else 0.0
    left = [s for s in segments if not s.busy]
    victims: list[Victim] = []
    gained = 0
    while left and gained < need:
        moves = {s.segment: _moves(s, median, room_for_moves, now) for s in left}
        segment = min(left, key=lambda s: (_loss(s, moves[s.segment], now), s.segment))
        left.remove(segment)
        moved = sum(run.nbytes for run in moves[segment.segment])
        room_for_moves -= moved
        gained += segment.nbytes - moved
        victims.append(Victim(segment.segment, tuple(run.run for run in moves[segment.segment])))
    return victims


def _loss(segment: SegmentFacts, moves: Sequence[RunFacts], now: float) -> float:
    """Value lost for each byte gained by dropping a segment after some of its runs have been moved."""
    lost = sum(run.value(now) for run in segment.runs) - sum(run.value(now) for run in moves)
    return lost / max(1, segment.nbytes - sum(run.nbytes for run in moves))


def _moves(segment: SegmentFacts, median: float, left: int, now: float) -> list[RunFacts]:
    left = min(left, int(segment.nbytes * MOVE_SHARE))
    ranked = sorted(segment.runs, key=lambda run: -run.value(now) / run.nbytes)
    chosen: list[RunFacts] = []
    for run in ranked:
        if run.value(now) / run.nbytes <= MOVE_FACTOR * median or run.nbytes > left:
            continue
        left -= run.nbytes
        chosen.append(run)
    return chosen
