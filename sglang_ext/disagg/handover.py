"""Hand-over: the passage of one request's KV from a prefill to a decode rank, as a table. No I/O, no clock.

Pull (KVDirect, section 4.3): prefill computes at once, nothing is held on decode meanwhile; decode allocates
when the KV is complete, reads it one-sidedly, and its COMPLETE releases it. Push: decode allocates first, and
prefill writes.

Prefill's side of a room (`Giving`):

    state      what is pinned on prefill            ends by itself when
    COMPUTING  what the engine holds to compute     never: the engine ends it; pushing, no decode rank has
                                                    met it: JOIN_SECONDS
    COMPLETE   the request's slots                  no decode rank has joined: JOIN_SECONDS
    OFFERED    the request's slots, leased          a lease is not renewed: LEASE_SECONDS
    WRITING    the request's slots (push)           WRITE_SECONDS and what its bytes take
    RELEASED   nothing
    LOST       nothing

Decode's side (`Taking`):

    state      what is pinned on decode             ends by itself when
    JOINING    nothing                              the prefill rank is not found: CONNECT_SECONDS
    WAITING    nothing                              never while the prefill rank lives
    READY      nothing; renews prefill's lease      never while the prefill rank lives
    GRANTED    slots, metadata row (push)           WRITE_SECONDS after prefill has computed
    READING    slots, metadata row                  READ_SECONDS and what its bytes take; renews the lease
    STOPPING   slots, metadata row                  when nothing writes to the slots any more
    HELD       slots, metadata row: the engine's
    FAILED     nothing

Rules on top:

- A side's death is known to the other within VERDICT_SECONDS; it moves every room of that peer
  (`PEER_DEAD`). A room belongs to one connection: a side that only stood still finds the connection ended by
  the other, and its rooms are over too, even if there is a new one at once.
- Slots are free only in a state that pins nothing. On decode that is why STOPPING exists: what still reads
  into, or is written to, slots keeps them.
- The end states take no event but those that change nothing: a late message moves no room.
- A message for a room that is not there is refused; it never makes one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

HEARTBEAT_SECONDS: Final = 1.0
VERDICT_SECONDS: Final = 2.5
JOIN_SECONDS: Final = 10.0
"""How long complete KV waits for a decode rank to join, and a decode rank for its room to appear. Pushing,
also how long a request waits for a decode rank before it is computed."""
CONNECT_SECONDS: Final = 10.0
LEASE_SECONDS: Final = 10.0
RENEW_SECONDS: Final = 1.0
READ_SECONDS: Final = 30.0
WRITE_SECONDS: Final = 30.0
"""For small requests; `moving_seconds` adds what the bytes of a large one take."""
SLOWEST_BYTES_PER_SECOND: Final = 100e6
"""About what a network of 1 Gbit/s moves: whoever is slower than that has stopped."""


def moving_seconds(least: float, nbytes: int) -> float:
    """How long a request of so many bytes may be read or written; least: READ_SECONDS or WRITE_SECONDS."""
    return least + nbytes / SLOWEST_BYTES_PER_SECOND


class Giving(enum.Enum):
    """Prefill's side of a room."""

    COMPUTING = "computing"
    COMPLETE = "complete"
    OFFERED = "offered"
    WRITING = "writing"
    RELEASED = "released"
    LOST = "lost"


class Taking(enum.Enum):
    """Decode's side of a room."""

    JOINING = "joining"
    WAITING = "waiting"
    READY = "ready"
    GRANTED = "granted"
    READING = "reading"
    STOPPING = "stopping"
    HELD = "held"
    FAILED = "failed"


class Event(enum.Enum):
    """What moves a room. Who says so is in brackets."""

    COMPUTED = "computed"
    """[prefill's engine] the KV of the whole prompt is there"""
    JOINED = "joined"
    """[decode] the ranks that take part have said so"""
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


State = Giving | Taking


