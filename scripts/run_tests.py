"""Run all tests in three processes side by side: fleets of servers, servers that tests share, and all others.

    python scripts/run_tests.py [PYTEST ARGUMENTS]

The first two wait for servers much of the time, the others compute. Each has a temporary folder of its own,
because tests look for what they leave there. The output of the first is shown as it comes, that of the others
when they have ended. Then the RDMA transport's tests run in a virtual machine (tests/rdma, under a minute),
unless arguments select tests. Exits with the worst status of all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

RDMA = Path(__file__).resolve().parent.parent / "tests" / "rdma" / "run.sh"
SKIPPED = 77
"""The status of the RDMA tests where they cannot run; the last line of their output says why."""
NO_TESTS = 5
"""pytest's status when nothing was selected, as -k may do for one of the two."""


def start(marker: str, arguments: Sequence[str], folder: Path, log: Path | None) -> subprocess.Popen[bytes]:
    """pytest for the tests that ``marker`` selects."""
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "pytest", "-m", marker, "-o", f"cache_dir={folder / 'cache'}"),
        *("--durations=15", *arguments),
    ]
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


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="tests-") as name:
        folder = Path(name)
        shared_log, others_log, rdma_log = (folder / f"{of}.log" for of in ("shared", "others", "rdma"))
        fleets = start("integration and fleet", arguments, folder / "f", None)
        shared = start("integration and not fleet", arguments, folder / "s", shared_log)
        others = start("not integration", arguments, folder / "o", others_log)
        running = [fleets, shared, others]
        try:
            statuses = [others.wait(), shared.wait()]
            if not arguments:
                running.append(start_rdma(rdma_log))
            statuses.append(fleets.wait())
            show("tests that share servers", shared_log)
            show("tests that start no server", others_log)
            for rdma in running[3:]:
                statuses.append(rdma_status(rdma.wait(), rdma_log))
        except KeyboardInterrupt:
            # The terminal has told them as well; they clean up after themselves.
            for process in running:
                process.wait()
            return 130
        finally:
            for process in running:
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if all(status == NO_TESTS for status in statuses):
            return NO_TESTS
        return max(status for status in statuses if status != NO_TESTS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
