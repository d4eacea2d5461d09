"""Command lines that `sglang-ext migrate` prints start servers and routers, which answer as stock SGLang."""

from __future__ import annotations

import os
import random
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from token_requests import random_prompt

from sglang_ext.cli import COMMANDS, PROG
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.migrate.command import main
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

TOKENS = 8
ON_PATH = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
"""Where a shell finds `sglang-ext`."""
SERVER = (
    "python3 -m sglang.launch_server --model-path {model} --dtype float32 --max-total-tokens 1600 "
    "--chunked-prefill-size 256 --enable-cache-report --enable-hierarchical-cache --hicache-size 1 "
    "--hicache-write-policy write_through --hicache-io-backend direct --hicache-mem-layout page_first "
    "--hicache-storage-backend file --hicache-storage-prefetch-policy wait_complete"
)
ROUTER = (
    "python3 -m sglang_router.launch_router --host 127.0.0.1 --port {port} --worker-urls {worker} "
    "--policy cache_aware --cache-threshold 0.5 --max-payload-size 1000000 --retry-max-retries 2 "
    "--eviction-interval-secs 60 --cb-failure-threshold 3 --log-level info"
)


def migrated(old: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The line for an old one all of whose flags have an equal."""
    assert main([old]) == 0
    return capsys.readouterr().out.strip()


@dataclass(frozen=True)
class MigratedSpec(ServerSpec):
    """A server of a printed line, to which host and port are added.

    Args:
        line: `sglang-ext serve ...`.
        in_shell: run the line in a shell. Otherwise the module behind `serve` is forked with its flags.
    """

    line: str = ""
    in_shell: bool = False

    def command(self, port: int, host: str = LOOPBACK) -> list[str]:
        flags = ["--host", host, "--port", str(port), "--nccl-port", str(free_port())]
        if self.in_shell:
            return ["sh", "-c", f"{self.line} {shlex.join(flags)}"]
        program, name, *given = shlex.split(self.line)
        assert (program, name) == (PROG, "serve")
        return [sys.executable, "-m", COMMANDS[name].module, *given, *flags]


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    return tmp_path / "hicache"


@pytest.fixture(params=["forked", pytest.param("shell", marks=pytest.mark.long)])
def server(
    request: pytest.FixtureRequest, disk: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[ServerProcess]:
    """Started from the line of a server with HiCache. A server whose PATH is set is not forked."""
    in_shell = request.param == "shell"
    variables = f"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR={disk}"
    line = migrated(f"{variables} {SERVER.format(model=model_path('tiny', 'float32'))}", capsys)
    spec = MigratedSpec(line=line, in_shell=in_shell, environment=ON_PATH if in_shell else {})
    with ServerProcess(spec) as server:
        yield server


@contextmanager
def running_line(line: str, log: Path) -> Iterator[None]:
    """A line of a shell in a session of its own, which is ended with all of it."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            ["sh", "-c", line],
            env={**os.environ, **ON_PATH},
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def ask(url: str, prompt: list[int]) -> Answer:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    answer = httpx.post(f"{url}/generate", json=body, timeout=120, trust_env=False)
    assert answer.status_code == 200, answer.text
    return Answer.of(answer.json())


def test_migrated_lines_serve_as_stock_does(
    server: ServerProcess,
    disk: Path,
    truth: ServerProcess,
    rng: random.Random,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server of HiCache's line, behind a router of sglang-router's line. The twin: another last token."""
    port = free_port()
    line = migrated(ROUTER.format(port=port, worker=server.url), capsys)
    assert line.startswith("sglang-ext router --worker-urls ")
    url, log = f"http://127.0.0.1:{port}", tmp_path / "router.log"
    with running_line(line, log):
        wait_until(lambda: is_ready(url), seconds=60, what="the router")
        prompt = random_prompt(rng, 600)
        expected = truth.generate(prompt, max_new_tokens=TOKENS)
        assert_same(expected, ask(url, prompt))
        for _ in range(2):  # more than HBM holds
            ask(url, random_prompt(rng, 900))
        again = ask(url, prompt)
        assert again.dram_tokens >= 512, "--hicache-size did not become a DRAM tier"
        assert_same(expected, again)
        other = ask(url, [*prompt[:-1], (prompt[-1] + 1) % 30_000])
        with pytest.raises(AssertionError):
            assert_same(expected, other)
    assert any(disk.with_name("hicache-kv").iterdir()), "there is no disk tier beside HiCache's files"
    assert not disk.exists(), "the disk tier is in the folder of HiCache's files"
    assert not re.search("Traceback", log.read_text())


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False
