"""The leak guard sees each kind of leak, and the strict plugin fails the test that has it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from sglang_ext.cluster.guard import descendants
from tests.support import ROOT
from tests.support.leaks import MARK, LeakError, LeakGuard, Resources

pytestmark = pytest.mark.slow


@contextmanager
def thread() -> Iterator[None]:
    stop = threading.Event()
    started = threading.Thread(target=stop.wait, name="forgotten")
    started.start()
    yield
    stop.set()
    started.join()


@contextmanager
def process() -> Iterator[None]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield
        child.communicate(b"\n")


@contextmanager
def zombie() -> Iterator[None]:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    yield
    os.waitpid(child, 0)


@contextmanager
def orphan() -> Iterator[None]:
    """A process whose parent has ended, with one below it that has written over its environment."""
    nameless = "import sys; print(1, flush=True); sys.stdin.read()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {nameless!r}], env={{}})"
    source = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", source], stdin=reader, stdout=subprocess.PIPE, start_new_session=True
    ) as parent:
        os.close(reader)
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"1\n"
        parent.wait()
        yield
        os.close(writer)
        # Their output ends when they do.
        assert parent.stdout.read() == b""


@contextmanager
def open_file() -> Iterator[None]:
    with open(os.devnull, encoding="utf-8") as file:
        assert file.readable()
        yield


@contextmanager
def shared_memory() -> Iterator[None]:
    segment = SharedMemory(create=True, size=64)
    segment.close()
    yield
    segment.unlink()


@contextmanager
def temporary_file() -> Iterator[None]:
    descriptor, name = tempfile.mkstemp()
    os.close(descriptor)
    yield
    os.unlink(name)


LEAKS = {
    thread: "thread 'forgotten'",
    process: "process ",
    orphan: r"process \d+: .*\n(.*\n)*process \d+: ",
    zombie: "ended, not waited for",
    open_file: os.devnull,
    shared_memory: "shared memory /dev/shm/psm_",
    temporary_file: "temporary file ",
}

every_leak = pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)


@every_leak
def test_each_kind_is_seen_and_named(leak: type) -> None:
    guard = LeakGuard()
    before = Resources.take()
    guard.check(before)
    with leak(), pytest.raises(LeakError, match=r"left behind:\n(.*\n)*.*" + LEAKS[leak]):
        guard.check(before, seconds=0)
    guard.check(before)


@every_leak
def test_what_is_adopted_may_stay_and_has_to_go_in_the_end(leak: type) -> None:
    guard = LeakGuard()
    before = Resources.take()
    owner = leak()
    with guard.adopting():
        owner.__enter__()
    guard.check(before, seconds=0)
    with pytest.raises(LeakError, match=LEAKS[leak]):
        guard.check_end(seconds=0)
    with suppress(StopIteration):
        owner.__exit__(None, None, None)
    guard.check_end()


def test_what_goes_in_time_is_no_leak() -> None:
    guard = LeakGuard()
    before = Resources.take()
    stop = threading.Event()
    ending = threading.Thread(target=stop.wait)
    ending.start()
    timer = threading.Timer(0.05, stop.set)
    timer.start()
    guard.check(before, seconds=10)
    assert not ending.is_alive()
    timer.join()


def test_files_in_a_reference_cycle_go_with_it() -> None:
    guard = LeakGuard()
    before = Resources.take()

    class Holder:
        def __init__(self) -> None:
            self.me = self
            self.reader, self.writer = os.pipe()

        def __del__(self) -> None:
            os.close(self.reader)
            os.close(self.writer)

    Holder()
    guard.check(before, seconds=0)


def test_processes_below_an_adopted_one_belong_to_it() -> None:
    guard = LeakGuard()
    before = Resources.take()
    child = "print(1, flush=True); input()"
    source = f"import subprocess, sys; input(); subprocess.run([sys.executable, '-c', {child!r}])"
    with guard.adopting():
        parent = subprocess.Popen(
            [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
    assert parent.stdin is not None
    assert parent.stdout is not None
    with parent:
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"1\n"
        assert len(descendants(parent.pid)) == 1
        guard.check(before, seconds=0)
        parent.communicate(b"\n")
    assert parent.returncode == 0
    guard.check_end()


SEGMENT = """
from multiprocessing.shared_memory import SharedMemory
segment = SharedMemory(create=True, size=64)
print(segment.name, flush=True)
input()
segment.close()
segment.unlink()
"""


def test_shared_memory_of_other_processes_is_not_ours() -> None:
    guard = LeakGuard()
    before = Resources.take()
    # A process outside this run: its parent is not this one, and it has no mark of this run.
    source = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SEGMENT!r}])"
    reader, writer = os.pipe()
    with guard.adopting():
        parent = subprocess.Popen(
            [sys.executable, "-c", source],
            stdin=reader,
            stdout=subprocess.PIPE,
            env={name: value for name, value in os.environ.items() if name != MARK},
            start_new_session=True,
        )
        assert parent.stdout is not None
        name = parent.stdout.readline().decode().strip()
        parent.wait()
    assert name in (Resources.take() - before).shared_memory
    assert "0 shared_memory" in repr(guard)
    os.close(reader)
    guard.check(replace(before, files=Resources.take().files), seconds=0)
    os.close(writer)
    # Its output ends when it does.
    assert parent.stdout.read() == b""
    parent.stdout.close()
    guard.check_end()


def test_the_description_and_repr_count() -> None:
    guard = LeakGuard()
    with open_file(), guard.adopting(), open_file():
        pass
    assert repr(guard) == (
        "LeakGuard(adopted: 0 threads, 0 processes, 0 files, 0 shared_memory, 0 temporary)"
    )
    with guard.adopting():
        owner = open_file()
        owner.__enter__()
    assert "1 files" in repr(guard)
    owner.__exit__(None, None, None)


# --- the plugin, in a run of its own ---

SUITE = """
import os, subprocess, sys, tempfile, threading, time
import pytest

