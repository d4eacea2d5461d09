"""Why a part of the cluster ended: the first exception in its log, and processes that the kernel killed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

TRACEBACK = "Traceback (most recent call last):"
CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
STOPS = ("KeyboardInterrupt", "asyncio.exceptions.CancelledError")
"""Exceptions of a process that ends on request."""
START = "$ "
"""Begins the line of a log in which a start writes its command."""
OUT_OF_MEMORY = "out of memory: the kernel killed"
CGROUPS = Path("/sys/fs/cgroup")
VMSTAT = Path("/proc/vmstat")
"""Counts the whole machine's, where there is no cgroup."""


def since_start(lines: Sequence[str]) -> Sequence[str]:
    """The lines after the latest start of a part in its log; all where that is not among them."""
    starts = [place for place, line in enumerate(lines) if line.startswith(START)]
    return lines[starts[-1] + 1 :] if starts else lines


def cause(lines: Sequence[str]) -> str:
    """Why a part ended, from the lines of its log since its start: one line, empty where it does not say.

    Later exceptions mostly follow from the first, such as those of processes whose peer has died.
    """
    for line in lines:
        if line.startswith(OUT_OF_MEMORY):
            return line
    place = 0
    while place < len(lines):
        if TRACEBACK not in lines[place]:
            place += 1
            continue
        place, text = _chain(lines, place)
        if text and text.partition(":")[0] not in STOPS:
            return text
    return ""


def _chain(lines: Sequence[str], place: int) -> tuple[int, str]:
    """Where a chain of tracebacks that begins at ``place`` ends, and its last exception, the outermost."""
    text = ""
    while True:
        place += 1
        while place < len(lines) and (not lines[place].strip() or lines[place][0].isspace()):
            place += 1
        if place >= len(lines):
            return place, text
        text = lines[place].strip()
        following = place + 1
        # The message may have further lines; a blank one is before the words that chain.
        while following < len(lines) and lines[following].strip() and TRACEBACK not in lines[following]:
            following += 1
        words = [at for at in range(following, min(following + 3, len(lines))) if lines[at].strip()]
        if not words or lines[words[0]].strip() not in CHAINED:
            return place + 1, text
        place = words[0]
        while place < len(lines) and TRACEBACK not in lines[place]:
            place += 1


def oom_counters(cgroups: str) -> list[Path]:
    """Files that count the processes that the kernel killed for want of memory, the best first.

    Args:
        cgroups: /proc/self/cgroup. Of version 2 it is a line ``0::/PATH``, of version 1 ``N:memory:/PATH``.
    """
    found = []
    for line in cgroups.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            found += [CGROUPS / path.lstrip("/") / "memory.events", CGROUPS / "memory.events"]
        elif "memory" in controllers.split(","):
            inside = CGROUPS / "memory"
            found += [inside / path.lstrip("/") / "memory.oom_control", inside / "memory.oom_control"]
    return [*found, VMSTAT]


def oom_kills_of(text: str) -> int | None:
    """The counter ``oom_kill`` of such a file; None where it has none."""
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.strip().isdecimal():
            return int(value)
    return None


def oom_kills(counters: Iterable[Path] | None = None) -> tuple[int, Path] | None:
    """How many processes the kernel has killed for want of memory, and which file says so; None where none
    does."""
    if counters is None:
        with suppress(OSError):
            counters = oom_counters(Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace"))
    for counter in counters or ():
        with suppress(OSError):
            count = oom_kills_of(counter.read_text(encoding="utf-8", errors="replace"))
            if count is not None:
                return count, counter
    return None


def memory_line(before: tuple[int, Path] | None, after: tuple[int, Path] | None) -> str:
    """The line of a log about processes that the kernel killed in between; empty where it did not."""
    if before is None or after is None or before[1] != after[1] or after[0] <= before[0]:
        return ""
    return f"{OUT_OF_MEMORY} {after[0] - before[0]} processes meanwhile (oom_kill in {after[1]})"
