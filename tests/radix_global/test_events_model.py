"""Placement events through a channel that loses, repeats and reorders them, between trees that change.

The truth is the state that the log of the instance's tree has reported, kept for every number of an event. A
reader that says LIVE has exactly the truth of the number at which it is; any other says that it does not
know.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Any, ClassVar

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import (
    FROM_AGENT,
    Events,
    Hello,
    Moved,
    NamesRemoved,
    NamesStored,
    PlacementEvent,
    Welcome,
)
from sglang_ext.radix_global import Holder, Node, RadixTree
from sglang_ext.radix_global.sync.events import PlacementLog, Tenant, Walk
from sglang_ext.radix_global.sync.replica import Outcome, Replica, State
from sglang_ext.radix_global.sync.runs import path_key
from sglang_ext.radix_global.sync.stream import EventStream
from sglang_ext.tiers import Tier
from tests.support.sources import from_sources

pytestmark = pytest.mark.slow

BLOCK = 2
Contents = dict[tuple[Hashable, bytes], int]
picks = st.integers(0, 10**6)
names = st.sets(st.integers(0, 6), min_size=1, max_size=3).map(
    lambda ids: b"".join(i.to_bytes(16, "little") for i in sorted(ids))
)


def spell(words: list[str]) -> bytes:
    return encode_tokens([t for word in words for t in {"a": [0, 0], "b": [0, 1], "c": [2, 0]}[word]])


class Instance:
    """One instance in one epoch: tree, log, stream, and the true state at every number."""

    def __init__(self, epoch: int) -> None:
        self.tree = RadixTree(BLOCK, clock=itertools.count().__next__)
        self.hbm = Holder.of("a", epoch, Tier.HBM)
        self.dram = Holder.of("a", epoch, Tier.DRAM)
        self.weights = 0
        self.log = PlacementLog(self.tree, {self.hbm: Tier.HBM.bit, self.dram: Tier.DRAM.bit}, self.tenant_of)
        self.stream = EventStream("a", epoch.to_bytes(16, "big"), BLOCK, remember_bytes=600)
        self.walks: dict[int, Walk] = {}
        self.copies: list[tuple[Node, int, Holder]] = []
        self.on_disk: set[bytes] = set()
        self.disk_events: list[PlacementEvent] = []
        self.truths: dict[int, tuple[Contents, set[bytes]]] = {}
        self.note()

    def tenant_of(self, namespace: Any) -> Tenant | None:
        weights, extra_key, salt = namespace
        return (extra_key, salt) if weights == self.weights else None

    def note(self) -> None:
        contents: Contents = {}
        for node in self.tree.nodes():
            event = self.log.stored(node)
            if event is None:
                continue
            prefix = path_key(node)
            step = self.tree.block_bytes
            for end in range(len(prefix) - len(node.key) + step, len(prefix) + step, step):
                contents[node.namespace[1:], prefix[:end]] = event.tiers  # type: ignore[index]
        self.truths[self.stream.next] = (contents, set(self.on_disk))

    def check(self) -> None:
        self.tree.check()
        self.log.check()
        if self.copies:
            return
        for node in self.tree.nodes():
            if self.tenant_of(node.namespace) is not None:
                held = sum(
                    {self.hbm: Tier.HBM.bit, self.dram: Tier.DRAM.bit}[holder] for holder in node.placements
                )
                event = self.log.stored(node)
                assert event is not None, f"{node!r} is not told"
                assert event.tiers == held


class EventsMachine(RuleBasedStateMachine):
    """See the module's docstring."""

    replica_class: ClassVar[type[Replica]] = Replica
    steps: ClassVar[int] = 0
    lives: ClassVar[int] = 0

    @initialize()
    def start(self) -> None:
        self.epochs = itertools.count(1)
        self.shared = RadixTree(BLOCK, clock=itertools.count().__next__)
        self.reader = self.replica_class(self.shared, "a")
        self.other = Holder.of("other", 0, Tier.HBM)
        self.channel: list[tuple[Instance, bytes]] = []
        self.earlier: list[list[str]] = [[]]
        self.asked = True
        self.instance = Instance(next(self.epochs))

    # -- the instance ---------------------------------------------------------------------------

    @rule(
        start=picks,
        keep=st.integers(0, 6),
        more=st.lists(st.sampled_from("abc"), max_size=4),
        salt=st.sampled_from([None, None, "s"]),
        dram=st.booleans(),
    )
    def insert(self, start: int, keep: int, more: list[str], salt: str | None, dram: bool) -> None:
        words = [*self.earlier[start % len(self.earlier)][:keep], *more]
        self.earlier.append(words)
        i = self.instance
        holder = i.dram if dram else i.hbm
        i.tree.insert((i.weights, None, salt), spell(words), holder)
        self.done()

    @rule(pick=picks, to_dram=st.booleans())
    def copy(self, pick: int, to_dram: bool) -> None:
        i = self.instance
        source, target = (i.hbm, i.dram) if to_dram else (i.dram, i.hbm)
        nodes = [
            node
            for node in i.tree.nodes()
            if source in node.placements
            and target not in node.placements
            and node.parent is not None
            and (node.parent.is_root or target in node.parent.placements)
        ]
        if nodes:
            node = nodes[pick % len(nodes)]
            i.log.copy_begins(node, target)
            i.tree.place(node, target, None)
            i.tree.lock(node, source)
            i.tree.lock(node, target)
            i.copies.append((node, node.blocks, target))
        self.done()

    @rule()
    def copied(self) -> None:
        i = self.instance
        if i.copies:
            node, blocks, target = i.copies.pop(0)
            for holder in (i.hbm, i.dram):
                i.tree.unlock(node, holder)
            i.log.copy_ended(node, blocks, target)
        self.done()

    @rule(blocks=st.integers(1, 4), dram=st.booleans())
    def evict(self, blocks: int, dram: bool) -> None:
        i = self.instance
        i.tree.evict(i.dram if dram else i.hbm, blocks)
        self.done()

    @rule(pick=picks, cut=st.integers(0, 8))
    def match(self, pick: int, cut: int) -> None:
        words = self.earlier[pick % len(self.earlier)][:cut]
        self.instance.tree.match((self.instance.weights, None, None), spell(words))
        self.done()

    @rule(weights=st.booleans())
    def clear(self, weights: bool) -> None:
        i = self.instance
        if weights:
            i.weights += 1
            i.log.clear(f"w{i.weights}")
        elif not i.copies:
            i.log.clear(f"w{i.weights}")
            i.tree.drop_holder(i.hbm)
            i.tree.drop_holder(i.dram)
        self.done()

    @rule(names=names, there=st.booleans())
    def disk(self, names: bytes, there: bool) -> None:
        each = {names[k : k + 16] for k in range(0, len(names), 16)}
        if there:
            self.instance.on_disk |= each
        else:
            self.instance.on_disk -= each
        self.instance.disk_events.append(
            NamesStored(Tier.DISK.level, names) if there else NamesRemoved(Tier.DISK.level, names)
        )
        self.done()

    @rule()
    def restart(self) -> None:
        self.instance = Instance(next(self.epochs))
        self.asked = True  # the connection is a new one
        self.done()

    # -- its agent ------------------------------------------------------------------------------

    @rule(full=st.sampled_from([False, False, False, True]))
    def publish(self, full: bool) -> None:
        self.flush(full=full)
        self.done()

    def flush(self, *, full: bool = False) -> None:
        i = self.instance
        events = i.log.take() + i.disk_events
        i.disk_events = []
        if full and events:
            i.stream.left_out(len(events))
        else:
            self.send(i.stream.publish(events))
        i.note()

    @rule(runs=st.integers(1, 3))
    def walk(self, runs: int) -> None:
        """The next part of every snapshot under way."""
        i = self.instance
        self.flush()
        for number, walk in list(i.walks.items()):
            if not i.stream.wants(number):
                i.log.ended(walk)
                del i.walks[number]
                continue
            self.send(i.stream.part(number, walk.part(runs, 1000)))
            if walk.over:
                i.log.ended(walk)
                del i.walks[number]
                disk = b"".join(sorted(i.on_disk))
                if disk:
                    self.send(i.stream.part(number, [NamesStored(Tier.DISK.level, disk)]))
                self.send(i.stream.end(number))
        self.done()

    @rule(keeps=st.booleans())
    def say_hello(self, keeps: bool) -> None:
        if not self.asked:
            return
        self.asked = False
        i = self.instance
        hello = Hello("r")
        if keeps and self.reader.trusted:
            hello = Hello("r", self.reader.epoch, self.reader.next)
        sends, number = i.stream.hello(b"r", hello)
        self.send(sends)
        if number is not None:
            self.flush()
            self.send(i.stream.begin(number))
            i.walks[number] = i.log.walk()
        self.done()

    def send(self, sends: list[tuple[bytes, bytes]]) -> None:
        self.channel.extend((self.instance, data) for _, data in sends)

    # -- the channel and the reader -------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.channel))):
            self.take_in(*self.channel.pop(0))
        self.done()

    @rule(lose=st.sampled_from([False, False, True]), pick=picks)
    def exchange(self, lose: bool, pick: int) -> None:
        """Past events arrive at once, but for one message at times."""
        self.flush()
        if lose and self.channel:
            del self.channel[pick % len(self.channel)]
        self.deliver(len(self.channel))

    @rule(pick=picks, fault=st.sampled_from(["lose", "repeat", "early"]))
    def fault(self, pick: int, fault: str) -> None:
        if self.channel:
            place = pick % len(self.channel)
            if fault == "lose":
                del self.channel[place]
            elif fault == "repeat":
                self.channel.append(self.channel[place])
            else:
                self.channel.insert(0, self.channel.pop(place))
        self.done()

    @rule(pick=picks, blocks=st.integers(1, 3))
    def others(self, pick: int, blocks: int) -> None:
        """Other instances cut the shared tree elsewhere."""
        words = self.earlier[pick % len(self.earlier)]
        self.shared.insert((None, None), spell(words[:blocks]), self.other)
        self.done()

    @rule(blocks=st.sampled_from([0, 0, 0, 1, 2]))
    def give_up(self, blocks: int) -> None:
        self.reader.give_up(blocks)
        self.done()

    def take_in(self, sender: Instance, data: bytes) -> None:
        message = FROM_AGENT.decode(data)
        if isinstance(message, Welcome):
            if sender is self.instance:
                self.reader.began(message.epoch, message.naming)
            return
        if self.reader.apply(message).value == Outcome.BROKEN.value:  # type: ignore[arg-type]
            self.asked = True

    @rule()
    def settle(self) -> None:
        """Without further faults, the reader has the truth at last."""
        for _ in range(60):
            self.say_hello(keeps=True)
            self.walk(runs=100)
            while self.channel:
                self.take_in(*self.channel.pop(0))
            if self.reader.next < self.instance.stream.next:
                self.asked = True  # a beat tells the number of the next event
            if self.reader.trusted and not self.asked and self.reader.epoch == self.instance.stream.epoch:
                break
            if not self.instance.walks:
                self.asked = True
        assert self.reader.trusted
        assert self.reader.next == self.instance.stream.next
        self.done()

    # -- judging --------------------------------------------------------------------------------

    def done(self) -> None:
        type(self).steps += 1
        self.instance.check()
        self.shared.check()
        self.reader.check()
        if self.reader.state != State.LIVE or self.reader.epoch != self.instance.stream.epoch:
            return
        type(self).lives += 1
        contents, disk = self.instance.truths[self.reader.next]
        mine = self.reader.contents()
        if self.reader.partial:
            assert mine.items() <= contents.items(), "the reader knows more than there is"
        else:
            assert mine == contents
        assert self.reader.named.get(Tier.DISK, set()) == disk


