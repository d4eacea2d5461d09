"""The cost of a router's state, in one process: `python -m benchmarks.router.state JSON` prints rows as JSON.

The index receives the instances' blocks in the messages that their agents send; then instances are chosen for
prompts, with nothing else to do and while another snapshot comes in, a message per turn of the event loop, as
from an agent's socket. Nothing is sent anywhere, so the measurements show the router's own time.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import uvloop

from benchmarks.lib.common import SEED, percentile
from benchmarks.router.decisions import decision_rows, model
from sglang_ext.clock import SystemClock
from sglang_ext.cost_model import CostModel
from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.agent import (
    FROM_AGENT,
    FromAgent,
    Hello,
    NamesStored,
    PlacementEvent,
    Stored,
    ToAgent,
)
from sglang_ext.radix_global.sync.runs import NAMES_PER_EVENT
from sglang_ext.radix_global.sync.stream import EventStream
from sglang_ext.router.api.generate import GENERATE
from sglang_ext.router.api.job import Job
from sglang_ext.router.dispatch.choosing import Chooser, Routing
from sglang_ext.router.dispatch.explain import Choice
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.fleet.channels import AgentChannels
from sglang_ext.router.fleet.facts import InstanceFacts, ModelFacts
from sglang_ext.router.fleet.fleet import Fleet
from sglang_ext.router.http.types import Request, Responder
from sglang_ext.router.index.index import Index
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.router.placing.fetching import Fetching
from sglang_ext.router.placing.placing import PlacingOptions
from sglang_ext.router.policies import Instance, PolicyOptions, policy_named
from sglang_ext.router.policies.base import Role
from sglang_ext.router.telemetry.observability import RouterMetrics
from sglang_ext.router.telemetry.record import Record
from sglang_ext.router.tenancy.admitted import Admitted, Sent
from sglang_ext.router.tokens.encoded import Encoded
from sglang_ext.signals import Signal
from sglang_ext.tiers import Tier

BLOCK = 16
RUN = 16
"""Blocks of a run: a turn of a conversation."""
TURNS = 8
"""Runs one behind the other; then a new conversation begins."""
NAMESPACE = ("tokens", None, None, None)
NAME_BYTES = 16
ASK_S = 0.002
"""Between two decisions while a snapshot comes in."""


def url(number: int) -> str:
    return f"http://10.{number >> 8}.{number & 255}.1:30000"


class NoAgents(AgentChannels):
    """No instance has an agent."""

    def __init__(self) -> None:
        self.messages: Signal[[str, FromAgent]] = Signal()

    def registration(self, name: str) -> None:
        return None

    def send(self, name: str, message: ToAgent) -> bool:
        return False


class NoHints:
    """No request was announced."""

    def expected_at(
        self, scope: str, session: str | None, prompts: Sequence[Encoded], fleet: tuple[Instance, ...]
    ) -> None:
        return None


class Router:
    """The parts of a router that decide, and instances that have reported their blocks to it.

    Args:
        instances: how many.
        policy: by its name.
        model: of the costs.
    """

    def __init__(self, instances: int, policy: str = "prompt-tree", model: CostModel | None = None) -> None:
        clock = SystemClock()
        self.index = Index(clock, block_size=BLOCK, max_bytes=1 << 50)
        self.fleet = Fleet(
            view=self.index.holdings_of, changed=self.index.take_changed, pairs=True, now=clock.monotonic
        )
        self.streams: dict[str, EventStream] = {}
        facts = InstanceFacts(ModelFacts("m", "a", 32_000, 1 << 20), "1", "x", "colocated", "")
        for number in range(instances):
            name = url(number)
            self.fleet.join(name)
            self.fleet.learnt(name, facts)
            self.index.attach(name, Role.COLOCATED)
            self.index.on_heartbeat(name, alive=True)
            self.streams[name] = EventStream(name, number.to_bytes(16, "big"), BLOCK)
        placing = PlacingOptions(policy=policy_named(policy), thresholds=PolicyOptions())
        routing = Routing(name=policy, placing=placing)
        self.costs = costs = RouterCosts(
            model or CostModel(),
            clock.monotonic,
            can_fetch=lambda source, target: source != target,
            shares_kv=lambda name: "one kind",
            can_split=lambda source, target: False,
            batching=self.fleet.batching,
        )
        metrics = RouterMetrics()
        fetching = Fetching(NoAgents(), costs, metrics)
        self._chooser = Chooser(routing, self.fleet, self.index, costs, metrics, fetching, NoHints())

    def snapshot(self, name: str, events: Iterator[Sequence[PlacementEvent]]) -> list[bytes]:
        """The messages with which an instance's agent reports all its blocks."""
        stream = self.streams[name]
        _, number = stream.hello(b"r", Hello("r"))
        assert number is not None
        sends = [*stream.begin(number)]
        for piece in events:
            sends += stream.part(number, piece)
        return [data for _, data in (*sends, *stream.end(number))]

    def take(self, name: str, data: bytes) -> None:
        """A message of an instance's agent."""
        self.index.apply(name, cast(Any, FROM_AGENT.decode(data)))

    def request(self, key: bytes) -> Flight:
        """A request with this prompt."""
        sent = Sent(b"{}", "/generate", GENERATE)
        prompt = Encoded(NAMESPACE, key, len(key) // 4)
        return Flight(
            Admitted(GENERATE, Job(False, (), 1), sent), [prompt], Request("POST", "/generate", "/generate"),
            cast(Responder, None), Record("id", "POST", "/generate", 0.0), sent, prompt.units,
        )  # fmt: skip

    def decide(self, request: Flight) -> Choice:
        """Decide on a request."""
        found = self._chooser.choose(request, frozenset())
        assert found is not None
        return found[1]

    def end(self, name: str) -> None:
        """A request was sent to an instance and answered."""
        self.fleet.end(self.fleet.begin(name, 1))

    def choose(self, key: bytes) -> None:
        """Decide on a request, which is then on its way and answered."""
        self.end(self.decide(self.request(key)).instance)


class Prompts:
    """Conversations of random tokens. Prefixes that several instances hold begin alike everywhere."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def tokens(self, blocks: int) -> bytes:
        return encode_tokens(self._random.integers(0, 32_000, blocks * BLOCK))

    def held(self, blocks: int, common: Sequence[bytes]) -> Iterator[list[PlacementEvent]]:
        """All blocks of an instance, run by run: the common prompts, then conversations of its own."""
        run = 0
        found: list[PlacementEvent] = []
        for key in common:
            run += 1
            found.append(Stored(run, 0, key, Tier.HBM.bit))
        for number in range(blocks // RUN):
            run += 1
            found.append(Stored(run, run - 1 if number % TURNS else 0, self.tokens(RUN), Tier.HBM.bit))
        for start in range(0, len(found), 500):
            yield found[start : start + 500]


def names(count: int, seed: int) -> Iterator[list[PlacementEvent]]:
    """Names of so many blocks on an instance's disk, as they come in messages."""
    data = np.random.default_rng(seed).bytes(count * NAME_BYTES)
    for start in range(0, len(data), NAMES_PER_EVENT * NAME_BYTES):
        yield [NamesStored(Tier.DISK.level, data[start : start + NAMES_PER_EVENT * NAME_BYTES])]


def resident_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def state_rows(
    instances: int, blocks: int, name_count: int, decisions: int, policy: str
) -> Iterator[dict[str, Any]]:
    """Rows of one fleet's memory, of taking it in, and of decisions by how many hold the prompt.

    policy: of the decisions; the router has a profile.
    """
    router = Router(instances, policy, model())
    source = Prompts(SEED)
    holders = sorted({0, 1, min(100, instances), instances})
    common = {count: source.tokens(RUN) for count in holders}
    gc.collect()
    before, estimated = resident_bytes(), router.index.size_bytes
    took = events = 0.0
    for number, name in enumerate(router.streams):
        prompts = [key for count, key in common.items() if number < count]
        messages = router.snapshot(name, Prompts(number).held(blocks, prompts))
        began = time.thread_time()  # CPU time only: it waits for nothing
        for data in messages:
            router.take(name, data)
        took += time.thread_time() - began
        events += blocks // RUN + len(prompts)
    del messages
    gc.collect()
    gc.freeze()
    yield {
        "case": "blocks in memory", "instances": instances, "blocks": blocks * instances,
        "bytes_each": (resident_bytes() - before) / (blocks * instances),
        "estimated_bytes_each": (router.index.size_bytes - estimated) / (blocks * instances),
        "events_per_s": events / took, "blocks_per_s": blocks * instances / took,
    }  # fmt: skip
    before, estimated = resident_bytes(), router.index.size_bytes
    named = min(instances, 4)
    for number in range(named):
        # A second snapshot takes the place of the first: only names, so that the memory is theirs.
        name = url(number)
        stream = router.streams[name]
        for piece in names(name_count, number):
            for _, data in stream.publish(piece):
                router.take(name, data)
    gc.collect()
    yield {
        "case": "names on disks", "instances": instances, "names": name_count * named,
        "bytes_each": (resident_bytes() - before) / (name_count * named),
        "estimated_bytes_each": (router.index.size_bytes - estimated) / (name_count * named),
    }  # fmt: skip
    yield from decision_rows(router, source.tokens, common, decisions, policy)


async def storm_rows(instances: int, name_count: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of how late a decision is, in quiet and while an instance's snapshot of so many names comes in
    again and again."""
    router = Router(instances)
    source = Prompts(SEED)
    common = source.tokens(RUN)
    for number, name in enumerate(router.streams):
        for data in router.snapshot(name, Prompts(number).held(64 * RUN, [common])):
            router.take(name, data)
    prompt = common + source.tokens(RUN)
    gc.collect()
    gc.freeze()

    async def ask(over: asyncio.Event) -> list[float]:
        late: list[float] = []
        while not over.is_set():
            due = time.perf_counter() + ASK_S
            await asyncio.sleep(ASK_S)
            router.choose(prompt)
            late.append((time.perf_counter() - due) * 1e3)
        return late

    found: dict[str, list[float]] = {"quiet": [], "storm": []}
    held: list[float] = []
    """Milliseconds of CPU that a message takes: so long no request goes on, on a core of the router's own."""
    for number in range(rounds):
        again = router.snapshot(url(0), names(name_count, number))
        over = asyncio.Event()
        asking = asyncio.create_task(ask(over))
        began = time.perf_counter()
        for data in again:
            before = time.thread_time()
            router.take(url(0), data)
            held.append((time.thread_time() - before) * 1e3)
            await asyncio.sleep(0)
        took = time.perf_counter() - began
        over.set()
        found["storm"] += await asking
        over = asyncio.Event()
        asking = asyncio.create_task(ask(over))
        await asyncio.sleep(took)
        over.set()
        found["quiet"] += await asking
    return iter([
        {
            "case": f"late, {name}", "instances": instances, "names": name_count,
            "messages": len(held) // rounds, "decisions": len(late),
            "p50_ms": percentile(late, 50), "p99_ms": percentile(late, 99), "max_ms": max(late),
            "held_p99_ms": percentile(held, 99), "held_max_ms": max(held),
        }
        for name, late in found.items()
    ])  # fmt: skip


def main(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of one measurement."""
    what = arguments.pop("what")
    if what == "state":
        return list(state_rows(**arguments))
    return list(uvloop.run(storm_rows(**arguments)))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))))
