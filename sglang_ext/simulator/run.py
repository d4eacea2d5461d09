"""One simulation, from its settings to its outcome."""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from sglang_ext.cost_model import CostModel
from sglang_ext.cost_model.batch import Batching
from sglang_ext.ids import quick_ids
from sglang_ext.mempool.ledger import Call
from sglang_ext.protocol.cluster import HEARTBEAT_S, Registration
from sglang_ext.router.fleet.facts import InstanceFacts, ModelFacts
from sglang_ext.router.policies.base import Role
from sglang_ext.simulator.agents import Agent
from sglang_ext.simulator.control.roles import Announced, Roles
from sglang_ext.simulator.crowd import after, crowd
from sglang_ext.simulator.disk import NamedDisk
from sglang_ext.simulator.instance import Instance
from sglang_ext.simulator.links import Network
from sglang_ext.simulator.outcome import Outcome
from sglang_ext.simulator.peers import Wires
from sglang_ext.simulator.regret import Uses
from sglang_ext.simulator.router import SimulatedRouter
from sglang_ext.simulator.settings import BLOCK_TOKENS, Settings, checked
from sglang_ext.simulator.trace import Trace, agreement
from sglang_ext.simulator.virtual_time import VirtualClock, VirtualLoop
from sglang_ext.simulator.workload import Announcement, Session, Turn, mixed
from sglang_ext.tiers import Tier

MODEL = ModelFacts("simulated", "simulated", 1 << 31, 1 << 20)
DETECTION_S = 3.0
"""From an instance's death to the router's verdict (`VERDICT_S`)."""
GARBAGE = (50_000, 10, 10_000)
"""Thresholds of Python's collector of cycles. Requests leave none behind, only instances that have died do.
With its own thresholds, it took a tenth of a simulation's time, and of a large one a tenth even where it
looked at all objects once in a while."""
Progress = Callable[[int, float], None]
"""Takes the number of requests that have ended, and the virtual time, after each request."""


def _unseen(ended: int, virtual_s: float) -> None:
    pass


def simulate(
    settings: Settings,
    model: CostModel | None = None,
    trace: Trace | None = None,
    sessions: Iterator[Session] | None = None,
    expected: CostModel | None = None,
    progress: Progress = _unseen,
) -> Outcome:
    """Run a fleet under a load. The same arguments give the same outcome.

    Args:
        model: the costs of the instances; the defaults without one.
        trace: a recorded load; the mix without one. Its requests take the times that were observed, if they
            were. They come when they came, whatever `Settings.rate` is.
        sessions: another load in the place of the mix, in the order of their start.
        expected: the costs that the router expects, which it corrects; those of the instances without one.
        progress: notified of each request's end.

    Raises:
        ConfigError: a setting is impossible.
    """
    loop = VirtualLoop()
    thresholds = gc.get_threshold()
    gc.set_threshold(*GARBAGE)
    try:
        names = () if trace is None else trace.instances
        if sessions is None and trace is not None:
            sessions = trace.load(observed=settings.observed, closed=settings.closed)
        closed = sessions is None and settings.crowd > 0
        load = sessions or (crowd(settings) if closed else mixed(settings))
        run = Simulation(checked(settings), model or CostModel(), loop, load, names)
        if expected is not None:
            run.router.costs.use(expected)
        if closed:
            run.after = after
        if trace is not None:
            run.announcements = trace.announcements
            run.kinds = trace.kinds
            if settings.observed:
                run.reports = trace.reports
        run.progress = progress
        loop.run_until_complete(run.run())
        if trace is not None and trace.decided:
            run.outcome.agreement = agreement(trace, run.outcome.decided)
        return run.outcome
    finally:
        gc.set_threshold(*thresholds)
        loop.close()


def url(number: int) -> str:
    """The name of an instance."""
    return f"http://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:30000"


