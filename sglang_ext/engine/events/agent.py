"""The agent of an instance: a thread of rank 0 that sends routers the contents of the tiers, and heartbeats.

It takes the entries that the scheduler's thread leaves in a queue (`engine/events/events.py`), numbers and
encodes them, and sends them to every router that sent `Hello`. The scheduler never waits for anything here.

A snapshot begins with the tree, which the scheduler walks, and ends with the tiers below memory, whose
indexes this thread lists by itself.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from sglang_ext.engine.events.agent_socket import AgentSocket
from sglang_ext.engine.events.events import Began, Changed, Ended, Entry, LeftOut, Part, PlacementFeed
from sglang_ext.protocol.agent import (
    FROM_AGENT,
    Beat,
    Cleared,
    Fill,
    Hello,
    Load,
    NamesStored,
    Naming,
    Ping,
    ToAgent,
)
from sglang_ext.protocol.cluster import HEARTBEAT_S, VERDICT_S
from sglang_ext.radix_global.sync.runs import packed, with_weights
from sglang_ext.radix_global.sync.stream import EventStream, Reader, Sends
from sglang_ext.signals import Signal
from sglang_ext.tiers import Tier

logger = logging.getLogger(__name__)

BATCH_S: Final = 0.01
"""Pause between two messages of events, in which more of them come together."""
OUTBOX_RETRY_S: Final = 0.01
READER_GONE_S: Final = 3 * VERDICT_S
"""The agent sends nothing more to a router that has been silent for so long."""
SNAPSHOT_NAMES: Final = 400_000
"""Limit on a tier's block names in a snapshot; with more names in the tier, the snapshot is partial."""
NAMES_CHUNK: Final = 1000
"""Names read from a tier's index at once: about a millisecond."""
RESTART_S: Final = 1.0
FORGET_S: Final = 600.0
"""A router's entry is dropped after so much silence: each router has a new name after a restart."""
FORMER_CHANNELS: Final = 64
"""Limit on remembered channels of routers that have another one now; messages that still arrive on them are
dropped.
"""


@runtime_checkable
class ListsNames(Protocol):
    """The methods of a tier below memory that the agent uses."""

    def names_after(self, place: bytes, limit: int) -> tuple[list[bytes], bytes | None]:
        """Up to ``limit`` names, and the place to go on from; ``None`` at the end."""

    def watch(self, watch: Callable[[Sequence[bytes], Sequence[bytes]], None]) -> None:
        """Call ``watch`` with the names that come, and those that go, from now on."""


class Gauges(Protocol):
    """An instance's load and fill levels, sent with every heartbeat. Called in the agent's thread."""

    def load(self) -> Load: ...

    def fills(self) -> tuple[Fill, ...]: ...


@dataclass(frozen=True)
class AgentFacts:
    """The identity of an instance. naming: ``None`` without tiers below memory."""

    instance: str
    epoch: bytes
    block_size: int
    naming: Naming | None = None


@dataclass
class _Listing:
    """A snapshot whose walk over the tree is done, and that goes on with the tiers below memory."""

    number: int
    left: deque[tuple[Tier, ListsNames]]
    """Tiers that are not listed to the end; the first is being listed."""
    place: bytes = b""
    sent: int = 0
    partial: bool = False

    def next_names(self) -> list[NamesStored]:
        """Some more names of the tier that is being listed."""
        tier, index = self.left[0]
        names, place = index.names_after(self.place, NAMES_CHUNK)
        self.sent += len(names)
        if place is not None and self.sent < SNAPSHOT_NAMES:
            self.place = place
        else:
            self.partial = self.partial or place is not None
            self.left.popleft()
            self.place, self.sent = b"", 0
        return [NamesStored(tier.level, data) for data in packed(names)]


