"""The conformance suite of topics: the promises of ``cluster/broadcast.py`` for state that routers share.

A subclass makes a topic at one router (``make``), changes its state (``change``), and reads it (``state``).
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from sglang_ext.errors import InternalError
from sglang_ext.router.cluster.broadcast import (
    Begun,
    RouterChannel,
    RouterMessage,
    decode_message,
    encode_message,
)
from sglang_ext.testing.fakes import FakeClock


class Site:
    """One router: its channel with one topic. Messages leave as bytes and arrive ``times`` times."""

    def __init__(self, name: str, contract: TopicContract, clock: FakeClock) -> None:
        self.channel = RouterChannel(name)
        self.topic = contract.make(self.channel, clock)
        self.sent: list[bytes] = []

    def send_to(self, *others: Site, times: int = 1) -> None:
        def deliver(message: RouterMessage) -> None:
            self.sent.append(encode_message(message))
            for other in others:
                for _ in range(times):
                    other.channel.receive(decode_message(self.sent[-1]))

        self.channel.outgoing.subscribe(deliver)

    def load(self, other: Site) -> None:
        """Take in the snapshot of another router."""
        for message in other.channel.snapshot():
            self.channel.receive(decode_message(encode_message(message)))


class TopicContract:
    """The tests that every topic passes."""

    survives: ClassVar[bool] = True
    """Whether the state of a router that is gone still counts."""

    def make(self, channel: RouterChannel, clock: FakeClock) -> Any:
        """A topic at one router."""
        raise NotImplementedError

    def change(self, topic: Any, number: int) -> None:
        """Change the state that the topic shares."""
        raise NotImplementedError

    def state(self, topic: Any) -> object:
        """The state of all routers, as one router has it; the same at all when all have every message."""
        raise NotImplementedError

    @pytest.fixture
    def sites(self) -> tuple[Site, Site, Site]:
        clock = FakeClock()
        one, two, three = (Site(name, self, clock) for name in ("one", "two", "three"))
        return one, two, three

    def test_a_change_reaches_the_other_routers(self, sites: tuple[Site, Site, Site]) -> None:
        one, two, three = sites
        before = self.state(one.topic)
        one.send_to(two, three)
        for number in range(3):
            self.change(one.topic, number)
        assert before != self.state(one.topic) == self.state(two.topic) == self.state(three.topic)

    def test_a_lost_message_is_seen(self, sites: tuple[Site, Site, Site]) -> None:
        """The twin."""
        one, two, _ = sites
        one.send_to()
        self.change(one.topic, 0)
        assert self.state(two.topic) != self.state(one.topic)

    def test_a_message_that_arrives_twice_changes_nothing(self, sites: tuple[Site, Site, Site]) -> None:
        one, two, three = sites
        one.send_to(two)
        one.send_to(three, times=2)
        for number in range(3):
            self.change(one.topic, number)
        assert self.state(three.topic) == self.state(two.topic)

    def test_own_messages_are_dropped(self, sites: tuple[Site, Site, Site]) -> None:
        one, two, _ = sites
        one.send_to(two)
        self.change(one.topic, 0)
        state = self.state(one.topic)
        for data in one.sent:
            one.channel.receive(decode_message(data))
        assert one.sent
        assert self.state(one.topic) == state

    def test_a_snapshot_brings_a_router_up_to_date(self, sites: tuple[Site, Site, Site]) -> None:
        one, _, three = sites
        for number in range(3):  # nothing is sent: the channel is closed
            self.change(one.topic, number)
        assert not one.channel.is_open
        three.load(one)
        assert self.state(three.topic) == self.state(one.topic)
        three.load(one)
        assert self.state(three.topic) == self.state(one.topic)

    def test_messages_of_other_topics_are_not_delivered(self, sites: tuple[Site, Site, Site]) -> None:
        one, *_ = sites
        state = self.state(one.topic)
        one.channel.receive(Begun("two"))
        assert self.state(one.topic) == state

    def test_a_router_that_is_gone(self, sites: tuple[Site, Site, Site]) -> None:
        one, two, three = sites
        one.send_to(two)
        two.channel.on_routers(["one"])
        self.change(one.topic, 0)
        with_one = self.state(two.topic)
        two.channel.on_routers([])
        assert (self.state(two.topic) == with_one) == self.survives
        assert (self.state(two.topic) == self.state(three.topic)) != self.survives

    def test_a_kind_of_message_has_one_topic(self, sites: tuple[Site, Site, Site]) -> None:
        one, *_ = sites
        with pytest.raises(InternalError, match="two topics"):
            self.make(one.channel, FakeClock())
