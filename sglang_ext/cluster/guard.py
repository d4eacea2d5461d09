"""Runs one command and leaves no process of it behind: the process between the supervisor and each part.

``python guard.py WATCH_FD GRACE_SECONDS [FOLDER] -- COMMAND...``, started by the supervisor in a session of
its own. `sglang-ext serve` becomes it, too, with -1 for WATCH_FD, as no supervisor is there, and ``inf``. The
files of a supervisor's parts are for their user alone; `sglang-ext serve` keeps its user's umask. The guard
imports the standard library only, and none of this package, so that it starts in milliseconds.

Deaths and their consequences:

- the command ends: its remaining processes are ended, and the guard ends the same way (same status, same
  signal);
- the supervisor dies, even by SIGKILL: WATCH_FD, a pipe whose other end only the supervisor has, comes to
  its end; the command is ended as on SIGTERM;
- SIGTERM: the command gets SIGTERM, and SIGKILL once GRACE_SECONDS are over; Ctrl-C at a terminal reaches
  the command by itself;
- SIGQUIT: the command is killed at once;
- the guard dies by SIGKILL: the kernel kills the command with it (PR_SET_PDEATHSIG).

The guard is the reaper of all descendants (PR_SET_CHILD_SUBREAPER), so that a process whose parent has died,
or that moved to a session of its own, is still found. It gives the command a folder for temporary files. At
the end it removes that folder, and the shared memory of the command's processes that no other process maps:
SGLang leaves sockets in the folder, and shared memory when one of its processes is killed. As process 1 of a
container the guard reaps orphans, as init does. FOLDER is removed in all these cases. With a FOLDER, the
guard is a grandchild of the process that started it, and its child only passes signals on: Ray kills the
children of a process that it ends, and the guard has to survive to see the end of WATCH_FD.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
IN_MOVED_TO = 0x80
IN_CREATE = 0x100

LEFTOVER_SECONDS = 1.0
"""Time for leftover processes to end on their own, before SIGKILL and again after it.

Python's resource trackers need it: they outlive their process to remove its shared memory, and end then.
"""
POLL_SECONDS = 0.02
CANNOT_RUN = 127
"""Exit status when there is no such command, as shells give it."""
LOOK_SECONDS = 10.0
"""Pause between looking which shared memory the command's processes have."""
APPEARED_SECONDS = 0.1
"""Seconds until the next look after a file has appeared there: files are mapped shortly after they are made.
A file made between two looks would stay behind if its process was killed before the second."""
SHARED_MEMORY = "/dev/shm"
SOCKET_PATH_BYTES = 107
"""Longest path of an AF_UNIX socket."""
SOCKET_NAME_BYTES = 32
"""Longest path, below the temporary folder, of a socket of SGLang or multiprocessing."""
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
"""Where the temporary folder is if sockets below TMPDIR would have too long paths."""
KILLED = 128
"""Added to a signal's number: the exit status of a process that cannot end by that signal."""


def prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


Run = Callable[[dict[str, str]], object]
"""Becomes the command, given its environment; does not return."""


def execute(command: list[str]) -> Run:
    """Become ``command``."""

    def run(environment: dict[str, str]) -> None:
        try:
            os.execvpe(command[0], command, environment)
        except OSError as error:
            os.write(2, f"cannot run {command[0]}: {error}\n".encode())

    return run


def start(run: Run, temporary: str) -> int:
    """Fork and run, with ``temporary`` as its TMPDIR; returns the process id."""
    guard = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        for number in Signals.CAUGHT:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:
            run({**os.environ, "TMPDIR": temporary})
    finally:
        os._exit(CANNOT_RUN)


def close_inherited(kept: int) -> None:
    """Close the descriptors inherited from the supervisor, except for ``kept`` and the standard streams: a
    socket that the guard also held would stay open after both other holders have closed it."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder that is being read is listed too, and closed by now
            if int(name) > 2 and int(name) != kept and os.get_inheritable(int(name)):
                os.close(int(name))


def children_by_parent() -> dict[int, list[int]]:
    """Process ids by parent, of this whole machine, from /proc."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        with suppress(OSError), open(f"/proc/{name}/stat", "rb") as stat:
            # The second field is the name in parentheses, which may hold anything.
            parent = int(stat.read().rpartition(b")")[2].split()[1])
            found.setdefault(parent, []).append(int(name))
    return found


