"""The guard, with real processes: however the end comes, nothing is left."""

from __future__ import annotations

import mmap
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from cluster_processes import SMALL_SERVER, alive, wait_for

from sglang_ext.cluster.guard import APPEARED_SECONDS, KILLED, SOCKET_NAME_BYTES
from sglang_ext.cluster.process import GUARD

GRACE = "30"
"""Longer than any test: a process killed here was killed for another reason."""


class Guarded:
    """A guard with small_server.py under it."""

    def __init__(self, pid_file: Path, *behaviours: str, grace: str = GRACE) -> None:
        self.read, self.write = os.pipe()
        self._pid_file = pid_file
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-I", "-S", str(GUARD), str(self.read), grace, "--"),
                *(sys.executable, "-S", str(SMALL_SERVER), "0", str(pid_file), *behaviours),
            ],
            pass_fds=(self.read,),
            start_new_session=True,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_up(self, processes: int = 1) -> list[int]:
        """The process ids, once the server runs and its family too."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline().startswith("listening")
        wait_for(lambda: len(self.pids()) == processes, "the pids")
        return self.pids()

    def pids(self) -> list[int]:
        return [int(line) for line in self._pid_file.read_text().split()] if self._pid_file.exists() else []

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(20)
        if self.process.stdout is not None:
            self.process.stdout.close()
        for end in (self.read, self.write):
            if end >= 0:
                os.close(end)


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[..., Guarded]]:
    made: list[Guarded] = []

    def make(*behaviours: str, grace: str = GRACE) -> Guarded:
        made.append(Guarded(tmp_path / "server.pids", *behaviours, grace=grace))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_ends_with_the_status_of_the_command(guarded: Callable[..., Guarded]) -> None:
    one = guarded("exit=3")
    assert one.process.wait(20) == 3


def test_ends_by_the_signal_of_the_command(guarded: Callable[..., Guarded]) -> None:
    one = guarded()
    (pid,) = one.wait_until_up()
    os.kill(pid, signal.SIGKILL)
    assert one.process.wait(20) == -signal.SIGKILL


def test_no_such_command(tmp_path: Path) -> None:
    read, write = os.pipe()
    command = [sys.executable, "-I", "-S", str(GUARD), str(read), "1", "--", str(tmp_path / "nothing")]
    result = subprocess.run(
        command, pass_fds=(read,), capture_output=True, text=True, timeout=20, check=False
    )
    os.close(read)
    os.close(write)
    assert result.returncode == 127
    assert "cannot run" in result.stderr
    assert "nothing" in result.stderr


def test_what_a_part_makes_is_for_its_user_alone_whatever_the_umask(
    guarded: Callable[..., Guarded], tmp_path: Path
) -> None:
    before = os.umask(0)
    try:
        guarded().wait_until_up()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "server.pids").stat().st_mode) == 0o600


def test_sigterm_is_passed_on(guarded: Callable[..., Guarded]) -> None:
    one = guarded()
    (pid,) = one.wait_until_up()
    one.process.terminate()
    assert one.process.wait(20) == -signal.SIGTERM
    assert not alive(pid)


def test_who_ignores_sigterm_is_killed_when_the_time_is_over(guarded: Callable[..., Guarded]) -> None:
    one = guarded("stubborn", grace="0.2")
    (pid,) = one.wait_until_up()
    one.process.terminate()
    assert one.process.wait(20) == -signal.SIGKILL
    assert not alive(pid)


def test_sigquit_does_not_wait(guarded: Callable[..., Guarded]) -> None:
    one = guarded("stubborn")
    (pid,) = one.wait_until_up()
    one.process.terminate()
    one.process.send_signal(signal.SIGQUIT)
    assert one.process.wait(20) == -signal.SIGKILL
    assert not alive(pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT])
def test_descendants_that_left_the_session_end_too(
    guarded: Callable[..., Guarded], number: signal.Signals
) -> None:
    one = guarded("family")
    pids = one.wait_until_up(processes=2)
    assert os.getsid(pids[1]) != os.getsid(pids[0])
    one.process.send_signal(number)
    one.process.wait(20)
    assert [pid for pid in pids if alive(pid)] == []


def test_descendants_end_when_the_command_dies(guarded: Callable[..., Guarded]) -> None:
    one = guarded("family")
    pids = one.wait_until_up(processes=2)
    os.kill(pids[0], signal.SIGKILL)
    assert one.process.wait(20) == -signal.SIGKILL
    assert not alive(pids[1])


def test_the_end_of_the_watched_pipe_ends_it(guarded: Callable[..., Guarded]) -> None:
    one = guarded("family")
    pids = one.wait_until_up(processes=2)
    os.close(one.write)
    one.write = -1
    one.process.wait(20)
    assert [pid for pid in pids if alive(pid)] == []


@pytest.fixture
def littering(guarded: Callable[..., Guarded], tmp_path: Path) -> tuple[Guarded, list[Path]]:
    """A server, and its temporary folder, shared memory and semaphore. As SGLang does when a part of it dies,
    it has lost the resource tracker that would remove them."""
    one = guarded("litter")
    (pid,) = one.wait_until_up()
    (tracker,) = psutil.Process(pid).children()
    tracker.kill()
    litter = [Path(line) for line in (tmp_path / "server.pids.litter").read_text().split()]
    assert [path.exists() for path in litter] == [True, True, True]
    assert len(list(litter[0].iterdir())) == 1
    return one, litter


def test_temporary_files_and_shared_memory_go(littering: tuple[Guarded, list[Path]]) -> None:
    one, litter = littering
    one.process.terminate()
    one.process.wait(20)
    assert [path for path in litter if path.exists()] == []


def test_shared_memory_of_a_command_that_is_killed_soon_goes(littering: tuple[Guarded, list[Path]]) -> None:
    """Long before the guard would look again by itself, and when it has died there is nothing to look at."""
    one, litter = littering
    time.sleep(5 * APPEARED_SECONDS)
    os.kill(one.pids()[0], signal.SIGKILL)
    one.process.wait(20)
    assert [path for path in litter if path.exists()] == []


def test_shared_memory_that_another_process_has_stays(littering: tuple[Guarded, list[Path]]) -> None:
    one, (_, shared, semaphore) = littering
    with shared.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        one.process.terminate()
        one.process.wait(20)
        assert shared.exists()
        assert not semaphore.exists()
    shared.unlink()


def test_a_killed_guard_takes_its_command_along(guarded: Callable[..., Guarded]) -> None:
    one = guarded()
    (pid,) = one.wait_until_up()
    temporary = Path(psutil.Process(pid).environ()["TMPDIR"])
    one.process.kill()
    one.process.wait(20)
    wait_for(lambda: not alive(pid), "the end of the command")
    temporary.rmdir()  # no process is left that could


@pytest.mark.parametrize("length", [10, 140])
def test_the_temporary_folder_has_room_for_sockets(
    guarded: Callable[..., Guarded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        deep = Path(short) / ("d" * length)
        deep.mkdir()
        monkeypatch.setenv("TMPDIR", str(deep))
        one = guarded("litter")
        one.wait_until_up()
        temporary = Path((tmp_path / "server.pids.litter").read_text().split()[0])
        assert temporary.parent == (deep if length == 10 else Path("/tmp"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(temporary / ("s" * (SOCKET_NAME_BYTES - 1))))
        one.process.terminate()
        one.process.wait(20)
        assert not temporary.exists()


def test_a_temporary_folder_that_is_not_there_is_named_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(GUARD), "-1", "1", "--", "true"],
        env={**os.environ, "TMPDIR": str(tmp_path / "gone")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"TMPDIR: {tmp_path / 'gone'} is not a folder"]


def test_without_a_supervisor_it_runs_to_the_end_of_its_command() -> None:
    code = "import os; print(os.environ['TMPDIR']); raise SystemExit(3)"
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(GUARD), "-1", "inf", "--", sys.executable, "-c", code],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert not Path(done.stdout.strip()).exists()


ORPHAN = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import guard
if os.getpid() != 1:
    sys.exit("no namespace")
guard.step_aside()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    orphan = os.fork()
    if orphan:
        os.write(writer, str(orphan).encode())
        os._exit(0)
    os.close(writer)
    os._exit(0)
orphan = os.read(reader, 16).decode()
os.waitpid(child, 0)
deadline = time.monotonic() + 60
while os.path.exists(f"/proc/{orphan}"):
    if time.monotonic() > deadline:
        sys.exit("a zombie is left")
    time.sleep(0.01)
print("reaped", flush=True)
os.kill(os.getpid(), 15)
time.sleep(60)
"""


