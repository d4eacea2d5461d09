"""Probes, logs and words about the end of a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from sglang_ext.cluster.plan import Part
from sglang_ext.cluster.process import (
    TAIL_BYTES,
    TAIL_COLUMNS,
    TAIL_LINES,
    PartProcess,
    environment_of,
    how_it_ended,
    probe,
    tail,
)

uvloop.new_event_loop().close()  # opens pipes that last as long as the process; not in a test, as a leak


@pytest.mark.parametrize(
    ("answer", "healthy"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", True),
        (b"HTTP/1.0 503 Service Unavailable\r\n\r\n", False),
        (b"SSH-2.0-200 200\r\n", True),
        (b"", False),
        (b"x" * 100_000, False),
    ],
)
async def test_probe(answer: bytes, healthy: bool) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        # The probe hangs up once it has the status.
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await probe(f"http://127.0.0.1:{port}/health") is healthy
    assert asked[0].startswith(b"GET /health HTTP/1.0\r\n")


async def test_a_probe_of_a_free_port_fails(free_port: Callable[[], int]) -> None:
    assert await probe(f"http://127.0.0.1:{free_port()}/health") is False


def test_a_part_runs_from_any_event_loop(small_part: Callable[..., Part], tmp_path: Path) -> None:
    """Ray's actors have uvloop's, which starts no process with a umask: no server started with `--ray`."""
    watch, ours = os.pipe()
    process = PartProcess(small_part("server-0", "exit=3"), tmp_path / "log", watch=watch, grace_s=1.0)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            assert runner.run(process.run()) == 3
    finally:
        os.close(watch)
        os.close(ours)


def test_what_the_user_has_set_wins_and_comes_first() -> None:
    part = Part("server-0", ("true",), {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}, "http://127.0.0.1:1")
    found = environment_of(part, {"HOME": "/home", "OMP_NUM_THREADS": "7"})
    assert found["OMP_NUM_THREADS"] == "7"
    assert found["PYTHONSAFEPATH"] == "1"
    assert list(found)[:2] == ["HOME", "OMP_NUM_THREADS"]


def test_tail_keeps_the_last_lines_that_say_something(tmp_path: Path) -> None:
    log = tmp_path / "log"
    useful = [f"line {number}" for number in range(40)]
    noise = ["", "nanobind: leaked 3 types!", ' - leaked type "x"', '"GET /health HTTP/1.1" 200 OK']
    log.write_text("\n".join(["x" * TAIL_BYTES, *useful, *noise, "y" * 1000]) + "\n")
    lines = tail(log)
    assert len(lines) == TAIL_LINES
    assert lines[-2] == "line 39"
    assert lines[-1] == "y" * TAIL_COLUMNS + " ..."


def test_tail_of_a_log_that_is_not_there(tmp_path: Path) -> None:
    (line,) = tail(tmp_path / "nothing")
    assert "No such file" in line


def test_how_it_ended() -> None:
    assert how_it_ended(0) == "ended with exit status 0"
    assert "SIGSEGV" in how_it_ended(-11)
    assert how_it_ended(-9) == "was killed by signal 9 (SIGKILL)"