def descendants(root: int) -> list[int]:
    """Everything below ``root``, parents first."""
    return below(root, children_by_parent())


def below(root: int, by_parent: Mapping[int, list[int]]) -> list[int]:
    """All descendants of ``root`` among those that ``children_by_parent`` has found, parents first."""
    found = [root]
    for pid in found:
        found.extend(by_parent.get(pid, []))
    return found[1:]


def shared_memory_of(pids: Iterable[int]) -> set[int]:
    """Inodes in /dev/shm that these processes have mapped; a semaphore is there under another name."""
    found: set[int] = set()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
            found.update(int(line.split(None, 5)[4]) for line in maps if b" /dev/shm/" in line)
    return found


def watch_shared_memory() -> int | None:
    """A descriptor to read from when something new appears in /dev/shm; None where there is no inotify."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd >= 0 and libc.inotify_add_watch(fd, SHARED_MEMORY.encode(), IN_CREATE | IN_MOVED_TO) < 0:
        os.close(fd)
        return None
    return fd if fd >= 0 else None


def remove_shared_memory(inodes: set[int]) -> None:
    """Remove those of these files that no process of this machine has any more."""
    with suppress(OSError), os.scandir(SHARED_MEMORY) as entries:
        left = [entry for entry in entries if entry.inode() in inodes]
        if not left:
            return
        held = shared_memory_of(pid for pids in children_by_parent().values() for pid in pids)
        for entry in left:
            if entry.inode() not in held:
                with suppress(OSError):
                    os.unlink(entry.path)


def temporary_places(wanted: str) -> list[str]:
    """Where the temporary folder can be, best first: a socket in it has a path that the kernel takes."""
    longest = SOCKET_PATH_BYTES - SOCKET_NAME_BYTES - len("/sglx-00000000")
    return [place for place in dict.fromkeys((wanted, *SHORT_FOLDERS)) if len(os.fsencode(place)) <= longest]


def make_temporary() -> str:
    """A folder for the temporary files of the command.

    Raises:
        SystemExit: it cannot be made; in one line, with the reason.
    """
    wanted = os.environ.get("TMPDIR") or "/tmp"
    reason = "" if os.path.isdir(wanted) else f"{wanted} is not a folder"
    for place in temporary_places(wanted):
        path = os.path.join(place, f"sglx-{os.urandom(4).hex()}")
        try:
            if not reason:
                os.mkdir(path, 0o700)
                return path
        except OSError as error:
            # The user has chosen a folder that sockets would fit into, so report why it cannot be used.
            reason = f"cannot make a folder in {place}: {error.strerror}" if place == wanted else ""
    raise SystemExit(f"TMPDIR: {reason or 'no folder with a short path can be written'}")


def is_resource_tracker(pid: int) -> bool:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as cmdline:
        return b"resource_tracker" in cmdline.read()
    return False


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def reap(main: int) -> int | None:
    """Collect every child that has ended; the wait status of ``main`` when it was among them."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, raw = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == main:
                status = raw
    return status


def wait_until_alone(main: int, seconds: float) -> int | None:
    """Until nothing is left below the guard or the time is over; the status of ``main`` as ``reap``."""
    deadline = time.monotonic() + seconds
    status = None
    while True:
        ended = reap(main)
        status = ended if status is None else status
        if not descendants(os.getpid()) or time.monotonic() >= deadline:
            return status
        time.sleep(POLL_SECONDS)


def end_all(main: int) -> int | None:
    """Kill the remaining processes, resource trackers last; the status of ``main`` as ``reap``."""
    status = None
    for spare in (True, False):
        # Killing can race with forking: until nothing new turns up.
        while True:
            left = [pid for pid in descendants(os.getpid()) if not (spare and is_resource_tracker(pid))]
            if not left:
                break
            send(signal.SIGKILL, left)
            ended = wait_until_alone(main, POLL_SECONDS)
            status = ended if status is None else status
        ended = wait_until_alone(main, LEFTOVER_SECONDS)
        status = ended if status is None else status
    return status


