"""Real SGLang servers on hosts of a lab, with the same handle as those on this machine.

A thread that talks to one has to be on the lab's network (`Host.network`).
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from sglang_ext.cluster.guard import descendants
from sglang_ext.testing.waiting import wait_until
from tests.support.lab.hosts import Host, stop
from tests.support.servers.server import ONE_THREAD, STOP_SECONDS, ServerProcess, ServerSpec

PORT = 30_000


class HostServer(ServerProcess):
    """A server that listens on every address of its host.

    Args:
        spec, port: as of `ServerProcess`. Files of this machine that its flags name have to be shared with
            the host.
        host: where it runs.
        family: 4 or 6, of the address that it listens on; its host's first unless given.
        keep_open: as of `ServerProcess`.
    """

    def __init__(
        self,
        spec: ServerSpec,
        host: Host,
        *,
        port: int = PORT,
        family: int | None = None,
        keep_open: bool = False,
    ) -> None:
        super().__init__(spec, port=port, address=host.address(family=family), keep_open=keep_open)
        self.host = host

    @contextmanager
    def _own_port(self) -> Iterator[None]:
        """No other process uses ports of the host."""
        yield

    def _launch(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="server-")
        command = self.spec.command(self.port, "::" if ":" in self.address else "0.0.0.0")
        environment = {**ONE_THREAD, **os.environ, **self.spec.environment}
        self._process = self.host.popen(command, log=self.log, environment=environment)

    def stop(self) -> None:
        """End it and everything it started, so that its port and its disk are free for the next server."""
        if isinstance(self._process, Popen):
            below = descendants(self._process.pid)
            with suppress(ProcessLookupError, TimeoutExpired):
                os.killpg(self._process.pid, signal.SIGTERM)
                self._process.wait(self._grace_s)
            stop(self._process, signal.SIGKILL)
            for pid in below:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            wait_until(
                lambda: not any(Path(f"/proc/{pid}").exists() for pid in below),
                seconds=STOP_SECONDS,
                what="the end of the server's processes",
            )
        super().stop()
