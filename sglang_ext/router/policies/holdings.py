"""The holders of a prompt, grouped by their matches, and the few of them that any instance would read from.

A popular beginning has a thousand holders, and most hold the same: the index gives them one match object. Of
the holders with the same end, an instance reads from the fastest, whichever instance it is: transfers from
two sources differ by a factor. So the sources of a prompt are found once for all targets of a kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_ext.router.policies.base import NOTHING, Fleet, Instance, Match, Matches, WholeFleet
from sglang_ext.router.policies.outlook import Numbers, Outlook
from sglang_ext.router.policies.spans import MOST_ENDS
from sglang_ext.tiers import Tier

DIGITS = 9
"""Smaller differences of sources are those of rounding."""
SPARE = 3
"""Sources that are kept for an end: the target is none, and one may fail."""


class Group:
    """The holders of one match. places: their positions in the fleet, in order."""

    __slots__ = ("held", "places", "whole")

    def __init__(self, held: Match) -> None:
        self.held = held
        self.places: list[int] = []
        self.whole: Numbers = np.empty(0, np.int64)
        """``places``, as an array."""


def grouped(fleet: Fleet, matches: Matches) -> list[Group]:
    """The holders of a prompt among a fleet, by match."""
    places: dict[str, int]
    if isinstance(fleet, WholeFleet):
        places = fleet.places
    else:
        places = {fleet[place].name: place for place in range(len(fleet))}
    found: dict[int, Group] = {}
    held = NOTHING
    into: list[Any] = []
    for name, match in matches.items():
        place: Any = places.get(name)  # compiled, an int would be made anew for the list
        if place is None:
            continue
        if match is not held:
            if not match.tokens:
                continue
            known = found.get(id(match))
            if known is None:
                known = found[id(match)] = Group(match)
            held, into = match, known.places
        into.append(place)
    groups = list(found.values())
    for group in groups:
        group.places.sort()
        group.whole = np.fromiter(group.places, np.int64, len(group.places))
    return groups


class Sources:
    """The sources of a prompt.

    Args:
        tokens: length of the prompt.
        groups: its holders.
    """

    def __init__(self, tokens: int, fleet: Fleet, groups: Sequence[Group], outlook: Outlook) -> None:
        self._tokens = tokens
        self._fleet = fleet
        self._groups = groups
        self._outlook = outlook
        self._found: dict[int, tuple[Instance, ...]] = {}

    def of(self, kind: int) -> tuple[Instance, ...]:
        """Holders that instances of a kind can fetch from: enough of them that the fastest plan of each such
        instance, and its spare, are those over all holders."""
        found = self._found.get(kind)
        if found is None:
            found = self._found[kind] = self._select(kind)
        return found

    def _select(self, kind: int) -> tuple[Instance, ...]:
        in_memory: dict[int, list[Group]] = {}
        on_disk: dict[int, list[Group]] = {}
        for group in self._groups:
            end, memory = min(group.held.tokens, self._tokens), min(group.held.in_memory, self._tokens)
            if memory:
                in_memory.setdefault(memory, []).append(group)
            if end > memory:
                on_disk.setdefault(end, []).append(group)
        chosen: set[int] = set()
        left = MOST_ENDS
        for memory in sorted(in_memory, reverse=True):
            fastest = self._fastest(kind, in_memory[memory])
            chosen.update(fastest)
            left -= bool(fastest)
            if not left:
                break
        left = MOST_ENDS
        for end in sorted(on_disk, reverse=True):
            from_disk = self._fastest_loading(kind, on_disk[end], end)
            chosen.update(from_disk)
            left -= bool(from_disk)
            if not left:
                break
        return tuple([self._fleet[place] for place in sorted(chosen)])

    def _fastest(self, kind: int, groups: Sequence[Group]) -> list[int]:
        """Positions of the fastest sources of KV in memory; the first among equals."""
        outlook = self._outlook
        if outlook.even_fetches:
            first: list[int] = []
            for group in groups:
                first += outlook.reachable(kind, group.whole)[:SPARE].tolist()
            return sorted(first)[:SPARE]
        found: list[tuple[float, int]] = []
        for group in groups:
            places = outlook.reachable(kind, group.whole)
            found += _least(outlook.fetch_factor[places], places)
        return [place for _, place in sorted(found)[:SPARE]]

    def _fastest_loading(self, kind: int, groups: Sequence[Group], end: int) -> list[int]:
        """The same of KV that the sources load from their disks, for the longest and the shortest read."""
        outlook, chosen = self._outlook, set[int]()
        for start in (0, max(min(group.held.in_memory, end - 1) for group in groups)):
            found: list[tuple[float, int]] = []
            for group in groups:
                places = outlook.reachable(kind, group.whole)
                moved_s = outlook.moving_s(end - start)
                load_s = disk_s(group.held, end, outlook)
                seconds = load_s * outlook.disk_factor[places] + moved_s * outlook.fetch_factor[places]
                found += _least(seconds, places)
            chosen.update([place for _, place in sorted(found)[:SPARE]])
        return sorted(chosen)


def _least(seconds: Numbers, places: Numbers) -> list[tuple[float, int]]:
    """The ``SPARE`` least of some seconds that are finite, with their positions; the first among equals."""
    seconds = seconds.round(DIGITS)
    if len(places) > SPARE:
        first = np.argsort(seconds, kind="stable")[:SPARE] if seconds.min() < seconds.max() else slice(SPARE)
        seconds, places = seconds[first], places[first]
    pairs = zip(seconds.tolist(), places.tolist(), strict=True)
    return [(value, place) for value, place in pairs if value < float("inf")]


def disk_s(held: Match, end: int, outlook: Outlook) -> float:
    """Time in which a holder loads its KV below memory up to ``end``, uncorrected."""
    known, seconds = held.hbm, 0.0
    for tier, count in held.below.items():
        if known >= end:
            break
        if count and not tier.in_memory:
            seconds += outlook.loading_s(tier, min(count, end - known))
        known += count
    return seconds


def loads_s(below: dict[Tier, int], outlook: Outlook) -> tuple[float, float]:
    """Time in which an instance loads its own KV: from memory, and from below it, uncorrected."""
    memory_s = below_s = 0.0
    for tier, count in below.items():
        if not count:
            continue
        if tier.in_memory:
            memory_s += outlook.loading_s(tier, count)
        else:
            below_s += outlook.loading_s(tier, count)
    return memory_s, below_s
