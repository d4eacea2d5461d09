"""Servers and routers of the advisory benchmark, and the flags of each system."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.lib.data import ROOT
from benchmarks.lib.quiet import DEFAULT, go_first, stay_on
from benchmarks.router.processes import our_router, peer_router, process, wait_for
from sglang_ext.testing.models import RECIPES
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

MODEL = "small"
MODELS = tuple(name for name, recipe in RECIPES.items() if recipe.generates)
BLOCK_TOKENS = 16
REGISTER_S = 40.0


@dataclass(frozen=True, slots=True)
class Tiers:
    """Of one instance, in tokens. disk: 0 where there is none."""

    hbm: int = 16_384
    dram: int = 131_072
    disk: int = 0


@dataclass(frozen=True, slots=True)
class System:
    """One way to serve. servers: a key of ``server_flags``. policy: of our router; None: sglang-router."""

    name: str
    word: str
    """For the command line."""
    servers: str
    policy: str | None
    hints: bool = False


RECOMPUTE = System("recompute", "recompute", "no cache", "least-load")
STICKY = System("sticky swapping", "sticky", "ours", "benchmarks.advisory.sticky:sticky")
STOCK = System("stock, cache_aware", "stock", "stock", None)
LINK = "SGLANG_EXT_BENCHMARK_LINK"
"""Environment variable: bytes per second from DRAM to HBM (`slow_link`)."""
WHOLE = System("whole sessions in HBM", "whole", "ours, whole, slow link", "auto", hints=True)
BY_LAYER = System("layers of all sessions in HBM", "layers", "ours, layers, slow link", "auto", hints=True)
UNHINTED = System("ours without hints", "unhinted", "ours", "auto")
HINTED = System("ours", "ours", "ours", "auto", hints=True)
SYSTEMS = (RECOMPUTE, STOCK, STICKY, UNHINTED, HINTED)


def is_ours(kind: str) -> bool:
    """Whether servers of a kind register with our router."""
    return kind.startswith("ours")


def bytes_per_token(model: str) -> int:
    """Of a model's KV, in float32."""
    return RECIPES[model].kv_elements_per_token * 4


def server_flags(
    kind: str, tiers: Tiers, router_port: int, model: str = MODEL, disk: Path | None = None
) -> tuple[str, ...]:
    """Flags of the servers of a kind: the same, except for those of tiers.

    Args:
        disk: where the one server that gets these flags has its disk tier, if ``tiers`` has one.
    """
    token_bytes = bytes_per_token(model)
    below = ("--kv-disk-path", str(disk), "--kv-disk-size", str(tiers.disk * token_bytes))
    common = (
        # No prompt here is long enough that chunks would help; each would be a pass more.
        *("--chunked-prefill-size", "-1", "--max-total-tokens", str(tiers.hbm)),
        *("--mem-fraction-static", "0.5", "--enable-cache-report", "--enable-metrics"),
        # A server with nothing to do shall not take the other's core.
        "--sleep-on-idle",
        "--enable-priority-scheduling",
    )
    ours = (
        *("--radix-cache-backend", "global", "--kv-router", f"http://127.0.0.1:{router_port}"),
        *("--kv-dram-size", str(tiers.dram * token_bytes)),
        *(below if tiers.disk else ()),
    )
    kept = {
        "no cache": ("--disable-radix-cache",),
        "stock": (),
        "ours": ours,
        WHOLE.servers: (*ours, "--kv-layer-region-size", "0"),
        BY_LAYER.servers: (*ours, "--kv-layer-region-size", "auto"),
    }
    return (*common, *kept[kind])


