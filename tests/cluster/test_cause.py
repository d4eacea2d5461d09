"""Why a part ended: the first exception of its log, and memory only where the kernel says so."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from sglang_ext.cluster import cause
from sglang_ext.cluster.plan import Part
from sglang_ext.cluster.process import PartProcess, how_it_ended, why_it_ended

PROXY = """
INFO:     Application startup complete.
[2026-11-27 08:00:00] Initialization failed. warmup error: Traceback (most recent call last):
  File "urllib3/connection.py", line 174, in _new_conn
    conn = connection.create_connection(
ConnectionRefusedError: [Errno 111] Connection refused

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "sglang/srt/entrypoints/http_server.py", line 2494, in _execute_server_warmup
    res = requests.post(
          ^^^^^^^^^^^^^^
requests.exceptions.ProxyError: HTTPConnectionPool(host='10.0.0.1', port=3128): Max retries exceeded

[2026-11-27 08:00:01] another line
Process sglang::detokenizer:
Traceback (most recent call last):
  File "a.py", line 1, in run
EOFError
"""
STOPPED = """
Traceback (most recent call last):
  File "a.py", line 1, in run
KeyboardInterrupt
Traceback (most recent call last):
  File "b.py", line 2, in run
ValueError: a message
with a second line: of it

Traceback (most recent call last):
  File "c.py", line 3, in run
RuntimeError: follows
"""


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        (PROXY, "requests.exceptions.ProxyError: HTTPConnectionPool(host='10.0.0.1', port=3128): Max retries "
         "exceeded"),
        (STOPPED, "ValueError: a message"),
        ("all is well\n", ""),
        ("Traceback (most recent call last):\n  File", ""),
        (f"{cause.TRACEBACK}\n  File\nKeyError: 1\n{cause.OUT_OF_MEMORY} 1 processes", "out of memory: the "
         "kernel killed 1 processes"),
    ],
)  # fmt: skip
def test_the_first_exception_is_the_cause(log: str, expected: str) -> None:
    assert cause.cause(log.splitlines()) == expected


def test_only_the_latest_start_counts() -> None:
    lines = ["$ python a", "Traceback (most recent call last):", "  x", "OSError: old", "$ python a", "fine"]
    assert cause.cause(cause.since_start(lines)) == ""
    assert cause.cause(cause.since_start(lines[:4])) == "OSError: old"


def test_where_the_kernel_counts_what_it_kills() -> None:
    assert cause.oom_counters("0::/kubepods/pod1\n")[:2] == [
        Path("/sys/fs/cgroup/kubepods/pod1/memory.events"),
        Path("/sys/fs/cgroup/memory.events"),
    ]
    assert cause.oom_counters("5:cpu,memory:/docker/x\n")[0] == Path(
        "/sys/fs/cgroup/memory/docker/x/memory.oom_control"
    )
    assert cause.oom_counters("")[-1] == Path("/proc/vmstat")
    assert cause.oom_kills_of("low 0\noom 3\noom_kill 2\noom_group_kill 1\n") == 2
    assert cause.oom_kills_of("low 0\n") is None


def test_memory_is_blamed_only_where_the_count_has_risen(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("oom 0\noom_kill 1\n", encoding="utf-8")
    before = cause.oom_kills([tmp_path / "gone", counter])
    assert before == (1, counter)
    assert cause.memory_line(before, before) == ""
    counter.write_text("oom 1\noom_kill 3\n", encoding="utf-8")
    assert cause.memory_line(before, cause.oom_kills([counter])) == (
        f"out of memory: the kernel killed 2 processes meanwhile (oom_kill in {counter})"
    )
    assert cause.memory_line(None, before) == ""
    assert "memory" not in how_it_ended(-9)


async def test_a_part_that_the_kernel_killed_says_so_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([1, 2])
    monkeypatch.setattr(cause, "oom_kills", lambda: (next(counts), Path("memory.events")))
    part = Part("server-0", (sys.executable, "-c", "raise SystemExit(9)"), {}, "http://127.0.0.1:1")
    log = tmp_path / "log"
    watch = os.pipe()
    try:
        assert await PartProcess(part, log, watch=watch[0], grace_s=60.0).run() == 9
    finally:
        for end in watch:
            os.close(end)
    assert why_it_ended(log).startswith("The cause seems to be: out of memory: the kernel killed 1 ")
