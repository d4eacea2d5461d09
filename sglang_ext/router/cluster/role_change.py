"""An instance changes between prefill and decode while it runs, and keeps its cache (KVDirect, section 7).

    drained       it receives no new requests; decodes that run there go on at others (`moving`)
    switched      SGLang tears down its own role and sets up the other one; the cache stays
    registered    it registers its new role with all routers
    resumed       its agent sends a new snapshot, for the trees of its new role

A failure before the switch leaves the instance in its old role, and it is resumed. The record of its drain
names the router that carries out the change: when that router is gone, another one resumes the instance, in
its role of that moment.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import msgspec
from prometheus_client import Counter

from sglang_ext.errors import DeadlineError, PeerError
from sglang_ext.protocol.cluster import RoleChangeView, RoleName
from sglang_ext.router.cluster.members import CannotChangeRole, Members
from sglang_ext.router.cluster.roster import Changing, Intent, Member
from sglang_ext.router.fleet.instance_record import InstanceRecord
from sglang_ext.router.fleet.lifecycle import USABLE, State
from sglang_ext.router.fleet.worker import WorkerApi
from sglang_ext.router.policies.base import Role
from sglang_ext.router.telemetry.observability import RouterMetrics

logger = logging.getLogger("router.role_change")

LOOK_S = 0.05
DRAIN_S = 600.0
SWITCH_S = 120.0
IDLE_S = 15.0
"""A server is idle a moment after its last answer: transfers and returns end behind it."""
JOIN_S = 30.0
ORPHANED_S = 10.0
"""How long the router that carries out a change must be missing before another one takes over: twice the time
after which a router counts as missing.
"""
LEARNS = 0.5
"""Weight of the last change in the expected duration of the next one."""
RECENT = 10
ASKED = "asked"
NOT_IDLE = "not idle"
SWITCHING = frozenset({Role.PREFILL, Role.DECODE})


class RoleChanges:
    """See the module's docstring.

    Args:
        api: calls to them.
    """

    def __init__(self, members: Members, api: WorkerApi) -> None:
        self._members = members
        self._api = api
        self._clock = members.clock
        self._changing: set[str] = set()
        self._orphans: dict[str, float] = {}
        """Instances that are drained for a router that is not there, since when; ``monotonic``."""
        self.expected_s: float | None = None
        """Expected seconds of a change, from former ones; None before the first."""
        self._recent: deque[tuple[float, RoleChangeView]] = deque(maxlen=RECENT)
        self._counter: Counter | None = None
        members.ticked.subscribe(self._look_for_orphans)

    def measure(self, metrics: RouterMetrics) -> None:
        """Count changes."""
        self._counter = metrics.counter("role_changes")

    def count(self, role: str, why: str, outcome: str) -> None:
        """A change has ended, or would have been."""
        if self._counter is not None:
            self._counter.labels(role, why, outcome).inc()

    def recent(self) -> tuple[RoleChangeView, ...]:
        """The last changes, the newest first."""
        now = self._clock.monotonic()
        return tuple(
            msgspec.structs.replace(view, ago_s=round(now - at, 3)) for at, view in reversed(self._recent)
        )

    async def change(self, instance: str, role: RoleName, *, why: str = ASKED) -> None:
        """Returns when the instance serves in its new role.

        Args:
            why: the reason under which it is counted.

        Raises:
            Unknown: there is none of this name.
            CannotChangeRole: it does not; the text gives the reason, and its role of now.
        """
        member = self._members.member(instance)
        there = self._members.role(member)
        if there == role:
            return
        if {there, role} - {one.value for one in SWITCHING}:
            self._members.change_role(instance, role)
        if member.instance in self._changing:
            raise CannotChangeRole(f"{member.instance} is changing its role already", field="role")
        if self._is_last(member, there):
            raise _last(member, there)
        self._changing.add(member.instance)
        began = self._clock.monotonic()
        try:
            await self._change(member, there, role)
        except CannotChangeRole as error:
            self._note(member.instance, role, why, "refused", self._clock.monotonic() - began, str(error))
            raise
        finally:
            self._changing.discard(member.instance)
        took = self._clock.monotonic() - began
        before = took if self.expected_s is None else self.expected_s
        self.expected_s = before + LEARNS * (took - before)
        self._note(member.instance, role, why, "done", took)

    def _is_last(self, member: Member, role: str) -> bool:
        return not any(
            row.role.value == role and row.state in USABLE and row.name != member.url
            for row in self._members.fleet.rows.values()
        )

    def _note(self, instance: str, role: str, why: str, outcome: str, took_s: float, text: str = "") -> None:
        self.count(role, why, outcome)
        view = RoleChangeView(
            instance=instance, role=role, why=why, outcome=outcome, took_s=round(took_s, 3), ago_s=0.0,
            text=text[:500],
        )  # fmt: skip
        self._recent.append((self._clock.monotonic(), view))

    def _look_for_orphans(self) -> None:
        """Take back drains whose router has gone in the middle of a change."""
        store, now = self._members.store, self._clock.monotonic()
        if not store.view().connected:
            return
        before, self._orphans = self._orphans, {}
        for member in self._members.roster:
            changing = member.changing
            if changing is None or changing.router in store.others or member.instance in self._changing:
                continue
            since = self._orphans[member.instance] = before.get(member.instance, now)
            if now - since >= ORPHANED_S:
                text = f"router {changing.router} has gone in the middle of its change to {changing.role}"
                logger.warning("%s is resumed: %s", member.instance, text)
                self._note(member.instance, changing.role, "orphan", "taken_back", now - since, text)
                self._members.resume(member.instance)

    async def _change(self, member: Member, there: str, role: RoleName) -> None:
        row = self._members.fleet.rows.get(member.url)
        if row is None:
            raise _departed(member)
        self._members.drain(member.instance, DRAIN_S, role)

        def drains() -> bool:
            return self._drains(row) and self._is_ours(member, role)

        try:
            is_over = await self._until(
                lambda: _is_empty(row) or not drains() or self._is_last(member, there), DRAIN_S
            )
            if self._is_last(member, there):
                raise _last(member, there)
            if not drains():
                raise CannotChangeRole(
                    f"{member.instance} was started anew, has left, or its drain was taken back", field="role"
                )
            if not is_over:
                raise CannotChangeRole(
                    f"{row.in_flight + row.elsewhere} requests at {member.instance} have not ended",
                    field="role",
                )
            await self._switch(member, role)
            if not await self._until(
                lambda: self._registered_as(member) == role or not self._is_ours(member, role), JOIN_S
            ):
                raise CannotChangeRole(
                    f"{member.instance} has changed to {role}, and has not registered so", field="role"
                )
        finally:
            # In whichever role it is now; unless it has left, or another drain came meanwhile.
            if self._is_ours(member, role):
                self._members.resume(member.instance)
        serves = await self._until(
            lambda: self._serves_as(member, role) or member.url not in self._members.fleet.rows, JOIN_S
        )
        after = self._members.fleet.rows.get(member.url)
        if after is None:
            raise _departed(member)
        if not serves:
            raise CannotChangeRole(
                f"{member.instance} has changed to {role}, and is {after.state}: {after.why}", field="role"
            )
        logger.info("instance %s is %s now", member.instance, role)

    async def _switch(self, member: Member, role: str) -> None:
        # The server itself reports the memory of its CUDA graphs; 0 skips that check on a server without.
        body = {"new_role": role, "decode_cuda_graph_memory_gb": 0.0}
        end = self._clock.monotonic() + IDLE_S
        while True:
            try:
                answer = await self._api.call(
                    member.url, "POST", "/pd_role_switch", body=body, timeout_s=SWITCH_S
                )
            except (PeerError, DeadlineError) as error:
                raise CannotChangeRole(f"{member.instance} does not answer: {error}", field="role") from None
            if answer.status == 200:
                return
            said = answer.json()
            why = str(said.get("message") if isinstance(said, dict) else said)[:500]
            if NOT_IDLE not in why or self._clock.monotonic() > end:
                raise CannotChangeRole(
                    f"{member.instance} stays {self._members.role(member)}: {why}",
                    field="role",
                    hint="Servers that change their role are started with --enable-pd-role-switch",
                )
            await self._clock.sleep(LOOK_S)

    def _drains(self, row: InstanceRecord) -> bool:
        return self._members.fleet.rows.get(row.name) is row and row.state in (State.DRAINING, State.LEFT)

    def _is_ours(self, member: Member, role: RoleName) -> bool:
        """Whether the instance drains for our change."""
        now, ours = self._members.roster.get(member.instance), Changing(role, self._members.router)
        return now is not None and now.intent is Intent.GO and now.changing == ours

    def _registered_as(self, member: Member) -> str:
        now = self._members.roster.get(member.instance)
        return now.registration.role if now is not None and now.registration is not None else ""

    def _serves_as(self, member: Member, role: str) -> bool:
        row = self._members.fleet.rows.get(member.url)
        return row is not None and row.state in USABLE and row.role.value == role

    async def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = self._clock.monotonic() + seconds
        while not condition():
            if self._clock.monotonic() > end:
                return False
            await self._clock.sleep(LOOK_S)
        return True


def _last(member: Member, role: str) -> CannotChangeRole:
    return CannotChangeRole(
        f"{member.instance} is the last {role} instance",
        field="role",
        hint=f"Nothing could be served while it changes; start another {role} instance first",
    )


def _departed(member: Member) -> CannotChangeRole:
    return CannotChangeRole(f"{member.instance} has left", field="role")


def _is_empty(row: InstanceRecord) -> bool:
    return row.state is State.LEFT and not row.in_flight and not row.elsewhere