def test_as_process_1_it_reaps_orphans_and_ends_with_the_status_of_a_signal() -> None:
    words = ["unshare", "--pid", "--fork", "--mount-proc"]
    if not shutil.which("unshare") or subprocess.run([*words, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces of processes can be made here")
    done = subprocess.run(
        [*words, sys.executable, "-I", "-S", "-c", ORPHAN, str(GUARD.parent)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout == "reaped\n", done.stderr
    assert done.returncode == KILLED + signal.SIGTERM


def test_a_killed_parent_leaves_nothing(tmp_path: Path) -> None:
    """The parent of the guard, which has the other end of the pipe, dies by SIGKILL."""
    pid_file = tmp_path / "server.pids"
    parent_code = textwrap.dedent(
        f"""
        import os, subprocess, sys
        read, write = os.pipe()
        subprocess.Popen(
            [sys.executable, "-I", "-S", {str(GUARD)!r}, str(read), "5", "--",
             sys.executable, "-S", {str(SMALL_SERVER)!r}, "0", {str(pid_file)!r}, "family"],
            pass_fds=(read,), start_new_session=True,
        )
        sys.stdin.read()
        """
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent_code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        wait_for(lambda: pid_file.exists() and len(pid_file.read_text().split()) == 2, "the pids")
        below = [child.pid for child in psutil.Process(parent.pid).children(recursive=True)]
        below += [int(line) for line in pid_file.read_text().split()]
        assert len(set(below)) >= 3
        parent.kill()
    wait_for(lambda: not any(alive(pid) for pid in below), "the end of guard, command and its child")
