"""A Ray cluster of a test's own, of which nothing is left: on loopback addresses, or on hosts of a lab."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from sglang_ext.cluster.process import GUARD
from sglang_ext.testing.waiting import wait_until
from tests.support.lab.hosts import Lab
from tests.support.servers.ports import free_port

HOW_TO_GET_IT = "Ray is not installed: pip install 'ray>=2.40'"
START_S = 60.0
END_S = 30.0
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}
OBJECT_STORE_BYTES = 80 << 20
"""About the least that Ray takes."""


def ray_is_installed() -> bool:
    """Whether tests can start a Ray cluster here."""
    return importlib.util.find_spec("ray") is not None


class RayNodes:
    """``with RayNodes(2, 2, 2) as ray`` runs nodes at 127.0.0.2, .3 and .4, the first its head.

    Args:
        cores: of each node, as it reports them.
        lab: its hosts are the nodes, in their order; without a lab, nodes run on this machine.
    """

    def __init__(self, *cores: int, lab: Lab | None = None) -> None:
        self._hosts = () if lab is None else tuple(lab.hosts.values())
        # Not below pytest's folder: Ray makes sockets in it.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        self.address = f"{self.host(0)}:{free_port()}"
        self._cores = cores
        self._watch = os.pipe()
        self._nodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RayNodes:
        try:
            for number in range(len(self._cores)):
                # One after the other: on a busy machine the head gives up nodes that begin together.
                self._start(number)
                self._wait_for(number)
        except BaseException:
            self.close()
            raise
        return self

    def _start(self, number: int) -> None:
        port = self.address.rpartition(":")[2]
        role = (
            ("--head", "--port", port, "--temp-dir", str(self.folder), "--include-dashboard", "false")
            if number == 0
            else ("--address", self.address)
        )
        command = (
            *(str(Path(sys.executable).with_name("ray")), "start", "--block", "--disable-usage-stats", *role),
            *(
                "--node-ip-address",
                self.host(number),
                "--num-cpus",
                str(self._cores[number]),
                "--num-gpus",
                "0",
            ),
            *("--object-store-memory", str(OBJECT_STORE_BYTES)),
        )
        if self._hosts:
            self._nodes.append(
                self._hosts[number].popen(command, log=self._log(number), environment={**os.environ, **QUIET})
            )
            return
        with open(self._log(number), "wb") as log:
            self._nodes.append(
                subprocess.Popen(
                    [*(sys.executable, "-I", "-S", str(GUARD), str(self._watch[0]), "5", "--"), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **QUIET},
                    pass_fds=(self._watch[0],),
                    start_new_session=True,
                )
            )

    def host(self, number: int) -> str:
        """The address of a node. Not 127.0.0.1: Ray takes the machine's own for it."""
        if self._hosts:
            return self._hosts[number].address()
        return f"127.0.0.{2 + number}"

    def _log(self, number: int) -> Path:
        return self.folder / f"node-{number}.log"

    def _wait_for(self, number: int) -> None:
        wait_until(lambda: self._is_up(number), seconds=START_S, what=f"Ray's node {number}")

    def _is_up(self, number: int) -> bool:
        if self._nodes[number].poll() is not None:
            raise RuntimeError(f"Ray's node {number} ended:\n{self._log(number).read_text(encoding='utf-8')}")
        return "Ray runtime started" in self._log(number).read_text(encoding="utf-8")

    def pid(self, number: int) -> int:
        """The guard of a node; all that runs there is below it."""
        return self._nodes[number].pid

    def lose(self, number: int) -> None:
        """A node goes at once, with all that runs there."""
        if self._hosts:
            self._hosts[number].close()
            return
        self._nodes[number].send_signal(signal.SIGQUIT)
        self._nodes[number].wait(END_S)

    def close(self) -> None:
        """End all nodes."""
        for node in () if self._hosts else self._nodes:  # hosts end with their lab
            if node.poll() is None:
                node.send_signal(signal.SIGQUIT)
        for node in () if self._hosts else self._nodes:
            node.wait(END_S)
        for end in self._watch:
            os.close(end)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
