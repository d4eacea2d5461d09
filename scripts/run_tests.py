"""Run all tests in three processes side by side: fleets of servers, servers that tests share and commands,
and all others (`part_of` in tests/conftest.py).

    python scripts/run_tests.py [PYTEST ARGUMENTS]

Each waits much of the time. Each has a temporary folder of its own, because tests look for what they leave
there. The output of the first is shown as it comes, that of the others when they have ended. Unless arguments
select tests, two things follow: the RDMA transport's tests run in a virtual machine (tests/rdma, under a
minute) when the others are through, and a few tests that failed run once more with nothing beside them.
A heartbeat that got no core for seconds is no fault of the code; what fails alone as well is. Those that pass
alone are named at the end. Exits with the worst status of all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PARTS = {
    "fleets": "tests that start servers of their own",
    "servers": "tests that share servers, and of the commands",
    "others": "tests that start no server",
}
"""Parts of the run, the one whose output is shown as it comes first, and what to call them."""
RDMA = Path(__file__).resolve().parent.parent / "tests" / "rdma" / "run.sh"
SKIPPED = 77
"""The status of the RDMA tests where they cannot run; the last line of their output says why."""
FAILED, NO_TESTS = 1, 5
"""pytest's statuses when tests failed, and when nothing was selected, as -k may do for some of the parts."""
CACHE = "cache"
AGAIN = 5
"""Failed tests, at most, that run once more alone; of more it is not for want of a core."""


def start(arguments: Sequence[str], folder: Path, log: Path | None = None) -> subprocess.Popen[bytes]:
    """pytest, with a folder of its own."""
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-o", f"cache_dir={folder / CACHE}", *arguments]
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


def failed_tests(statuses: Sequence[int], folders: Sequence[Path]) -> list[str]:
    """What failed in the parts of a run, if it is few tests and nothing else is wrong; otherwise none."""
    found: list[str] = []
    for status, folder in zip(statuses, folders, strict=True):
        file = folder / CACHE / "v" / "cache" / "lastfailed"
        failed = sorted(json.loads(file.read_text())) if file.exists() else []
        if bool(failed) != (status == FAILED) or status not in (0, FAILED, NO_TESTS):
            return []
        found += failed
    return found if len(found) <= AGAIN else []


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
            if not arguments:
                running["rdma"] = start_rdma(rdma_log)
            statuses = [running[part].wait() for part in PARTS]
            for part, log in logs.items():
                show(PARTS[part], log)
            if rdma := running.get("rdma"):
                statuses.append(rdma_status(rdma.wait(), rdma_log))
            failed = failed_tests(statuses[: len(PARTS)], list(folders.values()))
            if failed and not arguments:
                print(f"\n--- again, with nothing beside: {len(failed)} that failed ---", flush=True)
                running["again"] = start(failed, folder / "a")
                statuses = [running["again"].wait(), *statuses[len(PARTS) :]]
                if statuses[0] == 0:
                    print("\nPASSED ONLY ALONE, to be looked into:", *failed, sep="\n    ", flush=True)
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
    raise SystemExit(main(sys.argv[1:]))
