"""``python -m examples.demo``: run the demo; exit status 0 when all it is to show was there, else 1."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from rich.console import Console

from examples.demo import apart, report
from examples.demo.client import Message, say
from examples.demo.script import SYSTEM, conversations
from sglang_ext.addresses import Ports
from sglang_ext.cluster.command import LogFolder, made_keys, running_cluster
from sglang_ext.cluster.config import ClusterConfig
from sglang_ext.cluster.host import host_facts
from sglang_ext.cluster.plan import HostFacts, Keys, Part, make_plan
from sglang_ext.cluster.supervisor import Cluster
from sglang_ext.cluster.terminal import Display
from sglang_ext.errors import PeerError, SglangExtError
from sglang_ext.flags import COUNT, Flagged, flag, one_of
from sglang_ext.patches import environment
from sglang_ext.testing.models import model_path

HBM_TOKENS = (16_384, 2_560)
"""KV slots of the two servers: one holds all of its conversations, the other hardly more than one."""
ENGINE = ("--device", "cpu", "--dtype", "float32")
"""Float32 because SGLang would make float16 of it, which is slower on a CPU, and in which the order of sums
can decide between two tokens that are almost equally likely."""
DRAM_SIZE = "256MB"
ANSWER_TOKENS = 24
CACHE_THRESHOLD = 0.7
"""Share of a prompt that must be cached for the cache to decide the routing: more than the system prompt,
which all conversations share and which would keep all of them on one server; less than the share that a
second turn has in common with the first."""
FIRST_ANSWER_S = 60.0
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class Arguments(Flagged):
    """Flags of the demo."""

    prog = "python -m examples.demo"
    description = (
        "Hold conversations with a cluster of two servers, and show the source of reused tokens; then with "
        "prefill and decode apart, and show what each side still has."
    )

    conversations: int = flag(6, "How many there are.", COUNT.positive())
    turns: int = flag(4, "Turns of each.", COUNT.positive())
    log_dir: Path | None = flag(None, "Keep the logs here; by default they are kept only after a failure.")
    part: str = flag(
        "all",
        "together (two servers and their tiers), apart (prefill and decode), or all.",
        one_of("all", "together", "apart"),
    )


def plans(config: ClusterConfig, host: HostFacts, ports: Ports, keys: Keys) -> tuple[Part, ...]:
    """Two servers with the shared cache and their router; one server without a cache, with its own.

    All servers get the same number of cores, so that they compute equally fast.
    """
    share = HostFacts(cores=max(1, host.cores // config.colocated), accelerators=0)
    alone = dataclasses.replace(
        config,
        colocated=1,
        instance_args={},
        # Without a limit its pool would take most of the memory of this machine.
        server_args=(*ENGINE, "--disable-radix-cache", "--max-total-tokens", str(HBM_TOKENS[0])),
    )

    def planned(config: ClusterConfig, host: HostFacts) -> tuple[Part, ...]:
        router = ports.take(config.host, 0, "--port")
        return make_plan(config, host, router, ports.free_after(20_000, config.ports), keys)

    shared, plain = planned(config, host), planned(alone, share)
    return (
        *shared,
        *(
            dataclasses.replace(
                part,
                name=f"{PLAIN}-{part.name}",
                needs=tuple(f"{PLAIN}-{name}" for name in part.needs),
            )
            for part in plain
        ),
    )


async def converse(cluster: Cluster, count: int, turns: int, console: Console) -> list[report.Turn]:
    """Hold the conversations, all of them a turn at a time, so that each is forgotten by the time it goes on.

    Both clusters are sent the same words: the history holds the answers of the cached cluster.
    """
    urls = {name: status.part.url for name, status in cluster.parts.items()}
    servers: Mapping[str, str] = {url: name for name, url in urls.items()}
    scripts = conversations(count, turns)
    history: dict[str, list[Message]] = {
        script.name: [{"role": "system", "content": SYSTEM}] for script in scripts
    }
    held: list[report.Turn] = []
    async with aiohttp.ClientSession() as session:
        for url in (urls["router"], urls[f"{PLAIN}-router"]):
            # The first request of a server pays for its set-up.
            await first_answer(session, url)
        console.print(report.header(), soft_wrap=True, highlight=False)
        for number in range(turns):
            for script in scripts:
                messages = history[script.name]
                messages.append({"role": "user", "content": script.turns[number]})
                cached = await say(session, urls["router"], messages, ANSWER_TOKENS)
                plain = await say(session, urls[f"{PLAIN}-router"], messages, ANSWER_TOKENS)
                messages.append({"role": "assistant", "content": cached.text})
                instance = servers.get(cached.instance, cached.instance)
                held.append(report.Turn(script.name, number + 1, instance, cached, plain))
                console.print(report.line(held[-1]), soft_wrap=True, highlight=False)
    return held


async def first_answer(session: aiohttp.ClientSession, url: str) -> None:
    """Send requests until there is an answer: on a busy machine the router may just have missed some probes.

    Raises:
        PeerError: there was none in time; carries the last error.
    """
    deadline = time.monotonic() + FIRST_ANSWER_S
    while True:
        try:
            await say(session, url, [{"role": "user", "content": "Are you there?"}], ANSWER_TOKENS)
            return
        except PeerError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


async def run(count: int, turns: int, log_dir: Path | None, console: Console) -> int:
    """The whole demo; returns the exit status."""
    console.print("Building the tiny model ...", highlight=False)
    model = await asyncio.to_thread(model_path, "tiny")
    config = ClusterConfig(
        model_path=str(model),
        colocated=len(HBM_TOKENS),
        server_args=(*ENGINE, "--kv-dram-size", DRAM_SIZE),
        instance_args={i: ("--max-total-tokens", str(n)) for i, n in enumerate(HBM_TOKENS)},
        router_args=(
            *("--cache-threshold", str(CACHE_THRESHOLD)),
            # Whether a server lives is watched by the cluster already; here a slow one is only slow.
            *("--health-failure-threshold", "10"),
        ),
    )
    with (
        LogFolder(log_dir) as logs,
        Ports() as ports,
        made_keys() as keys,
        Display(console, logs.path, announce=False) as display,
    ):
        parts = plans(config, dataclasses.replace(host_facts(), accelerators=0), ports, keys)
        async with Cluster(parts, logs.path, observer=display) as cluster:
            await cluster.ready()
            console.print(
                f"\n{count} conversations of {turns} turns with one system prompt. server-0 has room for "
                f"{HBM_TOKENS[0]:,} tokens in HBM, server-1 for {HBM_TOKENS[1]:,}.\n",
                highlight=False,
            )
            held = await cluster.doing(converse(cluster, count, turns, console))
        summary = report.summarize(held)
        console.print()
        for text in report.summary_lines(summary):
            console.print(text, soft_wrap=True, highlight=False)
        if not (summary.hbm_tokens and summary.dram_tokens):
            logs.keep = True
            sys.stderr.write(f"demo: a tier was never reused. The logs are in {logs.path}\n")
            return 1
    return 0


async def run_apart(log_dir: Path | None, console: Console) -> int:
    """The part with prefill and decode apart; returns the exit status."""
    console.print("Prefill and decode apart: one prefill server, two decode servers ...", highlight=False)
    model = await asyncio.to_thread(model_path, "tiny")
    config = ClusterConfig(
        model_path=str(model),
        colocated=0,
        prefill=1,
        decode=len(apart.DESIGNS),
        port=0,
        server_args=(*ENGINE, "--max-total-tokens", "8192", "--enable-metrics"),
        instance_args=apart.instance_args(),
        router_args=("--health-failure-threshold", "10"),
    )
    host = dataclasses.replace(host_facts(), accelerators=0)
    folder = None if log_dir is None else log_dir / "apart"
    with LogFolder(folder) as logs, Display(console, logs.path, announce=False) as display:
        async with running_cluster(config, logs.path, display, host) as cluster:
            await cluster.ready()
            turns = await cluster.doing(apart.converse([each.part for each in cluster.parts.values()]))
        console.print()
        for text in apart.lines(turns):
            console.print(text, soft_wrap=True, highlight=False)
        if not apart.grows(turns):
            logs.keep = True
            sys.stderr.write(f"demo: decode's cached tokens did not grow. The logs are in {logs.path}\n")
            return 1
    return 0


async def run_parts(given: Arguments, console: Console) -> int:
    """Run the parts that ``--part`` selects; returns the exit status of the first part that fails."""
    status = 0
    if given.part != "apart":
        status = await run(given.conversations, given.turns, given.log_dir, console)
        console.print()
    if given.part != "together" and not status:
        status = await run_apart(given.log_dir, console)
    return status


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    given = Arguments.parse(arguments)
    environment.printable()
    try:
        environment.prepare(os.environ)
        return asyncio.run(run_parts(given, Console()))
    except KeyboardInterrupt:
        return 130
    except SglangExtError as error:
        sys.stderr.write(f"demo: {error}\n")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
