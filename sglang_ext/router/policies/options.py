"""The costs of a prompt at an instance besides the queue: each way to bring its KV and compute the rest.

All instances of one kind that hold the same part of a prompt have the same options. An option's seconds are

    moving + disk factor · load from the own disk + exec weight · factor · exec

and the least of them counts, as in ``spans.price_at``, which lists the spans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_ext.router.policies.base import Costs, Instance, Match, Matches
from sglang_ext.router.policies.holdings import loads_s
from sglang_ext.router.policies.outlook import Numbers, Outlook
from sglang_ext.router.policies.spans import reads_to
from sglang_ext.tiers import Tier, all_tiers


class Option:
    """Seconds, uncorrected. moving_s: loads from the instance's own memory, and reads from others. disk_s:
    loads from its own disk. exec_s: of ``new`` tokens behind ``context`` at an idle instance, in ``passes``.
    adding_s: the least of it where other prompts wait."""

    __slots__ = ("adding_s", "context", "disk_s", "exec_s", "moving_s", "new", "passes")

    def __init__(
        self,
        moving_s: float,
        disk_s: float,
        new: int,
        context: int,
        exec_s: float,
        passes: int,
        adding_s: float,
    ) -> None:
        self.moving_s, self.disk_s = moving_s, disk_s
        self.new, self.context = new, context
        self.exec_s, self.passes, self.adding_s = exec_s, passes, adding_s


class Options:
    """Lists the options of one prompt.

    Args:
        tokens: length of the prompt.
        waits: whether prompts wait at any instance.
    """

    def __init__(self, tokens: int, outlook: Outlook, costs: Costs, *, waits: bool) -> None:
        self._tokens = tokens
        self._outlook = outlook
        self._costs = costs
        self._waits = waits
        self._computing: dict[tuple[int, int], tuple[int, int, float, int, float]] = {}

    def alone(self, kind: int, held: Match) -> list[Option]:
        """Without reads from other instances: see ``spans.ways_at``."""
        found = []
        known, below = held.tokens, dict(held.below)
        while True:
            memory_s, below_s = loads_s(below, self._outlook)
            found.append(self._option(kind, memory_s, below_s, known))
            if not below:
                return found
            known -= below.popitem()[1]  # the farthest

    def reading(
        self, kind: int, target: Instance, held: Match, sources: Sequence[Instance], matches: Matches
    ) -> list[Option]:
        """With reads from other instances: see ``spans.best_plan``.

        Args:
            target: any instance of the kind that holds ``held``.
            sources: holders that it may read from.
        """
        places, reads = reads_to(self._tokens, target, sources, matches, self._costs)
        if len(places) == 1:
            return []
        memory = places[0]
        local_s, start = 0.0, held.hbm
        for tier, count in held.below.items():
            if tier.in_memory and count and start < memory:
                local_s += self._outlook.loading_s(tier, min(memory, start + count) - start)
                start += count
        found = []
        for place, (reading_s, _) in zip(places[1:], reads[1:], strict=True):
            moving_s = local_s + reading_s
            found.append(self._option(kind, moving_s, 0.0, max(memory, place)))
            known, below_s = memory, 0.0
            for tier in all_tiers():
                count = 0 if tier.in_memory else held.below.get(tier, 0)
                known += count
                if count and known > place:
                    below_s += self._load_s(tier, known - max(place, known - count))
                    found.append(self._option(kind, moving_s, below_s, known))
        return found

    def _load_s(self, tier: Tier, tokens: int) -> float:
        return self._outlook.loading_s(tier, tokens)

    def _option(self, kind: int, moving_s: float, disk_s: float, known: int) -> Option:
        """An option that computes the tokens behind the first ``known``."""
        computing = self._computing.get((kind, known))
        if computing is None:
            new = max(1, self._tokens - known)
            context = max(0, self._tokens - new)
            exec_s, passes = self._outlook.computing(kind, new, context)
            adding_s = self._outlook.adding_s(new, context) if self._waits else 0.0
            computing = self._computing[kind, known] = new, context, exec_s, passes, adding_s
        new, context, exec_s, passes, adding_s = computing
        return Option(moving_s, disk_s, new, context, exec_s, passes, adding_s)


def least_s(
    options: Sequence[Option], outlook: Outlook, places: Numbers | slice, weight: float
) -> Numbers | float:
    """The least seconds of some options at each of some instances: a lower bound where prompts wait, exact
    elsewhere. One number if it is the same at all of them.

    Args:
        places: positions in the fleet.
        weight: of a second of computing.
    """
    even = outlook.even
    if even is None or outlook.steps_s is not None or not (outlook.even_disks or _in_memory(options)):
        return _least_each_s(options, outlook, places, weight)
    idle_s = adding_s = math.inf
    for option in options:
        idle_s = min(idle_s, weight * option.exec_s * even + option.moving_s + option.disk_s)
        adding_s = min(adding_s, weight * option.adding_s * even + option.moving_s + option.disk_s)
    if outlook.waiting is None:
        return idle_s
    return np.where(outlook.waiting[places], adding_s, idle_s)


def _in_memory(options: Sequence[Option]) -> bool:
    """Whether no option loads from a disk."""
    return not any([option.disk_s for option in options])


def _least_each_s(
    options: Sequence[Option], outlook: Outlook, places: Numbers | slice, weight: float
) -> Numbers:
    """``least_s`` of instances that differ in their corrections or their steps."""
    factor = outlook.factor[places]
    waits = None if outlook.waiting is None else outlook.waiting[places]
    steps = None if outlook.steps_s is None else outlook.steps_s[places]
    least: Numbers | None = None
    for option in options:
        seconds: Numbers
        if waits is None and steps is None:
            seconds = (weight * option.exec_s) * factor
        else:
            computed: Any = option.exec_s if steps is None else option.exec_s + option.passes * steps
            if waits is not None:
                computed = np.where(waits, option.adding_s, computed)
            seconds = weight * computed
            seconds *= factor
        if option.moving_s:
            seconds += option.moving_s
        if option.disk_s:
            seconds += option.disk_s * outlook.disk_factor[places]
        least = seconds if least is None else np.minimum(least, seconds, out=least)
    assert least is not None
    return least
