"""How much of a trace DRAM reuses for models with windows or states, whose components share it by worth.

Prompts of a trace come one after the other, and nothing is kept above DRAM. Each leg has the same bytes:

    by worth       one memory for all components: blocks of the least worth go (`engine/hybrid/worth.py`)
    fixed shares   a part for each component, so that all keep about as many turns of 1,024 tokens; in each,
                   the least recently used blocks go
    plain model    KV of as many bytes for each token, and nothing else: the least recently used goes

Names, places and eviction are those of a server; no byte is copied. Sizes of blocks are a model's in units of
4 KiB. States are kept where `engine/hybrid/forks.py` cuts prompts, and windows as SGLang's tree has them at
the ends of chunks.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lib.common import SEED, Options, Report, at_least
from benchmarks.lib.data import rows
from sglang_ext.engine.hybrid.components import FULL, AtSnapshot, Component, Flags, LastWindow, resume_points
from sglang_ext.engine.hybrid.forks import Forks
from sglang_ext.engine.hybrid.memory import Dram
from sglang_ext.engine.hybrid.paths import Name
from sglang_ext.engine.hybrid.store import HybridStore, Rows, StoredComponent
from sglang_ext.engine.ranks import Ranks
from sglang_ext.geometry import BlockLayout

PAGE = 64
CHUNK = 8192
UNIT = 4096
"""Bytes of a model for each byte here."""
BUDGETS = (0.25, 0.5, 1.0, 2.0)
"""Of the working set: the KV of all pages of a trace."""
FIGURE = "budget_forks_vs_plain"
AIM = at_least(0.9)
CONCURRENT = 8
"""Sessions at a time."""
TURN_TOKENS = 1024
SNAPSHOTS = 2
STATE = Component("state", AtSnapshot())
WINDOW = Component("window", LastWindow(128))

Prompt = tuple[Sequence[Name], int]
"""The names of its whole pages, and its tokens."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model: KV of a page, and of another component its block."""

    name: str
    kv: int
    other: Component
    other_bytes: int

    @property
    def blocks(self) -> dict[Component, int]:
        return {FULL: self.kv // UNIT, self.other: self.other_bytes // UNIT}

    @property
    def forks(self) -> Forks:
        return Forks.of(self.other_bytes, self.kv // PAGE)


MODELS = (
    # 12 layers of GQA with 2 heads of 256, 36 of GDN with 32 heads of 128 x 128 in float32.
    Sizes("Qwen3-Next", PAGE * 24 << 10, STATE, 36 * ((2 << 20) + (48 << 10))),
    # 7 layers of MLA, 20 of KDA.
    Sizes("Kimi-Linear", PAGE * 7 * 1152, STATE, 20 * ((2 << 20) + (72 << 10))),
    # 18 layers with attention to all tokens, 18 with a window of 128; 8 heads of 64.
    Sizes("gpt-oss-120b", PAGE * 36 << 10, WINDOW, PAGE * 36 << 10),
)


class Leg:
    """One way to keep the pages of a model in so many bytes of DRAM."""

    def __init__(self) -> None:
        self.reused = 0

    def serve(self, prompt: Prompt) -> None:
        """Look a prompt up, and keep what computing the rest leaves."""
        names, tokens = prompt
        most = (tokens - 1) // PAGE
        resumed = self._lookup(names[:most])
        self.reused += resumed * PAGE
        self._keep(names, tokens, resumed)

    def _lookup(self, names: Sequence[Name]) -> int:
        raise NotImplementedError

    def _keep(self, names: Sequence[Name], tokens: int, resumed: int) -> None:
        raise NotImplementedError


class _Hybrid(Leg):
    def __init__(self, model: Sizes) -> None:
        super().__init__()
        self.model = model

    def _ends(self, names: Sequence[Name], tokens: int, resumed: int, shared: int) -> Iterator[int]:
        """Where chunks end, in pages."""
        start, forks = resumed * PAGE, shared > resumed * PAGE
        states = self.model.other is STATE
        while start // PAGE < len(names):
            cut = self.model.forks.cut(start, tokens, shared, forks=forks) if states else None
            end = min(tokens if cut is None else cut, start + CHUNK) // PAGE
            if end * PAGE <= start:
                end = len(names)
            yield end
            start = end * PAGE

    def _keep(self, names: Sequence[Name], tokens: int, resumed: int) -> None:
        start = resumed
        for end in self._ends(names, tokens, resumed, self._leading(names) * PAGE):
            self._save(names, start, end)
            start = end

    def _leading(self, names: Sequence[Name]) -> int:
        raise NotImplementedError

    def _save(self, names: Sequence[Name], start: int, end: int) -> None:
        raise NotImplementedError

    def _others(self, names: Sequence[Name], start: int, end: int) -> Sequence[Name]:
        return names[end - 1 : end] if self.model.other is STATE else names[start:end]


class _AtOnce:
    """`Copies` that are over when they begin."""

    loading = False

    def write(self, slots: Any, ids: Any, copied: Callable[[], None]) -> None:
        copied()

    def look(self) -> None:
        pass


class ByWorth(_Hybrid):
    """The store of a server."""

    def __init__(self, model: Sizes, nbytes: int) -> None:
        super().__init__(model)
        layouts = {component: BlockLayout(1, ((size,),)) for component, size in model.blocks.items()}
        self.dram = Dram(layouts, nbytes, PAGE, shared=False, pin=False, touch=False)
        copies: Any = _AtOnce()
        parts = [StoredComponent(each, memory, copies) for each, memory in self.dram.memories.items()]
        self.store = HybridStore(self.dram, parts, PAGE, Ranks())

    def _lookup(self, names: Sequence[Name]) -> int:
        return max(self.store.lookup(names), default=0)

    def _leading(self, names: Sequence[Name]) -> int:
        return self.store.leading(names)

    def _save(self, names: Sequence[Name], start: int, end: int) -> None:
        if start:
            self.store.follows(names[start - 1], names[start])
        kept = {FULL: names[start:end], self.model.other: self._others(names, start, end)}
        self.store.save({each: Rows(own, np.arange(len(own))) for each, own in kept.items()})
        self.store.ranks.each_pass()
        self.store.forget_save()


class FixedShares(_Hybrid):
    """A part of DRAM for each component, in which the least recently used goes."""

    def __init__(self, model: Sizes, nbytes: int) -> None:
        super().__init__(model)
        pages = TURN_TOKENS // PAGE
        turn = {FULL: pages, model.other: SNAPSHOTS if model.other is STATE else min(pages, 3)}
        whole = sum(count * model.blocks[each] for each, count in turn.items())
        self._room = {each: nbytes * count // whole for each, count in turn.items()}
        self._held: dict[Component, OrderedDict[Name, None]] = {each: OrderedDict() for each in turn}

    def _flags(self, component: Component, names: Sequence[Name]) -> Flags:
        held = self._held[component]
        return np.fromiter((name in held for name in names), np.bool_, len(names))

    def _lookup(self, names: Sequence[Name]) -> int:
        held = {component: self._flags(component, names) for component in self._held}
        found = int(np.flatnonzero(resume_points(held, PAGE))[-1])
        for component in self._held if found else ():
            needed = component.coverage.blocks(PAGE)
            self._touch(component, names[:found] if needed is None else names[max(0, found - needed) : found])
        return found

    def _touch(self, component: Component, names: Sequence[Name]) -> None:
        held = self._held[component]
        for name in reversed(names):
            if name in held:
                held.move_to_end(name)

    def _leading(self, names: Sequence[Name]) -> int:
        return next((at for at, name in enumerate(names) if name not in self._held[FULL]), len(names))

    def _save(self, names: Sequence[Name], start: int, end: int) -> None:
        for component, own in ((FULL, names[start:end]), (self.model.other, self._others(names, start, end))):
            held, room = self._held[component], self._room[component]
            lacking = [name for name in own if name not in held]
            if len(lacking) > room:
                continue
            self._touch(component, own)
            while len(held) + len(lacking) > room:
                held.popitem(last=False)
            held.update(dict.fromkeys(lacking))
            self._touch(component, own)


class Plain(Leg):
    """A model without windows and states."""

    def __init__(self, model: Sizes, nbytes: int) -> None:
        super().__init__()
        self._room = nbytes // model.blocks[FULL]
        self._held: OrderedDict[Name, None] = OrderedDict()

    def _lookup(self, names: Sequence[Name]) -> int:
        return next((at for at, name in enumerate(names) if name not in self._held), len(names))

    def _keep(self, names: Sequence[Name], tokens: int, resumed: int) -> None:
        for name in reversed(names):
            self._held[name] = None
            self._held.move_to_end(name)
        while len(self._held) > self._room:
            self._held.popitem(last=False)


LEGS: Mapping[str, Callable[[Sizes, int], Leg]] = {
    "by worth": ByWorth,
    "fixed shares": FixedShares,
    "plain model": Plain,
}


# -- traces -----------------------------------------------------------------------------------------------


def chained(ids: Sequence[object]) -> list[Name]:
    """Names of the pages that these ids stand for."""
    names, name = [], b""
    for each in ids:
        name = hashlib.blake2b(name + repr(each).encode(), digest_size=16).digest()
        names.append(name)
    return names


def agents(folder: Path, sessions: int) -> Iterator[Prompt]:
    """Sessions of coding agents, `CONCURRENT` at a time: they share system prompts, and fork."""
    rng = random.Random(SEED)
    logged: list[Any] = [row["requests"] for row in rows(folder, "kv_cache_tester/v6_global.dev.jsonl.gz")]
    rng.shuffle(logged)
    lanes = [rng.uniform(0, 600) for _ in range(CONCURRENT)]
    timed: list[tuple[float, int, Prompt]] = []
    for requests in logged[:sessions]:
        begin = heapq.heappop(lanes)
        for each in requests:
            ids = [at for first, count in each["hash_runs"] for at in range(first, first + count)]
            whole = ids[: each["in"] // PAGE]
            timed.append((begin + each["t"], len(timed), (chained(whole), each["in"])))
        heapq.heappush(lanes, begin + requests[-1]["t"] + rng.uniform(10, 600))
    yield from (prompt for _, _, prompt in sorted(timed, key=lambda entry: entry[:2]))


def chats(folder: Path, prompts: int) -> Iterator[Prompt]:
    """Real chats: few of them go on."""
    parts = 512 // PAGE
    trace = rows(folder, "mooncake/conversation_trace.first_half.jsonl.gz")
    for row in itertools.islice(trace, prompts):
        tokens: Any = row["input_length"]
        ids: Any = row["hash_ids"]
        pages = [(block, part) for block in ids for part in range(parts)]
        yield chained(pages[: tokens // PAGE]), tokens


def forks(rng: random.Random, conversations: int) -> Iterator[Prompt]:
    """Exact repeats, several answers, regenerated answers and shared system prompts, in turn, of short and
    long conversations."""

    def text(least: int, most: int) -> list[object]:
        return [rng.random() for _ in range(rng.randint(least, most) // PAGE)]

    def prompt(pages: Sequence[object]) -> Prompt:
        return chained(pages), len(pages) * PAGE + 1

    systems = [text(2000, 6000) for _ in range(4)]
    open_: list[list[object]] = []
    for _ in range(conversations):
        if len(open_) < 2 * CONCURRENT:
            open_.append([*rng.choice(systems), *text(200, rng.choice([800, 16_000]))])
        at = rng.randrange(len(open_))
        history = open_[at]
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            yield prompt(history)
        open_[at] = [*history, *text(200, 2000)]
        if rng.random() < 0.15:
            del open_[at]


def measure_budget(options: Options, report: Report, data: Path) -> None:
    """A row for each trace, model and budget: the part of a trace's tokens that each leg reuses."""
    traces: dict[str, list[Prompt]] = {
        "agents": list(agents(data, options.pick(40, quick=8, tiny=1))),
        "chats": list(chats(data, options.pick(3000, quick=600, tiny=20))),
        "forks": list(forks(random.Random(SEED), options.pick(1000, quick=300, tiny=20))),
    }
    ratios: dict[str, list[float]] = {trace: [] for trace in traces}
    for (name, prompts), model in itertools.product(traces.items(), MODELS):
        pages = len({page for names, _ in prompts for page in names})
        tokens = sum(tokens for _, tokens in prompts)
        for budget in BUDGETS:
            legs = {leg: make(model, int(pages * model.blocks[FULL] * budget)) for leg, make in LEGS.items()}
            for prompt in prompts:
                for leg in legs.values():
                    leg.serve(prompt)
            reused = {leg: each.reused / tokens for leg, each in legs.items()}
            ratio = legs["by worth"].reused / max(1, legs["plain model"].reused)
            ratios[name].append(ratio)
            report.add(name, model=model.name, budget=budget, **reused, vs_plain=ratio)
    report.summary |= {f"budget_{trace}_vs_plain": min(found) for trace, found in ratios.items()}
