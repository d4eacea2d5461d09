"""When a router reports that it is ready: it can serve, and has the snapshots of its first instances.

An instance that sends placement events is *awaited* until its first snapshot is in. Requests are served
meanwhile, placed without its snapshot, and record the reason ``Reason.INDEX_AWAITED``.

    state     on                                                    goes to
    --------  ----------------------------------------------------  --------
    IDLE      an instance can take requests                         WAITING
    WAITING   no such instance is awaited, or `wait_s` has passed   READY
    any       no instance can take requests                         IDLE

READY stays so when another instance joins or is started anew: the router still serves with the others.
Pure: the caller samples the instances and passes the time.
"""

from __future__ import annotations

import enum
from collections.abc import Collection


class State(enum.StrEnum):
    """How far a router is."""

    IDLE = "no worker"
    WAITING = "waiting for what instances hold"
    READY = "ok"


class Readiness:
    """See the module's docstring.

    Args:
        wait_s: how long at most the router is not ready for want of snapshots, from the first instance on
            that can take requests.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._since: float | None = None
        self.state = State.IDLE

    def look(self, now: float, usable: Collection[str], awaited: Collection[str]) -> State:
        """Where the router is now.

        Args:
            now: seconds of a clock that does not go back.
            usable: instances that can take requests.
            awaited: those of them whose snapshot is not in.
        """
        if not usable:
            self._since, self.state = None, State.IDLE
            return self.state
        if self._since is None:
            self._since, self.state = now, State.WAITING
        if not awaited or now - self._since >= self._wait_s:
            self.state = State.READY
        return self.state

    def __repr__(self) -> str:
        return f"Readiness({self.state.value})"
