"""A router's copy of an instance's tree, without sockets."""

from __future__ import annotations

from sglang_ext.engine.events.events import Began, Changed, Ended, LeftOut, Part, PlacementFeed
from sglang_ext.protocol.agent import FROM_AGENT, Hello, Welcome
from sglang_ext.radix_global import RadixTree
from sglang_ext.radix_global.sync.replica import Outcome, Replica
from sglang_ext.radix_global.sync.stream import EventStream, Sends


class Follower:
    """An agent and a router in one: takes from a feed, and keeps a copy."""

    def __init__(self, feed: PlacementFeed, block_size: int) -> None:
        self.feed = feed
        self.stream = EventStream("simulated", b"e" * 16, block_size)
        self.tree = RadixTree(block_size)
        self.replica = Replica(self.tree, "simulated")
        self.gaps = 0
        self.hello()

    def hello(self) -> None:
        sends, number = self.stream.hello(b"r", Hello("r"))
        self.receive(sends)
        if number is not None:
            self.feed.snapshot(number)

    def follow(self) -> None:
        for entry in self.feed.queue.take():
            if isinstance(entry, Changed):
                self.receive(self.stream.publish(entry.events))
            elif isinstance(entry, LeftOut):
                self.stream.left_out(entry.events)
            elif isinstance(entry, Began):
                self.receive(self.stream.begin(entry.number))
            elif isinstance(entry, Part):
                self.receive(self.stream.part(entry.number, entry.events))
            else:
                assert isinstance(entry, Ended)
                self.receive(self.stream.end(entry.number))
        if self.replica.trusted and self.replica.next < self.stream.next:
            self.replica.lost_touch()  # a beat carries the next number
            self.gaps += 1
            self.hello()

    def receive(self, sends: Sends) -> None:
        broken = False
        for _, data in sends:
            message = FROM_AGENT.decode(data)
            if isinstance(message, Welcome):
                self.replica.began(message.epoch, message.naming)
            else:
                broken = self.replica.apply(message) is Outcome.BROKEN or broken  # type: ignore[arg-type]
        if broken:
            self.gaps += 1
            self.hello()
