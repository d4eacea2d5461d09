"""The parts of a test run, and how they make its status (`scripts/run_tests.py`)."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from sglang_ext.testing.waiting import wait_until

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[1] / "scripts" / "run_tests.py"


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        ([0, 0, 0, 0], 0),
        ([0, 1, 0], 1),
        ([2, 1, 0], 2),
        ([5, 0, 5], 0),
        ([5, 5, 5], 5),
        ([5, 1, 5], 1),
        ([-11, 0, 0], 139),
        ([-15, 1, 0], 143),
    ],
)
def test_a_run_is_as_good_as_its_worst_part(statuses: list[int], expected: int) -> None:
    assert runpy.run_path(str(SCRIPT))["worst"](statuses) == expected


def test_it_runs_every_part() -> None:
    parts = runpy.run_path(str(SCRIPT.parents[1] / "tests" / "conftest.py"))["PARTS"]
    assert tuple(runpy.run_path(str(SCRIPT))["PARTS"]) == parts


@pytest.mark.parametrize("arguments", [[], ["--fast"]])
def test_each_file_is_in_one_share_of_each_of_its_parts(arguments: list[str]) -> None:
    tests = Path(__file__).parent
    conftest = runpy.run_path(str(tests / "conftest.py"))
    selections = runpy.run_path(str(SCRIPT))["parts_of"](arguments).values()
    shares = [(part, *map(int, share.split("/"))) for _, part, _, share in selections]
    for file in tests.rglob("test_*.py"):
        if arguments and tests / "integration" in file.parents:
            continue
        for part in conftest["parts_of"](file):
            holds = [k for of, k, n in shares if of == part and conftest["share_of"](file, n) == k]
            assert len(holds) == 1, (file, part)


SUITE = {
    "conftest.py": """
        import pytest
        pytest_plugins = ["tests.support.strict"]
        def pytest_addoption(parser):
            parser.addoption("--part")
            parser.addoption("--share")
        def pytest_ignore_collect(collection_path, config):
            first = config.getoption("--share").startswith("1/")
            chosen = first and config.getoption("--part") in collection_path.name
            if collection_path.is_file() and not chosen:
                return True
    """,
    "test_fleets.py": "def test_passes(): pass",
    "test_servers.py": "def test_passes(): pass",
    "test_moving.py": "def test_passes(): pass",
    "test_others.py": "def test_passes(): pass",
}
LEFT_BY_A_SESSION = """
    import os
    import pytest

    @pytest.fixture(scope="session")
    def forgotten():
        return os.open(os.devnull, os.O_RDONLY)

    def test_passes(forgotten): pass
"""
LEFT_BY_A_SKIPPED_TEST = """
    import os
    import pytest

    def test_skips():
        os.open(os.devnull, os.O_RDONLY)
        pytest.skip("no")
"""
LEFT_WITHOUT_A_PARENT = """
    import os
    import subprocess
    import sys

    def test_leaves_an_orphan():
        child = "import time; time.sleep(100)"
        source = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}], env={{}})"
        subprocess.run([sys.executable, "-c", source], start_new_session=True, check=True)
