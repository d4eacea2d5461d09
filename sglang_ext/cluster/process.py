"""One running part: its guard process, its log, and how it ended. The I/O below the supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from sglang_ext.cluster import cause
from sglang_ext.cluster.plan import Part
from sglang_ext.folders import open_own

GUARD = Path(__file__).with_name("guard.py")
PROBE_TIMEOUT_S = 5.0
TAIL_BYTES = 1 << 16
CAUSE_BYTES = 1 << 18
"""Of the end of a log, in which the first exception since the start of a part is looked for."""
TAIL_LINES = 15
TAIL_COLUMNS = 300
NOISE = re.compile(r"^ - leaked |^ - \.\.\. skipped|^nanobind: |^See https://nanobind|HTTP/1\.[01]\" 200")
"""Lines that hide earlier ones: from an extension module when a process with SGLang ends, and from probes."""


class Running(Protocol):
    """The supervisor's interface to a part's process, on this machine or elsewhere."""

    @property
    def pid(self) -> int | None:
        """The process id of its guard, once started, if that is on this machine."""

    @property
    def url(self) -> str:
        """Where it answers, if that is found out when it is placed; else empty."""

    async def run(self) -> int:
        """Start it and wait for its end; returns the exit code, negative for a signal's number."""

    def take_over(self) -> None:
        """Tell a process that stands by to serve from now on."""

    def terminate(self) -> None:
        """Ask it to end."""

    def hasten(self) -> None:
        """End it at once."""

    def kill(self) -> None:
        """End it at once, even if its own children survive."""


class PartProcess:
    """A part's process under its guard.

    Args:
        log: file that output is appended to.
        watch: read end of a pipe whose write end only this process has; see ``guard``.
        grace_s: seconds between SIGTERM and SIGKILL when it is to end.
        flags: further ones for its command.
        stands_by: start it waiting, until `take_over`.
        folder: removed when the process has ended, also if this process dies first.
    """

    def __init__(
        self,
        part: Part,
        log: Path,
        *,
        watch: int,
        grace_s: float,
        flags: Sequence[str] = (),
        stands_by: bool = False,
        folder: Path | None = None,
    ) -> None:
        self._part = part
        self._removed = () if folder is None else (str(folder),)
        self._flags = tuple(flags)
        self._call: tuple[int, int] | None = os.pipe() if stands_by else None
        """Pipe on which a waiting process blocks: its read end, and the end that `take_over` writes to."""
        self._log = log
        self._watch = watch
        self._grace_s = grace_s
        self._process: asyncio.subprocess.Process | None = None
        self._early: list[signal.Signals] = []
        """Signals sent before the process existed."""

    @property
    def pid(self) -> int | None:
        """The guard's process id, once started."""
        return None if self._process is None else self._process.pid

    @property
    def url(self) -> str:
        """Empty: the plan has its URL."""
        return ""

    async def run(self) -> int:
        """Start it and wait for its end; returns the exit code, negative for a signal's number."""
        flags, inherited = self._flags, self._part.sockets
        if self._call is not None:
            flags, inherited = (*flags, "--standby-fd", str(self._call[0])), (*inherited, self._call[0])
        killed = cause.oom_kills()
        try:
            with os.fdopen(_private(self._log), "ab") as log:
                log.write(f"{cause.START}{' '.join((self._part.shown_command, *flags))}\n".encode())
                log.flush()
                self._process = await asyncio.create_subprocess_exec(
                    *(
                        sys.executable,
                        "-I",
                        "-S",
                        str(GUARD),
                        str(self._watch),
                        str(self._grace_s),
                        *self._removed,
                        "--",
                    ),
                    *self._part.command,
                    *flags,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment_of(self._part, os.environ),
                    pass_fds=(self._watch, *inherited),
                    start_new_session=True,
                )
            for number in self._early:
                self._send(number)
            code = await self._process.wait()
            if line := cause.memory_line(killed, cause.oom_kills()):
                self._note(line)
            return code
        finally:
            if self._call is not None:
                for end in self._call:
                    os.close(end)
                self._call = None

    def _note(self, line: str) -> None:
        """Append a line to the log."""
        with contextlib.suppress(OSError), os.fdopen(_private(self._log), "ab") as log:
            log.write(f"{line}\n".encode())

    def take_over(self) -> None:
        """Have a waiting process serve from now on; also works before it has started to wait."""
        if self._call is not None:
            os.write(self._call[1], b"\0")

    def terminate(self) -> None:
        """Ask it to end; its guard kills it when the grace time is over."""
        self._send(signal.SIGTERM)

    def hasten(self) -> None:
        """Have its guard end it at once."""
        self._send(signal.SIGQUIT)

    def kill(self) -> None:
        """Kill its guard; the kernel kills it with the guard."""
        self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self._process is None:
            self._early.append(number)
        elif self._process.returncode is None:
            self._process.send_signal(number)


def _private(log: Path) -> int:
    """Open a log to append to. No other user can read it, regardless of the umask: it may quote clients."""
    return open_own(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def environment_of(part: Part, ours: Mapping[str, str]) -> dict[str, str]:
    """The environment of a part's process: ``ours``, then variables of the part that ``ours`` lacks, then the
    part's secrets.

    Variables that the user has set, such as OMP_NUM_THREADS, win. The order matters too: setproctitle finds
    the place of the title in memory by the first variable, and finds nothing where the process has set that
    one anew, as SGLang does with some of those that are added here.
    """
    added = {name: value for name, value in part.environment.items() if name not in ours}
    return {**ours, **added, **part.secrets}


def stop_listening(descriptor: int) -> None:
    """Refuse connections to a bound socket, in every process that has it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as shared:
        shared.shutdown(socket.SHUT_RDWR)  # fails if the socket was not listening


async def probe(url: str) -> bool:
    """Whether ``GET url`` answers 200 in time. Over TLS any certificate will do: it is a process of ours, on
    a port that is held for it, and may go by another name than the address that we know."""
    parts = urlsplit(url)
    tls = ssl._create_unverified_context() if parts.scheme == "https" else None
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=tls)
            try:
                writer.write(f"GET {parts.path} HTTP/1.0\r\nHost: {parts.netloc}\r\n\r\n".encode())
                await writer.drain()
                status = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return False
    return status.split()[1:2] == [b"200"]


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit status {code}"
    return f"was killed by signal {-code} ({signal.Signals(-code).name})"


def why_it_ended(log: Path) -> str:
    """The cause that the log of a part names, as a sentence; empty where it names none."""
    try:
        found = cause.cause(cause.since_start(_end_of(log, CAUSE_BYTES)))
    except OSError:
        return ""
    return f"The cause seems to be: {_cut(found)}" if found else ""


def _cut(line: str) -> str:
    return line if len(line) <= TAIL_COLUMNS else line[:TAIL_COLUMNS] + " ..."


def _end_of(log: Path, nbytes: int) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - nbytes))
        return [line.rstrip() for line in file.read().decode(errors="replace").splitlines()]


def tail(log: Path) -> list[str]:
    """The last lines of a log that say something."""
    try:
        lines = _end_of(log, TAIL_BYTES)
    except OSError as error:
        return [f"(cannot read {log}: {error.strerror})"]
    return [_cut(line) for line in lines if line and not NOISE.search(line)][-TAIL_LINES:]
