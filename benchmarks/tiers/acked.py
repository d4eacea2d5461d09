"""The cost of `--kv-durability acked` to an answer: its time to the last token beside that of `disk`, which
writes the same and waits for nothing."""

from __future__ import annotations

import json
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from benchmarks.lib.common import SEED, Options, Report
from benchmarks.tiers.disk import temporary
from benchmarks.tiers.servers import TIMEOUT_S, Client, Prompt, Prompts, Sizes, kv_layout, spec
from sglang_ext.tiered_store.disk.speed import choose_io
from sglang_ext.tiered_store.disk.state import IoMode
from tests.support.servers.server import ServerProcess

PROMPT_TOKENS, ANSWER_TOKENS = 512, 32
SIZES = Sizes(8192, 16_384)
LEGS = ("disk", "acked")


def measure_acked(options: Options, report: Report, folder: Path | None) -> None:
    """Rows of both, one answer at a time, and `acked_wait_ms`: how long an end was held back, by median."""
    rounds = options.rounds(60, quick=20)
    prompts = Prompts(SEED + 3)
    took: dict[str, list[float]] = {leg: [] for leg in LEGS}
    waits: list[float] = []
    with temporary(folder) as path, ExitStack() as stack:
        io = choose_io(path, kv_layout(), IoMode.AUTO)
        servers = {leg: stack.enter_context(ServerProcess(spec(SIZES, path / leg, leg, io))) for leg in LEGS}
        for number in range(rounds + 1):
            prompt = prompts.new(PROMPT_TOKENS)
            for leg in LEGS if number % 2 else LEGS[::-1]:
                seconds, wait = _answer(servers[leg], prompt)
                if not number:
                    continue  # the first one compiles
                took[leg].append(seconds)
                if leg == "acked":
                    waits.append(wait)
        for leg in LEGS:
            client = Client(servers[leg], path / leg)
            client.wait_until_written()
            written = client.written_blocks()
            client.close()
            report.add(
                f"answer, --kv-durability {leg}",
                p50_ms=statistics.median(took[leg]) * 1e3,
                most_ms=max(took[leg]) * 1e3,
                runs=rounds,
                blocks_written=int(written),
            )
    report.add("end held back", p50_ms=statistics.median(waits) * 1e3, most_ms=max(waits) * 1e3, runs=rounds)
    report.summary["acked_wait_ms"] = statistics.median(waits) * 1e3
    ratios = [acked / disk for disk, acked in zip(took["disk"], took["acked"], strict=True)]
    report.summary["acked_answer_vs_disk"] = statistics.median(ratios)


def _answer(server: ServerProcess, prompt: Prompt) -> tuple[float, float]:
    """Seconds to an answer's end, and how long of these it was held back, as its server tells."""
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    last = ""
    began = time.perf_counter()
    with httpx.stream(
        "POST", f"{server.url}/generate", json=body, trust_env=False, timeout=TIMEOUT_S
    ) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if data and data != "[DONE]":
                last = data
    seconds = time.perf_counter() - began
    details = json.loads(last)["meta_info"]["cached_tokens_details"] or {}
    if details.get("durability_end", "durable") != "durable":
        raise RuntimeError(f"the end was not reported as durable: {details}")
    return seconds, details.get("durability_wait_us", 0) / 1e6
