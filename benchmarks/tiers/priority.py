"""How long a request of a higher priority waits for its first token while others fill the server, with and
without retracting one of them (Symphony, 3.5)."""

from __future__ import annotations

import json
import statistics
import threading
import time
from contextlib import ExitStack

import httpx

from benchmarks.lib.common import SEED, Options, Report, at_most
from benchmarks.tiers.servers import MODEL, TIMEOUT_S, Prompt, Prompts
from sglang_ext.testing.waiting import wait_until
from tests.support.servers.server import ServerProcess, ServerSpec

FIGURE = "ttft_high_priority_with_retraction"
AIM = at_most(0.5)
PLACES = 2
LONG, HIGH = 200, 8
"""Tokens of the answers that fill the server, and of the new request's answer."""
RUNNING = 10
"""Tokens that each of those has when it comes."""
LEGS = {"with retraction": "0.5", "without": "1000000"}
"""--kv-retract-wait."""


def _spec(wait: str) -> ServerSpec:
    return ServerSpec(
        model=MODEL,
        flags=(
            *("--radix-cache-backend", "global", "--kv-dram-size", "256MB", "--kv-load-policy", "always"),
            *("--enable-priority-scheduling", "--default-priority-value", "0"),
            *("--priority-scheduling-preemption-threshold", "0", "--kv-retract-wait", wait),
            *("--max-running-requests", str(PLACES), "--max-total-tokens", "8192"),
            *("--chunked-prefill-size", "512", "--mem-fraction-static", "0.5"),
            "--incremental-streaming-output",
        ),
    )


class _Talk(threading.Thread):
    """One request, whose answer is taken as a stream."""

    def __init__(self, server: ServerProcess, prompt: Prompt, answer: int, priority: int) -> None:
        super().__init__(name=f"talk {priority}")
        self.tokens: list[int] = []
        self.ttft = self.seconds = 0.0
        self._url = f"{server.url}/generate"
        sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
        self._body = {"input_ids": prompt, "sampling_params": sampling, "priority": priority, "stream": True}
        self.start()

    def runs(self) -> bool:
        """Whether it has generated enough to be in the way."""
        return len(self.tokens) >= RUNNING

    def run(self) -> None:
        began = time.perf_counter()
        with httpx.stream("POST", self._url, json=self._body, trust_env=False, timeout=TIMEOUT_S) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if data and data != "[DONE]":
                    self.ttft = self.ttft or time.perf_counter() - began
                    self.tokens += json.loads(data)["output_ids"]
        self.seconds = time.perf_counter() - began


def measure_priority(options: Options, report: Report) -> None:
    """Rows of both: the TTFT of the request that comes, and how long those take that were there; and the
    ratio of the medians of the TTFTs. Answers have to be the same either way."""
    rounds = options.rounds(9, quick=3)
    prompts = Prompts(SEED + 4)
    high: dict[str, list[float]] = {leg: [] for leg in LEGS}
    low: dict[str, list[float]] = {leg: [] for leg in LEGS}
    wrong = 0
    with ExitStack() as stack:
        servers = {leg: stack.enter_context(ServerProcess(_spec(wait))) for leg, wait in LEGS.items()}
        for number in range(rounds + 1):
            texts = [prompts.new(256) for _ in range(PLACES + 1)]
            said = []
            for leg in list(LEGS)[:: 1 if number % 2 else -1]:
                talks = [_Talk(servers[leg], text, LONG, 0) for text in texts[:PLACES]]
                for talk in talks:
                    wait_until(talk.runs, seconds=120, what="its first tokens")
                comes = _Talk(servers[leg], texts[PLACES], HIGH, 5)
                for talk in (comes, *talks):
                    talk.join()
                said.append([talk.tokens for talk in (comes, *talks)])
                if number:  # in the first, servers compile
                    high[leg].append(comes.ttft)
                    low[leg] += [talk.seconds for talk in talks]
            wrong += said[0] != said[1]
    for leg in LEGS:
        report.add(
            f"high priority, {leg}",
            ttft_p50_s=statistics.median(high[leg]),
            ttft_most_s=max(high[leg]),
            others_mean_s=statistics.fmean(low[leg]),
            runs=rounds,
        )
    kept, waited = (statistics.median(high[leg]) for leg in LEGS)
    report.summary[FIGURE] = kept / waited
    report.summary["high_priority_wrong_answers"] = wrong
