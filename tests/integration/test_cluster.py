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
from contextlib import closing
from email.message import Message
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_ext.testing.models import model_path
from sglang_ext.testing.servers import wait_until

START_S = 300.0
END_S = 60.0
BLOCK = 16
PROMPT_TOKENS = 40 * BLOCK
PROMPTS = 4

pytestmark = pytest.mark.timeout(2 * START_S)


class RunningCluster:
    """The command, its output line by line, and every process below it."""

    def __init__(self, log_dir: Path, *arguments: str, flags: tuple[str, ...] = ()) -> None:
        self.log_dir = log_dir
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "sglang_ext.cli", "cluster", "--model-path", str(model_path("tiny"))),
                *("--port", "0", "--log-dir", str(log_dir), *arguments),
                *("--", "--max-total-tokens", "8192", "--kv-dram-size", "64MB", *flags),
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
    return sent(url, body)[0]


def sent(url: str, body: dict[str, Any]) -> tuple[dict[str, Any], Message]:
    """The answer to a request, and its headers."""
    request = urllib.request.Request(
        f"{url}/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
        return found, response.headers


def addresses(cluster: RunningCluster) -> dict[str, str]:
    """The URLs of router and servers, as the cluster says when it is ready."""
    url = cluster.wait_for_line(r"router +(http://\S+)  send requests here", START_S)[1]
    found = {"router": url}
    for _ in range(2):
        match = cluster.wait_for_line(r"(server-\d) +(http://\S+)", END_S)
        found[match[1]] = match[2]
    return found


def blocks_on_disk(router: str) -> int:
    with urllib.request.urlopen(f"{router}/cluster", timeout=10) as response:
        instances = json.load(response)["instances"]
    return sum(instance["tiers"]["disk"]["used"] for instance in instances if "disk" in instance["tiers"])


def prompt(number: int) -> dict[str, Any]:
    """A request whose prompt nothing else begins with."""
    tokens = [(number * 4001 + 7 * place) % 30_000 + 100 for place in range(PROMPT_TOKENS)]
    return {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 4}}


def test_serves_is_gone_after_a_kill_and_finds_its_disks_again(tmp_path: Path) -> None:
    """Ready means ready: the first requests of a cluster that was started anew go to whoever has their KV."""
    kv = ("--kv-disk-path", str(tmp_path / "kv"), "--kv-disk-size", "1GB", "--kv-load-policy", "always")
    (tmp_path / "logs").mkdir()
    with closing(RunningCluster(tmp_path / "logs", "--colocated", "2", flags=kv)) as cluster:
        where = addresses(cluster)
        url, names = where["router"], {address: name for name, address in where.items()}
        cold = [sent(url, prompt(number)) for number in range(PROMPTS)]
        holders = [names[headers["x-kv-instance"]] for _, headers in cold]
        assert all(answer["meta_info"]["cached_tokens"] == 0 for answer, _ in cold)
        assert set(holders) == {"server-0", "server-1"}
        warm = ask(url, prompt(0))
        assert warm["output_ids"] == cold[0][0]["output_ids"]
        assert warm["meta_info"]["cached_tokens"] == PROMPT_TOKENS - BLOCK
        whole = PROMPTS * PROMPT_TOKENS // BLOCK
        wait_until(lambda: blocks_on_disk(url) >= whole, seconds=END_S, what="everything on disk")

        below = cluster.below()
        kinds = [process.name() for process in below]
        assert sum("sched" in kind for kind in kinds) == 2, kinds
        assert len(below) >= 10, kinds  # guards, servers, schedulers, detokenizers, router
        cluster.process.kill()
        _, left = psutil.wait_procs(below, timeout=END_S)
        assert left == []

    with closing(RunningCluster(tmp_path / "logs", "--colocated", "2", flags=kv)) as cluster:
        where = addresses(cluster)
        url, names = where["router"], {address: name for name, address in where.items()}
        # First those of the server that an idle cluster without knowledge would not have chosen.
        order = sorted(range(PROMPTS), key=lambda number: holders[number], reverse=True)
        found = {number: sent(url, prompt(number)) for number in order}
        reasons = {number: headers["x-kv-route-reason"] for number, (_, headers) in found.items()}
        assert {number: names[headers["x-kv-instance"]] for number, (_, headers) in found.items()} == dict(
            enumerate(holders)
        ), reasons
        assert set(reasons.values()) == {"prefix"}
        for number, (answer, _) in found.items():
            meta = answer["meta_info"]
            assert answer["output_ids"] == cold[number][0]["output_ids"]
            assert meta["cached_tokens"] == PROMPT_TOKENS - BLOCK
            assert meta["cached_tokens_details"]["storage"] == PROMPT_TOKENS - BLOCK, meta


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
