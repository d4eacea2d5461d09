"""From any thread to the scheduler's thread of every rank, in one order.

What changes a cache has to reach all ranks of an instance between the same two passes of their loops, or
their trees part. SGLang has a way on which that holds: what rank 0 receives is broadcast with the requests
of the pass. Commands are put into it (``patches/hooks/messages.py``), so they need no collective of their
own, and they come in one order with the requests.

An idle scheduler that sleeps (``--sleep-on-idle``) is woken.

Each command carries rank 0's time, the only clock by which ranks decide what has expired. When something is
to expire and nobody sends a command, the time comes alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

MOST_WAITING = 10_000
"""Commands that wait for the next pass. More than that comes only when the loop stands still."""


class Command(NamedTuple):
    """One command, as it goes to the schedulers of all ranks."""

    payload: bytes
    """Encoded, as the agent got it; empty when only the time is told."""
    at: float
    """Rank 0's monotonic seconds."""


class RankCommandQueue:
    """Commands for the scheduler of this process. Any thread may put; the scheduler's takes.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[bytes] = deque()
        self._alarm = math.inf
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when there may be something to do."""

    def put(self, payload: bytes) -> bool:
        """Hand a command over. False when too many wait already, and it was dropped."""
        if len(self._waiting) >= MOST_WAITING:
            return False
        self._waiting.append(payload)
        self.wake()
        return True

    def wake(self) -> None:
        """End the scheduler's sleep."""
        with contextlib.suppress(OSError):  # closed meanwhile
            os.eventfd_write(self.fd, 1)

    def take(self) -> list[Command]:
        """What has been put since, in its order. The scheduler's thread only."""
        if not self._waiting and self._alarm == math.inf:
            return []
        now = self._clock()
        commands = []
        with contextlib.suppress(IndexError):
            while True:
                commands.append(Command(self._waiting.popleft(), now))
        if self._alarm <= now:
            self._alarm = math.inf
            commands.append(Command(b"", now))
        return commands

    def tell_time(self, at: float) -> None:
        """Tell the time at that moment, by ``clock``, also when nobody sends a command; not when it was to be
        told before. In the scheduler's thread.
        """
        self._alarm = at

    def slept(self) -> None:
        """Take the wake-ups up to now as seen."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Nothing is put any more."""
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"RankCommandQueue({len(self._waiting)} waiting)"
