"""The server kit, on stand-ins that start at once: readiness, refusal to start, sharing, deaths, no trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_ext.cluster.guard import descendants
from sglang_ext.testing.waiting import wait_until
from tests.support.leaks import SHARED_MEMORY, LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import (
    ServerDiedError,
    ServerPool,
    ServerProcess,
    ServerSpec,
    ServerStartError,
)

pytestmark = pytest.mark.slow

STAND_IN = """
import json, mmap, os, subprocess, sys, tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer

print("starting", *sys.argv[2:], flush=True)
if "broken" in sys.argv:
    sys.exit("no such model")

# What SGLang leaves behind: a socket's file, shared memory, a child.
socket = tempfile.NamedTemporaryFile(delete=False).name
if "segment" in sys.argv:
    with open(f"/dev/shm/stand_in_{os.getpid()}", "w+b") as file:
        file.truncate(4096)
        segment = mmap.mmap(file.fileno(), 4096)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)

class Handler(BaseHTTPRequestHandler):
    health_checks = 0

    def answer(self, status, content, kind="application/json"):
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_GET(self):
        if self.path == "/health":
            Handler.health_checks += 1
            self.answer(200 if Handler.health_checks > 2 else 503, b"")
        elif self.path == "/metrics":
            self.answer(200, b'# HELP x y\\nhits{tier="hbm"} 3.0\\nup 1\\n', "text/plain")
        else:
            self.answer(404, b"no such path", "text/plain")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
        asked = body["sampling_params"]["max_new_tokens"]
        events = []
        for length in range(1, asked + 1):
            events.append({"meta_info": {
                "output_token_logprobs": [[-1.0, token, None] for token in body["input_ids"][:length]],
                "prompt_tokens": len(body["input_ids"]), "cached_tokens": 0, "e2e_latency": 0.1,
            }})
        if body["stream"]:
            lines = "".join(f"data: {json.dumps(event)}\\n\\n" for event in events) + "data: [DONE]\\n\\n"
            self.answer(200, lines.encode(), "text/event-stream")
        else:
            self.answer(200, json.dumps(events[-1]).encode())

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@dataclass(frozen=True)
class StandIn(ServerSpec):
    """Starts the stand-in instead of SGLang, with the flags."""

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", STAND_IN, str(port), *self.flags]


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    with ServerProcess(StandIn()) as server:
        yield server


def test_the_command_is_our_launcher_with_model_and_dtype(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    command = ServerSpec(model="tiny-swa", dtype="bfloat16", flags=("--page-size", "16")).command(1234)
    assert command[:3] == [sys.executable, "-m", "sglang_ext.launch_server"]
    assert Path(command[command.index("--model-path") + 1]).parent == tmp_path / "sglang_ext" / "models"
    assert command[command.index("--dtype") + 1] == "bfloat16"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--port") + 1] == "1234"
    assert command[-2:] == ["--page-size", "16"]


def test_a_started_server_answers(server: ServerProcess) -> None:
    assert server.running
    plain = server.generate([5, 6, 7, 8], max_new_tokens=3)
    assert plain.tokens == [5, 6, 7]
    assert server.generate([5, 6, 7, 8], max_new_tokens=3, stream=True) == plain
    assert server.metrics() == {'hits{tier="hbm"}': 3.0, "up": 1.0}
    with pytest.raises(AssertionError, match="/nothing: 404: no such path"):
        server.get("/nothing")


def traces(pids: list[int]) -> list[Path]:
    """The existing traces of these processes: themselves and the stand-in's shared memory."""
    candidates = [
        *(Path(f"/proc/{pid}") for pid in pids),
        *(SHARED_MEMORY / f"stand_in_{pid}" for pid in pids),
    ]
    return [path for path in candidates if path.exists()]


def test_a_stopped_server_leaves_nothing() -> None:
    guard = LeakGuard()
    with guard.adopting():
        server = ServerProcess(StandIn(flags=("segment",)))
        server.start()
    pids = [server.pid, *descendants(server.pid)]
    folder = server.log.parent
    assert len(traces(pids)) == 3 + 1
    server.stop()
    assert not server.running
    assert traces(pids) == []
    assert not folder.exists()
    guard.check_end()
    server.stop()


def test_a_server_that_ends_at_start_is_an_error_with_its_log() -> None:
    server = ServerProcess(StandIn(flags=("broken",)))
    with pytest.raises(
        ServerStartError, match=r"(?s)ended with exit status 1.*starting broken.*no such model"
    ):
        server.start()
    assert not server.running


def test_a_server_that_is_not_ready_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.servers.server.START_SECONDS", 0.0)
    server = ServerProcess(StandIn())
    with pytest.raises(ServerStartError, match=r"start of StandIn.*: not within 0 s"):
        server.start()
    assert not server.running


def test_the_pool_shares_equal_specs_and_ends_the_least_recently_used(leak_guard: LeakGuard) -> None:
    pool = ServerPool(limit=2)
    try:
        first = pool.get(StandIn(flags=("1",)))
        second = pool.get(StandIn(flags=("2",), environment={"A": "1"}))
        assert pool.get(StandIn(flags=("1",))) is first
        third = pool.get(StandIn(flags=("3",)))
        assert [first.running, second.running, third.running] == [True, False, True]
        assert pool.get(StandIn(flags=("2",), environment={"A": "2"})) is not second
        assert [first.running, third.running] == [False, True]
    finally:
        pool.close()
    assert not third.running


@pytest.mark.parametrize("noticed_by", ["get", "close", "making room"])
def test_a_shared_server_that_died_is_an_error(noticed_by: str) -> None:
    pool = ServerPool(limit=1)
    server = pool.get(StandIn())
    (main, child) = descendants(server.pid)
    os.kill(main, signal.SIGKILL)
    wait_until(lambda: not server.running, seconds=10, what="the server's end")
    notice: dict[str, Callable[[], object]] = {
        "get": lambda: pool.get(StandIn()),
        "making room": lambda: pool.get(StandIn(flags=("other",))),
        "close": pool.close,
    }
    with pytest.raises(ServerDiedError, match=r"(?s)ended while tests shared it.*starting"):
        notice[noticed_by]()
    assert not Path(f"/proc/{child}").exists()
    if noticed_by != "close":
        assert pool.get(StandIn()).running
    pool.close()


OWNER = """
import sys
from tests.testing.test_servers import StandIn
from sglang_ext.cluster.guard import descendants
from tests.support.servers.server import ServerProcess

server = ServerProcess(StandIn(flags=("segment",)))
server.start()
print(server.pid, *descendants(server.pid), flush=True)
input()
"""


def test_killing_the_owner_ends_the_server(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with owner:
        assert owner.stdout is not None
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(traces(pids)) == 3 + 1
        owner.kill()
    wait_until(lambda: not traces(pids), seconds=10, what="the server's end")
    # Only the log remains, since no process was left to remove it.
    assert [path.name for folder in tmp_path.iterdir() for path in folder.iterdir()] == ["server.log"]


def test_ports_and_waiting() -> None:
    assert 1024 < free_port() < 65536
    answers = iter([0, 0, 7])
    assert wait_until(lambda: next(answers), seconds=5, what="seven") == 7
    with pytest.raises(TimeoutError, match="never: not within 0 s"):
        wait_until(lambda: False, seconds=0, what="never")