@dataclass(frozen=True)
class Facts:
    """What a state means for the rest. seconds: its deadline; None when it has none.

    pins: whether slots (and on decode the metadata row) must stay. end: whether nothing follows.
    on_deadline: the event that its deadline is.
    """

    pins: bool
    seconds: float | None = None
    end: bool = False
    on_deadline: Event = Event.FAULT


FACTS: Final[dict[State, Facts]] = {
    Giving.COMPUTING: Facts(True),
    Giving.COMPLETE: Facts(True, JOIN_SECONDS),
    Giving.OFFERED: Facts(True),
    Giving.WRITING: Facts(True, WRITE_SECONDS),
    Giving.RELEASED: Facts(False, end=True),
    Giving.LOST: Facts(False, end=True),
    Taking.JOINING: Facts(False, CONNECT_SECONDS),
    Taking.WAITING: Facts(False),
    Taking.READY: Facts(False),
    Taking.GRANTED: Facts(True),
    Taking.READING: Facts(True, READ_SECONDS),
    Taking.STOPPING: Facts(True),
    Taking.HELD: Facts(True, end=True),
    Taking.FAILED: Facts(False, end=True),
}

_OVER: Final = (Event.FAULT, Event.ABORT, Event.PEER_ABORT, Event.PEER_DEAD)

TABLE: Final[dict[tuple[State, Event], State]] = {
    (Giving.COMPUTING, Event.COMPUTED): Giving.COMPLETE,
    # Decode may be first: the room remembers it, and is complete later.
    (Giving.COMPUTING, Event.JOINED): Giving.COMPUTING,
    (Giving.COMPLETE, Event.JOINED): Giving.OFFERED,
    (Giving.COMPLETE, Event.WRITE): Giving.WRITING,
    (Giving.COMPUTING, Event.WRITE): Giving.COMPUTING,
    # By layer, writing begins before all is computed; and an offer may be asked for again.
    (Giving.OFFERED, Event.JOINED): Giving.OFFERED,
    (Giving.WRITING, Event.WRITE): Giving.WRITING,
    (Giving.OFFERED, Event.RELEASE): Giving.RELEASED,
    (Giving.WRITING, Event.RELEASE): Giving.RELEASED,
    **{
        (state, event): Giving.LOST
        for state in (Giving.COMPUTING, Giving.COMPLETE, Giving.OFFERED, Giving.WRITING)
        for event in _OVER
    },
    (Taking.JOINING, Event.JOINED): Taking.WAITING,
    (Taking.WAITING, Event.OFFER): Taking.READY,
    (Taking.READY, Event.ALLOCATED): Taking.READING,
    (Taking.WAITING, Event.ALLOCATED): Taking.GRANTED,
    (Taking.READING, Event.ARRIVED): Taking.HELD,
    (Taking.GRANTED, Event.ARRIVED): Taking.HELD,
    **{
        (state, event): Taking.FAILED
        for state in (Taking.JOINING, Taking.WAITING, Taking.READY)
        for event in _OVER
    },
    **{(state, event): Taking.STOPPING for state in (Taking.GRANTED, Taking.READING) for event in _OVER},
    # Whatever else happens meanwhile: the slots stay until the transport has stopped.
    **{(Taking.STOPPING, event): Taking.STOPPING for event in (*_OVER, Event.ARRIVED, Event.OFFER)},
    (Taking.STOPPING, Event.STOPPED): Taking.FAILED,
}

_LATE: Final = frozenset(
    {Event.JOINED, Event.OFFER, Event.WRITE, Event.ARRIVED, Event.RELEASE, Event.STOPPED, *_OVER}
)
"""What may still come for a room that has ended: messages on their way, a second abort, a death."""


class HandoverError(Exception):
    """An event that cannot be, in this state: a bug of whoever sent it."""


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
    raise HandoverError(f"{event.value} cannot come to a room that is {state.value}")


def pins(state: State) -> bool:
    """Whether the request's slots on this side must stay as they are."""
    return FACTS[state].pins


def ended(state: State) -> bool:
    """Whether the room is over on this side."""
    return FACTS[state].end
