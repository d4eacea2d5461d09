"""What prefill and decode apart cost and save, by who keeps KV: MemServe's designs beside one server.

All servers run at the same time and take turns: each conversation is played on every design in an order that
changes, so that what disturbs the machine disturbs all of them. A design's prompts are those of the first one
(the answers of a server without a cache are the truth), so that every design computes the same, and every
token is compared. The peer, SGLang's own hand-over with mooncake_tcp, takes part where Mooncake is installed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.common import SEED, Options, Report, parse, percentile
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.testing.compare import Answer, assert_same, random_conversations
from sglang_ext.testing.pd import BACKEND
from sglang_ext.testing.servers import ServerProcess, ServerSpec, free_port, wait_until

NAME = "disagg"
MODEL = "tiny"
POOL_TOKENS = 24_000
READ_BYTES = "sglang_ext_pd_read_bytes"
BUSY = ("sglang_ext_pd_rooms", "sglang_ext_pd_leased_pages")
SHOWN_SECONDS = 0.6
TRUTH = "colocated"
LATE = 3
"""From this turn on a conversation has grown beyond its first prompts (the aims' "third turn and later")."""


@dataclass(frozen=True)
class Design:
    """One way to serve. flags: for both of its servers, or its only one."""

    name: str
    flags: tuple[str, ...]
    apart: bool = True
    ours: bool = True


DESIGNS = (
    Design(TRUTH, ("--disable-radix-cache",), apart=False),
    Design("colocated-caching", ("--radix-cache-backend", "global"), apart=False),
    Design("basic", ("--kv-pd-caching", "basic")),
    Design("1", ("--kv-pd-caching", "1")),
    Design("2", ("--kv-pd-caching", "2")),
    Design("3", ("--kv-pd-caching", "3")),
    Design("3-push", ("--kv-pd-caching", "3", "--kv-transfer-mode", "push")),
    Design(
        "stock-mooncake_tcp",
        ("--disaggregation-transfer-backend", "mooncake_tcp"),
        ours=False,
    ),
)
QUICK = (TRUTH, "basic", "1", "3")


@dataclass
class Turn:
    """What one turn of a conversation took, in seconds and bytes."""

    number: int
    prompt: int
    ttft: float
    jct: float
    tpot: float
    cached: int
    sent: float


@dataclass
class Running:
    """A design's servers."""

    design: Design
    servers: list[ServerProcess]
    bootstrap_port: int = 0
    turns: list[Turn] = field(default_factory=list)
    wrong: int = 0

    @property
    def answering(self) -> ServerProcess:
        return self.servers[-1]

    def read_bytes(self) -> float:
        """Bytes of KV that decode has read from prefill."""
        if not (self.design.apart and self.design.ours):
            return 0.0
        return _sum(self.answering.metrics(), READ_BYTES)

    def settle(self) -> None:
        """Wait until nothing of the last request goes on, returns included."""
        for server in self.servers:
            server.wait_idle()
        if self.design.apart and self.design.ours:
            # What /metrics shows may be from before the request.
            time.sleep(SHOWN_SECONDS)
            wait_until(
                lambda: all(_sum(server.metrics(), *BUSY) == 0 for server in self.servers),
                seconds=15,
                what="the end of returns",
            )


def _sum(samples: Mapping[str, float], *names: str) -> float:
    return sum(value for sample, value in samples.items() if sample.startswith(names))


@contextmanager
def running(designs: Sequence[Design]) -> Iterator[list[Running]]:
    """Start all servers, two at a time, and end them."""
    found: list[Running] = []
    for design in designs:
        port = free_port() if design.apart else 0
        common = ("--max-total-tokens", str(POOL_TOKENS), "--enable-metrics", *design.flags)
        backend = BACKEND if design.ours else ()
        sides: list[tuple[str, ...]] = [()]
        if design.apart:
            sides = [
                ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(port), *backend),
                ("--disaggregation-mode", "decode", *backend),
            ]
        specs = [ServerSpec(MODEL, flags=(*side, *common)) for side in sides]
        found.append(Running(design, [ServerProcess(spec) for spec in specs], port))
    with ExitStack() as stack:
        servers = [server for each in found for server in each.servers]
        for server in servers:
            stack.callback(server.stop)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(ServerProcess.start, servers))
        yield found


