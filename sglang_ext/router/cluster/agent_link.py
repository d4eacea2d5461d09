"""The channel to one instance's agent: hello, placement events, heartbeats.

    silent for `VERDICT_S`   the channel is opened anew, and events go on where they stopped if the agent
                             still remembers them: after a cut, TCP delays its retransmissions by as long
                             as the cut lasted
    silent for the verdict   the same on this machine, longer on another one: the instance is reported as
                             silent, and its index not trusted; time in which the router itself stood
                             still does not count
    an event is missing      hello without a position: a snapshot follows
    another epoch            the instance was restarted: its index entries are dropped at once

Everything runs on the event loop, a message at a time, with other tasks in between.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import dataclass
from typing import Any, Final, Protocol

from zmq import constants as zmq

from sglang_ext.clock import Clock
from sglang_ext.errors import InternalError
from sglang_ext.protocol.agent import (
    AGENT_PROTOCOL,
    FROM_AGENT,
    TO_AGENT,
    Beat,
    Events,
    FromAgent,
    Hello,
    Load,
    Ping,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotPart,
    ToAgent,
    Welcome,
)
from sglang_ext.protocol.cluster import HEARTBEAT_S, Registration, other_release
from sglang_ext.radix_global.sync.replica import Outcome
from sglang_ext.router.index.index import Index
from sglang_ext.signals import Signal
from sglang_ext.tasks import Rounds
from sglang_ext.wire import WireError

logger = logging.getLogger("router.agents")

ASK_PAUSE_S: Final = 0.2
"""Between two hellos to one agent, so that a broken stream does not become a stream of snapshots."""
PATIENCE_S: Final = 15.0
"""For a snapshot, before it is asked for again."""


class AgentListener(Protocol):
    """Receives the liveness of instances. Names are URLs, epochs hexadecimal."""

    def on_heartbeat(self, name: str, epoch: str) -> None:
        """The agent of an instance lives."""

    def on_silent(self, name: str) -> None:
        """The agent of an instance was silent for `VERDICT_S`."""


@dataclass
class AgentCounters:
    """Of one instance, since the router's start."""

    events: int = 0
    gaps: int = 0
    """How often something was missing."""
    snapshots: int = 0
    lag_s: float = 0.0
    """Age of the newest message of events: from the change to its being sent."""
    bad: int = 0
    """Malformed messages."""


class LinkOwner(Protocol):
    """The parts of ``agents.Agents`` that a channel uses."""

    index: Index
    clock: Clock
    rounds: Rounds
    router: str
    listener: AgentListener | None
    verdict_s: float
    """How long an agent may be silent until its channel is opened anew."""
    messages: Signal[[str, FromAgent]]
    loads: Signal[[str, Load]]
    applied: Signal[[str, Events | SnapshotEnd]]
    reached: Signal[[str]]

    def verdict_of(self, registration: Registration) -> float:
        """How long an agent may be silent, in seconds."""

    def socket(self, registration: Registration) -> Any:
        """A connected socket to an agent."""


