"""Real servers and routers in front of them, for the part of the router benchmark with real servers."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmarks.lib.quiet import stay_on
from benchmarks.router.processes import PEER, our_router, peer_router, process, wait_for
from tests.support.servers import preloaded
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

MODEL = "small"
DRAM, DISK = "64MB", "1GB"
"""Of an instance with tiers. The disk is read into DRAM and written from it."""
NO_TIERS: tuple[str, ...] = ("--kv-dram-size", "0")


@contextlib.contextmanager
def forked_servers() -> Iterator[None]:
    """Fork servers from one process that has imported SGLang, which takes a third of the time."""
    if preloaded.current({}) is not None:
        yield
        return
    with preloaded.use():
        yield


class RealFleet:
    """Servers that report their cached blocks to the router on ``router_port``.

    Args:
        folder: for logs.
        instances: how many.
        pool_tokens: of each one's pool, which is all the cache it has until `give_tiers`.
        apart: each on a core of its own, as far as there are so many: a server cannot gain from the idle time
            of another, as on machines of their own.
    """

    def __init__(self, folder: Path, instances: int, pool_tokens: int, *, apart: bool = False) -> None:
        self._folder = folder
        self._apart = apart
        self._stack = contextlib.ExitStack()
        self._servers: dict[int, ServerProcess] = {}
        self.router_port = free_port()
        self._ports = [free_port() for _ in range(instances)]
        self._tiers = dict.fromkeys(range(instances), NO_TIERS)
        """Flags by server."""
        self._flags = (
            *("--radix-cache-backend", "global", "--kv-router", f"http://127.0.0.1:{self.router_port}"),
            *("--chunked-prefill-size", "-1"),
            *("--max-total-tokens", str(pool_tokens), "--mem-fraction-static", "0.5"),
        )

    @property
    def urls(self) -> list[str]:
        """Of the servers."""
        return [f"http://127.0.0.1:{port}" for port in self._ports]

    def __enter__(self) -> RealFleet:
        with contextlib.ExitStack() as stack:
            stack.callback(self._stop, list(self._tiers))
            self._start(list(self._tiers))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def give_tiers(self) -> None:
        """Start all servers anew, from now on with DRAM and disk tiers."""
        for number in range(len(self._ports)):
            disk = self._folder / f"disk-{number}"
            disk.mkdir()
            self._tiers[number] = (
                *("--kv-dram-size", DRAM),
                *("--kv-disk-path", str(disk), "--kv-disk-size", DISK),
            )
        self._stop(list(self._tiers))
        self._start(list(self._tiers))

    def restart(self, number: int) -> None:
        """End a server and start it anew at its address; it keeps the blocks on its disk, if it has one."""
        self._stop([number])
        self._start([number])

    def _start(self, which: Sequence[int]) -> None:
        """Start servers, all at the same time."""
        for number in which:
            spec = ServerSpec(
                model=MODEL,
                flags=(*self._flags, *self._tiers[number]),
            )
            self._servers[number] = ServerProcess(spec, port=self._ports[number])
        with ThreadPoolExecutor(len(which)) as pool:
            list(pool.map(lambda number: self._servers[number].start(), which))
        for number in which if self._apart else ():
            stay_on(number, self._servers[number].pids)

    def _stop(self, which: Sequence[int]) -> None:
        there = [server for number in which if (server := self._servers.pop(number, None)) is not None]
        with ThreadPoolExecutor(max(1, len(there))) as pool:
            list(pool.map(ServerProcess.stop, there))

    def flush(self) -> None:
        """Empty every cache, once the servers are idle."""
        for url in self.urls:
            end = time.monotonic() + 30
            while httpx.post(f"{url}/flush_cache", timeout=30, trust_env=False).status_code != 200:
                if time.monotonic() > end:
                    raise RuntimeError(f"{url} does not become idle")
                time.sleep(0.05)

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
            command = peer_router(peer_python, port, self.urls)
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
        text = "" if log is None else log.read_text(errors="replace", encoding="utf-8")[-2000:]
        raise RuntimeError(f"the servers did not register: {seen}\n{text}")


def _counts_tokens(client: httpx.Client) -> bool:
    """Whether the router knows prompts by their tokens already, and not yet by their text only."""
    body = {"text": "Hello", "sampling_params": {"max_new_tokens": 1}}
    return "x-kv-matched-tokens" in client.post("/generate", json=body, timeout=60).headers
