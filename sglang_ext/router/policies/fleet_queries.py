"""Questions about a fleet and its matches, shared by policies and their callers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np

from sglang_ext.protocol.compatibility import fits
from sglang_ext.router.policies.base import CACHED, Fleet, Instance, Match, Matches, Reason, Role, WholeFleet
from sglang_ext.router.policies.outlook import Numbers

_ROLE = attrgetter("role")
_TRUSTED = attrgetter("trusted")
_AWAITED = attrgetter("awaited")
_IN_FLIGHT = attrgetter("in_flight")

UNDECIDED = frozenset({Reason.NO_PREFIX, Reason.SHORT_PREFIX})
"""Reasons of decisions in which no cached prefix was long enough to decide."""


# A fleet may have a thousand instances: `WholeFleet` has cached answers, and the loops over a part run in C.


def all_colocated(fleet: Fleet) -> bool:
    """Whether every instance both prefills and decodes."""
    if isinstance(fleet, WholeFleet):
        return fleet.colocated
    return list(map(_ROLE, fleet)).count(Role.COLOCATED) == len(fleet)


def all_trusted(fleet: Fleet) -> bool:
    """Whether the index of every instance is trusted."""
    if isinstance(fleet, WholeFleet):
        return fleet.trusted
    return all(map(_TRUSTED, fleet))


def any_awaited(fleet: Fleet) -> bool:
    """Whether the snapshot of at least one instance has not arrived."""
    if isinstance(fleet, WholeFleet):
        return fleet.awaited
    return any(map(_AWAITED, fleet))


def named(fleet: Fleet, name: str) -> Instance | None:
    """The instance of that name; None if there is none."""
    if isinstance(fleet, WholeFleet):
        place = fleet.places.get(name)
        return None if place is None else fleet[place]
    for instance in fleet:
        if instance.name == name:
            return instance
    return None


def place_of(fleet: Fleet, name: str) -> int | None:
    """The position of the instance of that name; None if there is none."""
    if isinstance(fleet, WholeFleet):
        return fleet.places.get(name)
    for place in range(len(fleet)):
        if fleet[place].name == name:
            return place
    return None


def counts_of(fleet: Fleet) -> Numbers:
    """See ``WholeFleet.counts``."""
    if isinstance(fleet, WholeFleet):
        return fleet.counts
    rows = [(*load_of(instance)[:4], instance.cached_tokens) for instance in fleet]
    return np.array(rows, np.int64).T


def first_targets(fleet: Fleet) -> Fleet:
    """The instances that a request can be sent to first: colocated instances, and prefill instances that fit
    a decode instance. Empty when the fleet cannot answer any request."""
    if all_colocated(fleet):
        return fleet
    return tuple(instance for instance in paired(fleet) if instance.role is not Role.DECODE)


def paired(fleet: Fleet) -> Fleet:
    """The fleet without prefill and decode instances that fit no counterpart."""
    kinds = {
        role: {instance.handover for instance in fleet if instance.role is role}
        for role in (Role.PREFILL, Role.DECODE)
    }
    prefills, decodes = kinds[Role.PREFILL], kinds[Role.DECODE]
    if prefills and decodes and len(prefills | decodes) == 1:  # the usual case
        return fleet
    others = {Role.PREFILL: decodes, Role.DECODE: prefills}
    return tuple(
        instance
        for instance in fleet
        if instance.role is Role.COLOCATED
        or any(fits(instance.handover, other) for other in others[instance.role])
    )


def decoders_for(fleet: Fleet, prefill: Instance) -> list[Instance]:
    """The instances that can decode for ``prefill``."""
    return [
        instance
        for instance in fleet
        if instance.role is Role.DECODE and fits(prefill.handover, instance.handover)
    ]


load_of: Callable[[Instance], tuple[int, int, int, int, str]] = attrgetter(
    "in_flight", "queued_tokens", "fill", "last_picked", "name"
)
"""Sort key: least loaded first; among equals, the least filled memory, then the longest time since chosen.

The fill spreads new conversations over the memory of an idle fleet.
"""


def least_loaded(fleet: Fleet, candidates: Sequence[Instance] | None = None) -> Instance:
    """The first by ``load_of`` of a fleet, or of ``candidates`` from it."""
    if candidates is None:
        candidates = fleet
    if isinstance(fleet, WholeFleet):
        least = fleet.least
        # If the fleet's least loaded instance is a candidate, it is the least loaded candidate.
        if candidates is fleet:
            return least
        for one in candidates:
            if one is least:
                return least
    return min(candidates, key=load_of)


def in_flight_range(fleet: Fleet) -> tuple[int, int]:
    """The smallest and the largest number of requests in flight at an instance."""
    if isinstance(fleet, WholeFleet):
        return fleet.least.in_flight, fleet.most_in_flight
    counts = list(map(_IN_FLIGHT, fleet))
    return min(counts), max(counts)


def busier_than(fleet: Fleet, requests: int) -> list[Instance]:
    """The instances with more requests in flight."""
    if isinstance(fleet, WholeFleet):
        return [fleet[place] for place in np.flatnonzero(fleet.counts[0] > requests).tolist()]
    return [instance for instance in fleet if instance.in_flight > requests]


def least_cached(fleet: Fleet, without: frozenset[str]) -> int:
    """The fewest cached tokens of an instance, apart from some of them."""
    if isinstance(fleet, WholeFleet):
        cached = fleet.counts[CACHED]
        if without:
            cached = cached.copy()
            cached[[fleet.places[name] for name in without]] = cached.max()
        return int(cached[cached.argmin()])
    return min([instance.cached_tokens for instance in fleet if instance.name not in without])


def holders_among(fleet: Fleet, matches: Matches) -> list[tuple[Instance, Match]]:
    """The instances with a match, and the match."""
    if isinstance(fleet, WholeFleet):
        places = fleet.places
        return [
            (fleet[place], match)
            for name, match in matches.items()
            if (place := places.get(name)) is not None
        ]
    held = [(instance, matches.get(instance.name)) for instance in fleet]
    return [(instance, match) for instance, match in held if match is not None]


def for_want_of(reason: Reason, candidates: Fleet) -> Reason:
    """Refines the reason of a decision without a deciding prefix: ``INDEX_AWAITED`` or ``UNTRUSTED`` if the
    index of a candidate is incomplete or untrusted."""
    if reason in UNDECIDED and any_awaited(candidates):
        return Reason.INDEX_AWAITED
    return Reason.UNTRUSTED if reason is Reason.NO_PREFIX and not all_trusted(candidates) else reason


def matched_tokens(matches: Matches, name: str) -> int:
    """Leading tokens that an instance holds."""
    match = matches.get(name)
    return 0 if match is None else match.tokens