def run(
    machine: type[EventsMachine],
    examples: int,
    steps: int = 60,
    **settings: Any,
) -> None:
    run_state_machine_as_test(
        machine,
        settings=hypothesis.settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            **settings,
        ),
    )


def test_a_live_reader_has_the_truth() -> None:
    class Machine(EventsMachine):
        steps = lives = 0

    run(Machine, 150)
    assert Machine.lives > 200


@pytest.mark.long
def test_a_live_reader_has_the_truth_at_length() -> None:
    run(EventsMachine, 1500, 100)


PythonReplica: Any = from_sources("sglang_ext.radix_global.sync.replica").Replica


class IgnoringReplica(PythonReplica):
    """Leaves out some events and says nothing of it."""

    def _one(self, event: PlacementEvent) -> None:
        if not (isinstance(event, Moved) and event.run % 2):
            super()._one(event)


def test_an_event_dropped_unnoticed_is_found() -> None:
    class Machine(EventsMachine):
        replica_class = IgnoringReplica

    with pytest.raises(AssertionError):
        run(Machine, 2000, derandomize=True, phases=(hypothesis.Phase.generate,))


class Believing(PythonReplica):
    """Does not look at numbers."""

    def _events(self, message: Events) -> Outcome:
        self.next = message.first
        return super()._events(message)


def test_a_reader_that_does_not_count_is_found() -> None:
    @hypothesis.seed(0)  # by default the search takes fifty times as long until it finds it
    class Machine(EventsMachine):
        replica_class = Believing

    with pytest.raises(AssertionError):
        run(Machine, 2000, derandomize=True, phases=(hypothesis.Phase.generate,))
