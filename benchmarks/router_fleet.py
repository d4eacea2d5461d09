"""Real servers and routers in front of them, for the part of the router benchmark with real servers."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from benchmarks.router_processes import PEER, free_port, our_router, peer_router, process, wait_for
from sglang_ext.cluster.process import GUARD
from sglang_ext.testing.servers import ServerSpec

START_S = 300.0
MODEL = "small"
DRAM_IN_FRONT = "64MB"
"""The disk is read into DRAM and written from it."""


class RealFleet:
    """Servers that tell the router on ``router_port`` what they cache.

    Args:
        folder: for logs.
        instances: how many.
        pool_tokens: of each one's pool, which is all the cache it has, but for what `restart` gives it.
    """

    def __init__(self, folder: Path, instances: int, pool_tokens: int) -> None:
        self._folder = folder
        self._disks = 0
        self.router_port = free_port()
        self._ports = [free_port() for _ in range(instances)]
        self._stacks = [contextlib.ExitStack() for _ in self._ports]
        self._spec = ServerSpec(
            model=MODEL,
            flags=(
                *("--radix-cache-backend", "global", "--kv-router", f"http://127.0.0.1:{self.router_port}"),
                *("--chunked-prefill-size", "-1"),
                *("--max-total-tokens", str(pool_tokens), "--mem-fraction-static", "0.5"),
            ),
            # As many threads as cores in each of several servers would wait for each other most of the time.
            environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        )

    @property
    def urls(self) -> list[str]:
        """Of the servers."""
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def __enter__(self) -> RealFleet:
        try:
            running = [self._launch(index) for index in range(len(self._ports))]
            for index, server in enumerate(running):
                self._wait(index, server)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for stack in self._stacks:
            stack.close()

    def restart(self, index: int, *, keeps: bool) -> None:
        """Kill a server and start it anew at its address, from now on with a disk tier.

        Args:
            keeps: it finds what was on its disk; else its disk is empty.
        """
        self._stacks[index].close()
        self._disks += not keeps
        disk = self._folder / f"disk-{self._disks}"
        disk.mkdir(exist_ok=True)
        tiers = ("--kv-dram-size", DRAM_IN_FRONT, "--kv-disk-path", str(disk), "--kv-disk-size", "1GB")
        self._wait(index, self._launch(index, tiers))

    def flush(self) -> None:
        """Empty every cache, once the servers are idle."""
        for url in self.urls:
            end = time.monotonic() + 30
            while httpx.post(f"{url}/flush_cache", timeout=30, trust_env=False).status_code != 200:
                if time.monotonic() > end:
                    raise RuntimeError(f"{url} does not become idle")
                time.sleep(0.05)

    def _launch(self, index: int, tiers: Sequence[str] = ("--kv-dram-size", "0")) -> subprocess.Popen[str]:
        return self._stacks[index].enter_context(
            _guarded(
                [*self._spec.command(self._ports[index]), *tiers],
                self._folder / f"server-{index}.log",
                self._spec.environment,
            )
        )

    def _wait(self, index: int, server: subprocess.Popen[str]) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end:
            if server.poll() is not None:
                raise RuntimeError(f"a server ended: {self._log(index)}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.urls[index]}/health", timeout=5, trust_env=False).status_code == 200:
                    return
            time.sleep(0.2)
        raise RuntimeError(f"a server does not start: {self._log(index)}")

    def _log(self, index: int) -> str:
        lines = (self._folder / f"server-{index}.log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])

    @contextlib.contextmanager
    def routed(self, policy: str, peer_python: Path | None) -> Iterator[int]:
        """A router over empty caches; gives its port.

        Args:
            policy: one of ours, or the name of the peer.
        """
        self.flush()
        log = self._folder / f"router-{policy.split()[0]}.log"
        if policy == PEER:
            assert peer_python is not None
            port = free_port()
            command = peer_router(peer_python, port, self.urls, "--log-level", "warn")
        else:
            port = self.router_port
            command = our_router(port, (), "--policy", policy, "--log-level", "info")
            command = [word for word in command if word != "--worker-urls"]
        with process(command, core=None, log=log) as running:
            if policy == PEER:
                wait_for(port, running)
            else:
                self._wait_registered(port, running, log)
            yield port

    def wait_registered(self, port: int) -> None:
        """Wait until our router at ``port`` uses every server and believes its index."""
        self._wait_registered(port, None, None)

    def _wait_registered(self, port: int, running: subprocess.Popen[str] | None, log: Path | None) -> None:
        end = time.monotonic() + 30
        seen: list[dict[str, object]] = []
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5, trust_env=False) as client:
            while time.monotonic() < end:
                if running is not None and running.poll() is not None:
                    break
                with contextlib.suppress(httpx.HTTPError):
                    seen = client.get("/server_info").json().get("router", {}).get("workers", [])
                    ready = [row for row in seen if row.get("state") == "ready" and row.get("trusted", True)]
                    if len(ready) == len(self._ports) and _counts_tokens(client):
                        return
                time.sleep(0.05)
        text = "" if log is None else log.read_text(errors="replace")[-2000:]
        raise RuntimeError(f"the servers did not register: {seen}\n{text}")


@contextlib.contextmanager
def _guarded(
    command: Sequence[str], log: Path, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """A process that is killed when the block ends, and when this process does, with all it has started."""
    watch, ours = os.pipe()
    try:
        with log.open("ab") as output:
            guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(watch), "1.0", "--", *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                text=True,
                env={**os.environ, **environment},
                pass_fds=(watch,),
                start_new_session=True,
            )
        try:
            yield guard
        finally:
            guard.send_signal(signal.SIGQUIT)
            guard.wait()
    finally:
        os.close(watch)
        os.close(ours)


def _counts_tokens(client: httpx.Client) -> bool:
    """Whether the router knows prompts by their tokens already, and not yet by their text only."""
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 1}}
    return "x-kv-matched-tokens" in client.post("/generate", json=body, timeout=60).headers
