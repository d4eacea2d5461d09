"""The fleet of `crossings`: a router, a prefill and two decode servers.

They have DRAM and a disk each, both small, and can change their roles; their hand-overs can be damaged
(`faulty_pd_server`).
"""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from hooked_server import FOLDER
from pd_fleet import FaultySpec
from tuned_model import tuned

from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.tokens.tokenizer_check import EVERYTHING
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import until
from tests.support.programmes import INSTANCES, TENANTS
from tests.support.servers.pd_servers import pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess

FLAGS = (
    *("--max-total-tokens", "2400", "--chunked-prefill-size", "256", "--max-running-requests", "8"),
    *("--enable-metrics", "--kv-check", "--kv-dram-size", "8MB", "--kv-load-policy", "always"),
    # KV pushed out of memory is on the disk then, however slow the disk is.
    *("--kv-disk-size", "1GB", "--kv-disk-io", "auto,lag=wait", "--enable-pd-role-switch"),
)
KEYS = tuple(f"key-of-tenant-{tenant}-for-crossings" for tenant in range(TENANTS))
ADMIN = "key-of-the-operator-for-crossings"
SECONDS = 60.0
"""Longer than anything that is waited for takes."""


def update(server: ServerProcess, model: Path) -> None:
    """Other weights, in place."""
    server.post("/update_weights_from_disk", {"model_path": str(model), "flush_cache": False})


@dataclass(frozen=True)
class Models:
    """Folders with the weights that servers are started with, and with others."""

    first: Path
    tuned: Path

    @classmethod
    def made(cls, folder: Path) -> Models:
        first = model_path("tiny")
        return cls(first, tuned(first, folder / "tuned"))

    def of(self, is_tuned: bool) -> Path:
        return self.tuned if is_tuned else self.first


@dataclass
class Fleet:
    """Servers by their names (`INSTANCES`); where their router is to listen, where they look for faults, and
    their disks' folders; the tenants' keys, by whether tenants are isolated."""

    servers: dict[str, ServerProcess]
    port: int
    faults: dict[str, Path]
    disks: dict[str, Path]
    models: Models
    keys: dict[bool, Path]
    bootstrap_ports: dict[str, int]
    tuned: bool = False

    def total(self, prefix: str, *labels: str) -> float:
        """A counter's sum over samples with all of these labels."""
        return sum(
            value
            for server in self.servers.values()
            for sample, value in server.metrics().items()
            if sample.startswith(prefix + "{") and all(label in sample for label in labels)
        )

    def counted(self) -> Counter[str]:
        """The servers' counters of crossed mechanisms: hand-overs (of moves too), prompts prefetched, and
        blocks read from disk."""
        cache = "sglang_ext_cache_"
        names = {
            "handed over": ("sglang_ext_pd_handovers_total", 'end="held"'),
            "prefetched": (f"{cache}prefetches_total", 'event="done"'),
            "from disk": (f"{cache}tier_blocks_total", 'tier="disk"', 'event="got_done"'),
            "damaged on disk": (f"{cache}tier_blocks_total", 'tier="disk"', 'event="got_damaged"'),
        }
        return Counter({name: int(self.total(*where)) for name, where in names.items()})

    def pairs(self, roles: dict[str, str]) -> list[tuple[str, str]]:
        """As few pairs of a prefill and a decode server as have every server in one."""
        prefill = [name for name in INSTANCES if roles[name] == "prefill"]
        decode = [name for name in INSTANCES if roles[name] == "decode"]
        longer = max(len(prefill), len(decode))
        return [(prefill[at % len(prefill)], decode[at % len(decode)]) for at in range(longer)]

    def pass_through(self, prefill: str, decode: str, prompt: list[int]) -> None:
        """A request of these two, past the router."""
        pair = {
            "bootstrap_host": LOOPBACK,
            "bootstrap_port": self.bootstrap_ports[prefill],
            "bootstrap_room": secrets.randbelow(1 << 62) + 1,
        }
        servers = [self.servers[prefill], self.servers[decode]]
        with ThreadPoolExecutor(len(servers)) as pool:
            for sent in [pool.submit(each.generate, prompt, max_new_tokens=1, **pair) for each in servers]:
                sent.result()


