"""The agents of simulated instances, and the router's channels to them: messages that take their time.

Placement events go through the stream that agents write and the replica that the router reads, encoded as on
the wire. So the router's index lags behind, and heals a gap with a snapshot, as a real one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from sglang_ext.engine.peers.fetch_results import FetchResult
from sglang_ext.engine.prefetch.hbm_prefetch import PrefetchResult
from sglang_ext.protocol.agent import (
    FROM_AGENT,
    MAX_EVENTS,
    Advised,
    Beat,
    Events,
    Expecting,
    Export,
    Fetch,
    Fetched,
    FetchedSpan,
    FromAgent,
    Hello,
    Load,
    NamesStored,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotPart,
    ToAgent,
    Welcome,
)
from sglang_ext.protocol.cluster import HEARTBEAT_S, Registration
from sglang_ext.radix_global.sync.replica import Outcome
from sglang_ext.radix_global.sync.runs import packed
from sglang_ext.radix_global.sync.stream import EventStream
from sglang_ext.router.fleet.channels import AgentChannels
from sglang_ext.router.index.index import Index
from sglang_ext.router.policies.base import Role
from sglang_ext.signals import Signal
from sglang_ext.simulator.instance import Instance
from sglang_ext.simulator.settings import BLOCK_TOKENS
from sglang_ext.tiers import Tier

READER: Final = b"router"
REMEMBERED_BYTES: Final = 64 << 10
"""Messages that an agent keeps for a reader that missed some: no channel is lost here but by a death."""
PART_RUNS: Final = 256


class Agent:
    """An instance's agent.

    Args:
        send: takes messages to the router, encoded, in their order.
    """

    def __init__(self, epoch: bytes, send: Callable[[bytes], None]) -> None:
        self._send = send
        self.epoch = epoch
        self.instance: Instance | None = None
        self.stream: EventStream | None = None
        self.events = 0
        """Placement events that were published, since the start."""

    def meet(self, instance: Instance) -> None:
        """The instance is there."""
        self.instance = instance
        drive = instance.engine.drive
        self.stream = EventStream(
            instance.name,
            self.epoch,
            BLOCK_TOKENS,
            None if drive is None else drive.naming,
            remember_bytes=REMEMBERED_BYTES,
        )

    def published(self) -> None:
        """After each turn of the scheduler's loop."""
        assert self.instance is not None
        assert self.stream is not None
        if events := self.instance.engine.take_events():
            self.events += len(events)
            for _, data in self.stream.publish(events):
                self._send(data)

    def hello(self, message: Hello) -> None:
        """The router asks for all events, or for those that it has missed."""
        assert self.instance is not None
        assert self.stream is not None
        sends, number = self.stream.hello(READER, message)
        if number is not None:
            sends += self.stream.begin(number)
            walk = self.instance.engine.log.walk()
            while not walk.over:
                sends += self.stream.part(number, walk.part(PART_RUNS, 1 << 20))
            self.instance.engine.log.ended(walk)
            if (drive := self.instance.engine.drive) is not None:
                named = [NamesStored(Tier.DISK.level, names) for names in packed(drive.tier.names())]
                for start in range(0, len(named), MAX_EVENTS):
                    sends += self.stream.part(number, named[start : start + MAX_EVENTS])
            sends += self.stream.end(number)
        for _, data in sends:
            self._send(data)

    def command(self, message: ToAgent, now: float) -> None:
        """A message of the router has come. The scheduler takes it between two passes."""
        assert self.instance is not None
        if isinstance(message, Hello):
            self.hello(message)
            return
        if self.instance.computing and not self._is_timed(message):
            self.instance.after_pass(lambda now: self.command(message, now))
            return
        for planner in self.instance.engine.planners:
            if planner.takes_command(message, now):
                break
        if isinstance(message, Fetch):
            self._send(FROM_AGENT.encode(Expecting(self.epoch, message.id)))
            self.instance.wake_in(message.wait_s)
        self.instance.wake()

    def _is_timed(self, message: ToAgent) -> bool:
        """Whether a recording has the time of this fetch. The wait for passes is part of it."""
        assert self.instance is not None
        wires = self.instance.engine.wires
        if wires is None:
            return False
        if isinstance(message, Export):
            return wires.has_time(message.export)
        return isinstance(message, Fetch) and any(
            wires.has_time(each.source.export) for each in message.spans
        )

    def on_hint(self, result: PrefetchResult) -> None:
        """A hint's prefetch has ended."""
        self._send(
            FROM_AGENT.encode(Advised(self.epoch, result.id, result.end.value, result.tokens, result.brought))
        )

    def on_fetch(self, result: FetchResult) -> None:
        """A fetch has ended."""
        spans = tuple(FetchedSpan(each.how.value, each.tokens, each.seconds) for each in result.spans)
        self._send(FROM_AGENT.encode(Fetched(self.epoch, result.id, result.ahead, result.how.value, spans)))

    def beat(self) -> None:
        """Every second."""
        assert self.instance is not None
        assert self.stream is not None
        engine = self.instance.engine
        self._send(
            FROM_AGENT.encode(Beat(self.epoch, self.stream.next, self.instance.load(), engine.fills()))
        )


