"""What is asked of a fleet and of matches: by policies, and by what is around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from sglang_ext.protocol.compatibility import fits
from sglang_ext.router.policies.base import Fleet, Instance, Match, Matches, Reason, Role, WholeFleet

_ROLE = attrgetter("role")
_TRUSTED = attrgetter("trusted")
_AWAITED = attrgetter("awaited")
_IN_FLIGHT = attrgetter("in_flight")

UNDECIDED = frozenset({Reason.NO_PREFIX, Reason.SHORT_PREFIX})
"""Reasons that say that what is cached did not decide."""


# A fleet may have a thousand instances: the whole one knows the answers, a part of it is asked in C.


def all_colocated(fleet: Fleet) -> bool:
    """Whether every instance does all of a request."""
    if isinstance(fleet, WholeFleet):
        return fleet.colocated
    return list(map(_ROLE, fleet)).count(Role.COLOCATED) == len(fleet)


def all_trusted(fleet: Fleet) -> bool:
    """Whether the index of every instance is believed."""
    if isinstance(fleet, WholeFleet):
        return fleet.trusted
    return all(map(_TRUSTED, fleet))


def any_awaited(fleet: Fleet) -> bool:
    """Whether more is to come of what any of them holds."""
    if isinstance(fleet, WholeFleet):
        return fleet.awaited
    return any(map(_AWAITED, fleet))


def named(fleet: Fleet, name: str) -> Instance | None:
    """The instance of that name."""
    if isinstance(fleet, WholeFleet):
        place = fleet.places.get(name)
        return None if place is None else fleet[place]
    for instance in fleet:
        if instance.name == name:
            return instance
    return None


def beginners(fleet: Fleet) -> Fleet:
    """The instances that a request can be sent to first: those that do everything, and, where some decode,
    those that prefill for one of them. Empty when the fleet cannot answer any request."""
    if all_colocated(fleet):
        return fleet
    return tuple(instance for instance in paired(fleet) if instance.role is not Role.DECODE)


def paired(fleet: Fleet) -> Fleet:
    """The fleet without prefill and decode instances that have no other half."""
    kinds = {
        role: {instance.handover for instance in fleet if instance.role is role}
        for role in (Role.PREFILL, Role.DECODE)
    }
    prefills, decodes = kinds[Role.PREFILL], kinds[Role.DECODE]
    if prefills and decodes and len(prefills | decodes) == 1:  # as nearly always
        return fleet
    others = {Role.PREFILL: decodes, Role.DECODE: prefills}
    return tuple(
        instance
        for instance in fleet
        if instance.role is Role.COLOCATED
        or any(fits(instance.handover, other) for other in others[instance.role])
    )


def decoders_for(fleet: Fleet, prefill: Instance) -> list[Instance]:
    """The instances that can decode what one prefills."""
    return [
        instance
        for instance in fleet
        if instance.role is Role.DECODE and fits(prefill.handover, instance.handover)
    ]


load_of: Callable[[Instance], tuple[int, int, int, int, str]] = attrgetter(
    "in_flight", "queued_tokens", "cached_tokens", "last_picked", "name"
)
"""Sort key: least loaded first; among equals, who caches least, then who was not chosen for longest.

The size of what is cached spreads new conversations over the memory of an idle fleet.
"""


def least_loaded(fleet: Fleet, candidates: Sequence[Instance] | None = None) -> Instance:
    """The first of a fleet by ``load_of``, or of some that are of it."""
    if candidates is None:
        candidates = fleet
    if isinstance(fleet, WholeFleet):
        least = fleet.least
        # The least loaded of all is that of any that it is among.
        if candidates is fleet:
            return least
        for one in candidates:
            if one is least:
                return least
    return min(candidates, key=load_of)


def in_flight_range(fleet: Fleet) -> tuple[int, int]:
    """The least and the most requests that any instance has in flight."""
    if isinstance(fleet, WholeFleet):
        return fleet.least.in_flight, fleet.most_in_flight
    counts = list(map(_IN_FLIGHT, fleet))
    return min(counts), max(counts)


def holders_among(fleet: Fleet, matches: Matches) -> list[tuple[Instance, Match]]:
    """Those that hold anything, and what."""
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
    """The reason of a decision that what is cached did not make: nobody holds enough, or it is not known who
    does."""
    if reason in UNDECIDED and any_awaited(candidates):
        return Reason.INDEX_AWAITED
    return Reason.UNTRUSTED if reason is Reason.NO_PREFIX and not all_trusted(candidates) else reason


def matched_tokens(matches: Matches, name: str) -> int:
    """Leading tokens that an instance holds."""
    match = matches.get(name)
    return 0 if match is None else match.tokens
