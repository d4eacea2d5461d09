"""The prices of one prompt at the instances of a fleet, and the place of the best: see ``cost``.

Places are positions in the fleet. The seconds of each instance at which nothing waits are exact. Where
prompts wait, exec depends on these, so there is a lower bound first; an instance is priced one by one only
while its bound is below the least price.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import cast

import numpy as np

from sglang_ext.router.policies.assembly import choose_decode
from sglang_ext.router.policies.base import (
    CACHED,
    NOTHING,
    Costs,
    Fleet,
    Instance,
    Match,
    Matches,
    PolicyOptions,
    Prompt,
    Role,
    WholeFleet,
)
from sglang_ext.router.policies.fleet_queries import counts_of, load_of
from sglang_ext.router.policies.holdings import Group, Sources, grouped
from sglang_ext.router.policies.options import Option, Options, least_s
from sglang_ext.router.policies.outlook import Numbers

FEW = 16
"""In a fleet of so few instances all are priced, so that the scores have all of them."""
TRIES = 3
"""Instances that are looked at for the reads of their kind: an agent may be silent, and its kind not know."""
MANY, LOOKS = 8, 32
"""Where one of so many instances is cheap, so many of the least loaded are looked at one by one."""


class Search:
    """Prices a prompt.

    Args:
        candidates: the instances that the request can be sent to first; ``fleet`` itself if it can be sent to
            all of them.
        matches: of instances with a trusted index.
    """

    def __init__(
        self,
        prompt: Prompt,
        fleet: Fleet,
        candidates: Fleet,
        matches: Matches,
        costs: Costs,
        options: PolicyOptions,
    ) -> None:
        self._prompt = prompt
        self._fleet = fleet
        self._matches = matches
        self._costs = costs
        self._options = options
        self._outlook = outlook = costs.outlook(fleet)
        self._counts = counts_of(fleet)
        self.groups = grouped(fleet, matches)
        """The holders, candidates or not."""
        self._sources = Sources(prompt.tokens, fleet, self.groups, outlook)
        self._listed = Options(prompt.tokens, outlook, costs, waits=outlook.waiting is not None)
        self._chosen_options: dict[tuple[int, int], list[Option]] = {}
        self._hand_overs: dict[str, tuple[str, float]] = {}
        """By ``handover`` of a prefill instance: its decode instance, and the seconds of the pair."""
        tokens = [group.held.tokens for group in self.groups]
        memory = [group.held.in_memory for group in self.groups]
        self._most, self._most_in_memory = max(tokens, default=0), max(memory, default=0)
        """The longest match, and the longest in memory."""
        self.can_begin: Numbers | None = None
        """Whether the request can be sent to an instance first; None if to all."""
        if candidates is not fleet:
            names = {instance.name for instance in candidates}
            self.can_begin = np.array([instance.name in names for instance in fleet], bool)
        self._emptiest = -1
        """The fewest cached tokens of a candidate; -1 before it is first needed."""
        weight = options.queue_weight
        self._queues: Numbers = outlook.queue_s if weight == 1.0 else weight * outlook.queue_s
        self.seconds: Numbers = self._queues + self._of_strangers()
        """Of each instance that was priced; infinite for others."""
        for group in self.groups:
            self._price_group(group)
        self._bounds: Numbers | None = None
        """Of the instances that are not priced yet; infinite for others."""
        self._hand_over()
        if outlook.waiting is not None:
            self._bounds = np.where(outlook.waiting, self.seconds, math.inf)
            self.seconds[outlook.waiting] = math.inf

    # -- in arrays ----------------------------------------------------------------------------------

    def _of_strangers(self) -> Numbers | float:
        """The least seconds besides the queue of an instance that holds nothing of the prompt, at every
        place; one number if they are equal."""
        kinds, weight = self._outlook.kinds, self._options.exec_weight
        if len(kinds) == 1:
            options = self._options_at(kinds[0], NOTHING, self._strangers(None))
            return least_s(options, self._outlook, slice(None), weight)
        found: Numbers = np.empty(len(self._fleet))
        for kind in kinds:
            alike = self._outlook.kind == kind
            options = self._options_at(kind, NOTHING, self._strangers(alike))
            found[alike] = least_s(options, self._outlook, np.flatnonzero(alike), weight)
        return found

    def _strangers(self, alike: Numbers | None) -> list[int]:
        """The first ``TRIES`` candidates that hold nothing of the prompt.

        alike: those that count; None for all.
        """
        size, held = len(self._fleet), sum([len(group.places) for group in self.groups])
        if held == size:
            return []
        if held < FEW and alike is None and self.can_begin is None:
            known = [place for group in self.groups for place in group.places]
            return [place for place in range(min(size, held + TRIES)) if place not in known][:TRIES]
        strange: Numbers = np.ones(size, bool)
        if self.can_begin is not None:
            strange &= self.can_begin
        if alike is not None:
            strange &= alike
        for group in self.groups:
            strange[group.whole] = False
        found: list[int] = []
        while len(found) < TRIES:
            place = int(strange.argmax())
            if not strange[place]:
                break
            found.append(place)
            strange[place] = False
        return found

    def _price_group(self, group: Group) -> None:
        """Set the seconds of the holders of a match."""
        kinds, places = self._outlook.kinds, group.whole
        if self.can_begin is not None:
            places = places[self.can_begin[places]]
        for kind in kinds:
            alike = places if len(kinds) == 1 else places[self._outlook.kind[places] == kind]
            if len(alike) == 1:
                place = int(alike[0])
                least = self._of_alike(group.held, kind, alike)
                least_s = least if isinstance(least, float) else float(least[0])
                self.seconds[place] = float(self._queues[place]) + least_s
            elif len(alike):
                self.seconds[alike] = self._queues[alike] + self._of_alike(group.held, kind, alike)

    def _of_alike(self, held: Match, kind: int, places: Numbers) -> Numbers | float:
        """The least seconds besides the queue of holders of one match and kind."""
        weight, first = self._options.exec_weight, places[:TRIES].tolist()
        crowded = self.crowded(held, places)
        if crowded is None or not crowded.any():
            return least_s(self._options_at(kind, held, first), self._outlook, places, weight)
        empty = least_s(self._listed.alone(kind, NOTHING), self._outlook, places, weight)
        if crowded.all():
            return empty
        counted = least_s(self._options_at(kind, held, first), self._outlook, places, weight)
        return np.where(crowded, empty, counted)

    def crowded(self, held: Match, places: Numbers) -> Numbers | None:
        """At which places a match is not counted, because the instance caches much more than others; None for
        a match that always counts."""
        if held.own or not held.tokens:
            return None
        if len(places) == 1 and not self.is_crowded(int(places[0])):
            return None
        slack = self._options.balance_cache_factor * held.tokens
        return cast(Numbers, self._counts[CACHED][places] - self._least_cached() > slack)

    def _least_cached(self) -> int:
        """The fewest cached tokens of a candidate."""
        if self._emptiest < 0:
            cached = self._counts[CACHED]
            if self.can_begin is not None:
                cached = cached[self.can_begin]
            self._emptiest = int(cached[cached.argmin()])
        return self._emptiest

    def _options_at(self, kind: int, held: Match, places: Sequence[int]) -> list[Option]:
        """The options of the instances of a kind that hold ``held``, as those at ``places`` do, of which
        ``TRIES`` are enough."""
        key = kind, id(held)
        found = self._chosen_options.get(key)
        if found is None:
            found = self._listed.alone(kind, held)
            more = self._most > held.tokens or self._most_in_memory > held.in_memory
            sources = self.sources_of(kind) if more else ()
            for place in places if sources else ():
                target = self._fleet[place]
                reading = self._listed.reading(kind, target, held, sources, self._matches)
                found += reading
                if reading:
                    break
            self._chosen_options[key] = found
        return found

    def sources_of(self, kind: int) -> Sequence[Instance]:
        """The holders that instances of a kind would read from."""
        return self._sources.of(kind) if self.groups else ()

    def kind_at(self, place: int) -> int:
        """The kind of the instance at a place."""
        return int(self._outlook.kind[place])

    def _hand_over(self) -> None:
        """Add the hand-over to the best decode instance; leave out the instances that are no candidates."""
        if self.can_begin is None:
            return
        self.seconds[~self.can_begin] = math.inf
        for place in np.flatnonzero(self.can_begin).tolist():
            self.seconds[place] += self.hand_over(self._fleet[place])[1]

    def hand_over(self, first: Instance) -> tuple[str | None, float]:
        """The decode instance of a prefill instance, and the seconds of the pair; None and 0 for others."""
        if first.role is not Role.PREFILL:
            return None, 0.0
        found = self._hand_overs.get(first.handover)
        if found is None:
            decode, seconds = choose_decode(
                self._prompt, first, self._fleet, self._matches, self._costs, self._options
            )
            found = self._hand_overs[first.handover] = decode.name, seconds
        return found

    # -- one by one ---------------------------------------------------------------------------------

    def best(self) -> int:
        """The place of the least loaded of the cheapest instances."""
        limit = self._limit()
        if self._bounds is None:
            return self._least_loaded(limit)
        least = float(self.seconds[self.seconds.argmin()])
        few = len(self._fleet) <= FEW
        while True:
            place = int(self._bounds.argmin())
            bound = float(self._bounds[place])
            if bound == math.inf or (bound > limit and not few):
                return self._least_loaded(limit)
            self._bounds[place] = math.inf
            seconds = self._priced(place)
            self.seconds[place] = seconds
            if seconds < least:
                least, limit = seconds, self._limit()

    def _limit(self) -> float:
        """Up to which seconds an instance is as cheap as the cheapest: one block's share of computing the
        whole prompt."""
        place = int(self.seconds.argmin())
        least, tokens = float(self.seconds[place]), self._prompt.tokens
        if least == math.inf or tokens <= 0:
            return least
        whole_s = self._costs.exec_s(self._fleet[place], tokens, 0)
        return least + whole_s * min(1.0, self._options.tie_tokens / tokens)

    def _priced(self, place: int) -> float:
        """The seconds of an instance where prompts wait."""
        instance, kind = self._fleet[place], self.kind_at(place)
        held = self._matches.get(instance.name, NOTHING)
        if self.is_crowded(place):
            options = self._listed.alone(kind, NOTHING)
        else:
            options = self._options_at(kind, held, [place])
        weight = self._options.exec_weight
        disk = 1.0 if self._outlook.even_disks else float(self._outlook.disk_factor[place])
        seconds = math.inf
        for option in options:
            loading_s = option.moving_s + disk * option.disk_s
            if loading_s < seconds:
                exec_s = self._costs.exec_s(instance, option.new, option.context)
                seconds = min(seconds, loading_s + weight * exec_s)
        return float(self._queues[place]) + seconds + self.hand_over(instance)[1]

    def is_crowded(self, place: int) -> bool:
        """Whether the match of the instance at a place is not counted."""
        held = self._matches.get(self._fleet[place].name, NOTHING)
        if held.own or not held.tokens:
            return False
        slack = self._options.balance_cache_factor * held.tokens
        return int(self._counts[CACHED, place]) - self._least_cached() > slack

    def _least_loaded(self, limit: float) -> int:
        """The first by ``load_of`` of the instances that take at most ``limit``."""
        cheap, fleet = self.seconds <= limit, self._fleet
        places = cheap.nonzero()[0]
        count = len(places)
        if count == 1:
            return int(places[0])
        if isinstance(fleet, WholeFleet) and count * MANY >= len(fleet):
            known = fleet.places
            for load in itertools.islice(fleet.by_load, LOOKS):
                place = known[load[4]]
                if cheap[place]:
                    return place
        for counts in self._counts[:CACHED]:
            if len(places) <= FEW:
                break
            at = counts[places]
            places = places[at == at[at.argmin()]]
        return min(places.tolist(), key=lambda place: load_of(fleet[place]))
