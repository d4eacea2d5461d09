"""The life of an instance: the table, the counters, and the consequences of verdicts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sglang_ext.errors import InternalError
from sglang_ext.protocol.cluster import Registration, url_of_replica
from sglang_ext.router.api.limits import ModelKind
from sglang_ext.router.fleet.facts import InstanceFacts, ModelFacts
from sglang_ext.router.fleet.fleet import Fleet, Load
from sglang_ext.router.fleet.lifecycle import FATAL, TRANSITIONS, USABLE, Event, State
from sglang_ext.router.http.types import ConnectionLost
from sglang_ext.testing.fakes import FakeClock

MODEL = ModelFacts("llama", "LlamaForCausalLM", 32_000, 4096)
FACTS = InstanceFacts(MODEL, "default", "start-1", "colocated", "/models/llama")
OTHER = replace(FACTS, model=replace(MODEL, vocab_size=128_256))


def test_every_state_answers_every_event_but_signs_of_life_of_the_unknown() -> None:
    missing = {(state, event) for state in State for event in Event} - set(TRANSITIONS)
    assert missing == {(state, Event.ALIVE) for state in (State.NEW, State.DOWN, State.UNFIT)}


@pytest.mark.parametrize(("state", "event"), TRANSITIONS)
def test_rules_that_every_pair_keeps(state: State, event: Event) -> None:
    following = TRANSITIONS[state, event]
    if following in USABLE and state not in USABLE:
        assert event is Event.LEARNT or (state, event) == (State.DRAINING, Event.RESUME)
    if event in FATAL:
        assert following not in USABLE
    if event is Event.LEAVE:
        assert following is State.LEFT
    if event is Event.RESTARTED:
        assert following is State.NEW
    if following is State.DRAINING and state is not State.DRAINING:
        assert (state in USABLE, event) == (True, Event.DRAIN)
    if state is State.LEFT:
        assert (following is State.LEFT) == (event not in (Event.RESUME, Event.RESTARTED))
    if following is State.NEW and state is not State.NEW:
        assert event is Event.RESTARTED or (state, event) == (State.LEFT, Event.RESUME)


def test_an_instance_is_given_requests_once_its_facts_are_known() -> None:
    fleet = Fleet(("a", "b"))
    assert fleet.usable() == ()
    fleet.learnt("a", FACTS)
    assert [i.name for i in fleet.usable()] == ["a"]
    assert fleet.usable(frozenset({"a"})) == ()
    fleet.check()


def test_the_verdict_needs_several_missed_probes_in_a_row() -> None:
    fleet = Fleet(("a",), failure_threshold=3)
    fleet.learnt("a", FACTS)
    assert [fleet.missed("a", "slow"), fleet.missed("a", "slow")] == [State.SUSPECT, State.SUSPECT]
    assert fleet.alive("a") is State.READY
    assert [fleet.missed("a", "slow") for _ in range(3)][-1] is State.DOWN
    assert "3 probes missed" in fleet.rows["a"].why


def test_over_a_network_silence_is_given_more_time_and_a_refused_connection_none() -> None:
    """A switch that fails over for 3 s takes no instance of another machine for dead."""
    clock = FakeClock()
    near, far = "http://127.0.0.1:1", "http://10.0.0.2:1"
    fleet = Fleet((near, far), failure_threshold=3, silence_s=8.0, now=clock.monotonic)
    for name in (near, far):
        fleet.learnt(name, FACTS)
    for _ in range(6):
        clock.advance(1.0)
        fleet.missed(near, "late")
        fleet.missed(far, "late")
        fleet.unconnected(far, "no route", refused=False)
    assert (fleet.rows[near].state, fleet.rows[far].state) == (State.DOWN, State.SUSPECT)
    fleet.alive(far)
    assert fleet.rows[far].state is State.READY
    fleet.unconnected(far, "nobody listens", refused=True)
    assert fleet.rows[far].state is State.DOWN
    fleet.learnt(far, FACTS)
    for _ in range(3):
        fleet.missed(far, "late")
    clock.advance(8.0)
    assert fleet.missed(far, "late") is State.DOWN


def test_the_replicas_of_a_server_are_lost_together_and_no_others() -> None:
    one, two = (url_of_replica("http://127.0.0.1:1", rank) for rank in range(2))
    others = ("http://127.0.0.1:2", "http://127.0.0.1:11", url_of_replica("http://127.0.0.1:11", 0))
    fleet = Fleet((one, two, *others))
    for name in fleet.rows:
        fleet.learnt(name, FACTS)
    assert fleet.lost(two, "its agent is silent") is State.DOWN
    assert [row.state for row in fleet.rows.values()] == [State.DOWN] * 2 + [State.READY] * 3
    assert two in fleet.rows[one].why
    fleet.learnt(one, FACTS)
    fleet.unconnected(others[0], "refused", refused=True)
    assert [row.state for row in fleet.rows.values()][:3] == [State.READY, State.DOWN, State.DOWN]


def test_a_restart_is_distinguished_from_a_hiccup() -> None:
    restarted: list[str] = []
    fleet = Fleet(("a",))
    fleet.restarted.subscribe(restarted.append)
    fleet.learnt("a", FACTS)
    restarted.clear()
    fleet.lost("a", "gone")
    fleet.learnt("a", FACTS)
    assert restarted == []
    fleet.lost("a", "gone")
    fleet.learnt("a", replace(FACTS, identity="start-2"))
    assert restarted == ["a"]
    fleet.learnt("a", replace(FACTS, identity="start-2", weight_version="v2"))
    assert restarted == ["a", "a"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": replace(MODEL, name="qwen")}, "name 'qwen' instead of 'llama'"),
        ({"model": replace(MODEL, vocab_size=1)}, "vocab_size 1 instead of 32000"),
        ({"model": replace(MODEL, context_length=1)}, "context_length 1 instead of 4096"),
        ({"model": replace(MODEL, architecture="X")}, "architecture 'X'"),
        ({"role": "encode"}, "role is encode"),
        (
            {"model": replace(MODEL, kind=ModelKind.POOLS)},
            "it embeds, classifies or scores, and this fleet's",
        ),
        ({"obstacle": "it has none"}, "it has none"),
    ],
)
def test_mixed_models_are_refused(change, words) -> None:
    fleet = Fleet(("a", "b"))
    fleet.learnt("a", FACTS)
    assert fleet.learnt("b", replace(FACTS, **change)) is State.UNFIT
    assert words in fleet.rows["b"].why
    assert fleet.rows["b"].other_model == ("model" in change)
    assert [i.name for i in fleet.usable()] == ["a"]
    fleet.check()


def test_a_new_model_is_taken_on_when_the_old_one_has_gone() -> None:
    adopted: list[InstanceFacts] = []
    fleet = Fleet(("a", "b"))
    fleet.adopted.subscribe(adopted.append)
    fleet.learnt("a", FACTS)
    fleet.learnt("b", FACTS)
    fleet.lost("a", "stopped")
    assert fleet.learnt("a", OTHER) is State.UNFIT
    fleet.lost("b", "stopped")
    assert fleet.learnt("a", OTHER) is State.READY
    assert adopted == [FACTS, OTHER]
    assert fleet.learnt("b", FACTS) is State.UNFIT


def test_a_sign_of_life_of_the_unknown_is_a_bug() -> None:
    with pytest.raises(InternalError, match="cannot be alive while it is new"):
        Fleet(("a",)).alive("a")


def test_load_is_counted_while_it_is_carried() -> None:
    fleet = Fleet(("a", "b"))
    for name in "ab":
        fleet.learnt(name, FACTS)
    with fleet.carrying("a", 100) as load:
        (a, b) = fleet.usable()
        assert (a.in_flight, a.queued_tokens, a.last_picked) == (1, 100, 1)
        assert (b.in_flight, b.queued_tokens, b.last_picked) == (0, 0, 0)
        load.prefilled()
        load.prefilled()
        assert fleet.usable()[0].queued_tokens == 0
    with pytest.raises(KeyError), fleet.carrying("a", 100):
        raise KeyError
    assert (fleet.rows["a"].in_flight, fleet.rows["a"].queued_tokens) == (0, 0)
    fleet.check()


async def _one_waits() -> tuple[Fleet, asyncio.Task[None]]:
    """A fleet, and a request that waits for its only instance."""
    fleet = Fleet(("a",))
    fleet.learnt("a", FACTS)
    entered = asyncio.Event()

    async def request() -> None:
        with fleet.carrying("a", 1) as load, load.until_lost():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await entered.wait()
    return fleet, task


async def test_the_verdict_ends_what_waits_for_the_instance() -> None:
    fleet, task = await _one_waits()
    fleet.lost("a", "killed")
    with pytest.raises(ConnectionLost, match="killed"):
        await task
    assert not fleet.rows["a"].waiting
    fleet.check()


async def test_a_cancellation_at_the_same_moment_wins() -> None:
    fleet, task = await _one_waits()
    fleet.lost("a", "killed")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    fleet.check()


async def test_after_the_first_byte_a_verdict_does_not_matter() -> None:
    fleet = Fleet(("a",))
    fleet.learnt("a", FACTS)
    with fleet.carrying("a", 1) as load:
        with load.until_lost():
            pass
        fleet.lost("a", "hiccup")
        await asyncio.sleep(0)
        with pytest.raises(ConnectionLost), load.until_lost():
            pytest.fail("nothing may start at an instance that is down")


# -- joining, draining, leaving ----------------------------------------------------------------------------


def registration(epoch: int = 1, **more: str) -> Registration:
    return Registration(url="http://a:1", instance="a", epoch=f"{epoch:032x}", **more)


def test_a_new_epoch_drops_what_was_known_at_once() -> None:
    restarted: list[str] = []
    fleet = Fleet()
    fleet.restarted.subscribe(restarted.append)
    assert fleet.join("a", registration(1)) is State.NEW
    fleet.learnt("a", FACTS)
    restarted.clear()
    assert fleet.join("a", registration(1)) is State.READY
    assert restarted == []
    assert fleet.join("a", registration(2)) is State.NEW
    assert restarted == ["a"]
    assert fleet.usable() == ()
    fleet.check()


def test_salts_are_for_those_that_registered_and_still_tell() -> None:
    """A stock server in the place of a registered one is not among them."""
    fleet = Fleet(("a", "b"))
    fleet.learnt("b", FACTS)
    fleet.join("a", registration())
    assert fleet.without_salts() == {"a", "b"}
    fleet.learnt("a", replace(FACTS, reports=True))
    assert fleet.without_salts() == {"b"}
    fleet.learnt("a", replace(FACTS, identity="start-2"))
    assert fleet.without_salts() == {"a", "b"}


def test_one_that_was_listed_and_registers_goes_on() -> None:
    restarted: list[str] = []
    fleet = Fleet(("a", "b"))
    fleet.restarted.subscribe(restarted.append)
    for name in "ab":
        fleet.learnt(name, FACTS)
    restarted.clear()
    with fleet.carrying("a", 1) as load:
        assert fleet.join("a", registration(1)) is State.READY
        assert not load.doomed
    assert fleet.join("b", registration(1, role="decode")) is State.UNFIT
    assert "registered as decode" in fleet.rows["b"].why
    assert restarted == []
    fleet.check()


def test_an_instance_that_drains_finishes_and_leaves() -> None:
    fleet = Fleet(("a", "b"))
    for name in "ab":
        fleet.learnt(name, FACTS)
    with fleet.carrying("a", 10):
        assert fleet.drain("a", "maintenance") is State.DRAINING
        assert [i.name for i in fleet.usable()] == ["b"]
        assert fleet.alive("a") is State.DRAINING
        assert not fleet.forget("a")
        fleet.check()
    assert fleet.rows["a"].state is State.LEFT
    assert fleet.forget("a")
    assert fleet.forget("a")
    assert set(fleet.rows) == {"b"}
    assert fleet.drain("b", "idle") is State.LEFT
    fleet.check()


def test_a_drain_can_be_taken_back() -> None:
    fleet = Fleet(("a",))
    fleet.learnt("a", FACTS)
    with fleet.carrying("a", 10):
        fleet.drain("a", "maintenance")
        assert fleet.resume("a") is State.READY
    assert fleet.rows["a"].state is State.READY
    fleet.drain("a", "maintenance")
    assert fleet.resume("a") is State.NEW
    assert fleet.learnt("a", FACTS) is State.READY


def test_what_changed_while_an_instance_drained_is_seen_when_it_is_taken_back() -> None:
    told, changed = {"a": (16, True, False)}, set[str]()

    def take_changed() -> set[str]:
        found = set(changed)
        changed.clear()
        return found

    fleet = Fleet(("a",), view=told.__getitem__, changed=take_changed)
    fleet.learnt("a", FACTS)
    with fleet.carrying("a", 10):
        assert fleet.usable()[0].cached_tokens == 16
        fleet.drain("a", "maintenance")
        told["a"] = (0, False, False)
        changed.add("a")
        assert fleet.usable() == ()
        fleet.resume("a")
        (seen,) = fleet.usable()
        assert (seen.cached_tokens, seen.trusted) == (0, False)
        fleet.check()


def test_a_drain_ends_at_its_deadline_and_does_not_cut_what_runs() -> None:
    fleet = Fleet(("a",))
    fleet.learnt("a", FACTS)
    with fleet.carrying("a", 10) as load:
        fleet.drain("a", "maintenance")
        assert fleet.drained("a", "too late") is State.LEFT
        assert not load.doomed
        assert not fleet.forget("a")
        fleet.lost("a", "and then it died")
        assert load.doomed
    assert fleet.forget("a")


async def test_requests_go_on_at_an_instance_that_drains_and_give_up_when_it_dies() -> None:
    fleet = Fleet(("a",))
    fleet.learnt("a", FACTS)
    entered, go_on = asyncio.Event(), asyncio.Event()

    async def request() -> None:
        with fleet.carrying("a", 1) as load:
            with load.until_lost():
                entered.set()
                await go_on.wait()
            with load.until_lost():
                await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await entered.wait()
    fleet.drain("a", "maintenance")
    go_on.set()
    await asyncio.sleep(0)
    assert not task.done()
    assert fleet.lost("a", "killed") is State.LEFT
    with pytest.raises(ConnectionLost, match="killed"):
        await task
    fleet.check()


def test_what_is_unknown_is_no_error() -> None:
    """A probe may come back after an instance was forgotten."""
    fleet = Fleet()
    assert fleet.learnt("a", FACTS) is State.LEFT
    assert fleet.model is None
    for call in (fleet.missed, fleet.lost, fleet.rejected, fleet.drained, fleet.leave):
        assert call("a", "why") is State.LEFT
    assert (fleet.alive("a"), fleet.resume("a")) == (State.LEFT, State.LEFT)
    fleet.on_heartbeat("a")
    assert fleet.obstacle().startswith("no instance has joined")


def test_prefill_and_decode_serve_only_together() -> None:
    fleet = Fleet(("p", "d", "c"), pairs=True)
    fleet.learnt("p", replace(FACTS, role="prefill"))
    assert fleet.usable() == ()
    assert fleet.obstacle() == "there is no decode instance: the 1 prefill cannot serve alone"
    fleet.learnt("d", replace(FACTS, role="decode"))
    assert {(i.name, i.role.value) for i in fleet.usable()} == {("p", "prefill"), ("d", "decode")}
    assert fleet.usable(frozenset({"p"})) == ()
    fleet.learnt("c", FACTS)
    fleet.lost("p", "killed")
    assert [i.name for i in fleet.usable()] == ["c"]
    assert fleet.obstacle() == ""


def half(name: str, role: str, **settings: str) -> Registration:
    handover = {"--page-size": "16"} if settings else {}
    fields = {"url": "http://127.0.0.1:1", "epoch": "0" * 32, "instance": name, "role": role}
    return Registration(**fields, settings=settings, handover=handover)


def test_halves_that_cannot_hand_over_are_given_nothing_and_the_reason_is_said() -> None:
    fleet = Fleet(pairs=True)
    for name, role, theta in (("p", "prefill", "1"), ("d", "decode", "2")):
        fleet.join(name, half(name, role, rope_theta=theta))
        fleet.learnt(name, replace(FACTS, role=role))
    assert fleet.usable() == ()
    why = "no prefill and decode instance fit together: rope_theta (1 at p, 2 at d)"
    assert fleet.obstacle() == why
    fleet.check()

    fleet.join("e", half("e", "decode", rope_theta="1"))
    fleet.learnt("e", replace(FACTS, role="decode"))
    assert {instance.name for instance in fleet.usable()} == {"p", "e"}
    assert fleet.obstacle() == ""
    assert fleet.usable(frozenset({"e"})) == ()

    fleet.join("old", half("old", "prefill"))
    fleet.learnt("old", replace(FACTS, role="prefill"))
    # The flags that it was started with are not known.
    assert {instance.name for instance in fleet.usable()} == {"p", "d", "e", "old"}
    fleet.check()


def test_a_router_without_pairs_says_so() -> None:
    fleet = Fleet(("p", "d"))
    fleet.learnt("p", replace(FACTS, role="prefill"))
    fleet.learnt("d", replace(FACTS, role="decode"))
    assert fleet.usable() == ()
    assert "does not send requests to pairs" in fleet.obstacle()


def test_a_role_that_was_registered_and_is_another_is_refused() -> None:
    fleet = Fleet()
    fleet.join("a", registration(role="prefill"))
    assert fleet.learnt("a", FACTS) is State.UNFIT
    assert "registered as prefill" in fleet.rows["a"].why
    assert fleet.obstacle() == "a is unfit"


def test_requests_of_other_routers_count_as_load() -> None:
    fleet = Fleet(("a",))
    fleet.learnt("a", FACTS)
    fleet.sent_elsewhere("a", 7)
    with fleet.carrying("a", 1):
        assert fleet.usable()[0].in_flight == 8


def test_subscribers_receive_every_event() -> None:
    heard: list[tuple[str, Event, State, State]] = []
    fleet = Fleet()
    fleet.happened.subscribe(lambda row, event, before: heard.append((row.name, event, before, row.state)))
    fleet.join("a")
    fleet.learnt("a", FACTS)
    fleet.lost("a", "gone")
    assert heard == [
        ("a", Event.LEARNT, State.NEW, State.READY),
        ("a", Event.LOST, State.READY, State.DOWN),
    ]


class LifeOfAFleet(RuleBasedStateMachine):
    """Any order of events keeps the invariants, and the usable instances follow from the table."""

    names = st.sampled_from("abc")

    @initialize()
    def start(self) -> None:
        self.fleet = Fleet(("a", "b", "c"), failure_threshold=2)
        self.loads: list[tuple[Any, str, Load]] = []

    @rule(name=names, identity=st.sampled_from("12"), other=st.booleans())
    def learnt(self, name: str, identity: str, other: bool) -> None:
        facts = replace(OTHER if other else FACTS, identity=identity)
        usable_before = any(row.state in USABLE for row in self.fleet.rows.values())
        mixed = usable_before and self.fleet.model is not None and self.fleet.model.model != facts.model
        before = self.fleet.rows[name].state
        expected = TRANSITIONS[before, Event.REJECTED if mixed else Event.LEARNT]
        assert self.fleet.learnt(name, facts) is expected

    @rule(name=names)
    def drain(self, name: str) -> None:
        assert self.fleet.drain(name, "maintenance") in (State.DRAINING, State.LEFT)

    @rule(name=names)
    def resume(self, name: str) -> None:
        assert self.fleet.resume(name) not in (State.DRAINING, State.LEFT)

    @rule(name=names)
    def leave(self, name: str) -> None:
        assert self.fleet.leave(name, "goodbye") is State.LEFT

    @rule(name=names, epoch=st.integers(1, 3))
    def register(self, name: str, epoch: int) -> None:
        before = self.fleet.rows[name]
        same, state = before.epoch in ("", f"{epoch:032x}"), before.state
        assert self.fleet.join(name, registration(epoch)) is (state if same else State.NEW)

    @rule(name=names)
    def send(self, name: str) -> None:
        if any(instance.name == name for instance in self.fleet.usable()):
            carrying = self.fleet.carrying(name, 5)
            self.loads.append((carrying, name, carrying.__enter__()))

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.loads:
            carrying, _, _ = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
            carrying.__exit__(None, None, None)

    @rule(name=names)
    def missed(self, name: str) -> None:
        self.fleet.missed(name, "slow")

    @rule(name=names)
    def lost(self, name: str) -> None:
        assert self.fleet.lost(name, "gone") not in USABLE

    @rule(name=names)
    def alive(self, name: str) -> None:
        if self.fleet.rows[name].state in USABLE:
            assert self.fleet.alive(name) is State.READY

    @invariant()
    def one_model(self) -> None:
        if not hasattr(self, "fleet"):
            return
        self.fleet.check()
        for name, row in self.fleet.rows.items():
            assert row.in_flight == sum(name == other for _, other, _ in self.loads)
        models = {
            row.facts.model
            for row in self.fleet.rows.values()
            if row.state in USABLE and row.facts is not None
        }
        assert len(models) <= 1
        assert {i.name for i in self.fleet.usable()} == {
            row.name for row in self.fleet.rows.values() if row.state in USABLE
        }


TestLifeOfAFleet = LifeOfAFleet.TestCase
TestLifeOfAFleet.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
