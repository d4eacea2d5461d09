"""Pauses between the turns of sessions: how long tools run and users think, learnt from past pauses. Pure.

A turn that ends in a tool call is followed by the next as soon as the tool has run; after any other turn the
user reads and thinks. The next pause is forecast from those after the same tool in the same session, else in
the same client's sessions, else from those after any of the client's tools. Quantiles are used, because
pauses have long tails: a mean would be that of the few very long ones.

Pauses are learnt by tenant. The names of clients and tools are what clients send: they are cut and bounded.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import OrderedDict
from dataclasses import dataclass

USER = ""
"""In place of a tool's name: the turn ended without a tool call."""
ANY_TOOL = "*"
LONGEST_S = 3600.0
"""A longer pause counts as one of this length."""
MAX_NAME_CHARACTERS = 96
_KEPT = 64
"""Newest pauses that are kept of each kind."""
KIND_BYTES = 1024
"""Memory of the pauses of one kind, with its names, at most."""
_TIGHT = 4.0
"""Between the earliest and the latest time of pauses that are known well."""
_LEAST = 6
"""Pauses of a kind from which a forecast is made."""


@dataclass(frozen=True, slots=True)
class Turned:
    """The end of a turn, as far as the pause after it depends on it."""

    tenant: str
    client: str
    """Name of the client's program, such as ``claude-cli``."""
    session: str
    tool: str = USER
    """Name of the tool that was called; of several, all names."""

    def cut(self) -> Turned:
        """The same with names of bounded length."""
        client, session, tool = (
            name[:MAX_NAME_CHARACTERS] for name in (self.client, self.session, self.tool)
        )
        return dataclasses.replace(self, client=client, session=session, tool=tool)


@dataclass(frozen=True, slots=True)
class Forecast:
    """When the next turn is expected, in seconds after the end of the last one."""

    earliest_s: float
    typical_s: float
    """The median."""
    latest_s: float
    basis: str
    """The pauses that it is made from: ``session``, ``tool`` or ``client``."""
    pauses: int

    def away_s(self, bring_s: float) -> float:
        """How long KV is of more use out of HBM: until the earliest time, if that is known well enough to
        have the KV back in time without bringing it in vain; else 0.

        Args:
            bring_s: seconds that bringing it back takes.
        """
        tight = self.latest_s <= _TIGHT * self.earliest_s
        return self.earliest_s if tight and self.earliest_s > bring_s else 0.0


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The shares of pauses that are shorter than a forecast's earliest and latest time.

    Pauses have long tails: to hold KV for the late ones would cost others more than it saves.
    """

    earliest: float = 0.05
    latest: float = 0.7


class Pauses:
    """Learns pauses, and forecasts the next one.

    Args:
        max_bytes: memory for all pauses; kinds that were not seen for longest are forgotten.
    """

    def __init__(self, max_bytes: int = 4 << 20, quantiles: Quantiles | None = None) -> None:
        self._quantiles = quantiles or Quantiles()
        self._most = max_bytes // KIND_BYTES
        self._known: OrderedDict[tuple[str, ...], array[float]] = OrderedDict()

    def learn(self, turned: Turned, seconds: float) -> None:
        """The turn after ``turned`` has come so many seconds later."""
        seconds = min(max(0.0, seconds), LONGEST_S)
        for _basis, kind in _kinds(turned):
            pauses = self._known.setdefault(kind, array("f"))
            self._known.move_to_end(kind)
            pauses.append(seconds)
            del pauses[:-_KEPT]
            while len(self._known) > self._most:
                self._known.popitem(last=False)

    def forecast(self, turned: Turned) -> Forecast | None:
        """When the turn after ``turned`` is expected; None while too few such pauses are known."""
        for basis, kind in _kinds(turned):
            pauses = self._known.get(kind)
            if pauses is not None and len(pauses) >= _LEAST:
                ordered = sorted(pauses)
                earliest = _quantile(ordered, self._quantiles.earliest)
                typical = _quantile(ordered, 0.5)
                latest = _quantile(ordered, self._quantiles.latest)
                return Forecast(earliest, typical, latest, basis, len(ordered))
        return None

    @property
    def size_bytes(self) -> int:
        """Memory of all pauses."""
        return KIND_BYTES * len(self._known)

    def __len__(self) -> int:
        """Kinds of pauses."""
        return len(self._known)

    def __repr__(self) -> str:
        return f"Pauses({len(self)} kinds, {self.size_bytes} bytes)"


def _kinds(turned: Turned) -> list[tuple[str, tuple[str, ...]]]:
    """(basis of a forecast, key of the pauses), the most specific first."""
    turned = turned.cut()
    tenant, client, tool = turned.tenant, turned.client, turned.tool
    kinds: list[tuple[str, tuple[str, ...]]] = [
        ("session", (tenant, "session", turned.session, tool)),
        ("tool", (tenant, "client", client, tool)),
    ]
    if tool != USER:
        kinds.append(("client", (tenant, "client", client, ANY_TOOL)))
    return kinds


def _quantile(ordered: list[float], share: float) -> float:
    """The value below which a share of the values lies, between two values in proportion."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
