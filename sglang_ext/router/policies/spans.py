"""Where the KV of a prompt comes from, span by span (MemServe, section 5.3, equation 2).

Whoever holds any of a prompt holds its beginning. So an instance begins with what it has in memory; behind
that, up to where some other instance's KV ends, each span is read from one that has it; then comes what the
instance has below memory, if that reaches further; the rest is computed, up to the prompt's end. Spans are
read one after the other, each for what it costs to bring it from its holder and to load it. What a holder has
below memory, on its disk, it loads first, for what that costs there; it is read only where the instance's own
tiers end before it.

`best_plan` finds the spans whose sum is least: over all places where the KV of a holder ends, and for each
span over all that hold it. Two holders are better than one where the one that has less is the faster.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from sglang_ext.router.policies.base import NOTHING, Costs, Fetch, Instance, Match, Matches
from sglang_ext.tiers import Tier, all_tiers

MOST_ENDS: Final = 4
"""Places where the KV of holders ends that are tried, from the farthest on: each is a reader's round trip."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start`` to ``end`` of a prompt. source: the instance that has them, tier: the farthest of its
    tiers that they are in; None for what is computed. seconds: until they are in HBM; loading_s: of these,
    until another instance has them in memory, if it has not.
    """

    source: str | None
    tier: Tier | None
    start: int
    end: int
    seconds: float
    loading_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """All spans of a prompt at an instance, in order.

    seconds: their sum, in which a second of computing counts as it was asked for. alone_s: the same where
    nothing is read from others. spare: what is read instead of the last span that is read from another, where
    that does not come; None where nobody else has any of it in memory.
    """

    instance: str
    spans: tuple[Span, ...]
    seconds: float
    alone_s: float
    spare: Span | None = None

    @property
    def worth_it(self) -> bool:
        """Whether reading from others takes no longer than doing without."""
        return self.seconds <= self.alone_s

    @property
    def read(self) -> tuple[Span, ...]:
        """What is read from other instances."""
        return tuple(span for span in self.spans if span.source not in (None, self.instance))

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        """The same, as a decision says it."""
        return tuple(Fetch(span.source, span.end) for span in self.read if span.source is not None)


def best_plan(
    tokens: int,
    target: Instance,
    holders: Sequence[Instance],
    matches: Matches,
    costs: Costs,
    *,
    exec_weight: float = 1.0,
    whole: bool = False,
) -> Plan | None:
    """The plan that reads from others and takes least time; None where nobody can give what ``target`` lacks.

    Args:
        tokens: of the prompt.
        holders: who may be read from.
        exec_weight: what a second of computing counts.
        whole: only plans that read as far as anybody has it, whatever computing takes.
    """
    held = matches.get(target.name, NOTHING)
    ends, sources = _ends(tokens, target, holders, matches, costs)
    if not ends:
        return None
    places = (min(held.in_memory, tokens), *ends)
    found: list[tuple[float, tuple[Span, ...]]] = [(0.0, ())]
    for number, end in enumerate(ends, start=1):
        least = math.inf
        spans: tuple[Span, ...] = ()
        for before, start in enumerate(places[:number]):
            for source in sources:
                there = matches[source.name]
                if there.tokens < end:
                    continue
                span = _read(source, target, there, start, end, costs)
                if found[before][0] + span.seconds < least:
                    least = found[before][0] + span.seconds
                    spans = (*found[before][1], span)
        found.append((least, spans))
    local = tuple(_local(target, held, places[0], costs))
    local_s = sum(span.seconds for span in local)
    best: tuple[float, tuple[Span, ...]] | None = None
    for number in (len(ends),) if whole else range(1, len(places)):
        moving_s, spans = found[number]
        rest_s, rest = _rest(tokens, target, held, places[number], costs, exec_weight)
        seconds = local_s + moving_s + rest_s
        if best is None or seconds < best[0]:
            best = seconds, (*local, *spans, *rest)
    assert best is not None
    plan = Plan(target.name, best[1], best[0], alone_s(tokens, target, held, costs, exec_weight))
    return _with_spare(plan, target, holders, matches, costs)


def given_plan(
    tokens: int, target: Instance, fleet: Sequence[Instance], fetches: Sequence[Fetch], matches: Matches,
    costs: Costs,
) -> Plan | None:  # fmt: skip
    """The plan that a decision asks for; None where it reads nothing that ``target`` lacks."""
    held = matches.get(target.name, NOTHING)
    named = {instance.name: instance for instance in fleet}
    place = min(held.in_memory, tokens)
    spans = list(_local(target, held, place, costs))
    for fetch in fetches:
        end = min(fetch.tokens, tokens)
        if fetch.source not in named or end <= place:
            continue
        there = matches.get(fetch.source, NOTHING)
        spans.append(_read(named[fetch.source], target, there, place, end, costs))
        place = end
    _, rest = _rest(tokens, target, held, place, costs, 1.0)
    spans += rest
    plan = Plan(
        target.name, tuple(spans), sum(span.seconds for span in spans), alone_s(tokens, target, held, costs)
    )
    return _with_spare(plan, target, fleet, matches, costs) if plan.read else None


def alone_s(
    tokens: int, instance: Instance, held: Match, costs: Costs, exec_weight: float = 1.0
) -> float:  # fmt: skip
    """To the first token with what the instance itself holds, once it begins; computing counts
    ``exec_weight`` times. It loads a tier only where that is faster than computing, as its own load policy
    does."""
    return min(
        sum(costs.load_s(instance, tier, count) for tier, count in way.below.items())
        + exec_weight * exec_s(tokens, instance, way.tokens, costs)
        for way in ways(held)
    )


def ways(held: Match) -> list[Match]:
    """What an instance may begin with of what it holds: all of it, or without its farthest tiers."""
    found = [held]
    known, below = held.tokens, dict(held.below)
    while below:
        known -= below.popitem()[1]  # the farthest
        found.append(Match(known, below=dict(below)))
    return found


def exec_s(tokens: int, instance: Instance, known: int, costs: Costs) -> float:
    """To compute what is not known of a prompt. Its last token is computed in any case: its logits begin the
    answer."""
    new = max(1, tokens - known)
    return costs.exec_s(instance, new, max(0, tokens - new))


def _ends(
    tokens: int, target: Instance, holders: Sequence[Instance], matches: Matches, costs: Costs
) -> tuple[list[int], list[Instance]]:
    """Where the KV of holders ends behind what the target has in memory, or below memory behind all that it
    has, in order, and for each such place the holder that brings it soonest."""
    own = matches.get(target.name, NOTHING)
    best: dict[int, tuple[float, Instance]] = {}
    for holder in holders:
        if holder.name == target.name:
            continue
        there = matches.get(holder.name, NOTHING)
        for end, least in ((there.in_memory, own.in_memory), (there.tokens, own.tokens)):
            end = min(end, tokens)
            if end <= least:
                continue
            seconds = _read(holder, target, there, own.in_memory, end, costs).seconds
            if seconds < math.inf and (end not in best or seconds < best[end][0]):
                best[end] = seconds, holder
    ends = sorted(best)[-MOST_ENDS:]
    return ends, [best[end][1] for end in ends]


def _read(source: Instance, target: Instance, held: Match, start: int, end: int, costs: Costs) -> Span:
    """What is read from ``source``, which holds ``held``. It begins to load where its memory ends, wherever
    the span begins."""
    known, farthest, loading_s = held.hbm, Tier.HBM, 0.0
    for tier, count in held.below.items():
        if known >= end:
            break
        if count and not tier.in_memory:
            loading_s += costs.load_s(source, tier, min(count, end - known))
        known, farthest = known + count, tier
    moving_s = costs.transfer_s(source, target, end - start)
    return Span(source.name, farthest, start, end, loading_s + moving_s, loading_s)


def _with_spare(
    plan: Plan, target: Instance, holders: Sequence[Instance], matches: Matches, costs: Costs
) -> Plan:
    """The plan, and who else has most of its last span that is read; of those that have as much, the one that
    brings it soonest."""
    last = plan.read[-1]
    spares = []
    for holder in holders:
        there = matches.get(holder.name, NOTHING)
        end = min(there.in_memory, last.end)
        if holder.name not in (target.name, last.source) and end > last.start:
            spares.append(_read(holder, target, there, last.start, end, costs))
    possible = [span for span in spares if span.seconds < math.inf]
    best = min(possible, key=lambda span: (-span.end, span.seconds), default=None)
    return dataclasses.replace(plan, spare=best)


def _local(instance: Instance, held: Match, memory: int, costs: Costs) -> Iterator[Span]:
    """What the instance has in memory."""
    start = 0
    for tier, count in held.by_tier().items():
        if tier.in_memory and count and start < memory:
            end = min(memory, start + count)
            seconds = costs.load_s(instance, tier, end - start) if tier.level else 0.0
            yield Span(instance.name, tier, start, end, seconds)
            start = end


def _rest(
    tokens: int, instance: Instance, held: Match, place: int, costs: Costs, exec_weight: float
) -> tuple[float, tuple[Span, ...]]:
    """From ``place`` on, what is soonest: load what the instance has below memory, as far as that is worth
    it, and compute what is left. Their time as it counts, and they."""
    loaded: tuple[Span, ...] = ()
    loading_s, best = 0.0, (math.inf, loaded)
    known = min(held.in_memory, tokens)
    for tier in (None, *(tier for tier in all_tiers() if not tier.in_memory)):
        count = 0 if tier is None else held.below.get(tier, 0)
        known += count
        if tier is not None:
            if not count or known <= place:
                continue
            start = max(place, known - count)
            seconds = costs.load_s(instance, tier, known - start)
            loading_s += seconds
            loaded = (*loaded, Span(instance.name, tier, start, known, seconds))
        computing = exec_s(tokens, instance, max(place, known), costs)
        if loading_s + exec_weight * computing < best[0]:
            span = Span(None, None, min(max(place, known), tokens - 1), tokens, computing)
            best = loading_s + exec_weight * computing, (*loaded, span)
    return best
