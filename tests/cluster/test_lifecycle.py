"""The table of a part's life."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.cluster.lifecycle import (
    OVER,
    TABLE,
    Action,
    Event,
    State,
    death,
    startable,
    step,
    stoppable,
)
from sglang_ext.errors import InternalError

LIVING = {State.STARTING, State.READY, State.STOPPING}
"""States with a process."""


@given(st.data())
def test_every_life_starts_a_process_before_it_touches_one(data: st.DataObject) -> None:
    state, process, failed = State.WAITING, False, False
    for _ in range(data.draw(st.integers(0, 12))):
        event = data.draw(st.sampled_from([e for s, e in TABLE if s is state]))
        if event in (Event.DIED, Event.DIED_RESTARTABLE):
            process = False
        before = state
        state, actions = step(state, event)
        for action in actions:
            if action is Action.SPAWN:
                assert not process
                process = True
            elif action in (Action.TERMINATE, Action.HASTEN, Action.KILL, Action.ANNOUNCE):
                assert process
            elif action is Action.FAIL:
                failed = True
        assert process == (state in LIVING)
        assert (state is State.FAILED) <= failed
        if before in OVER:
            assert (state, actions) == (before, ())


def test_only_deaths_and_late_starts_take_the_cluster_down() -> None:
    failing = {key for key, (_, actions) in TABLE.items() if Action.FAIL in actions}
    assert failing == {
        (State.STARTING, Event.DIED),
        (State.READY, Event.DIED),
        (State.STARTING, Event.START_TIMEOUT),
    }


@pytest.mark.parametrize("state", [s for s in State if s not in OVER])
def test_every_state_can_be_stopped(state: State) -> None:
    after, _ = step(state, Event.STOP)
    assert after in {State.STOPPING, State.ENDED}


@pytest.mark.parametrize("state", sorted(LIVING, key=lambda s: s.value))
def test_a_process_may_die_at_any_time(state: State) -> None:
    assert step(state, Event.DIED)[0] in OVER
    assert step(state, Event.DIED_RESTARTABLE)[0] in {State.STARTING, State.ENDED}


def test_what_cannot_happen_is_a_bug() -> None:
    impossible = [key for key in itertools.product(State, Event) if key not in TABLE]
    assert (State.WAITING, Event.DIED) in impossible
    for state, event in impossible:
        with pytest.raises(InternalError, match=state.value):
            step(state, event)


def test_restarts_are_counted() -> None:
    assert death(0) is Event.DIED
    assert death(1) is Event.DIED_RESTARTABLE


NEEDS = {"server-0": (), "server-1": (), "router": ("server-0", "server-1")}


@pytest.mark.parametrize(
    ("first", "second", "router", "start", "stop"),
    [
        (State.WAITING, State.WAITING, State.WAITING, ["server-0", "server-1"], ["router"]),
        (State.READY, State.STARTING, State.WAITING, [], ["router"]),
        (State.READY, State.READY, State.WAITING, ["router"], ["router"]),
        (State.READY, State.READY, State.READY, [], ["router"]),
        (State.READY, State.READY, State.STOPPING, [], ["router"]),
        (State.READY, State.STOPPING, State.ENDED, [], ["server-0", "server-1"]),
        (State.FAILED, State.READY, State.ENDED, [], ["server-1"]),
        (State.ENDED, State.ENDED, State.ENDED, [], []),
    ],
)
def test_who_is_needed_starts_first_and_stops_last(
    first: State, second: State, router: State, start: list[str], stop: list[str]
) -> None:
    states = {"server-0": first, "server-1": second, "router": router}
    assert startable(states, NEEDS) == start
    assert stoppable(states, NEEDS) == stop
