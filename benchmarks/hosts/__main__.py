"""The cost of latency and loss between hosts: hand-overs, the router, the index.

Three hosts made of this machine's namespaces (`tests.support.lab`): a router with its clients, and two
servers with a tiny model, KV over tcp. Each packet is delayed by so much in either direction, so a round trip
takes twice that, and 1 % of the packets get lost. Every figure stands beside the same without either.

Servers are two colocated ones, for the router, the index and fetching, and then a prefill and a decode
server, which reads KV (pull), or into which it is written (push). A hand-over takes round trips in any case;
requests in flight should share them. Answers are compared with those of the same prompt without latency.

The tiny model computes sooner than anything is fetched over 10 ms, and the router, which observes the times
of fetches, would soon order none. So a policy of this benchmark's own orders each, and requests wait for it.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.lib.common import SEED, Options, Report, at_least, at_most, percentile
from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import (
    Costs,
    Decision,
    Fetch,
    Fleet,
    Match,
    Matches,
    PolicyOptions,
    Prompt,
    Reason,
)
from sglang_ext.testing.waiting import until
from tests.support.lab.hosts import Lab, why_not
from tests.support.servers.host_server import HostServer
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.server import ServerProcess, ServerSpec

NAME = "hosts"
ROUTER, SERVERS = "router", ("a", "b")
PORT = 30_000
DELAYS_MS = (0, 1, 10, 50)
LOSS = 0.01
IN_FLIGHT = (1, 4, 16)
MODES = ("pull", "push")
BLOCK = 16
HANDED_OVER_TOKENS = 8 * BLOCK
FETCHED_TOKENS = 40 * BLOCK
ANSWER_TOKENS = 4
FETCH_WAIT_S = 8.0
"""That a request may wait for its fetch."""
NAMESPACE = ("tokens", None, None, None)
KEY, API_KEY = "the-key-of-a-benchmark-0123456789-abcdefghijk", "the-key-of-clients"
AIMS = {
    "wrong_answers": at_most(0),
    "pull_10ms_16_in_flight_vs_none": at_least(0.8),
    "pull_50ms_16_in_flight_vs_none": at_least(0.5),
    "router_added_ms_by_50ms": at_most(2.0),
    "index_lag_ms_by_50ms": at_most(100.0),
}
"""Throughput with latency over that without; milliseconds that come on top of those without latency."""


@dataclass(frozen=True, kw_only=True)
class HostsOptions(Options):
    """The flags of this benchmark."""


@dataclass
class Answers:
    """The first answer to each prompt, without latency, with which later ones are compared."""

    first: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    wrong: int = 0

    def take(self, prompt: Sequence[int], tokens: list[int]) -> None:
        self.wrong += self.first.setdefault(tuple(prompt), tokens) != tokens


class Prompts:
    """Prompts of random tokens, none of which begins as another does."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)

    def next(self, tokens: int) -> list[int]:
        return [self._random.randrange(100, 30_000) for _ in range(tokens)]


@dataclass
class Bench:
    """The lab, with this thread on its router's host, and the servers' arguments."""

    lab: Lab
    folder: Path

    @property
    def key_file(self) -> str:
        return str(self.folder / "cluster.key")

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--max-total-tokens", "16000", "--chunked-prefill-size", "2048", "--disable-cuda-graph"),
            *("--kv-cluster-key-file", self.key_file, "--kv-ports", "31000-31009", "--kv-dram-size", "64MB"),
            *("--kv-router", f"http://{self.lab[ROUTER].address()}:{PORT}", "--kv-load-policy", "always"),
        )

    def delay(self, milliseconds: int) -> None:
        """From now on, between all hosts."""
        hosts = (ROUTER, *SERVERS)
        for number, one in enumerate(hosts):
            for other in hosts[number + 1 :]:
                self.lab.wire(one, other, delay_s=milliseconds / 1000, loss=LOSS if milliseconds else 0.0)


@contextmanager
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="hosts-") as name:
        folder = Path(name)
        key = folder / "cluster.key"
        key.touch(mode=0o600)
        key.write_text(KEY, encoding="utf-8")
        with Lab(ROUTER, *SERVERS, shared=[folder], families=(4,)) as lab, lab[ROUTER].network():
            yield Bench(lab, folder)


# -- colocated servers behind a router --------------------------------------------------------------


