"""The moves of a rank, and the agreement of the ranks on each of their steps.

In each pass the ranks compare, of each move that waits for its source, the numbers of its planner's offer; of
each move that is being filled, whether it is late, and its progress: `NOT_YET`, `_MAY_START`, or `_OVER` plus
the blocks in place. Of moves that a forward pass reads, they compare the blocks when the pass has ended.
Sources that end in the same pass on every rank (`Source.ends_alike`) need no number.

All methods run in the scheduler's thread.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, Final

from sglang_ext.clock import Clock, SystemClock
from sglang_ext.engine.moves.move import Event, Move, MovePlanner, Source, State
from sglang_ext.engine.ranks import NOT_YET, Ranks
from sglang_ext.mempool.ledger import Committed, Reservation

_MAY_START: Final = 0
_OVER: Final = 1


class Moves:
    """See the module's docstring.

    Args:
        ranks: of the instance.
        clock: seconds, monotonic.
    """

    def __init__(self, ranks: Ranks, *, clock: Clock | None = None) -> None:
        self._ranks = ranks
        self.clock = clock or SystemClock()
        """By which planners set deadlines."""
        self._open: dict[Move, None] = {}
        self._streams: dict[Hashable, Move] = {}
        """The moves that may stream to a request, by its handle."""
        self._proposed: list[tuple[Move, State, int]] = []
        """The moves on which the ranks agree in this pass, with their state and number of values."""
        ranks.add(self)

    def __repr__(self) -> str:
        return f"Moves({', '.join(move.state.value for move in self._open)})"

    # -- for planners -------------------------------------------------------------------------------

    def want(self, move: Move) -> None:
        """Ask for a move's offer in each pass from now on."""
        self._open[move] = None

    def fill(self, move: Move, reservation: Reservation | None, source: Source | None) -> None:
        """Memory is set aside for a move (wanted before or not), and a source fills it. Without both, the
        memory is a request's slots, and the source begins with `MovePlanner.stream`.
        """
        move.step(Event.RESERVED)
        move.reservation, move.source = reservation, source
        if reservation is not None:
            move.start, move.blocks = reservation.start, reservation.blocks
        self._open[move] = None

    def stop(self, move: Move) -> None:
        """Give up a move that is too late. It ends, with the blocks in place by then, when its source has."""
        move.step(Event.TOO_LATE)
        self._release(move)
        assert move.source is not None
        move.source.cancel()

    def cancel(self, move: Move) -> None:
        """End a move now. When this returns, nothing writes to its memory, which is free."""
        if move.source is not None:
            move.source.cancel()
            move.source.wait()
        self._end(move, Event.CANCEL, 0)

    def surrendered(self, move: Move) -> None:
        """The engine has taken back the memory of a move whose source has ended."""
        move.step(Event.CANCEL)
        del self._open[move]

    def of(self, planner: MovePlanner) -> list[Move]:
        """The open moves of a planner, in the order in which they began."""
        return [move for move in self._open if move.planner is planner]

    # -- in front of a forward pass -----------------------------------------------------------------

    def admit(self, move: Move, handle: Hashable) -> None:
        """A request may be admitted before all layers of a move are in place."""
        self._release(move)
        move.streams_to = handle
        self._streams[handle] = move

    def blocks_to_stream(self, handle: Hashable, in_memory: int) -> int:
        """The number of blocks that may stream to a request after the ``in_memory`` blocks of the tree."""
        move = self._streams.get(handle)
        return 0 if move is None or move.start != in_memory else move.blocks

    def stream(self, handle: Hashable, slots: Any) -> None:
        """Copy the blocks of `blocks_to_stream` of a request to slots as they arrive."""
        move = self._streams[handle]
        move.step(Event.READ)
        move.streamed = True
        move.planner.stream(move, slots)

    def release(self, handle: Hashable) -> None:
        """A request has been admitted or is gone: nothing more streams to it."""
        move = self._streams.get(handle)
        if move is not None:
            self._release(move)

    def _release(self, move: Move) -> None:
        self._streams.pop(move.streams_to, None)
        move.streams_to = None

    def streams_hold(self) -> bool:
        """After a forward pass: whether all blocks that streamed into it are in place and verified, on every
        rank. They enter the index before the request inserts its own, and are not copied again.
        """
        streams = [move for move in self._open if move.state is State.STREAMING]
        if not streams:
            return True
        arrived = self._ranks.at_once([_wait_for(move) for move in streams])
        for move, blocks in zip(streams, arrived, strict=True):
            self._over(move, blocks)
        return all(move.state is State.LANDED for move in streams)

    # -- in each pass -------------------------------------------------------------------------------

    def propose(self) -> Sequence[int]:
        """Of each move, whether it is late, and its planner's offer or its progress. Wanted moves come
        first, so that a request joins a move under way before that ends.
        """
        self._proposed = []
        if not self._open:
            return ()
        now, said = self.clock.monotonic(), []
        waiting = [move for move in self._open if move.state is State.WANTED]
        filling = [move for move in self._open if move.state in (State.FILLING, State.STOPPING)]
        for move in waiting:
            offer = move.planner.offer(move)
            if offer is not None:
                self._proposed.append((move, move.state, 1 + len(offer)))
                said += [int(now > move.deadline), *offer]
        for move in filling:
            if move.source is not None and not move.source.ends_alike:
                self._proposed.append((move, move.state, 2))
                said += [int(now > move.deadline), self._progress(move)]
        return said

    def _progress(self, move: Move) -> int:
        source = move.source
        assert source is not None
        blocks = source.blocks
        if blocks is not None:
            return _OVER + blocks
        may_start = move.state is State.FILLING and source.first_layer and move.planner.may_start(move)
        return _MAY_START if may_start else NOT_YET

    def act(self, agreed: Sequence[int]) -> None:
        """Take each move's next step."""
        if not (agreed or self._open):
            return
        numbers = iter(agreed)
        for move, state, count in self._proposed if agreed else ():
            late, *rest = itertools.islice(numbers, count)
            if move.state is not state:
                continue  # another move's step, or a call meanwhile, has ended it
            if late:
                move.deadline = math.inf
                move.planner.late(move)
            if move.state is State.WANTED:
                move.planner.offered(move, rest)
            elif rest[0] >= _OVER:
                self._over(move, rest[0] - _OVER)
            elif rest[0] == _MAY_START and move.state is State.FILLING:
                move.planner.started(move)
        self._proposed = []
        for move in list(self._open):
            source = move.source
            if source is not None and source.ends_alike and source.blocks is not None:
                self._over(move, source.blocks)

    def check(self) -> None:
        """Verify the bookkeeping. Raises AssertionError that names the inconsistency."""
        for move in self._open:
            if move.state.over or (move.reservation is not None and not move.reservation.open):
                raise AssertionError(f"a move that is {move.state.value} has no memory and is still open")
        streams = [(move.streams_to, move) for move in self._open if move.streams_to is not None]
        if dict(streams) != self._streams or len(streams) != len(self._streams):
            raise AssertionError("requests to which moves may stream and open moves do not agree")

    def _over(self, move: Move, blocks: int) -> None:
        whole = blocks == move.blocks
        self._end(move, Event.WHOLE if whole else Event.SHORT, 0 if move.whole and not whole else blocks)

    def _end(self, move: Move, event: Event, blocks: int) -> None:
        """Keep the leading ``blocks`` blocks of a move, and release the rest of its memory."""
        move.step(event)
        del self._open[move]
        self._release(move)
        done: Committed | None = None
        if move.reservation is not None:
            done = move.reservation.commit(blocks, onward=move.onward)
        move.planner.ended(move, blocks, done)


def _wait_for(move: Move) -> int:
    assert move.source is not None
    return move.source.wait()
