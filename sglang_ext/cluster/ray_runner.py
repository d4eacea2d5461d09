"""Runs a part of a cluster on a node of Ray: an actor, and below it the guard, as on one machine.

When the actor dies, with the driver or the node's Ray, the guard notices and ends all processes of the part.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from sglang_ext.addresses import Ports
from sglang_ext.cluster.plan import Part
from sglang_ext.cluster.process import PartProcess
from sglang_ext.cluster.ranks import MEETING_PORTS
from sglang_ext.cluster.ray_plan import Place
from sglang_ext.folders import open_own
from sglang_ext.patches.environment import prepare, require_temporary

FOLDER_PREFIX = "sglang-ext-ray-"
LOG_BYTES = 1 << 18
"""Bytes of the end of a log that the driver receives."""


class Runner:
    """Runs one part, once.

    Args:
        keys: files of its private folder, by name. Its log is there too.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        prepare(os.environ)  # this node's user and proxies are not those of the driver
        require_temporary(os.environ)
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
        for name, text in keys.items():
            descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="ascii") as file:
                file.write(text)
        self._log = self._folder / "log"
        self._ports = Ports()
        self._process: PartProcess | None = None
        self._sent: list[str] = []

    async def place(self, address: str, wanted: Sequence[int]) -> Place:
        """Hold ports at ``address``, free ones for 0.

        Raises:
            ConfigError: one is in use.
        """
        ports = [self._ports.take(address, port, "--port") for port in wanted]
        if len(ports) > 1:  # a server's ranks meet on loopback
            ports[2:3] = self._ports.free_after(ports[2], 1, run=MEETING_PORTS)
        return Place(address, tuple(ports), str(self._folder))

    async def run(self, part: Part, grace_s: float) -> tuple[int, bytes]:
        """Run the part to its end: its exit code, and the end of its log."""
        watch = os.pipe()
        try:
            self._process = PartProcess(part, self._log, watch=watch[0], grace_s=grace_s, folder=self._folder)
            for what in self._sent:
                await self.send(what)
            log = open_own(self._log, os.O_RDONLY | os.O_CREAT)  # the guard may remove it
            try:
                code = await self._process.run()
                return code, os.pread(log, LOG_BYTES, max(0, os.fstat(log).st_size - LOG_BYTES))
            finally:
                os.close(log)
        finally:
            for end in watch:
                os.close(end)
            self._ports.__exit__()

    async def send(self, what: str) -> None:
        """``terminate``, ``hasten`` or ``kill`` it."""
        if self._process is None:
            self._sent.append(what)
        else:
            getattr(self._process, what)()

    async def idle(self) -> None:
        """Return at once: it lives."""
        await asyncio.sleep(0)
