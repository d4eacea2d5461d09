"""Servers of the benchmark of prefill and decode apart, and asking them.

Designs share servers: the names under which each side keeps a request's KV (SGLang's `extra_key`) decide
which side finds it again, and prefill and decode may get different names.

    keeps nothing      a name of its own for every turn: no prompt finds KV
    keeps its own KV   one name
    takes nothing back one name, but another on the other side: returned KV is not found
"""

from __future__ import annotations

import asyncio
import enum
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.quiet import DEFAULT, go_first
from benchmarks.router.processes import our_router, process, wait_for
from sglang_ext.cluster.guard import descendants
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.cluster.process import tail
from sglang_ext.stages import StageTimes
from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer
from tests.support.servers.pd_servers import BACKEND
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

MODEL = "small"
POOL_TOKENS = 64_000
READ_BYTES = "sglang_ext_pd_read_bytes"
CONNECTED = 'sglang_ext_pd_prefill_servers{state="connected"'
BUSY = ("sglang_ext_pd_live_handovers", "sglang_ext_pd_leased_pages")
SHOWN_SECONDS = 0.3
"""Largest age, in seconds, of the values that `/metrics` shows."""
STOCK = "stock-mooncake_tcp"
STOCK_LATE = "stock-prefill_complete"
"""The same with SGLang's own late allocation (from 0.5.22): decode sets slots aside after the prefill."""


class Keeps(enum.Enum):
    """The KV that a side finds again."""

    NOTHING = "nothing"
    ALL = "all"
    ITS_OWN = "its own"


@dataclass(frozen=True)
class Design:
    """One way to serve. servers: the group that answers. prefill, decode: the KV that each keeps; colocated
    servers are `decode`. routed: through the group's router.
    """

    name: str
    servers: str
    prefill: Keeps
    decode: Keeps
    routed: bool = False

    def keys(self, talk: str, turn: int) -> tuple[str, str]:
        """The names for prefill and decode. Kept KV is found by every conversation: agents share a prefix."""
        found = []
        for side, keeps in (("p", self.prefill), ("d", self.decode)):
            name = self.name
            if keeps is Keeps.NOTHING:
                name = f"{name}/{talk}/{side}{turn}"
            elif keeps is Keeps.ITS_OWN:
                name = f"{name}/{side}"
            found.append(name)
        return found[0], found[1]


TRUTH = "colocated"
DESIGNS = (
    Design(TRUTH, "colocated", Keeps.NOTHING, Keeps.NOTHING),
    Design("colocated-caching", "colocated", Keeps.NOTHING, Keeps.ALL),
    Design("basic", "pull", Keeps.NOTHING, Keeps.NOTHING),
    Design("1", "pull", Keeps.ALL, Keeps.NOTHING),
    Design("2", "pull", Keeps.ITS_OWN, Keeps.ITS_OWN),
    Design("3", "pull", Keeps.ALL, Keeps.ALL),
)
ROUTED = Design("3-routed", "pull", Keeps.ALL, Keeps.ALL, routed=True)
STOCK_DESIGN = Design(STOCK, STOCK, Keeps.ALL, Keeps.ALL)
LATE_DESIGN = Design(STOCK_LATE, STOCK_LATE, Keeps.ALL, Keeps.NOTHING)
STOCK_ROUTED = Design(f"{STOCK}-routed", STOCK, Keeps.ALL, Keeps.ALL, routed=True)


@dataclass
class Group:
    """Servers that serve together. prefill: none when they are colocated. ours: whether they count."""

    prefill: list[ServerProcess]
    decode: list[ServerProcess]
    bootstrap_ports: list[int]
    ours: bool = True
    router: str = ""
    """URL of the router before them, if there is one."""

    @property
    def servers(self) -> list[ServerProcess]:
        return [*self.prefill, *self.decode]

    def read_bytes(self) -> float:
        """Bytes of KV that decode has read from prefill; 0 where that is not counted."""
        if not self.prefill or not self.ours:
            return 0.0
        return sum(_sum(server.metrics(), READ_BYTES) for server in self.decode)

    def connected(self) -> float:
        """Connections from decode to prefill servers that stand."""
        return sum(_sum(server.metrics(), CONNECTED) for server in self.decode)

    def registered(self) -> int:
        """Number of registered servers that the router before them may use."""
        found = httpx.get(f"{self.router}/cluster", timeout=30, trust_env=False).json()
        return sum(one["usable"] and one["registered"] for one in found["instances"])

    def settle(self) -> None:
        """Wait until nothing of the last request goes on, returns included."""
        for server in self.servers:
            server.wait_idle()
        if self.prefill and self.ours:
            time.sleep(SHOWN_SECONDS)
            wait_until(
                lambda: all(_sum(server.metrics(), *BUSY) == 0 for server in self.servers),
                seconds=15,
                what="the end of returns",
            )

    def log_ends(self) -> str:
        """The last lines of the servers' logs."""
        return "\n".join(line for server in self.servers for line in tail(server.log))

    def flush(self) -> None:
        """Forget everything."""
        for server in self.servers:
            server.flush()


