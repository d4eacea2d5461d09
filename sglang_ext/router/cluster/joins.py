"""Joins are broadcast: each decode instance receives the list of all prefill servers (KVDirect, section 4.2).

It connects to them before their first request comes, and stops trying when one is not named any more. A
message carries the whole list. It is sent when the list has changed, when an agent becomes reachable (again),
and every `PREFILLS_AGAIN_S`. So a lost message does no harm, and several routers may send lists of the same
servers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from sglang_ext.addresses import bracketed
from sglang_ext.clock import Clock
from sglang_ext.protocol.agent import PREFILLS_AGAIN_S, PrefillServer, PrefillServers, ToAgent
from sglang_ext.protocol.cluster import Registration, bootstrap_of_replica, dp_rank_of
from sglang_ext.router.fleet.facts import bootstrap_of
from sglang_ext.router.fleet.instance_record import InstanceRecord
from sglang_ext.router.fleet.lifecycle import USABLE
from sglang_ext.router.policies.base import Role


class Tells(Protocol):
    """The parts of ``agents.AgentChannels`` used here."""

    def registration(self, name: str) -> Registration | None: ...

    def send(self, name: str, message: ToAgent) -> bool: ...


def prefill_servers(rows: Iterable[InstanceRecord]) -> tuple[PrefillServer, ...]:
    """The prefill servers that receive requests. A listed server that has not registered goes by its URL."""
    return tuple(
        PrefillServer(
            row.registration.instance if row.registration else row.name,
            bytes.fromhex(row.epoch),
            _address(row),
        )
        for row in rows
        if row.role is Role.PREFILL and row.state in USABLE and row.facts is not None
    )


def _address(row: InstanceRecord) -> str:
    host, port = bootstrap_of(row.name, row.facts)
    return bootstrap_of_replica(f"{bracketed(host)}:{port}", dp_rank_of(row.name))


class Joins:
    """See the module's docstring.

    Args:
        rows: of the fleet, by URL.
        agents: send the lists.
        clock: seconds.
        router: this router's name.
    """

    def __init__(
        self, rows: Mapping[str, InstanceRecord], agents: Tells, clock: Clock, *, router: str
    ) -> None:
        self._rows = rows
        self._agents = agents
        self._clock = clock
        self._router = router
        self._sent: dict[tuple[str, str], tuple[float, tuple[PrefillServer, ...]]] = {}
        """Decode instance (URL, epoch) -> the time and contents of the last list sent to it."""

    def announce(self) -> None:
        """Send the list to every decode instance whose last one differs or is `PREFILLS_AGAIN_S` old."""
        servers, now = prefill_servers(self._rows.values()), self._clock.monotonic()
        before, self._sent = self._sent, {}
        for name, row in list(self._rows.items()):
            there = self._agents.registration(name) if row.role is Role.DECODE else None
            if there is None:
                continue
            key = (name, there.epoch)
            at, known = before.get(key, (now, ()))
            is_due = known != servers or now - at >= PREFILLS_AGAIN_S
            if is_due and self._agents.send(name, PrefillServers(self._router, servers)):
                at, known = now, servers
            self._sent[key] = at, known

    def __repr__(self) -> str:
        return f"Joins({len(self._sent)} decode instances)"
