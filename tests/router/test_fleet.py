"""The life of an instance: the table, the counters, and what follows from verdicts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from router.exchange import ConnectionLost
from router.fleet import TRANSITIONS, USABLE, Event, Fleet, InstanceFacts, ModelFacts, State
from sglang_ext.errors import InternalError

MODEL = ModelFacts("llama", "LlamaForCausalLM", 32_000, 4096)
FACTS = InstanceFacts(MODEL, "default", "start-1", "colocated", "/models/llama")
OTHER = replace(FACTS, model=replace(MODEL, vocab_size=128_256))


def test_every_state_answers_every_event_but_signs_of_life_of_the_unknown() -> None:
    missing = {(state, event) for state in State for event in Event} - set(TRANSITIONS)
    assert missing == {(state, Event.ALIVE) for state in (State.NEW, State.DOWN, State.UNFIT)}


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


def test_a_restart_is_told_from_a_hiccup() -> None:
    restarted: list[str] = []
    fleet = Fleet(("a",), on_restart=restarted.append)
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
        ({"role": "decode"}, "role is decode"),
        ({"is_generation": False}, "embedding model"),
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
    fleet = Fleet(("a", "b"), on_model=adopted.append)
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


async def test_the_verdict_ends_what_waits_for_the_instance() -> None:
    fleet = Fleet(("a",))
    fleet.learnt("a", FACTS)
    entered = asyncio.Event()

    async def request() -> None:
        with fleet.carrying("a", 1) as load, load.until_lost():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await entered.wait()
    fleet.lost("a", "killed")
    with pytest.raises(ConnectionLost, match="killed"):
        await task
    assert not fleet.rows["a"].waiting
    fleet.check()


async def test_a_cancellation_at_the_same_moment_wins() -> None:
    fleet = Fleet(("a",))
    fleet.learnt("a", FACTS)
    entered = asyncio.Event()

    async def request() -> None:
        with fleet.carrying("a", 1) as load, load.until_lost():
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(request())
    await entered.wait()
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


class LifeOfAFleet(RuleBasedStateMachine):
    """Any order of events keeps the invariants, and who is usable follows from the table."""

    names = st.sampled_from("abc")

    @initialize()
    def start(self) -> None:
        self.fleet = Fleet(("a", "b", "c"), failure_threshold=2)

    @rule(name=names, identity=st.sampled_from("12"), other=st.booleans())
    def learnt(self, name: str, identity: str, other: bool) -> None:
        facts = replace(OTHER if other else FACTS, identity=identity)
        usable_before = any(row.state in USABLE for row in self.fleet.rows.values())
        mixed = usable_before and self.fleet.model is not None and self.fleet.model.model != facts.model
        assert self.fleet.learnt(name, facts) is (State.UNFIT if mixed else State.READY)

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
