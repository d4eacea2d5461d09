"""The instances: their facts, states and load.

The life of an instance is the table in ``lifecycle``; ``Fleet`` applies it and keeps the counters that
policies look at. It does no I/O: ``health`` asks the workers and reports here, ``members`` lets instances
join and leave.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from sglang_ext.addresses import is_loopback
from sglang_ext.cost_model import Batching
from sglang_ext.cost_model.batch import ANY
from sglang_ext.errors import InternalError
from sglang_ext.protocol.cluster import Registration, dp_rank_of, server_of
from sglang_ext.protocol.compatibility import differences, in_words
from sglang_ext.router.api.limits import ModelKind
from sglang_ext.router.fleet.facts import InstanceFacts
from sglang_ext.router.fleet.instance_record import ROLES, InstanceRecord, Load
from sglang_ext.router.fleet.lifecycle import FATAL, TRANSITIONS, USABLE, Event, State
from sglang_ext.router.fleet.standing import Standing
from sglang_ext.router.http.types import ConnectionLost
from sglang_ext.router.policies import Instance
from sglang_ext.router.policies.base import Role
from sglang_ext.router.policies.fleet_queries import all_colocated, paired
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.signals import Signal

__all__ = ["TRANSITIONS", "USABLE", "Event", "Fleet", "InstanceRecord", "Load", "State"]

logger = logging.getLogger("router.fleet")

QUESTION_S = 30.0
"""How long an instance may miss probes while it works on a request other than generation: SGLang processes
texts in the event loop that answers probes, and goes on after the caller has gone.
"""
_USABLE = tuple(USABLE)
"""A set would ask each state for its hash, in Python."""


class Carrying:
    """See ``Fleet.carrying``. A class, because a generator costs every request more."""

    __slots__ = ("_fleet", "_load", "_name", "_queued_tokens")

    def __init__(self, fleet: Fleet, name: str, queued_tokens: int) -> None:
        self._fleet = fleet
        self._name = name
        self._queued_tokens = queued_tokens
        self._load: Load | None = None

    def __enter__(self) -> Load:
        self._load = load = self._fleet.begin(self._name, self._queued_tokens)
        return load

    def __exit__(self, *error: object) -> None:
        if self._load is not None:
            self._fleet.end(self._load)


class Asking:
    """See ``Fleet.asking``."""

    __slots__ = ("_now", "_row")

    def __init__(self, row: InstanceRecord, now: Callable[[], float]) -> None:
        self._row = row
        self._now = now

    def __enter__(self) -> None:
        row = self._row
        row.questions += 1
        if row.asked is None:
            row.asked = self._now()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        row = self._row
        row.questions -= 1
        # The server may still work on a request whose caller has gone.
        if kind is None and not row.questions:
            row.asked = None


class Fleet:
    """All instances of one router, on one event loop.

    Args:
        urls: instances that are there from the start; URLs are their names.
        failure_threshold: probes missed in a row that make the verdict.
        silence_s: an instance on another machine counts as lost only after this many seconds without a sign
            of life, too.
        view: an instance's tokens by the index, whether the index is trusted for it, and whether its snapshot
            is awaited.
        changed: instances whose ``view`` may have changed since the last call; None: any may have.
        pairs: whether requests can be sent to a prefill and a decode instance together.
        now: seconds.
    """

    def __init__(
        self,
        urls: tuple[str, ...] = (),
        *,
        failure_threshold: int = 3,
        view: Callable[[str], tuple[int, bool, bool]] = lambda name: (0, True, False),
        changed: Callable[[], Iterable[str]] | None = None,
        pairs: bool = False,
        silence_s: float = 0.0,
        now: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._dirty_rows: dict[str, InstanceRecord] = {}
        """Those that policies see differently than ``_standing`` has them."""
        self.rows = {url: InstanceRecord(url, dirty_rows=self._dirty_rows) for url in urls}
        self._usable: dict[str, InstanceRecord] = {}
        """Those that can take requests."""
        self._standing = Standing()
        self.model: InstanceFacts | None = None
        """The facts of the first instance of the model being served; kept while the fleet is down."""
        self.restarted: Signal[[str]] = Signal()
        """The cache of an instance is not the former one any more: it restarted, is gone, or has other
        weights.
        """
        self.adopted: Signal[[InstanceFacts]] = Signal()
        """The fleet takes on a model: the first one learnt, or a new one after every instance of the old one
        has gone."""
        self.happened: Signal[[InstanceRecord, Event, State]] = Signal()
        """An instance, already in its new state, with the event and its state before."""
        self._failure_threshold = failure_threshold
        self._view = view
        self._take_changed = changed or (lambda: list(self._usable))
        self._pairs = pairs
        self._silence_s = silence_s
        self._now = now
        self._picks = itertools.count(1)

    # -- who is there -----------------------------------------------------------------------------

    def join(self, name: str, registration: Registration | None = None) -> State:
        """An instance is there, or registers again. A new epoch is a restart; the first registration of a
        listed instance is no restart.
        """
        row = self.rows.get(name)
        if row is None:
            self.rows[name] = InstanceRecord(
                name, registration=registration, last_seen=self._now(), dirty_rows=self._dirty_rows
            )
            logger.info("instance %s joins", name)
            return State.NEW
        row.last_seen = self._now()
        before = row.epoch
        row.update(row.facts, registration or row.registration)
        if row.epoch != before and before:
            row.update(None, row.registration)
            self.restarted(name)
            return self._apply(row, Event.RESTARTED, "it has a new epoch")
        if row.facts is not None and (problem := _unfit(row.facts, row.registration)) is not None:
            row.update(None, row.registration)
            return self._apply(row, Event.REJECTED, problem)
        return row.state

    def drain(self, name: str, why: str) -> State:
        """Send it no new requests; it leaves when those in flight have ended."""
        row = self.rows[name]
        self._apply(row, Event.DRAIN, why)
        self._look_whether_drained(row)
        return row.state

    def drained(self, name: str, why: str) -> State:
        """The time that it had for finishing is over."""
        return self._happens(name, Event.DRAINED, why)

    def resume(self, name: str) -> State:
        """Take back a drain or a departure."""
        return self._happens(name, Event.RESUME, "it shall stay")

    def leave(self, name: str, why: str) -> State:
        """The instance is out of this fleet; requests that still run there may end by themselves."""
        return self._happens(name, Event.LEAVE, why)

    def forget(self, name: str) -> bool:
        """Take an instance that has left out of the fleet, unless requests still run there.

        Returns whether it is out.
        """
        row = self.rows.get(name)
        if row is None or row.state is not State.LEFT or row.in_flight:
            return row is None
        del self.rows[name]
        self._out(name)
        self.restarted(name)
        return True

    def _out(self, name: str) -> None:
        """An instance cannot take requests."""
        self._usable.pop(name, None)
        self._standing.drop(name)

    # -- findings of probes ------------------------------------------------------------------------

    def learnt(self, name: str, facts: InstanceFacts) -> State:
        """An instance has reported its facts; returns the state that this puts it in."""
        row = self.rows.get(name)
        if row is None or row.state is State.LEFT:
            return State.LEFT
        row.last_seen = self._now()
        difference = self._model_difference(facts)
        row.other_model = difference is not None
        problem = _unfit(facts, row.registration) or difference
        if problem is not None:
            row.update(None, row.registration)
            return self._apply(row, Event.REJECTED, problem)
        if self.model is None or self.model.model.difference(facts.model):
            self.model = facts
            self.adopted(facts)
        before = row.facts
        if before is None or (before.identity, before.weight_version) != (
            facts.identity,
            facts.weight_version,
        ):
            self.restarted(name)
        row.update(facts, row.registration)
        row.misses, row.asked = 0, None
        return self._apply(row, Event.LEARNT, "answers")

    def _model_difference(self, facts: InstanceFacts) -> str | None:
        """The difference between its model and the one being served; None while no instance serves."""
        if self.model is None or not any(row.state in USABLE for row in self.rows.values()):
            return None
        difference = self.model.model.difference(facts.model)
        return difference and f"it serves another model than the others: {difference}"

    def rejected(self, name: str, why: str) -> State:
        """An instance answers, but does not report its facts."""
        return self._happens(name, Event.REJECTED, why)

    def alive(self, name: str) -> State:
        """A probe was answered."""
        row = self.rows.get(name)
        if row is None:
            return State.LEFT
        row.misses = 0
        row.last_seen = self._now()
        row.asked = row.last_seen if row.questions else None
        return self._apply(row, Event.ALIVE, "answers")

    def on_heartbeat(self, name: str) -> None:
        """Its agent gave a sign of life; that its HTTP side answers is for probes to find out."""
        if (row := self.rows.get(name)) is not None:
            row.last_seen = self._now()

    def missed(self, name: str, why: str) -> State:
        """A probe was not answered; enough of them in a row are the verdict."""
        row = self.rows.get(name)
        if row is None:
            return State.LEFT
        if row.asked is not None and self._now() - row.asked < QUESTION_S:
            return self._apply(row, Event.MISSED, f"{why}, while it was asked something")
        row.misses += 1
        if row.misses >= self._failure_threshold and (_is_near(name) or self._is_silent(row)):
            return self._apply(row, Event.LOST, f"{row.misses} probes missed: {why}")
        return self._apply(row, Event.MISSED, why)

    def _is_silent(self, row: InstanceRecord) -> bool:
        return row.last_seen is None or self._now() - row.last_seen >= self._silence_s

    def unconnected(self, name: str, why: str, *, refused: bool) -> State:
        """No connection could be made. refused: its machine refused the connection, as no process listens
        there; otherwise the network may be at fault, and it counts as a missed probe.
        """
        return self.lost(name, why) if refused or _is_near(name) else self.missed(name, why)

    def lost(self, name: str, why: str) -> State:
        """No process listens at the instance's address, or its agent is silent. The replicas of a server end
        together.
        """
        if dp_rank_of(name) is not None:
            for other in [row for row in self.rows if server_of(row) == server_of(name) and row != name]:
                self._happens(other, Event.LOST, f"{name} is lost: {why}")
        return self._happens(name, Event.LOST, why)

    def _happens(self, name: str, event: Event, why: str) -> State:
        """As ``_apply``, for instances that may have been forgotten."""
        row = self.rows.get(name)
        return State.LEFT if row is None else self._apply(row, event, why)

    def _apply(self, row: InstanceRecord, event: Event, why: str) -> State:
        before = row.state
        following = TRANSITIONS.get((before, event))
        if following is None:
            raise InternalError(f"instance {row.name} cannot be {event} while it is {before}")
        if following is not before:
            level = (
                logging.INFO if following in (State.READY, State.DRAINING, State.LEFT) else logging.WARNING
            )
            logger.log(level, "instance %s: %s -> %s (%s)", row.name, before, following, why)
            row.state, row.why = following, why
            if following in _USABLE:
                self._usable[row.name] = row
                row.mark_dirty()
            else:
                self._out(row.name)
        elif following is not State.LEFT:
            row.why = why if following is not State.DRAINING else row.why
        if event in FATAL:
            row.fatal += 1
            for load in list(row.waiting):
                load.give_up()
        self.happened(row, event, before)
        return row.state

    def _look_whether_drained(self, row: InstanceRecord) -> None:
        if row.state is State.DRAINING and not row.in_flight:
            self._apply(row, Event.DRAINED, "it has finished what it had")

    # -- what policies see ------------------------------------------------------------------------

    def usable(self, excluded: frozenset[str] = frozenset()) -> tuple[Instance, ...]:
        """The instances that can take a request now, ``excluded`` left out.

        Prefill and decode instances only in pairs: if one of the two is missing, or those that there are
        cannot hand requests over, so is the other.
        """
        rows = self._usable
        for name in self._take_changed():
            if (row := rows.get(name)) is not None:
                row.mark_dirty()
        for name, row in self._dirty_rows.items():
            if name in rows:
                self._standing.put(self._see(row))
        self._dirty_rows.clear()
        found = self._standing.fleet()
        if excluded:
            found = tuple([instance for instance in found if instance.name not in excluded])
        return found if all_colocated(found) else self._complete(found)

    def without_salts(self) -> frozenset[str]:
        """The instances that may not take a tenant's salt in a header: those that have not registered, and
        those in whose place a server without our plugin may have started since."""
        return frozenset(
            name
            for name, row in self.rows.items()
            if row.registration is None or row.facts is None or not row.facts.reports
        )

    def keeps_states(self, name: str) -> bool:
        """Whether an instance keeps states of its model at the places that a router names."""
        row = self.rows.get(name)
        return (
            row is not None
            and row.registration is not None
            and row.registration.keeps_states
            and row.facts is not None
            and row.facts.reports
        )

    def _see(self, row: InstanceRecord) -> Instance:
        cached, trusted, awaited = self._view(row.name)
        busy = row.in_flight + row.elsewhere
        return Instance(
            row.name, busy, row.queued_tokens, cached, row.last_picked, row.role, trusted, awaited,
            row.handover,
        )  # fmt: skip

    def _complete(self, found: tuple[Instance, ...]) -> tuple[Instance, ...]:
        """Without halves of pairs whose other half is missing."""
        if self._pairs:
            return paired(found)
        return tuple(instance for instance in found if instance.role is Role.COLOCATED)

    def obstacle(self) -> str:
        """Why no request can be served, for people; empty when one can."""
        if self.usable():
            return ""
        if not self.rows:
            return "no instance has joined; list some with --worker-urls, or let them register"
        apart = [row for row in self.rows.values() if row.state in USABLE and row.role is not Role.COLOCATED]
        if not apart:
            return ", ".join(f"{row.name} is {row.state}" for row in self.rows.values())
        counts = {role: sum(row.role is role for row in apart) for role in (Role.PREFILL, Role.DECODE)}
        for role, other in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if not counts[role]:
                return f"there is no {role} instance: the {counts[other]} {other} cannot serve alone"
        if self._pairs:
            return self._why_no_pair(apart)
        there = " and ".join(f"{count} {role}" for role, count in counts.items())
        return f"there are {there} instances: this router does not send requests to pairs"

    def _why_no_pair(self, apart: list[InstanceRecord]) -> str:
        """Why no prefill instance can hand requests over to any decode instance."""
        prefills, decodes = (
            [row.registration for row in apart if row.role is role and row.registration is not None]
            for role in (Role.PREFILL, Role.DECODE)
        )
        if not (prefills and decodes and (found := differences(prefills[0], decodes[0]))):
            return "no prefill and decode instance fit together"
        values = in_words(found, f"at {prefills[0].instance}", f"at {decodes[0].instance}")
        return f"no prefill and decode instance fit together: {values}"

    def state_of(self, name: str) -> str:
        """The state of an instance, in words."""
        row = self.rows.get(name)
        return "it has left" if row is None else f"it is {row.state}"

    def batching(self, name: str) -> Batching:
        """How an instance fills its forward passes; ``ANY`` before it is first reached."""
        row = self.rows.get(name)
        return row.facts.batching if row is not None and row.facts is not None else ANY

    def in_flight(self, name: str) -> int:
        """Requests in flight there, of other routers too."""
        row = self.rows.get(name)
        return 0 if row is None else row.in_flight + row.elsewhere

    def asking(self, name: str) -> Asking:
        """An instance is asked something that is no generation request while the block runs."""
        return Asking(self.rows[name], self._now)

    def carrying(self, name: str, queued_tokens: int) -> Carrying:
        """Count a request as being in flight at an instance while the block runs; gives its ``Load``."""
        return Carrying(self, name, queued_tokens)

    def begin(self, name: str, queued_tokens: int) -> Load:
        """See ``carrying``; the caller must call ``end`` for each load."""
        row = self.rows[name]
        row.in_flight += 1
        row.queued_tokens += queued_tokens
        row.sent += 1
        row.sent_tokens += queued_tokens
        row.last_picked = next(self._picks)
        row.mark_dirty()
        return Load(row, queued_tokens)

    def end(self, load: Load) -> None:
        """A request is not in flight any more."""
        load.prefilled()
        load.row.in_flight -= 1
        load.row.mark_dirty()
        self._look_whether_drained(load.row)

    def move(self, load: Load, name: str) -> None:
        """A request that was in flight at one instance is so at another.

        Raises:
            ConnectionLost: the other instance has left.
        """
        before, row = load.row, self.rows.get(name)
        if row is None:
            raise ConnectionLost(f"{name} has left")
        row.in_flight += 1
        row.last_picked = next(self._picks)
        load.move(row)
        before.in_flight -= 1
        before.mark_dirty()
        row.mark_dirty()
        self._look_whether_drained(before)

    def sent_elsewhere(self, name: str, requests: int) -> None:
        """Other routers have so many requests in flight at an instance."""
        if (row := self.rows.get(name)) is not None:
            row.elsewhere = requests
            row.mark_dirty()

    def measure(self, metrics: RouterMetrics) -> None:
        """Show how each instance is."""
        in_flight = metrics.gauge("in_flight")
        queued = metrics.gauge("queued_tokens")
        up = metrics.gauge("instance_up")
        trusted = metrics.gauge("index_trusted")

        def refresh() -> None:
            for gauge in (in_flight, queued, up, trusted):
                gauge.clear()
            for row in self.rows.values():
                in_flight.labels(row.name).set(row.in_flight)
                queued.labels(row.name).set(row.queued_tokens)
                up.labels(row.name).set(row.state in USABLE)
                trusted.labels(row.name).set(self._view(row.name)[1])

        metrics.refreshing.subscribe(refresh)

    def __repr__(self) -> str:
        states = ", ".join(f"{row.name}: {row.state} ({row.in_flight})" for row in self.rows.values())
        return f"Fleet({states})"

    def check(self) -> None:
        """Verify the counters.

        Raises:
            InternalError: one of them is impossible.
        """
        usable = {name: row for name, row in self.rows.items() if row.state in USABLE}
        if usable != self._usable:
            raise InternalError(f"{set(usable)} are usable, kept as such are {set(self._usable)}")
        self.usable()
        for row in usable.values():
            if (seen := self._standing.get(row.name)) != self._see(row):
                raise InternalError(f"policies see {seen}, which is {self._see(row)}")
        if len(self._standing) != len(usable):
            raise InternalError(f"policies see {len(self._standing)} instances, {len(usable)} are usable")
        for row in self.rows.values():
            if row.in_flight < 0 or row.queued_tokens < 0 or (row.in_flight == 0 and row.queued_tokens):
                raise InternalError(
                    f"{row.name}: {row.in_flight} in flight, {row.queued_tokens} tokens queued"
                )
            if row.state in USABLE | {State.DRAINING} and row.facts is None:
                raise InternalError(f"{row.name} is {row.state} without facts")
            if row.state is State.DRAINING and not row.in_flight:
                raise InternalError(f"{row.name} is draining and has nothing left to finish")
            if stale := [load for load in row.waiting if load.doomed]:
                raise InternalError(f"{len(stale)} requests wait for {row.name} after a verdict")


def _is_near(url: str) -> bool:
    """Whether an instance is on this machine: then no network is in between."""
    return is_loopback(urlsplit(url).hostname or "")


def _unfit(facts: InstanceFacts, registration: Registration | None) -> str | None:
    """Why an instance cannot serve in any fleet of this router."""
    if facts.obstacle:
        return facts.obstacle
    if facts.role not in ROLES:
        return f"its role is {facts.role}, which no router here knows"
    if facts.model.kind is ModelKind.POOLS and Role(facts.role) is not Role.COLOCATED:
        return f"its model {facts.model.kind.value}, and its role is {facts.role}; start it without a role"
    if registration is not None and registration.role != facts.role:
        return f"it registered as {registration.role}, and its server says {facts.role}"
    return None
