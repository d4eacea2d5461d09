"""Processes of the router benchmark: stand-in workers, the load generator, our router and others."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from benchmarks.router.load import Job
from tests.support.servers.ports import free_port

START_S = 60.0
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Peer:
    """Another router, which is measured beside ours. Its interpreter is that of an environment of its own."""

    package: str
    version: str
    log_level: str
    """At which it logs warnings and no more."""

    @property
    def name(self) -> str:
        return f"{self.package} {self.version}"

    @property
    def module(self) -> str:
        return f"{self.package.replace('-', '_')}.launch_router"


SGLANG_ROUTER = Peer("sglang-router", "0.3.2", "warn")
VLLM_ROUTER = Peer("vllm-router", "0.1.17", "warning")
PEER = SGLANG_ROUTER.name
"""The router that the aims compare with."""


@contextlib.contextmanager
def process(
    command: Sequence[str],
    *,
    core: int | None,
    log: Path,
    talks: bool = False,
) -> Iterator[subprocess.Popen[str]]:
    """A process on one core, if given, that ends with the block, with every process that it has started; it
    ends by itself when this process dies.

    Args:
        talks: it has pipes; else its output goes to ``log``, as its errors do in any case.
    """
    with log.open("ab") as output:
        running = subprocess.Popen(
            command,
            stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
            stdout=subprocess.PIPE if talks else output,
            stderr=output,
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_parent,
            encoding="utf-8",
        )
    try:
        if core is not None:
            os.sched_setaffinity(running.pid, {core})
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        for pipe in (running.stdin, running.stdout):
            if pipe is not None:
                pipe.close()


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def stand_ins(
    folder: Path, *, tokenizer: Path, service_s: float, count: int, core: int | None
) -> Iterator[list[int]]:
    """Stand-in workers in one process; gives their ports."""
    arguments = json.dumps({"tokenizer": str(tokenizer), "service_s": service_s, "count": count})
    command = [sys.executable, "-m", "benchmarks.router.standin", arguments]
    with process(command, core=core, log=folder / "stand-ins.log", talks=True) as running:
        yield json.loads(_pipe(running.stdout).readline())


class Generator:
    """The load generator, as a process of its own."""

    def __init__(self, running: subprocess.Popen[str]) -> None:
        self._process = running

    def measure(self, job: Job) -> dict[str, Any]:
        """Carry out a job."""
        pipe = _pipe(self._process.stdin)
        pipe.write(json.dumps(asdict(job)) + "\n")
        pipe.flush()
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError("the load generator died; see its log")
        result: dict[str, Any] = json.loads(line)
        return result


@contextlib.contextmanager
def generator(folder: Path, *, core: int | None) -> Iterator[Generator]:
    """The load generator while the block runs."""
    command = [sys.executable, "-m", "benchmarks.router.load"]
    with process(command, core=core, log=folder / "load.log", talks=True) as running:
        yield Generator(running)


def our_router(port: int, workers: Sequence[str], *flags: str) -> list[str]:
    """The command that starts our router."""
    return [sys.executable, "-m", "sglang_ext.router", "--port", str(port), "--worker-urls", *workers, *flags]


def watched(folder: Path, port: int, workers: Sequence[str], *flags: str) -> list[str]:
    """As `our_router`, under observation: see `watched`."""
    _, _, _, *rest = our_router(port, workers, *flags)
    return [sys.executable, "-m", "benchmarks.router.watched", str(folder), *rest]


def floor(port: int, workers: Sequence[int]) -> list[str]:
    """The command that starts a proxy which only passes bytes on."""
    return [sys.executable, "-m", "benchmarks.router.floor", str(port), *map(str, workers)]


def two_cores() -> tuple[int, int] | tuple[None, None]:
    """A core for the router and one for all else, where there are two."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else (None, None)


def peer_router(
    python: Path, port: int, workers: Sequence[str], *flags: str, peer: Peer = SGLANG_ROUTER
) -> list[str]:
    """The command that starts another router with its cache-aware policy."""
    return [
        str(python), "-m", peer.module, "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(free_port()), "--policy", "cache_aware", "--log-level", peer.log_level,
        "--worker-urls", *workers, *flags,
    ]  # fmt: skip


def peer_missing(python: Path | None, peer: Peer = SGLANG_ROUTER) -> str | None:
    """Why another router cannot be measured, None when it can."""
    flag = f"--{peer.package}-python"
    if python is None:
        return (
            f"left out: {flag} names the interpreter of an environment of its own in which "
            f"`pip install {peer.package}=={peer.version}` was run"
        )
    command = [str(python), "-c", f"import {peer.module}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=60, encoding="utf-8"
        )
    except OSError as error:
        return f"left out: {flag}: {error}"
    return None if done.returncode == 0 else f"left out: {done.stderr.strip().splitlines()[-1]}"


def wait_for(port: int, running: subprocess.Popen[str], path: str = "/v1/models") -> None:
    """Wait until a router answers for its workers.

    Raises:
        RuntimeError: it ended, or it does not answer in time.
    """
    end = time.monotonic() + START_S
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5.0, trust_env=False) as client:
        while time.monotonic() < end:
            if running.poll() is not None:
                raise RuntimeError(f"{running.args!r} ended with {running.returncode}")
            with contextlib.suppress(httpx.HTTPError):
                if client.get(path).status_code == 200:
                    return
            time.sleep(0.05)
    raise RuntimeError(f"{running.args!r} does not answer")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process with all its threads, so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise RuntimeError("the process was started without pipes")
    return pipe
