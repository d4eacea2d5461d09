"""When instances change between prefill and decode: expected times of a split, hysteresis, loads that shift
and loads that do not. Simulated; no I/O."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from role_simulation import Phase, Simulation

from sglang_ext.protocol.agent import Load
from sglang_ext.router.cluster.role_traffic import FEWEST, Ended, RoleTraffic, Sends
from sglang_ext.router.policies.base import Role
from sglang_ext.router.policies.roles import (
    START,
    STOP,
    Candidate,
    History,
    RoleLoads,
    Wish,
    decode_s,
    due_in_s,
    expected_s,
    prefill_wait_s,
    who_changes,
    wish,
)
from sglang_ext.stages import StageTimes

pytestmark = pytest.mark.slow

CALM = RoleLoads(
    prefill=2, decode=2, arrivals=1.0, work=0.5, backlog_s=0.0, running=4.0, stay_s=4.0, slots_s=0.0,
    step_s=0.03, step_more_s=0.002,
)  # fmt: skip
LONG_PROMPTS = Phase(600, 1.5, 0.9, 20)
LONG_ANSWERS = Phase(600, 1.5, 0.1, 100)

loads = st.builds(
    RoleLoads,
    prefill=st.integers(1, 6),
    decode=st.integers(1, 6),
    arrivals=st.floats(0, 50),
    work=st.floats(0, 20),
    backlog_s=st.floats(0, 500),
    running=st.floats(0, 200),
    stay_s=st.floats(0, 100),
    slots_s=st.floats(0, 30),
    step_s=st.floats(1e-4, 0.2),
    step_more_s=st.floats(0, 0.05),
)


def more(there: RoleLoads, **fields: Any) -> RoleLoads:
    return msgspec.structs.replace(there, **fields)


NO_HISTORY = History()


def wished(there: RoleLoads, history: History = NO_HISTORY, now: float = 0.0, takes_s: float = 1.0) -> Wish:
    return wish(there, history, now, dwell_s=60.0, takes_s=takes_s)


@given(loads)
def test_more_instances_of_a_role_never_make_its_part_longer(there: RoleLoads) -> None:
    waits = [prefill_wait_s(there, count, 60.0) for count in range(1, 8)]
    stays = [decode_s(there, count, 60.0) for count in range(1, 8)]
    for values in (waits, stays):
        assert all(value >= 0.0 for value in values)
        assert all(b <= a * (1 + 1e-9) + 1e-9 for a, b in itertools.pairwise(values))


@given(loads)
def test_neither_role_is_left_without_an_instance(there: RoleLoads) -> None:
    found = wished(there)
    assert not (found.role is Role.PREFILL and there.decode == 1)
    assert not (found.role is Role.DECODE and there.prefill == 1)
    # The reported values are the compared ones.
    for split, seconds in found.expected.items():
        prefill, _, decode = split[:-1].partition("P")
        assert seconds == expected_s(there, int(prefill), int(decode), 60.0)
    if found.role is not None:
        assert found.gain_s >= START * next(iter(found.expected.values()))


def test_what_is_short_of_instances_gets_one() -> None:
    assert wished(CALM).role is None
    assert wished(more(CALM, work=2.2)).role is Role.PREFILL
    assert wished(more(CALM, backlog_s=60.0)).role is Role.PREFILL
    assert wished(more(CALM, running=60.0, stay_s=20.0, arrivals=3.0, step_more_s=0.01)).role is Role.DECODE
    # The steps are no longer for that, but there is no room for more at a time.
    full = more(CALM, running=60.0, stay_s=8.0, arrivals=9.0, step_more_s=0.0)
    assert wished(full).role is None
    assert wished(more(full, slots_s=8.0)).role is Role.DECODE


def test_a_change_has_to_be_worth_what_it_costs() -> None:
    there = more(CALM, work=1.92, prefill=2)
    assert wished(there, takes_s=0.0).role is Role.PREFILL
    busy = more(there, running=40.0, stay_s=12.0, step_more_s=0.008, arrivals=3.0, work=1.9)
    gains = [wished(busy, takes_s=takes).gain_s for takes in (0.0, 20.0, 59.0)]
    assert gains == sorted(gains, reverse=True)


def test_a_wish_begins_later_than_it_ends() -> None:
    gains = []
    for step in range(200):
        there = more(CALM, work=0.8 + step / 200)
        fresh = wished(there)
        held = wished(there, History(wish=Wish(Role.PREFILL, since=-5.0)), now=1.0)
        share = held.gain_s / expected_s(there, 2, 2, 60.0)
        gains.append((fresh.role, held.role, share))
        if held.role is not None:
            assert held.since == -5.0
    assert any(fresh is None and held is Role.PREFILL for fresh, held, _ in gains)
    assert all(share >= STOP for _, held, share in gains if held is not None)
    assert all(share >= START for fresh, _, share in gains if fresh is not None)


def test_it_waits_until_the_wish_has_held_and_the_last_change_is_long_ago() -> None:
    wanted = Wish(Role.PREFILL, since=100.0)

    def due(history: History, now: float) -> float:
        return due_in_s(wanted, history, now, dwell_s=60.0, holds_s=10.0)

    assert due(History(), 104.0) == 6.0
    assert due(History(), 110.0) == 0.0
    assert due(History(changed=90.0, gained=Role.PREFILL), 110.0) == 40.0
    back = History(changed=0.0, gained=Role.PREFILL).after(Role.DECODE, 90.0, 60.0)
    assert (back.taken_back, due(back, 110.0)) == (1, 100.0)
    again = back.after(Role.PREFILL, 200.0, 60.0)
    assert again.taken_back == 2
    assert again.after(Role.DECODE, 1e6, 60.0).taken_back == 0, "that one had lasted"
    failed = back.failed(110.0)
    assert (failed.wish.role, due(failed, 111.0)) == (None, 119.0)


def test_who_changes_has_least_to_finish_and_least_that_others_come_for() -> None:
    one, two, three = Candidate("a", 3, 0), Candidate("b", 1, 500), Candidate("c", 1, 100)
    assert who_changes([one, two, three]) == "c"
    assert who_changes([]) is None


@pytest.mark.parametrize("seed", range(3))
def test_it_follows_a_load_that_shifts(seed: int) -> None:
    """And requests are answered sooner than with either split as it is."""
    found = Simulation(1, 2, seed).play(LONG_PROMPTS, LONG_ANSWERS)
    assert [split for _, split in found.changes] == ["2P1D", "1P2D"]
    # Within two dwell times of each shift.
    assert found.changes[0][0] < 120.0
    assert 600.0 < found.changes[1][0] < 720.0
    for split in ((1, 2), (2, 1)):
        fixed = Simulation(*split, seed).play(LONG_PROMPTS, LONG_ANSWERS, controls=False)
        assert not fixed.changes
        assert found.mean_s() < 0.8 * fixed.mean_s()


@settings(max_examples=12, deadline=None)
@given(
    instances=st.integers(3, 5),
    seed=st.integers(0, 1 << 30),
    rate=st.floats(0.4, 3.0),
    share=st.floats(0.05, 1.2),
    tokens=st.floats(10, 200),
    more_s=st.floats(0.0, 0.015),
)
def test_noise_moves_nothing_to_and_fro(
    instances: int, seed: int, rate: float, share: float, tokens: float, more_s: float
) -> None:
    """A constant load, also one beyond any split's capacity, and one at the border of two."""
    prefill = 1 + seed % (instances - 1)
    found = Simulation(prefill, instances - prefill, seed, more_s=more_s)
    found.play(Phase(1200, rate, share * instances / 2 / rate, tokens))
    backs = 0
    for (at, role), (then, other) in itertools.pairwise(found.gained):
        assert then - at >= found.dwell_s
        if other is not role:
            assert then - at >= found.dwell_s * 2.0**backs
            backs += 1
    assert backs <= 4
    assert len(found.gained) - backs <= instances + 1


