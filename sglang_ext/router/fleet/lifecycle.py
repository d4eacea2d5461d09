"""The life of an instance in the eyes of one router, as a table."""

from __future__ import annotations

import enum


class State(enum.StrEnum):
    """Where an instance is in its life."""

    NEW = "new"
    """Never answered, since it joined or was restarted."""
    READY = "ready"
    SUSPECT = "suspect"
    """Missed a probe; still given requests, until the verdict."""
    DOWN = "down"
    UNFIT = "unfit"
    """Answers, but cannot serve here: another model, a key we lack."""
    DRAINING = "draining"
    """Finishes its requests and receives no new ones."""
    LEFT = "left"
    """Gone from the fleet, by its own goodbye or by an operator's request. It may live on, and join again."""


class Event(enum.StrEnum):
    """An effect of a probe, a request, an agent or an operator's request."""

    LEARNT = "learnt"
    """It reported its facts, and they fit the fleet."""
    REJECTED = "rejected"
    """It reported its facts, and they do not fit."""
    ALIVE = "alive"
    MISSED = "missed"
    """A probe was not answered in time."""
    LOST = "lost"
    """The verdict: too many probes missed in a row, its agent is silent, or no process listens at its
    port.
    """
    RESTARTED = "restarted"
    """It registered with a new epoch: its former facts and cache are gone."""
    DRAIN = "drain"
    """It is to leave when its requests have ended."""
    DRAINED = "drained"
    """It has finished, or the time for that is over."""
    RESUME = "resume"
    """The drain is taken back, or it comes back."""
    LEAVE = "leave"
    """It leaves, or is removed from the cluster."""


_S, _E = State, Event

TRANSITIONS: dict[tuple[State, Event], State] = {
    (_S.NEW, _E.LEARNT): _S.READY,
    (_S.NEW, _E.REJECTED): _S.UNFIT,
    (_S.NEW, _E.MISSED): _S.NEW,
    (_S.NEW, _E.LOST): _S.NEW,
    (_S.NEW, _E.RESTARTED): _S.NEW,
    (_S.NEW, _E.DRAIN): _S.LEFT,
    (_S.NEW, _E.DRAINED): _S.NEW,
    (_S.NEW, _E.RESUME): _S.NEW,
    (_S.NEW, _E.LEAVE): _S.LEFT,
    (_S.READY, _E.LEARNT): _S.READY,
    (_S.READY, _E.REJECTED): _S.UNFIT,
    (_S.READY, _E.ALIVE): _S.READY,
    (_S.READY, _E.MISSED): _S.SUSPECT,
    (_S.READY, _E.LOST): _S.DOWN,
    (_S.READY, _E.RESTARTED): _S.NEW,
    (_S.READY, _E.DRAIN): _S.DRAINING,
    (_S.READY, _E.DRAINED): _S.READY,
    (_S.READY, _E.RESUME): _S.READY,
    (_S.READY, _E.LEAVE): _S.LEFT,
    (_S.SUSPECT, _E.LEARNT): _S.READY,
    (_S.SUSPECT, _E.REJECTED): _S.UNFIT,
    (_S.SUSPECT, _E.ALIVE): _S.READY,
    (_S.SUSPECT, _E.MISSED): _S.SUSPECT,
    (_S.SUSPECT, _E.LOST): _S.DOWN,
    (_S.SUSPECT, _E.RESTARTED): _S.NEW,
    (_S.SUSPECT, _E.DRAIN): _S.DRAINING,
    (_S.SUSPECT, _E.DRAINED): _S.SUSPECT,
    (_S.SUSPECT, _E.RESUME): _S.SUSPECT,
    (_S.SUSPECT, _E.LEAVE): _S.LEFT,
    (_S.DOWN, _E.LEARNT): _S.READY,
    (_S.DOWN, _E.REJECTED): _S.UNFIT,
    (_S.DOWN, _E.MISSED): _S.DOWN,
    (_S.DOWN, _E.LOST): _S.DOWN,
    (_S.DOWN, _E.RESTARTED): _S.NEW,
    (_S.DOWN, _E.DRAIN): _S.LEFT,
    (_S.DOWN, _E.DRAINED): _S.DOWN,
    (_S.DOWN, _E.RESUME): _S.DOWN,
    (_S.DOWN, _E.LEAVE): _S.LEFT,
    (_S.UNFIT, _E.LEARNT): _S.READY,
    (_S.UNFIT, _E.REJECTED): _S.UNFIT,
    (_S.UNFIT, _E.MISSED): _S.UNFIT,
    (_S.UNFIT, _E.LOST): _S.DOWN,
    (_S.UNFIT, _E.RESTARTED): _S.NEW,
    (_S.UNFIT, _E.DRAIN): _S.LEFT,
    (_S.UNFIT, _E.DRAINED): _S.UNFIT,
    (_S.UNFIT, _E.RESUME): _S.UNFIT,
    (_S.UNFIT, _E.LEAVE): _S.LEFT,
    (_S.DRAINING, _E.LEARNT): _S.DRAINING,
    (_S.DRAINING, _E.REJECTED): _S.LEFT,
    (_S.DRAINING, _E.ALIVE): _S.DRAINING,
    (_S.DRAINING, _E.MISSED): _S.DRAINING,
    (_S.DRAINING, _E.LOST): _S.LEFT,
    (_S.DRAINING, _E.RESTARTED): _S.NEW,
    (_S.DRAINING, _E.DRAIN): _S.DRAINING,
    (_S.DRAINING, _E.DRAINED): _S.LEFT,
    (_S.DRAINING, _E.RESUME): _S.READY,
    (_S.DRAINING, _E.LEAVE): _S.LEFT,
    (_S.LEFT, _E.LEARNT): _S.LEFT,
    (_S.LEFT, _E.REJECTED): _S.LEFT,
    (_S.LEFT, _E.ALIVE): _S.LEFT,
    (_S.LEFT, _E.MISSED): _S.LEFT,
    (_S.LEFT, _E.LOST): _S.LEFT,
    (_S.LEFT, _E.RESTARTED): _S.NEW,
    (_S.LEFT, _E.DRAIN): _S.LEFT,
    (_S.LEFT, _E.DRAINED): _S.LEFT,
    (_S.LEFT, _E.RESUME): _S.NEW,
    (_S.LEFT, _E.LEAVE): _S.LEFT,
}
"""(state, event) -> next state. A pair that is not here is a bug of the caller: ALIVE only comes for
instances with facts.
"""

USABLE = frozenset({State.READY, State.SUSPECT})
"""States in which an instance receives requests."""
FATAL = frozenset({Event.LOST, Event.REJECTED, Event.RESTARTED})
"""Events after which nothing more is expected of requests that have not begun to answer: they are tried
elsewhere."""
