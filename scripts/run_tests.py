"""Run all tests in processes side by side: fleets of servers, servers that tests share, the router,
commands and other programs, moving and keeping KV, and all others (`part_of` in tests/conftest.py).

    python scripts/run_tests.py [PYTEST ARGUMENTS]

Each waits much of the time. Each has a temporary folder of its own, because tests check it for leftovers. The
output of the first is shown as it comes, that of the others when they have ended. Unless arguments select
tests, two more runs follow when the tests without servers have ended: the RDMA transport's tests in a virtual
machine (tests/rdma, under a minute), and some tests of the compiled modules with their sources, which is what
runs where there is no C compiler. No test runs a second time: a failed test is a finding. How each part ended
is said at the end, and the worst status of all is the run's. `--fast` runs the tests that start no server and
are not marked slow.

Processes that a part has left fail the run, also those that have no parent any more. SIGINT, SIGTERM and
SIGHUP end every process that the run has started: first the parts, as Ctrl-C does, so that they take down
their servers and files, then the remaining processes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sglang_ext.cluster import guard

PARTS = {
    "fleets": "tests that start servers of their own",
    "servers": "tests that share servers, and of the router, commands and programs",
    "moving": "tests of moving and keeping KV, without servers",
    "others": "all other tests",
}
"""Parts of the run with their names; the output of the first is shown as it comes."""
EXTRA = {"rdma": "RDMA tests", "sources": "tests of the compiled modules, with their sources"}
"""Further runs, of all tests only."""
UNSELECTIVE = {"--new-examples", "--cpu-seconds"}
"""The arguments that select no tests."""
FAST = "--fast"
SHARES = {"fleets": 1, "servers": 1, "moving": 1, "others": 1}
"""Into how many processes each part is divided. Two cores are busy with four."""
FAST_SHARES = {"servers": 1, "moving": 2, "others": 2}
"""The same for `--fast`, of parts that have tests without SGLang servers."""
SOURCES = (
    "tests/radix_global/test_tree.py", "tests/router/policies", "tests/router/http",
    "tests/router/placing", "tests/router/dispatch", "tests/router/app/test_service.py",
)  # fmt: skip
"""Tests of compiled modules that run with the sources, too; `make test-sources` has all of them."""
RDMA = Path(__file__).resolve().parent.parent / "tests" / "rdma" / "run.sh"
SKIPPED = 77
"""The status of the RDMA tests where they cannot run; the last line of their output says why."""
NO_TESTS = 5
"""pytest's status when nothing was selected, as -k may do for some of the parts."""
END_SECONDS = 5.0
"""Time for the parts to clean up when the run is ended, and then for the guards of servers, whose supervisor
is gone, to end the servers and remove their shared memory."""
REAP_SECONDS = 0.3
"""Interval, in seconds, at which ended orphans are looked for."""
ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a run."""


def parts_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Names of the processes of a run with such arguments, each with the arguments that select its tests; the
    output of the first is shown as it comes."""
    return {
        PARTS[part] + (f" ({share} of {shares})" if shares > 1 else ""): [
            *("--part", part),
            *("--share", f"{share}/{shares}"),
        ]
        for part, shares in (FAST_SHARES if FAST in arguments else SHARES).items()
        for share in range(1, shares + 1)
    }


def start(
    arguments: Sequence[str], folder: Path, log: Path | None = None, **variables: str
) -> subprocess.Popen[bytes]:
    """pytest, with a folder of its own."""
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={folder / 'cache'}", *arguments]
    # Each has less than a core to itself: torch's threads would spin while they wait for one another.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "TMPDIR": str(folder), **variables}
    # Ctrl-C reaches this process alone, which tells the parts once: a second one would end their tidying up.
    if log is None:
        return subprocess.Popen(command, env=environment, process_group=0)
    with log.open("wb") as output:
        return subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, process_group=0
        )


def start_rdma(log: Path) -> subprocess.Popen[bytes]:
    """The verbs transport's tests, in their virtual machine."""
    with log.open("wb") as output:
        return subprocess.Popen(
            ["bash", str(RDMA), sys.executable], stdout=output, stderr=subprocess.STDOUT, process_group=0
        )


