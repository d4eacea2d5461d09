"""Every topic of the channel between routers against the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from router_costs import router_costs
from topic_contract import TopicContract

from sglang_ext.cluster_key import ClusterKey
from sglang_ext.cost_model import CostModel
from sglang_ext.keys import TOKEN_BYTES
from sglang_ext.router.cluster.broadcast import RouterChannel
from sglang_ext.router.cluster.shared_limits import SharedLimits
from sglang_ext.router.cluster.shared_replays import SharedReplays
from sglang_ext.router.dispatch.suspects import Suspects
from sglang_ext.router.fleet.facts import InstanceFacts, ModelFacts
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.hints.advising import Advisor
from sglang_ext.router.hints.advisory_book import HintBook, HintLimits
from sglang_ext.router.hints.hint import Hint
from sglang_ext.router.hints.preparing import Preparer
from sglang_ext.router.hints.remote_hints import RemoteHints
from sglang_ext.router.hints.shared_hints import SharedHints
from sglang_ext.router.hints.shared_pins import SharedPins
from sglang_ext.router.http.types import Request
from sglang_ext.router.index.prompt_trees import PromptTrees
from sglang_ext.router.placing.fetching import Fetching
from sglang_ext.router.placing.placing import PlacingOptions
from sglang_ext.router.policies import PolicyOptions, policy_named
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.tenancy.key_file import parse_keys
from sglang_ext.router.tenancy.tenants import KeyRing
from sglang_ext.signals import Signal
from sglang_ext.testing.fakes import FakeClock

KEY = ClusterKey(b"of the cluster " * 3)
API_KEY = "a" * 32
SPACE = ("tokens", None, None, None)


class TestSuspects(TopicContract):
    def make(self, channel: RouterChannel, clock: FakeClock) -> Suspects:
        return Suspects(channel, clock)

    def change(self, topic: Suspects, number: int) -> None:
        topic.lost(f"digest {number}", "instance")

    def state(self, topic: Suspects) -> object:
        return {digest: [name for name, _ in losses] for digest, losses in topic._losses.items()}


class TestReplays(TopicContract):
    def make(self, channel: RouterChannel, clock: FakeClock) -> SharedReplays:
        return SharedReplays(channel, clock)

    def change(self, topic: SharedReplays, number: int) -> None:
        body = str(number).encode()
        header = KEY.sign("POST", "/x", body, topic._clock.wall())
        assert topic.problem(Request("POST", "/x", "/x", {"authorization": header}, body), KEY) is None

    def state(self, topic: SharedReplays) -> object:
        return {signed for signed, _ in topic._replays.used()}


class TestLimits(TopicContract):
    survives = False
    running: ExitStack

    @pytest.fixture(autouse=True)
    def requests(self) -> Iterator[None]:
        with ExitStack() as self.running:
            yield

    def make(self, channel: RouterChannel, clock: FakeClock) -> SharedLimits:
        ring = KeyRing(clock)
        ring.replace(parse_keys({"keys": [{"key": API_KEY, "tenant": "a", "concurrent": 9}]}))
        return SharedLimits(channel, ring, clock, KEY)

    def change(self, topic: SharedLimits, number: int) -> None:
        (meter,) = topic._keys.meters
        self.running.enter_context(meter.request())

    def state(self, topic: SharedLimits) -> object:
        (meter,) = topic._keys.meters
        return meter.running + sum(use.running for use in meter._others.values())


class Links:
    """An agent that answers no message."""

    def __init__(self) -> None:
        self.messages: Signal[[str, Any]] = Signal()

    def computes(self, name: str) -> bool:
        return True

    def can_fetch(self, source: str, target: str) -> bool:
        return False

    def send(self, name: str, message: Any) -> bool:
        return True


class TestHints(TopicContract):
    def make(self, channel: RouterChannel, clock: FakeClock) -> SharedHints:
        fleet = Fleet(("a",), now=clock.monotonic)
        fleet.learnt("a", InstanceFacts(ModelFacts("m", "M", 100, 4096), "w", "start", "colocated", "/m"))
        costs, links = router_costs(CostModel(), clock.monotonic), Links()
        metrics, remote = RouterMetrics(), RemoteHints()
        book = HintBook(HintLimits(), remote)
        options = PlacingOptions(policy=policy_named("least-load"), thresholds=PolicyOptions())
        fetching = Fetching(links, costs, metrics)  # type: ignore[arg-type]
        trees = PromptTrees(clock)
        preparer = Preparer(fleet, trees, costs, options, links, metrics, clock, fetching, book)  # type: ignore[arg-type]
        advisor = Advisor(fleet, options.thresholds, metrics, clock, book, remote, preparer)
        return SharedHints(channel, advisor, clock)

    def change(self, topic: SharedHints, number: int) -> None:
        _, view = topic._advisor.offer(Hint("", SPACE, bytes(TOKEN_BYTES * 16 * (number + 1)), f"s{number}"))
        assert view["state"] == "moving"

    def state(self, topic: SharedHints) -> object:
        advisor = topic._advisor
        advisor.check()
        own = {(entry.id, entry.state.value, entry.instance) for entry in advisor.book.live()}
        return own | {(copy.id, copy.state.value, copy.status.instance) for copy in advisor.remote.all()}


@pytest.mark.parametrize("count", [0, 2])
def test_a_snapshot_has_the_messages_of_every_topic(count: int) -> None:
    channel, clock = RouterChannel("one"), FakeClock()
    suspects = TestSuspects().make(channel, clock)
    TestReplays().make(channel, clock)
    for number in range(count):
        suspects.lost(str(number), "instance")
    assert len(channel.snapshot()) == count
    assert "Suspects" in repr(channel)


class TestPins(TopicContract):
    def make(self, channel: RouterChannel, clock: FakeClock) -> SharedPins:
        return SharedPins(channel)

    def change(self, topic: SharedPins, number: int) -> None:
        topic.pin(f"session {number}", "date", 0, f"day {number}")

    def state(self, topic: SharedPins) -> object:
        return dict(topic._texts.items())
