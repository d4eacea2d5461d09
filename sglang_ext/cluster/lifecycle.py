"""The life of one part of a cluster (a server or the router), as a table.

Rules:

1. A part that others need is started before them, and ended after them.
2. A part that dies without a stop is started again while its restarts last; then it has died for good, and
   takes the cluster down: a cluster that silently lacks a part is worse than none.
3. A part is stopped by SIGTERM, and killed when its time is over.
4. Late events (an answer to a probe after the stop, a deadline after the event) change nothing. Impossible
   events are bugs, and are raised.

The functions here decide and do nothing; ``supervisor`` acts.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping

from sglang_ext.errors import InternalError


class State(enum.Enum):
    """Where a part is in its life."""

    WAITING = "waiting"
    """Not started: the parts that it needs are not ready."""
    STARTING = "starting"
    """Its process runs and does not answer yet."""
    READY = "ready"
    """It has answered."""
    STOPPING = "stopping"
    """Its stop has begun, and it still runs."""
    ENDED = "ended"
    """It ended because the cluster stopped it."""
    FAILED = "failed"
    """It died for good."""


class Event(enum.Enum):
    """Events in the life of a part."""

    START = "start"
    """The parts that it needs are ready."""
    HEALTHY = "healthy"
    """It answered a probe."""
    DIED = "died"
    """Its process ended, and no restart is left."""
    DIED_RESTARTABLE = "died, restarts left"
    """Its process ended, and it may be started again."""
    START_TIMEOUT = "start timeout"
    """It did not answer in the time a start may take."""
    STOP = "stop"
    """The cluster stops, and no running part needs this one any more."""
    HURRY = "hurry"
    """The user does not want to wait for the end."""
    STOP_TIMEOUT = "stop timeout"
    """It still runs although its guard should have ended it."""


class Action(enum.Enum):
    """Actions of the supervisor."""

    SPAWN = "start its process"
    ANNOUNCE = "say that it is ready"
    TERMINATE = "ask it to end"
    HASTEN = "tell its guard to end it at once"
    KILL = "kill its guard, and it with it"
    FAIL = "take the cluster down and say why"


Transition = tuple[State, tuple[Action, ...]]

_STAY: tuple[Action, ...] = ()

TABLE: Mapping[tuple[State, Event], Transition] = {
    (State.WAITING, Event.START): (State.STARTING, (Action.SPAWN,)),
    (State.WAITING, Event.STOP): (State.ENDED, _STAY),
    (State.STARTING, Event.HEALTHY): (State.READY, (Action.ANNOUNCE,)),
    (State.STARTING, Event.DIED): (State.FAILED, (Action.FAIL,)),
    (State.STARTING, Event.DIED_RESTARTABLE): (State.STARTING, (Action.SPAWN,)),
    (State.STARTING, Event.START_TIMEOUT): (State.STOPPING, (Action.TERMINATE, Action.FAIL)),
    (State.STARTING, Event.STOP): (State.STOPPING, (Action.TERMINATE,)),
    (State.READY, Event.DIED): (State.FAILED, (Action.FAIL,)),
    (State.READY, Event.DIED_RESTARTABLE): (State.STARTING, (Action.SPAWN,)),
    (State.READY, Event.STOP): (State.STOPPING, (Action.TERMINATE,)),
    (State.STOPPING, Event.DIED): (State.ENDED, _STAY),
    (State.STOPPING, Event.DIED_RESTARTABLE): (State.ENDED, _STAY),
    (State.STOPPING, Event.HURRY): (State.STOPPING, (Action.HASTEN,)),
    (State.STOPPING, Event.STOP_TIMEOUT): (State.STOPPING, (Action.KILL,)),
    # Rule 4: too late to matter.
    (State.READY, Event.HEALTHY): (State.READY, _STAY),
    (State.READY, Event.START_TIMEOUT): (State.READY, _STAY),
    (State.STOPPING, Event.HEALTHY): (State.STOPPING, _STAY),
    (State.STOPPING, Event.START_TIMEOUT): (State.STOPPING, _STAY),
    (State.STOPPING, Event.STOP): (State.STOPPING, _STAY),
    (State.ENDED, Event.STOP): (State.ENDED, _STAY),
    (State.ENDED, Event.HURRY): (State.ENDED, _STAY),
    (State.ENDED, Event.STOP_TIMEOUT): (State.ENDED, _STAY),
    (State.FAILED, Event.STOP): (State.FAILED, _STAY),
    (State.FAILED, Event.HURRY): (State.FAILED, _STAY),
}

OVER = frozenset({State.ENDED, State.FAILED})
"""States in which a part has no process and will have none."""


def step(state: State, event: Event) -> Transition:
    """The state after ``event``, and the actions to take.

    Raises:
        InternalError: the event cannot happen in this state.
    """
    try:
        return TABLE[state, event]
    except KeyError:
        raise InternalError(f"a part that is {state.value} cannot meet {event.value!r}") from None


def death(restarts_left: int) -> Event:
    """The event for the end of a process."""
    return Event.DIED_RESTARTABLE if restarts_left > 0 else Event.DIED


def startable(states: Mapping[str, State], needs: Mapping[str, Iterable[str]]) -> list[str]:
    """The parts whose turn to start has come (rule 1), in the order of ``states``.

    Args:
        states: every part by name.
        needs: the parts that each part needs.
    """
    return [
        name
        for name, state in states.items()
        if state is State.WAITING and all(states[other] is State.READY for other in needs[name])
    ]


def stoppable(states: Mapping[str, State], needs: Mapping[str, Iterable[str]]) -> list[str]:
    """The parts that no running part needs any more (rule 1), in the order of ``states``."""
    needed = {other for name, state in states.items() if state not in OVER for other in needs[name]}
    return [name for name, state in states.items() if state not in OVER and name not in needed]
