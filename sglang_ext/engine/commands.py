"""Commands from any thread to the scheduler's thread of every rank, in one order.

A change to the cache has to reach all ranks of an instance between the same two passes of their loops;
otherwise their trees diverge. SGLang has a path with this property: messages that rank 0 receives are
broadcast with the requests of the pass. Commands travel on that path (``patches/hooks/messages.py``), so they
need no collective of their own, and arrive in one order with the requests.

A command wakes an idle scheduler that sleeps (``--sleep-on-idle``).

Each command carries rank 0's time, the only clock by which ranks expire hints and tickets. When an expiry is
due and no command is queued, a command with the time alone is broadcast.
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
"""Commands that may wait for the next pass. More than that arrive only while the loop is blocked."""


class Command(NamedTuple):
    """One command, as it goes to the schedulers of all ranks."""

    payload: bytes
    """Encoded, as the agent received it; empty for a command with the time alone."""
    at: float
    """Rank 0's monotonic seconds."""


class RankCommandQueue:
    """Commands for the scheduler of this process. Any thread may put; the scheduler's thread takes.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: deque[bytes] = deque()
        self._alarm = math.inf
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable when commands may be waiting."""

    def put(self, payload: bytes) -> bool:
        """Queue a command. False when the queue is full and the command was dropped."""
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
        """Commands queued since the last call, in order. The scheduler's thread only."""
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

    def broadcast_time_at(self, at: float) -> None:
        """Broadcast the time at that moment, by ``clock``, even if no command is queued then. Replaces the
        moment of an earlier call. In the scheduler's thread.
        """
        self._alarm = at

    def slept(self) -> None:
        """Clear the wake-ups up to now."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close the descriptor. No command may be queued afterwards."""
        os.close(self.fd)

    def __repr__(self) -> str:
        return f"RankCommandQueue({len(self._waiting)} waiting)"
