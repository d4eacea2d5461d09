"""The line of prompts at an instance, and the costs built on it: by a clock that is moved by hand."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cost_model import CostModel
from sglang_ext.router.dispatch.costs import BOUND_DEFAULT, RouterCosts
from sglang_ext.router.dispatch.queue_estimate import QueueEstimate
from sglang_ext.router.policies import Instance, Role
from sglang_ext.tiers import Tier


def test_prompts_wait_for_each_other() -> None:
    queue = QueueEstimate()
    assert queue.seconds(0.0) == 0.0
    queue.enter(2.0, 0.0, streams=True)
    queue.enter(3.0, 0.0, streams=True)
    assert queue.seconds(0.0) == 5.0
    assert queue.seconds(1.5) == 3.5


def test_the_first_is_expected_at_any_moment_once_it_is_overdue() -> None:
    queue = QueueEstimate()
    first = queue.enter(2.0, 0.0, streams=True)
    queue.enter(3.0, 0.0, streams=True)
    assert queue.seconds(60.0) == 3.0
    queue.leave(first, 60.0)
    assert queue.seconds(61.0) == 2.0


def test_an_early_first_byte_ends_its_prompt() -> None:
    queue = QueueEstimate()
    first = queue.enter(5.0, 0.0, streams=True)
    queue.enter(1.0, 0.0, streams=True)
    queue.leave(first, 0.5)
    queue.leave(first, 0.6)
    assert queue.seconds(0.5) == 1.0


def test_one_that_overtakes_leaves_the_others_as_they_were() -> None:
    queue = QueueEstimate()
    queue.enter(5.0, 0.0, streams=True)
    second = queue.enter(1.0, 0.0, streams=True)
    queue.leave(second, 2.0)
    assert queue.seconds(2.0) == 3.0


def test_what_does_not_stream_is_computed_when_its_time_is_over() -> None:
    queue = QueueEstimate()
    queue.enter(1.0, 0.0, streams=False)
    queue.enter(2.0, 0.0, streams=False)
    queue.enter(4.0, 0.5, streams=True)
    assert queue.seconds(0.5) == 6.5
    assert (queue.seconds(1.5), queue.waiting(1.5)) == (5.5, 2)
    assert (queue.seconds(3.5), queue.waiting(3.5)) == (3.5, 1)
    assert (queue.seconds(100.0), queue.waiting(100.0)) == (0.0, 1)


def test_an_idle_time_is_not_worked_off() -> None:
    queue = QueueEstimate()
    queue.enter(1.0, 0.0, streams=False)
    queue.enter(2.0, 10.0, streams=True)
    assert queue.seconds(10.0) == 2.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "leave", "look"]),
            st.floats(0, 10),
            st.floats(0, 5),
            st.booleans(),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_it_never_owes_more_than_was_sent_nor_less_than_nothing(events) -> None:
    queue = QueueEstimate()
    now, sent, entries = 0.0, 0.0, []
    for what, seconds, passes, streams, which in events:
        now += passes
        if what == "enter":
            entries.append(queue.enter(seconds, now, streams=streams))
            sent += seconds
        elif what == "leave" and entries:
            queue.leave(entries[which % len(entries)], now)
        queue.check()
        assert -1e-9 <= queue.seconds(now) <= sent + 1e-9
        assert queue.waiting(now) == len(queue) <= len(entries)
    for entry in entries:
        queue.leave(entry, now)
    assert queue.seconds(now) == 0.0


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def instance(name: str, in_flight: int = 0, role: Role = Role.COLOCATED) -> Instance:
    return Instance(name, in_flight, 0, 0, 0, role)


def test_requests_on_their_way_are_the_queue_until_their_first_byte() -> None:
    clock = Clock()
    costs = RouterCosts(CostModel(), clock)
    alone = costs.exec_s(instance("a"), 1000, 0)
    with costs.sending("a", 1000, 0, streams=True) as first_byte:
        assert costs.queue_s(instance("a", 1)) == pytest.approx(alone)
        assert costs.queue_s(instance("b")) == 0
        clock.now += alone
        first_byte()
        # What is left is the step of generation that the next prompt finds under way.
        assert costs.queue_s(instance("a", 1)) == pytest.approx(CostModel().decode_s(1))
    assert costs.queue_s(instance("a")) == 0


def test_a_request_that_fails_leaves_nothing_behind() -> None:
    costs = RouterCosts(CostModel(), Clock())
    with pytest.raises(RuntimeError), costs.sending("a", 1000, 0, streams=True):
        raise RuntimeError
    assert costs.queue_s(instance("a")) == 0
    assert costs.factor("a") == 1.0


def answer(costs: RouterCosts, clock: Clock, name: str, seconds: float, tokens: int = 2000) -> None:
    """One prompt, alone at ``name``, whose first byte comes after so many seconds."""
    with costs.sending(name, tokens, 0, streams=True) as first_byte:
        clock.now += seconds
        first_byte()


DEFAULT = CostModel().exec_s(2000, 0)


@pytest.mark.parametrize("actual", [0.1, 1.0, 30.0])
def test_an_uncalibrated_fleet_is_learnt(actual) -> None:
    """Every answer takes ``actual`` times what the defaults say."""
    clock = Clock()
    costs = RouterCosts(CostModel(), clock)
    answer(costs, clock, "a", actual * DEFAULT)
    for name in ("a", "b"):
        assert costs.exec_s(instance(name), 2000, 0) == pytest.approx(actual * DEFAULT)
    costs.use(CostModel())
    assert costs.exec_s(instance("a"), 2000, 0) == pytest.approx(DEFAULT)


def test_a_slow_instance_is_told_from_the_others_and_forgiven_in_time() -> None:
    clock = Clock()
    costs = RouterCosts(CostModel(), clock)
    for _ in range(20):
        for name, times in (("a", 1.0), ("b", 1.0), ("c", 3.0)):
            answer(costs, clock, name, times * DEFAULT)
    assert costs.factor("a") == pytest.approx(costs.factor("b"), rel=0.01)
    assert costs.factor("c") > 1.4 * costs.factor("a")
    for _ in range(300):
        answer(costs, clock, "a", DEFAULT)
        answer(costs, clock, "b", DEFAULT)
    assert costs.factor("c") == pytest.approx(costs.factor("a"))


def test_differences_by_chance_do_not_count() -> None:
    clock = Clock()
    costs = RouterCosts(CostModel(), clock)
    for _ in range(20):
        answer(costs, clock, "a", 0.95 * DEFAULT)
        answer(costs, clock, "b", 1.05 * DEFAULT)
    assert costs.factor("a") == pytest.approx(costs.factor("b")) == pytest.approx(1.0, rel=0.05)


def test_time_in_the_line_teaches_nothing() -> None:
    """Five prompts at once, one after the other as expected: the last waits five times as long."""
    clock = Clock()
    costs = RouterCosts(CostModel(), clock)
    with ExitStack() as stack:
        first_bytes = [stack.enter_context(costs.sending("a", 2000, 0, streams=True)) for _ in range(5)]
        for first_byte in first_bytes:
            clock.now += DEFAULT
            first_byte()
    assert costs.factor("a") == pytest.approx(1.0)


def test_prompts_that_are_computed_together_are_taken_together() -> None:
    """Four first bytes at one moment, after half of what one after the other would take."""
    clock = Clock()
    costs = RouterCosts(CostModel(), clock)
    for _ in range(10):
        with ExitStack() as stack:
            first_bytes = [stack.enter_context(costs.sending("a", 2000, 0, streams=True)) for _ in range(4)]
            clock.now += 2 * DEFAULT
            for first_byte in first_bytes:
                first_byte()
    # The whole time is the first one's; how much of it is remembered depends on who came last.
    assert 0.4 < costs.factor("a") < 0.6


def test_answers_that_do_not_stream_teach_nothing() -> None:
    clock = Clock()
    costs = RouterCosts(CostModel(), clock)
    with costs.sending("a", 2000, 0, streams=False) as first_byte:
        clock.now += 60.0
        first_byte()
    assert costs.factor("a") == 1.0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e6)), max_size=40))
def test_corrections_stay_within_their_bounds(answers) -> None:
    costs = RouterCosts(CostModel(), Clock())
    for number, (expected, observed) in enumerate(answers):
        costs.observe("ab"[number % 2], expected, observed)
    for name in "abc":
        assert 1 / BOUND_DEFAULT <= costs.factor(name) <= BOUND_DEFAULT


def test_a_single_outlier_is_not_believed_whole() -> None:
    clock = Clock()
    costs = RouterCosts(CostModel(), clock)
    for _ in range(50):
        answer(costs, clock, "a", DEFAULT)
    answer(costs, clock, "a", 1000 * DEFAULT)
    assert costs.factor("a") < 2
    for _ in range(30):
        answer(costs, clock, "a", DEFAULT)
    assert costs.factor("a") == pytest.approx(1.0, rel=0.1)


def test_transfers_are_possible_where_they_are() -> None:
    costs = RouterCosts(CostModel(), Clock())
    assert costs.transfer_s(instance("a"), instance("b"), 100) == float("inf")
    hand_over = costs.transfer_s(instance("p", role=Role.PREFILL), instance("d", role=Role.DECODE), 100)
    assert 0 < hand_over < 1
    fetching = RouterCosts(CostModel(), Clock(), can_fetch=lambda source, target: True)
    # What is fetched is in DRAM then.
    load = fetching.load_s(instance("b"), Tier.DRAM, 100)
    assert fetching.transfer_s(instance("a"), instance("b"), 100) == pytest.approx(hand_over + load)
    assert costs.load_s(instance("a"), Tier.DISK, 100) > costs.load_s(instance("a"), Tier.DRAM, 100) > 0
    assert costs.load_s(instance("a"), Tier.DISK, 0) == costs.load_s(instance("a"), Tier.HBM, 100) == 0
