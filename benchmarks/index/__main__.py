"""How long the index takes to look a prompt up and to insert one, beside SGLang's own trees.

Every cache is driven through SGLang's interface, `match_prefix` and `insert`, from the token ids as the
scheduler has them (array of int64) to the tensor of slots and back, with a new key object each time. Ours
indexes whole blocks of 16 tokens; SGLang's default is a page of one token, so ours answers up to 15 tokens
less. Rows with pages of 16 and 64 tokens compare equal granularity.

The trees of one table are built from the same prompts and take turns, in an order that changes each time.
Every answer is compared with the prompt. Python's garbage collector is off while times are taken.

The summary gives, per call and peer, the median over the sizes of ours over theirs in calls per second, for
an equal mix of hits, partial hits and misses, or of known, longer and new prompts.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.index.hashes import measure_hashes
from benchmarks.index.workload import TURN_TOKENS, Prompt, Workload
from benchmarks.lib.common import SEED, Options, Report, at_least, percentile
from sglang_ext.patches.cpu import runtime

OURS = "ours"
PYTHON, UNIFIED, RUST = PEERS = "python", "unified", "rust"
"""SGLang's RadixCache, and its UnifiedRadixCache with the Python and with the Rust core."""

AIMS = {
    "match_vs_sglang_python": at_least(3.0),
    "insert_vs_sglang_python": at_least(3.0),
    "match_vs_sglang_rust": at_least(1.0),
}
CONVERSATIONS = 32
"""Measured conversations in each tree."""

CHANCE_TOKENS = 2
"""A random continuation may agree with another prompt's tokens at the same place, for very few tokens."""

MATCHES: dict[str, Callable[[Workload, int], Prompt]] = {
    "full hit": Workload.whole,
    "next turn": Workload.next_turn,
    "inside an edge": Workload.parting,
    "miss": lambda workload, _: workload.unknown(),
}
INSERTS: dict[str, Callable[[Workload, int], Prompt]] = {
    "known already": Workload.whole,
    "next turn": Workload.next_turn,
    "new chat": lambda workload, _: workload.new_chat(),
}
KINDS = {
    "match": [f"match {kind}" for kind in MATCHES],
    "insert": [f"insert {kind}" for kind in INSERTS],
}