class Agent:
    """See the module's docstring. Started by `start`, ended by `close`.

    Args:
        socket: taken over.
        named: the tiers below memory that can list their blocks.
        others: receives, in the agent's thread, routers' messages that do not concern the index.
        now: seconds, monotonic.
    """

    def __init__(
        self,
        facts: AgentFacts,
        feed: PlacementFeed,
        gauges: Gauges,
        socket: AgentSocket,
        *,
        named: Mapping[Tier, ListsNames] | None = None,
        others: Callable[[Reader, ToAgent], None] = lambda reader, message: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.facts = facts
        self.socket = socket
        self.stream = EventStream(facts.instance, facts.epoch, facts.block_size, facts.naming)
        self._feed = feed
        self._gauges = gauges
        self._named = named or {}
        self._others = others
        self._now = now
        self._names: dict[Reader, str] = {}
        self._former: deque[Reader] = deque(maxlen=FORMER_CHANNELS)
        self._heard: dict[str, float] = {}
        """Router -> when its last message came. Read by other threads. Kept for ``FORGET_S``."""
        self.rekeyed: Signal[[str]] = Signal()
        """Emitted with the new public key once the agent listens by it; in the agent's thread."""
        self._listings: list[_Listing] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._main, name="kv-agent", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def close(self) -> None:
        """End the thread and every connection."""
        self._stopping.set()
        if self._thread.is_alive():
            self._feed.queue.wake()
            self._thread.join()
        self.socket.close()

    def silent_s(self, router: str) -> float:
        """Seconds since a router's last message; from any thread."""
        at = self._heard.get(router)
        return float("inf") if at is None else self._now() - at

    # -- the thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        while not self._stopping.is_set():
            try:
                self._serve()
            except Exception:
                # The server must not die of this failure, and the failure must not stay hidden: routers get
                # no heartbeat, count the instance as lost, and get a new snapshot when the agent is up again.
                logger.exception("the agent of %s failed; it starts again", self.facts.instance)
                for reader in self.stream.readers:
                    self._drop(reader)
                self.stream.left_out(1)
                self._stopping.wait(RESTART_S)

    def _serve(self) -> None:
        beat = sent_at = self._now()
        while not self._stopping.is_set():
            now = self._now()
            if now >= beat:
                beat = now + HEARTBEAT_S
                self._follow_key()
                self._beat(now)
            ready = self.socket.wait(min(beat, self._next_work(now)) - now, self._feed.queue.wakeup)
            for reader, message in self.socket.receive():
                if reader in self._former:
                    self.socket.drop(reader)
                    continue
                if isinstance(message, Hello | Ping):
                    self._names[reader] = message.router
                    self._heard[message.router] = self._now()
                else:
                    self._others(reader, message)
                if isinstance(message, Hello):
                    self._hello(reader, message)
            for reader, answer in self._feed.queue.take_posted():
                self._send([(reader, FROM_AGENT.encode(answer))])
            if ready:
                self._stopping.wait(sent_at + BATCH_S - self._now())
                sent_at = self._now()
                self._send_entries(self._feed.queue.take(), sent_at)
            self._list_names()
            self._flush()

    def _follow_key(self) -> None:
        if self.socket.follow_key():
            for reader in list(self._names):
                self._drop(reader)
            self.rekeyed(self.socket.public_key)

    def _next_work(self, now: float) -> float:
        """When to look for work again that no descriptor signals."""
        if any(not self._is_full(listing.number) for listing in self._listings):
            return now
        return now + (OUTBOX_RETRY_S if self.socket.waiting else HEARTBEAT_S)

    # -- routers --------------------------------------------------------------------------------

    def _hello(self, reader: Reader, message: Hello) -> None:
        # A router that made its channel anew has given up the former one: TCP may deliver messages of the
        # former channel late, after the messages that took them back, and keeps it until it detects the end.
        for former in [each for each, name in self._names.items() if name == message.router]:
            if former != reader:
                self._drop(former)
                self._former.append(former)
        self._unwanted(self.stream.goodbye(reader))
        self.socket.forget_unsent(reader)
        # Entries in the queue come before all messages that this router will get.
        self._send_entries(self._feed.queue.take(), self._now())
        sends, number = self.stream.hello(reader, message)
        self._send(sends)
        self._send([(reader, self._beat_message())])
        if number is not None and self.stream.wants(number):
            self._feed.snapshot(number)

    def _drop(self, reader: Reader) -> None:
        self._unwanted(self.stream.goodbye(reader))
        self.socket.drop(reader)
        self._names.pop(reader, None)

    def _unwanted(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._feed.no_snapshot(number)
            self._feed.hold_up(number, full=False)
            self._listings = [listing for listing in self._listings if listing.number != number]

    def _send(self, sends: Sends) -> None:
        for reader, data in sends:
            if not self.socket.send(reader, data):
                self._drop(reader)

    def _flush(self) -> None:
        for reader in self.socket.flush():
            self._drop(reader)
        for reader in self.stream.readers:
            if not self.socket.is_full(reader):
                for number in self.stream.snapshots_of(reader):
                    self._feed.hold_up(number, full=False)

    def _is_full(self, number: int) -> bool:
        reader = self.stream.reader_of(number)
        return reader is not None and self.socket.is_full(reader)

    # -- events to routers ----------------------------------------------------------------------

    def _send_entries(self, entries: Iterable[Entry], now: float) -> None:
        changed: list[Changed] = []
        for entry in entries:
            if isinstance(entry, Changed):
                changed.append(entry)
                continue
            self._publish(changed, now)
            changed = []
            if isinstance(entry, LeftOut):
                self.stream.left_out(entry.events)
            elif isinstance(entry, Began):
                self._send(self.stream.begin(entry.number))
            elif isinstance(entry, Part):
                self._send(self.stream.part(entry.number, entry.events))
                self._feed.hold_up(entry.number, full=self._is_full(entry.number))
            elif isinstance(entry, Ended) and self.stream.wants(entry.number):
                self._listings.append(_Listing(entry.number, deque(self._named.items())))
        self._publish(changed, now)

    def _publish(self, changed: list[Changed], now: float) -> None:
        if not changed:
            return
        events = [event for each in changed for event in each.events]
        naming = self.stream.naming
        for event in events:
            if isinstance(event, Cleared) and naming is not None:
                self.stream.naming = with_weights(naming, event.weights)
        self._send(self.stream.publish(events, max(0.0, now - changed[0].at) * 1000))

    def _list_names(self) -> None:
        """Go on with snapshots that have come to the tiers below memory, a little."""
        for listing in list(self._listings):
            if self._is_full(listing.number):
                continue
            if listing.left:
                self._send(self.stream.part(listing.number, listing.next_names()))
            if listing.left:
                continue
            self._send(self.stream.end(listing.number, partial=listing.partial))
            if listing in self._listings:
                self._listings.remove(listing)

    def _beat(self, now: float) -> None:
        """Send heartbeats, and drop the routers that are silent."""
        for router in [name for name, at in self._heard.items() if now - at > FORGET_S]:
            del self._heard[router]
        for reader in self.stream.readers:
            if self.silent_s(self._names.get(reader, "")) > READER_GONE_S:
                self._drop(reader)
        # Events that were dropped show in the number of the next one.
        self._send_entries(self._feed.queue.take(), now)
        beat = self._beat_message()
        self._send([(reader, beat) for reader in self.stream.readers])

    def _beat_message(self) -> bytes:
        return FROM_AGENT.encode(
            Beat(self.facts.epoch, self.stream.next, self._gauges.load(), self._gauges.fills())
        )

    def __repr__(self) -> str:
        return f"Agent({self.facts.instance}, {self.stream!r}, {self.socket!r})"
