"""One instance in a router's fleet: its facts, its counters, and each request's tie to its fate."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from sglang_ext.protocol.cluster import Registration
from sglang_ext.protocol.compatibility import hand_over_identity
from sglang_ext.router.fleet.facts import InstanceFacts
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.router.http.types import ConnectionLost
from sglang_ext.router.policies.base import Role

ROLES: dict[str, Role] = {role.value: role for role in Role}


@dataclass(eq=False, slots=True)
class InstanceRecord:
    """One instance. Only ``Fleet`` writes it."""

    name: str
    """Its URL."""
    state: State = State.NEW
    why: str = "not reached yet"
    """Why it is in this state, for people."""
    facts: InstanceFacts | None = None
    registration: Registration | None = None
    """Its registration; ``None`` for a listed instance."""
    in_flight: int = 0
    elsewhere: int = 0
    """Requests that other routers have sent it."""
    queued_tokens: int = 0
    sent: int = 0
    """Requests that it was ever sent, and"""
    sent_tokens: int = 0
    """tokens of their prompts that it was expected to compute."""
    last_picked: int = 0
    misses: int = 0
    answers: int = 0
    """Pieces of answers that have come from it."""
    fatal: int = 0
    """How many events of ``lifecycle.FATAL`` have happened to it."""
    last_seen: float | None = None
    """When it last gave a sign of life."""
    questions: int = 0
    """Those that it is being asked (``Fleet.asking``)."""
    asked: float | None = None
    """Since when it may be busy with a question: probes that it misses do not count. None when it is not."""
    other_model: bool = False
    """It was found to serve another model than the fleet."""
    waiting: dict[Load, None] = field(default_factory=dict)
    """Requests that give up when the verdict falls."""
    dirty_rows: dict[str, InstanceRecord] = field(default_factory=dict)
    """Of its fleet, by name: those that policies see differently now."""

    role: Role = field(init=False)
    """From its facts, or else its registration; COLOCATED without either."""
    handover: str = field(init=False)
    """Of a prefill or decode instance, as it registered: `compatibility.hand_over_identity`."""

    def __post_init__(self) -> None:
        self.update(self.facts, self.registration)

    def update(self, facts: InstanceFacts | None, registration: Registration | None) -> None:
        """Record its facts and registration."""
        self.facts, self.registration = facts, registration
        role = facts.role if facts else registration.role if registration else ""
        self.role = ROLES.get(role, Role.COLOCATED)
        self.handover = hand_over_identity(registration)
        self.mark_dirty()

    def mark_dirty(self) -> None:
        """Policies see it differently from now on."""
        self.dirty_rows[self.name] = self

    @property
    def epoch(self) -> str:
        """Of its agent; empty for an instance without one."""
        return self.registration.epoch if self.registration else ""


class Load:
    """One request's share of an instance's counters, and its tie to the instance's fate."""

    __slots__ = ("_cancelling", "_fatal", "_given_up", "_row", "_task", "_tokens")

    _row: InstanceRecord

    def __init__(self, row: InstanceRecord, tokens: int) -> None:
        self._row = row
        self._tokens = tokens
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._given_up: ConnectionLost | None = None
        self._fatal = row.fatal

    @property
    def doomed(self) -> bool:
        """Whether a verdict has fallen since it was sent."""
        return self._row.fatal != self._fatal

    def answered(self) -> None:
        """A piece of the answer has come: the instance lives."""
        self._row.answers += 1

    def prefilled(self) -> None:
        """Its prompt has been computed: the first byte of the answer is here. Repeating it is harmless."""
        if self._tokens:
            self._row.queued_tokens -= self._tokens
            self._row.mark_dirty()
            self._tokens = 0

    def until_lost(self) -> UntilLost:
        """Give up what runs while the block does when the instance is found to be down.

        Raises:
            ConnectionLost: it was.
        """
        return UntilLost(self)

    def wait(self) -> None:
        """See ``until_lost``: the block begins."""
        task = self._task = asyncio.current_task()
        if task is None or self.doomed:
            raise ConnectionLost(f"{self._row.name} is {self._row.state}: {self._row.why}")
        self._cancelling = task.cancelling()
        self._row.waiting[self] = None

    def waited(self, error: BaseException | None) -> None:
        """See ``until_lost``: the block ends."""
        self._row.waiting.pop(self, None)
        if self._given_up is None or self._task is None or not isinstance(error, asyncio.CancelledError):
            return
        # Ours, unless someone else has cancelled the task too (as asyncio.timeout does it).
        if self._task.uncancel() <= self._cancelling:
            given_up, self._given_up = self._given_up, None
            raise given_up from error

    def give_up(self, why: ConnectionLost | None = None) -> None:
        """The verdict has fallen, or ``why`` ends the wait; only work within ``until_lost`` is given up."""
        if self not in self._row.waiting or self._task is None:
            return
        self._row.waiting.pop(self, None)
        self._given_up = why or ConnectionLost(f"{self._row.name} is {self._row.state}: {self._row.why}")
        self._task.cancel()

    @property
    def row(self) -> InstanceRecord:
        """Where the request runs."""
        return self._row

    def move(self, row: InstanceRecord) -> None:
        """The request runs elsewhere from now on. Outside of ``until_lost``."""
        self.prefilled()
        self._row, self._fatal = row, row.fatal


class UntilLost:
    """See ``Load.until_lost``. A class, because a generator costs every request more."""

    __slots__ = ("_load",)

    def __init__(self, load: Load) -> None:
        self._load = load

    def __enter__(self) -> None:
        self._load.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._load.waited(error)
