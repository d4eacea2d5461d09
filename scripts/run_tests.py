"""Run all tests in three processes side by side: fleets of servers, servers that tests share and commands
and other programs, and all others (`part_of` in tests/conftest.py).

    python scripts/run_tests.py [PYTEST ARGUMENTS]

Each waits much of the time. Each has a temporary folder of its own, because tests look for what they leave
there. The output of the first is shown as it comes, that of the others when they have ended. Unless arguments
select tests, the RDMA transport's tests run in a virtual machine (tests/rdma, under a minute) when the others
are through. No test runs a second time: one that fails is a finding. How each part ended is said at the end,
and the worst status of all is the run's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PARTS = {
    "fleets": "tests that start servers of their own",
    "servers": "tests that share servers, and of commands and programs",
    "others": "tests that start no server",
}
"""Parts of the run, the one whose output is shown as it comes first, and what to call them."""
NEW_EXAMPLES = "--new-examples"
"""The one argument that selects no tests."""
RDMA = Path(__file__).resolve().parent.parent / "tests" / "rdma" / "run.sh"
SKIPPED = 77
"""The status of the RDMA tests where they cannot run; the last line of their output says why."""
NO_TESTS = 5
"""pytest's status when nothing was selected, as -k may do for some of the parts."""


def start(arguments: Sequence[str], folder: Path, log: Path | None = None) -> subprocess.Popen[bytes]:
    """pytest, with a folder of its own."""
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={folder / 'cache'}", *arguments]
    # Each has less than a core to itself: torch's threads would spin while they wait for one another.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "TMPDIR": str(folder)}
    if log is None:
        return subprocess.Popen(command, env=environment)
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def start_rdma(log: Path) -> subprocess.Popen[bytes]:
    """The verbs transport's tests, in their virtual machine."""
    with log.open("wb") as output:
        return subprocess.Popen(["bash", str(RDMA), sys.executable], stdout=output, stderr=subprocess.STDOUT)


def rdma_status(status: int, log: Path) -> int:
    """Show how the RDMA tests ended; being skipped is no failure."""
    text = log.read_text(errors="replace")
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
    sys.stdout.write(log.read_text(errors="replace"))


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


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="tests-") as name:
        folder = Path(name)
        logs = {part: folder / f"{part}.log" for part in list(PARTS)[1:]}
        rdma_log = folder / "rdma.log"
        folders = {part: folder / part[0] for part in PARTS}
        running = {
            part: start(["--part", part, "--durations=15", *arguments], folders[part], logs.get(part))
            for part in PARTS
        }
        try:
            running["others"].wait()
            if not set(arguments) - {NEW_EXAMPLES}:
                running["rdma"] = start_rdma(rdma_log)
            statuses = [running[part].wait() for part in PARTS]
            for part, log in logs.items():
                show(PARTS[part], log)
            if rdma := running.get("rdma"):
                statuses.append(rdma_status(rdma.wait(), rdma_log))
            for part, status in zip(running, statuses, strict=True):
                print(f"{PARTS.get(part, 'RDMA tests')}: {outcome(status)}", flush=True)
        except KeyboardInterrupt:
            # The terminal has told them as well; they clean up after themselves.
            for process in running.values():
                process.wait()
            return 130
        finally:
            for process in running.values():
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        return worst(statuses)


if __name__ == "__main__":
    # Who ends this ends the parts, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    raise SystemExit(main(sys.argv[1:]))
