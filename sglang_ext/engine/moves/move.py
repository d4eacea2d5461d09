"""A move: KV of one prompt on its way to memory of this rank, as a table. No I/O, no clock.

The planner of a mechanism (`Promotions`, `Fetches`, `Prefetcher`, ...) begins a move, a source fills its
memory, and `Moves` takes it from state to state, on all ranks in the same pass:

    state      memory that it holds                 ends by itself when
    WANTED     none                                 never: its planner reserves memory for it, or drops it
    FILLING    a reservation                        its source has ended on every rank
    STREAMING  a reservation, or a request's slots  the forward pass that reads it has ended on every rank
    STOPPING   a reservation                        its source has ended on every rank; it was too late
    LANDED     none: its blocks are in the index
    LATE       none
    DAMAGED    none
    CANCELLED  none

Rules on top:

- Every event is one on which the ranks agree, or that follows from state that they share.
- Memory is released only in a state that holds none, and a move enters such a state only when its source
  writes no more. That is why STOPPING exists, and why a cancelled move waits for its source.
- A move that is not whole on every rank keeps its leading blocks, or none of them (`Move.whole`).
- A forward pass that reads a move while it is filled counts only if the move lands; otherwise the batch is
  discarded (``patches/hooks/restarts.py``).
- An end state takes no event: each move is ended once.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from sglang_ext.errors import InternalError
from sglang_ext.mempool.ledger import Committed, Reservation


class State(enum.Enum):
    """See the module's table."""

    WANTED = "wanted"
    FILLING = "filling"
    STREAMING = "streaming"
    STOPPING = "stopping"
    LANDED = "landed"
    LATE = "late"
    DAMAGED = "damaged"
    CANCELLED = "cancelled"

    @property
    def over(self) -> bool:
        """Whether it is an end state, which holds no memory."""
        return self in _END


class Event(enum.Enum):
    """Events that move a move. The source of each is in brackets."""

    RESERVED = "reserved"
    """[planner] memory is set aside, and a source fills it"""
    READ = "read"
    """[scheduler] a forward pass begins that reads it layer by layer"""
    WHOLE = "whole"
    """[ranks] all blocks are in place and verified on every rank"""
    SHORT = "short"
    """[ranks] the source has ended, and some rank lacks blocks"""
    TOO_LATE = "too_late"
    """[ranks] the deadline has passed on every rank, and the planner gives the move up"""
    CANCEL = "cancel"
    """[planner] its KV is not needed any more, and its source writes no more"""


_END: Final = frozenset({State.LANDED, State.LATE, State.DAMAGED, State.CANCELLED})
_AFTER: Final[Mapping[tuple[State, Event], State]] = {
    (State.WANTED, Event.RESERVED): State.FILLING,
    (State.WANTED, Event.CANCEL): State.CANCELLED,
    (State.FILLING, Event.READ): State.STREAMING,
    (State.FILLING, Event.WHOLE): State.LANDED,
    (State.FILLING, Event.SHORT): State.DAMAGED,
    (State.FILLING, Event.TOO_LATE): State.STOPPING,
    (State.FILLING, Event.CANCEL): State.CANCELLED,
    (State.STREAMING, Event.WHOLE): State.LANDED,
    (State.STREAMING, Event.SHORT): State.DAMAGED,
    (State.STREAMING, Event.CANCEL): State.CANCELLED,
    (State.STOPPING, Event.WHOLE): State.LATE,
    (State.STOPPING, Event.SHORT): State.LATE,
    (State.STOPPING, Event.CANCEL): State.CANCELLED,
}


def after(state: State, event: Event) -> State:
    """The state after an event.

    Raises:
        InternalError: the table has no such step.
    """
    found = _AFTER.get((state, event))
    if found is None:
        raise InternalError(f"a move that is {state.value} cannot take the event {event.value}")
    return found


class Source(Protocol):
    """Fills the memory of one move, in threads of its own. `tests/engine/moves` checks implementations."""

    ends_alike: bool
    """It ends in the same pass on every rank, so that the ranks need not agree on its end."""

    @property
    def blocks(self) -> int | None:
        """Leading blocks that are in place and verified; None until the source has ended."""

    @property
    def first_layer(self) -> bool:
        """Whether the lowest layer of all blocks is in place."""

    def wait(self) -> int:
        """Return when the source has ended, and writes no more: its `blocks`."""

    def cancel(self) -> None:
        """Read nothing more. The source ends soon, not at once."""


class MovePlanner:
    """A mechanism that begins moves. `Moves` calls it in the scheduler's thread. The defaults are those of a
    mechanism whose moves are filled from the start, and neither stream nor have a deadline.
    """

    def offer(self, move: Any) -> Sequence[int] | None:
        """Of a WANTED move: numbers for `offered`, `NOT_YET` where this rank does not know. How many follows
        from state that the ranks share. None: there is nothing to agree on in this pass.
        """
        raise NotImplementedError

    def offered(self, move: Any, agreed: Sequence[int]) -> None:
        """Of a WANTED move: the least numbers of any rank. Reserve memory and call `Moves.fill`, drop the
        move, or leave it WANTED for the next pass.
        """
        raise NotImplementedError

    def late(self, move: Any) -> None:
        """The deadline of an open move has passed on every rank; it has none any more."""

    def may_start(self, move: Any) -> bool:
        """Whether the forward pass of its request may begin here, because the first layer is in place and
        the others are expected to keep ahead of it.
        """
        return False

    def started(self, move: Any) -> None:
        """Every rank's forward pass may begin (`may_start`)."""

    def stream(self, move: Any, slots: Any) -> None:
        """Copy its blocks to slots of HBM as they arrive, in front of the next forward pass."""
        raise NotImplementedError

    def ended(self, move: Any, blocks: int, done: Committed | None) -> None:
        """It has ended (`Move.state`), with so many leading blocks on every rank. done: their insertion into
        the index; None where none was inserted.
        """


@dataclass(eq=False, kw_only=True)
class Move:
    """See the module's docstring.

    Args:
        planner: the mechanism that it belongs to.
        start, blocks: blocks of the prompt before it, and of itself; as of FILLING.
        deadline: on this rank's clock; see `MovePlanner.late`.
        whole: all of its blocks are kept, or none.
        onward: its blocks are copied to the tiers below, too.
    """

    planner: MovePlanner
    start: int = 0
    blocks: int = 0
    deadline: float = math.inf
    whole: bool = False
    onward: bool = True
    state: State = State.WANTED
    reservation: Reservation | None = None
    """The memory that it fills; None where that is a request's own."""
    source: Source | None = None
    streams_to: Hashable = None
    """The request that may be admitted before all layers are in place."""
    streamed: bool = False
    """A forward pass has read it while it was filled."""

    def step(self, event: Event) -> None:
        """Go to the next state.

        Raises:
            InternalError: see `after`.
        """
        self.state = after(self.state, event)
