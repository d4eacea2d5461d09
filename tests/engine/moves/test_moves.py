"""How the ranks agree on the steps of moves: a planner and a source that the test steers, and a second rank
that is a list of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sglang_ext.engine.moves.move import Event, Move, MovePlanner, State
from sglang_ext.engine.moves.moves import Moves
from sglang_ext.engine.ranks import NOT_YET, Ranks
from sglang_ext.errors import InternalError
from sglang_ext.mempool.ledger import Committed
from sglang_ext.testing.fakes import FakeClock

BLOCKS = 5


class Steered:
    """A source in the state that the test gives it."""

    def __init__(self, *, ends_alike: bool = False) -> None:
        self.ends_alike = ends_alike
        self.blocks: int | None = None
        self.first_layer = False
        self.cancelled = False

    def wait(self) -> int:
        self.blocks = self.blocks or 0
        return self.blocks

    def cancel(self) -> None:
        self.cancelled = True


class Recorder(MovePlanner):
    """Reserves nothing: its moves fill slots of a request."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.offers: list[int] | None = [NOT_YET]

    def offer(self, move: Move) -> Sequence[int] | None:
        return self.offers

    def offered(self, move: Move, agreed: Sequence[int]) -> None:
        self.calls.append(("offered", *agreed))

    def late(self, move: Move) -> None:
        self.calls.append("late")

    def may_start(self, move: Move) -> bool:
        return True

    def started(self, move: Move) -> None:
        self.calls.append("started")

    def stream(self, move: Move, slots: Any) -> None:
        self.calls.append(("stream", slots))

    def ended(self, move: Move, blocks: int, done: Committed | None) -> None:
        self.calls.append((move.state, blocks))


class Rig:
    """One rank's moves; ``other``: the least numbers of the other rank, by place, where they are smaller."""

    def __init__(self) -> None:
        self.other: list[int] = []
        self.said: list[int] = []
        self.clock = FakeClock()
        self.ranks = Ranks(self._least)
        self.moves = Moves(self.ranks, clock=self.clock)
        self.planner = Recorder()

    def _least(self, numbers: Sequence[int]) -> Sequence[int]:
        self.said = list(numbers)
        others = self.other + [1 << 60] * len(numbers)
        return [*numbers[:2], *(min(pair) for pair in zip(numbers[2:], others, strict=False))]

    def wanted(self, **how: Any) -> Move:
        move = Move(planner=self.planner, **how)
        self.moves.want(move)
        return move

    def filling(self, source: Steered | None = None, **how: Any) -> tuple[Move, Steered]:
        move, source = Move(planner=self.planner, blocks=BLOCKS, **how), source or Steered()
        self.moves.fill(move, None, source)
        return move, source

    def each_pass(self, *other: int) -> list[Any]:
        """One pass; returns the calls of the planner."""
        self.other = list(other)
        self.planner.calls.clear()
        self.ranks.each_pass()
        return list(self.planner.calls)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_the_least_offer_of_any_rank_counts(rig: Rig) -> None:
    rig.wanted()
    rig.planner.offers = [7, 3]
    assert rig.each_pass(0, 4, 9) == [("offered", 4, 3)]
    rig.planner.offers = None  # it was dropped, on all ranks
    assert rig.each_pass() == []


def test_a_move_ends_when_every_rank_has_ended(rig: Rig) -> None:
    move, source = rig.filling()
    assert rig.each_pass() == []
    source.blocks = BLOCKS
    assert rig.each_pass(0, NOT_YET) == []
    assert rig.each_pass(0, 1 + BLOCKS) == [(State.LANDED, BLOCKS)]
    assert rig.each_pass() == []
    with pytest.raises(InternalError):
        move.step(Event.CANCEL)


@pytest.mark.parametrize("whole", [False, True])
def test_the_leading_blocks_of_a_damaged_move_are_kept_or_none(rig: Rig, whole: bool) -> None:
    _, source = rig.filling(whole=whole)
    source.blocks = BLOCKS
    assert rig.each_pass(0, 1 + 2) == [(State.DAMAGED, 0 if whole else 2)]


def test_a_pass_may_start_when_every_rank_has_the_first_layer(rig: Rig) -> None:
    _, source = rig.filling()
    assert rig.each_pass(0, 0) == []
    source.first_layer = True
    assert rig.each_pass(0, NOT_YET) == []
    assert rig.each_pass(0, 0) == ["started"]
    source.blocks = BLOCKS  # this rank has all of it, the other one its first layer
    assert rig.each_pass(0, 0) == ["started"]


