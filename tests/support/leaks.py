"""Resources that a test leaks: threads, child processes, open files, shared memory, temporary files.

`Resources.take` is a picture of the resources of this process now. A `LeakGuard` compares pictures: a
resource that a test has left is a leak, unless a longer-lived owner (a session's fixture, a pool of servers)
adopted it with `adopting`. Adopted resources must be gone in the end.

A process whose parent has ended is below this one no more. After `mark_processes`, every new process carries
a mark in its environment and is found by it even when its parent has ended.

Linux only: it reads /proc.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from multiprocessing import resource_tracker
from pathlib import Path

from sglang_ext.cluster.guard import below

SETTLE_SECONDS = 3.0
"""Longest time for resources that are already being released (a joined thread's exit, a reaped process)."""
ORPHANED_SECONDS = 20.0
"""The same for shared memory: segments of servers killed by concurrent tests have no holder until their
guards remove them."""
POLL_SECONDS = 0.01

SHARED_MEMORY = Path("/dev/shm")
IGNORED_SEGMENTS = ("sglang_loads_", "sem.")
"""Shared memory whose name does not identify its owner, and which processes that are killed leave behind on a
machine that others use too: the load reports of SGLang servers that run without our guard, and semaphores
(Python's resource tracker warns about this process's own)."""
IGNORED_TEMPORARY = ("torchinductor_",)
"""Importing torch makes this folder, once."""


MARK = "SGLANG_EXT_TEST_RUN"
"""The variable that names the run of tests that started a process. A nested run appends its own mark."""


def mark_processes() -> None:
    """Mark the processes started from now on, so that they count as ours even when orphaned."""
    os.environ[MARK] = f"{os.environ.get(MARK, '')}/{os.getpid()}-{os.urandom(4).hex()}"


@dataclass(frozen=True)
class Thread:
    """A Python thread. Its name may change; its identifier may be reused after its end."""

    thread: threading.Thread
    name: str = field(compare=False)


@dataclass(frozen=True)
class Process:
    """A process below this one, now or earlier. Later processes with the same id differ in `started`."""

    pid: int
    started: int
    command: str = field(compare=False)
    parent: int = field(compare=False, default=0)


@dataclass(frozen=True)
class OpenFile:
    """A file descriptor and its target, as /proc shows it."""

    descriptor: int
    target: str


@dataclass(frozen=True)
class Resources:
    """The resources of this process at one moment."""

    threads: frozenset[Thread] = frozenset()
    processes: frozenset[Process] = frozenset()
    files: frozenset[OpenFile] = frozenset()
    shared_memory: frozenset[str] = frozenset()
    temporary: frozenset[str] = frozenset()

    @classmethod
    def take(cls) -> Resources:
        """A picture of now. Python's resource tracker, which lives as long as the process, is left out."""
        return cls(
            frozenset(Thread(t, t.name) for t in threading.enumerate()),
            frozenset(_processes()),
            frozenset(_files()),
            frozenset(_shared_memory()),
            frozenset(
                name for name in _names(Path(tempfile.gettempdir())) if not name.startswith(IGNORED_TEMPORARY)
            ),
        )

    def __sub__(self, other: Resources) -> Resources:
        return Resources(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    def __or__(self, other: Resources) -> Resources:
        return Resources(*(getattr(self, f.name) | getattr(other, f.name) for f in fields(self)))

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) for f in fields(self))

    def describe(self) -> str:
        """One line for each thing."""
        lines = [f"thread {t.name!r}" for t in self.threads]
        lines += [f"process {p.pid}: {p.command}" for p in self.processes]
        lines += [f"open file {f.descriptor}: {f.target}" for f in self.files]
        lines += [f"shared memory {SHARED_MEMORY / name}" for name in self.shared_memory]
        lines += [f"temporary file {Path(tempfile.gettempdir()) / name}" for name in self.temporary]
        return "\n".join(sorted(lines))


def _names(folder: Path) -> list[str]:
    with suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


@dataclass(frozen=True, slots=True)
class _Stat:
    """The fields of /proc/PID/stat used here."""

    state: bytes
    parent: int
    started: int
    """In ticks since the machine was."""


