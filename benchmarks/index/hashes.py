"""An index without a tree, to compare ours with: chained hashes of blocks, searched by jumps.

A block's hash is of its tokens and the hash before it, so that one hash stands for a whole prefix and a
dictionary of hashes is an index. A holder of a block holds all blocks before it: one look-up finds the
holders of block n of a prompt, a binary search finds the depth of a match, and the two ends of a run show
that its blocks have the same holders. This is how Dynamo's indexer finds its 10^8 operations a second over
many threads; the hashing is compiled here (numba), the dictionary is Python's.

It may answer a wrong prefix where two hashes of 64 bits are equal, and it keeps blocks until an event removes
them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from benchmarks.lib.common import SEED, Report
from sglang_ext.compiled import kernel
from sglang_ext.radix_global import Holder, RadixTree
from sglang_ext.tiers import Tier

T = TypeVar("T")

BLOCK = 16
BLOCK_BYTES = 4 * BLOCK
WORDS = BLOCK_BYTES // 8
HOLDERS = (1, 100, 1000)
"""Instances that hold a prefix."""
TOKENS = (2_048, 8_192, 32_768)
PROMPTS = 32
ANSWERS = "match, by instance"
RUNS = "match, by run"
EVENTS = "event"


@kernel
def chain(words, out):  # type: ignore[no-untyped-def]
    """The hash of each prefix of whole blocks. words, out: uint64; `WORDS` and one to a block."""
    state = np.uint64(0x9E3779B97F4A7C15)
    for block in range(len(out)):
        for word in range(WORDS):
            state ^= words[block * WORDS + word]
            state *= np.uint64(0xFF51AFD7ED558CCD)
            state ^= state >> np.uint64(32)
        out[block] = state


class Hashes:
    """The holders of each prefix, by hashes. Holders are bits of a number."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    @staticmethod
    def of(key: bytes) -> list[int]:
        """The hashes of a prompt's blocks."""
        out = np.empty(len(key) // BLOCK_BYTES, np.uint64)
        chain(np.frombuffer(key, np.uint64, len(out) * WORDS), out)
        found: list[int] = out.tolist()
        return found

    def store(self, holder: int, key: bytes) -> None:
        """A holder has all blocks of a prompt."""
        masks, bit = self._masks, 1 << holder
        for name in self.of(key):
            masks[name] = masks.get(name, 0) | bit

    def runs(self, key: bytes) -> list[tuple[int, int]]:
        """(blocks, bits of the holders of exactly so many), the longest first."""
        names, get = self.of(key), self._masks.get
        found: list[tuple[int, int]] = []
        low, high, above = 0, len(names), 0
        while low < high:
            # Depth up to which a holder that no longer run lists has the prompt.
            first, last = low, high
            mask = get(names[low], 0) & ~above
            if not mask:
                break
            while last - first > 1:
                middle = (first + last) // 2
                if get(names[middle], 0) & ~above:
                    first = middle
                else:
                    last = middle
            mask = get(names[first], 0) & ~above
            found.append((first + 1, mask))
            above |= mask
            high = first + 1
        return found

    def holders(self, key: bytes) -> dict[int, int]:
        """Blocks of a prompt that each holder has."""
        return {holder: blocks for blocks, mask in self.runs(key) for holder in _bits(mask)}


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def measure_hashes(report: Report, *, quick: bool, tiny: bool) -> None:
    """Rows of microseconds per match and per event, in the tree and by hashes; events are a turn of 256
    tokens behind the known ones."""
    times: dict[str, float] = {}
    for tokens in TOKENS[:1] if tiny else TOKENS:
        for count in HOLDERS[:1] if tiny else HOLDERS:
            found = _case(tokens, count, 3 if tiny else 64 if quick else 256)
            for call in (ANSWERS, RUNS, EVENTS):
                tree, hashes = found["tree", call], found["hashes", call]
                report.add(f"{tokens // 1024}k", holders=count, call=call, tree=tree, hashes=hashes)
                times[call] = times.get(call, 0.0) + tree / hashes
    sizes = (1 if tiny else len(TOKENS)) * (1 if tiny else len(HOLDERS))
    for call, key in (
        (ANSWERS, "hash_match_vs_tree"),
        (RUNS, "hash_runs_vs_tree"),
        (EVENTS, "hash_event_vs_tree"),
    ):
        report.summary[key] = times[call] / sizes
    report.note("hashes: chained hashes and jumps; above 1 they make more calls per second than the tree")


def _case(tokens: int, count: int, calls: int) -> dict[tuple[str, str], float]:
    """Median microseconds by (index, call)."""
    numbers = np.random.default_rng([SEED, tokens, count])
    tree, hashes = RadixTree(BLOCK), Hashes()
    holders = [Holder.of(f"instance {number}", 1, Tier.HBM) for number in range(count)]
    keys = [_tokens(numbers, tokens) for _ in range(PROMPTS)]
    for key in keys:
        for number, holder in enumerate(holders):
            # Three quarters have the whole prompt, the others end somewhere on a few common borders.
            end = len(key) if number % 4 else len(key) // 4 * (1 + number % 3)
            tree.insert(None, key[:end], holder)
            hashes.store(number, key[:end])
    order = random.Random(SEED)
    spent: dict[tuple[str, str], list[float]] = {}

    def timed(index: str, call: str, function: Callable[..., T], *arguments: Any) -> T:
        start = time.perf_counter()
        answer = function(*arguments)
        spent.setdefault((index, call), []).append((time.perf_counter() - start) * 1e6)
        return answer

    for _ in range(calls):
        key = order.choice(keys)
        mine = timed("tree", ANSWERS, tree.holders, None, key)
        theirs = timed("hashes", ANSWERS, hashes.holders, key)
        timed("hashes", RUNS, hashes.runs, key)
        if {holders.index(h): n for h, n in mine.items()} != {h: n * BLOCK for h, n in theirs.items()}:
            raise RuntimeError("the two do not answer alike")
        longer, number = key + _tokens(numbers, 256), order.randrange(count)
        timed("tree", EVENTS, tree.insert, None, longer, holders[number])
        timed("hashes", EVENTS, hashes.store, number, longer)
    # The tree has one form of answer.
    spent["tree", RUNS] = spent["tree", ANSWERS]
    return {name: float(np.median(values)) for name, values in spent.items()}


def _tokens(numbers: np.random.Generator, count: int) -> bytes:
    drawn: npt.NDArray[np.int32] = numbers.integers(0, 32_000, count, dtype=np.int32)
    return drawn.tobytes()
