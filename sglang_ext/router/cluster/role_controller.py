"""Roles change by themselves: a controller moves instances between prefill and decode (KVDirect, section 7).

Once a second it samples the load of both roles (`role_traffic`) and compares splits (`policies/roles`). Of
several routers one acts: the first by name of those that share the membership, and none while that cannot be
reached. In a dry run it only logs and counts its choice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final, Protocol

import msgspec

from sglang_ext.protocol.agent import Load
from sglang_ext.protocol.cluster import RoleName, RolesView
from sglang_ext.router.cluster.members import CannotChangeRole, Members, Unknown
from sglang_ext.router.cluster.role_change import RoleChanges
from sglang_ext.router.cluster.role_traffic import Ended, RoleTraffic, Sends
from sglang_ext.router.fleet.instance_record import InstanceRecord
from sglang_ext.router.fleet.lifecycle import USABLE
from sglang_ext.router.policies.base import Role
from sglang_ext.router.policies.roles import (
    Candidate,
    History,
    Wish,
    due_in_s,
    split_name,
    who_changes,
    wish,
)
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record

logger = logging.getLogger("router.role_controller")

MODES: Final = ("off", "dry-run", "on")
LOOK_S: Final = 1.0
MEAN: Final = 0.5
"""Rates are means over this share of the dwell time,"""
HOLDS: Final = 1 / 6
"""and a wish is carried out when it has held for this share of it,"""
FIRST: Final = 1 / 8
"""of which the first change is expected to take this share."""
ASIDE_S: Final = 600.0
"""An instance that could not change its role is not asked again for so long."""
_NAMES: Final[Mapping[Role, RoleName]] = {Role.PREFILL: "prefill", Role.DECODE: "decode"}


class Knows(Protocol):
    """The parts of ``placing.costs.RouterCosts`` used here."""

    def said(self, name: str) -> Load | None:
        """The load in an instance's last heartbeat, while that is recent."""

    def step_s(self, requests: int) -> float:
        """One step of generation of so many requests, as the cost model has it."""