def _stats() -> dict[int, _Stat]:
    """The stat of each process of the machine. Pictures are taken around each test: a file is read once in
    each."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                descriptor = os.open(f"/proc/{name}/stat", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    # The second field is the name in parentheses, which may hold anything.
                    words = os.read(descriptor, 4096).rpartition(b")")[2].split(None, 20)
                finally:
                    os.close(descriptor)
                found[int(name)] = _Stat(words[0], int(words[1]), int(words[19]))
    return found


def _processes() -> Iterator[Process]:
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    stats = _stats()
    for pid in _ours(stats):
        if pid == tracker:
            continue
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            stat = stats[pid]
            state = " (ended, not waited for)" if stat.state == b"Z" else ""
            yield Process(pid, stat.started, command.strip()[:200] + state, stat.parent)


def _ours(stats: Mapping[int, _Stat]) -> list[int]:
    """Processes below this one, and orphans: processes with its mark whose parent has ended, and their
    descendants, which may have overwritten their environment (a server's processes do, with their titles)."""
    by_parent: dict[int, list[int]] = {}
    for pid, stat in stats.items():
        by_parent.setdefault(stat.parent, []).append(pid)
    found = below(os.getpid(), by_parent)
    mark = os.environ.get(MARK)
    if mark is None:
        return found
    known = {os.getpid(), *found}
    # Orphans are adopted by a process above this one, or by a process that is not visible from here. Only
    # processes younger than this one can have its mark, so the environment of the rest need not be read.
    oldest = stats[os.getpid()].started
    for parent in _above(os.getpid(), stats):
        for pid in by_parent.get(parent, ()):
            if pid not in known and stats[pid].started >= oldest and _is_marked(pid, mark):
                orphans = [each for each in (pid, *below(pid, by_parent)) if each not in known]
                known.update(orphans)
                found += orphans
    return found


def _above(pid: int, stats: Mapping[int, _Stat]) -> Iterator[int]:
    """The parent of a process, its parent and so on; 0 at last."""
    while pid in stats:
        pid = stats[pid].parent
        yield pid


def _is_marked(pid: int, mark: str) -> bool:
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any(
            f"{variable.decode(errors='replace')}/".startswith(f"{MARK}={mark}/") for variable in variables
        )
    return False


def _files() -> Iterator[OpenFile]:
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    own = f"/proc/{os.getpid()}/fd"
    for name in os.listdir(own):
        with suppress(OSError):
            target = os.readlink(f"{own}/{name}")
            # The descriptor of the listing itself is closed again by now, or shows the folder.
            if int(name) != tracker and target != own:
                yield OpenFile(int(name), target)


def _shared_memory() -> Iterator[str]:
    for name in _names(SHARED_MEMORY):
        with suppress(OSError):
            if not name.startswith(IGNORED_SEGMENTS) and (SHARED_MEMORY / name).stat().st_uid == os.getuid():
                yield name


def _without_others(resources: Resources) -> Resources:
    """Leave out shared memory that processes outside this run hold: /dev/shm does not record the creator."""
    if not resources.shared_memory:
        return resources
    ours = {p.pid for p in _processes()} | {os.getpid()}
    others = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in ours]
    kept = frozenset(
        name
        for name in resources.shared_memory
        if not any(_holds(pid, SHARED_MEMORY / name) for pid in others)
    )
    return replace(resources, shared_memory=kept)


def _holds(pid: int, path: Path) -> bool:
    """Whether a process has the file open or mapped, whatever its name was when it was made."""
    with suppress(OSError):
        file = path.stat()
        device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
            if f" {device} {file.st_ino} " in maps.read():
                return True
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                opened = os.stat(f"/proc/{pid}/fd/{descriptor}")
                if (opened.st_dev, opened.st_ino) == (file.st_dev, file.st_ino):
                    return True
    return False


class LeakError(AssertionError):
    """Something was left behind; the message lists it."""


class LeakGuard:
    """Tracks the resources that may live longer than a test. Used only by the thread that runs the tests."""

    def __init__(self) -> None:
        self._first = Resources.take()
        self._adopted = Resources()

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(getattr(self._adopted, f.name))} {f.name}" for f in fields(Resources))
        return f"LeakGuard(adopted: {counts})"

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Resources created inside the block belong to an owner that outlives the test."""
        before = Resources.take()
        try:
            yield
        finally:
            self._adopted |= _without_others(Resources.take() - before)

    def check(self, before: Resources, *, seconds: float = SETTLE_SECONDS) -> None:
        """Compare with a picture taken before.

        Raises:
            LeakError: something is there that was not, is not adopted, and stays for `seconds`.
        """

        def left_behind() -> Resources:
            now = Resources.take()
            return _without_others(now - before - self._adopted_and_below(now))

        self._compare(left_behind, seconds)

    def check_end(self, since: Resources | None = None, *, seconds: float = SETTLE_SECONDS) -> None:
        """Compare with the guard's beginning; adopted resources must be gone.

        Args:
            since: a picture of when everything was imported; nothing that is not in it may be there either,
                adopted or not. A test that was skipped or a fixture's end may have left it.
            seconds: time for resources that are still being released.

        Raises:
            LeakError: some of it is still there.
        """

        def left_behind() -> Resources:
            now = Resources.take()
            adopted = now - self._first - (now - self._first - self._adopted)
            return _without_others(adopted if since is None else adopted | (now - since))

        self._compare(left_behind, seconds)

    def _adopted_and_below(self, now: Resources) -> Resources:
        """Adopted resources, and the processes that adopted processes have started since."""
        by_parent: dict[int, list[int]] = {}
        for process in now.processes:
            by_parent.setdefault(process.parent, []).append(process.pid)
        theirs = {pid for process in self._adopted.processes for pid in below(process.pid, by_parent)}
        started = frozenset(process for process in now.processes if process.pid in theirs)
        return self._adopted | Resources(processes=started)

    @staticmethod
    def _compare(left_behind: Callable[[], Resources], seconds: float) -> None:
        left = left_behind()
        if not left:
            return
        # Files and threads of objects in reference cycles go with them.
        gc.collect()
        began = time.monotonic()
        while left := left_behind():
            is_memory = left == Resources(shared_memory=left.shared_memory)
            patience = max(seconds, ORPHANED_SECONDS) if seconds and is_memory else seconds
            if time.monotonic() - began > patience:
                raise LeakError(f"left behind:\n{left.describe()}")
            time.sleep(POLL_SECONDS)
