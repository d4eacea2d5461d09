"""Hand-over: the passage of one request's KV from a prefill to a decode rank, as a table. No I/O, no clock.

Slots are those of all pools that hold something of the request: of all tokens, of a window, of a state. They
are pinned and freed together.

Pull (KVDirect, section 4.3): prefill computes at once, nothing is held on decode meanwhile; decode allocates
when the KV is complete, reads it one-sidedly, and its COMPLETE releases it. Push: decode allocates first, and
prefill writes.

Prefill's side of a hand-over (`SenderState`):

    state      pinned on prefill                    ends by itself when
    COMPUTING  slots that the engine computes into  never: the engine ends it; pushing, no decode rank has
                                                    met it: JOIN_SECONDS
    COMPLETE   the request's slots                  no decode rank has joined: JOIN_SECONDS
    OFFERED    the request's slots, leased          a lease is not renewed: LEASE_SECONDS
    WRITING    the request's slots (push)           WRITE_SECONDS and the time for its bytes
    RELEASED   nothing
    LOST       nothing

Decode's side (`ReceiverState`):

    state      pinned on decode                     ends by itself when
    JOINING    nothing                              the prefill rank is not found: CONNECT_SECONDS
    WAITING    nothing                              never while the prefill rank lives
    READY      nothing; renews prefill's lease      never while the prefill rank lives
    GRANTED    slots, metadata row (push)           WRITE_SECONDS after prefill has computed
    READING    slots, metadata row                  READ_SECONDS and the time for its bytes; renews the lease
    STOPPING   slots, metadata row                  when nothing writes to the slots any more
    HELD       slots, metadata row: the engine's
    FAILED     nothing

Rules on top:

- A side's death is known to the other within VERDICT_SECONDS; it moves every hand-over of that peer
  (`PEER_DEAD`). A hand-over belongs to one connection: a side that only stood still finds the connection
  ended by the other, and its hand-overs are over too, even if there is a new one at once. A hand-over
  that it begins before it notices this is not over: prefill refuses to join by a connection that it has
  ended, and decode joins by a new one, once; ranks of prefill that had let it join by the former are left
  (`LEFT`).
- Slots are free only in a state that pins nothing. On decode that is why STOPPING exists: a read into the
  slots, or a write to them, that is still under way keeps them.
- The end states take no event but those that change nothing: a late message moves no hand-over.
- A message for a hand-over that is not there is refused; it never makes one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

HEARTBEAT_SECONDS: Final = 1.0
VERDICT_SECONDS: Final = 2.5
JOIN_SECONDS: Final = 10.0
"""How long complete KV waits for a decode rank to join, and a decode rank for its hand-over to appear.
Pushing, also how long a request waits for a decode rank before it is computed."""
CONNECT_SECONDS: Final = 10.0
LEASE_SECONDS: Final = 10.0
RENEW_SECONDS: Final = 1.0
READ_SECONDS: Final = 30.0
WRITE_SECONDS: Final = 30.0
"""For small requests; `moving_seconds` adds the time for the bytes of a large one."""
SLOWEST_BYTES_PER_SECOND: Final = 100e6
"""About the rate of a network of 1 Gbit/s: a slower transfer counts as stopped."""


def moving_seconds(least: float, nbytes: int) -> float:
    """How long a request of so many bytes may be read or written; least: READ_SECONDS or WRITE_SECONDS."""
    return least + nbytes / SLOWEST_BYTES_PER_SECOND


class SenderState(enum.Enum):
    """Prefill's side of a hand-over."""

    COMPUTING = "computing"
    COMPLETE = "complete"
    OFFERED = "offered"
    WRITING = "writing"
    RELEASED = "released"
    LOST = "lost"


class ReceiverState(enum.Enum):
    """Decode's side of a hand-over."""

    JOINING = "joining"
    WAITING = "waiting"
    READY = "ready"
    GRANTED = "granted"
    READING = "reading"
    STOPPING = "stopping"
    HELD = "held"
    FAILED = "failed"


class Event(enum.Enum):
    """Events that move a hand-over. The source of each is in brackets."""

    COMPUTED = "computed"
    """[prefill's engine] the KV of the whole prompt is there"""
    JOINED = "joined"
    """[decode] all ranks that take part have reported it"""
    LEFT = "left"
    """[decode] a rank takes its part back, to take part by another connection"""
    OFFER = "offer"
    """[prefill] the KV is complete, and leased"""
    ALLOCATED = "allocated"
    """[decode's engine] slots and a metadata row are set aside"""
    WRITE = "write"
    """[prefill] writing into granted slots begins (push)"""
    ARRIVED = "arrived"
    """[decode] every byte is in place and verified"""
    RELEASE = "release"
    """[decode] COMPLETE of every rank; or prefill has written everything"""
    FAULT = "fault"
    """[transport, deadline] stale, refused, expired, or too late"""
    ABORT = "abort"
    """[own engine] the request is over"""
    PEER_ABORT = "peer_abort"
    """[other side's engine] the request is over there"""
    PEER_DEAD = "peer_dead"
    """[heartbeat] the other side is gone"""
    STOPPED = "stopped"
    """[own transport] nothing reads or writes the slots any more"""