class Simulation:
    """See `simulate`.

    Args:
        names: of the first instances; the others are named by their numbers.
        tenants: names of the tenants.
    """

    instance_type = Instance

    def __init__(
        self,
        settings: Settings,
        model: CostModel,
        loop: asyncio.AbstractEventLoop,
        sessions: Iterator[Session],
        names: Sequence[str] = (),
        tenants: Sequence[str] = (),
    ) -> None:
        self.settings, self._model, self._loop, self._sessions = settings, model, loop, sessions
        self._names = names
        self._clock = VirtualClock(loop)
        self.announcements: Sequence[Announcement] = ()
        self.after: Callable[[Session], Session | None] = lambda _: None
        """Returns the session that an agent begins when one has ended."""
        self.kinds: Mapping[str, str] = {}
        """See `Trace`."""
        self.reports: Mapping[str, Sequence[float]] = {}
        """By instance, the times of its load reports; every second without any."""
        self.outcome = Outcome()
        self.instances: dict[str, Instance] = {}
        self._agents: dict[str, Agent] = {}
        self._numbers: dict[str, tuple[int, int]] = {}
        """Number and epoch of each instance."""
        self._disks: dict[str, NamedDisk] = {}
        """Of instances that have died."""
        self._draw = random.Random(f"hints {settings.seed}")
        self._new_id = quick_ids(f"ids {settings.seed}")
        self._faults = random.Random(f"faults {settings.seed}")
        self._network = Network(loop)
        self._wires = Wires(self._network, settings.network, settings.lag_ms / 1e3)
        self.router = SimulatedRouter(
            settings,
            model,
            self._clock,
            loop,
            self.instances,
            self.outcome,
            self._new_id,
            self._wires.took,
            tenants,
        )
        self.roles: Roles | None = None
        if settings.role_controller != "off":
            self.roles = Roles(
                settings, self._clock, loop, self.router, self.instances, self._agents, self._announced
            )
        self._epochs = itertools.count(1)
        self._until_s = settings.seconds if settings.crowd else math.inf
        self.progress: Progress = _unseen
        self._sent = self._ended = 0
        self._over: asyncio.Future[float] = loop.create_future()
        """When the last request has ended."""
        self._begun = False
        """The last session has."""
        self._held = self._queued = 0.0
        self._uses = Uses(settings.requests)
        self.router.begins = self._begins
        self._going: dict[asyncio.Task[None], None] = {}
        self._rounds: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Start the instances, send the requests, and wait for their answers."""
        for number in range(self.settings.instances):
            self.start(number)
        self._rounds.append(asyncio.ensure_future(self.router.tick()))
        if self.settings.for_others:
            self._rounds.append(asyncio.ensure_future(self.router.spill()))
        if self.announcements:
            self._rounds.append(asyncio.ensure_future(self._announce_all()))
        if self.roles is not None:
            self._rounds += [asyncio.ensure_future(each) for each in self.roles.rounds()]
        if self.settings.failures:
            self._rounds.append(asyncio.ensure_future(self._fail()))
        await self._clock.sleep(4 * self.settings.lag_ms / 1e3)
        began = self._clock.monotonic()
        for session in self._sessions:
            if self._sent >= self.settings.requests:
                break
            await self._clock.sleep(max(0.0, began + session.start_s - self._clock.monotonic()))
            task = asyncio.ensure_future(self._sessions_from(session))
            self._going[task] = None
            task.add_done_callback(self._session_ended)
        self._begun = True
        self._look_whether_over()
        seconds = await self._over - began
        await self._clock.sleep(4 * self.settings.lag_ms / 1e3)
        self._finish(began, seconds)
        rest = [*self._rounds, *self._going]
        for task in rest:
            task.cancel()
        self.router.channels.stop()
        for ended in await asyncio.gather(*rest, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended

    def _session_ended(self, task: asyncio.Task[None]) -> None:
        del self._going[task]
        if not task.cancelled() and (error := task.exception()) and not self._over.done():
            self._over.set_exception(error)
        self._look_whether_over()

    def _look_whether_over(self) -> None:
        """No session thinks about a further request when all have been sent."""
        sent = self._sent >= self.settings.requests or (self._begun and not self._going)
        if sent and self._ended == self._sent and not self._over.done():
            self._over.set_result(self._clock.monotonic())

    async def _sessions_from(self, session: Session | None) -> None:
        """A session, and in a closed loop those after it."""
        while session is not None and await self._session(session):
            session = self.after(session)

    async def _session(self, session: Session) -> bool:
        """The requests of a session, one after the other. Returns whether all were answered."""
        for turn in session.turns():
            if turn.think_s:
                await self._clock.sleep(turn.think_s)
            if self._sent >= self.settings.requests or self._clock.monotonic() >= self._until_s:
                return False
            self._sent += 1
            answered = await self.router.serve(session, turn)
            self._ended += 1
            self.progress(self._ended, self._clock.monotonic())
            self._look_whether_over()
            if not answered:
                return False
            self._announce(session, turn)
        return True

    def _begins(self, session: Session, turn: Turn) -> None:
        self._uses.add(session.name, session.tenant, turn.key, turn.answer)

    def _announce(self, session: Session, turn: Turn) -> None:
        hints = self.settings.hints
        if hints and self._draw.random() < hints:
            self.router.announce(session.name, session.tenant, turn.key + turn.answer, 0.0)

    async def _announce_all(self) -> None:
        """Recorded hints, at their times."""
        began = self._clock.monotonic() + 4 * self.settings.lag_ms / 1e3
        for each in self.announcements:
            await self._clock.sleep(max(0.0, began + each.at_s - self._clock.monotonic()))
            self.router.announce(each.session, each.tenant, each.key, each.lead_s)

    # -- instances ----------------------------------------------------------------------------------

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else url(number)

    def _role(self, number: int) -> Role:
        if not self.settings.prefill:
            return Role.COLOCATED
        return Role.PREFILL if number < self.settings.prefill else Role.DECODE

    def _kind(self, number: int) -> str:
        """The kind of an instance's KV, empty where it exports none. Instances beyond the recorded ones are
        like most of those that export any."""
        if not self.kinds:
            return "simulated"
        if number < len(self._names):
            return self.kinds.get(self._names[number], "")
        return Counter(self.kinds.values()).most_common(1)[0][0]

    def start(self, number: int) -> None:
        """Start an instance with nothing in its memory, and have the router reach it. An instance that is
        started again keeps its disk.
        """
        name, epoch, role = self._name(number), next(self._epochs), self._role(number)
        send, named = self.router.channels.sender(name)
        agent = Agent(epoch.to_bytes(16, "big"), send)
        named(agent)
        instance = self.instance_type(
            name,
            epoch,
            self.settings,
            self._model,
            self._clock,
            self._loop,
            self._network,
            self._wires,
            agent.published,
            agent.on_hint,
            agent.on_fetch,
            role,
            self._disks.pop(name, None),
        )
        agent.meet(instance)
        self.instances[name], self._agents[name] = instance, agent
        self._numbers[name] = number, epoch
        if self.roles is not None:
            self.roles.register(name, role)
            return
        registration, facts = self._announced(name, role)
        fleet = self.router.fleet
        fleet.join(name, registration)
        fleet.learnt(name, facts)
        offset_s = HEARTBEAT_S * (number % 1000) / 1000
        self.router.channels.connect(name, registration, role, agent, offset_s, self.reports.get(name))

    def _announced(self, name: str, role: Role) -> Announced:
        """A living instance as it registers in a role, and its facts."""
        number, epoch = self._numbers[name]
        kind = self._kind(number)
        exports = self.settings.fetch and bool(kind) and role is not Role.DECODE
        registration = Registration(
            url=name,
            instance=f"i{number}",
            epoch=f"{epoch:032x}",
            agent="tcp://127.0.0.1:1",
            namespace=kind or "simulated",
            endpoints=(name,) if exports else (),
            role=role.value,
            for_others=self.settings.for_others if exports else 0,
        )
        return registration, InstanceFacts(
            MODEL, "1", str(epoch), role.value, "", batching=Batching(chunk=self.settings.chunk),
            changes_role=self.settings.role_controller != "off",
        )  # fmt: skip

    async def _fail(self) -> None:
        """Instances die at random, and start anew."""
        rate = self.settings.failures * self.settings.instances / 3600
        while True:
            await self._clock.sleep(self._faults.expovariate(rate))
            number = self._faults.randrange(self.settings.instances)
            if self._name(number) in self.instances:
                self._rounds.append(asyncio.ensure_future(self._restart(number)))

    async def _restart(self, number: int) -> None:
        name = self._name(number)
        dead = self._collect(self.instances.pop(name), self._agents.pop(name))
        dead.die()
        if self.roles is not None:
            self.roles.died(name)
        self.outcome.counts["deaths"] = self.outcome.counts.get("deaths", 0) + 1
        if dead.engine.drive is not None:
            self._disks[name] = dead.engine.drive.tier
            self._disks[name].restarted()
        await self._clock.sleep(DETECTION_S)
        self.router.channels.disconnect(name)
        self.router.fleet.lost(name, "its agent is silent")
        await self._clock.sleep(self.settings.restart_s)
        self.start(number)

    # -- the end ------------------------------------------------------------------------------------

    def _collect(self, instance: Instance, agent: Agent) -> Instance:
        """Add the counts of an instance."""
        counts, work, ledger = self.outcome.counts, instance.work, instance.engine.store.ledger
        for name, count in (
            ("tree inserts", ledger.calls[Call.INSERT]),
            ("tree matches", ledger.calls[Call.MATCH]),
            ("evicted blocks of HBM", ledger.evicted[Tier.HBM]),
            ("evicted blocks of DRAM", ledger.evicted[Tier.DRAM]),
            ("events published", agent.events),
            ("passes", work.passes),
            ("decode steps", work.steps),
            ("computed tokens", work.computed_tokens),
            ("prompts in passes", work.prompts),
            ("tokens of decode steps", work.generated_tokens),
            ("retracted requests", work.retracted),
            ("fetched blocks", _fetched(instance)),
            ("blocks kept for others", _kept(instance)),
            ("returned blocks", instance.returned_blocks),
        ):
            counts[name] = counts.get(name, 0) + count
        links = self.outcome.link_bytes
        for name, nbytes in (
            ("DRAM to HBM", instance.engine.copier.bytes_loaded),
            ("HBM to DRAM and ahead", instance.engine.copier.bytes_written),
        ):
            links[name] = links.get(name, 0.0) + nbytes
        drive = instance.engine.drive
        if drive is not None:
            links["from disk"] = links.get("from disk", 0.0) + drive.reading.moved
            links["to disk"] = links.get("to disk", 0.0) + drive.writing.moved
            evicted = "evicted blocks of disk"
            counts[evicted] = counts.get(evicted, 0) + drive.tier.evicted
        self.outcome.computed_s += work.busy_s
        self.outcome.busy += work.busy_s + work.generating_s
        self._held += work.held_token_s
        self._queued += work.queued_s
        return instance

    def _finish(self, began: float, seconds: float) -> None:
        for name, instance in self.instances.items():
            self._collect(instance, self._agents[name])
        self.outcome.seconds = seconds
        total_s = max(1e-9, seconds * self.settings.instances)
        self.outcome.busy /= total_s
        # After the last arrival there is no load any more.
        arriving_s = max(self.outcome.arrivals, default=began) - began
        arriving_s = max(1e-9, arriving_s * self.settings.instances)
        held = self._held / (self.settings.hbm * BLOCK_TOKENS)
        most_s = max(self.outcome.computed_s, held, self._queued)
        self.outcome.capacity_used = min(1.0, most_s / arriving_s)
        self._regret()
        self.outcome.link_bytes["between instances"] = sum(
            link.moved for link in self._wires.links if link.name.endswith(" in")
        )
        self.outcome.counts |= self.router.counts
        if self.roles is not None:
            self.outcome.counts |= self.roles.counts()
            self.outcome.role_changes = [
                (at - began, name, role.value) for at, name, role in self.roles.changes
            ]
        self.outcome.counts["events applied"] = self.router.channels.events_applied

    def _regret(self) -> None:
        settings, prompt = self.settings, max(1, self.outcome.prompt_tokens)
        found = self._uses.regret(settings.instances * (settings.hbm + settings.dram))
        oracle, infinite = found.oracle_tokens / prompt, found.infinite_tokens / prompt
        reused = sum(self.outcome.hits.values()) / prompt
        self.outcome.regret = {
            "oracle_reused": oracle,
            "infinite_reused": infinite,
            "of_oracle": reused / oracle if oracle else 1.0,
            "followed_one_in": self._uses.one_in,
        }

    def check(self) -> None:
        """Verify the invariants of all parts."""
        self.router.fleet.check()
        self.router.advisor.check()
        self.router.admission.check()
        self.router.tenants.check()
        if self.roles is not None:
            self.roles.check()
        index = self.router.index
        assert index.given_up_blocks + index.evicted_blocks == 0, "the index has no room"
        for instance in self.instances.values():
            instance.check()


def _kept(instance: Instance) -> int:
    spilled = instance.engine.spilled
    return 0 if spilled is None else spilled.counters.kept


def _fetched(instance: Instance) -> int:
    peers = instance.engine.peers
    return 0 if peers is None else peers.fetches.counters.fetched_blocks
