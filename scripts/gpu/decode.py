"""decode.py URL OUT.json: time per output token (TPOT) of streams side by side (measurement 6).

Run against servers that write KV to DRAM and that do not, it shows what writing costs decoding. With
`--load TOKENS` another prompt of that length is asked for each second meanwhile, from a ring of prompts that
together are larger than the pool (`--pool`): the server loads its KV from below HBM.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out

from gpu_client import ask, tokens


def pace(times: Sequence[float], count: int) -> tuple[float, float]:
    """TPOT and the longest gap of one stream, in milliseconds.

    times: of its events; an event may bring several of its ``count`` tokens.
    """
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    return 1000 * (times[-1] - times[0]) / (count - 1), 1000 * max(gaps, default=0.0)


class Ring:
    """Prompts that are asked for in turn, so that each has left HBM when it is its turn again."""

    def __init__(self, url: str, rng: random.Random, length: int, pool: int) -> None:
        self._url = url
        self._prompts = [tokens(rng, length) for _ in range(pool // length + 2)]
        self._turn = 0
        self.asked = self.loaded = 0
        for ids in self._prompts:
            ask(url, ids)

    @contextmanager
    def turning(self, every: float) -> Iterator[None]:
        """Ask for one each ``every`` seconds meanwhile.

        Raises:
            Exception: a request failed.
        """
        over = threading.Event()

        def turn() -> None:
            while not over.is_set():
                ids = self._prompts[self._turn % len(self._prompts)]
                self._turn += 1
                self.asked += 1
                self.loaded += ask(self._url, ids).below > len(ids) / 2
                over.wait(every)

        with ThreadPoolExecutor(1) as beside:
            done = beside.submit(turn)
            try:
                yield
            finally:
                over.set()
        done.result()


def streams(given: argparse.Namespace, rng: random.Random) -> dict[str, float]:
    """One round: the median TPOT of the streams, and the longest gap of any."""
    prompts = [tokens(rng, given.prompt) for _ in range(given.streams)]
    with ThreadPoolExecutor(given.streams) as beside:
        answers = list(beside.map(lambda ids: ask(given.url, ids, given.tokens), prompts))
    paces = [pace(answer.times, given.tokens) for answer in answers]
    return {"tpot_ms": statistics.median(p[0] for p in paces), "gap_ms": max(p[1] for p in paces)}


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Of the rounds, with the rounds."""
    return {
        "tpot_ms": statistics.median(each["tpot_ms"] for each in rounds),
        "gap_ms": statistics.median(each["gap_ms"] for each in rounds),
        "rounds": list(rounds),
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("out", type=Path)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=int, help="tokens of a prompt that is loaded each second meanwhile")
    parser.add_argument("--pool", type=int, help="tokens in HBM; with --load")
    given = parser.parse_args()
    if given.tokens < 2:
        parser.error("--tokens must be at least 2: a pace needs two tokens")
    if given.load and not given.pool:
        parser.error("--load needs --pool")
    rng = random.Random(2)
    streams(given, rng)  # kernels are compiled, and graphs taken, by the first one
    found = medians([streams(given, rng) for _ in range(given.rounds)])
    if given.load:
        ring = Ring(given.url, rng, given.load, given.pool)
        with ring.turning(1.0):
            rounds = [streams(given, rng) for _ in range(given.rounds)]
        found["beside_loads"] = {**medians(rounds), "asked": ring.asked, "loaded": ring.loaded}
    print(json.dumps(found), flush=True)
    given.out.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
