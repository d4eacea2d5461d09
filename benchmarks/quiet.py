"""A shared machine that is as quiet as it can be made: what is measured goes before other work.

Where the kernel groups processes by session (``sched_autogroup_enabled``), niceness inside a group says
nothing about other groups; the group's own does. Raising it needs CAP_SYS_NICE; without, measuring goes on,
and the report says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

FIRST = -19
DEFAULT = 0


def go_first(pids: Iterable[int], niceness: int = FIRST) -> bool:
    """Put processes, and all others of their sessions, before other work; whether the kernel did so."""
    done = True
    for pid in pids:
        try:
            with open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file:
                file.write(str(niceness))
        except OSError:
            try:
                os.setpriority(os.PRIO_PROCESS, pid, niceness)
            except OSError:
                done = False
    return done


def undisturbed(seconds: float = 0.2) -> float:
    """The share of a core that this process gets when it wants all of it."""
    begin, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < seconds:
        sum(range(1000))
    return (time.process_time() - used) / (time.perf_counter() - begin)
