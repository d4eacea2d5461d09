"""Runs the parts of a cluster as ``lifecycle`` says: the only place where its decisions become actions."""

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
from sglang_ext.cluster.process import PartProcess, how_it_ended, probe, tail
from sglang_ext.errors import InternalError, PeerError

PROBE_INTERVAL_S = 0.25
LAST_RESORT_S = 10.0
"""Seconds beyond the grace time after which a guard that still runs is killed."""

Result = TypeVar("Result")
Probe = Callable[[str], Awaitable[bool]]


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
    process: PartProcess | None = field(default=None, repr=False)
    tasks: set[asyncio.Task[None]] = field(default_factory=set, repr=False)

    @property
    def pid(self) -> int | None:
        """Process id of its guard, whose only child is the part."""
        return None if self.process is None else self.process.pid


class ClusterError(PeerError):
    """A part died for good; the message says which, why, and where its log is."""


class Observer(Protocol):
    """Told what happens; must not block."""

    def begin(self, parts: Mapping[str, PartStatus]) -> None:
        """These are the parts; none runs yet."""

    def changed(self, status: PartStatus) -> None:
        """A part came to another state, or was started again."""


class Cluster:
    """The processes of a plan; ``async with Cluster(parts, log_dir) as cluster`` ends them with the block.

    Args:
        parts: from ``make_plan``.
        log_dir: existing folder for one log per part.
        restarts: times that each part that died is started again.
        start_timeout_s: seconds from the start of a part to its first answer.
        stop_timeout_s: seconds between asking a part to end and killing it.
        observer: is told of every change.
        probe: whether ``GET url`` answers 200.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        log_dir: Path,
        *,
        restarts: int = 0,
        start_timeout_s: float = 600.0,
        stop_timeout_s: float = 15.0,
        observer: Observer | None = None,
        clock: Clock | None = None,
        probe: Probe = probe,
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
        """Wait until no part runs any more. ``failure`` then says why, if nobody asked for it."""
        while not all(status.state in lifecycle.OVER for status in self.parts.values()):
            await self._next_change()

    async def failed(self) -> None:
        """Wait until a part dies for good, or all were told to stop.

        Raises:
            ClusterError: always; says which and why.
        """
        await self._until(lambda: False)

    async def doing(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of ``work``, which is cancelled when a part dies for good.

        Raises:
            ClusterError: as ``failed``; also whatever ``work`` raises.
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
        for name in self.parts:
            self._feed(name, Event.STOP)
            self._feed(name, Event.HURRY)

    def check(self) -> None:
        """Verify that states, processes and tasks agree."""
        for name, status in self.parts.items():
            running = any(not task.done() for task in status.tasks)
            if (status.state in lifecycle.OVER or status.state is State.WAITING) and running:
                raise InternalError(f"{name} is {status.state.value} and something of it runs")
            if status.state in (State.STARTING, State.READY, State.STOPPING) and not running:
                raise InternalError(f"{name} is {status.state.value} and nothing of it runs")

    # -- events to actions ------------------------------------------------------------------------

    def _feed(self, name: str, event: Event) -> None:
        status = self.parts[name]
        before = status.state
        status.state, actions = lifecycle.step(before, event)
        for action in actions:
            self._act(status, action)
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
        elif action is Action.FAIL:
            self._stopping = True
        elif status.process is None:
            raise InternalError(f"{status.part.name} has no process to {action.value}")
        elif action is Action.TERMINATE:
            status.process.terminate()
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
        status.process = PartProcess(
            status.part, status.log, watch=self._watch[0], grace_s=self._stop_timeout_s
        )
        self._task(status, self._live(status, status.process))
        self._task(status, self._until_healthy(status))

    def _task(self, status: PartStatus, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        status.tasks.add(task)
        task.add_done_callback(lambda done: self._task_ended(status, done))

    def _task_ended(self, status: PartStatus, task: asyncio.Task[None]) -> None:
        status.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._record(ClusterError(f"{status.part.name}: {error}"))
            # It may have no process; the state machine is not to be trusted with it.
            status.state = State.FAILED
            self.stop()
            self._changed.set()

    # -- tasks ------------------------------------------------------------------------------------

    async def _live(self, status: PartStatus, process: PartProcess) -> None:
        """A process from its start to its end."""
        code = await process.run()
        event = lifecycle.death(self._restarts - status.restarts)
        expected = status.state is State.STOPPING
        if not expected and event is Event.DIED:
            self._record(self._death(status, how_it_ended(code)))
        elif not expected:
            status.restarts += 1
        for task in status.tasks - {asyncio.current_task()}:
            task.cancel()
        self._feed(status.part.name, event)
        self._advance()

    async def _until_healthy(self, status: PartStatus) -> None:
        """The probes that wait for the first answer."""
        name = status.part.name
        try:
            async with asyncio.timeout(self._start_timeout_s):
                while not await self._probe(status.part.url + "/health"):
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
        lines = "\n".join(f"  | {line}" for line in tail(status.log))
        return ClusterError(
            f"{status.part.name} {how} ({after:.0f} s after its start{again})\n"
            f"Its log is {status.log} and ends with:\n{lines}"
        )

    def _record(self, error: ClusterError) -> None:
        """Keep the first failure: those that follow are its consequence."""
        if self.failure is None:
            self.failure = error

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self.failure is not None:
                raise self.failure
            if all(status.state in lifecycle.OVER for status in self.parts.values()):
                raise ClusterError("the cluster was told to stop")
            await self._next_change()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()
