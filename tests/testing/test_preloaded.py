"""Servers forked from a preloaded process behave as started ones. SGLang is not needed to see that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.cluster.guard import descendants
from sglang_ext.testing.waiting import wait_until
from tests.support.servers import preloaded

WITHOUT_SGLANG = """\
import sys, tempfile
import torch
from tests.support.servers import preloaded
preloaded._import_all = tempfile.gettempdir  # some import asks for it, and it is remembered
torch.get_num_threads()
preloaded.main(sys.argv[1:])
"""


class Started:
    """A forked guard, with its log and the pipe that the tests hold."""

    def __init__(
        self, parent: preloaded.Preloaded, folder: Path, source: str, *arguments: str, **more: str
    ) -> None:
        script = folder / "script.py"
        script.write_text(source)
        self.log = folder / "log"
        watch, self.watch = os.pipe()
        with self.log.open("wb") as log:
            self.process = parent.launch(
                [sys.executable, str(script), *arguments],
                environment={"COLOUR": "green", "PATH": os.environ["PATH"], **more},
                folder=folder,
                log=log.fileno(),
                watch=watch,
                grace_s=5.0,
            )
        os.close(watch)

    def end(self) -> int:
        os.close(self.watch)
        return self.process.wait(30)


@pytest.fixture(scope="module")
def parent() -> Iterator[preloaded.Preloaded]:
    command = preloaded.Preloaded.command
    preloaded.Preloaded.command = (sys.executable, "-c", WITHOUT_SGLANG)
    try:
        with preloaded.use() as process:
            yield process
    finally:
        preloaded.Preloaded.command = command


def test_runs_a_script_as_python_would(parent: preloaded.Preloaded, tmp_path: Path) -> None:
    source = (
        "import os, sys, tempfile\n"
        "own = tempfile.gettempdir() == os.environ['TMPDIR']\n"
        "print(__name__, sys.argv[1:], os.environ['COLOUR'], os.getcwd(), own)\n"
        "sys.exit(7)\n"
    )
    started = Started(parent, tmp_path, source, "--port", "1")
    assert started.process.wait(30) == started.process.poll() == 7
    assert started.log.read_text().strip() == f"__main__ ['--port', '1'] green {tmp_path} True"
    started.end()


@pytest.mark.parametrize("count", ["1", "3"])
def test_torch_has_the_threads_of_the_servers_own_environment(
    parent: preloaded.Preloaded, tmp_path: Path, count: str
) -> None:
    source = "import torch; print(torch.get_num_threads())"
    started = Started(parent, tmp_path, source, OMP_NUM_THREADS=count)
    assert started.process.wait(30) == 0
    assert started.log.read_text().strip() == count
    started.end()


@pytest.mark.parametrize(
    ("source", "code", "said"),
    [("raise SystemExit('no such flag')", 1, "no such flag"), ("1 / 0", 1, "ZeroDivisionError"), ("", 0, "")],
)
def test_ends_as_python_would(
    parent: preloaded.Preloaded, tmp_path: Path, source: str, code: int, said: str
) -> None:
    started = Started(parent, tmp_path, source)
    assert started.process.wait(30) == code
    assert said in started.log.read_text()
    started.end()


SLEEPS = "import subprocess, time\nsubprocess.Popen(['sleep', '60'])\ntime.sleep(60)\n"


def _two_run(started: Started) -> bool:
    return len(descendants(started.process.pid)) == 2


def test_a_closed_pipe_ends_it_and_all_it_started(parent: preloaded.Preloaded, tmp_path: Path) -> None:
    started = Started(parent, tmp_path, SLEEPS)
    wait_until(lambda: _two_run(started), seconds=30, what="two processes")
    below = descendants(started.process.pid)
    with pytest.raises(subprocess.TimeoutExpired):
        started.process.wait(0.01)
    assert started.end() == -signal.SIGTERM
    assert not any(Path(f"/proc/{pid}").exists() for pid in below)


def test_a_killed_guard_takes_the_server_along(parent: preloaded.Preloaded, tmp_path: Path) -> None:
    started = Started(parent, tmp_path, "import time\ntime.sleep(60)\n")
    wait_until(lambda: descendants(started.process.pid), seconds=30, what="a server")
    (server,) = descendants(started.process.pid)
    started.process.kill()
    assert started.end() == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{server}").exists(), seconds=30, what="the server's end")


def test_only_with_variables_that_no_import_reads(parent: preloaded.Preloaded) -> None:
    assert preloaded.current({"SGLANG_EXT_X": "1", "OMP_NUM_THREADS": "1"}) is parent
    assert preloaded.current({"SGLANG_TEST_MAX_RETRY": "1"}) is None
    assert preloaded.current({"SGLANG_USE_CPU_ENGINE": "1"}) is None
