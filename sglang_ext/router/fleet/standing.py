"""The instances as policies see them, updated one by one: a request changes one or two of up to a thousand
instances.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from sglang_ext.router.policies.base import CACHED, Fleet, Instance, Role, WholeFleet
from sglang_ext.router.policies.fleet_queries import load_of
from sglang_ext.router.policies.outlook import Numbers

ROOM = 16
"""Instances for which there is room at first."""


class Standing:
    """The usable instances, in the order in which they became so, and in that of their load."""

    __slots__ = ("_apart", "_awaited", "_by_load", "_counts", "_doubted", "_instances", "_places")

    def __init__(self) -> None:
        self._instances: list[Instance] = []
        self._places: dict[str, int] = {}
        """Never changed in place: a caller that holds it keeps the places of its own moment."""
        self._by_load: list[tuple[int, int, int, int, str]] = []
        self._counts: Numbers = np.zeros((CACHED + 1, ROOM), np.int64)
        """See ``WholeFleet.counts``; with room for more instances."""
        self._apart = self._doubted = self._awaited = 0
        """How many only prefill or decode, are not trusted, are awaited."""

    def __len__(self) -> int:
        return len(self._instances)

    def get(self, name: str) -> Instance | None:
        """An instance as it was put in."""
        place = self._places.get(name)
        return None if place is None else self._instances[place]

    def put(self, instance: Instance) -> None:
        """An instance is usable, or is seen differently."""
        place = self._places.get(instance.name)
        if place is None:
            self._places = {**self._places, instance.name: len(self._instances)}
            self._instances.append(instance)
        else:
            self._discount(self._instances[place])
            self._instances[place] = instance
        self._write(self._places[instance.name], instance)
        self._count(instance, 1)
        insort(self._by_load, load_of(instance))

    def drop(self, name: str) -> None:
        """An instance is not usable any more. An unknown instance is no error."""
        place = self._places.get(name)
        if place is not None:
            self._discount(self._instances.pop(place))
            self._places = {instance.name: place for place, instance in enumerate(self._instances)}
            self._counts = np.concatenate([self._counts[:, :place], self._counts[:, place + 1 :]], axis=1)

    def fleet(self) -> Fleet:
        """As it is now."""
        if not self._instances:
            return ()
        least = self._instances[self._places[self._by_load[0][-1]]]
        return WholeFleet(
            self._instances, not self._apart, not self._doubted, bool(self._awaited),
            least, self._by_load[-1][0], self._places, self._by_load, self._counts[:, : len(self._instances)],
        )  # fmt: skip

    def _write(self, place: int, instance: Instance) -> None:
        """Enter the counts of the instance at a place."""
        if place >= self._counts.shape[1]:
            self._counts = np.concatenate(
                [self._counts, np.zeros((CACHED + 1, place + ROOM), np.int64)], axis=1
            )
        counts = self._counts
        counts[0, place], counts[1, place] = instance.in_flight, instance.queued_tokens
        counts[2, place], counts[3, place] = instance.fill, instance.last_picked
        counts[CACHED, place] = instance.cached_tokens

    def _discount(self, instance: Instance) -> None:
        self._count(instance, -1)
        del self._by_load[bisect_left(self._by_load, load_of(instance))]

    def _count(self, instance: Instance, by: int) -> None:
        if instance.role is not Role.COLOCATED:
            self._apart += by
        if not instance.trusted:
            self._doubted += by
        if instance.awaited:
            self._awaited += by

    def __repr__(self) -> str:
        return f"Standing({len(self)} instances)"