class RoleController:
    """See the module's docstring.

    Args:
        mode: one of `MODES`.
        dwell_s: the least time between two changes.
        changes: changes roles.
        knows: the instances' loads.
        cached_tokens: tokens that an instance is believed to have cached.
    """

    def __init__(
        self,
        mode: str,
        dwell_s: float,
        members: Members,
        changes: RoleChanges,
        knows: Knows,
        cached_tokens: Callable[[str], int],
    ) -> None:
        self.mode = mode
        self._dwell_s = dwell_s
        self._members = members
        self._changes = changes
        self._knows = knows
        self._cached_tokens = cached_tokens
        self._clock = members.clock
        self._traffic = RoleTraffic(MEAN * dwell_s, lambda: max(0.0, knows.step_s(2) / knows.step_s(1) - 1.0))
        self._history = History()
        self._wished = Wish()
        """The last wish, for the API; actions follow the wish in ``_history``."""
        self._serves = False
        self._aside: dict[str, float] = {}
        """Instances that could not change, until when; ``monotonic``."""
        self._said = ""

    @property
    def is_on(self) -> bool:
        """Whether it looks at all."""
        return self.mode != "off"

    def serve(self) -> None:
        """This router has clients from now on: a standby router changes nothing."""
        self._serves = True

    def ended(self, record: Record, now: float) -> None:
        """A request has ended."""
        stages, prefill, decode = record.instance_stages, record.prefill_instance, record.instance
        if record.status != 200 or stages is None or prefill is None or decode is None:
            return
        new = (record.prompt_tokens or 0) - (record.cached_tokens or 0)
        self._traffic.ended(now, Ended(prefill, decode, new, record.completion_tokens or 0, stages))

    async def round(self) -> float:
        """Look, and act; returns the pause until the next look."""
        self.look()
        await self._act()
        return LOOK_S

    def look(self) -> None:
        """Sample the load, and update the wish."""
        now = self._clock.monotonic()
        prefill, decode = self._rows(Role.PREFILL), self._rows(Role.DECODE)
        self._traffic.sample(now, map(self._sends, prefill), map(self._sends, decode))
        if not prefill or not decode:
            wished = Wish(why=f"there are {len(prefill)} prefill and {len(decode)} decode instances")
        elif isinstance(loads := self._traffic.loads(len(prefill), len(decode)), str):
            wished = Wish(why=loads)
        else:
            wished = wish(loads, self._history, now, dwell_s=self._dwell_s, takes_s=self._takes_s)
        before, self._wished = self._wished, wished
        self._history = msgspec.structs.replace(self._history, wish=wished)
        if wished.role is not before.role:
            there = split_name(len(prefill), len(decode))
            logger.info("%s: one %s more is wished: %s", there, wished.role or "of nothing", wished.why)

    async def _act(self) -> None:
        wished, now = self._history.wish, self._clock.monotonic()
        self._said = ""
        if wished.role is None or self._due_in_s(now) > 0.0:
            return
        if (why := self.idle_because()) is not None:
            self._said = why
            return
        name = self._who(wished.role, now)
        if name is None:
            self._said = f"no instance can become {wished.role}"
            return
        if self.mode == "dry-run":
            self._said = f"dry run: {name} would become {wished.role}"
            logger.info("%s (%s)", self._said, wished.why)
            self._changes.count(wished.role, wished.role, "dry-run")
            self._history = self._history.failed(now)
            return
        logger.info("%s is to become %s: %s", name, wished.role, wished.why)
        try:
            await self._changes.change(name, _NAMES[wished.role], why=wished.role)
        except (CannotChangeRole, Unknown) as error:
            logger.warning("%s has not become %s: %s", name, wished.role, error)
            self._aside[name] = self._clock.monotonic() + ASIDE_S
            self._history = self._history.failed(self._clock.monotonic())
        else:
            self._history = self._history.after(wished.role, self._clock.monotonic(), self._dwell_s)

    def idle_because(self) -> str | None:
        """Why this router changes nothing, whatever is wished; None when it would."""
        if not self._serves:
            return "this router stands by"
        store = self._members.store
        if not store.view().connected:
            return "the membership cannot be shared now"
        first = min((self._members.router, *store.others))
        return None if first == self._members.router else f"router {first} does it"

    def _who(self, role: Role, now: float) -> str | None:
        other = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        rows = [row for row in self._rows(other) if row.facts is not None and row.facts.changes_role]
        ids = {row.name: member.instance for row in rows if (member := self._members.roster.at(row.name))}
        return who_changes(
            Candidate(ids[row.name], row.in_flight + row.elsewhere, self._cached_tokens(row.name))
            for row in rows
            if row.name in ids and self._aside.get(ids[row.name], now) <= now
        )

    def _rows(self, role: Role) -> list[InstanceRecord]:
        return [row for row in self._members.fleet.rows.values() if row.state in USABLE and row.role is role]

    def _sends(self, row: InstanceRecord) -> Sends:
        return Sends(
            row.name,
            row.sent,
            row.sent_tokens,
            row.in_flight,
            row.elsewhere,
            row.queued_tokens,
            self._knows.said(row.name),
        )

    @property
    def _takes_s(self) -> float:
        """Expected seconds of a change."""
        seen = self._changes.expected_s
        return FIRST * self._dwell_s if seen is None else seen

    def _due_in_s(self, now: float) -> float:
        return due_in_s(
            self._wished, self._history, now, dwell_s=self._dwell_s, holds_s=HOLDS * self._dwell_s
        )

    # -- views -----------------------------------------------------------------------------------------------

    def view(self) -> RolesView | None:
        """For ``GET /cluster``; None where there is no controller."""
        if not self.is_on:
            return None
        wished, now = self._wished, self._clock.monotonic()
        return RolesView(
            mode=self.mode,
            idle=self.idle_because() or "",
            wish="" if wished.role is None else wished.role.value,
            why=wished.why,
            gain_s=round(wished.gain_s, 4),
            expected_s={split: round(seconds, 4) for split, seconds in wished.expected.items()},
            due_s=None if wished.role is None else round(self._due_in_s(now), 3),
            said=self._said,
            takes_s=round(self._takes_s, 3),
            changes=self._changes.recent(),
        )

    def measure(self, metrics: RouterMetrics) -> None:
        """Export the wish as metrics."""
        wishes = metrics.gauge("role_controller_wish")
        expected = metrics.gauge("role_controller_expected_seconds")

        def refresh() -> None:
            wished = self._wished
            for role in (Role.PREFILL, Role.DECODE):
                wishes.labels(role.value).set(wished.role is role)
            expected.clear()
            for split, seconds in wished.expected.items():
                expected.labels(split).set(seconds)

        metrics.refreshing.subscribe(refresh)

    def __repr__(self) -> str:
        wished = self._wished.role
        return f"RoleController({self.mode}, wishes {wished or 'nothing'})"
