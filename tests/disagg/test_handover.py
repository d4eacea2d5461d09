"""The hand-over's table: every pair of state and event, and the invariants that hold for all of them."""

from __future__ import annotations

import itertools

import pytest

from sglang_ext.disagg.handover import (
    FACTS,
    TABLE,
    VERDICT_SECONDS,
    Event,
    HandoverError,
    ReceiverState,
    SenderState,
    State,
    after,
    ended,
    pins,
)

STATES: list[State] = [*SenderState, *ReceiverState]
OVER = (Event.FAULT, Event.ABORT, Event.PEER_ABORT, Event.PEER_DEAD)
START: dict[type, State] = {SenderState: SenderState.COMPUTING, ReceiverState: ReceiverState.JOINING}


@pytest.mark.parametrize(("state", "event"), list(itertools.product(STATES, Event)), ids=str)
def test_every_pair_stays_on_its_side_or_is_refused(state: State, event: Event) -> None:
    try:
        found = after(state, event)
    except HandoverError:
        assert (state, event) not in TABLE
        return
    assert type(found) is type(state)
    if ended(state):
        assert found is state, "nothing moves a hand-over that is over"


@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("event", OVER, ids=str)
def test_an_end_can_come_in_every_state(state: State, event: Event) -> None:
    found = after(state, event)
    if not ended(state):
        assert found in (SenderState.LOST, ReceiverState.FAILED, ReceiverState.STOPPING)


@pytest.mark.parametrize("event", OVER, ids=str)
def test_slots_that_a_transport_uses_are_not_free_before_it_stopped(event: Event) -> None:
    for state in (ReceiverState.READING, ReceiverState.GRANTED):
        stopping = after(state, event)
        assert pins(stopping)
        assert not ended(stopping)
        assert not pins(after(stopping, Event.STOPPED))


def test_pull_holds_nothing_on_decode_before_prefill_is_done() -> None:
    state: State = ReceiverState.JOINING
    for event in (Event.JOINED, Event.OFFER):
        assert not pins(state)
        state = after(state, event)
    assert state is ReceiverState.READY
    assert not pins(state)
    assert after(after(state, Event.ALLOCATED), Event.ARRIVED) is ReceiverState.HELD


@pytest.mark.parametrize(
    "order", [(Event.JOINED, Event.COMPUTED, Event.JOINED), (Event.COMPUTED, Event.JOINED)], ids=str
)
def test_it_does_not_matter_which_side_is_first(order: tuple[Event, ...]) -> None:
    state: State = SenderState.COMPUTING
    for event in order:
        state = after(state, event)
    assert state is SenderState.OFFERED
    assert after(state, Event.RELEASE) is SenderState.RELEASED


@pytest.mark.parametrize("side", [SenderState, ReceiverState])
def test_every_state_is_reached_and_can_end(side: type) -> None:
    reached = {START[side]}
    while True:
        more = {after_ for (state, _), after_ in TABLE.items() if state in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(side)
    for state in reached:
        assert ended(state) or any(s is state and n is not state for (s, _), n in TABLE.items())


def test_facts_are_complete_and_nothing_that_is_lost_stays_pinned() -> None:
    assert set(FACTS) == set(STATES)
    for state in (SenderState.LOST, SenderState.RELEASED, ReceiverState.FAILED):
        assert ended(state)
        assert not pins(state)
    # A death is noticed, and its pinned pages are free, within five seconds, whatever else goes on.
    assert VERDICT_SECONDS < 5


def test_a_late_message_to_a_live_handover_is_a_bug() -> None:
    with pytest.raises(HandoverError, match="release cannot come to a hand-over that is computing"):
        after(SenderState.COMPUTING, Event.RELEASE)
