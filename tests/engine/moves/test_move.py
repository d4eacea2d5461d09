"""The table of moves."""

from __future__ import annotations

import itertools

import pytest

from sglang_ext.engine.moves.move import Event, Move, MovePlanner, State, after
from sglang_ext.errors import InternalError

OPEN = [state for state in State if not state.over]


def steps(state: State) -> dict[Event, State]:
    """The events that a state takes, and the states that follow."""
    found = {}
    for event in Event:
        try:
            found[event] = after(state, event)
        except InternalError:
            continue
    return found


@pytest.mark.parametrize("state", [state for state in State if state.over])
def test_an_end_takes_no_event(state: State) -> None:
    assert steps(state) == {}


def test_every_state_is_reached_and_every_open_one_comes_to_an_end() -> None:
    reached, ends = {State.WANTED}, {state for state in State if state.over}
    for _ in State:
        reached |= set(itertools.chain.from_iterable(steps(state).values() for state in reached))
        ends |= {state for state in State if ends & set(steps(state).values())}
    assert reached == set(State)
    assert ends == set(State)


@pytest.mark.parametrize("state", OPEN)
def test_every_open_move_can_be_cancelled(state: State) -> None:
    assert steps(state)[Event.CANCEL] is State.CANCELLED


@pytest.mark.parametrize("state", [State.FILLING, State.STREAMING])
def test_only_whole_moves_land(state: State) -> None:
    assert (steps(state)[Event.WHOLE], steps(state)[Event.SHORT]) == (State.LANDED, State.DAMAGED)


def test_a_move_that_was_given_up_does_not_land_even_if_it_becomes_whole() -> None:
    move = Move(planner=MovePlanner())
    for event in (Event.RESERVED, Event.TOO_LATE, Event.WHOLE):
        move.step(event)
    assert move.state is State.LATE


def test_a_wrong_step_names_the_state_and_the_event() -> None:
    with pytest.raises(InternalError, match="a move that is wanted cannot take the event read"):
        after(State.WANTED, Event.READ)
