"""Other processes of this host, as /proc shows them."""

from __future__ import annotations

import os

_ENDED = (b"Z", b"X")
_STOPPED = (b"T", b"t")


def process_born(pid: int) -> int:
    """When a process on this host started, in clock ticks; 0 when there is none. Distinguishes it from a
    later process with the same pid.
    """
    fields = _stat(f"/proc/{pid}/stat")
    return 0 if not fields or fields[0] in _ENDED else int(fields[19])


def has_ended(pid: int, born: int) -> bool:
    """Whether a process that was born at `born` has no thread left, or there was none (0). An ended one has
    given up its files, and with them its place on a GPU.
    """
    if born == 0 or process_born(pid) not in (0, born):
        return True
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    states = (_stat(f"/proc/{pid}/task/{thread}/stat") for thread in threads)
    return all(not fields or fields[0] in _ENDED for fields in states)


def stands_still(pid: int) -> bool:
    """Whether every thread of a process has been stopped, or has ended, since this was called.

    Each is looked at once: a thread that goes on afterwards begins its calls afterwards.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    states = (_stat(f"/proc/{pid}/task/{thread}/stat") for thread in threads)
    return all(not fields or fields[0] in (*_STOPPED, *_ENDED) for fields in states)


def _stat(path: str) -> list[bytes]:
    """The fields of a process or thread from its state on; none when it is not there."""
    try:
        with open(path, "rb") as f:
            return f.read().rpartition(b")")[2].split()
    except OSError:
        return []
