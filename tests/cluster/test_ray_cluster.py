"""A cluster on a real Ray cluster, whose nodes are loopback addresses of this machine: small parts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster_processes import DEADLINE_S, alive, wait_for

from sglang_ext.cluster.guard import below, children_by_parent
from sglang_ext.testing.waiting import wait_until
from tests.support.servers.ports import free_port
from tests.support.servers.ray_nodes import HOW_TO_GET_IT, QUIET, RayNodes, ray_is_installed

DRIVER = Path(__file__).with_name("ray_driver.py")
START_S = 90.0

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(not ray_is_installed(), reason=HOW_TO_GET_IT),
    pytest.mark.long,
]


class Driver:
    """The command, in a process of its own."""

    def __init__(self, nodes: RayNodes, folder: Path) -> None:
        self._output = folder / "output"
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, str(DRIVER), nodes.address, str(free_port()), str(folder)],
                stdout=output,
                stderr=output,
                env={**os.environ, **QUIET},
            )

    def wait_for(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            text = self._output.read_text()
            match = re.search(pattern, text)
            assert match or self.process.poll() is None, text
            return match

        match = wait_until(found, seconds=START_S, what=pattern)
        assert match is not None
        return match


@contextmanager
def driver(nodes: RayNodes, folder: Path) -> Iterator[Driver]:
    folder.mkdir()
    found = Driver(nodes, folder)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.wait(DEADLINE_S)


def running(folder: Path) -> list[int]:
    """The parts that run, of those that were ever started."""
    pids = [int(line) for file in folder.glob("*.pids") for line in file.read_text().split()]
    return [pid for pid in pids if alive(pid)]


def folders_of_keys() -> list[Path]:
    """On all nodes: each has a folder for temporary files below this machine's."""
    return list(Path(tempfile.gettempdir()).glob("**/sglang-ext-ray-*"))


def test_parts_outlive_their_node_and_not_their_driver(tmp_path: Path) -> None:
    # The head has no room, so that it is not the node to lose.
    with RayNodes(0, 2, 2) as nodes:
        with driver(nodes, tmp_path / "first") as first:
            first.wait_for("The cluster is ready")
            host = first.wait_for(r"server-0 +http://([\d.]+):")[1]
            pids = running(tmp_path / "first")
            assert len(pids) == 2
            (number,) = [each for each in (1, 2) if nodes.host(each) == host]
            there = set(below(nodes.pid(number), children_by_parent()))
            assert there & set(pids)
            nodes.lose(number)
            first.wait_for("the cluster is complete again")
            assert first.wait_for(r"server-0: starting again")
            assert len(running(tmp_path / "first")) == 2
            assert folders_of_keys()
            first.process.kill()
            wait_for(lambda: not running(tmp_path / "first"), "the end of all parts")
            wait_for(lambda: not folders_of_keys(), "the end of the keys")
        for what in (signal.SIGINT, signal.SIGTERM):
            with driver(nodes, tmp_path / what.name) as second:
                second.wait_for("Ctrl-C ends it")
                assert len(running(tmp_path / what.name)) == 2
                second.process.send_signal(what)
                assert second.process.wait(DEADLINE_S) == 0
                assert not running(tmp_path / what.name)
                wait_for(lambda: not folders_of_keys(), "the end of the keys")