def test_a_deadline_counts_once_and_on_every_rank(rig: Rig) -> None:
    move, source = rig.filling(deadline=rig.clock.monotonic() + 1)
    rig.clock.advance(2)
    assert rig.each_pass(0) == []
    assert rig.each_pass(1) == ["late"]
    assert rig.each_pass(1) == []
    rig.moves.stop(move)
    assert source.cancelled
    source.blocks = 2
    assert rig.each_pass() == [(State.LATE, 2)]


def test_a_late_move_that_has_ended_in_the_same_pass_is_late(rig: Rig) -> None:
    move, source = rig.filling(deadline=0.0)
    rig.clock.advance(1)
    source.blocks = BLOCKS
    rig.planner.late = rig.moves.stop  # type: ignore[method-assign]
    assert rig.each_pass() == [(State.LATE, BLOCKS)]
    assert move.state is State.LATE


@pytest.mark.parametrize(("arrived", "state"), [(BLOCKS, State.LANDED), (2, State.DAMAGED)])
def test_a_move_that_a_pass_reads_ends_with_the_pass(rig: Rig, arrived: int, state: State) -> None:
    move, source = rig.filling(start=3)
    rig.moves.admit(move, "request")
    assert rig.moves.blocks_to_stream("request", 3) == BLOCKS
    assert rig.moves.blocks_to_stream("request", 2) == rig.moves.blocks_to_stream("another", 3) == 0
    rig.moves.stream("request", "slots")
    rig.moves.release("request")
    assert rig.moves.blocks_to_stream("request", 3) == 0
    source.blocks = BLOCKS
    assert rig.each_pass() == [], "while the pass reads it, the move does not end"
    rig.other = [arrived]
    assert rig.moves.streams_hold() is (arrived == BLOCKS)
    assert rig.planner.calls == [(state, arrived)]
    assert move.streamed
    assert rig.moves.streams_hold(), "nothing streams any more"


def test_ranks_compare_nothing_where_no_move_needs_it(rig: Rig) -> None:
    move, source = rig.filling(Steered(ends_alike=True))
    waits = Move(planner=rig.planner, blocks=BLOCKS)
    rig.moves.fill(waits, None, None)
    assert rig.each_pass() == []
    source.blocks = BLOCKS
    assert rig.each_pass() == [(State.LANDED, BLOCKS)]
    assert rig.ranks.vectors == 0
    assert rig.moves.of(rig.planner) == [waits]
    assert not waits.state.over
    assert move.state.over


def test_a_cancelled_move_waits_for_its_source(rig: Rig) -> None:
    move, source = rig.filling()
    rig.moves.admit(move, "request")
    rig.moves.cancel(move)
    assert source.cancelled
    assert source.blocks == 0, "it was waited for"
    assert rig.planner.calls == [(State.CANCELLED, 0)]
    assert rig.moves.blocks_to_stream("request", 0) == 0
    assert rig.each_pass() == []


def test_a_move_that_another_ends_in_the_same_pass_takes_no_step(rig: Rig) -> None:
    first, one = rig.filling()
    second, other = rig.filling()
    one.blocks = other.blocks = BLOCKS

    def ended(move: Move, blocks: int, done: Committed | None) -> None:
        rig.planner.calls.append(move)
        if move is first:
            rig.moves.cancel(second)

    rig.planner.ended = ended  # type: ignore[method-assign]
    assert rig.each_pass() == [first, second]
    assert second.state is State.CANCELLED


def test_a_request_takes_the_place_of_another(rig: Rig) -> None:
    move, _ = rig.filling()
    rig.moves.admit(move, "first")
    rig.moves.admit(move, "second")
    assert (rig.moves.blocks_to_stream("first", 0), rig.moves.blocks_to_stream("second", 0)) == (0, BLOCKS)
    rig.moves.release("first")
    assert rig.moves.blocks_to_stream("second", 0) == BLOCKS


def test_the_check_sees_a_request_that_two_moves_stream_to(rig: Rig) -> None:
    first, _ = rig.filling()
    second, _ = rig.filling(start=BLOCKS)
    rig.moves.admit(first, "request")
    rig.moves.check()
    rig.moves.admit(second, "request")
    with pytest.raises(AssertionError, match="do not agree"):
        rig.moves.check()
