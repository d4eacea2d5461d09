"""Prefixes that full instances have others keep, by the messages to their agents. Agents are a list of the
messages that they received."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from sglang_ext.protocol.agent import Beat, Export, Fetch, Fetched, FetchedSpan, Fill, FromAgent, ToAgent
from sglang_ext.protocol.cluster import Registration
from sglang_ext.router.dispatch.spilling import AGAIN_S, LOOK_S, LOOKS, UNHEARD_S, SpillChannels, Spilling
from sglang_ext.router.policies import Instance, Match
from sglang_ext.router.policies.spilling import SpillTerms
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.signals import Signal
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.tiers import Tier

EPOCH = bytes(16)
BLOCK = 16
KEY = b"".join(number.to_bytes(4, "little") for number in range(40 * BLOCK))
NS = ("tokens", None, None, "salt")


@dataclass
class Channels(SpillChannels):
    """Agents that receive every message, but for those that are deaf."""

    fills: dict[str, Fill] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    deaf: set[str] = field(default_factory=set)
    told: list[tuple[str, ToAgent]] = field(default_factory=list)
    messages: Signal[[str, FromAgent]] = field(default_factory=Signal)

    def registration(self, name: str) -> Registration | None:
        return Registration(
            url=f"http://{name}:1",
            instance=name,
            epoch="0" * 32,
            namespace="same",
            endpoints=(f"{name}:7",),
            for_others=self.limits.get(name, 0),
        )

    def beat(self, name: str) -> Beat | None:
        return Beat(EPOCH, 0, fills=(self.fills[name],)) if name in self.fills else None

    def send(self, name: str, message: ToAgent) -> bool:
        if name in self.deaf:
            return False
        self.told.append((name, message))
        return True


class Rig:
    """Instance a is full and b is idle; a holds the prompts that were asked, unless a test says otherwise."""

    def __init__(self, tenant_blocks: int = 1000) -> None:
        self.clock = FakeClock()
        self.channels = Channels(
            {"a": Fill(Tier.DRAM.level, 980, 1000), "b": Fill(Tier.DRAM.level, 0, 1000)}, {"b": 600}
        )
        self.held: dict[str, Match] = {}
        self.match: Callable[[bytes], dict[str, Match]] = lambda key: self.held
        trees: Any = SimpleNamespace(
            block_size=BLOCK,
            match=lambda namespace, key: self.match(key),
            durable=lambda namespace, key: 0,
        )
        fleet: Any = SimpleNamespace(usable=lambda: tuple(Instance(name, 0, 0, 0, 0) for name in "ab"))
        self.metrics = RouterMetrics()
        self.spilling = Spilling(
            SpillTerms(tenant_blocks=tenant_blocks), fleet, trees, self.channels, self.metrics, self.clock
        )
        self.spilling.round()

    def said(self, key: bytes = KEY, *, session: str | None = "s", tenant: str = "t", id: str = "r1") -> None:
        record = SimpleNamespace(request_id=id, caller=SimpleNamespace(tenant=tenant))
        flight: Any = SimpleNamespace(
            prompts=[None], record=record, admitted=SimpleNamespace(session=session)
        )
        self.spilling.learn(flight, NS, key)
        self.held = {"a": Match(len(key) // 4)}

    def metrics_text(self) -> str:
        self.metrics.refreshing()
        return generate_latest(self.metrics.registry).decode()

    def round(self) -> list[tuple[str, ToAgent]]:
        """Run a round; returns its messages."""
        self.channels.told.clear()
        self.clock.advance(LOOK_S + 0.1)
        self.spilling.round()
        self.spilling.conversations.check()
        return list(self.channels.told)

    def ended(self, told: list[tuple[str, ToAgent]], how: str = "done", tokens: int = len(KEY) // 4) -> None:
        (id,) = (message.id for _, message in told if isinstance(message, Fetch))
        span = FetchedSpan(how, tokens, 0.1)
        self.channels.messages("b", Fetched(EPOCH, id, False, how, (span,)))
        if tokens:
            self.held = self.held | {"b": Match(tokens, False, {Tier.DRAM: tokens})}


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_both_instances_get_their_commands(rig: Rig) -> None:
    rig.said()
    (first, export), (second, fetch) = rig.round()
    assert (first, second) == ("a", "b")
    assert isinstance(export, Export)
    assert isinstance(fetch, Fetch)
    assert export.spills
    assert fetch.for_others
    assert export.tokens == fetch.tokens == KEY
    assert export.cache_salt == fetch.cache_salt == "salt"
    (span,) = fetch.spans
    assert (span.source.export, span.source.endpoints, span.tokens) == (export.export, ("a:7",), 640)


def test_a_session_or_a_second_use_is_what_goes_on(rig: Rig) -> None:
    rig.said(session=None)
    assert rig.round() == []
    rig.said(session=None, id="r1")  # the same request, with its answer
    assert rig.round() == []
    rig.said(KEY + bytes(4 * BLOCK), session=None, id="r2")
    assert len(rig.round()) == 2


def test_a_tenant_with_many_conversations_holds_up_no_other(rig: Rig) -> None:
    """The other one's only conversation is looked up, and spilled, in the first round."""

    def key_of(number: int) -> bytes:
        return number.to_bytes(4, "little") * 10 * BLOCK

    for number in range(4 * LOOKS):
        rig.said(key_of(number), tenant="many")
    rig.said(key_of(999), tenant="few")
    rig.match = lambda key: {"a": Match(len(key) // 4)}
    exported = [message.tokens for _, message in rig.round() if isinstance(message, Export)]
    assert key_of(999) in exported


def test_nothing_is_remembered_where_no_instance_keeps_kv_for_others() -> None:
    rig = Rig()
    rig.channels.limits = {}
    rig.round()
    rig.said()
    assert not rig.spilling.is_on
    assert len(rig.spilling.conversations) == 0
    assert rig.round() == []


def test_a_kept_conversation_causes_no_more_commands(rig: Rig) -> None:
    rig.said()
    rig.ended(rig.round())
    assert rig.round() == []
    assert rig.spilling.taken() == {"t": 40}
    # Gone from there at once, because b needed the room: not again before a while has passed.
    rig.held = {"a": Match(640)}
    assert rig.round() == []
    assert not rig.spilling.taken()
    rig.clock.advance(AGAIN_S)
    assert len(rig.round()) == 2


def test_a_tenant_s_budget_counts_what_is_under_way_and_what_is_kept() -> None:
    rig = Rig(tenant_blocks=60)
    rig.said()
    told = rig.round()
    other = b"\7" * len(KEY)
    rig.said(other, session="s2", id="r2")
    assert rig.round() == []
    rig.ended(told)
    rig.held = {"a": Match(640), "b": Match(640)}
    assert rig.round() == []
    assert 'spills_total{how="tenant-budget"}' in rig.metrics_text()
    # Another tenant's has room.
    rig.held = {"a": Match(640)}
    rig.said(b"\1" * len(KEY), session="s3", tenant="u", id="r3")
    assert b"\1" * len(KEY) in [message.tokens for _, message in rig.round() if isinstance(message, Fetch)]


def test_conversations_without_a_holder_are_forgotten_and_hide_nothing(rig: Rig) -> None:
    for number in range(5 * LOOKS):
        key = number.to_bytes(4, "little") * (len(KEY) // 4)
        rig.said(key, session=f"s{number}", id=f"r{number}")
    rig.said(id="last")
    there = rig.held
    rig.match = lambda key: there if key == KEY else {}
    told: list[tuple[str, ToAgent]] = []
    for _ in range(10):
        told += rig.round()
    assert [message.tokens for _, message in told if isinstance(message, Fetch)] == [KEY]
    assert len(rig.spilling.conversations) == 1


def test_what_only_idle_instances_hold_hides_nothing(rig: Rig) -> None:
    for number in range(5 * LOOKS):
        key = number.to_bytes(4, "little") * (len(KEY) // 4)
        rig.said(key, session=f"s{number}", id=f"r{number}")
    rig.said(id="last")
    there = rig.held
    rig.match = lambda key: there if key == KEY else {"b": Match(640)}
    told: list[tuple[str, ToAgent]] = []
    for _ in range(10):
        told += rig.round()
    assert [message.tokens for _, message in told if isinstance(message, Fetch)] == [KEY]


def test_explain_tells_it(rig: Rig) -> None:
    rig.said()
    rig.ended(rig.round())
    (told,) = rig.spilling.copies_of(NS, KEY + b"more", rig.clock.wall())
    assert (told["from"], told["to"], told["end"], told["moved_tokens"]) == ("a", "b", "done", 640)
    assert rig.spilling.copies_of(("tokens", None, None, "other"), KEY, rig.clock.wall()) == []
    assert rig.spilling.copies_of(NS, KEY[:40], rig.clock.wall()) == []


@pytest.mark.parametrize("deaf", ["a", "b"])
def test_an_agent_that_is_not_heard_ends_it(rig: Rig, deaf: str) -> None:
    rig.channels.deaf = {deaf}
    rig.said()
    rig.round()
    assert not rig.spilling.taken()
    assert 'spills_total{how="unheard"} 1.0' in rig.metrics_text()


def test_what_is_not_heard_of_and_who_is_gone_count_no_more(rig: Rig) -> None:
    rig.said()
    rig.round()
    assert rig.spilling.taken() == {"t": 40}
    rig.clock.advance(UNHEARD_S)
    rig.round()
    assert not rig.spilling.taken()
    rig.clock.advance(AGAIN_S)
    rig.ended(rig.round())
    assert rig.spilling.taken() == {"t": 40}
    rig.spilling.forget("b")
    assert not rig.spilling.taken()
