"""Whether two instances can hand requests over, or share KV: a comparison of their registrations.

A prefill and a decode instance need the same settings of the model and of the hand-over; their weights may
be updated while they run, so those are compared when KV is handed over. Colocated instances share KV when
their registrations have one ``namespace``, block size and number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from sglang_ext.protocol.cluster import Difference, Registration

MOST_FINDINGS: Final = 16
"""Pairs of groups that are named."""
MOST_INSTANCES: Final = 8
"""Instances of a group that are named."""
MOST_DIFFERENCES: Final = 8
"""Settings of two groups that are named."""
MOST_IN_WORDS: Final = 3
"""Instances, or settings, that a sentence names."""
MOST_SETTINGS: Final = 255
MOST_BYTES: Final = 24 << 10
"""Of a registration's settings: names and values."""
MOST_LETTERS: Final = 128
REST: Final = "other settings"
"""Stands for those that a registration has no room for, with their digest."""


def bounded(settings: Mapping[str, str]) -> dict[str, str]:
    """As much of a server's settings as a registration has room for, by name, and a digest of the rest."""
    found: dict[str, str] = {}
    rest: dict[str, str] = {}
    size = 0
    for name, value in sorted(settings.items()):
        size += len(name.encode()) + len(value.encode())
        fits = max(len(name), len(value)) <= MOST_LETTERS
        if fits and size <= MOST_BYTES and len(found) < MOST_SETTINGS:
            found[name] = value
        else:
            rest[name] = value
    if rest:
        found[REST] = _digest(rest)
    return found


def setting_differences(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[Difference, ...]:
    """The settings in which two servers differ, by name."""
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return tuple(Difference(name, one.get(name, ""), other.get(name, "")) for name in names)


def differences(one: Registration, other: Registration) -> tuple[Difference, ...]:
    """Why two instances can never hand requests over, if one prefills and the other decodes, or share KV, if
    both are colocated; empty when they can, or other models' names, roles or releases leave it open."""
    if one.model != other.model:
        return ()
    if {one.role, other.role} == {"prefill", "decode"}:
        if not (one.handover and other.handover):
            return ()
        found = setting_differences(one.handover, other.handover)
        return found + setting_differences(one.settings, other.settings)
    if one.role != "colocated" or other.role != "colocated":
        return ()
    found = setting_differences(one.settings, other.settings) if one.settings and other.settings else ()
    if not (one.endpoints and other.endpoints):  # without exports no KV is shared; one name means one model
        return found
    found = setting_differences(_sharing(one), _sharing(other)) + found
    if one.weights and other.weights:
        found = setting_differences({"weights": one.weights}, {"weights": other.weights}) + found
    if not found:
        found = setting_differences({"KV identity": one.namespace}, {"KV identity": other.namespace})
    return found


def _sharing(registration: Registration) -> dict[str, str]:
    return {"--kv-block-size": str(registration.block_size), "--tp-size": str(len(registration.endpoints))}


def hand_over_identity(registration: Registration | None) -> str:
    """A digest that a prefill and a decode instance share when they can hand requests over; empty for an
    instance that does not report it."""
    if registration is None or not registration.handover or registration.role == "colocated":
        return ""
    return _digest((registration.model, registration.settings, registration.handover))


def fits(one: str, other: str) -> bool:
    """Whether instances of these `hand_over_identity` may be a pair."""
    return one == other or not one or not other


def identity(registration: Registration) -> str:
    """A digest of all that `differences` compares: with equal digests, instances have equal differences."""
    if registration.role != "colocated":
        return _digest((registration.role, registration.model, registration.settings, registration.handover))
    facts = (
        registration.model,
        registration.settings,
        registration.weights,
        registration.namespace,
        registration.block_size,
        len(registration.endpoints),
    )
    return _digest(facts)


def in_words(found: Sequence[Difference], one: str, other: str) -> str:
    """Differences as a list. one, other: a word behind each value, such as ``there``."""
    shown = [
        f"{each.setting} ({each.one or 'none'} {one}, {each.other or 'none'} {other})"
        for each in found[:MOST_IN_WORDS]
    ]
    more = f" and {len(found) - MOST_IN_WORDS} more" if len(found) > MOST_IN_WORDS else ""
    return ", ".join(shown) + more


def _digest(facts: object) -> str:
    data = msgspec.json.encode(facts, order="deterministic")
    return hashlib.blake2b(data, digest_size=16).hexdigest()
