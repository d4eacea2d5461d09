"""The cluster manager: instances join, leave, drain and die while requests go on.

``roster`` has the records, ``membership`` shares them with other routers, ``fleet`` has each instance's life.
This part copies a changed record into the fleet, times drains, reports dead instances to the agents of the
others (so that each frees the dead one's resources), and serves the cluster API.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from sglang_ext.clock import Clock
from sglang_ext.errors import PeerError, UserError
from sglang_ext.ids import NewId, random_id
from sglang_ext.protocol.agent import Beat
from sglang_ext.protocol.cluster import HEARTBEAT_S, VERDICT_S, Registered, Registration, RoleName
from sglang_ext.router.api.documents import Document
from sglang_ext.router.cluster.broadcast import RouterChannel, RouterMessage
from sglang_ext.router.cluster.membership import Membership, RouterStatus, Seen
from sglang_ext.router.cluster.roster import LEFT_KEPT_S, Change, Changing, Intent, Member, Roster
from sglang_ext.router.fleet.compatibility import Compatibility
from sglang_ext.router.fleet.fleet import Fleet, InstanceRecord
from sglang_ext.router.fleet.health import HealthWatch
from sglang_ext.router.fleet.lifecycle import USABLE, Event, State
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.signals import Signal

logger = logging.getLogger("router.members")

TICK_S = 1.0
"""Interval of looking at times, and of sharing the status of this router."""
HEARD_S = 1.5 * HEARTBEAT_S
"""An agent that lives is not silent for so long, unless the network is: a server that was killed may start
again after this.
"""
FORGET_S = 600.0
"""An instance that registered by itself is forgotten when it has given no sign of life for so long."""


class AgentLinks(Protocol):
    """The channels to the instances' agents. Names are URLs."""

    def connect(self, name: str, registration: Registration) -> None:
        """Reach an instance's agent from now on; another address or epoch replaces the former."""

    def expect(self, name: str) -> None:
        """An instance serves and will register: it is awaited until its first snapshot is in."""

    def disconnect(self, name: str) -> None:
        """Reach it no more."""

    def peer_dead(self, instance: str, epoch: str) -> None:
        """Report a dead instance (by id) to every agent, which frees the resources held for it."""

    def beat(self, name: str) -> Beat | None:
        """The last heartbeat of an instance, while its agent is alive."""

    def silent_s(self, name: str) -> float:
        """Seconds since the last message of its agent; infinite for a silent agent."""


class SessionHomes(Protocol):
    """The instances of sessions, as one router has recorded them. Names are URLs."""

    kept: Signal[[str, str]]
    """This router has sent a session (first) to an instance."""

    def learn(self, session: str, name: str) -> None:
        """Another router has."""


class SharedDocuments(Protocol):
    """The documents of one router."""

    changed: Signal[[Document]]
    """This router has taken or deleted one."""

    def learn(self, document: Document) -> None:
        """Another router has, perhaps long ago."""

    def all(self) -> Iterable[Document]:
        """Every document to share with other routers."""


def new_router_name(new_id: NewId = random_id) -> str:
    """A name for this router: another name after each start."""
    return f"router-{new_id()[:12]}"


class Unknown(UserError):
    """There is no such instance."""


class CannotChangeRole(PeerError):
    """SGLang fixed the instance's role at its start."""


