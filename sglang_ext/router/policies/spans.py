"""The source of each span of a prompt's KV (MemServe, section 5.3, equation 2).

An instance with any KV of a prompt holds its beginning. So an instance uses its own KV in memory first.
Behind it, each span is read from a holder, up to an end of some holder's KV. Then follows the instance's own
KV below memory, if it reaches further. The rest is computed, up to the prompt's end. Spans are read one after
the other; the cost of a span is its transfer from the holder. A holder first loads KV below its memory, from
its disk, and this load is added to the span's cost; such KV is read only beyond the end of the instance's own
tiers.

`best_plan` finds the spans with the least sum: over all ends of the holders' KV, and for each span over all
its holders. Two holders are better than one if the holder with the shorter prefix is the faster. `price_at`
adds the instance's queue and the time without reads, so that each is asked for once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from sglang_ext.router.policies.base import NOTHING, Costs, Fetch, Instance, Match, Matches
from sglang_ext.router.policies.plan import Plan, Pricing, Span, Way
from sglang_ext.tiers import Tier, all_tiers

MOST_ENDS: Final = 4
"""How many ends of holders' KV are tried, from the farthest on: each costs the reader a round trip."""


def price_at(
    tokens: int,
    target: Instance,
    holders: Sequence[Instance],
    matches: Matches,
    costs: Costs,
    *,
    exec_weight: float = 1.0,
    whole: bool = False,
) -> Pricing:
    """The price of a prompt of ``tokens`` tokens at ``target``. For the arguments, see ``best_plan``."""
    held = matches.get(target.name, NOTHING)
    queue_s, ways = costs.queue_s(target), ways_at(tokens, target, held, costs)
    if not holders:
        return Pricing(target.name, queue_s, ways)
    plan = best_plan(tokens, target, holders, matches, costs, ways, exec_weight=exec_weight, whole=whole)
    return Pricing(target.name, queue_s, ways, plan)


def best_plan(
    tokens: int,
    target: Instance,
    holders: Sequence[Instance],
    matches: Matches,
    costs: Costs,
    ways: Sequence[Way],
    *,
    exec_weight: float = 1.0,
    whole: bool = False,
) -> Plan | None:
    """The fastest plan with a read from another instance; None if no holder has KV that ``target`` lacks.

    Args:
        tokens: length of the prompt.
        holders: instances that may be read from.
        ways: of ``target``, without reads.
        exec_weight: weight of a second of computing.
        whole: only plans that read up to the farthest end of any holder. The plan is required.
    """
    held = matches.get(target.name, NOTHING)
    places, found = reads_to(tokens, target, holders, matches, costs)
    ends = places[1:]
    if not ends:
        return None
    local = tuple(local_spans(target, held, places[0], costs))
    local_s = sum([span.seconds for span in local])
    best: tuple[float, tuple[Span, ...], tuple[Span, ...]] | None = None
    for number in (len(ends),) if whole else range(1, len(places)):
        moving_s, spans = found[number]
        rest_s, rest = _rest(tokens, target, held, places[number], costs, exec_weight)
        seconds = local_s + moving_s + rest_s
        if best is None or seconds < best[0]:
            best = seconds, spans, rest
    assert best is not None
    seconds, read, rest = best
    alone_s = min([way.load_s + exec_weight * way.exec_s for way in ways])
    spare = _spare(read[-1], target, holders, matches, costs)
    return _plan(target, local, read, rest, seconds, alone_s, ways, spare, required=whole)


def reads_to(
    tokens: int, target: Instance, holders: Sequence[Instance], matches: Matches, costs: Costs
) -> tuple[list[int], list[tuple[float, tuple[Span, ...]]]]:
    """The fastest spans up to each useful end of the holders' KV: the places, of which the first is the end
    of the target's own KV in memory, and for each place the seconds of the spans up to it, and the spans."""
    fastest = _ends(tokens, target, holders, matches, costs)
    ends = sorted(fastest)[-MOST_ENDS:]
    places = [min(matches.get(target.name, NOTHING).in_memory, tokens), *ends]
    found: list[tuple[float, tuple[Span, ...]]] = [(0.0, ())]
    if len(ends) == 1:
        span, _ = fastest[ends[0]]
        found.append((span.seconds, (span,)))
        return places, found
    sources = [fastest[end][1] for end in ends]
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
    return places, found


def given_plan(
    tokens: int,
    target: Instance,
    fleet: Sequence[Instance],
    fetches: Sequence[Fetch],
    matches: Matches,
    costs: Costs,
    ways: Sequence[Way],
) -> Plan | None:
    """The required plan for a decision's fetches; None if they read nothing that ``target`` lacks."""
    held = matches.get(target.name, NOTHING)
    named = {instance.name: instance for instance in fleet}
    place = min(held.in_memory, tokens)
    local = tuple(local_spans(target, held, place, costs))
    read: list[Span] = []
    for fetch in fetches:
        end = min(fetch.tokens, tokens)
        if fetch.source not in named or end <= place:
            continue
        there = matches.get(fetch.source, NOTHING)
        read.append(_read(named[fetch.source], target, there, place, end, costs))
        place = end
    if not any([span.source != target.name for span in read]):
        return None
    rest_s, rest = _rest(tokens, target, held, place, costs, 1.0)
    seconds = sum([span.seconds for span in (*local, *read)]) + rest_s
    alone_s = min([way.seconds for way in ways])
    last = [span for span in read if span.source != target.name][-1]
    spare = _spare(last, target, fleet, matches, costs)
    return _plan(target, local, tuple(read), rest, seconds, alone_s, ways, spare, required=True)