def fetching(
    prompt: Prompt, fleet: Fleet, matches: Matches, costs: Costs, options: PolicyOptions
) -> Decision:
    """Round robin; an instance fetches a longer prefix from another one, whatever computing it would cost."""
    chosen = min(fleet, key=lambda each: (each.last_picked, each.name))
    held = {each.name: matches.get(each.name, Match(0)).tokens for each in fleet}
    source = max(held, key=lambda name: held[name])
    more = held[source] > held[chosen.name] + 2 * BLOCK  # all prompts of a measurement differ
    return Decision(
        chosen.name,
        Reason.FETCH if more else Reason.ROUND_ROBIN,
        held[chosen.name],
        fetch=(Fetch(source, held[source]),) if more else (),
    )


@dataclass
class Colocated:
    """Two servers, a router that sends prompts to them in turn, and a client."""

    router: Router
    client: aiohttp.ClientSession
    servers: list[ServerProcess]
    prompts: Prompts
    answers: Answers

    async def ask(self, url: str, prompt: list[int], tokens: int = ANSWER_TOKENS) -> tuple[float, Any]:
        """Seconds until the answer, and its headers."""
        body = {
            "input_ids": prompt,
            "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        }
        began = time.perf_counter()
        async with self.client.post(f"{url}/generate", json=body) as response:
            said = await response.json()
            took = time.perf_counter() - began
            if response.status != 200:
                raise RuntimeError(f"{url} answers {response.status}: {said}")
            self.answers.take(prompt, said["output_ids"])
            return took, response.headers

    def holds(self, server: str, prompt: list[int]) -> int:
        return self.router.trees.match(NAMESPACE, encode_tokens(prompt)).get(server, Match(0)).tokens

    async def known(self, server: str, prompt: list[int], tokens: int) -> float:
        """Wait until the router knows that a server holds so much; how long that took."""
        return await until(lambda: self.holds(server, prompt) >= tokens, 30, "the index")

    async def added(self, rounds: int) -> list[float]:
        """Seconds that the router adds to a short request whose prompt is cached: with it, less without."""
        prompt, found = self.prompts.next(BLOCK + 3), []
        for server in self.servers:
            await self.ask(server.url, prompt, 1)
        for number in range(rounds):
            direct, _ = await self.ask(self.servers[number % 2].url, prompt, 1)
            routed, _ = await self.ask(self.router.url, prompt, 1)
            found.append(routed - direct)
        return found

    async def lag(self, rounds: int) -> list[float]:
        """Seconds from a server's answer until the router's index contains the computed blocks."""
        found = []
        for number in range(rounds):
            prompt, server = self.prompts.next(4 * BLOCK + 3), self.servers[number % 2]
            await self.ask(server.url, prompt, 1)
            found.append(await self.known(server.url, prompt, 4 * BLOCK))
        return found

    async def fetched(self, rounds: int) -> tuple[list[float], list[float], int]:
        """Seconds until an answer whose prompt the other server has cached, and until an answer to an
        uncached prompt; and for how many of the former the KV was fetched."""
        fetched: list[float] = []
        computed: list[float] = []
        whole = 0
        while len(fetched) < rounds:
            prompt = self.prompts.next(FETCHED_TOKENS + 3)
            owner = self.servers[len(fetched) % 2].url
            took, _ = await self.ask(owner, prompt, 1)
            computed.append(took)
            await self.known(owner, prompt, FETCHED_TOKENS)
            took, headers = await self.ask(self.router.url, prompt, 1)
            if headers["x-kv-instance"] != owner:
                fetched.append(took)
                whole += headers["x-kv-cached-tokens"] == str(FETCHED_TOKENS)
        return fetched, computed, whole


async def measure_colocated(
    place: Bench, servers: list[ServerProcess], delays: Sequence[int], rounds: int, report: Report
) -> int:
    """Rows of the router and the index; returns how many answers were wrong."""
    config = RouterConfig(
        host=place.lab[ROUTER].address(),
        port=PORT,
        api_key=API_KEY,
        cluster_key_file=place.key_file,
        policy="benchmarks.hosts.__main__:fetching",
    )
    answers = Answers()
    headers = {"authorization": f"Bearer {API_KEY}"}
    async with Router(config) as router, aiohttp.ClientSession(headers=headers) as client:
        await until(lambda: len(router.fleet.usable()) == len(servers), 120, "both servers")
        await until(lambda: all(router.trees.trusted(each.url) for each in servers), 60, "what they hold")
        measured = Colocated(router, client, servers, Prompts(), answers)
        router.fetching.least_wait_s = FETCH_WAIT_S
        await measured.lag(2)  # compiles
        await measured.fetched(2)  # connects
        added_ms, lag_ms = {}, {}
        for delay in delays:
            place.delay(delay)
            added, lag = await measured.added(4 * rounds), await measured.lag(2 * rounds)
            fetched, computed, whole = await measured.fetched(rounds)
            added_ms[delay] = statistics.median(added) * 1000
            lag_ms[delay] = statistics.median(lag) * 1000
            report.add(
                f"router and index, {delay} ms",
                **{"router adds p50 ms": added_ms[delay]},
                **{"index lag p50 ms": lag_ms[delay], "index lag p99 ms": percentile(lag, 99) * 1000},
            )
            report.add(
                f"fetch, {delay} ms",
                **{"answer p50 ms": statistics.median(fetched) * 1000},
                **{"answer p99 ms": percentile(fetched, 99) * 1000},
                **{"computed p50 ms": statistics.median(computed) * 1000},
                fetched=f"{whole} of {rounds}",
            )
        place.delay(0)
    last = delays[-1]
    report.summary[f"router_added_ms_by_{last}ms"] = added_ms[last] - added_ms[0]
    report.summary[f"index_lag_ms_by_{last}ms"] = lag_ms[last] - lag_ms[0]
    return answers.wrong


# -- prefill and decode -----------------------------------------------------------------------------


def throughput(
    servers: PdServers, prompts: Sequence[list[int]], in_flight: int, answers: Answers
) -> tuple[float, list[float]]:
    """Requests per second with so many in flight, and seconds that each took."""

    def one(prompt: list[int]) -> float:
        began = time.perf_counter()
        answers.take(prompt, servers.generate(prompt, max_new_tokens=ANSWER_TOKENS).tokens)
        return time.perf_counter() - began

    with ThreadPoolExecutor(in_flight) as pool:
        list(pool.map(one, prompts[:in_flight]))  # opens connections, which a router has
        began = time.perf_counter()
        took = list(pool.map(one, prompts))
        return len(prompts) / (time.perf_counter() - began), took


def measure_apart(
    mode: str, place: Bench, servers: PdServers, delays: Sequence[int], requests: int, report: Report
) -> int:
    """Rows of hand-overs; returns how many answers were wrong."""
    prompts, answers = Prompts(), Answers()
    asked = [prompts.next(HANDED_OVER_TOKENS) for _ in range(requests)]
    throughput(servers, asked, IN_FLIGHT[-1], answers)  # connects, and knows the answers
    plain: dict[int, float] = {}
    for delay in delays:
        place.delay(delay)
        for in_flight in IN_FLIGHT:
            # Few at a time take long: a quarter of them says as much.
            some = asked if in_flight == IN_FLIGHT[-1] else asked[: max(1, requests // 4)]
            rate, took = throughput(servers, some, in_flight, answers)
            plain.setdefault(in_flight, rate)
            report.add(
                f"{mode}, {delay} ms, {in_flight} in flight",
                **{"requests/s": rate, "of that without latency": rate / plain[in_flight]},
                **{"JCT p50 ms": statistics.median(took) * 1000, "JCT p99 ms": percentile(took, 99) * 1000},
            )
            if delay:
                report.summary[f"{mode}_{delay}ms_{in_flight}_in_flight_vs_none"] = rate / plain[in_flight]
    place.delay(0)
    return answers.wrong


def on_host(lab: Lab, hosts: Iterator[str], spec: ServerSpec) -> ServerProcess:
    """A server on the next of these hosts; connections to it stay open, as a router's do."""
    return HostServer(spec, lab[next(hosts)], keep_open=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = HostsOptions.of(argv, NAME, __doc__)
    report = Report(NAME, AIMS)
    if reason := why_not():
        sys.stderr.write(f"{reason}\n")
        return 1
    delays = options.pick(DELAYS_MS, quick=DELAYS_MS, tiny=(0, 50))
    rounds = options.pick(30, quick=10, tiny=2)
    requests = options.pick(128, quick=64, tiny=4)
    wrong = 0
    with bench() as place:
        cache = ServerSpec(flags=("--radix-cache-backend", "global", *place.flags))
        with ExitStack() as stack:
            servers: list[ServerProcess] = [HostServer(cache, place.lab[name]) for name in SERVERS]
            for server in servers:
                stack.callback(server.stop)
            with ThreadPoolExecutor() as pool:
                list(pool.map(ServerProcess.start, servers))
            wrong += asyncio.run(measure_colocated(place, servers, delays, rounds, report))
        for mode in MODES:
            spec = ServerSpec(flags=(*place.flags, "--kv-pd-caching", "basic", "--kv-transfer-mode", mode))
            with pd_servers([spec], [spec], place=partial(on_host, place.lab, iter(SERVERS))) as (apart, _):
                wrong += measure_apart(mode, place, apart, delays, requests, report)
    report.summary["wrong_answers"] = wrong
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
