"""An instance changes between prefill and decode while it runs, and keeps its cache (KVDirect, section 7).

    drained       it is given nothing new; decodes that run there go on at others (`moving`)
    switched      SGLang takes its own role apart and puts the other one together; the cache stays
    registered    it says its role to all routers
    resumed       the index is told anew by its agent, in the trees of its new role

Whatever goes wrong before the switch leaves it in its old role, and it is resumed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from sglang_ext.errors import DeadlineError, PeerError
from sglang_ext.router.cluster.members import CannotChangeRole, Members
from sglang_ext.router.cluster.roster import Member
from sglang_ext.router.fleet.instance_record import InstanceRecord
from sglang_ext.router.fleet.lifecycle import USABLE, State
from sglang_ext.router.fleet.worker import WorkerApi
from sglang_ext.router.policies.base import Role

logger = logging.getLogger("router.role_change")

LOOK_S = 0.05
DRAIN_S = 600.0
SWITCH_S = 120.0
IDLE_S = 15.0
"""A server is idle a moment after its last answer: transfers and returns end behind it."""
JOIN_S = 30.0
NOT_IDLE = "not idle"
SWITCHING = frozenset({Role.PREFILL, Role.DECODE})


class RoleChanges:
    """See the module's docstring.

    Args:
        members: who drains and resumes instances.
        api: calls to them.
    """

    def __init__(self, members: Members, api: WorkerApi) -> None:
        self._members = members
        self._api = api
        self._clock = members.clock
        self._changing: set[str] = set()

    async def change(self, instance: str, role: str) -> None:
        """Returns when the instance serves in its new role.

        Raises:
            Unknown: there is none of this name.
            CannotChangeRole: it does not; the text says why, and in which role it serves now.
        """
        member = self._members.member(instance)
        there = self._members.role(member)
        if there == role:
            return
        if {there, role} - {one.value for one in SWITCHING}:
            self._members.change_role(instance, role)
        if member.instance in self._changing:
            raise CannotChangeRole(f"{member.instance} is changing its role already", field="role")
        others = [
            row
            for row in self._members.fleet.rows.values()
            if row.role.value == there and row.state in USABLE and row.name != member.url
        ]
        if not others:
            raise CannotChangeRole(
                f"{member.instance} is the last {there} instance",
                field="role",
                hint=f"Nothing could be served while it changes; start another {there} instance first",
            )
        self._changing.add(member.instance)
        try:
            await self._change(member, role)
        finally:
            self._changing.discard(member.instance)

    async def _change(self, member: Member, role: str) -> None:
        row = self._members.fleet.rows[member.url]
        self._members.drain(member.instance, DRAIN_S)
        try:
            if not await self._until(lambda: _is_empty(row), DRAIN_S):
                raise CannotChangeRole(
                    f"{row.in_flight + row.elsewhere} requests at {member.instance} have not ended",
                    field="role",
                )
            await self._switch(member, role)
            if not await self._until(lambda: self._registered_as(member) == role, JOIN_S):
                raise CannotChangeRole(
                    f"{member.instance} has changed to {role}, and has not registered so", field="role"
                )
        finally:
            # In whichever role it is now.
            self._members.resume(member.instance)
        if not await self._until(lambda: self._serves_as(member, role), JOIN_S):
            row = self._members.fleet.rows[member.url]
            raise CannotChangeRole(
                f"{member.instance} has changed to {role}, and is {row.state}: {row.why}", field="role"
            )
        logger.info("instance %s is %s now", member.instance, role)

    async def _switch(self, member: Member, role: str) -> None:
        # The memory of CUDA graphs is told by who has them; 0 skips that check on a server without.
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


def _is_empty(row: InstanceRecord) -> bool:
    return row.state is State.LEFT and not row.in_flight and not row.elsewhere
