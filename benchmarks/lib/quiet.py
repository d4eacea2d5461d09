"""A shared machine that is as quiet as it can be made: the measured processes go before other work.

Where the kernel groups processes by session (``sched_autogroup_enabled``), niceness inside a group says
nothing about other groups; the group's own does. Raising it needs CAP_SYS_NICE; without, measuring goes on,
and the report says so.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

FIRST = -15
"""At which others still get a part of each core, and do not fail for want of it."""
DEFAULT = 0


def go_first(pids: Iterable[int], niceness: int = FIRST) -> bool:
    """Put processes, and all others of their sessions, before other work; whether the kernel did so."""
    done, grouped = True, grouped_by_session()
    for pid in pids:
        try:
            if grouped:
                with open(f"/proc/{pid}/autogroup", "w", encoding="ascii") as file:
                    file.write(str(niceness))
            else:
                for thread in os.listdir(f"/proc/{pid}/task"):
                    os.setpriority(os.PRIO_PROCESS, int(thread), niceness)
        except OSError:
            done = False
    return done


def grouped_by_session() -> bool:
    """Whether the kernel shares the processor between sessions. Where it does not, it still lets a session's
    niceness be written, to no effect."""
    try:
        with open("/proc/sys/kernel/sched_autogroup_enabled", encoding="ascii") as file:
            return file.read().strip() == "1"
    except OSError:
        return False


class Server(Protocol):
    """A server that can be started: ``tests.support.servers.server.ServerProcess``."""

    @property
    def running(self) -> bool: ...

    @property
    def pids(self) -> list[int]: ...

    def start(self) -> None: ...


def start_first(servers: Sequence[Server]) -> None:
    """Start servers at once. They and this process go before other work, while they start, too. The caller
    puts this process back to ``DEFAULT``."""
    with ThreadPoolExecutor(len(servers)) as pool:
        starting = [pool.submit(server.start) for server in servers]
        while not all(each.done() for each in starting):
            go_first([os.getpid(), *(pid for server in servers if server.running for pid in server.pids)])
            time.sleep(1.0)
    for each in starting:
        each.result()


def stay_on(number: int, pids: Iterable[int]) -> None:
    """Keep processes on one of this process's cores, counted around: all their threads, and the processes
    they start from now on. Processes that have ended meanwhile are skipped."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[number % len(cores)]
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task), {core})


def undisturbed(seconds: float = 0.2) -> float:
    """The share of a core that this process gets when it wants all of it."""
    begin, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - begin < seconds:
        sum(range(1000))
    return (time.process_time() - used) / (time.perf_counter() - begin)


def stolen_s() -> float:
    """Seconds, summed over the cores, in which the hypervisor gave this machine's cores to others: a growing
    count in steps of a clock tick (mostly 10 ms); 0.0 where the kernel does not tell."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = file.readline().split()
        return int(fields[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
