"""Ask an SGLang server, with the plugin or without, for greedy answers to token ids; see each event's time.

Standard library only: the scripts beside it import it on machines that have little else.
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SECONDS = 900
"""Patience with a request: on an emulated GPU a short one takes a minute."""


@dataclass(frozen=True)
class Streamed:
    """An answer. times: seconds from the request to each event. meta: the last event's ``meta_info``."""

    times: Sequence[float]
    meta: dict[str, Any]

    @property
    def cached(self) -> int:
        """Tokens of the prompt whose KV was not computed."""
        return int(self.meta.get("cached_tokens") or 0)

    @property
    def below(self) -> int:
        """Those of them that came from DRAM or disk."""
        details = self.meta.get("cached_tokens_details") or {}
        return int(details.get("host") or 0) + int(details.get("storage") or 0)


def tokens(rng: random.Random, count: int) -> list[int]:
    """Random token ids."""
    return [rng.randrange(100, 30_000) for _ in range(count)]


def ask(url: str, ids: Sequence[int], new: int = 1, *, logprobs: bool = False) -> Streamed:
    """The answer of ``new`` tokens.

    Raises:
        RuntimeError: the server reported an error, or no token.
    """
    body = {
        "input_ids": list(ids),
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        "return_logprob": logprobs,
    }
    request = urllib.request.Request(
        url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    begin = time.perf_counter()
    times, last = [], {}
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter() - begin)
                last = json.loads(line[6:])
    if "meta_info" not in last:
        raise RuntimeError(f"no answer from {url}: {last}")
    return Streamed(times, last["meta_info"])


def fill(url: str, rng: random.Random, pool: int) -> None:
    """Compute other prompts, as many tokens as the pool in HBM has, so that it gives up all others."""
    length = min(8192, pool // 3)
    for _ in range(pool // length + 1):
        ask(url, tokens(rng, length))
    time.sleep(0.2)
