"""The facts of ``RouterCosts`` about each instance, as columns of one table: the source of an ``Outlook``.

A decision of a router with a thousand instances compares all of them, and between two decisions a few change.
So each instance has a place in a table, and what changes is entered there at once. The places follow the
fleet's order, so that arrays over the fleet are views of the table.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from typing import Final

import numpy as np

from sglang_ext.cost_model import Batching
from sglang_ext.router.policies.outlook import Numbers

ROOM: Final = 16
"""Instances for which there is room at first."""

BEGAN: Final = 0
"""When the time left for the present group began; -inf without a group."""
GROUP: Final = 1
"""Expected time left for it then, uncorrected."""
LINE: Final = 2
"""Expected time of the prompts behind it, uncorrected."""
LINED: Final = 3
"""1 if there are any."""
REPORTED: Final = 4
"""When the last load report came; -inf without one."""
OTHERS: Final = 5
"""Computing time of other routers' prompts by this report, uncorrected; 0 once the report is too old."""
RUNNING: Final = 6
"""Requests that it generated for, by this report; 0 unless a pass takes their steps along."""
OBSERVED: Final = 7
"""Observed computing time; see ``Correction``."""
EXPECTED: Final = 8
"""Expected computing time."""
FETCH: Final = 9
"""Three rows of ``TransferTimes``: of fetches from the instance,"""
DISK: Final = 12
"""and of loads from its disk."""
KIND: Final = 15
"""Number of its kind."""
FIELDS: Final = 16

COUNT: Final = 0
"""Row of ``Rows.counts``: this router's prompts that are not computed yet."""
MORE: Final = 1
"""Row of ``Rows.counts``: requests that an instance generated for beyond this router's own, by its report."""

_EMPTY: Final[Numbers] = np.zeros((FIELDS, 1))
_EMPTY[BEGAN] = _EMPTY[REPORTED] = _EMPTY[FETCH] = _EMPTY[DISK] = -math.inf
_EMPTY[KIND] = -1


class Rows:
    """The table, with a column for each instance."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        """Column of each instance, by name."""
        self._table: Numbers = np.repeat(_EMPTY, ROOM, axis=1)
        self._counts: Numbers = np.zeros((2, ROOM), np.int64)
        self.grouped = self.lined = self.others = self.more = 0
        """Instances with a group, with a line, with prompts of other routers, with requests beyond ours."""
        self._free: list[int] = []
        """Columns between others that no instance has."""
        self.order: Mapping[str, int] | None = None
        """The places of the fleet that the columns follow."""
        self._kinds: dict[tuple[Batching, Hashable], int] = {}
        self._members: list[int] = []
        """Instances of each kind."""
        self.batchings: list[Batching] = []
        """How instances of each kind fill their passes."""
        self.sharing: list[int] = []
        """For each kind, a number that is the same for kinds that can fetch from each other; -1 if instances
        of the kind cannot fetch."""

    @property
    def table(self) -> Numbers:
        """Shape (``FIELDS``, columns); the last ones may be unused."""
        return self._table

    @property
    def counts(self) -> Numbers:
        """Shape (2, columns), integers: ``COUNT`` and ``MORE`` of each instance."""
        return self._counts

    @property
    def kinds(self) -> list[int]:
        """The kinds that instances have."""
        return [kind for kind in range(len(self._members)) if self._members[kind]]

    def place(self, name: str) -> int:
        """The column of an instance, which is made if there is none."""
        found = self.places.get(name)
        if found is None:
            found = self._free.pop() if self._free else len(self.places)
            self.places[name] = found
            if found >= self._table.shape[1]:
                self._table = np.concatenate([self._table, np.repeat(_EMPTY, found + ROOM, axis=1)], axis=1)
                zeros: Numbers = np.zeros((2, found + ROOM), np.int64)
                self._counts = np.concatenate([self._counts, zeros], axis=1)
        return found

    def arrange(self, order: Mapping[str, int]) -> list[str]:
        """Put the columns into the order of a fleet's ``places``. Returns the instances that had none."""
        new = [name for name in order if name not in self.places]
        for name in new:
            self.place(name)
        others = [name for name in self.places if name not in order]
        names = [*sorted(order, key=order.__getitem__), *others]
        columns = [self.places[name] for name in names]
        unused: Numbers = np.repeat(_EMPTY, self._table.shape[1] - len(names), axis=1)
        self._table = np.concatenate([self._table[:, columns], unused], axis=1)
        zeros: Numbers = np.zeros((2, unused.shape[1]), np.int64)
        self._counts = np.concatenate([self._counts[:, columns], zeros], axis=1)
        self.places = {name: place for place, name in enumerate(names)}
        self._free.clear()
        self.order = order
        return new

    def set_kind(self, place: int, batching: Batching, sharing: Hashable) -> None:
        """Enter how an instance fills its passes, and with which others it shares KV; None: with none."""
        key = batching, sharing
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = len(self._members)
            self._members.append(0)
            self.batchings.append(batching)
            alike = [known for (_, other), known in self._kinds.items() if other == sharing]
            self.sharing.append(-1 if sharing is None else alike[0])
        before = int(self._table[KIND, place])
        if before != kind:
            if before >= 0:
                self._members[before] -= 1
            self._members[kind] += 1
            self._table[KIND, place] = kind

    def set_queue(self, place: int, began: float, group_s: float, line_s: float | None, count: int) -> None:
        """Enter the prompts of an instance; for the values see ``queue_estimate.Standing``."""
        table = self._table
        self.grouped += (began > -math.inf) - (float(table[BEGAN, place]) > -math.inf)
        self.lined += (line_s is not None) - (float(table[LINED, place]) > 0.0)
        table[BEGAN, place], table[GROUP, place] = began, group_s
        table[LINE, place], table[LINED, place] = line_s or 0.0, line_s is not None
        self._counts[COUNT, place] = count

    def set_report(self, place: int, at: float, others_s: float, more: int, running: int) -> None:
        """Enter the load report of an instance; zeros once it is too old."""
        table = self._table
        self.others += (others_s != 0.0) - (float(table[OTHERS, place]) != 0.0)
        self.more += (more != 0) - (int(self._counts[MORE, place]) != 0)
        table[REPORTED, place], table[OTHERS, place], table[RUNNING, place] = at, others_s, running
        self._counts[MORE, place] = more

    def drop(self, name: str) -> None:
        """Forget all about an instance."""
        place = self.places.pop(name, None)
        if place is not None:
            self.set_queue(place, -math.inf, 0.0, None, 0)
            self.set_report(place, -math.inf, 0.0, 0, 0)
            kind = int(self._table[KIND, place])
            if kind >= 0:
                self._members[kind] -= 1
            self._table[:, place] = _EMPTY[:, 0]
            self._free.append(place)
            self.order = None

    def __repr__(self) -> str:
        return f"Rows({len(self.places)} instances, kinds={self.kinds})"
