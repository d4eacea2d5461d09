"""Small real processes that stand for servers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sglang_ext.cluster.plan import Part
from tests.support.servers import server

# Modules beside the tests are imported by their own names.
sys.path.insert(0, str(Path(__file__).parent))

from cluster_processes import SMALL_SERVER, alive


@pytest.fixture
def free_port() -> Callable[[], int]:
    return server.free_port


@pytest.fixture
def small_part(tmp_path: Path, free_port: Callable[[], int]) -> Callable[..., Part]:
    """A part that runs small_server.py with some behaviours; its process ids go to tmp_path/NAME.pids."""

    def make(name: str, *behaviours: str, needs: tuple[str, ...] = ()) -> Part:
        port = free_port()
        pid_file = tmp_path / f"{name}.pids"
        return Part(
            name=name,
            command=(sys.executable, "-S", str(SMALL_SERVER), str(port), str(pid_file), *behaviours),
            environment={},
            url=f"http://127.0.0.1:{port}",
            needs=needs,
        )

    return make


@pytest.fixture
def pids_of(tmp_path: Path) -> Iterator[Callable[[str], list[int]]]:
    """The process ids that small servers wrote; the processes left at the end are killed."""

    def read(name: str) -> list[int]:
        file = tmp_path / f"{name}.pids"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    yield read
    for file in tmp_path.glob("*.pids"):
        for pid in read(file.stem):
            if alive(pid):
                psutil.Process(pid).kill()