async def ask(side: Running, prompt: Sequence[int], tokens: int, room: int) -> tuple[Answer, float, float]:
    """One turn, streamed: the answer, seconds to the first token, and seconds to the last."""
    body: dict[str, Any] = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        "stream": True,
    }
    if side.design.apart:
        body |= {
            "bootstrap_host": LOOPBACK,
            "bootstrap_port": side.bootstrap_port,
            "bootstrap_room": room,
        }
    async with httpx.AsyncClient(timeout=180, trust_env=False) as client:
        began = time.perf_counter()
        beside = None
        if side.design.apart:
            beside = asyncio.create_task(client.post(f"{side.servers[0].url}/generate", json=body))
        first, last = 0.0, ""
        async with client.stream("POST", f"{side.answering.url}/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if data and data != "[DONE]":
                    first = first or time.perf_counter() - began
                    last = data
        whole = time.perf_counter() - began
        if beside is not None:
            (await beside).raise_for_status()
    return Answer.of(json.loads(last)), first, whole


def play(sides: Sequence[Running], conversations: Sequence[Sequence[list[int]]], tokens: int) -> None:
    """Every conversation, turn by turn, on every design; the truth's answers make the histories."""
    rng = random.Random(SEED)
    truth = next(side for side in sides if side.design.name == TRUTH)
    for turns in conversations:
        history: list[int] = []
        for number, added in enumerate(turns, 1):
            history = history + added
            order = [truth, *rng.sample([s for s in sides if s is not truth], len(sides) - 1)]
            expected: Answer | None = None
            for side in order:
                before = side.read_bytes()
                answer, ttft, jct = asyncio.run(ask(side, history, tokens, rng.randrange(1, 1 << 62)))
                side.settle()
                expected = expected or answer
                side.wrong += not _same(expected, answer)
                side.turns.append(
                    Turn(
                        number,
                        len(history),
                        ttft,
                        jct,
                        (jct - ttft) / max(1, tokens - 1),
                        answer.cached_tokens,
                        side.read_bytes() - before,
                    )
                )
            assert expected is not None
            history = history + expected.tokens


def _same(expected: Answer, got: Answer) -> bool:
    try:
        assert_same(expected, got)
    except AssertionError:
        return False
    return True


def report_on(report: Report, sides: Sequence[Running]) -> None:
    """Rows of times by design and of bytes and reuse by turn, and the summary."""
    for side in sides:
        values: dict[str, float] = {}
        for name in ("ttft", "tpot", "jct"):
            seconds = [getattr(turn, name) for turn in side.turns]
            values |= {
                f"{name}_mean_ms": statistics.mean(seconds) * 1e3,
                f"{name}_p50_ms": percentile(seconds, 50) * 1e3,
                f"{name}_p99_ms": percentile(seconds, 99) * 1e3,
            }
        report.add(side.design.name, **values, turns=len(side.turns), wrong_answers=side.wrong)
    for side in sides:
        for number in sorted({turn.number for turn in side.turns}):
            turns = [turn for turn in side.turns if turn.number == number]
            report.add(
                side.design.name,
                turn=number,
                prompt_tokens=statistics.mean(t.prompt for t in turns),
                cached_tokens=statistics.mean(t.cached for t in turns),
                sent_kib=statistics.mean(t.sent for t in turns) / 1024,
                ttft_ms=statistics.mean(t.ttft for t in turns) * 1e3,
            )
    by = {side.design.name: side for side in sides}

    def mean(name: str, what: str, late: bool = False) -> float | None:
        if name not in by:
            return None
        turns = [turn for turn in by[name].turns if not late or turn.number >= LATE]
        return float(statistics.mean(getattr(turn, what) for turn in turns))

    def ratio(what: str, over: str, under: str, late: bool = False) -> float | None:
        a, b = mean(over, what, late), mean(under, what, late)
        return None if a is None or not b else a / b

    def growth(name: str) -> float | None:
        """Bytes sent in the last turn over those in the second, per token of user and answer that is new."""
        if name not in by:
            return None
        numbers = sorted({turn.number for turn in by[name].turns})
        ends = [
            statistics.mean(turn.sent for turn in by[name].turns if turn.number == number)
            for number in (numbers[1], numbers[-1])
        ]
        return ends[1] / ends[0] if ends[0] else None

    stock = "stock-mooncake_tcp"
    report.summary |= {
        "ttft_c3_vs_c1_turn3": ratio("ttft", "3", "1", late=True),
        "jct_c3_vs_c1": ratio("jct", "3", "1"),
        "jct_c3_vs_basic": ratio("jct", "3", "basic"),
        "ttft_c3_vs_stock_mooncake_tcp": ratio("ttft", "3", stock),
        "jct_c3_vs_stock_mooncake_tcp": ratio("jct", "3", stock),
        "bytes_per_turn_growth_c1": growth("1"),
        "bytes_per_turn_growth_c3": growth("3"),
        "pull_vs_push_jct": ratio("jct", "3", "3-push"),
        "wrong_answers": sum(side.wrong for side in sides),
    }


def chosen(options: Options, report: Report) -> list[Design]:
    """The designs to measure."""
    designs = [design for design in DESIGNS if not options.quick or design.name in QUICK]
    if importlib.util.find_spec("mooncake") is None:
        designs = [design for design in designs if design.ours]
        report.note("stock SGLang with mooncake_tcp was left out: Mooncake is not installed")
    return designs


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns its exit status."""
    options = parse(argv, NAME, __doc__)
    report = Report(NAME)
    conversations = random_conversations(
        seed=SEED,
        count=options.rounds(12, quick=2),
        turns=(5, 5),
        tokens=(150, 350),
        system_tokens=100,
    )
    with running(chosen(options, report)) as sides:
        # Once, so that nothing is compiled or connected in what is timed.
        play(sides, [[[7] * 40, [8] * 40]], 4)
        for side in sides:
            side.turns.clear()
        play(sides, conversations, options.rounds(48, quick=24))
    report_on(report, sides)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
