"""The sessions that each client has open at servers, by which their number is limited.

A server keeps a session until it is closed or nothing was sent in it for its time-out. So the router gives
each session a time-out, and counts it for as long.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from sglang_ext.clock import Clock
from sglang_ext.router.tenancy.bounded import ENTRY_BYTES, size_of
from sglang_ext.router.tenancy.tenants import too_many

MOST = 1 << 15
"""Sessions that all clients together may have open."""


@dataclass(slots=True)
class _Open:
    """owner: the tenant or address that is charged. ends: when the server closes it if nothing is sent."""

    owner: str
    instance: str
    idle_s: float
    ends: float


class OpenSessions:
    """Counts the sessions that were opened through this router.

    Args:
        clock: seconds.
        most: sessions that one client may have open; 0 for none.
        idle_s: the longest time-out of a session.
    """

    def __init__(self, clock: Clock, *, most: int, idle_s: float) -> None:
        self._clock = clock
        self._most = most
        self._idle_s = idle_s
        self._open: dict[tuple[str, str], _Open] = {}
        self._owned: Counter[str] = Counter()
        self._kept: Counter[str] = Counter()
        self.size_bytes = 0
        """Memory of all entries, as charged."""

    def timeout(self, asked: float | None) -> float:
        """The time-out of a session for which a client has asked for one, or for none."""
        return self._idle_s if asked is None else min(asked, self._idle_s)

    def check(self, owner: str) -> None:
        """Refuse a further session of a client that has as many as it may.

        Raises:
            RequestRefused: 429, with the seconds until the first of them times out.
        """
        if self._owned[owner] < self._most and len(self._open) < MOST:
            return
        now = self._clock.monotonic()
        for key in [key for key, each in self._open.items() if each.ends <= now]:
            self._drop(key)
        if self._owned[owner] >= self._most:
            wait = min((each.ends for each in self._open.values() if each.owner == owner), default=now) - now
            raise too_many(
                f"one client may have {self._most} sessions open (--tenant-limits sessions): close some",
                wait,
                "sessions",
            )
        if len(self._open) >= MOST:
            wait = min(each.ends for each in self._open.values()) - now
            raise too_many(f"the router's clients have {MOST} sessions open", wait, "sessions")

    def opened(self, owner: str, scope: str, name: str, instance: str, idle_s: float) -> None:
        """An instance has opened a session.

        Args:
            owner: see ``check``.
            scope, name: the tenant's, and its name of the session.
            idle_s: its time-out.
        """
        self._drop((scope, name))
        self._open[scope, name] = _Open(owner, instance, idle_s, self._clock.monotonic() + idle_s)
        self._owned[owner] += 1
        self._kept[instance] += 1
        self.size_bytes += _size(scope, name)

    def used(self, scope: str, name: str) -> None:
        """A request was sent in a session: its time-out begins anew."""
        if (found := self._open.get((scope, name))) is not None:
            found.ends = self._clock.monotonic() + found.idle_s

    def closed(self, scope: str, name: str) -> None:
        """A session was closed, or its instance is gone."""
        self._drop((scope, name))

    def kept_by(self, instance: str) -> int:
        """The sessions that an instance keeps."""
        return self._kept[instance]

    def left(self, instance: str) -> None:
        """An instance is gone, and its sessions with it."""
        for key in [key for key, each in self._open.items() if each.instance == instance]:
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> None:
        found = self._open.pop(key, None)
        if found is None:
            return
        self.size_bytes -= _size(*key)
        for counter, name in ((self._owned, found.owner), (self._kept, found.instance)):
            counter[name] -= 1
            if not counter[name]:
                del counter[name]

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        return f"OpenSessions({len(self)} of {len(self._owned)} clients)"


def _size(scope: str, name: str) -> int:
    return ENTRY_BYTES + size_of(scope, name)