# -- observing a load ------------------------------------------------------------------------------------


def sends(name: str, requests: int = 0, tokens: int = 0, **fields: Any) -> Sends:
    fields = {"in_flight": 0, "elsewhere": 0, "queued_tokens": 0, "said": None, **fields}
    return Sends(name, requests, tokens, **fields)


def seen(*, elsewhere: int = 0, together: bool = False, said: Load | None = None) -> RoleLoads:
    """Two requests of 500 tokens a second, each computed in 0.2 s, and its 21 tokens generated in 2 s."""
    traffic = RoleTraffic(10.0, lambda: 0.02)
    for second in range(100):
        now = float(second)
        requests = 2 * second
        traffic.sample(
            now,
            [sends("p", requests, 500 * requests, in_flight=1, elsewhere=elsewhere, said=said)],
            [sends("d", in_flight=4, elsewhere=4 * elsewhere, said=said)],
        )
        for number in range(2):
            stages = StageTimes(0.1, 0.4 if together else 0.2, 0.0, 0.01, 2.0)
            at = now if together else now + number / 2
            traffic.ended(at, Ended("p", "d", 500, 21, stages))
    found = traffic.loads(1, 2)
    assert isinstance(found, RoleLoads)
    return found


def test_rates_and_seconds_are_what_was_seen() -> None:
    found = seen()
    assert found.arrivals == pytest.approx(2.0, rel=0.01)
    assert found.work == pytest.approx(0.4, rel=0.01)
    assert found.running == pytest.approx(4.0, rel=0.01)
    # Four at one instance then, two at each of two now.
    assert found.stay_s < 2.0 * 21 / 20
    assert found.stay_s == pytest.approx(21 * (found.step_s + found.step_more_s), rel=0.01)
    assert found.slots_s == pytest.approx(0.01)


