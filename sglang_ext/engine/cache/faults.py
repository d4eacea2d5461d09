"""Faults in calls from SGLang's scheduler to the cache: each is a miss, logged and counted.

An exception that reached the scheduler would end it, and with it every request of the server. A lookup that
fails finds nothing, and KV that cannot be inserted stays with its request. Loads into HBM, eviction, locks
and the return of slots are not guarded: a server that reads KV before it is there, or whose accounts of
slots are wrong, must not go on. For the same reason ranks that are out of step end the server.

The ranks of a server have the same requests in the same order, so that a fault that a request causes is the
same on each of them.
"""

from __future__ import annotations

import logging
from collections import Counter
from types import TracebackType

from sglang_ext.errors import OutOfStepError

logger = logging.getLogger(__name__)

MOST_LOGGED = 20
"""So many faults of a call are logged, and after them one in so many."""


class CacheFaults:
    """Counts faults by call.

    Args:
        strict: raise them (`--kv-check`), so that a test sees them.
    """

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"CacheFaults({dict(self.counts)})"

    def guard(self, call: str) -> Guard:
        """A context that logs and counts exceptions. Unless ``strict``, only `OutOfStepError` leaves it."""
        return Guard(self, call)

    def note(self, call: str, error: BaseException) -> None:
        """Count a fault of a call, and log it with its traceback."""
        self.counts[call] += 1
        count = self.counts[call]
        if count <= MOST_LOGGED or count % MOST_LOGGED == 0:
            logger.error(
                "%s failed in the KV cache (fault %d); the request goes on without it",
                call,
                count,
                exc_info=error,
            )


class Guard:
    """See `CacheFaults.guard`."""

    def __init__(self, faults: CacheFaults, call: str) -> None:
        self._faults = faults
        self._call = call

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if self._faults.strict or isinstance(error, OutOfStepError) or not isinstance(error, Exception):
            return False
        self._faults.note(self._call, error)
        return True
