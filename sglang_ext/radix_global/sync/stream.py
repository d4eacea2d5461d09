"""An instance's events on their way to its readers: numbered, cut into messages, remembered for a while.

A reader that lost its connection for a moment resumes where it was if the messages it missed are still
remembered; any other reader is sent a snapshot. The owner of the tree makes the snapshot and passes it to
`begin`, `part` and `end`, in the order in which it was made among the events.

Pure: takes messages in, returns the bytes to send, each with its reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.protocol.agent import (
    AGENT_PROTOCOL,
    BATCH_BYTES,
    BATCH_EVENTS,
    FROM_AGENT,
    Events,
    Hello,
    Moved,
    NamesRemoved,
    NamesStored,
    Naming,
    PlacementEvent,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotPart,
    Stored,
    Welcome,
)

Reader = bytes
"""Identity of a reader's connection."""
Sends = list[tuple[Reader, bytes]]


@dataclass(slots=True)
class _Snapshot:
    reader: Reader
    parts: int = 0


class EventStream:
    """See the module's docstring.

    Args:
        instance, epoch, block_size, naming: of the instance, for `Welcome`.
        remember_bytes: memory for messages that a reader may have missed.
    """

    def __init__(
        self,
        instance: str,
        epoch: bytes,
        block_size: int,
        naming: Naming | None = None,
        *,
        remember_bytes: int = 4 << 20,
    ) -> None:
        self.epoch = epoch
        self.next = 0
        """Number of the next event."""
        self.naming = naming
        self._instance = instance
        self._block_size = block_size
        self._remember_bytes = remember_bytes
        self._past: deque[tuple[int, int, bytes]] = deque()
        """(first number, count, message), consecutive up to ``next``."""
        self._past_bytes = 0
        self._readers: set[Reader] = set()
        self._snapshots: dict[int, _Snapshot] = {}
        self._number = 0

    @property
    def readers(self) -> frozenset[Reader]:
        return frozenset(self._readers)

    # -- readers --------------------------------------------------------------------------------

    def hello(self, reader: Reader, message: Hello) -> tuple[Sends, int | None]:
        """Answer a reader's `Hello`: messages to send, and the number of the snapshot it needs, if any."""
        self.goodbye(reader)
        spoken = message.protocol == AGENT_PROTOCOL
        missed = self._missed(message) if spoken else None
        welcome = Welcome(
            self._instance, self.epoch, self._block_size, resumed=missed is not None, naming=self.naming
        )
        sends = [(reader, FROM_AGENT.encode(welcome))]
        if not spoken:
            # The `Welcome` names the protocol spoken here; no message that the reader would misread follows.
            return sends, None
        self._readers.add(reader)
        if missed is not None:
            return sends + [(reader, data) for data in missed], None
        self._number += 1
        self._snapshots[self._number] = _Snapshot(reader)
        return sends, self._number

    def goodbye(self, reader: Reader) -> list[int]:
        """A reader is gone. Returns the numbers of its unfinished snapshots, which are dropped."""
        self._readers.discard(reader)
        unwanted = self.snapshots_of(reader)
        for number in unwanted:
            del self._snapshots[number]
        return unwanted

    def wants(self, number: int) -> bool:
        """Whether a reader still waits for the rest of a snapshot."""
        return number in self._snapshots

    def reader_of(self, number: int) -> Reader | None:
        """The reader that waits for a snapshot."""
        snapshot = self._snapshots.get(number)
        return None if snapshot is None else snapshot.reader

    def snapshots_of(self, reader: Reader) -> list[int]:
        """Snapshots for which a reader waits."""
        return [number for number, snapshot in self._snapshots.items() if snapshot.reader == reader]

    def _missed(self, message: Hello) -> list[bytes] | None:
        """Messages that the reader lacks; ``None`` when they are no longer remembered."""
        if message.epoch != self.epoch or message.next > self.next:
            return None
        if message.next == self.next:
            return []
        if not self._past or self._past[0][0] > message.next:
            return None
        return [data for first, count, data in self._past if first + count > message.next]

    # -- events ---------------------------------------------------------------------------------

    def publish(self, events: Sequence[PlacementEvent], age_ms: float = 0.0) -> Sends:
        """Number events and send them to every reader."""
        sends: Sends = []
        for batch in _batches(events):
            data = FROM_AGENT.encode(Events(self.epoch, self.next, tuple(batch), age_ms))
            self._past.append((self.next, len(batch), data))
            self._past_bytes += len(data)
            self.next += len(batch)
            sends += [(reader, data) for reader in self._readers]
        while self._past_bytes > self._remember_bytes:
            self._past_bytes -= len(self._past.popleft()[2])
        return sends

    def left_out(self, events: int) -> None:
        """So many events were dropped: every reader will see the gap in the numbers."""
        self.next += events
        self._past.clear()
        self._past_bytes = 0

    # -- snapshots ------------------------------------------------------------------------------

    def begin(self, number: int) -> Sends:
        """A snapshot begins here in the stream."""
        snapshot = self._snapshots.get(number)
        if snapshot is None:
            return []
        return [(snapshot.reader, FROM_AGENT.encode(SnapshotBegin(self.epoch, number, self.next)))]

    def part(self, number: int, events: Sequence[PlacementEvent]) -> Sends:
        """A part of a snapshot, as of this place in the stream."""
        snapshot = self._snapshots.get(number)
        if snapshot is None:
            return []
        sends: Sends = []
        for batch in _batches(events):
            part = SnapshotPart(self.epoch, number, snapshot.parts, self.next, tuple(batch))
            snapshot.parts += 1
            sends.append((snapshot.reader, FROM_AGENT.encode(part)))
        return sends

    def end(self, number: int, *, partial: bool = False) -> Sends:
        """A snapshot is complete."""
        snapshot = self._snapshots.pop(number, None)
        if snapshot is None:
            return []
        end = SnapshotEnd(self.epoch, number, snapshot.parts, self.next, partial)
        return [(snapshot.reader, FROM_AGENT.encode(end))]

    def __repr__(self) -> str:
        return (
            f"EventStream(next={self.next}, readers={len(self._readers)}, "
            f"snapshots={len(self._snapshots)}, remembered={self._past_bytes} bytes)"
        )


def _batches(events: Sequence[PlacementEvent]) -> Iterator[Sequence[PlacementEvent]]:
    """Cut events into batches of one message each."""
    start, size = 0, 0
    if 0 < len(events) < BATCH_EVENTS:
        for event in events:
            size += 16 if type(event) is Moved else _bytes_of(event)
        if size < BATCH_BYTES:  # as almost always
            yield events
            return
        size = 0
    for index, event in enumerate(events):
        size += _bytes_of(event)
        if size >= BATCH_BYTES or index + 1 - start >= BATCH_EVENTS:
            yield events[start : index + 1]
            start, size = index + 1, 0
    if start < len(events):
        yield events[start:]


def _bytes_of(event: PlacementEvent) -> int:
    if isinstance(event, Stored):
        return 64 + len(event.tokens)
    if isinstance(event, NamesStored | NamesRemoved):
        return 16 + len(event.names)
    return 16
