"""What a test leaves behind: threads, child processes, open files, shared memory, temporary files.

`Resources.take` is a picture of what this process holds now. A `LeakGuard` compares pictures: what a test has
left is a leak, unless a longer-lived owner (a session's fixture, a pool of servers) took it over with
`adopting`. What was taken over has to be gone in the end.

A process whose parent has ended is below this one no more. Once `mark_processes` was called, what is started
from then on carries a mark in its environment, and is found by it wherever it hangs.

Linux only: it reads /proc.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from multiprocessing import resource_tracker
from pathlib import Path

from sglang_ext.cluster.guard import below, children_by_parent, descendants

SETTLE_SECONDS = 3.0
"""How long what is already on its way out (a joined thread's exit, a reaped process) may take."""
POLL_SECONDS = 0.01

SHARED_MEMORY = Path("/dev/shm")
IGNORED_SEGMENTS = ("sglang_loads_", "sem.")
"""Shared memory whose name does not tell whose it is, and which processes that are killed leave behind on a
machine that others use too: the load reports of SGLang servers that run without our guard, and semaphores
(Python's resource tracker warns about this process's own)."""
IGNORED_TEMPORARY = ("torchinductor_",)
"""Importing torch makes this folder, once."""


MARK = "SGLANG_EXT_TEST_RUN"
"""The variable that tells which run of tests started a process. A run in a run adds to what it inherits."""


def mark_processes() -> None:
    """Mark what this process starts from now on, so that it is ours though its parent ends."""
    os.environ[MARK] = f"{os.environ.get(MARK, '')}/{os.getpid()}-{os.urandom(4).hex()}"


@dataclass(frozen=True)
class Thread:
    """A Python thread. Its name may change; its identifier may be given to another one after its end."""

    thread: threading.Thread
    name: str = field(compare=False)


@dataclass(frozen=True)
class Process:
    """A process below this one, or one that was. `started` tells it from a later one with the same id."""

    pid: int
    started: int
    command: str = field(compare=False)


@dataclass(frozen=True)
class OpenFile:
    """A file descriptor and what it refers to, as /proc shows it."""

    descriptor: int
    target: str


@dataclass(frozen=True)
class Resources:
    """What this process holds at one moment."""

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


def _processes() -> Iterator[Process]:
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    for pid in _ours():
        if pid == tracker:
            continue
        with suppress(OSError):
            stat = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = " (ended, not waited for)" if stat[0] == b"Z" else ""
            yield Process(pid, int(stat[19]), command.strip()[:200] + state)


def _ours() -> list[int]:
    """What is below this process, and what was: processes with its mark whose parent has ended, and what is
    below them, which may have written over its environment (a server's processes do, with their titles)."""
    by_parent = children_by_parent()
    mark = os.environ.get(MARK)
    found = below(os.getpid(), by_parent)
    if mark is None:
        return found
    known = {os.getpid(), *found}
    # Only what was started since this process can have its mark: the rest need not be read.
    oldest = _started(os.getpid())
    for pid in sorted(pid for pids in by_parent.values() for pid in pids):
        if pid not in known and _is_marked(pid, mark, oldest):
            for orphan in (pid, *below(pid, by_parent)):
                if orphan not in known:
                    known.add(orphan)
                    found.append(orphan)
    return found


def _started(pid: int) -> int:
    """When a process was started, in ticks since the machine was."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])


def _is_marked(pid: int, mark: str, oldest: int) -> bool:
    with suppress(OSError):
        if _started(pid) >= oldest:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return any(
                f"{variable.decode(errors='replace')}/".startswith(f"{MARK}={mark}/")
                for variable in variables
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
    """Less the shared memory that processes of somebody else's hold: /dev/shm does not say who made it."""
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
        with open(f"/proc/{pid}/maps", errors="replace") as maps:
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
    """Knows what is allowed to live longer than a test.

    Used by one thread, the one that runs the tests.
    """

    def __init__(self) -> None:
        self._first = Resources.take()
        self._adopted = Resources()

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(getattr(self._adopted, f.name))} {f.name}" for f in fields(Resources))
        return f"LeakGuard(adopted: {counts})"

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """What comes into being inside the block belongs to an owner that outlives the test."""
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
        self._compare(lambda: _without_others(Resources.take() - before - self._adopted_and_below()), seconds)

    def check_end(self, since: Resources | None = None, *, seconds: float = SETTLE_SECONDS) -> None:
        """Compare with the guard's beginning; what was adopted has to be gone.

        Args:
            since: a picture of when everything was imported; nothing that is not in it may be there either,
                adopted or not. A test that was skipped or a fixture's end may have left it.
            seconds: what is on its way out has so long.

        Raises:
            LeakError: some of it is still there.
        """

        def left_behind() -> Resources:
            now = Resources.take()
            adopted = now - self._first - (now - self._first - self._adopted)
            return _without_others(adopted if since is None else adopted | (now - since))

        self._compare(left_behind, seconds)

    def _adopted_and_below(self) -> Resources:
        """What was adopted, and the processes that adopted processes have started since."""
        theirs = {pid for process in self._adopted.processes for pid in descendants(process.pid)}
        started = frozenset(p for p in _processes() if p.pid in theirs)
        return self._adopted | Resources(processes=started)

    @staticmethod
    def _compare(left_behind: Callable[[], Resources], seconds: float) -> None:
        left = left_behind()
        if not left:
            return
        # Files and threads of objects in reference cycles go with them.
        gc.collect()
        deadline = time.monotonic() + seconds
        while left := left_behind():
            if time.monotonic() > deadline:
                raise LeakError(f"left behind:\n{left.describe()}")
            time.sleep(POLL_SECONDS)
