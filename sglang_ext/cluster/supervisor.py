"""Runs the parts of a cluster by the rules of ``lifecycle``, and alone turns its decisions into actions.

A part with slots has a second process that stands by while the part is ready and has restarts left. To
restart such a part, the second process takes over; the next one is started when it has answered.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TypeVar

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.cluster import lifecycle
from sglang_ext.cluster.lifecycle import Action, Event, State
from sglang_ext.cluster.plan import Part, log_path
from sglang_ext.cluster.process import (
    PartProcess,
    Running,
    how_it_ended,
    probe,
    stop_listening,
    tail,
    why_it_ended,
)
from sglang_ext.errors import InternalError, PeerError

PROBE_INTERVAL_S = 0.25
LAST_RESORT_S = 10.0
"""Seconds beyond the grace time after which a guard that still runs is killed."""

Result = TypeVar("Result")
Probe = Callable[[str], Awaitable[bool]]


@dataclass
class Standby:
    """A process that stands by, and its end."""

    process: Running
    slot: int
    ending: asyncio.Task[int]


@dataclass
class PartStatus:
    """A part and where it is in its life; read it, do not change it."""

    part: Part
    log: Path
    state: State = State.WAITING
    restarts: int = 0
    """Times it was started again."""
    started_at: float = 0.0
    """Monotonic seconds of the latest start; 0 before the first."""
    ready_after_s: float | None = None
    """How long the latest start took."""
    process: Running | None = field(default=None, repr=False)
    slot: int = 0
    """The part's slot that ``process`` has."""
    standby: Standby | None = field(default=None, repr=False)
    standby_deaths: int = 0
    """Times that a process died while it stood by."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set, repr=False)

    @property
    def url(self) -> str:
        """Where this part alone answers; empty while it is not placed."""
        return (self.process.url if self.process else "") or self.part.own_url or self.part.url

    @property
    def pid(self) -> int | None:
        """Process id of its guard, whose only child is the part."""
        return None if self.process is None else self.process.pid


class ClusterError(PeerError):
    """A part died for good; the message names the part, the reason and its log."""


class Observer(Protocol):
    """Notified of changes; must not block."""

    def begin(self, parts: Mapping[str, PartStatus]) -> None:
        """These are the parts; none runs yet."""

    def changed(self, status: PartStatus) -> None:
        """A part came to another state, or was started again."""


class Cluster:
    """The processes of a plan; ``async with Cluster(parts, log_dir) as cluster`` ends them with the block.

    Args:
        parts: from ``make_plan``.
        log_dir: existing folder for one log per part.
        restarts: times that each part that died is started again; None: by each part's own ``restarts``.
        start_timeout_s: seconds from the start of a part to its first answer.
        stop_timeout_s: seconds between asking a part to end and killing it.
        observer: notified of every change.
        probe: whether ``GET url`` answers 200.
        elsewhere: makes a part's process, given the part and its log, if it is not to run on this machine.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        log_dir: Path,
        *,
        restarts: int | None = None,
        start_timeout_s: float = 600.0,
        stop_timeout_s: float = 15.0,
        observer: Observer | None = None,
        clock: Clock | None = None,
        probe: Probe = probe,
        elsewhere: Callable[[Part, Path], Running] | None = None,
    ) -> None:
        self.parts = {part.name: PartStatus(part, log_path(log_dir, part)) for part in parts}
        self.failure: ClusterError | None = None
        self._needs = {part.name: part.needs for part in parts}
        self._restarts = restarts
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._observer = observer
        self._clock = clock or SystemClock()
        self._probe = probe
        self._elsewhere = elsewhere
        self._stopping = False
        self._changed = asyncio.Event()
        self._watch: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"Cluster({', '.join(f'{name} {status.state.value}' for name, status in self.parts.items())})"

    async def __aenter__(self) -> Cluster:
        # Guards read from it and see its end when this process dies, however it dies.
        self._watch = os.pipe()
        if self._observer is not None:
            self._observer.begin(self.parts)
        self._advance()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        ending = asyncio.ensure_future(self.ended())
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                # Cancelled while ending: nothing may be left behind all the same.
                self.hurry()
        for status in self.parts.values():
            for task in status.tasks:
                task.cancel()
        if self._watch is not None:
            for end in self._watch:
                os.close(end)
            self._watch = None

    # -- for the owner ----------------------------------------------------------------------------

    async def ready(self) -> None:
        """Wait until every part has answered.

        Raises:
            ClusterError: a part died for good before.
        """
        await self._until(lambda: all(status.state is State.READY for status in self.parts.values()))

    async def ended(self) -> None:
        """Wait until no part runs any more. ``failure`` then has the reason, unless the end was requested."""
        while not all(
            status.state in lifecycle.OVER and status.standby is None for status in self.parts.values()
        ):
            await self._next_change()

    async def failed(self) -> None:
        """Wait until a part dies for good, or all have been stopped.

        Raises:
            ClusterError: always; names the part and the reason.
        """
        await self._until(lambda: False)

    async def doing(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``, which is cancelled when a part dies for good.

        Raises:
            ClusterError: as ``failed``; also any error of ``work``.
        """
        working = asyncio.ensure_future(work)
        failing = asyncio.ensure_future(self.failed())
        try:
            await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                failing.result()
            return await working
        finally:
            working.cancel()
            failing.cancel()
            await asyncio.gather(working, failing, return_exceptions=True)

    def stop(self) -> None:
        """Begin to end every part, those that others need last. Returns at once; see ``ended``."""
        self._stopping = True
        self._advance()

    def hurry(self) -> None:
        """End every part at once, in any order."""
        self._stopping = True
        for name, status in self.parts.items():
            self._feed(name, Event.STOP)
            self._feed(name, Event.HURRY)
            if status.standby is not None:
                status.standby.process.hasten()

    def check(self) -> None:
        """Verify that states, processes and tasks agree."""
        for name, status in self.parts.items():
            running = any(not task.done() for task in status.tasks)
            if (status.state in lifecycle.OVER or status.state is State.WAITING) and running:
                raise InternalError(f"{name} is {status.state.value} and something of it runs")
            if status.state in (State.STARTING, State.READY, State.STOPPING) and not running:
                raise InternalError(f"{name} is {status.state.value} and nothing of it runs")
            if status.standby is not None and status.standby.slot == status.slot:
                raise InternalError(f"both processes of {name} have slot {status.slot}")

    # -- events to actions ------------------------------------------------------------------------

    def _feed(self, name: str, event: Event) -> None:
        status = self.parts[name]
        before = status.state
        status.state, actions = lifecycle.step(before, event)
        for action in actions:
            self._act(status, action)
        if status.state in lifecycle.OVER:
            self._close(status)
        if self._observer is not None and (status.state is not before or Action.SPAWN in actions):
            self._observer.changed(status)
        self._changed.set()

    def _advance(self) -> None:
        """Give every part whose turn it is its START or STOP."""
        choose, event = (
            (lifecycle.stoppable, Event.STOP) if self._stopping else (lifecycle.startable, Event.START)
        )
        done: set[str] = set()
        while names := [name for name in choose(self._states(), self._needs) if name not in done]:
            for name in names:
                done.add(name)
                self._feed(name, event)

    def _states(self) -> dict[str, State]:
        return {name: status.state for name, status in self.parts.items()}

    def _act(self, status: PartStatus, action: Action) -> None:
        if action is Action.SPAWN:
            self._spawn(status)
        elif action is Action.ANNOUNCE:
            status.ready_after_s = self._clock.monotonic() - status.started_at
            self._have_one_stand_by(status)
        elif action is Action.FAIL:
            self._stopping = True
        elif status.process is None:
            raise InternalError(f"{status.part.name} has no process to {action.value}")
        elif action is Action.TERMINATE:
            status.process.terminate()
            self._dismiss(status)
            self._task(status, self._last_resort(status))
        elif action is Action.HASTEN:
            status.process.hasten()
        elif action is Action.KILL:
            status.process.kill()

    def _spawn(self, status: PartStatus) -> None:
        if self._watch is None:
            raise InternalError("the cluster was not entered")
        status.started_at = self._clock.monotonic()
        status.ready_after_s = None
        standby, status.standby = status.standby, None
        if standby is None:
            status.process = self._process(status, status.slot)
            ending = asyncio.ensure_future(status.process.run())
            # At the same time: it is to be there as soon as the part serves.
            self._have_one_stand_by(status)
        else:
            status.process, status.slot, ending = standby.process, standby.slot, standby.ending
            status.process.take_over()
        self._task(status, self._live(status, ending))
        self._task(status, self._until_healthy(status))

    def _process(self, status: PartStatus, slot: int, *, stands_by: bool = False) -> Running:
        if self._elsewhere is not None:
            return self._elsewhere(status.part, status.log)
        if self._watch is None:
            raise InternalError("the cluster was not entered")
        part = status.part
        return PartProcess(
            part,
            status.log,
            watch=self._watch[0],
            grace_s=self._stop_timeout_s,
            flags=part.slots[slot] if part.slots else (),
            stands_by=stands_by,
        )

    def _have_one_stand_by(self, status: PartStatus) -> None:
        """Start the process that takes over when this one dies, where there is to be one."""
        deaths = max(status.restarts, status.standby_deaths)
        if not status.part.slots or status.standby is not None or deaths >= (self._restarts or 0):
            return
        slot = 1 - status.slot
        process = self._process(status, slot, stands_by=True)
        standby = Standby(process, slot, asyncio.ensure_future(process.run()))
        status.standby = standby
        standby.ending.add_done_callback(lambda _: self._standby_ended(status, standby))

    def _standby_ended(self, status: PartStatus, standby: Standby) -> None:
        if status.standby is not standby:
            return  # it had taken over
        status.standby = None
        status.standby_deaths += 1
        if status.state is State.READY and not self._stopping:
            self._have_one_stand_by(status)
        self._changed.set()

    def _dismiss(self, status: PartStatus) -> None:
        """End the process that stands by."""
        if status.standby is not None:
            status.standby.process.terminate()

    def _close(self, status: PartStatus) -> None:
        """Release a part that is over: refuse connections to its sockets, as no process will accept them."""
        self._dismiss(status)
        for descriptor in status.part.sockets:
            stop_listening(descriptor)

    def _task(self, status: PartStatus, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        status.tasks.add(task)
        task.add_done_callback(lambda done: self._task_ended(status, done))

    def _task_ended(self, status: PartStatus, task: asyncio.Task[None]) -> None:
        status.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._record(ClusterError(f"{status.part.name}: {error}"))
            # It may have no process; its state can no longer be derived from events.
            status.state = State.FAILED
            self._close(status)
            self.stop()
            self._changed.set()

    # -- tasks ------------------------------------------------------------------------------------

    async def _live(self, status: PartStatus, ending: asyncio.Task[int]) -> None:
        """A process until its end."""
        code = await ending
        event = lifecycle.death(self._restarts_left(status))
        expected = status.state is State.STOPPING
        if not expected and event is Event.DIED:
            self._record(self._death(status, how_it_ended(code)))
        elif not expected:
            status.restarts += 1
        for task in status.tasks - {asyncio.current_task()}:
            task.cancel()
        self._feed(status.part.name, event)
        self._advance()

    def _restarts_left(self, status: PartStatus) -> int:
        if self._restarts is not None:
            return self._restarts - status.restarts
        return status.part.restarts - status.restarts if status.ready_after_s is not None else 0

    async def _until_healthy(self, status: PartStatus) -> None:
        """The probes that wait for the first answer."""
        name = status.part.name
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not (status.url and await self._probe(status.url + status.part.ready_path)):
                    await self._clock.sleep(PROBE_INTERVAL_S)
        except TimeoutError:
            if status.state is State.STARTING:
                self._record(self._death(status, f"did not answer within {self._start_timeout_s:g} s"))
            self._feed(name, Event.START_TIMEOUT)
        else:
            self._feed(name, Event.HEALTHY)
        self._advance()

    async def _last_resort(self, status: PartStatus) -> None:
        await self._clock.sleep(self._stop_timeout_s + LAST_RESORT_S)
        self._feed(status.part.name, Event.STOP_TIMEOUT)

    # -- helpers ----------------------------------------------------------------------------------

    def _death(self, status: PartStatus, how: str) -> ClusterError:
        after = self._clock.monotonic() - status.started_at
        again = f", after {status.restarts} restarts" if status.restarts else ""
        found = [
            f"{status.part.name} {how} ({after:.0f} s after its start{again})",
            why_it_ended(status.log),
            f"Its log is {status.log} and ends with:",
            *(f"  | {line}" for line in tail(status.log)),
        ]
        return ClusterError("\n".join(line for line in found if line))

    def _record(self, error: ClusterError) -> None:
        """Keep the first failure: those that follow are its consequence."""
        if self.failure is None:
            self.failure = error

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self.failure is not None:
                raise self.failure
            if all(status.state in lifecycle.OVER for status in self.parts.values()):
                raise ClusterError("the cluster was stopped")
            await self._next_change()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