def _sum(samples: Mapping[str, float], *names: str) -> float:
    return sum(value for sample, value in samples.items() if sample.startswith(names))


@dataclass(frozen=True)
class GroupSpec:
    """The servers to start. prefill, decode: how many; no prefill is colocated. flags: of every server;
    decode_flags: of decode besides. environment: on top. own_ports: whether decode servers have a bootstrap
    port, too, as those need that change their role.
    """

    prefill: int
    decode: int
    flags: tuple[str, ...] = ()
    decode_flags: tuple[str, ...] = ()
    ours: bool = True
    environment: tuple[tuple[str, str], ...] = ()
    own_ports: bool = False

    def build(self) -> Group:
        """Servers that do not run yet."""
        common = ("--enable-metrics", *self.flags)
        if "--max-total-tokens" not in self.flags:
            common += ("--max-total-tokens", str(POOL_TOKENS))
        environment = dict(self.environment)
        ports = [free_port() for _ in range(self.prefill)]
        backend = BACKEND if self.ours else ()

        def server(*flags: str) -> ServerProcess:
            return ServerProcess(ServerSpec(MODEL, flags=(*flags, *common), environment=environment))

        if not self.prefill:
            return Group([], [server() for _ in range(self.decode)], [])
        prefill = [
            server("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port), *backend)
            for port in ports
        ]
        decode = [
            server("--disaggregation-mode", "decode", *backend, *self.decode_flags, *self._own_port())
            for _ in range(self.decode)
        ]
        return Group(prefill, decode, ports, self.ours)

    def _own_port(self) -> tuple[str, ...]:
        return ("--disaggregation-bootstrap-port", str(free_port())) if self.own_ports else ()


COLOCATED = GroupSpec(0, 1, ("--radix-cache-backend", "global"))


def pair(*flags: str, prefill: int = 1, decode: int = 1, own_ports: bool = False) -> GroupSpec:
    """Our servers, apart, in design 3."""
    return GroupSpec(prefill, decode, ("--kv-pd-caching", "3", *flags), own_ports=own_ports)


def stock(mooncake: Path | None, *, late: bool = False) -> GroupSpec:
    """SGLang's own hand-over by Mooncake over TCP, with its own caches. late: see `STOCK_LATE`."""
    policy = ("--disaggregation-decode-allocation-policy", "prefill_complete") if late else ()
    # Its caching on decode is off unless a flag turns it on; late allocation runs without it.
    cache = () if late else ("--disaggregation-decode-enable-radix-cache",)
    return GroupSpec(
        1,
        1,
        ("--disaggregation-transfer-backend", "mooncake_tcp", *policy),
        ("--disaggregation-decode-retraction-backup", "cpu_tensor", *cache),
        ours=False,
        environment=(
            *mooncake_environment(mooncake).items(),
            ("SGLANG_HOST_IP", LOOPBACK),
            # Else 0.5.23 brings Mooncake slots in pinned memory, which needs CUDA. There is one such rank.
            ("SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER", "1"),
        ),
    )


def mooncake_environment(folder: Path | None) -> dict[str, str]:
    """Where Mooncake is found, on top of the environment."""
    if folder is None:
        return {}
    before = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), before)))}


def mooncake_missing(folder: Path | None) -> str | None:
    """Why stock SGLang with Mooncake cannot be measured; None when it can."""
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.engine"],
        env={**os.environ, **mooncake_environment(folder)},
        capture_output=True,
        text=True,
        check=False,
        encoding="utf-8",
    )
    if done.returncode == 0:
        return None
    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    return (
        f"left out: Mooncake cannot be imported ({reason}); --mooncake names a folder in which "
        "`pip install --no-deps --target FOLDER mooncake-transfer-engine-non-cuda` was run"
    )