class Index:
    """One cache under test."""

    def __init__(self, name: str, cache: Any, granule: int, page: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.name = name
        self._cache = cache
        self._granule = granule
        self._page = page
        self._reads_path = hasattr(cache, "path_device_indices")  # SGLang from 0.5.22 on
        self._key, self._match, self._insert = RadixKey, MatchPrefixParams, InsertParams

    def match(self, prompt: Prompt) -> Any:
        """The slots of the known prefix, as the scheduler gets them."""
        found = self._cache.match_prefix(self._match(key=self._key(prompt.tokens)))
        if self._reads_path:
            return self._cache.path_device_indices(found.last_device_node)
        return found.device_indices

    def insert(self, prompt: Prompt) -> int:
        """Insert as at the end of a request that had matched all its cached tokens. Returns tokens known
        before."""
        known = prompt.known // self._page * self._page
        result = self._cache.insert(
            self._insert(key=self._key(prompt.tokens), value=prompt.slots, prev_prefix_len=known)
        )
        return int(result.prefix_len)

    def verify(self, prompt: Prompt, known: int, slots: Any = None) -> None:
        """Raises RuntimeError unless the cache's answer agrees with the prompt's construction."""
        least = prompt.known // self._granule * self._granule
        if not least <= known <= prompt.known + CHANCE_TOKENS:
            raise RuntimeError(f"{self.name} knows {known} tokens of a prompt of which it has {prompt.known}")
        if slots is not None and not bool((slots == prompt.slots[:known]).all()):
            raise RuntimeError(f"{self.name} answered the wrong slots")


class NoPool:
    """Stands for the pool's allocator; the caches under test never allocate."""

    device = "cpu"

    def free(self, slots: Any) -> None: ...

    def free_segment(self, slots: Any, start_pos: int = 0) -> None: ...


def caches(page: int) -> list[Index]:
    """Ours and SGLang's, empty, for pages of ``page`` tokens."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    from sglang_ext.patches.adapter.radix_cache import GlobalRadixCache

    def unified(core: str) -> Any:
        cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=NoPool(),
                page_size=page,
                tree_components=(ComponentType.FULL,),
                tree_core_backend=core,
            )
        )
        # SGLang falls back to the Python core in silence where the Rust core does not load.
        used = type(cache.tree_core).__name__
        if used != {"python": "UnifiedTreeCore", "rust": "RustUnifiedTreeCore"}[core]:
            raise RuntimeError(f"asked SGLang for its {core} tree core and got {used}")
        return cache

    block = max(page, 16)
    ours = GlobalRadixCache.create_simulated(page_size=page, block_size=block, allocator=NoPool())
    return [
        Index(OURS, ours, block, page),
        Index(PYTHON, RadixCache.create_simulated(page_size=page, mock_allocator=NoPool()), page, page),
        Index(UNIFIED, unified("python"), page, page),
        Index(RUST, unified("rust"), page, page),
    ]


@dataclass
class Times:
    """Seconds of each call, by index and by kind of call, in the order of the calls."""

    seconds: dict[tuple[str, str], list[float]]

    def microseconds(self, name: str, kind: str) -> float:
        return statistics.median(self.seconds[name, kind]) * 1e6

    def p99(self, name: str, kind: str) -> float:
        return percentile(self.seconds[name, kind], 99) * 1e6

    def ratio(self, peer: str, kinds: Sequence[str]) -> float:
        """How many times as many calls per second ours makes, of equally many of each kind.

        From the medians of each kind: a mix of calls takes as long as its kinds together.
        """
        theirs, ours = (sum(self.microseconds(name, kind) for kind in kinds) for name in (peer, OURS))
        return theirs / ours


def measure(indexes: Sequence[Index], workload: Workload, calls: int) -> Times:
    """Time every kind of call ``calls`` times on each index, the same prompts in turns."""
    order = random.Random(SEED)
    times = Times({})
    turns = list(indexes)
    for kind, make in MATCHES.items():
        for number in range(calls):
            prompt = make(workload, number)
            order.shuffle(turns)
            for index in turns:
                start = time.perf_counter()
                slots = index.match(prompt)
                elapsed = time.perf_counter() - start
                times.seconds.setdefault((index.name, f"match {kind}"), []).append(elapsed)
                index.verify(prompt, len(slots), slots)
    for kind, make in INSERTS.items():
        for number in range(calls):
            prompt = make(workload, number)
            order.shuffle(turns)
            for index in turns:
                start = time.perf_counter()
                known = index.insert(prompt)
                elapsed = time.perf_counter() - start
                times.seconds.setdefault((index.name, f"insert {kind}"), []).append(elapsed)
                index.verify(prompt, known)
    return times


def build(indexes: Iterable[Index], workload: Workload) -> None:
    """Fill every index with the same prompts."""
    for prompt in workload.filling():
        for index in indexes:
            index.verify(prompt, index.insert(prompt))


@dataclass(frozen=True)
class Case:
    nodes: int
    length: int
    page: int


def cases(quick: bool, tiny: bool = False) -> list[Case]:
    """Every size with SGLang's default page, then every prompt length with larger pages in one tree."""
    if tiny:
        return [Case(1_000, next(iter(TURN_TOKENS)), page) for page in (1, 16)]
    sizes = (1_000, 10_000) if quick else (1_000, 10_000, 100_000)
    default = [Case(nodes, length, 1) for nodes in sizes for length in TURN_TOKENS]
    lengths = list(TURN_TOKENS)[1:2] if quick else list(TURN_TOKENS)
    return default + [Case(10_000, length, page) for page in (16, 64) for length in lengths]


def run(report: Report, case: Case, calls: int) -> Times:
    """Measure one case and add its rows."""
    indexes = caches(case.page)
    workload = Workload(case.nodes, case.length, CONVERSATIONS, SEED)
    build(indexes, workload)
    gc.collect()
    gc.disable()
    try:
        times = measure(indexes, workload, calls)
    finally:
        gc.enable()
    where = f"{case.nodes // 1000}k/{case.length // 1024}k/{case.page}"
    for kind in KINDS["match"] + KINDS["insert"]:
        row: dict[str, float] = {}
        for name in (OURS, *PEERS):
            row[name] = times.microseconds(name, kind)
            row[f"{name} p99"] = times.p99(name, kind)
        row |= {f"/{name}": times.ratio(name, [kind]) for name in PEERS}
        report.add(where, call=kind, **row)
    return times


def summarize(report: Report, measured: dict[Case, Times]) -> None:
    """Calls per second of an equal mix of the kinds of call, ours over theirs; median over the sizes."""
    for call, kinds in KINDS.items():
        for suffix, paged in (("", False), ("_paged", True)):
            for peer in PEERS:
                ratios = [t.ratio(peer, kinds) for case, t in measured.items() if (case.page > 1) == paged]
                report.summary[f"{call}_vs_sglang_{peer}{suffix}"] = statistics.median(ratios)


def main(argv: Sequence[str] | None = None) -> int:
    options = Options.of(argv, "index", __doc__)
    runtime.prepare_process(os.environ)
    import torch

    # SGLang's trees are faster with one thread: the tensors they join are too small to share out.
    torch.set_num_threads(1)
    logging.disable(logging.INFO)
    report = Report("index", AIMS)
    calls = options.pick(192, quick=64, tiny=8)
    measured = {case: run(report, case, calls) for case in cases(options.quick, options.tiny)}
    summarize(report, measured)
    measure_hashes(report, quick=options.quick, tiny=options.tiny)
    report.note("case: nodes / tokens of the prompt / SGLang's page size; times are microseconds per call")
    report.note(
        f"{PYTHON}: RadixCache; {UNIFIED}: UnifiedRadixCache, Python core; {RUST}: the same, Rust core"
    )
    report.note(
        "/name: how many times faster ours is, by the medians; ours indexes blocks of 16 tokens at least"
    )
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