class Link:
    """The channel to one agent."""

    def __init__(
        self, agents: LinkOwner, name: str, registration: Registration, counters: AgentCounters
    ) -> None:
        self.name = name
        self.registration = registration
        self.counters = counters
        self.alive = False
        """Whether it is, now."""
        self.beat: Beat | None = None
        self._agents = agents
        self._index = agents.index
        self._clock = agents.clock
        self.last_seen_at = self._silent_from = self._clock.monotonic()
        self._is_new = True
        """No message has arrived on the channel since it was opened."""
        self._asked_at = -math.inf
        self._ask_due = True
        self._waiting = False
        """A hello was sent, and neither a resumed ``Welcome`` nor the begin of a snapshot has arrived."""
        self._spoken = AGENT_PROTOCOL
        """The agent's protocol version, from its ``Welcome``; ours until one arrives."""
        self._socket: Any = None
        self.task = agents.rounds.start("agents", self._channel, of_one_peer=True)

    def goes_to(self, registration: Registration) -> bool:
        """Whether the channel leads to the address, key, epoch and role of a registration."""
        mine = self.registration
        return (mine.agent, mine.agent_key, mine.epoch, mine.role) == (
            registration.agent,
            registration.agent_key,
            registration.epoch,
            registration.role,
        )

    def send(self, message: ToAgent) -> bool:
        """Send without waiting. False when the agent is silent, or its send queue is full."""
        if self._socket is None:
            return False
        try:
            data = TO_AGENT.encode(message)
        except InternalError as error:
            # The message is larger than the limit. The instance works without it.
            logger.warning("a message to %s is not sent: %s", self.name, error)
            return False
        sent: asyncio.Future[Any] = self._socket.send(data, zmq.DONTWAIT)
        if not sent.done():
            sent.cancel()
            return False
        if sent.exception() is not None:
            return False
        return self.alive

    async def _channel(self) -> float:
        """One channel, from its making until the agent has been silent on it for too long."""
        self._socket = self._agents.socket(self.registration)
        self._ask_due, self._asked_at, self._waiting, self._is_new = True, -math.inf, False, True
        receiving = asyncio.create_task(self._receive(), name=f"receive from {self.name}")
        try:
            verdict = await self._beats(receiving)
        except Exception:
            # A fault of this router: distrust all received placements and request a new snapshot.
            self._lost_touch()
            self._is_silent()
            raise
        finally:
            receiving.cancel()
            try:
                await asyncio.gather(receiving, return_exceptions=True)
            finally:  # also when the channel is ended while this waits
                self._socket.close(linger=0)
                self._socket = None
        if verdict:
            self._is_silent()
        return 0.0

    def _is_silent(self) -> None:
        self._index.on_heartbeat(self.name, alive=False)
        if self.alive and self._agents.listener is not None:
            self._agents.listener.on_silent(self.name)
        self.alive = False
        self._silent_from = self._clock.monotonic()

    async def _beats(self, receiving: asyncio.Task[None]) -> bool:
        """Ask, ping, and watch the time, until the agent has been silent for too long on this channel.
        Returns whether it has been for the verdict, on however many."""
        made = self._clock.monotonic()
        while True:
            if receiving.done():
                receiving.result()
            now = self._clock.monotonic()
            if self._ask_due and now - self._asked_at >= ASK_PAUSE_S:
                self._ask(now)
            else:
                self.send(Ping(self._agents.router))
            pause = ASK_PAUSE_S if self._ask_due else HEARTBEAT_S / 2
            await self._clock.sleep(pause)
            woken = self._clock.monotonic()
            made = max(made, self.last_seen_at)
            if (late := woken - now - pause) > HEARTBEAT_S / 2:
                # This process stood still: the agent's messages wait unread in our socket.
                made, self._silent_from = made + late, self._silent_from + late
            verdict_s, silent_s = self._agents.verdict_s, woken - self._silent_from + HEARTBEAT_S / 2
            if silent_s > verdict_s and silent_s > self._agents.verdict_of(self.registration):
                return True
            if woken - made + HEARTBEAT_S / 2 > verdict_s:
                return False

    def _ask(self, now: float) -> None:
        replica = self._index.replica(self.name)
        hello = Hello(self._agents.router)
        if replica is not None and replica.trusted:
            hello = Hello(self._agents.router, replica.epoch, replica.next)
        self.send(hello)
        self._ask_due, self._asked_at, self._waiting = False, now, True

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise WireError("a message with the wrong number of frames")
                message = FROM_AGENT.decode(frames[0])
            except WireError as error:
                self.counters.bad += 1
                self._broken(f"sent a malformed message: {error}")
                continue
            self._take(message)
            # Requests go between two messages, however many there are.
            await asyncio.sleep(0)

    def _take(self, message: FromAgent) -> None:
        self.last_seen_at = self._silent_from = self._clock.monotonic()
        if self._is_new:
            self.alive, self._is_new = True, False
            self._index.on_heartbeat(self.name, alive=True)
            self._agents.reached(self.name)
        if self._spoken != AGENT_PROTOCOL and not isinstance(message, Welcome):
            return  # it may mean something else there
        match message:
            case Beat():
                self._beat(message)
            case Welcome():
                if message.protocol != AGENT_PROTOCOL:
                    self._speaks_another(message.protocol)
                else:
                    self._index.began(self.name, message.epoch, message.naming)
                    self._waiting = not message.resumed
                    if not message.resumed:
                        self._lost_touch()
            case Events() | SnapshotBegin() | SnapshotPart() | SnapshotEnd():
                self._placements(message)
            case _:
                self._agents.messages(self.name, message)

    def _placements(self, message: Events | SnapshotBegin | SnapshotPart | SnapshotEnd) -> None:
        outcome = self._index.apply(self.name, message)
        if outcome is Outcome.BROKEN:
            if not self._waiting:
                self._broken("left something out")
            return
        if isinstance(message, SnapshotBegin):
            self._waiting = False
        if isinstance(message, Events):
            self.counters.events += len(message.events)
            self.counters.lag_s = message.age_ms / 1000
            self._agents.applied(self.name, message)
        elif isinstance(message, SnapshotEnd) and outcome is Outcome.APPLIED:
            self.counters.snapshots += 1
            self._agents.applied(self.name, message)

    def _beat(self, beat: Beat) -> None:
        replica = self._index.replica(self.name)
        if replica is not None and not replica.trusted:
            if self._clock.monotonic() - self._asked_at > PATIENCE_S:
                self._broken("does not answer")
        elif replica is not None:
            if replica.epoch != beat.epoch:
                self._broken("is in another epoch")
            elif replica.next < beat.next:
                # The stream is ordered: an event sent before this beat has either arrived already or is lost.
                self._lost_touch()
                self._broken("left something out")
        if self._agents.listener is not None:
            self._agents.listener.on_heartbeat(self.name, beat.epoch.hex())
        self.beat = beat
        self._agents.loads(self.name, beat.load)

    def _lost_touch(self) -> None:
        self._index.lost_touch(self.name)

    def _speaks_another(self, protocol: int) -> None:
        if self._spoken != protocol:
            self._spoken = protocol
            logger.warning(
                "the agent of %s and this router do not understand each other: protocol %s",
                self.name,
                other_release(protocol, AGENT_PROTOCOL),
            )

    def _broken(self, why: str) -> None:
        if self._ask_due:
            return
        self.counters.gaps += 1
        logger.info("the agent of %s %s; asking for a snapshot", self.name, why)
        self._ask_due = True

    def __repr__(self) -> str:
        return f"Link({self.name}, {'alive' if self.alive else 'silent'}, {self.counters})"