def _plan(
    target: Instance,
    local: tuple[Span, ...],
    read: tuple[Span, ...],
    rest: tuple[Span, ...],
    seconds: float,
    alone_s: float,
    ways: Sequence[Way],
    spare: Span | None,
    *,
    required: bool,
) -> Plan:
    """A plan of the target's own spans in memory, those that it reads, and the rest."""
    moved = [span for span in read if span.source != target.name]
    kept = [span for span in (*local, *read, *rest) if span.source in (None, target.name)]
    saved_s = min([way.seconds for way in ways]) - sum([span.seconds for span in kept])
    return Plan(
        target.name,
        (*local, *read, *rest),
        seconds,
        alone_s,
        sum([span.seconds for span in moved]),
        max(0.0, saved_s),
        spare,
        required,
    )


def fetches_of(plan: Plan) -> tuple[Fetch, ...]:
    """The spans that are read from other instances, in the form of a decision."""
    return tuple([Fetch(span.source, span.end) for span in plan.read if span.source is not None])


def holders_beyond(
    target: Instance, fleet: Sequence[Instance], matches: Matches, can_fetch: Callable[[str, str], bool]
) -> list[Instance]:
    """The trusted instances with more of the prompt than ``target`` has in memory that it can fetch from."""
    held = matches.get(target.name, NOTHING).in_memory
    more: set[str] = set()
    # Instances that hold the same part of a prompt share one match object.
    seen, is_more = NOTHING, False
    for name, match in matches.items():
        if match is not seen:
            seen, is_more = match, match.tokens > held
        if is_more:
            more.add(name)
    if not more:
        return []
    return [
        known
        for known in fleet
        if known.name in more and known.trusted and can_fetch(known.name, target.name)
    ]


def ways_at(tokens: int, instance: Instance, held: Match, costs: Costs) -> tuple[Way, ...]:
    """From the begin of a request to its first token, with the instance's own KV only: the instance loads all
    of its match, or all without its farthest tiers, and computes the rest."""
    if not held.below:
        return (Way(0.0, exec_s(tokens, instance, held.tokens, costs)),)
    found = []
    known, below = held.tokens, dict(held.below)
    while True:
        load_s = sum([costs.load_s(instance, tier, count) for tier, count in below.items()])
        found.append(Way(load_s, exec_s(tokens, instance, known, costs)))
        if not below:
            return tuple(found)
        known -= below.popitem()[1]  # the farthest


def exec_s(tokens: int, instance: Instance, known: int, costs: Costs) -> float:
    """Time to compute a prompt behind its ``known`` tokens. The last token is always computed: its logits
    begin the answer."""
    new = max(1, tokens - known)
    return costs.exec_s(instance, new, max(0, tokens - new))


def _ends(
    tokens: int, target: Instance, holders: Sequence[Instance], matches: Matches, costs: Costs
) -> dict[int, tuple[Span, Instance]]:
    """The useful ends of the holders' KV, and for each the span up to it from the fastest holder. An end in
    memory counts beyond the target's KV in memory; an end below memory counts beyond all of the target's
    KV."""
    own = matches.get(target.name, NOTHING)
    memory, most = own.in_memory, own.tokens
    best: dict[int, tuple[Span, Instance]] = {}
    for holder in holders:
        if holder.name == target.name:
            continue
        there = matches.get(holder.name, NOTHING)
        ends = [(there.in_memory, memory), (there.tokens, most)] if there.below else [(there.tokens, memory)]
        for end, least in ends:
            end = min(end, tokens)
            if end <= least:
                continue
            span = _read(holder, target, there, memory, end, costs)
            if span.seconds < math.inf and (end not in best or span.seconds < best[end][0].seconds):
                best[end] = span, holder
    return best


def _read(source: Instance, target: Instance, held: Match, start: int, end: int, costs: Costs) -> Span:
    """The span to read from ``source``, which holds ``held``. The source loads from the end of its KV in
    memory, even if the span begins behind it."""
    if not held.below:
        return Span(source.name, Tier.HBM, start, end, costs.transfer_s(source, target, end - start))
    known, farthest, loading_s = held.hbm, Tier.HBM, 0.0
    for tier, count in held.below.items():
        if known >= end:
            break
        if count and not tier.in_memory:
            loading_s += costs.load_s(source, tier, min(count, end - known))
        known, farthest = known + count, tier
    moving_s = costs.transfer_s(source, target, end - start)
    return Span(source.name, farthest, start, end, loading_s + moving_s, loading_s)


def _spare(
    last: Span, target: Instance, holders: Sequence[Instance], matches: Matches, costs: Costs
) -> Span | None:
    """A replacement for the last span that is read: another holder with the largest part of it; among equals,
    the fastest."""
    spares = []
    for holder in holders:
        there = matches.get(holder.name, NOTHING)
        end = min(there.in_memory, last.end)
        if holder.name not in (target.name, last.source) and end > last.start:
            spares.append(_read(holder, target, there, last.start, end, costs))
    possible = [span for span in spares if span.seconds < math.inf]
    return min(possible, key=lambda span: (-span.end, span.seconds), default=None)


def local_spans(instance: Instance, held: Match, memory: int, costs: Costs) -> Iterator[Span]:
    """The spans that the instance itself has in memory."""
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
    """The fastest spans from ``place`` on: load the instance's KV below memory, as far as loading is faster,
    and compute the rest. Returns their weighted seconds and the spans."""
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
