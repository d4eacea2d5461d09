"""Real SGLang servers under the tiers benchmark: starting them, sending requests, and reading the contents of
their tiers."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.data import ROOT
from benchmarks.tiers.timed_server import FILE_VARIABLE, PARTS, Parts, standstill
from sglang_ext.cluster.plan import LOOPBACK
from sglang_ext.geometry import BlockLayout
from sglang_ext.testing.models import RECIPES
from sglang_ext.testing.waiting import wait_until
from sglang_ext.tiered_store.disk.state import IoMode
from tests.support.servers.server import ServerProcess, ServerSpec

MODEL = "small"
BLOCK_TOKENS = 16
TOKEN_BYTES = RECIPES[MODEL].kv_elements_per_token * 4
"""KV of a token, all layers, in float32: 4 KiB."""
VOCABULARY = (100, 30_000)
DISK_BYTES = 8 << 30
TIMEOUT_S = 600.0

Prompt = list[int]


class WrongTierError(RuntimeError):
    """A request was not served from the tier that was to be measured: its figure would mean nothing."""


@dataclass(frozen=True)
class Sizes:
    """Of one server, in tokens: its pool (HBM), and its DRAM tier."""

    hbm: int
    dram: int


@dataclass(frozen=True)
class TimedSpec(ServerSpec):
    """A server that notes how long it stands still for loads (`benchmarks/tiers/timed_server.py`)."""

    def command(self, port: int, host: str = LOOPBACK) -> list[str]:
        return [
            "benchmarks.tiers.timed_server" if word == "sglang_ext.launch_server" else word
            for word in super().command(port, host)
        ]


def spec(sizes: Sizes, folder: Path, durability: str, io: IoMode) -> TimedSpec:
    """A server that loads all blocks that it finds, prefills a prompt in one piece, and writes as far as
    asked."""
    return TimedSpec(
        environment={
            FILE_VARIABLE: str(standstill_file(folder)),
            # The server starts in a folder of its own, where this package is not to be found.
            "PYTHONPATH": str(ROOT),
        },
        model=MODEL,
        flags=(
            *("--radix-cache-backend", "global", "--kv-load-policy", "always"),
            *("--kv-dram-size", str(sizes.dram * TOKEN_BYTES)),
            *("--kv-disk-path", str(folder), "--kv-disk-size", str(DISK_BYTES), "--kv-disk-io", io.value),
            *("--kv-durability", durability, "--kv-block-size", str(BLOCK_TOKENS)),
            # On a CPU, SGLang's attention looks at the whole prompt again for each chunk: one piece is the
            # fastest way to compute it, and so the fairest to compare loading with.
            *("--chunked-prefill-size", "-1", "--max-total-tokens", str(sizes.hbm), "--enable-metrics"),
            # Pool sizes are set above; this leaves out the memory that SGLang would reserve for any batch.
            *("--mem-fraction-static", "0.5"),
        ),
    )


def kv_layout() -> BlockLayout:
    """A block of the servers' KV."""
    config = RECIPES[MODEL].config
    row = int(config["num_key_value_heads"]) * int(config["head_dim"]) * 4
    return BlockLayout.uniform(
        n_layers=int(config["num_hidden_layers"]),
        planes_per_layer=2,
        row_bytes=row,
        block_tokens=BLOCK_TOKENS,
    )


