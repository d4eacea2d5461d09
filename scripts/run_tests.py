"""Run all tests in two processes side by side: those that start servers, and all others.

    python scripts/run_tests.py [PYTEST ARGUMENTS]

The first wait for servers most of the time, the others compute. Each has a temporary folder of its own,
because tests look for what they leave there. The output of the first is shown as it comes, that of the others
at the end. Exits with the worst status of both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

NO_TESTS = 5
"""pytest's status when nothing was selected, as -k may do for one of the two."""


def start(marker: str, arguments: Sequence[str], folder: Path, log: Path | None) -> subprocess.Popen[bytes]:
    """pytest for the tests that ``marker`` selects."""
    folder.mkdir()
    command = [
        *(sys.executable, "-m", "pytest", "-m", marker, "-o", f"cache_dir={folder / 'cache'}"),
        *("--durations=15", *arguments),
    ]
    environment = {**os.environ, "TMPDIR": str(folder)}
    if log is None:
        return subprocess.Popen(command, env=environment)
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="tests-") as name:
        folder = Path(name)
        log = folder / "others.log"
        others = start("not integration", arguments, folder / "o", log)
        servers = start("integration", arguments, folder / "i", None)
        try:
            statuses = [servers.wait()]
            print("\n--- tests that start no server ---", flush=True)
            statuses.append(others.wait())
            sys.stdout.write(log.read_text(errors="replace"))
        except KeyboardInterrupt:
            # The terminal has told both as well; they clean up after themselves.
            servers.wait()
            others.wait()
            return 130
        finally:
            for process in (servers, others):
                if process.poll() is None:
                    process.terminate()
                    process.wait()
        if all(status == NO_TESTS for status in statuses):
            return NO_TESTS
        return max(status for status in statuses if status != NO_TESTS)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
