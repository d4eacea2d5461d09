"""`sglang-ext cluster --ray` on a real Ray cluster, whose nodes are loopback addresses of this machine."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from test_cluster import BLOCK, END_S, PROMPT_TOKENS, START_S, RunningCluster, ask, prompt

from sglang_ext.cluster.guard import below, children_by_parent
from sglang_ext.cluster.ray_runner import FOLDER_PREFIX
from sglang_ext.testing.servers.ray_nodes import HOW_TO_GET_IT, QUIET, RayNodes, ray_is_installed
from sglang_ext.testing.servers.server import free_port
from sglang_ext.testing.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(3 * START_S),
    pytest.mark.skipif(not ray_is_installed(), reason=HOW_TO_GET_IT),
    pytest.mark.long,
]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cluster-", dir="/tmp") as made:
        yield Path(made)


def servers(nodes: RayNodes, number: int) -> list[psutil.Process]:
    """The processes of SGLang's servers below a node of Ray."""
    found = []
    for pid in below(nodes.pid(number), children_by_parent()):
        try:
            words = " ".join(psutil.Process(pid).cmdline())
        except psutil.NoSuchProcess:
            continue
        if "sglang_ext.launch_server" in words or "sglang::" in words or "sglang_ext.router" in words:
            found.append(psutil.Process(pid))
    return found


def left_in(nodes: RayNodes, count: int) -> list[psutil.Process]:
    return [each for number in range(count) for each in servers(nodes, number)]


def folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith(FOLDER_PREFIX)}


def on_ray(folder: Path, nodes: RayNodes, *arguments: str) -> RunningCluster:
    port = str(free_port())
    return RunningCluster(folder, "--ray", nodes.address, "--port", port, *arguments)


def test_a_server_is_started_again_on_another_node_and_nothing_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a node is lost, then the driver is killed."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)
    before = folders()
    with RayNodes(2, 2, 2) as nodes:
        with closing(on_ray(folder, nodes, "--colocated", "1", "--restart", "2")) as cluster:
            url = cluster.wait_for_line(r"router +(http://\S+)  send requests here", START_S)[1]
            host = cluster.wait_for_line(r"server-0 +http://([\d.]+):", END_S)[1]
            cold = ask(url, prompt(0))
            warm = ask(url, prompt(0))
            assert warm["output_ids"] == cold["output_ids"]
            assert warm["meta_info"]["cached_tokens"] == PROMPT_TOKENS - BLOCK
            number = next(each for each in range(3) if nodes.host(each) == host)
            if number and not url.startswith(f"http://{host}:"):
                nodes.lose(number)
                cluster.wait_for_line("the cluster is complete again", START_S)
                assert ask(url, prompt(0))["output_ids"] == cold["output_ids"]
            running = left_in(nodes, 3)
            assert running
            cluster.process.kill()
            _, alive = psutil.wait_procs(running, timeout=END_S)
            assert alive == []
            wait_until(lambda: folders() <= before, seconds=END_S, what="the keys are gone")
        with closing(on_ray(folder, nodes, "--colocated", "1")) as cluster:
            cluster.wait_for_line("Ctrl-C ends it", START_S)
            running = left_in(nodes, 3)
            cluster.process.send_signal(signal.SIGINT)
            assert cluster.process.wait(END_S) == 0
            assert not [each for each in running if each.is_running()]
    assert folders() <= before