class Fleet:
    """Servers of one kind, all running; ``routed`` puts a router before them."""

    def __init__(
        self, kind: str, instances: int, tiers: Tiers, link: float | None = None, model: str = MODEL
    ) -> None:
        """link: bytes per second from DRAM to HBM; None for as fast as this machine copies."""
        self.kind = kind
        self.token_bytes = bytes_per_token(model)
        self._folder = tempfile.TemporaryDirectory(prefix="advisory-")
        self._router_port = free_port()
        specs = [
            ServerSpec(
                model=model,
                flags=server_flags(kind, tiers, self._router_port, model, self._disk(number)),
                environment={"OMP_NUM_THREADS": "1"} | ({} if link is None else {LINK: str(link)}),
                run=ServerSpec.run if link is None else (str(Path(__file__).with_name("slow_link.py")),),
            )
            for number in range(instances)
        ]
        self.servers = [ServerProcess(spec) for spec in specs]
        self.first = False
        """Whether the kernel puts the servers before other work."""

    def _disk(self, number: int) -> Path:
        path = Path(self._folder.name) / f"disk-{number}"
        path.mkdir()
        return path

    def __enter__(self) -> Fleet:
        with contextlib.ExitStack() as stack:
            stack.callback(self._folder.cleanup)
            for server in self.servers:
                stack.callback(server.stop)
            stack.callback(go_first, [os.getpid()], DEFAULT)
            with ThreadPoolExecutor(len(self.servers)) as pool:
                starting = [pool.submit(server.start) for server in self.servers]
                while not all(each.done() for each in starting):
                    time.sleep(0.5)
                    self._go_first()
                for each in starting:
                    each.result()
            self._go_first()
            self._keep_apart()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _go_first(self) -> None:
        pids = [pid for server in self.servers if server.running for pid in server.pids]
        self.first = go_first([os.getpid(), *pids])

    def _keep_apart(self) -> None:
        """A core for each server, if there are so many: a server cannot gain from the idle time of
        another."""
        for number, server in enumerate(self.servers):
            stay_on(number, server.pids)

    @property
    def urls(self) -> list[str]:
        """Of the servers."""
        return [server.url for server in self.servers]

    def flush(self) -> None:
        """Empty every tier of every server."""
        for server in self.servers:
            server.flush()

    def disk_tokens(self) -> int:
        """Tokens of KV that servers of ours have read from their disks since they started."""
        if self.kind != "ours":
            return 0
        return BLOCK_TOKENS * sum(
            int(count)
            for server in self.servers
            for sample, count in server.metrics().items()
            if sample.startswith("sglang_ext_cache_tier_blocks_total{")
            and 'tier="disk"' in sample
            and 'event="got_done"' in sample
        )

    def settle(self, seconds: float = 0.5) -> None:
        """Wait until nothing runs and write-behind is complete."""
        for server in self.servers:
            server.wait_idle()
        time.sleep(seconds)

    @contextlib.contextmanager
    def routed(
        self, system: System, peer_python: Path | None = None, flags: Sequence[str] = ()
    ) -> Iterator[str]:
        """A router over the servers; gives its URL. flags: more of our router's."""
        log = Path(self._folder.name) / "router.log"
        if system.policy is None:
            assert peer_python is not None
            port = free_port()
            command = peer_router(peer_python, port, self.urls)
        else:
            ours = is_ours(self.kind)
            port = self._router_port
            # One's own policy is looked for where python looks for modules.
            command = our_router(port, () if ours else self.urls, "--policy", system.policy, *flags)
            if ours:
                command.remove("--worker-urls")
        with contextlib.chdir(ROOT), process(command, core=None, log=log) as running:
            if self.first:
                go_first([running.pid])
            wait_for(port, running)
            if is_ours(self.kind):
                self._wait_registered(port, log)
            yield f"http://127.0.0.1:{port}"

    def _wait_registered(self, port: int, log: Path) -> None:
        end = time.monotonic() + REGISTER_S
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=5, trust_env=False) as client:
            while time.monotonic() < end:
                with contextlib.suppress(httpx.HTTPError):
                    told = client.get("/server_info").json().get("router", {}).get("workers", [])
                    ready = [row for row in told if row.get("state") == "ready" and row.get("trusted", True)]
                    if len(ready) == len(self.servers):
                        return
                time.sleep(0.1)
        raise RuntimeError(
            f"the servers did not register\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}"
        )


def router_counts(url: str) -> dict[str, float]:
    """Our router's counters by sample."""
    found: dict[str, float] = {}
    text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def progress(text: str) -> None:
    """Print a line of progress."""
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()