def rdma_status(status: int, log: Path) -> int:
    """Show how the RDMA tests ended; being skipped is no failure."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if status == SKIPPED:
        print(
            f"\n--- RDMA tests skipped: {(text.strip().splitlines() or ['no reason given'])[-1]} ---",
            flush=True,
        )
        return 0
    print("\n--- RDMA tests, in a virtual machine ---", flush=True)
    sys.stdout.write(text)
    return status


def show(title: str, log: Path) -> None:
    """The output of tests that have ended."""
    print(f"\n--- {title} ---", flush=True)
    sys.stdout.write(log.read_text(encoding="utf-8", errors="replace"))


def worst(statuses: Sequence[int]) -> int:
    """The status of a run whose parts ended with these; a negative one is the signal that ended a part, which
    says as much as a failed test even where all tests had passed."""
    ran = [status for status in statuses if status != NO_TESTS]
    return max((128 - status if status < 0 else status for status in ran), default=NO_TESTS)


def outcome(status: int) -> str:
    """How a part ended, in words. A leak found at the end of a part gives it the status of a failed test."""
    if status < 0:
        return f"ended by signal {-status}"
    return {0: "passed", NO_TESTS: "no tests selected"}.get(status, f"FAILED (status {status})")


def end(parts: Iterable[subprocess.Popen[bytes]]) -> None:
    """End parts of a run that is over before they are, and all processes below this one."""
    for number in ASKED:
        signal.signal(number, signal.SIG_IGN)
    running = [part for part in parts if part.poll() is None]
    for part in running:
        part.send_signal(signal.SIGINT)
    deadline = time.monotonic() + END_SECONDS
    for part in running:
        with suppress(subprocess.TimeoutExpired):
            part.wait(max(0.0, deadline - time.monotonic()))
    for part in running:
        part.kill()
        part.wait()
    end_orphans(END_SECONDS)


def end_orphans(seconds: float) -> list[str]:
    """End the processes that are still below this one when all parts have ended; returns the commands of
    those left after so many seconds."""
    guard.wait_until_alone(0, seconds)
    left = []
    for pid in guard.descendants(os.getpid()):
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            left.append(f"{pid}: {command.strip()[:200]}")
    guard.end_all(0)
    return left


def reap_orphans(
    parts: Mapping[str, subprocess.Popen[bytes]], starting: threading.Lock, over: threading.Event
) -> None:
    """Until the run is over, collect the exit status of ended orphans, as init would: tests look whether the
    processes are gone."""
    while not over.wait(REAP_SECONDS):
        with starting:
            ours = {part.pid for part in parts.values()}
            for pid in guard.descendants(os.getpid()):
                if pid not in ours:
                    with suppress(ChildProcessError):  # a child of another process
                        os.waitpid(pid, os.WNOHANG)


def end_the_run(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="tests-") as name:
        folder = Path(name)
        parts = parts_of(arguments)
        # Names of folders are short: sockets below them have names of at most 107 bytes.
        folders = {title: folder / str(number) for number, title in enumerate(parts)}
        logs = {title: folder / f"{number}.log" for number, title in enumerate(parts) if number}
        rdma_log, sources_log = folder / "rdma.log", folder / "sources.log"
        running = {
            title: start([*selection, "--durations=15", *arguments], folders[title], logs.get(title))
            for title, selection in parts.items()
        }
        starting, over = threading.Lock(), threading.Event()
        reaper = threading.Thread(target=reap_orphans, args=(running, starting, over), name="reaper")
        reaper.start()
        try:
            if not set(arguments) - UNSELECTIVE:
                running[PARTS["others"]].wait()
                with starting:
                    running[EXTRA["rdma"]] = start_rdma(rdma_log)
                # An emulated machine that gets too little of a core misses its peers' answers.
                running[EXTRA["rdma"]].wait()
                with starting:
                    running[EXTRA["sources"]] = start(
                        [*SOURCES, "-q"], folder / "u", sources_log, SGLANG_EXT_NATIVE="0"
                    )
            statuses = [running[part].wait() for part in parts]
            for title, log in logs.items():
                show(title, log)
            if rdma := running.get(EXTRA["rdma"]):
                statuses.append(rdma_status(rdma.wait(), rdma_log))
                statuses.append(running[EXTRA["sources"]].wait())
                show(EXTRA["sources"], sources_log)
            over.set()
            reaper.join()
            left = end_orphans(END_SECONDS)
            for title, status in zip(running, statuses, strict=True):
                print(f"{title}: {outcome(status)}", flush=True)
            if left:
                print("\n".join(["The run left behind:", *(f"process {each}" for each in left)]), flush=True)
                statuses.append(1)
        finally:
            over.set()
            reaper.join()
            end(running.values())
        return worst(statuses)


if __name__ == "__main__":
    for asked in ASKED:
        signal.signal(asked, end_the_run)
    # From here on, a process that loses its parent becomes a child of this process, and is found.
    guard.prctl(guard.PR_SET_CHILD_SUBREAPER, 1)
    raise SystemExit(main(sys.argv[1:]))