class Members:
    """The members of one router's cluster.

    Args:
        store: shares them.
        clock: seconds.
        homes, documents: the sessions' instances and the documents, which routers share.
        on_drain: called with the URL of an instance that begins to drain.
    """

    def __init__(
        self,
        fleet: Fleet,
        watch: HealthWatch,
        store: Membership,
        clock: Clock,
        *,
        links: AgentLinks,
        homes: SessionHomes,
        documents: SharedDocuments,
        channel: RouterChannel,
        on_drain: Callable[[str], None],
    ) -> None:
        self.router = channel.router
        self.compatibility = Compatibility()
        self.roster = Roster(self.compatibility.shared)
        self.store = store
        self.fleet = fleet
        self._watch = watch
        self.clock = clock
        self.links = links
        self._homes = homes
        self._documents = documents
        self._channel = channel
        self._on_drain = on_drain
        self.drains: dict[str, float] = {}
        """When each drain began, by URL; ``monotonic``."""
        self.ticked: Signal[[]] = Signal()
        """Time has passed: every `TICK_S`."""
        self._said: dict[str, float] = {}
        """When each instance last registered here; ``monotonic``."""
        self._unreachable: dict[str, str] = {}
        """By instance id: the last logged reason why this router cannot reach it."""
        self._dead: dict[str, str] = {}
        """The epochs reported as dead to the agents, of instances that have not come back."""
        fleet.happened.subscribe(self._on_event)
        homes.kept.subscribe(self._remember_session)
        documents.changed.subscribe(store.share)
        if store.shares:
            channel.outgoing.subscribe(store.broadcast)

    async def start(self, urls: Iterable[str]) -> None:
        """Load the records published by other routers, and the instances listed by URL."""
        await self.store.start(self)
        for url in urls:
            self.list_url(url)

    def measure(self, metrics: RouterMetrics) -> None:
        """Show how membership is."""
        connected = metrics.gauge("membership_connected")
        routers = metrics.gauge("membership_routers")

        refused = metrics.gauge("membership_refused")
        unsent = metrics.gauge("membership_unsent")

        for name, table in self.store.tables.items():
            metrics.show_table(name, table)

        def refresh() -> None:
            connected.set(self.store.view().connected)
            routers.set(1 + len(self.store.others))
            refused.set(self.store.refused)
            unsent.set(self.store.unsent)

        metrics.refreshing.subscribe(refresh)

    async def stop(self) -> None:
        """Announce to the other routers that this one leaves."""
        await self.store.stop()

    async def round(self) -> float:
        """Look at times; returns the pause until the next look."""
        self.tick()
        return TICK_S

    # -- requests of instances and operators -----------------------------------------------------------------

    def list_url(self, url: str) -> None:
        """An instance is named by its URL."""
        if (member := self.roster.listed(url, self.clock.wall())) is not None:
            self._publish([member])

    def register(self, registration: Registration) -> Registered:
        """Take in the registration of an instance.

        Raises:
            Taken: its name or its URL belongs to another process, which lives.
        """
        before = self.roster.get(registration.instance)
        alive = before is not None and self.age(before.url) < VERDICT_S and self._is_usable(before.url)
        at_url = self.roster.at(registration.url)
        living = (at_url.instance,) if at_url is not None and self._is_heard(at_url) else ()
        changed = self.roster.registered(registration, self.clock.wall(), alive=alive, living=living)
        self._said[registration.instance] = self.clock.monotonic()
        self._publish(changed)
        row = self.fleet.rows.get(registration.url)
        state = State.LEFT if row is None else row.state
        problem = "" if row is None or changed else self._unreached(row, registration)
        return Registered(
            router=self.router, instance=registration.instance, state=state.value, problem=problem
        )

    def _is_heard(self, member: Member) -> bool:
        """Whether the very process of a record lives. Probes cannot tell: another one may have its URL."""
        beat = self.links.beat(member.url)
        known = beat is not None and beat.epoch.hex() == member.epoch
        return known and self.links.silent_s(member.url) < HEARD_S

    def _unreached(self, row: InstanceRecord, registration: Registration) -> str:
        """The reason why this router cannot reach an instance that registers again. An instance does so while
        no router connects to its agent.
        """
        if not registration.agent or self.links.beat(row.name) is not None:
            return ""
        problem = f"its agent at {registration.agent} sends no messages"
        if row.state in (State.NEW, State.DOWN) and row.why:
            problem = f"{row.why}; {problem}"
        if self._unreachable.get(registration.instance) != problem:
            self._unreachable[registration.instance] = problem
            logger.warning(
                "instance %s cannot be reached back: %s. If that is not its address, start it with "
                "--kv-announce-host",
                registration.instance,
                problem,
            )
        return problem

    def leave(self, instance: str) -> None:
        """An instance leaves.

        Raises:
            Unknown: there is none of this name.
        """
        self._wish(instance, Intent.GONE)

    def drain(self, instance: str, deadline_s: float, role: RoleName | None = None) -> None:
        """Have an instance finish and leave; with ``role``, this router has it come back in that role.

        Raises:
            Unknown: there is none of this name.
        """
        changing = None if role is None else Changing(role, self.router)
        self._wish(instance, Intent.GO, deadline_s, changing)

    def resume(self, instance: str) -> None:
        """Take back a drain.

        Raises:
            Unknown: there is none of this name.
        """
        self._wish(instance, Intent.STAY)

    def change_role(self, instance: str, role: str) -> None:
        """Check that an instance has a role: SGLang cannot change it while the server runs.

        Raises:
            Unknown: there is none of this name.
            CannotChangeRole: SGLang sets the role at its start.
        """
        there = self.role(self.member(instance))
        if there != role:
            raise CannotChangeRole(
                f"{instance} was started as {there}, and SGLang cannot change that while it runs",
                field="role",
                hint=f"Drain it, start it anew as {role}, and it joins in that role",
            )

    def role(self, member: Member) -> str:
        """The role of an instance: from its server's facts, else its registration, else "colocated"."""
        if (row := self.fleet.rows.get(member.url)) is not None:
            return row.role.value
        return member.registration.role if member.registration else "colocated"

    def _wish(
        self, instance: str, intent: Intent, deadline_s: float = 0.0, changing: Changing | None = None
    ) -> None:
        named = self.member(instance)
        for member in self.roster.together(named):
            self._publish(
                [self.roster.wished(member.instance, intent, self.clock.wall(), deadline_s, changing)]
            )

    def member(self, name: str) -> Member:
        """The member with this id or URL.

        Raises:
            Unknown: there is none.
        """
        member = self.roster.get(name) or self.roster.at(name.rstrip("/"))
        if member is None:
            known = sorted(there.instance for there in self.roster if there.intent is not Intent.GONE)
            hint = f"There are: {', '.join(known)[:1000]}" if known else "None has joined"
            raise Unknown(f"there is no instance {name[:200]!r}", field="instance", hint=hint)
        return member

    # -- records --------------------------------------------------------------------------------------------

    def _publish(self, members: Iterable[Member]) -> None:
        for member in members:
            self.on_member(member)
            self.store.publish(member)

    def on_member(self, member: Member) -> None:
        """A record of ours or of another router: carry it over into the fleet."""
        change = self.roster.merge(member)
        if change is not None:
            self._carry_over(change)

    def _carry_over(self, change: Change) -> None:
        before, after = change.before, change.after
        if after.registration is not None and after.intent is Intent.STAY:
            self.compatibility.put(after.registration)
        else:
            self.compatibility.drop(after.instance)
        if before is not None and before.url != after.url and not self.serves(before.url):
            self._part(before.url, f"it is at {after.url} now")
        if before is not None and before.epoch and before.epoch != after.epoch:
            self._tell_dead(before.instance, before.epoch)
        if after.intent is Intent.GONE:
            if not self.serves(after.url):
                self._part(after.url, "it said that it goes")
            return
        was_there = after.url in self.fleet.rows
        restarted = was_there and self.fleet.rows[after.url].epoch != after.epoch and bool(after.epoch)
        self.fleet.join(after.url, after.registration)
        if after.registration is not None and after.registration.agent:
            self.links.connect(after.url, after.registration)
        if after.intent is Intent.GO:
            self.drains.setdefault(after.url, self.clock.monotonic())
            self.fleet.drain(after.url, "it was asked to drain")
            self._on_drain(after.url)
        else:
            self.drains.pop(after.url, None)
            resumed = self.fleet.rows[after.url].state in (State.DRAINING, State.LEFT)
            self.fleet.resume(after.url)
            if not was_there or restarted or resumed:
                self._watch.watch(after.url)

    def serves(self, url: str) -> bool:
        """Whether a member that is not gone is at a URL."""
        return self.roster.at(url) is not None

    def _part(self, url: str, why: str) -> None:
        self.drains.pop(url, None)
        self.fleet.leave(url, why)
        self.links.disconnect(url)
        self.fleet.forget(url)

    def _on_event(self, row: InstanceRecord, event: Event, before: State) -> None:
        """Follow up on what happened to an instance."""
        is_gone = event in (Event.LOST, Event.LEAVE) and row.state is not before
        if is_gone and row.registration is not None:
            self._tell_dead(row.registration.instance, row.registration.epoch)
        if event is Event.LEARNT and row.registration is not None:
            self._dead.pop(row.registration.instance, None)
        begins = event is Event.LEARNT and before not in USABLE and row.state in USABLE
        if begins and row.facts is not None and row.facts.reports:
            self.links.expect(row.name)
        if row.state is State.LEFT and before is not State.LEFT:
            self.links.disconnect(row.name)

    def _tell_dead(self, instance: str, epoch: str) -> None:
        """Report a dead instance to the agents of the others, once for each of its deaths."""
        if self._dead.get(instance) != epoch:
            self._dead[instance] = epoch
            self.links.peer_dead(instance, epoch)

    # -- time -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Apply timeouts, and send this router's status to the others."""
        now = self.clock.monotonic()
        for member in self.roster:
            row = self.fleet.rows.get(member.url)
            if row is None:
                continue
            drains = row.state is State.DRAINING and member.intent is Intent.GO
            if drains and now - self.drains.get(member.url, now) >= member.deadline_s:
                self.fleet.drained(member.url, f"{row.in_flight} requests had not ended at the deadline")
            is_lost = row.state not in USABLE | {State.LEFT, State.DRAINING}
            if is_lost and member.registration is not None and self.age(member.url) > FORGET_S:
                logger.warning(
                    "instance %s is forgotten: no sign of life for %d s", member.instance, FORGET_S
                )
                self._forget(member)
        for instance in self.roster.expired(self.clock.wall()):
            if self.clock.monotonic() - self._said.get(instance, -LEFT_KEPT_S) > LEFT_KEPT_S:
                self._said.pop(instance, None)
                self._forget(self.roster.get(instance))
        for name, row in list(self.fleet.rows.items()):
            if row.state is State.LEFT and not self.serves(name):
                self.fleet.forget(name)
        self.store.share_status(self._status())
        self.ticked()

    def _forget(self, member: Member | None) -> None:
        if member is not None:
            self.roster.forget(member.instance)
            self.compatibility.drop(member.instance)
            self._dead.pop(member.instance, None)
            self._unreachable.pop(member.instance, None)
            if not self.serves(member.url):
                self._part(member.url, "it has sent nothing for long")

    def _status(self) -> RouterStatus:
        seen = {}
        for member in self.roster:
            if (row := self.fleet.rows.get(member.url)) is not None:
                seen[member.instance] = Seen(row.state.value, row.in_flight)
        return RouterStatus(self.router, seen)

    # -- callbacks of the membership ------------------------------------------------------------------------

    def on_routers(self, others: Mapping[str, RouterStatus]) -> None:
        """Add the requests in flight of other routers to each instance's load."""
        sums: dict[str, int] = {}
        for status in others.values():
            for instance, seen in status.instances.items():
                sums[instance] = sums.get(instance, 0) + seen.in_flight
        for member in self.roster:
            self.fleet.sent_elsewhere(member.url, sums.get(member.instance, 0))
        self._channel.on_routers(others.keys())

    def on_message(self, message: RouterMessage) -> None:
        """Deliver a message of another router to its topic."""
        self._channel.receive(message)

    def snapshot(self) -> Iterable[RouterMessage]:
        """The messages that bring a router that has just started up to date."""
        return self._channel.snapshot()

    def on_session(self, session: str, instance: str) -> None:
        """Another router has sent a session to an instance."""
        if (member := self.roster.get(instance)) is not None:
            self._homes.learn(session, member.url)

    def on_document(self, document: Document) -> None:
        """Another router has taken or deleted a document, perhaps long ago."""
        self._documents.learn(document)

    def documents(self) -> Iterable[Document]:
        """Every document that this router has."""
        return self._documents.all()

    def records(self) -> Iterable[Member]:
        """Every record that this router has."""
        return self.roster

    def is_alive(self, instance: str) -> bool:
        """Whether this router finds the instance alive."""
        member = self.roster.get(instance)
        return member is not None and self._is_usable(member.url)

    def _is_usable(self, url: str) -> bool:
        row = self.fleet.rows.get(url)
        return row is not None and row.state in USABLE | {State.DRAINING}

    def age(self, url: str) -> float:
        """Seconds since the last sign of life."""
        row = self.fleet.rows.get(url)
        if row is None or row.last_seen is None:
            return float("inf")
        return self.clock.monotonic() - row.last_seen

    def _remember_session(self, session: str, name: str) -> None:
        """This router has sent a session to an instance (its URL): share it with the other routers."""
        if (member := self.roster.at(name)) is not None:
            self.store.remember(session, member.instance)
