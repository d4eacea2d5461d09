"""How long the index takes to look a prompt up and to insert one, beside SGLang's own trees.

Every cache is driven through SGLang's interface, `match_prefix` and `insert`, from the token ids as the
scheduler has them (array of int64) to the tensor of slots and back, with a new key object each time. Ours
indexes whole blocks of 16 tokens; SGLang's default is a page of one token, so ours answers up to 15 tokens
less. Rows with pages of 16 and 64 tokens compare equal granularity.

The trees of one table are built from the same prompts and take turns, in an order that changes each time.
What each answers is compared with the prompt. Python's garbage collector is off while times are taken.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import SEED, Report, parse, percentile
from benchmarks.index_workload import TURN_TOKENS, Prompt, Workload
from sglang_ext.patches import runtime

OURS = "ours"
PYTHON = "sglang python"
UNIFIED = "sglang unified, python core"
RUST = "sglang unified, rust core"

CONVERSATIONS = 32
"""Measured conversations in each tree."""

CHANCE_TOKENS = 2
"""A random continuation may agree with what another prompt has at the same place, for very few tokens."""

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


class Index:
    """One cache under test."""

    def __init__(self, name: str, cache: Any, granule: int, page: int) -> None:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        self.name = name
        self._cache = cache
        self._granule = granule
        self._page = page
        self._key, self._match, self._insert = RadixKey, MatchPrefixParams, InsertParams

    def match(self, prompt: Prompt) -> Any:
        """The slots of the known prefix, as the scheduler gets them."""
        return self._cache.match_prefix(self._match(key=self._key(prompt.tokens))).device_indices

    def insert(self, prompt: Prompt) -> int:
        """Insert as at the end of a request that had matched what it could. Returns tokens known before."""
        known = prompt.known // self._page * self._page
        result = self._cache.insert(
            self._insert(key=self._key(prompt.tokens), value=prompt.slots, prev_prefix_len=known)
        )
        return int(result.prefix_len)

    def verify(self, prompt: Prompt, known: int, slots: Any = None) -> None:
        """Raises RuntimeError unless the cache has answered what the prompt's making implies."""
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

    from sglang_ext.engine.radix_cache import GlobalRadixCache

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

    def ratio(self, peer: str, kind: str) -> float:
        """How many times faster ours is: median over the calls of theirs / ours."""
        theirs, ours = self.seconds[peer, kind], self.seconds[OURS, kind]
        return statistics.median(a / b for a, b in zip(theirs, ours, strict=True))


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


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def build(indexes: Iterable[Index], nodes: int, length: int) -> tuple[Workload, dict[str, float]]:
    """Fill every index from the same prompts. Returns the workload to go on with, and MiB per index."""
    memory: dict[str, float] = {}
    workload = Workload(nodes, length, CONVERSATIONS, SEED)
    for index in indexes:
        workload = Workload(nodes, length, CONVERSATIONS, SEED)
        gc.collect()
        before = resident_bytes()
        for prompt in workload.filling():
            index.verify(prompt, index.insert(prompt))
        gc.collect()
        memory[index.name] = (resident_bytes() - before) / 2**20
    return workload, memory


@dataclass(frozen=True)
class Case:
    nodes: int
    length: int
    page: int


def cases(quick: bool) -> list[Case]:
    """Every size with SGLang's default page, then every prompt length with larger pages in one tree."""
    sizes = (1_000, 10_000) if quick else (1_000, 10_000, 100_000)
    default = [Case(nodes, length, 1) for nodes in sizes for length in TURN_TOKENS]
    lengths = list(TURN_TOKENS)[1:2] if quick else list(TURN_TOKENS)
    return default + [Case(10_000, length, page) for page in (16, 64) for length in lengths]


def run(report: Report, case: Case, calls: int) -> Times:
    """Measure one case and add its rows."""
    indexes = caches(case.page)
    workload, memory = build(indexes, case.nodes, case.length)
    gc.collect()
    gc.disable()
    try:
        times = measure(indexes, workload, calls)
    finally:
        gc.enable()
    where = f"{case.nodes // 1000}k nodes, {case.length // 1024}k tokens, page {case.page}"
    for kind in [f"match {kind}" for kind in MATCHES] + [f"insert {kind}" for kind in INSERTS]:
        report.add(
            where,
            call=kind,
            ours_us=times.microseconds(OURS, kind),
            ours_p99=times.p99(OURS, kind),
            python_us=times.microseconds(PYTHON, kind),
            python_p99=times.p99(PYTHON, kind),
            unified_us=times.microseconds(UNIFIED, kind),
            unified_p99=times.p99(UNIFIED, kind),
            rust_us=times.microseconds(RUST, kind),
            rust_p99=times.p99(RUST, kind),
            vs_python=times.ratio(PYTHON, kind),
            vs_unified=times.ratio(UNIFIED, kind),
            vs_rust=times.ratio(RUST, kind),
        )
    report.add(f"memory, {where}", **{f"{index.name}_mib": memory[index.name] for index in indexes})
    return times


def summarize(report: Report, measured: dict[Case, Times]) -> None:
    """Medians over sizes and kinds of call, ours over theirs in calls per second."""

    def median(call: str, peer: str, paged: bool) -> float:
        kinds = MATCHES if call == "match" else INSERTS
        return statistics.median(
            times.ratio(peer, f"{call} {kind}")
            for case, times in measured.items()
            for kind in kinds
            if (case.page > 1) == paged
        )

    for call in ("match", "insert"):
        for peer, name in ((PYTHON, "python"), (RUST, "rust"), (UNIFIED, "unified_python")):
            report.summary[f"{call}_vs_sglang_{name}"] = median(call, peer, paged=False)
            report.summary[f"{call}_vs_sglang_{name}_paged"] = median(call, peer, paged=True)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv, "index", __doc__)
    runtime.prepare_process(os.environ)
    logging.disable(logging.INFO)
    report = Report("index")
    calls = options.rounds(192, quick=64)
    measured = {case: run(report, case, calls) for case in cases(options.quick)}
    summarize(report, measured)
    report.note("times are microseconds per call; ratios are theirs / ours, above 1 where ours is faster")
    report.note("ours indexes whole blocks (16 tokens at page 1), SGLang's trees whole pages")
    return report.finish(options)


if __name__ == "__main__":
    raise SystemExit(main())
