"""Sessions at work: the rules, random histories, and a crowd with its twin without admission."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.router.dispatch.programs import LEAST, LONG_PAUSE_S, OUTGROWN, Budget, Ended, Programs

CAPACITY = 100.0


def test_programs_go_while_their_kv_fits() -> None:
    programs = Programs()
    assert programs.arrives("a", 60, CAPACITY)
    assert programs.arrives("b", 40, CAPACITY)
    assert not programs.arrives("c", 1, CAPACITY)
    assert programs.arrives("a", 70, CAPACITY), "one that is at work goes on"
    programs.check()


def test_one_that_is_larger_than_hbm_works_alone() -> None:
    programs = Programs()
    assert programs.arrives("large", 1000, CAPACITY)
    assert not programs.arrives("small", 1, CAPACITY)
    assert not programs.ends("large", Ended(1000), 0.0, CAPACITY), (
        "nobody else could go beside the line's rest"
    )
    assert programs.admissible(LONG_PAUSE_S, CAPACITY) == ["small"]


def test_a_program_keeps_its_place_for_its_quantum_of_turns() -> None:
    programs = Programs(quantum=3)
    for turn in range(3):
        assert programs.arrives("a", 90, CAPACITY)
        if turn == 0:
            assert not programs.arrives("b", 50, CAPACITY)
        assert programs.ends("a", Ended(90), float(turn), CAPACITY) is (turn == 2)
        assert programs.admissible(float(turn), CAPACITY) == (["b"] if turn == 2 else [])
    assert not programs.arrives("a", 90, CAPACITY), "it waits for its next turn"


def test_a_program_keeps_its_place_while_no_other_waits() -> None:
    programs = Programs(quantum=1)
    for turn in range(10):
        assert programs.arrives("a", 90, CAPACITY)
        assert not programs.ends("a", Ended(90, pause_s=1000.0), float(turn), CAPACITY)


@pytest.mark.parametrize("expected", [True, False])
def test_a_program_that_pauses_for_long_does_not_count_and_returns_without_waiting(expected: bool) -> None:
    programs = Programs()
    assert programs.arrives("a", 90, CAPACITY)
    assert not programs.arrives("b", 50, CAPACITY)
    pause_s = LONG_PAUSE_S + 1 if expected else None
    assert not programs.ends("a", Ended(90, pause_s=pause_s), 0.0, CAPACITY)
    if not expected:
        assert programs.admissible(LONG_PAUSE_S - 0.1, CAPACITY) == []
    assert programs.admissible(0.0 if expected else LONG_PAUSE_S, CAPACITY) == ["b"]
    assert (programs.working, programs.tokens) == (1, 50)
    assert programs.arrives("a", 91, CAPACITY), "beyond the room"
    assert (programs.working, programs.tokens) == (2, 141)
    programs.check()


def test_one_that_returns_after_a_long_pause_gives_its_place_up_where_it_has_become_too_much() -> None:
    programs = Programs()
    assert programs.arrives("a", 90, CAPACITY)
    assert not programs.arrives("b", 50, CAPACITY)
    assert not programs.arrives("c", 50, CAPACITY)
    programs.ends("a", Ended(90, pause_s=LONG_PAUSE_S + 1), 0.0, CAPACITY)
    assert programs.admissible(0.0, CAPACITY) == ["b", "c"]
    assert programs.arrives("a", 90, CAPACITY)
    assert not programs.arrives("d", 1, CAPACITY)
    assert OUTGROWN * CAPACITY < 190
    assert programs.ends("a", Ended(90), 1.0, CAPACITY)
    assert not programs.ends("b", Ended(50), 1.0, CAPACITY), "the others fit"


# -- the budget ----------------------------------------------------------------------------------------


def test_the_room_grows_with_turns_in_time_and_shrinks_with_late_ones() -> None:
    budget = Budget()
    budget.learn(20, CAPACITY, late=False, most=1000.0)
    assert budget.tokens(CAPACITY) == pytest.approx(120), "as fast as programs are served, at first"
    budget.learn(20, CAPACITY, late=True, most=1000.0)
    assert budget.tokens(CAPACITY) == pytest.approx(110)
    budget.learn(20, CAPACITY, late=False, most=1000.0)
    assert budget.tokens(CAPACITY) == pytest.approx(112), "slowly, once a turn was late"
    for _ in range(5):
        budget.learn(20, CAPACITY, late=False, most=1000.0)
    budget.learn(20, CAPACITY, late=True, most=1000.0)
    assert budget.tokens(CAPACITY) == pytest.approx(112), "the same with one late turn in six"


def test_the_room_has_bounds() -> None:
    budget = Budget()
    for _ in range(100):
        budget.learn(50, CAPACITY, late=True, most=1000.0)
    assert budget.tokens(CAPACITY) == LEAST * CAPACITY
    for _ in range(10_000):
        budget.learn(50, CAPACITY, late=False, most=300.0)
    assert 300 <= budget.tokens(CAPACITY) <= 350


def test_a_program_is_admitted_where_turns_in_time_have_made_room() -> None:
    programs = Programs()
    assert programs.arrives("a", 90, CAPACITY)
    assert not programs.arrives("b", 50, CAPACITY)
    programs.ends("a", Ended(90, late=False), 0.0, CAPACITY)
    assert programs.budget.tokens(CAPACITY) > CAPACITY
    assert programs.admissible(0.0, CAPACITY) == ["b"]


def test_turns_of_which_nothing_is_known_leave_the_room_alone() -> None:
    programs = Programs()
    assert programs.arrives("a", 90, CAPACITY)
    programs.ends("a", Ended(90, late=None), 0.0, CAPACITY)
    assert programs.budget.tokens(CAPACITY) == CAPACITY


def test_nobody_overtakes_and_those_that_leave_hold_up_nobody() -> None:
    programs = Programs()
    assert programs.arrives("a", 90, CAPACITY)
    assert not programs.arrives("large", 95, CAPACITY)
    assert not programs.arrives("small", 5, CAPACITY), "it would fit, and would keep the large one waiting"
    programs.leaves("large")
    assert programs.admissible(0.0, CAPACITY) == ["small"]


def test_all_requests_of_a_program_go_together() -> None:
    programs = Programs(quantum=1)
    assert programs.arrives("a", 90, CAPACITY)
    assert not programs.arrives("b", 50, CAPACITY)
    assert not programs.arrives("b", 60, CAPACITY)
    assert programs.ends("a", Ended(90), 0.0, CAPACITY)
    assert programs.admissible(0.0, CAPACITY) == ["b"]
    assert not programs.ends("b", Ended(60), 0.0, CAPACITY)
    assert programs.working == 1, "its other request is on its way"
    programs.check()


@given(st.randoms(use_true_random=False), st.integers(1, 4))
def test_random_histories(rnd: random.Random, quantum: int) -> None:
    programs = Programs(quantum=quantum)
    running, waiting = Counter[str](), Counter[str]()
    now = 0.0
    for _ in range(120):
        now += rnd.choice([0.1, 5.0, 40.0])
        name = rnd.choice("abcdefgh")
        match rnd.randrange(3):
            case 0:
                went = programs.arrives(name, rnd.randrange(1, 60), CAPACITY)
                (running if went else waiting)[name] += 1
            case 1 if running[name]:
                running[name] -= 1
                ended = Ended(
                    rnd.randrange(1, 60), rnd.choice([None, True, False]), rnd.choice([None, 1.0, 100.0])
                )
                programs.ends(name, ended, now, CAPACITY)
            case 2 if waiting[name]:
                waiting[name] -= 1
                programs.leaves(name)
        for admitted in programs.admissible(now, CAPACITY):
            running[admitted] += waiting.pop(admitted)
        programs.check()
        assert programs.waiting == sum(1 for count in waiting.values() if count)
    # Nothing is forgotten: when all turns end, all that wait go.
    for _ in range(200):
        now += LONG_PAUSE_S
        for name in [name for name, count in running.items() if count]:
            running[name] -= 1
            programs.ends(name, Ended(30), now, CAPACITY)
        for admitted in programs.admissible(now, CAPACITY):
            running[admitted] += waiting.pop(admitted)
    assert not +waiting


@pytest.mark.parametrize("times", [2, 4, 16])
def test_a_crowd_waits_alike_and_finds_its_kv(times: int) -> None:
    """Agents with so many times the KV that fits. HBM holds that of the sessions used last."""
    admitted, waits = crowd(times, admission=True)
    thrashing, _ = crowd(times, admission=False)
    assert admitted >= 0.8, "of turns that find their KV"
    assert thrashing < 0.5
    assert max(waits) <= 2 * sum(waits) / len(waits)


def crowd(times: int, *, admission: bool) -> tuple[float, list[float]]:
    """The share of turns that find their session's KV, and how long each program has waited in all."""
    fits, rnd = 4, random.Random(times)
    names = [f"p{number}" for number in range(fits * times)]
    programs = Programs(quantum=8)
    arrivals = [(rnd.random(), name) for name in names]
    held: list[str] = []
    waited, since = Counter[str](), {}
    hits = turns = 0
    ready: list[tuple[float, str]] = []
    now = 0.0
    while turns < 400 * times:
        if ready and (not arrivals or ready[0][0] <= min(arrivals)[0]):
            now, name = ready.pop(0)
        else:
            now, name = min(arrivals)
            arrivals.remove((now, name))
            if admission and not programs.arrives(name, 25, CAPACITY):
                since[name] = now
                continue
        turns += 1
        hits += name in held
        held = [*(other for other in held if other != name), name][-fits:]
        if admission:
            if programs.ends(name, Ended(25), now, CAPACITY):
                held = [name, *held[:-1]]  # KV that is announced for the others goes after it
            for other in programs.admissible(now, CAPACITY):
                waited[other] += now - since.pop(other)
                ready.append((now, other))
        arrivals.append((now + rnd.uniform(0.5, 1.5), name))
    return hits / turns, [waited[name] for name in names]