@contextmanager
def running(specs: Mapping[str, GroupSpec]) -> Iterator[dict[str, Group]]:
    """Start all servers at once, and end them. They and this process go before other work, where that is
    allowed.
    """
    groups = {name: spec.build() for name, spec in specs.items()}
    servers = [server for group in groups.values() for server in group.servers]
    with ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
        with ThreadPoolExecutor(len(servers)) as pool:
            list(pool.map(ServerProcess.start, servers))
        stack.callback(go_first, [os.getpid()], DEFAULT)
        go_first([os.getpid(), *(pid for server in servers for pid in server.pids)])
        yield groups


@contextmanager
def routed(
    group: Group,
    folder: Path,
    peer_python: Path | None = None,
    port: int | None = None,
    flags: Sequence[str] = (),
) -> Iterator[None]:
    """A router in front of a pair: sglang-router of another interpreter, or ours. port: any if not given.
    flags: of ours."""
    port, log = port or free_port(), folder / f"router-{len(list(folder.iterdir()))}.log"
    if peer_python is None:
        command = our_router(port, [server.url for server in group.servers], *flags)
    else:
        command = [
            *(str(peer_python), "-m", "sglang_router.launch_router", "--host", LOOPBACK, "--port", str(port)),
            *("--pd-disaggregation", "--policy", "cache_aware", "--prometheus-port", str(free_port())),
            *("--prefill", group.prefill[0].url, str(group.bootstrap_ports[0])),
            *("--decode", group.decode[0].url, "--log-level", "warn"),
        ]
    with process(command, core=None, log=log) as started:
        wait_for(port, started, "/health")
        go_first([started.pid, *descendants(started.pid)])
        group.router = f"http://{LOOPBACK}:{port}"
        try:
            yield
        finally:
            group.router = ""


class AskError(RuntimeError):
    """A server answered with an error; the message has it."""


@dataclass(frozen=True)
class Asked:
    """One answer. ttft, jct: seconds to the first token and to the last. cached: tokens of the prompt.
    margins: how far each token is ahead of the second best, if that was asked for.
    """

    tokens: list[int]
    cached: int
    ttft: float
    jct: float
    margins: list[float]
    stages: StageTimes | None = None
    """Where that went, where the servers tell it."""

    @property
    def tpot(self) -> float:
        """Seconds per token after the first."""
        return (self.jct - self.ttft) / max(1, len(self.tokens) - 1)


async def ask(
    group: Group,
    prompt: Sequence[int],
    tokens: int,
    number: int,
    keys: tuple[str, str] = ("", ""),
    *,
    by_router: bool = False,
    which: tuple[int, int] = (0, 0),
    margins: bool = False,
) -> Asked:
    """One turn, streamed. keys: names of its KV on prefill and decode. ``which``: index of the server that
    is asked. margins: ask for log probabilities too, which makes every event of the stream a long one.
    """
    body: dict[str, Any] = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "stream": True,
    }
    if margins:
        body |= {"return_logprob": True, "top_logprobs_num": 2}
    url = group.router if by_router else group.decode[which[1]].url
    if group.prefill and not by_router:
        body |= {
            "bootstrap_host": LOOPBACK,
            "bootstrap_port": group.bootstrap_ports[which[0]],
            "bootstrap_room": number,
        }
    async with httpx.AsyncClient(timeout=180, trust_env=False, verify=False) as client:
        began = time.perf_counter()
        beside = None
        if group.prefill and not by_router:
            other = {**body, "extra_key": keys[0] or None, "stream": False}
            beside = asyncio.create_task(client.post(f"{group.prefill[which[0]].url}/generate", json=other))
        first, last = 0.0, ""
        body |= {"extra_key": keys[1] or None}
        async with client.stream("POST", f"{url}/generate", json=body) as response:
            if response.status_code != 200:
                raise AskError(f"{url}: {response.status_code}: {(await response.aread()).decode()[:500]}")
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if data and data != "[DONE]":
                    first = first or time.perf_counter() - began
                    last = data
        whole = time.perf_counter() - began
        if beside is not None:
            other_answer = await beside
            if other_answer.status_code != 200:
                text = f"prefill: {other_answer.status_code}: {other_answer.text[:500]}"
                raise AskError(f"{text}\n{group.log_ends()}")
    answer = json.loads(last)
    best = Answer.of(answer).margins if margins else []
    meta = answer["meta_info"]
    stages = StageTimes.of_details(meta.get("cached_tokens_details") or {})
    return Asked(list(answer["output_ids"]), meta["cached_tokens"], first, whole, best, stages)