def _keys_file(folder: Path, *, isolated: bool) -> Path:
    path = folder / f"keys-{isolated}.json"
    entries: list[dict[str, Any]] = [
        {"key": key, "tenant": f"tenant-{number}", "isolated": isolated} for number, key in enumerate(KEYS)
    ]
    path.touch(mode=0o600)
    path.write_text(json.dumps({"keys": [*entries, {"key": ADMIN, "tenant": "operators", "admin": True}]}))
    return path


@contextmanager
def fleet_of(folder: Path, models: Models) -> Iterator[Fleet]:
    """Start the servers, and end them."""
    port = free_port()
    faults = {name: folder / f"{name}-faults" for name in INSTANCES}
    disks = {name: folder / f"{name}-disk" for name in INSTANCES}
    bootstrap_ports = {name: free_port() for name in ("a", "b")}

    def spec(name: str) -> FaultySpec:
        faults[name].mkdir()
        own = (
            *("--kv-router", f"http://127.0.0.1:{port}", "--kv-instance-id", name),
            *("--kv-disk-path", str(disks[name])),
            *(() if name == "p" else ("--disaggregation-bootstrap-port", str(bootstrap_ports[name]))),
        )
        return FaultySpec(flags=(*FLAGS, *own), environment={**STRICT, FOLDER: str(faults[name])})

    keys = {isolated: _keys_file(folder, isolated=isolated) for isolated in (True, False)}
    with pd_servers([spec("p")], [spec("a"), spec("b")]) as (pd, _):
        servers = dict(zip(INSTANCES, pd.servers, strict=True))
        ports = {**bootstrap_ports, "p": pd.prefill[0].bootstrap_port}
        yield Fleet(servers, port, faults, disks, models, keys, ports)


@dataclass
class Front:
    """The router in front of the fleet, and clients of each tenant and of its operator."""

    router: Router
    tenants: list[aiohttp.ClientSession]
    admin: aiohttp.ClientSession

    def counted(self) -> Counter[str]:
        """The router's counters of crossed mechanisms."""
        names = {"moves": "moves", "hints_used": "hints", "role_changes": "role changes"}
        found: Counter[str] = Counter()
        for metric in self.router.metrics.registry.collect():
            if name := names.get(metric.name.removeprefix("sglang_ext_router_")):
                for sample in metric.samples:
                    if sample.name.endswith("_total"):
                        outcome = sample.labels.get("outcome") or " ".join(sample.labels.values())
                        found[f"{name} {outcome}"] += int(sample.value)
        return found


@asynccontextmanager
async def front_of(fleet: Fleet, policy: str, *, isolated: bool = True) -> AsyncIterator[Front]:
    """A router with this policy, once it has all servers. Tenants that are not isolated find each other's
    KV."""
    config = RouterConfig(
        port=fleet.port,
        policy=policy,
        api_keys_file=str(fleet.keys[isolated]),
        health_check_timeout_secs=5.0,
        # The health of servers is not tested here; a slow server is only slow.
        health_failure_threshold=40,
    )
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(Router(config))
        router.agents.verdict_s = 20.0
        clients = [
            await stack.enter_async_context(
                aiohttp.ClientSession(
                    headers={"authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=120)
                )
            )
            for key in (*KEYS, ADMIN)
        ]
        urls = [server.url for server in fleet.servers.values()]
        await until(lambda: len(router.fleet.usable()) == len(urls), SECONDS, "all servers at the router")
        await until(lambda: all(map(router.trees.trusted, urls)), SECONDS, "their blocks")
        # Before that prompts are matched by their text, and copied ahead of no move.
        await until(lambda: router.tokenizers.trust == EVERYTHING, SECONDS, "the router's tokenizer")
        yield Front(router, clients[:TENANTS], clients[-1])
        router.check()