def test_clean(): pass

def test_leaks_a_file(): os.open(os.devnull, os.O_RDONLY)

def test_clean_after_it(): pass

def test_fails_and_leaks():
    os.open(os.devnull, os.O_RDONLY)
    raise ValueError

@pytest.fixture(scope="module")
def kept():
    reader, writer = os.pipe()
    yield
    os.close(reader)
    os.close(writer)

def test_uses_a_wider_fixture(kept): pass

def test_adopts(leak_guard):
    with leak_guard.adopting():
        globals()["late"] = os.open(os.devnull, os.O_RDONLY)

def test_closes_it():
    os.close(late)
"""

FORGETFUL = """
import os
import pytest

@pytest.fixture(scope="session")
def kept():
    return os.open(os.devnull, os.O_RDONLY)

def test_uses_it(kept): pass
"""

HANGING = """
import ctypes, threading, time
import pytest

def elsewhere(): threading.Event().wait()

@pytest.mark.timeout(1)
def test_waits_in_python():
    threading.Thread(target=elsewhere, daemon=True).start()
    threading.Event().wait()
"""

STUCK = """
import ctypes
import pytest
from tests.support import strict

strict.HANG_GRACE_SECONDS = 0.5

@pytest.mark.timeout(1)
def test_waits_in_c():
    # Signals do not end this call, so pytest-timeout's handler does not get to run.
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""


def run(tmp_path: Path, source: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "test_suite.py").write_text(source, "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 60\n", "utf-8")
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"),
            *("-p", "pytest_timeout", "-p", "tests.support.strict"),
        ],
        cwd=tmp_path,
        # A run that ends in the middle of a C call cannot remove its folder.
        # Plugins that the suite has no use for take seconds to import.
        env={
            **os.environ,
            "TMPDIR": str(tmp_path),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONPATH": str(ROOT),
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_plugin_fails_the_test_that_leaks(tmp_path: Path) -> None:
    result = run(tmp_path, SUITE)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "1 failed, 6 passed, 1 error" in result.stdout, result.stdout
    assert "ERROR test_suite.py::test_leaks_a_file" in result.stdout
    assert re.search(rf"open file \d+: {os.devnull}", result.stdout)


def test_the_plugin_fails_the_run_that_leaks(tmp_path: Path) -> None:
    result = run(tmp_path, FORGETFUL)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "1 passed" in result.stdout
    assert "The run left behind:" in result.stdout


def test_a_hang_fails_with_every_stack(tmp_path: Path) -> None:
    result = run(tmp_path, HANGING)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout
    assert "Timeout" in result.stdout
    assert "in elsewhere" in result.stdout + result.stderr
    assert "1 failed" in result.stdout


def test_a_hang_in_c_ends_the_run_with_every_stack(tmp_path: Path) -> None:
    result = run(tmp_path, STUCK)
    assert result.returncode == 1, result.stdout
    assert "in test_waits_in_c" in result.stderr
    assert "1 failed" not in result.stdout


def test_the_plugins_folder_is_removed(tmp_path: Path) -> None:
    source = "import tempfile\ndef test_folder(): print('FOLDER', tempfile.gettempdir()); assert 0"
    result = run(tmp_path, source)
    line = next(line for line in result.stdout.splitlines() if line.startswith("FOLDER"))
    folder = Path(line.split()[1])
    assert folder.name.startswith("strict-")
    assert not folder.exists()