class Signals:
    """Signals as bytes that ``poll`` can wait for."""

    ASK = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    CAUGHT = (*ASK, signal.SIGQUIT, signal.SIGCHLD)

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        os.set_blocking(self.reader, False)
        os.set_blocking(writer, False)
        for number in self.CAUGHT:
            signal.signal(number, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def read(self) -> set[int]:
        """The numbers that came since the last call."""
        with suppress(BlockingIOError):
            return set(os.read(self.reader, 512))
        return set()


def in_foreground() -> bool:
    """Whether this process is in the foreground of its terminal, whose Ctrl-C the command gets as well."""
    with suppress(OSError):
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return os.tcgetpgrp(terminal) == os.getpgrp()
        finally:
            os.close(terminal)
    return False


def guard(watch: int, grace: float, run: Run) -> int:
    """Run a command to its end; returns its wait status.

    Args:
        watch: read end of a pipe that comes to its end with the supervisor; -1 without one.
        grace: seconds between SIGTERM and SIGKILL.
        run: becomes the command.
    """
    if watch >= 0:
        os.set_inheritable(watch, False)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    signals = Signals()
    temporary = make_temporary()
    main = start(run, temporary)
    close_inherited(watch)
    poll = select.poll()
    poll.register(signals.reader, select.POLLIN)
    if watch >= 0:
        poll.register(watch, select.POLLIN | select.POLLHUP)
    appeared = watch_shared_memory()
    if appeared is not None:
        poll.register(appeared, select.POLLIN)
    asked = False
    deadline: float | None = None
    status: int | None = None
    shared: set[int] = set()
    look = LOOK_SECONDS
    while status is None:
        left = look if deadline is None else min(look, max(0.0, deadline - time.monotonic()))
        look = LOOK_SECONDS
        ready = {fd for fd, _ in poll.poll(left * 1000)}
        shared |= shared_memory_of(descendants(os.getpid()))
        came = signals.read()
        if appeared is not None and appeared in ready:
            with suppress(BlockingIOError):
                os.read(appeared, 1 << 16)
            look = APPEARED_SECONDS
        if watch in ready:
            poll.unregister(watch)
        status = reap(main)
        if not asked and (watch in ready or came & Signals.ASK):
            asked = True
            deadline = time.monotonic() + grace
            if came & Signals.ASK != {signal.SIGINT} or not in_foreground():
                send(signal.SIGTERM, [main])
        if signal.SIGQUIT in came:
            deadline = time.monotonic()
        if status is None and deadline is not None and time.monotonic() >= deadline:
            send(signal.SIGKILL, [main])
            deadline = None
    wait_until_alone(main, LEFTOVER_SECONDS)
    end_all(main)
    remove_shared_memory(shared)
    shutil.rmtree(temporary, ignore_errors=True)
    return status


def step_aside() -> None:
    """Go on in a child. This process passes signals on, reaps orphans, and ends as the child does."""
    child = os.fork()
    if child:
        for number in (*Signals.ASK, signal.SIGQUIT):
            signal.signal(number, lambda number, frame: send(number, [child]))
        while True:
            pid, status = os.wait()
            if pid == child:
                end_like(status)


def end_like(status: int) -> None:
    """End this process as the command ended."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    if os.getpid() == 1:  # the kernel ignores signals to it that have no handler
        os._exit(KILLED - code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):  # SIGKILL has no handler to reset
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    signal.pause()


if __name__ == "__main__":
    cut = sys.argv.index("--")
    supervisor = int(sys.argv[1])
    if supervisor >= 0:
        os.umask(0o077)  # no other user may use SGLang's sockets and files, or those that libraries make
    if sys.argv[3:cut]:
        step_aside()
    ended = guard(supervisor, float(sys.argv[2]), execute(sys.argv[cut + 1 :]))
    for folder in sys.argv[3:cut]:
        shutil.rmtree(folder, ignore_errors=True)
    end_like(ended)