def test_prompts_of_one_pass_do_not_count_twice() -> None:
    assert seen(together=True).work == pytest.approx(0.4, rel=0.05)


def test_what_other_routers_send_counts_too() -> None:
    found = seen(elsewhere=1)
    assert found.arrivals == pytest.approx(4.0, rel=0.01)
    assert found.work == pytest.approx(0.8, rel=0.01)


def test_instances_know_better_what_waits_and_runs() -> None:
    found = seen(said=Load(running=9, queued=3, queued_tokens=5000))
    assert found.running == pytest.approx(9.0, rel=0.01)
    assert found.backlog_s == pytest.approx(2.0, rel=0.01)


def test_steps_of_other_batches_teach_what_a_request_adds() -> None:
    traffic = RoleTraffic(10.0, lambda: 0.5)
    for second in range(60):
        batch = 1 + 7 * (second % 2)
        traffic.sample(second, [sends("p")], [sends("d", said=Load(running=batch))])
        step = 0.03 + 0.004 * (batch - 1)
        traffic.ended(second, Ended("p", "d", 10, 11, StageTimes(0.0, 0.1, 0.0, 0.0, 10 * step)))
    found = traffic.loads(1, 1)
    assert isinstance(found, RoleLoads)
    assert found.step_s == pytest.approx(0.03, rel=0.1)
    assert found.step_more_s == pytest.approx(0.004, rel=0.1)


def test_few_long_answers_are_seen_after_many_short_ones() -> None:
    traffic = RoleTraffic(10.0, lambda: 0.02)
    for number in range(200):
        traffic.sample(number / 10, [sends("p")], [sends("d")])
        traffic.ended(number / 10, Ended("p", "d", 10, 5, StageTimes(decode=0.2)))
    before = traffic.loads(1, 1)
    assert isinstance(before, RoleLoads)
    assert before.stay_s == pytest.approx(0.25, rel=0.1)
    for number in range(4):
        traffic.ended(25.0 + 5 * number, Ended("p", "d", 10, 201, StageTimes(decode=10.0)))
    after = traffic.loads(1, 1)
    assert isinstance(after, RoleLoads)
    assert after.stay_s > 5.0


def test_nothing_is_said_before_enough_was_seen() -> None:
    traffic = RoleTraffic(10.0, lambda: 0.02)
    assert "0 answers" in str(traffic.loads(1, 1))
    for _ in range(FEWEST):
        traffic.ended(0.0, Ended("p", "d", 10, 10, StageTimes()))
    assert "long enough" in str(traffic.loads(1, 1))
