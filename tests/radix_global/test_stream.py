"""Events on their way: numbers, sizes of messages, state that is kept, and the table of a copy's states."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import pytest

from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import (
    AGENT_PROTOCOL,
    BATCH_BYTES,
    BATCH_EVENTS,
    FROM_AGENT,
    Cleared,
    Events,
    FromAgent,
    Hello,
    Moved,
    NamesStored,
    Removed,
    SnapshotBegin,
    SnapshotEnd,
    SnapshotPart,
    Split,
    Stored,
    Welcome,
)
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.radix_global.sync.events import PlacementLog
from sglang_ext.radix_global.sync.replica import FREED_NAMES, Outcome, Replica, State
from sglang_ext.radix_global.sync.stream import EventStream, Sends
from sglang_ext.tiers import Tier

EPOCH = b"e" * 16
BLOCK = 2


def decoded(sends: Sends) -> list[FromAgent]:
    return [FROM_AGENT.decode(data) for _, data in sends]


def blocks(*words: int) -> bytes:
    return encode_tokens([word for word in words for _ in range(BLOCK)])


@pytest.fixture
def stream() -> EventStream:
    return EventStream("i", EPOCH, BLOCK, remember_bytes=2000)


def test_a_reader_goes_on_where_it_was(stream: EventStream) -> None:
    stream.hello(b"r", Hello("r"))
    for run in range(1, 10):
        stream.publish([Removed(run), Removed(100 + run)])
    sends, number = stream.hello(b"again", Hello("r", EPOCH, 11))
    assert number is None
    welcome, *missed = decoded(sends)
    assert isinstance(welcome, Welcome)
    assert welcome.resumed
    assert [message.first for message in missed if isinstance(message, Events)] == [10, 12, 14, 16]


@pytest.mark.parametrize(
    "hello",
    [
        Hello("r"),
        Hello("r", EPOCH, 99),
        Hello("r", b"f" * 16, 3),
        Hello("r", EPOCH, 0),
    ],
    ids=["nothing", "the future", "another epoch", "too long ago"],
)
def test_any_other_reader_receives_everything(stream: EventStream, hello: Hello) -> None:
    for run in range(500):
        stream.publish([Removed(run)])
    sends, number = stream.hello(b"r", hello)
    assert number is not None
    (welcome,) = decoded(sends)
    assert isinstance(welcome, Welcome)
    assert not welcome.resumed


def test_no_reader_goes_on_over_dropped_events(stream: EventStream) -> None:
    stream.publish([Removed(1)])
    stream.left_out(3)
    stream.publish([Removed(2)])
    assert stream.next == 5
    assert stream.hello(b"r", Hello("r", EPOCH, 1))[1] is not None
    assert stream.hello(b"r", Hello("r", EPOCH, 4))[1] is None


def test_a_reader_of_another_protocol_receives_only_the_version(stream: EventStream) -> None:
    sends, snapshot = stream.hello(b"r", Hello("r", protocol=AGENT_PROTOCOL + 1))
    (welcome,) = decoded(sends)
    assert isinstance(welcome, Welcome)
    assert (welcome.protocol, welcome.resumed, snapshot) == (AGENT_PROTOCOL, False, None)
    assert not stream.readers
    assert stream.publish([Removed(1)]) == []


def test_messages_are_cut_by_events_and_by_bytes(stream: EventStream) -> None:
    stream.hello(b"r", Hello("r"))
    many = decoded(stream.publish([Removed(run) for run in range(2 * BATCH_EVENTS + 1)]))
    assert [len(m.events) for m in many if isinstance(m, Events)] == [BATCH_EVENTS, BATCH_EVENTS, 1]
    large = [Stored(run, 0, bytes(BATCH_BYTES // 2), Tier.HBM.bit) for run in range(5)]
    sizes = [len(m.events) for m in decoded(stream.publish(large)) if isinstance(m, Events)]
    assert sizes == [2, 2, 1]


def test_an_unwanted_snapshot_is_not_sent(stream: EventStream) -> None:
    _, number = stream.hello(b"r", Hello("r"))
    assert number is not None
    assert stream.begin(number)
    assert stream.goodbye(b"r") == [number]
    assert stream.part(number, [Removed(1)]) == stream.end(number) == []


class Reader:
    """A copy, and messages for it by hand."""

    def __init__(self) -> None:
        self.replica = Replica(RadixTree(BLOCK), "i")
        self.replica.began(EPOCH, None)

    def live(self) -> Reader:
        assert self.replica.apply(SnapshotBegin(EPOCH, 1, 0)) is Outcome.APPLIED
        assert self.replica.apply(SnapshotEnd(EPOCH, 1, 0, 0)) is Outcome.APPLIED
        assert self.replica.state is State.LIVE
        return self

    def events(self, first: int, *events: object) -> Outcome:
        outcome = self.replica.apply(Events(EPOCH, first, events))  # type: ignore[arg-type]
        self.replica.check()
        return outcome


def test_the_table_of_states() -> None:
    reader = Reader()
    replica = reader.replica
    assert replica.state is State.BLANK
    assert reader.events(0, Removed(1)) is Outcome.BROKEN
    reader.live()
    assert reader.events(0, Stored(1, 0, blocks(1, 2), Tier.HBM.bit)) is Outcome.APPLIED
    assert reader.events(0, Stored(1, 0, blocks(1, 2), Tier.HBM.bit)) is Outcome.IGNORED
    assert reader.events(2, Removed(1)) is Outcome.BROKEN
    assert replica.state is State.STALE
    assert replica.blocks == 2, "known blocks stay until a snapshot comes"
    assert replica.apply(SnapshotBegin(EPOCH, 1, 5)) is Outcome.IGNORED
    assert replica.apply(SnapshotBegin(EPOCH, 2, 5)) is Outcome.APPLIED
    assert replica.blocks == 0
    assert replica.state is State.FILLING
    part = SnapshotPart(EPOCH, 2, 1, 5, (Stored(7, 0, blocks(3), Tier.HBM.bit),))
    assert replica.apply(part) is Outcome.BROKEN, "part 0 is missing"
    assert replica.state is State.STALE
    assert replica.apply(Events(b"f" * 16, 0, (Removed(1),))) is Outcome.BROKEN
    assert replica.state is State.BLANK
    assert replica.apply(Events(EPOCH, 0, (Removed(1),))) is Outcome.IGNORED, "that epoch is over"


@pytest.mark.parametrize(
    "event",
    [
        Removed(9),
        Moved(9, 1),
        Moved(1, 0),
        Split(9, 10, 1),
        Split(1, 10, 2),
        Stored(9, 8, blocks(1), Tier.HBM.bit),
        Stored(9, 1, b"123", Tier.HBM.bit),
        Stored(9, 1, b"", Tier.HBM.bit),
        Stored(9, 0, blocks(1, 2, 3), Tier.HBM.bit),
    ],
    ids=str,
)
def test_what_does_not_follow_is_not_believed(event: object) -> None:
    reader = Reader().live()
    assert reader.events(0, Stored(1, 0, blocks(1, 2), Tier.HBM.bit)) is Outcome.APPLIED
    before = reader.replica.contents()
    assert reader.events(1, event) is Outcome.BROKEN
    assert not reader.replica.trusted
    assert reader.replica.contents() == before


def test_what_was_given_up_passes_by_and_nothing_continues_it() -> None:
    reader = Reader().live()
    reader.events(0, Stored(1, 0, blocks(1, 2, 3), Tier.HBM.bit), Stored(2, 1, blocks(4), Tier.HBM.bit))
    assert sum(gone.blocks for gone in reader.replica.give_up(2)) == 2
    assert reader.replica.partial
    assert reader.events(2, Moved(2, 3), Stored(3, 1, blocks(5), Tier.HBM.bit), Removed(2)) is Outcome.APPLIED
    assert len(reader.replica.contents()) == 2
    assert reader.events(5, Split(1, 4, 1), Stored(5, 4, blocks(6), Tier.HBM.bit)) is Outcome.APPLIED
    assert {key[-4 * BLOCK :] for _, key in reader.replica.contents()} == {blocks(1), blocks(2), blocks(6)}
    assert reader.events(7, Cleared("w")) is Outcome.APPLIED
    assert reader.replica.contents() == {}


def test_names_of_no_use_are_freed_some_with_each_message() -> None:
    reader = Reader().live()
    tracemalloc.start()
    try:
        reader.events(0, NamesStored(Tier.DISK.level, random.Random(5).randbytes(4 * FREED_NAMES * 16)))
        held = [tracemalloc.get_traced_memory()[0]]
        reader.replica.apply(SnapshotBegin(EPOCH, 2, 1))
        assert reader.replica.names == 0
        for number in range(1, 7):
            reader.replica.apply(Events(EPOCH, number, (Removed(9),)))
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    least = FREED_NAMES * 32
    """Bytes of so many names at least."""
    freed = [before - after for before, after in pairwise(held)]
    assert min(freed[:4]) > least
    assert abs(freed[5]) < least, "all had gone"


def test_a_walk_is_cut_into_parts_with_parents_first() -> None:
    tree = RadixTree(BLOCK)
    holder = Holder.of("i", 1, Tier.HBM)
    log = PlacementLog(tree, {holder: Tier.HBM.bit}, lambda namespace: (None, None))
    for word in range(20):
        tree.insert(None, blocks(1, 2, 10 + word, 50 + word), holder)
    log.take()
    walk = log.walk()
    parts = []
    while not walk.over:
        parts.append(walk.part(4, 10_000))
    assert max(map(len, parts)) <= 4
    told = [event for part in parts for event in part]
    assert len(told) == tree.node_count
    known = {0}
    for event in told:
        assert event.parent in known
        known.add(event.run)
    assert sum(len(e.tokens) for e in log.walk().part(1000, 1)) <= len(blocks(1, 2)), "bounded by bytes too"
