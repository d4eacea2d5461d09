"""The time of a router's decision: rows for `benchmarks.router.state`, by policy and number of holders.

Every decision is timed alone, in CPU time of its thread, and has a prompt of its own length and content
behind the part that is held. Before each, an instance reports new blocks, three report their load, and in a
busy fleet a prompt is sent to one and answered by another, so that no result can be used again.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from benchmarks.lib.common import SEED, percentile
from sglang_ext.cost_model import CostModel
from sglang_ext.cost_model.levels import ArchLevel, OperatorLevel
from sglang_ext.cost_model.operators import Attention, Linear, Link, Outside, Rest, Waves
from sglang_ext.cost_model.profile import SCHEMA, Decode, Identity, Profile, Quality
from sglang_ext.protocol.agent import Load, PlacementEvent, Stored
from sglang_ext.radix_global.sync.stream import EventStream
from sglang_ext.router.dispatch.explain import Choice
from sglang_ext.router.dispatch.flight import Flight
from sglang_ext.router.placing.costs import RouterCosts
from sglang_ext.tiers import Tier

POLICIES = ("prompt-tree", "cost")
NEW_BLOCKS = (1, 64)
"""Of a prompt, behind the beginning that instances hold."""
REPORTS = 3
"""Load reports between two decisions."""
SHARE_BUSY, SHARE_WAITING = 0.4, 0.1
"""Instances of a busy fleet that compute a prompt, and at which prompts wait besides."""

PROFILE = Profile(
    schema=SCHEMA,
    identity=Identity("llama-3.1-8b", "made-up", "bfloat16"),
    arch=ArchLevel((0.004, 0.0, 6e-5, 2e-9, 0.0, 0.0)),
    quality=Quality(0, 0.0),
    longest_prompt=8192,
    kv_bytes_per_token=1 << 17,
    operators=OperatorLevel(
        32,
        4096,
        2,
        (
            Linear(4096, 6144, 32),
            Linear(4096, 4096, 32, split="inner"),
            Linear(4096, 28672, 32),
            Linear(14336, 4096, 32, split="inner"),
            Linear(4096, 128256, 1, rows="one"),
        ),
        Waves(132, 128, 128, 5e14, 4e-6),
        Attention(0.0, 2e-10, 1e-7, 1e-3, -2e-10),
        Rest(1e-3, 1e-6),
        Outside(4e-3, 1e-7),
    ),
    decode=Decode.linear(0.01, 2e-4),
    tiers={"dram": Link(1e-4, 1e-10), "disk": Link(1e-3, 5e-10)},
    transfer=Link(2e-3, 2e-10),
)
"""At the operator level, which takes longest to ask. Its constants are of a fast device's order."""


def model() -> CostModel:
    """The costs of a router with a profile."""
    return CostModel(PROFILE)


class Router(Protocol):
    """The parts of a router that decide: `benchmarks.router.state.Router`."""

    costs: RouterCosts
    streams: dict[str, EventStream]

    def take(self, name: str, data: bytes) -> None:
        """A message of an instance's agent."""

    def request(self, key: bytes) -> Flight:
        """A request with this prompt."""

    def decide(self, request: Flight) -> Choice:
        """Decide on a request."""

    def end(self, name: str) -> None:
        """A request was sent to an instance and answered."""


class _Traffic:
    """Events, load reports and prompts between two decisions."""

    def __init__(self, router: Router, tokens: Callable[[int], bytes]) -> None:
        self._router = router
        self._tokens = tokens
        self._draw = random.Random(SEED)
        self._names = list(router.streams)
        self._sent: list[Any] = []
        self._runs = 1 << 40

    def load(self, *, busy: bool) -> None:
        """Load the fleet, or leave it idle. Every instance reports its load."""
        for number, name in enumerate(self._names):
            share = number % 100 / 100 if busy else 1.0
            for _ in range((share < SHARE_BUSY) + (share < SHARE_WAITING)):
                self._send(name)
            self._router.costs.on_load(name, Load(int(busy), 0, 0), 0)

    def _send(self, name: str) -> None:
        sending = self._router.costs.sending(name, self._draw.randrange(100, 4000), 0, streams=True)
        sending.__enter__()
        self._sent.append(sending)

    def go_on(self) -> None:
        draw, router = self._draw, self._router
        name = draw.choice(self._names)
        self._runs += 1
        event: PlacementEvent = Stored(self._runs, 0, self._tokens(1), Tier.HBM.bit)
        for _, data in router.streams[name].publish([event]):
            router.take(name, data)
        for name in draw.sample(self._names, min(REPORTS, len(self._names))):
            router.costs.on_load(name, Load(draw.randrange(3), 0, 0), 0)
        if self._sent:
            self._send(draw.choice(self._names))
            self._sent.pop(draw.randrange(len(self._sent))).first_byte()


def decision_rows(
    router: Router, tokens: Callable[[int], bytes], common: Mapping[int, bytes], decisions: int, policy: str
) -> Iterator[dict[str, Any]]:
    """Rows of CPU time of decisions, in an idle fleet and in a busy one.

    Args:
        tokens: new ones, of so many blocks.
        common: a prompt for each number of instances that hold it.
    """
    draw, traffic = random.Random(SEED), _Traffic(router, tokens)
    for fleet in ("idle", "busy"):
        traffic.load(busy=fleet == "busy")
        for holders, key in common.items():
            found, reported = [], 0
            gc.collect()
            gc.freeze()
            for _ in range(decisions):
                # The index guesses that prompts decided before are held: one without holders begins anew.
                request = router.request((key if holders else b"") + tokens(draw.randint(*NEW_BLOCKS)))
                traffic.go_on()
                began = time.thread_time_ns()
                placed = router.decide(request)
                found.append((time.thread_time_ns() - began) / 1e3)
                reported = len(placed.holders)
                router.end(placed.instance)
            yield {
                "case": "decision", "policy": policy, "instances": len(router.streams), "holders": holders,
                "reported": reported, "fleet": fleet,
                "p50_us": percentile(found, 50), "p99_us": percentile(found, 99),
            }  # fmt: skip
