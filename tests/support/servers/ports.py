"""Ports of test servers, which no other process takes before they listen."""

from __future__ import annotations

import atexit
import itertools
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

from sglang_ext.cluster.plan import LOOPBACK

PORTS = range(21_000, 31_752)
"""Below those that Linux gives to connections, which would take a port before its server listens."""
BLOCK, STRIDE = 256, 16


class _FreePorts:
    """In turn from a block that is this process's alone, as it listens at the block's first port."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn: Iterator[int] | None = None

    def next(self) -> int:
        with self._lock:
            if self._turn is None:
                self._turn = itertools.cycle(self._claimed())
            for port in self._turn:
                with socket.socket() as probe, suppress(OSError):
                    probe.bind((LOOPBACK, port))
                    break
            return port

    def _claimed(self) -> list[int]:
        firsts = list(PORTS[::BLOCK])
        random.SystemRandom().shuffle(firsts)
        for first in firsts:
            claim = socket.socket()
            try:
                claim.bind((LOOPBACK, first))
                claim.listen()
            except OSError:
                claim.close()
                continue
            atexit.register(claim.close)
            ours = range(first + 1, first + BLOCK)
            # Some take those that follow the one they are given, too.
            return [ours[place * STRIDE % len(ours)] for place in range(len(ours))]
        every = list(PORTS)
        random.SystemRandom().shuffle(every)
        return every


_free_ports = _FreePorts()


def free_port() -> int:
    """A free port on loopback, which neither the system (for port 0) nor this function (to another process)
    hands out again. The first call opens a socket that stays open."""
    return _free_ports.next()