State = SenderState | ReceiverState


@dataclass(frozen=True)
class Facts:
    """The consequences of a state. seconds: its deadline; None when it has none.

    pins: whether slots (and on decode the metadata row) must stay. end: whether nothing follows.
    on_deadline: the event that its deadline is.
    """

    pins: bool
    seconds: float | None = None
    end: bool = False
    on_deadline: Event = Event.FAULT


FACTS: Final[dict[State, Facts]] = {
    SenderState.COMPUTING: Facts(True),
    SenderState.COMPLETE: Facts(True, JOIN_SECONDS),
    SenderState.OFFERED: Facts(True),
    SenderState.WRITING: Facts(True, WRITE_SECONDS),
    SenderState.RELEASED: Facts(False, end=True),
    SenderState.LOST: Facts(False, end=True),
    ReceiverState.JOINING: Facts(False, CONNECT_SECONDS),
    ReceiverState.WAITING: Facts(False),
    ReceiverState.READY: Facts(False),
    ReceiverState.GRANTED: Facts(True),
    ReceiverState.READING: Facts(True, READ_SECONDS),
    ReceiverState.STOPPING: Facts(True),
    ReceiverState.HELD: Facts(True, end=True),
    ReceiverState.FAILED: Facts(False, end=True),
}

_OVER: Final = (Event.FAULT, Event.ABORT, Event.PEER_ABORT, Event.PEER_DEAD)

TABLE: Final[dict[tuple[State, Event], State]] = {
    (SenderState.COMPUTING, Event.COMPUTED): SenderState.COMPLETE,
    # Decode may be first: the hand-over remembers it, and is complete later.
    (SenderState.COMPUTING, Event.JOINED): SenderState.COMPUTING,
    (SenderState.COMPLETE, Event.JOINED): SenderState.OFFERED,
    (SenderState.COMPLETE, Event.WRITE): SenderState.WRITING,
    (SenderState.COMPUTING, Event.WRITE): SenderState.COMPUTING,
    # By layer, writing begins before all is computed; and an offer may be asked for again.
    (SenderState.OFFERED, Event.JOINED): SenderState.OFFERED,
    (SenderState.WRITING, Event.WRITE): SenderState.WRITING,
    (SenderState.COMPUTING, Event.LEFT): SenderState.COMPUTING,
    (SenderState.COMPLETE, Event.LEFT): SenderState.COMPLETE,
    (SenderState.OFFERED, Event.LEFT): SenderState.COMPLETE,
    (SenderState.OFFERED, Event.RELEASE): SenderState.RELEASED,
    (SenderState.WRITING, Event.RELEASE): SenderState.RELEASED,
    **{
        (state, event): SenderState.LOST
        for state in (SenderState.COMPUTING, SenderState.COMPLETE, SenderState.OFFERED, SenderState.WRITING)
        for event in _OVER
    },
    (ReceiverState.JOINING, Event.JOINED): ReceiverState.WAITING,
    # Once more, by another connection.
    (ReceiverState.WAITING, Event.JOINED): ReceiverState.WAITING,
    (ReceiverState.WAITING, Event.OFFER): ReceiverState.READY,
    (ReceiverState.READY, Event.ALLOCATED): ReceiverState.READING,
    (ReceiverState.WAITING, Event.ALLOCATED): ReceiverState.GRANTED,
    (ReceiverState.READING, Event.ARRIVED): ReceiverState.HELD,
    (ReceiverState.GRANTED, Event.ARRIVED): ReceiverState.HELD,
    **{
        (state, event): ReceiverState.FAILED
        for state in (ReceiverState.JOINING, ReceiverState.WAITING, ReceiverState.READY)
        for event in _OVER
    },
    **{
        (state, event): ReceiverState.STOPPING
        for state in (ReceiverState.GRANTED, ReceiverState.READING)
        for event in _OVER
    },
    # Whatever else happens meanwhile: the slots stay until the transport has stopped.
    **{
        (ReceiverState.STOPPING, event): ReceiverState.STOPPING
        for event in (*_OVER, Event.ARRIVED, Event.OFFER)
    },
    (ReceiverState.STOPPING, Event.STOPPED): ReceiverState.FAILED,
}

_LATE: Final = frozenset(
    {Event.JOINED, Event.LEFT, Event.OFFER, Event.WRITE, Event.ARRIVED, Event.RELEASE, Event.STOPPED, *_OVER}
)
"""Events that may still come for a hand-over that has ended: messages on their way, a second abort, a
death."""


class HandoverError(Exception):
    """An event that cannot be, in this state: a bug of its sender."""


def after(state: State, event: Event) -> State:
    """The state that follows.

    Raises:
        HandoverError: the event cannot come in this state.
    """
    found = TABLE.get((state, event))
    if found is not None:
        return found
    if FACTS[state].end and event in _LATE:
        return state
    raise HandoverError(f"{event.value} cannot come to a hand-over that is {state.value}")


def pins(state: State) -> bool:
    """Whether the request's slots on this side must stay as they are."""
    return FACTS[state].pins


def ended(state: State) -> bool:
    """Whether the hand-over is over on this side."""
    return FACTS[state].end
