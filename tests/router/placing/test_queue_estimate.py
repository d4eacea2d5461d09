"""The line of prompts at an instance, and the costs built on it: by a clock that is moved by hand."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from plain_queue_estimate import PlainQueueEstimate
from router_costs import router_costs

from sglang_ext.cost_model import Batch, Batching, CostModel, Passes
from sglang_ext.protocol.agent import Load
from sglang_ext.router.placing.costs import BOUND_DEFAULT, REPORT_S, RouterCosts
from sglang_ext.router.placing.queue_estimate import SHORT, Computed, QueueEstimate
from sglang_ext.router.policies import Instance, Match, Role
from sglang_ext.router.policies.plan import Way
from sglang_ext.router.policies.spans import price_at
from sglang_ext.tiers import Tier


def line(once_s: float = 0.0, chunk: int = 0, factor: float = 1.0) -> QueueEstimate:
    """A second per token, and ``once_s`` per pass."""

    def pass_s(batch: Batch) -> float:
        return once_s + batch.new

    return QueueEstimate(lambda: Passes(pass_s, 0.0, Batching(chunk=chunk)), lambda: factor)


def test_prompts_wait_for_each_other() -> None:
    queue = line()
    assert queue.waits_s(0.0) == 0.0
    queue.enter(2, 0, 0.0, streams=True)
    queue.enter(3, 0, 0.0, streams=True)
    assert queue.waits_s(0.0) == 5.0
    assert queue.waits_s(1.5) == 3.5


def test_what_arrives_while_the_instance_computes_is_computed_together() -> None:
    queue = line(once_s=10.0)
    first = queue.enter(1, 0, 0.0, streams=True)
    others = [queue.enter(1, 0, 1.0, streams=True) for _ in range(4)]
    # 11 s for the first, and one pass for the other four instead of four.
    assert queue.waits_s(1.0) == (11 - 1) + (10 + 4)
    joined = queue.joined(1.0)
    assert joined is not None
    assert joined.adding(1, 0).seconds - joined.seconds == 1.0
    assert queue.first_byte(first, 11.0) == Computed(11.0, 11.0)
    assert queue.waits_s(12.0) == 14 - 1
    # Their first bytes come together: they teach the time of the whole batch.
    assert [queue.first_byte(other, 25.5) for other in others[:3]] == [None, None, None]
    assert queue.first_byte(others[3], 25.5) == Computed(14.0, 14.5)
    assert (queue.waits_s(26.0), len(queue)) == (0.0, 0)


def test_a_batch_that_was_none_teaches_the_same_sums() -> None:
    """The instance computes prompts one after the other that were expected to be one batch."""
    queue = line(once_s=10.0)
    first = queue.enter(1, 0, 0.0, streams=True)
    second, third = (queue.enter(5, 0, 1.0, streams=True) for _ in range(2))
    queue.first_byte(first, 11.0)
    assert queue.first_byte(second, 26.0) is None
    assert queue.waits_s(30.0) == 15 - 4, "the third is expected alone now"
    assert queue.first_byte(third, 41.0) == Computed(20.0, 30.0)


def test_a_group_is_what_one_pass_takes() -> None:
    queue = line(once_s=10.0, chunk=100)
    first = queue.enter(250, 0, 0.0, streams=True)
    others = [queue.enter(60, 0, 0.0, streams=True) for _ in range(3)]
    # Three passes for the first; 100 and 80 of the others.
    assert queue.waits_s(0.0) == (3 * 10 + 250) + (2 * 10 + 180)
    queue.first_byte(first, 280.0)
    assert queue.first_byte(others[0], 350.0) == Computed(70.0, 70.0), "alone: a second one does not fit"
    assert queue.waits_s(350.0) == 2 * (10 + 60), "and neither do the two that are left"


def test_a_group_is_expected_at_any_moment_once_it_is_overdue() -> None:
    queue = line()
    first = queue.enter(2, 0, 0.0, streams=True)
    queue.enter(3, 0, 0.0, streams=True)
    assert queue.waits_s(60.0) == 3.0
    queue.first_byte(first, 60.0)
    assert queue.waits_s(61.0) == 2.0


def test_an_early_first_byte_ends_its_prompt() -> None:
    queue = line()
    first = queue.enter(5, 0, 0.0, streams=True)
    queue.enter(1, 0, 0.0, streams=True)
    assert queue.first_byte(first, 0.5) == Computed(5.0, 0.5)
    assert queue.first_byte(first, 0.6) is None
    assert queue.waits_s(0.5) == 1.0


def test_one_that_overtakes_leaves_the_others_as_they_were() -> None:
    queue = line()
    queue.enter(5, 0, 0.0, streams=True)
    second = queue.enter(1, 0, 0.0, streams=True)
    assert queue.first_byte(second, 2.0) is None
    assert queue.waits_s(2.0) == 3.0


def test_one_that_is_given_up_costs_no_more_and_teaches_nothing() -> None:
    queue = line(once_s=10.0)
    first = queue.enter(1, 0, 0.0, streams=True)
    second, third = (queue.enter(5, 0, 0.0, streams=True) for _ in range(2))
    queue.first_byte(first, 11.0)
    queue.leave(second, 12.0)
    assert queue.waits_s(12.0) == 15 - 1
    assert queue.first_byte(third, 26.0) == Computed(15.0, 15.0)


def test_what_does_not_stream_is_computed_when_its_time_is_over() -> None:
    queue = line(factor=2.0)
    queue.enter(1, 0, 0.0, streams=False)
    queue.enter(2, 0, 0.0, streams=False)
    assert queue.waits_s(0.5) == 2 * 3 - 0.5
    assert (queue.waits_s(2.5), queue.waiting(2.5)) == (3.5, 1)
    queue.enter(4, 0, 3.0, streams=True)
    assert (queue.waits_s(6.0), queue.waiting(6.0)) == (8.0, 1)
    assert (queue.waits_s(100.0), queue.waiting(100.0)) == (0.0, 1)


def test_an_idle_time_is_not_worked_off() -> None:
    queue = line()
    queue.enter(1, 0, 0.0, streams=False)
    queue.enter(2, 0, 10.0, streams=True)
    assert queue.waits_s(10.0) == 2.0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["enter", "first", "leave", "look"]),
            st.integers(0, 200),
            st.floats(0, 100),
            st.booleans(),
            st.integers(0, 5),
        ),
        max_size=60,
    ),
    st.sampled_from([0, 100]),
)
def test_it_never_owes_more_than_was_sent_nor_less_than_nothing(events, chunk) -> None:
    queue = line(once_s=1.0, chunk=chunk)
    now, sent, entries = 0.0, 0.0, []
    learnt = Computed(0.0, 0.0)
    for what, tokens, passes, streams, which in events:
        now += passes
        if what == "enter":
            entries.append(queue.enter(tokens, 0, now, streams=streams))
            sent += max(1, tokens) + 1.0 + (tokens // 100 + 1 if chunk else 0)
        elif what == "leave" and entries:
            queue.leave(entries[which % len(entries)], now)
        elif what == "first" and entries and entries[which % len(entries)].streams:
            found = queue.first_byte(entries[which % len(entries)], now) or Computed(0.0, 0.0)
            learnt = Computed(learnt.expected_s + found.expected_s, learnt.took_s + found.took_s)
        queue.check()
        assert -1e-9 <= queue.waits_s(now) <= sent + 1e-9
        assert queue.waiting(now) == len(queue) <= len(entries)
        assert learnt.expected_s <= sent + 1e-6
        assert learnt.took_s <= now + 1e-6
    for entry in entries:
        queue.leave(entry, now)
    assert queue.waits_s(now) == 0.0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "first", "leave", "look"]),
        st.integers(0, 250),
        st.integers(0, 500),
        st.floats(0, 100),
        st.booleans(),
        st.integers(0, 10**6),
    ),
    max_size=120,
)
ONCE_S = 50.0


def pass_s(batch: Batch) -> float:
    """A fixed time, one per token, and attention, which does not depend on where prompts are cut."""
    return ONCE_S + batch.new + 0.01 * (batch.squares - batch.context_squares)


def run_both(events, batching: Batching, crowd: int, *, in_order: bool) -> Iterator[tuple[float, float, int]]:
    """Both forms with the same events behind ``crowd`` prompts: (expected, by the plain form, prompts gone
    since the line was planned). in_order: prompts leave only as they are computed."""
    idle = Passes(pass_s, 0.0, batching)
    queue, plain = QueueEstimate(lambda: idle, lambda: 1.5), PlainQueueEstimate(lambda: idle, lambda: 1.5)
    first = [("enter", 40 + 7 * number % 60, 0, 0.0, True, 0) for number in range(crowd)]
    now, pairs = 0.0, []
    for what, new, context, later, streams, which in [*first, *events]:
        now += later
        if what == "enter":
            pairs.append(tuple(each.enter(new, context, now, streams=streams) for each in (queue, plain)))
        elif what in ("first", "leave") and pairs:
            among = [pair for pair in pairs if pair[1] in plain.group] if in_order else pairs
            ours, theirs = among[which % len(among)] if among else pairs[0]
            if what == "leave":
                queue.leave(ours, now)
                plain.leave(theirs, now)
            elif theirs.streams:
                assert queue.first_byte(ours, now) == plain.first_byte(theirs, now)
        assert queue.waiting(now) == plain.waiting(now)
        assert queue.waiting_tokens(now) == plain.waiting_tokens(now)
        yield queue.waits_s(now), plain.waits_s(now), queue._gone
        queue.check()


@given(EVENTS, st.sampled_from([Batching(), Batching(chunk=100), Batching(most=100)]))
def test_a_short_line_takes_what_the_plain_form_says(events, batching) -> None:
    for ours, plain, _ in run_both(events[:SHORT], batching, 0, in_order=False):
        assert ours == plain


@settings(max_examples=30)
@given(EVENTS, st.sampled_from([Batching(), Batching(most=100)]))
def test_a_long_line_that_is_not_cut_is_exact_while_prompts_leave_in_order(events, batching) -> None:
    for ours, plain, _ in run_both(events, batching, 3 * SHORT, in_order=True):
        assert ours == pytest.approx(plain, rel=1e-9, abs=1e-6)


@settings(max_examples=30)
@given(EVENTS, st.sampled_from([Batching(), Batching(chunk=100), Batching(most=100)]))
def test_a_long_line_is_wrong_by_at_most_a_pass_for_each_that_left(events, batching) -> None:
    for ours, plain, gone in run_both(events, batching, 3 * SHORT, in_order=False):
        assert abs(ours - plain) <= 1.5 * ONCE_S * (gone + 1) + 1e-6


def test_what_a_call_costs_does_not_grow_with_the_line() -> None:
    """Prompts leave from the middle, and each is priced: a pass is planned a few times at most."""

    def passes_planned(crowd: int) -> float:
        """For each prompt."""
        planned = 0

        def counted_s(batch: Batch) -> float:
            nonlocal planned
            planned += 1
            return 1.0 + batch.new

        idle = Passes(counted_s, 0.0, Batching(chunk=100))
        queue = QueueEstimate(lambda: idle)
        entries = [queue.enter(30, 0, 0.0, streams=True) for _ in range(crowd)]
        for number in range(crowd // 2):
            queue.leave(entries[number * 7919 % crowd], 0.0)
            queue.waits_s(0.0)
        return planned / crowd

    assert passes_planned(4000) < 1.5 * passes_planned(250) < 15


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def instance(name: str, in_flight: int = 0, role: Role = Role.COLOCATED) -> Instance:
    return Instance(name, in_flight, 0, 0, 0, role)


def test_requests_on_their_way_are_the_queue_until_their_first_byte() -> None:
    clock = Clock()
    costs = router_costs(CostModel(), clock)
    alone = costs.exec_s(instance("a"), 1000, 0)
    with costs.sending("a", 1000, 0, streams=True) as first_byte:
        assert costs.queue_s(instance("a", 1)) == pytest.approx(alone)
        assert costs.queue_s(instance("b")) == 0
        clock.now += alone
        first_byte()
        # The step of generation that the next prompt finds under way is left.
        assert costs.queue_s(instance("a", 1)) == pytest.approx(CostModel().decode_s(1))
    assert costs.queue_s(instance("a")) == 0


def test_a_request_that_fails_leaves_nothing_behind() -> None:
    costs = router_costs(CostModel(), Clock())
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
    """Every answer takes ``actual`` times the default cost."""
    clock = Clock()
    costs = router_costs(CostModel(), clock)
    answer(costs, clock, "a", actual * DEFAULT)
    for name in ("a", "b"):
        assert costs.exec_s(instance(name), 2000, 0) == pytest.approx(actual * DEFAULT)
    costs.use(CostModel())
    assert costs.exec_s(instance("a"), 2000, 0) == pytest.approx(DEFAULT)


def test_a_slow_instance_is_distinguished_from_the_others_and_forgiven_in_time() -> None:
    clock = Clock()
    costs = router_costs(CostModel(), clock)
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
    costs = router_costs(CostModel(), clock)
    for _ in range(20):
        answer(costs, clock, "a", 0.95 * DEFAULT)
        answer(costs, clock, "b", 1.05 * DEFAULT)
    assert costs.factor("a") == pytest.approx(costs.factor("b")) == pytest.approx(1.0, rel=0.05)


def test_time_in_the_line_teaches_nothing() -> None:
    """Five prompts at once, one after the other as expected: the last waits five times as long."""
    clock = Clock()
    costs = router_costs(CostModel(), clock, batching=lambda name: Batching(chunk=2000))
    with ExitStack() as stack:
        first_bytes = [stack.enter_context(costs.sending("a", 2000, 0, streams=True)) for _ in range(5)]
        for first_byte in first_bytes:
            clock.now += DEFAULT
            first_byte()
    assert costs.factor("a") == pytest.approx(1.0)


def test_exec_is_what_a_prompt_adds_to_the_batch_that_waits() -> None:
    clock, model = Clock(), CostModel()
    costs = router_costs(model, clock)
    alone = costs.exec_s(instance("a"), 1000, 500)
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(costs.sending("a", 2000, 0, streams=True))
        both = model.passes().adding(2000, 0).adding(2000, 0)
        assert costs.queue_s(instance("a", 3)) == pytest.approx(DEFAULT + both.seconds)
        joins = costs.exec_s(instance("a", 3), 1000, 500)
        assert joins == pytest.approx(both.adding(1000, 500).seconds - both.seconds)
        # The fixed time of the pass is there in any case.
        assert alone - joins == pytest.approx(0.02)
        assert costs.exec_s(instance("b"), 1000, 500) == alone


def test_a_long_prompt_is_cut_where_its_instance_cuts() -> None:
    sizes = {"a": Batching(chunk=1000), "b": Batching()}
    costs = router_costs(CostModel(), Clock(), batching=sizes.__getitem__)
    cut, whole = (costs.exec_s(instance(name), 4000, 0) for name in "ab")
    assert cut - whole == pytest.approx(3 * 0.02)


def test_what_an_instance_says_of_itself_counts_until_it_is_old() -> None:
    """Others have sent it 6 requests, of which 2 wait with 4,000 tokens; this router has sent it one."""
    clock, model = Clock(), CostModel()
    costs = router_costs(model, clock)
    with costs.sending("a", 2000, 0, streams=True) as first_byte:
        costs.on_load("a", Load(running=4, queued=3, queued_tokens=6000), 1)
        others = model.passes().adding(2000, 0).adding(2000, 0).seconds
        assert costs.queue_s(instance("a", 1)) == pytest.approx(DEFAULT + others + model.decode_s(4))
        clock.now += DEFAULT
        first_byte()
        # The reported prompts have been computed for that long, and it generates for one more request.
        assert costs.queue_s(instance("a", 1)) == pytest.approx(others - DEFAULT + model.decode_s(5))
        assert costs.decode_s(instance("a", 1)) == pytest.approx(model.decode_s(6))
    assert costs.decode_s(instance("a")) == pytest.approx(model.decode_s(5))
    clock.now += REPORT_S
    assert costs.queue_s(instance("a")) == 0
    assert costs.decode_s(instance("a")) == pytest.approx(model.decode_s(1))


def test_a_price_loads_a_tier_if_that_is_faster_than_computing() -> None:
    costs, model, there = router_costs(CostModel(), Clock()), CostModel(), instance("a")

    def alone(held: Match) -> Way:
        return price_at(2000, there, (), {"a": held}, costs).alone

    dram = alone(Match(1600, below={Tier.DRAM: 600}))
    assert dram.load_s == costs.load_s(there, Tier.DRAM, 600) > 0
    assert dram.exec_s == model.exec_s(400, 1600)
    # The disk is left out if computing is faster; DRAM is loaded all the same.
    disk = alone(Match(1616, below={Tier.DRAM: 600, Tier.DISK: 16}))
    assert disk.seconds == min(
        dram.load_s + model.exec_s(400, 1600),
        dram.load_s + costs.load_s(there, Tier.DISK, 16) + model.exec_s(384, 1616),
    )
    assert alone(Match(2000)).exec_s == model.exec_s(1, 1999)


def test_an_old_report_leaves_the_table_whether_anyone_decides_or_not() -> None:
    clock = Clock()
    costs, fleet = router_costs(CostModel(), clock), (instance("a"), instance("b"))
    for name in "ab":
        costs.on_load(name, Load(running=4, queued=2, queued_tokens=3000), 0)
    assert costs.outlook(fleet).queue_s.tolist() == pytest.approx([costs.queue_s(each) for each in fleet])
    for _ in range(1000):  # "a" alone goes on to report, and no decision is made meanwhile
        clock.now += REPORT_S / 10
        costs.on_load("a", Load(running=4, queued=2, queued_tokens=3000), 0)
    assert len(costs._reported) <= 11
    busy_s, idle_s = costs.outlook(fleet).queue_s.tolist()
    assert busy_s == pytest.approx(costs.queue_s(fleet[0]))
    assert busy_s > idle_s == costs.queue_s(fleet[1]) == 0.0


def test_what_this_router_knows_of_is_not_counted_twice() -> None:
    costs = router_costs(CostModel(), Clock())
    with costs.sending("a", 1000, 1000, streams=True), costs.sending("a", 1000, 0, streams=True):
        before = costs.queue_s(instance("a", 5))
        costs.on_load("a", Load(running=3, queued=1, queued_tokens=2000), 5)
        assert costs.queue_s(instance("a", 5)) == before
        costs.on_load("a", Load(running=0, queued=0), 5)
        assert before - costs.queue_s(instance("a", 5)) == pytest.approx(CostModel().decode_s(3))


def test_prompts_that_are_computed_together_are_taken_together() -> None:
    """Four first bytes at one moment, after half of the time that they would take one after the other."""
    clock = Clock()
    costs = router_costs(CostModel(), clock)
    for _ in range(10):
        with ExitStack() as stack:
            first_bytes = [stack.enter_context(costs.sending("a", 2000, 0, streams=True)) for _ in range(4)]
            clock.now += 2 * DEFAULT
            for first_byte in first_bytes:
                first_byte()
    # The whole time is the first one's; the remembered part depends on the order of the others.
    assert 0.4 < costs.factor("a") < 0.6


def test_answers_that_do_not_stream_teach_nothing() -> None:
    clock = Clock()
    costs = router_costs(CostModel(), clock)
    with costs.sending("a", 2000, 0, streams=False) as first_byte:
        clock.now += 60.0
        first_byte()
    assert costs.factor("a") == 1.0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e6)), max_size=40))
@example([(1e-320, 1e6), (0.0, 1.0)])
def test_corrections_stay_within_their_bounds(answers) -> None:
    costs = router_costs(CostModel(), Clock())
    for number, (expected, observed) in enumerate(answers):
        costs.observe("ab"[number % 2], expected, observed)
    for name in "abc":
        assert 1 / BOUND_DEFAULT <= costs.factor(name) <= BOUND_DEFAULT


def test_a_single_outlier_is_not_believed_whole() -> None:
    clock = Clock()
    costs = router_costs(CostModel(), clock)
    for _ in range(50):
        answer(costs, clock, "a", DEFAULT)
    answer(costs, clock, "a", 1000 * DEFAULT)
    assert costs.factor("a") < 2
    for _ in range(30):
        answer(costs, clock, "a", DEFAULT)
    assert costs.factor("a") == pytest.approx(1.0, rel=0.1)


def test_transfers_are_possible_where_they_are() -> None:
    costs = router_costs(CostModel(), Clock())
    assert costs.transfer_s(instance("a"), instance("b"), 100) == float("inf")
    hand_over = costs.transfer_s(instance("p", role=Role.PREFILL), instance("d", role=Role.DECODE), 100)
    assert 0 < hand_over < 1
    fetching = router_costs(CostModel(), Clock(), can_fetch=lambda source, target: True)
    # Fetched blocks are in DRAM then.
    load = fetching.load_s(instance("b"), Tier.DRAM, 100)
    assert fetching.transfer_s(instance("a"), instance("b"), 100) == pytest.approx(hand_over + load)
    assert costs.load_s(instance("a"), Tier.DISK, 100) > costs.load_s(instance("a"), Tier.DRAM, 100) > 0
    assert costs.load_s(instance("a"), Tier.DISK, 0) == costs.load_s(instance("a"), Tier.HBM, 100) == 0
