"""`sglang-ext cluster --ray` on a real Ray cluster, whose nodes are loopback addresses of this machine."""

from __future__ import annotations

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from listening import AGENT, GLOO, HTTP, ROUTER, STORE, TRANSFER, beyond_loopback, rows
from test_cluster import BLOCK, END_S, PROMPT_TOKENS, START_S, RunningCluster, ask, prompt, sent

from sglang_ext.cluster.guard import below, children_by_parent
from sglang_ext.cluster.ray_runner import FOLDER_PREFIX
from sglang_ext.testing.waiting import wait_until
from tests.support.lab.hosts import Lab, why_not
from tests.support.servers.ports import free_port
from tests.support.servers.ray_nodes import HOW_TO_GET_IT, QUIET, RayNodes, ray_is_installed
from tests.support.servers.server import ONE_THREAD

pytestmark = [
    pytest.mark.timeout(3 * START_S),
    pytest.mark.skipif(not ray_is_installed(), reason=HOW_TO_GET_IT),
    pytest.mark.long,
]

PORT = 30_000


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
            pids = [each.pid for each in running]
            # Without Ray's own; nodes are loopback addresses here, at which their servers listen.
            assert beyond_loopback(pids) == []
            found = rows(pids)
            assert found.pop(GLOO) > 0
            assert found == Counter({ROUTER: 1, HTTP: 1, AGENT: 1, TRANSFER: 2, STORE: 1})
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


def test_hosts_that_share_nothing_and_one_of_them_is_lost(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head without room, and two hosts that have some: servers of a lost host start on the other."""
    if reason := why_not():
        pytest.skip(reason)
    for name, value in {**QUIET, **ONE_THREAD}.items():
        monkeypatch.setenv(name, value)
    names, key = ("head", "one", "two"), "the-key-of-clients"
    (folder / "logs").mkdir()
    with (
        Lab(*names, shared=[folder / "logs"], families=(4,)) as lab,
        RayNodes(0, 3, 3, lab=lab) as nodes,
        closing(
            RunningCluster(
                folder, "--ray", nodes.address, "--port", str(PORT), "--colocated", "1", "--restart", "2",
                "--router-args", f"--api-key {key}", host=lab["head"],
            )
        ) as cluster,
    ):  # fmt: skip

        def asked(url: str) -> dict[str, Any]:
            with lab["head"].network():
                return sent(url, prompt(0), {"authorization": f"Bearer {key}"})[0]

        url = cluster.wait_for_line(r"router +(http://\S+)  send requests here", START_S)[1]
        address = cluster.wait_for_line(r"server-0 +http://([\d.]+):", END_S)[1]
        cold, warm = asked(url), asked(url)
        assert warm["output_ids"] == cold["output_ids"]
        assert warm["meta_info"]["cached_tokens"] == PROMPT_TOKENS - BLOCK
        number = next(each for each in (1, 2) if nodes.host(each) == address)
        nodes.lose(number)
        cluster.wait_for_line("the cluster is complete again", START_S)
        again = asked(f"http://{nodes.host(3 - number)}:{PORT}")
        assert again["output_ids"] == cold["output_ids"]
        assert again["meta_info"]["cached_tokens"] == 0, "its disk was on the host that is gone"
        (command,) = psutil.Process(cluster.process.pid).children()  # nsenter's, which ends with its status
        command.send_signal(signal.SIGINT)
        assert cluster.process.wait(END_S) == 0
        left = lab[names[3 - number]].run("ps", "-e", "-o", "args", "--no-headers")
        assert not [words for words in left.splitlines() if "sglang::" in words or "launch_server" in words]
