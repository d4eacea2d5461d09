"""A process that has imported SGLang, and from which servers for tests are forked.

Importing torch, transformers and SGLang takes most of a tiny server's start, and tests start many.
`Preloaded` does it once. A server that is forked from it runs the same main module with the same arguments
under the same guard (``cluster.guard``) as a server started afresh. Forked servers do not prove that the
imports work in their usual order and that SGLang loads the plugin in time; the tests of the command line, of
the stock launcher and of the demo do.

`use` is for a whole run of tests; without it, servers are started afresh.

The parts, each the parent of the next: the tests - the preloaded process - a guard for each server - the
server. Requests go over a socket, as JSON beside three descriptors: the guard's watch pipe, the server's log,
and a socket that reports the server's end.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, NoReturn, Protocol

import setproctitle

from sglang_ext.cluster import guard
from sglang_ext.patches.cpu.fork import renew_thread_pool
from tests.support import ROOT

MAX_REQUEST = 1 << 20
STATUS = struct.Struct("=i")
SAFE_VARIABLES = (
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS",
    "SGLANG_CPU_OMP_THREADS_BIND",
    "SGLANG_ENABLE_STRICT_MEM_CHECK",
    "SGLANG_EXT_",
    "SGLANG_TEST_RETRACT",
)
"""Prefixes of the environment variables that a forked server may have: nothing reads these as modules are
imported, but for the thread counts and the forced retraction; `_use_threads` and `_retract` make up for them.
"""


class Handle(Protocol):
    """The part of `subprocess.Popen` that tests need of a process they have started."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def send_signal(self, number: int) -> None: ...

    def kill(self) -> None: ...


class Forked:
    """The guard of a forked server.

    Args:
        pid: of the guard.
        ended: the preloaded process writes the guard's wait status here, or closes it with its own end.
    """

    def __init__(self, pid: int, ended: socket.socket) -> None:
        self.pid = pid
        self._ended = ended
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, as of `subprocess.Popen`; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, once it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        if self._code is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(["server"], timeout or 0.0)
            told = self._ended.recv(STATUS.size)
            self._ended.close()
            # The preloaded process has died: its servers end with it.
            self._code = os.waitstatus_to_exitcode(STATUS.unpack(told)[0]) if told else -signal.SIGKILL
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Preloaded:
    """The preloaded process, from the tests' side."""

    command: ClassVar[Sequence[str]] = (sys.executable, "-m", __name__)

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [*self.command, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
                cwd=ROOT,
            )

    def launch(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        log: int,
        watch: int,
        grace_s: float,
    ) -> Forked:
        """Fork a guard and, below it, a server.

        Args:
            command: Python, then ``-m MODULE`` or a script, then its arguments.
            environment: the whole of it.
            folder: the server's working directory.
            log: descriptor for its output.
            watch: read end of the pipe that tells the guard to end; see ``cluster.guard``.
            grace_s: seconds between SIGTERM and SIGKILL.
        """
        request = {
            "argv": list(command[1:]),
            "environment": dict(environment),
            "folder": str(folder),
            "grace_s": grace_s,
        }
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [json.dumps(request).encode()], [watch, log, theirs.fileno()])
        pid = ours.recv(STATUS.size)
        if not pid:
            ours.close()
            raise RuntimeError(f"the preloaded process has ended: {self._process.poll()}")
        return Forked(STATUS.unpack(pid)[0], ours)

    def close(self) -> None:
        """End it. Servers that still run end as well: their guards' parent is gone."""
        self._socket.close()
        self._process.wait()


_current: Preloaded | None = None


@contextmanager
def use() -> Iterator[Preloaded]:
    """Fork servers of this process's tests from one preloaded process, until the end of the context."""
    global _current
    _current = Preloaded()
    try:
        yield _current
    finally:
        preloaded, _current = _current, None
        preloaded.close()


def current(extra: Mapping[str, str]) -> Preloaded | None:
    """The preloaded process in use, if a server with these variables on top may be forked from it."""
    return _current if all(name.startswith(SAFE_VARIABLES) for name in extra) else None


# -- in the preloaded process --------------------------------------------------------------------


MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    # Each scheduler would import all models, a fifth of the time of its start.
    "sglang.srt.models.registry",
    # Modules that the plugin imports when a scheduler builds its cache and its end of a transfer.
    "sglang_ext.patches.adapter.build",
    "sglang_ext.patches.adapter.pd.kv_hooks",
)
"""Modules that are imported ahead, with all their imports. By name: this module itself has no use for any of
it.

Not prometheus_client, which looks at the environment as it is imported: SGLang sets that first.
"""
CALLS = (
    # Each server would look for every hooked function in all that all modules hold: a third of its start.
    ("sglang.srt.plugins", "load_plugins"),
    # With the first of our kernels, numba loads what all of them need.
    ("sglang_ext.compiled", "fence"),
)
"""Functions that are called ahead, too."""


def _import_all() -> None:
    from sglang_ext.patches.cpu import runtime

    runtime.prepare_process(os.environ)
    for name in MODULES:
        importlib.import_module(name)
    for module, function in CALLS:
        getattr(importlib.import_module(module), function)()
    assert "prometheus_client" not in sys.modules


def _run(argv: Sequence[str]) -> None:
    """Run ``python ARGV...`` in this process, as ``__main__``."""
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(argv)
        sys.path.insert(0, str(Path(argv[0]).parent))
        runpy.run_path(argv[0], run_name="__main__")


def _become_server(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(environment)
    _use_threads(environment)
    _retract(environment)
    tempfile.tempdir = None  # found out again, from this environment
    setproctitle.setproctitle(" ".join([sys.executable, *argv]))
    code = 0
    try:
        _run(argv)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process: as the interpreter does it
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _use_threads(environment: Mapping[str, str]) -> None:
    """Have torch use the number of threads in a server's environment: OpenMP read its environment as it was
    loaded, which was here. Servers with a thread per core each, on the same cores, spin for each other."""
    count = environment.get("OMP_NUM_THREADS", "")
    renew_thread_pool(int(count) if count.isdecimal() else None)


def _retract(environment: Mapping[str, str]) -> None:
    """Have the scheduler retract requests if a server's environment asks for it: SGLang has read that as it
    was imported, which was here."""
    if scheduler := sys.modules.get("sglang.srt.managers.scheduler"):
        vars(scheduler)["TEST_RETRACT"] = environment.get("SGLANG_TEST_RETRACT") == "1"


def _become_guard(request: Mapping[str, object], watch: int, log: int) -> NoReturn:
    os.setsid()
    signal.set_wakeup_fd(-1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)
    environment = request["environment"]
    assert isinstance(environment, dict)
    prepared = {name: os.environ[name] for name in _prepared() if name in os.environ}
    os.environ.clear()
    os.environ.update({**environment, **prepared})
    os.chdir(str(request["folder"]))
    argv = request["argv"]
    assert isinstance(argv, list)
    setproctitle.setproctitle(" ".join(("guard", *argv)))
    guard.end_like(
        guard.guard(watch, float(str(request["grace_s"])), lambda variables: _become_server(argv, variables))
    )
    raise AssertionError("unreachable")


def _prepared() -> tuple[str, ...]:
    from sglang_ext.patches.cpu import runtime

    return (runtime.ACTIVE, *runtime.ENVIRONMENT)


def _serve(requests: socket.socket) -> None:
    """Fork a server per request and report how it ended, until the tests close their end."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([requests.fileno(), reader], [], [])
        if reader in ready:
            with suppress(BlockingIOError):
                os.read(reader, 512)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                with running.pop(ended[0]) as told, suppress(OSError):
                    told.sendall(STATUS.pack(ended[1]))
        if requests.fileno() not in ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST, 3)
        if not message:
            return
        watch, log, told_fd = descriptors
        told = socket.socket(fileno=told_fd)
        pid = os.fork()
        if not pid:
            requests.close()
            for each in (told, *running.values()):
                each.close()
            os.close(reader)
            os.close(writer)
            _become_guard(json.loads(message), watch, log)
        os.close(watch)
        os.close(log)
        told.sendall(STATUS.pack(pid))
        running[pid] = told


def main(argv: Sequence[str]) -> None:
    import gc

    # The first call finds the memory of the command line by way of the environment, before that changes.
    setproctitle.getproctitle()
    _import_all()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(argv[0])) as requests:
        _serve(requests)
    # Guards do not notice the end of their parent: signal them.
    for pid in guard.children_by_parent().get(os.getpid(), []):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    # At once: SGLang's imports complain when the interpreter takes them down piece by piece.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
