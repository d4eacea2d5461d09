"""`sglang-ext cluster` with real SGLang servers: it serves, and however it ends, nothing of it is left."""

from __future__ import annotations

import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_ext.testing.models import model_path

START_S = 300.0
END_S = 60.0

pytestmark = pytest.mark.timeout(2 * START_S)


class RunningCluster:
    """The command, its output line by line, and every process below it."""

    def __init__(self, log_dir: Path, *arguments: str) -> None:
        self.log_dir = log_dir
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sglang_ext.cli", "cluster", "--model-path", str(model_path("tiny"))),
                *("--port", "0", "--log-dir", str(log_dir), *arguments),
                *("--", "--max-total-tokens", "8192", "--kv-dram-size", "64MB"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="output of the cluster")
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def wait_for_line(self, pattern: str, seconds: float) -> re.Match[str]:
        deadline = time.monotonic() + seconds
        while True:
            line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            assert line is not None, f"ended without {pattern!r}:\n{''.join(self.output)}"
            self.output.append(line)
            if match := re.search(pattern, line):
                return match

    def below(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(END_S)
        self._reader.join(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    found = RunningCluster(tmp_path, *getattr(request, "param", ()))
    yield found
    found.close()


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
        return found


@pytest.mark.parametrize("cluster", [("--colocated", "2")], indirect=True, ids=["two servers"])
def test_serves_and_is_gone_after_a_kill(cluster: RunningCluster) -> None:
    url = cluster.wait_for_line(r"router +(http://\S+)  send requests here", START_S)[1]
    body = {"input_ids": list(range(1, 101)), "sampling_params": {"temperature": 0, "max_new_tokens": 4}}
    cold, warm = ask(url, body), ask(url, body)
    assert cold["output_ids"] == warm["output_ids"]
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["meta_info"]["cached_tokens"] == 96

    below = cluster.below()
    names = [process.name() for process in below]
    assert sum("sched" in name for name in names) == 2, names
    assert len(below) >= 10, names  # guards, servers, schedulers, detokenizers, router
    cluster.process.kill()
    _, left = psutil.wait_procs(below, timeout=END_S)
    assert left == []


@pytest.mark.parametrize("cluster", [("--colocated", "1")], indirect=True, ids=["one server"])
def test_a_dead_scheduler_ends_the_cluster_and_is_named(cluster: RunningCluster) -> None:
    cluster.wait_for_line("Ctrl-C ends it", START_S)
    below = cluster.below()
    (scheduler,) = [process for process in below if "sched" in process.name()]
    scheduler.send_signal(signal.SIGKILL)
    cluster.wait_for_line("sglang-ext cluster: server-0 was killed by signal 9", END_S)
    cluster.wait_for_line(re.escape(str(cluster.log_dir / "server-0.log")), END_S)
    cluster.wait_for_line("scheduler_0 .* crashed", END_S)
    assert cluster.process.wait(END_S) == 1
    _, left = psutil.wait_procs(below, timeout=END_S)
    assert left == []
