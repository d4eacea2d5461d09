"""A Redis server of a test's own: on a unix socket, in memory; killed, paused and started again at will."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from sglang_ext.testing.waiting import wait_until

HOW_TO_GET_IT = "redis-server is not installed (Debian and Ubuntu: apt-get install redis-server)"
START_S = 20.0


def redis_is_installed() -> bool:
    """Whether tests can start a Redis server here."""
    return shutil.which("redis-server") is not None


class RedisServer:
    """``with RedisServer() as redis`` runs a server at ``redis.url`` until the block ends.

    Args:
        password: asked of clients.
    """

    def __init__(self, *, password: str = "") -> None:
        # Not below pytest's folder: the path of a unix socket has at most 107 characters.
        self._folder = tempfile.TemporaryDirectory(prefix="redis-")
        self.socket = Path(self._folder.name) / "redis.sock"
        self.url = f"unix://{f':{password}@' if password else ''}{self.socket}"
        self._password = password
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start with an empty database, and wait until it answers."""
        options = ["--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        if self._password:
            options += ["--requirepass", self._password]
        self._process = subprocess.Popen(
            ["redis-server", *options],
            cwd=self._folder.name,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers, seconds=START_S, what="redis-server answers")

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client, suppress(OSError):
            client.settimeout(1.0)
            client.connect(str(self.socket))
            client.sendall(b"PING\r\n")
            return client.recv(100).startswith((b"+PONG", b"-NOAUTH"))
        return False

    def kill(self) -> None:
        """End it at once, with everything that it holds."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Let it hang: it keeps its connections and answers nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._folder.cleanup()

    def __repr__(self) -> str:
        return f"<RedisServer {self.socket} {'running' if self._process else 'ended'}>"