"""
"""A process without a parent, in a session of its own, without the mark in its environment that leaks are
found by."""
AN_ORPHAN_ENDS = """
    import subprocess
    import sys
    import time
    from pathlib import Path

    def test_an_orphan_that_has_ended_is_gone():
        source = "import subprocess, sys; print(subprocess.Popen(['sleep', '0.1']).pid)"
        done = subprocess.run([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, check=True)
        deadline = time.monotonic() + 30
        while Path(f"/proc/{int(done.stdout)}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
"""
WAITS = """
    import os
    import subprocess
    import sys
    import threading
    from pathlib import Path

    def test_waits():
        child = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
        source = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
        started = subprocess.Popen(
            [sys.executable, "-c", source], stdout=subprocess.PIPE, start_new_session=True, text=True
        )
        pid = started.stdout.readline()
        started.wait()
        Path("pid.new").write_text(pid)
        Path("pid.new").rename("pid")
        threading.Event().wait()
"""
DEAF = """
    import signal
    import threading

    def test_does_not_listen():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Event().wait()
"""
FAILS_ONCE = """
    from pathlib import Path

    def test_fails_once():
        seen = Path("seen")
        again = seen.exists()
        seen.touch()
        assert again
"""


def start_suite(folder: Path, **files: str) -> subprocess.Popen[str]:
    """The script, started over a suite of four passing tests, of which some are others."""
    for name, source in (SUITE | {f"test_{part}.py": source for part, source in files.items()}).items():
        (folder / name).write_text(textwrap.dedent(source))
    (folder / "pytest.ini").write_text("[pytest]\ntimeout = 60\naddopts = -p pytest_timeout\n")
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), "-q"],
        cwd=folder,
        # Plugins that the suite has no use for take seconds to import.
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(SCRIPT.parents[1])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_suite(folder: Path, **files: str) -> subprocess.CompletedProcess[str]:
    """The script over such a suite, to its end."""
    with start_suite(folder, **files) as process:
        output, _ = process.communicate(timeout=100)
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def test_a_run_without_a_fault_passes(tmp_path: Path) -> None:
    result = run_suite(tmp_path)
    assert result.returncode == 0, result.stdout
    assert result.stdout.count(": passed") == 4


@pytest.mark.parametrize("part", ["fleets", "servers", "moving", "others"])
def test_a_leak_at_the_end_of_any_part_fails_the_run(tmp_path: Path, part: str) -> None:
    result = run_suite(tmp_path, **{part: LEFT_BY_A_SESSION})
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "The run left behind:\nopen file" in result.stdout
    assert result.stdout.count(": passed") == 3
    assert result.stdout.count(": FAILED (status 1)") == 1


def test_what_a_skipped_test_leaves_fails_the_run(tmp_path: Path) -> None:
    result = run_suite(tmp_path, others=LEFT_BY_A_SKIPPED_TEST)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "The run left behind:\nopen file" in result.stdout


def test_what_has_no_parent_any_more_fails_the_run_and_is_ended(tmp_path: Path) -> None:
    result = run_suite(tmp_path, servers=LEFT_WITHOUT_A_PARENT)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert result.stdout.count(": passed") == 4
    (pid,) = re.findall(r"The run left behind:\nprocess (\d+): .*time.sleep", result.stdout)
    assert not Path(f"/proc/{pid}").exists()


def test_an_orphan_that_has_ended_is_gone_while_the_tests_go_on(tmp_path: Path) -> None:
    """As where init takes it; a test that waits for its end would wait in vain otherwise."""
    result = run_suite(tmp_path, servers=AN_ORPHAN_ENDS)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_ended_ends_all_it_has_started(tmp_path: Path, number: int) -> None:
    """Also orphans, and a test that is deaf to SIGINT."""
    with start_suite(tmp_path, others=WAITS, servers=DEAF) as process:
        wait_until((tmp_path / "pid").exists, seconds=60, what="the test")
        pid = (tmp_path / "pid").read_text().strip()
        assert Path(f"/proc/{pid}").exists()
        process.send_signal(number)
        output, _ = process.communicate(timeout=40)
    assert process.returncode == 128 + number, output
    assert not Path(f"/proc/{pid}").exists()


def test_a_failed_test_is_not_run_again(tmp_path: Path) -> None:
    """Twice, it would pass."""
    result = run_suite(tmp_path, servers=FAILS_ONCE)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert (tmp_path / "seen").exists()


@pytest.mark.parametrize(("options", "same"), [([], True), (["--new-examples"], False)])
def test_property_tests_look_for_new_examples_at_night(options: list[str], same: bool) -> None:
    """Whether they are the same in each run: the options choose the profile, which sets it."""
    keys = str(Path(__file__).with_name("test_keys.py"))
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "--collect-only", "-p", "no:cacheprovider", keys, *options],
        cwd=SCRIPT.parents[1],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert ("derandomize=True" in shown.stdout) == same, shown.stdout


TWINS = {
    # They have to find the planted faults, in every run.
    "engine/cache/test_store_model.py",
    "radix_global/test_events_model.py",
    "radix_global/test_model.py",
    "router/cluster/test_members.py",
    "conftest.py",  # the profile
    "test_run_tests.py",  # this
}


def test_only_twins_have_examples_that_stay_the_same() -> None:
    tests = Path(__file__).parent
    pinned = {
        str(file.relative_to(tests))
        for file in tests.rglob("*.py")
        if "derandomize=True" in file.read_text("utf-8")
    }
    assert pinned <= TWINS