def standstill_file(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-standstill")


@dataclass(frozen=True)
class Seen:
    """One answer: seconds until its first token, and the prompt's tokens by where their KV came from."""

    ttft: float
    prompt: int
    hbm: int
    dram: int
    disk: int
    stood_still: Parts = field(default_factory=dict)
    """Of ``ttft``, seconds in which the server could not go on because of loading."""

    @property
    def cached(self) -> int:
        return self.hbm + self.dram + self.disk

    def require(self, tier: str, tokens: int, share: float) -> None:
        """Check that at least ``share`` of ``tokens`` came from ``tier``, and none from a tier below.

        Raises:
            WrongTierError: says where they came from.
        """
        below = {"hbm": self.dram + self.disk, "dram": self.disk, "disk": 0}[tier]
        if getattr(self, tier) < share * tokens or below:
            raise WrongTierError(f"{tokens} tokens were to come from {tier}: {self}")

    def require_computed(self) -> None:
        """Check that nothing was cached.

        Raises:
            WrongTierError: something was.
        """
        if self.cached:
            raise WrongTierError(f"the prompt was to be computed: {self}")


class Client:
    """Talks to one server over connections that stay open: connecting is not part of the timed requests."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.server = server
        self._standstill = standstill_file(folder)
        self._http = httpx.Client(base_url=server.url, timeout=TIMEOUT_S, trust_env=False)

    def ask(self, prompt: Prompt) -> Seen:
        """One token for a prompt, streamed."""
        before = standstill(self._standstill)
        begin = time.perf_counter()
        with self._http.stream("POST", "/generate", json=_body(prompt, 1, stream=True)) as response:
            response.raise_for_status()
            lines = response.iter_lines()
            event = next(line for line in lines if line.startswith("data:"))
            ttft = time.perf_counter() - begin
            for _ in lines:
                pass
        seen = _seen(ttft, json.loads(event.removeprefix("data:"))["meta_info"])
        after = standstill(self._standstill)
        return dataclasses.replace(seen, stood_still={part: after[part] - before[part] for part in PARTS})

    def ask_all(self, prompts: Sequence[Prompt]) -> list[Seen]:
        """One token for each of many prompts, in one request; the TTFT is that of the whole."""
        begin = time.perf_counter()
        response = self._http.post("/generate", json=_body(list(prompts), 1))
        response.raise_for_status()
        ttft = time.perf_counter() - begin
        return [_seen(ttft, answer["meta_info"]) for answer in response.json()]

    def generate(self, prompts: Sequence[Prompt], lengths: Sequence[int], *, at_once: int) -> None:
        """An answer of the given length to each prompt, so many at the same time."""

        def one(prompt: Prompt, length: int) -> None:
            self._http.post("/generate", json=_body(prompt, length)).raise_for_status()

        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(one, prompts, lengths))

    def written_blocks(self) -> float:
        """Blocks that the server has written to disk since it started."""
        return self._metric("sglang_ext_cache_disk_blocks_total", 'event="written"')

    def wait_until_written(self) -> None:
        """Return when nothing waits for the disk. The server renews its metrics once a second."""
        self.server.wait_idle()

        def written() -> bool:
            before = self.written_blocks()
            time.sleep(1.1)
            return not self._metric("sglang_ext_cache_disk_backlog_bytes", "") and (
                before == self.written_blocks()
            )

        wait_until(written, seconds=60, what="end of writing to disk")

    def _metric(self, name: str, label: str) -> float:
        found = self.server.metrics().items()
        return sum(value for sample, value in found if sample.startswith(f"{name}{{") and label in sample)

    def close(self) -> None:
        self._http.close()


def _body(prompt: Any, length: int, *, stream: bool = False) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "stream": stream}


def _seen(ttft: float, meta: dict[str, Any]) -> Seen:
    details = meta.get("cached_tokens_details") or {}
    seen = Seen(
        ttft,
        prompt=meta["prompt_tokens"],
        hbm=details.get("device", 0),
        dram=details.get("host", 0),
        disk=details.get("storage", 0),
    )
    if seen.cached != meta["cached_tokens"]:
        raise WrongTierError(
            f"{meta['cached_tokens']} tokens cached, which the details do not confirm: {seen}"
        )
    return seen


class Prompts:
    """Prompts of random tokens, the same in every run."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def new(self, tokens: int) -> Prompt:
        """A prompt that no server has seen before."""
        return [self._random.randrange(*VOCABULARY) for _ in range(tokens)]
