"""Members that can never work together although they serve one model, in groups of like members.

Looked for when a member joins or goes, not when a request comes. Of a thousand members, those with the same
settings are one group, and each group is compared and named once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from sglang_ext.protocol.cluster import Difference, Incompatible, Registration
from sglang_ext.protocol.compatibility import (
    MOST_DIFFERENCES,
    MOST_FINDINGS,
    MOST_IN_WORDS,
    MOST_INSTANCES,
    differences,
    identity,
    in_words,
)

logger = logging.getLogger("router.members")


@dataclass(slots=True)
class Group:
    """Like members. registration: of any of them."""

    key: str
    registration: Registration
    names: set[str] = field(default_factory=set)

    def named(self) -> str:
        """Its members in words."""
        shown = ", ".join(sorted(self.names)[:MOST_IN_WORDS])
        more = len(self.names) - MOST_IN_WORDS
        return f"{shown} and {more} more" if more > 0 else shown


class Compatibility:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._keys: dict[str, str] = {}
        """Of each member's group, by instance."""
        self._logged: frozenset[frozenset[str]] = frozenset()
        """Pairs of groups that are incompatible now."""
        self.findings: tuple[Incompatible, ...] = ()
        """Incompatible pairs of groups, at most `MOST_FINDINGS`."""

    def put(self, registration: Registration) -> None:
        """A member has registered, perhaps with other settings than before."""
        name, key = registration.instance, identity(registration)
        if self._keys.get(name) == key:
            return
        self._remove(name)
        self._keys[name] = key
        self._groups.setdefault(key, Group(key, registration)).names.add(name)
        self._look()

    def drop(self, instance: str) -> None:
        """A member has gone, or goes. An unknown member is no error."""
        if instance in self._keys:
            self._remove(instance)
            self._look()

    def shared(self, registration: Registration) -> Registration:
        """The same registration; its settings are kept once for all that are alike."""
        if not registration.settings:
            return registration
        group = self._groups.get(identity(registration))
        if group is None or group.registration.settings is registration.settings:
            return registration
        return msgspec.structs.replace(registration, settings=group.registration.settings)

    def _remove(self, instance: str) -> None:
        key = self._keys.pop(instance, "")
        if (group := self._groups.get(key)) is not None:
            group.names.discard(instance)
            if not group.names:
                del self._groups[key]

    def _look(self) -> None:
        found = dict(islice(self._find(), MOST_FINDINGS))
        for pair, finding in found.items():
            if pair not in self._logged:
                logger.warning("%s", finding.why)
        self._logged = frozenset(found)
        self.findings = tuple(found.values())

    def _find(self) -> Iterator[tuple[frozenset[str], Incompatible]]:
        """Pairs of incompatible groups. Colocated groups are compared with the largest one of their model."""
        groups = sorted(self._groups.values(), key=lambda group: (-len(group.names), min(group.names)))
        prefills = [group for group in groups if group.registration.role == "prefill"]
        largest: dict[str, Group] = {}
        for group in groups:
            role, model = group.registration.role, group.registration.model
            if role == "decode":
                others = prefills
            elif role == "colocated":
                others = [largest.setdefault(model, group)]
            else:
                continue
            for other in others:
                if other is group or not (found := differences(other.registration, group.registration)):
                    continue
                reason = _pair(other, group, found) if role == "decode" else _sharing(group, other, found)
                yield frozenset({group.key, other.key}), reason

    def __repr__(self) -> str:
        return f"Compatibility({len(self._groups)} groups, {len(self.findings)} incompatible)"


def _pair(prefill: Group, decode: Group, found: tuple[Difference, ...]) -> Incompatible:
    why = (
        f"{prefill.named()} (prefill) and {decode.named()} (decode) cannot serve a request together: "
        f"{in_words(found, 'at prefill', 'at decode')}; start them with one model and the same flags"
    )
    return _incompatible("hand-over", prefill, decode, found, why)


def _sharing(group: Group, largest: Group, found: tuple[Difference, ...]) -> Incompatible:
    found = tuple(Difference(each.setting, each.other, each.one) for each in found)
    values = in_words(found, f"at {min(group.names)}", f"at {min(largest.names)}")
    why = (
        f"{group.named()} cannot share KV with {largest.named()}: {values}; start them alike, or with "
        "another --served-model-name"
    )
    return _incompatible("sharing", group, largest, found, why)


def _incompatible(
    what: str, group: Group, other: Group, found: tuple[Difference, ...], why: str
) -> Incompatible:
    return Incompatible(
        what=what,
        instances=tuple(sorted(group.names)[:MOST_INSTANCES]),
        count=len(group.names),
        others=tuple(sorted(other.names)[:MOST_INSTANCES]),
        others_count=len(other.names),
        differences=found[:MOST_DIFFERENCES],
        why=why,
    )