class Channel:
    """The router's channel to one agent."""

    __slots__ = ("agent", "alive", "beat", "beats", "registration")

    def __init__(self, registration: Registration) -> None:
        self.registration = registration
        self.agent: Agent | None = None
        self.alive = False
        self.beat: Beat | None = None
        """The last heartbeat that has come."""
        self.beats: asyncio.TimerHandle | None = None


class Channels(AgentChannels):
    """All channels, in the place of `router.cluster.agents.Agents`.

    Args:
        lag_s: that a message takes, in either direction.
    """

    def __init__(self, index: Index, loop: asyncio.AbstractEventLoop, lag_s: float) -> None:
        self._index, self._loop, self._lag_s = index, loop, lag_s
        self.messages: Signal[[str, FromAgent]] = Signal()
        self.loads: Signal[[str, Load]] = Signal()
        self._channels: dict[str, Channel] = {}
        self.events_applied = 0
        """Placement events that the index was given."""

    def registration(self, name: str) -> Registration | None:
        channel = self._channels.get(name)
        return channel.registration if channel is not None and channel.alive else None

    def beat(self, name: str) -> Beat | None:
        """See ``SpillChannels``."""
        channel = self._channels.get(name)
        return channel.beat if channel is not None and channel.alive else None

    def send(self, name: str, message: ToAgent) -> bool:
        channel = self._channels.get(name)
        if channel is None or channel.agent is None or not channel.alive:
            return False
        agent = channel.agent
        self._loop.call_later(self._lag_s, self._deliver, channel, agent, message)
        return True

    def _deliver(self, channel: Channel, agent: Agent, message: ToAgent) -> None:
        if channel.agent is agent:
            agent.command(message, self._loop.time())

    # -- instances ----------------------------------------------------------------------------------

    def connect(
        self,
        name: str,
        registration: Registration,
        role: Role,
        agent: Agent,
        offset_s: float,
        reports: Sequence[float] | None = None,
    ) -> None:
        """Follow an instance from now on.

        Args:
            offset_s: until its first heartbeat.
            reports: when its heartbeats are taken, in the place of every second.
        """
        channel = self._channels[name] = Channel(registration)
        channel.agent = agent
        self._index.attach(name, role)
        self._index.on_heartbeat(name, alive=True)
        channel.alive = True
        agent.hello(Hello(READER.decode()))
        if reports is None:
            channel.beats = self._loop.call_later(offset_s, self._beat, channel, agent)
            return
        for at in reports:
            # A message is under way for this long.
            self._loop.call_at(max(self._loop.time(), at - self._lag_s), self._report, channel, agent)

    def disconnect(self, name: str) -> None:
        """An instance is gone."""
        channel = self._channels.pop(name, None)
        if channel is not None:
            channel.alive, channel.agent = False, None
            if channel.beats is not None:
                channel.beats.cancel()
            self._index.detach(name)

    def stop(self) -> None:
        """Follow no instance any more."""
        for name in list(self._channels):
            self.disconnect(name)

    def _beat(self, channel: Channel, agent: Agent) -> None:
        self._report(channel, agent)
        channel.beats = self._loop.call_later(HEARTBEAT_S, self._beat, channel, agent)

    def _report(self, channel: Channel, agent: Agent) -> None:
        if channel.agent is agent:
            agent.beat()

    def sender(self, name: str) -> tuple[Callable[[bytes], None], Callable[[Agent], None]]:
        """Two functions: the first takes an agent's messages to here, the second names the agent to it."""
        named: list[Agent] = []

        def send(data: bytes) -> None:
            channel = self._channels.get(name)
            if channel is not None and named and channel.agent is named[0]:
                self._loop.call_later(self._lag_s, self._arrived, name, channel, named[0], data)

        return send, named.append

    def _arrived(self, name: str, channel: Channel, agent: Agent, data: bytes) -> None:
        if channel.agent is agent:
            self._take(name, channel, FROM_AGENT.decode(data))

    def _take(self, name: str, channel: Channel, message: FromAgent) -> None:
        """As `agent_link.Link` takes messages."""
        match message:
            case Beat():
                channel.beat = message
                self.loads(name, message.load)
            case Welcome():
                self._index.began(name, message.epoch, message.naming)
            case Events() | SnapshotBegin() | SnapshotPart() | SnapshotEnd():
                if isinstance(message, Events):
                    self.events_applied += len(message.events)
                if self._index.apply(name, message) is Outcome.BROKEN:
                    self._index.lost_touch(name)
                    self.send(name, Hello(READER.decode()))
            case _:
                self.messages(name, message)
