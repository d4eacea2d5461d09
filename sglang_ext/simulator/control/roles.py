"""Instances of a simulation that change between prefill and decode, as the router's controller decides.

Controller, changes of roles, members and fleet are the router's own. Here are the other ends of their calls:
the channels to the agents, a server's answers, and its registration in its new role.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, cast

import orjson

from sglang_ext.errors import PeerError
from sglang_ext.protocol.agent import Beat
from sglang_ext.protocol.cluster import HEARTBEAT_S, Registration
from sglang_ext.router.api.documents import Document
from sglang_ext.router.api.validation import Json
from sglang_ext.router.cluster.broadcast import RouterChannel
from sglang_ext.router.cluster.members import Members
from sglang_ext.router.cluster.membership import EmbeddedMembership
from sglang_ext.router.cluster.role_change import RoleChanges
from sglang_ext.router.cluster.role_controller import RoleController
from sglang_ext.router.fleet.facts import InstanceFacts
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.fleet.health import HealthWatch
from sglang_ext.router.fleet.worker import Answer, WorkerApi
from sglang_ext.router.policies.base import Role
from sglang_ext.signals import Signal
from sglang_ext.simulator.agents import Agent, Channels
from sglang_ext.simulator.instance import Instance
from sglang_ext.simulator.router import SimulatedRouter
from sglang_ext.simulator.settings import Settings
from sglang_ext.simulator.virtual_time import VirtualClock

NOT_IDLE: Final = "instance is not idle; drain all requests before switching"
ROUTER: Final = "router"
Announced = tuple[Registration, InstanceFacts]
"""An instance as it registers, and the facts that its server reports."""


class Links:
    """The channels to the agents, as members open and close them (``AgentLinks``)."""

    def __init__(self, channels: Channels, agents: Mapping[str, Agent]) -> None:
        self._channels, self._agents = channels, agents

    def connect(self, name: str, registration: Registration) -> None:
        known, agent = self._channels.registration(name), self._agents.get(name)
        if agent is None or (known is not None and _same_way(known, registration)):
            return
        self._channels.disconnect(name)
        number = int(registration.instance.removeprefix("i"))
        offset_s = HEARTBEAT_S * (number % 1000) / 1000
        self._channels.connect(name, registration, Role(registration.role), agent, offset_s)

    def expect(self, name: str) -> None:
        """Its agent has sent its snapshot when it connected."""

    def disconnect(self, name: str) -> None:
        self._channels.disconnect(name)

    def peer_dead(self, instance: str, epoch: str) -> None:
        """Reads from a dead instance fail when they are asked for."""

    def beat(self, name: str) -> Beat | None:
        return self._channels.beat(name)

    def silent_s(self, name: str) -> float:
        return float("inf") if self._channels.registration(name) is None else 0.0


def _same_way(one: Registration, other: Registration) -> bool:
    return (one.epoch, one.role) == (other.epoch, other.role)


class Watch(HealthWatch):
    """Asks servers for their facts when members begin to look after them. Heartbeats show that they live.

    Args:
        facts: of those that live, by name.
    """

    def __init__(
        self,
        fleet: Fleet,
        loop: asyncio.AbstractEventLoop,
        lag_s: float,
        facts: Mapping[str, InstanceFacts],
    ) -> None:
        self._known, self._loop, self._lag_s, self._facts = fleet, loop, lag_s, facts

    def watch(self, name: str) -> None:
        self._loop.call_later(2 * self._lag_s, self._learnt, name)

    def _learnt(self, name: str) -> None:
        facts = self._facts.get(name)
        if facts is not None:
            self._known.learnt(name, facts)


class Homes:
    """The instances of sessions, which no other router has to know."""

    def __init__(self) -> None:
        self.kept: Signal[[str, str]] = Signal()

    def learn(self, session: str, name: str) -> None: ...


class NoDocuments:
    """A simulation has no documents."""

    def __init__(self) -> None:
        self.changed: Signal[[Document]] = Signal()

    def learn(self, document: Document) -> None: ...

    def all(self) -> Iterable[Document]:
        return ()


class Servers(WorkerApi):
    """The servers of simulated instances, as far as a change of a role calls them.

    Args:
        instances: those that live, by name.
        switched: called when one has changed its role.
    """

    def __init__(
        self,
        settings: Settings,
        clock: VirtualClock,
        instances: Mapping[str, Instance],
        switched: Callable[[str, Role], None],
    ) -> None:
        self._settings, self._wait, self._instances, self._switched = settings, clock, instances, switched

    async def call(
        self, url: str, method: str, target: str, *, body: Json | bytes | None = None, timeout_s: float
    ) -> Answer:
        """``POST /pd_role_switch``: refused while requests are there, else it takes ``role_switch_s``.

        Raises:
            PeerError: the instance is not there, or dies meanwhile.
        """
        instance = self._instances.get(url)
        role = Role(cast(Mapping[str, Any], body)["new_role"])
        if instance is not None and not instance.idle:
            return Answer(400, {}, orjson.dumps({"message": NOT_IDLE}))
        await self._wait.sleep(self._settings.lag_ms / 1e3 + self._settings.role_switch_s)
        if instance is None or self._instances.get(url) is not instance:
            raise PeerError(f"{url} is not there")
        instance.switch(role)
        self._switched(url, role)
        return Answer(200, {}, b"{}")


class CountedChanges(RoleChanges):
    """Changes of roles, counted."""

    def __init__(self, members: Members, api: WorkerApi) -> None:
        super().__init__(members, api)
        self.ended: Counter[tuple[str, str]] = Counter()
        """By role and outcome."""

    def count(self, role: str, why: str, outcome: str) -> None:
        self.ended[role, outcome] += 1


class Roles:
    """See the module's docstring.

    Args:
        instances, agents: those that live, by name.
        announced: an instance as it registers in a role.
    """

    def __init__(
        self,
        settings: Settings,
        clock: VirtualClock,
        loop: asyncio.AbstractEventLoop,
        router: SimulatedRouter,
        instances: Mapping[str, Instance],
        agents: Mapping[str, Agent],
        announced: Callable[[str, Role], Announced],
    ) -> None:
        self._settings, self._clock, self._loop = settings, clock, loop
        self._announced = announced
        self._facts: dict[str, InstanceFacts] = {}
        self.changes: list[tuple[float, str, Role]] = []
        """When which instance changed to which role."""
        fleet = router.fleet
        self.members = Members(
            fleet,
            Watch(fleet, loop, settings.lag_ms / 1e3, self._facts),
            EmbeddedMembership(),
            clock,
            links=Links(router.channels, agents),
            homes=Homes(),
            documents=NoDocuments(),
            channel=RouterChannel(ROUTER),
            on_drain=lambda url: None,
        )
        servers = Servers(settings, clock, instances, self._switched)
        self._changes = CountedChanges(self.members, servers)
        self.controller = RoleController(
            settings.role_controller,
            settings.role_dwell_secs,
            self.members,
            self._changes,
            router.costs,
            router.index.tokens_of,
        )
        self.controller.serve()
        router.paired.subscribe(self.controller.ended)

    def register(self, name: str, role: Role) -> None:
        """An instance has started, or has changed its role."""
        registration, self._facts[name] = self._announced(name, role)
        self.members.register(registration)

    def died(self, name: str) -> None:
        """The process of an instance has ended."""
        self._facts.pop(name, None)

    def _switched(self, name: str, role: Role) -> None:
        self.changes.append((self._clock.monotonic(), name, role))
        self._loop.call_later(self._settings.lag_ms / 1e3, self.register, name, role)

    def rounds(self) -> Iterable[Coroutine[Any, Any, None]]:
        """The tasks that go on until the simulation ends."""
        yield self._look()
        yield self._control()

    async def _look(self) -> None:
        while True:
            await self._clock.sleep(await self.members.round())

    async def _control(self) -> None:
        while True:
            await self._clock.sleep(await self.controller.round())

    def counts(self) -> dict[str, int]:
        """Changes, by their roles and outcomes."""
        ended = self._changes.ended
        return {f"changes to {role}, {outcome}": ended[role, outcome] for role, outcome in sorted(ended)}

    def check(self) -> None:
        """Verify the records. Raises InternalError."""
        self.members.roster.check()
