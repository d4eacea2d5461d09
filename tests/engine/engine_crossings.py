"""Servers of the oracle, drawn at random: a family of models, its tiers, a draft model, how it runs, and its
traffic.

Traffic changes weights, retracts, aborts, flushes, announces prompts and repeats them, for several tenants.
A server has one rank or two, or is one of two instances that fetch each other's prompts, or its pools hand
prompts over from prefill to decode. Equal seeds draw equal servers.

    python tests/engine/engine_crossings.py --minutes 30

runs one seed after another, says every half minute how far it is, and appends the seeds that fail to a file.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    import conftest  # noqa: F401 - makes SGLang importable on a CPU

from engine_drafts import with_draft
from engine_hybrid_store import Sizes, StoreBelow
from engine_hybrids import HybridKind, HybridRank, HybridScenario, drive
from engine_page_pools import COMPRESSED, GROUPED, LOW_RATIO, QSA
from engine_pools import PoolKind, Pools, chain_of, publish_server_args
from engine_scheduler import Settings, SimulatedScheduler
from engine_simulation import Rank, Scenario, run
from engine_verifying import VerifyingScheduler
from pd_rig import hand_over, pair
from test_oracle_fetches import engines, move_prompts
from test_oracle_ranks import on_two, traffic
from test_pd_pools import slots_of
from test_pd_whole_requests import Place, each_layer, side

from sglang_ext.engine.pd.landing import Wanted
from sglang_ext.engine.transfer_thread import HBM_POOL
from sglang_ext.patches.adapter.hbm import EnginePool
from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache

STEPS = 100
PROGRESS_S = 30.0


@dataclass(frozen=True)
class Crossing:
    """The server that a seed draws.

    sizes: of the tiers of each rank; empty for plain models, whose scenario says them.
    apart: how KV comes from elsewhere: "" for a server alone, "fetch", or "pull" or "push" for hand-overs.
    """

    seed: int
    family: str
    scenario: HybridScenario | Scenario
    sizes: tuple[Sizes, ...] = ()
    apart: str = ""

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.family}, {self.scenario!r}, {self.sizes}, {self.apart!r}"

    @property
    def marks(self) -> list[str]:
        """The dimensions that it crosses."""
        scenario = self.scenario
        drafts = getattr(scenario.kind, "verified", 0) or getattr(scenario.kind, "draft_layers", 0)
        disk = any(each.disk for each in self.sizes) or bool(getattr(scenario, "disk_blocks", 0))
        marks = {
            "disk": disk and self.apart in ("", "fetch"),
            "hints": bool(scenario.prefetch) and not self.apart,
            "speculation": bool(drafts),
            "two ranks": len(self.sizes) == 2,
            "fetch": self.apart == "fetch",
            "PD": self.apart in ("pull", "push"),
        }
        return [self.family, *(mark for mark, given in marks.items() if given)]

    def run(self) -> int:
        """Serve random traffic, with all checks after each pass. Returns how many tokens were loaded."""
        scenario = self.scenario
        if self.apart in ("pull", "push"):
            return hand_prompts_over(scenario, self.apart, random.Random(self.seed))
        if isinstance(scenario, Scenario):
            with Rank(scenario, pace=random.Random(self.seed)) as rank:
                run(rank, self.seed, STEPS)
                return rank.scheduler.loaded_tokens
        if len(self.sizes) == 2:
            ranks = on_two(scenario, self.sizes, traffic(self.seed, STEPS))
            return ranks[0].scheduler.loaded
        (sizes,) = self.sizes
        if self.apart:
            with engines(scenario, sizes) as both:
                return move_prompts(both, scenario, seed=self.seed, steps=STEPS)

        with HybridRank(
            scenario,
            make_cache=HybridRadixCache,
            make_below=lambda pools, cache: StoreBelow(pools, cache, sizes),
        ) as hybrid:
            drive(hybrid, self.seed, STEPS)
            return hybrid.scheduler.loaded


def hand_prompts_over(scenario: HybridScenario | Scenario, mode: str, rnd: random.Random) -> int:
    """Hand prompts over from a prefill server's pools to those of decode. Returns how many tokens came."""
    over = _hand_over_plain if isinstance(scenario, Scenario) else _hand_over_hybrid
    return sum(over(scenario, mode, rnd) for _ in range(3))  # type: ignore[operator]


def _hand_over_hybrid(scenario: HybridScenario, mode: str, rnd: random.Random) -> int:
    with side(scenario) as prefill, side(scenario) as decode:
        here, there = (Place.of(at, rnd.randrange(1, 6)) for at in (prefill, decode))
        each_layer(here, "write")
        described = {name: pool.described(1) for name, pool in prefill.found.items()}
        specs = [[pool.spec(name, 0, 1) for name, pool in at.found.items()] for at in (prefill, decode)]
        with pair(*specs, scenario.kind.page, mode, components=(described, described)) as (*ends, address):
            wanted = Wanted(there.pages, 0, 0, beside=there.beside())
            hand_over(*ends, address, list(here.pages), wanted, here.beside())
        each_layer(there, "compare", "received")
        return there.at.tokens


def _hand_over_plain(scenario: Scenario, mode: str, rnd: random.Random) -> int:
    page, count = scenario.kind.page, rnd.randrange(3, 20)
    prefill, decode = (Pools(scenario.kind, 40 * page, block=page, rows=1, context=1) for _ in range(2))
    specs = [[EnginePool(pools.tensors, pools.geometry()).spec(HBM_POOL)] for pools in (prefill, decode)]
    tokens, skip = count * page - rnd.randrange(page), rnd.randrange(count)
    here, there = (rnd.sample(range(1, 41), pages) for pages in (count, count - skip))
    chain = np.array(chain_of("prompt", [rnd.randrange(4) for _ in range(tokens)]), np.uint64)
    for layer in range(prefill.oracle.layers):
        prefill.oracle.write(slots_of(here, page, tokens), chain, layer)
    with pair(*specs, page, mode) as (*ends, address):
        hand_over(*ends, address, here, Wanted(np.array(there), skip, 0))
    behind = chain[skip * page :]
    for layer in range(decode.oracle.layers):
        decode.oracle.compare(slots_of(there, page, len(behind)), behind, layer, "received")
    return len(behind)


def draw(seed: int) -> Crossing:
    """The server of a seed."""
    rnd = random.Random(seed)
    family = rnd.choices(list(FAMILIES), [1 if each == "pages" else 3 for each in FAMILIES])[0]
    scenario = FAMILIES[family](rnd)
    handed = rnd.random() < 0.15
    if isinstance(scenario, Scenario):
        return Crossing(seed, family, scenario, apart=rnd.choice(("pull", "push")) if handed else "")
    scenario = _drafted(rnd, scenario)
    if handed:
        return Crossing(seed, family, scenario, apart="pull")
    if rnd.random() < 0.15 and scenario.tree_core == "python":
        (sizes,) = (replace(_sizes(rnd, scenario), hints=False),)
        return Crossing(seed, family, replace(scenario, prefetch=0.0), (sizes,), "fetch")
    ranks = rnd.choice((1, 1, 2))
    sizes = tuple(_sizes(rnd, scenario) for _ in range(ranks))
    if not all(each.disk for each in sizes):  # all ranks have a disk, or none
        sizes = tuple(replace(each, disk=0) for each in sizes)
    return Crossing(seed, family, replace(scenario, tree_core="python"), sizes)


def _drafted(rnd: random.Random, scenario: HybridScenario) -> HybridScenario:
    """Sometimes with a draft model."""
    kind = scenario.kind
    if rnd.random() < 0.7 or (kind.latents and kind.page != COMPRESSED.kind.page):
        return scenario
    if kind.grid == 8:  # SGLang verifies up to a place of its grid: pages are as long as the grid's steps
        return scenario
    return with_draft(scenario)


def _settings(rnd: random.Random, page: int, *, mixed: bool = False) -> Settings:
    """chunk: of whole pages."""
    return Settings(
        overlap=rnd.random() < 0.4,
        chunk=page * rnd.choice((2, 3, 4)) if page > 1 else rnd.choice((16, 24, 32, 64)),
        new_token_ratio=rnd.choice((0.05, 0.3)),
        max_running=rnd.choice((3, 8)),
        mixed=mixed and rnd.random() < 0.3,
        policy=rnd.choice(("fcfs", "lpm")),
    )


def _hybrid(rnd: random.Random, *, window: bool, states: bool) -> HybridScenario:
    grid = rnd.choice((0, 8, 16)) if states else 0
    page = 16 if grid == 16 or (not states and rnd.random() < 0.4) else 1
    settings = _settings(rnd, page)
    if states and not grid:
        settings = replace(settings, overlap=False)  # SGLang refuses it without a grid
    return HybridScenario(
        "drawn",
        HybridKind(
            window=rnd.choice((9, 20, 32)) if window else 0,
            states=rnd.choice((40, 56) if grid else (14, 24)) if states else 0,
            grid=grid,
            latents=rnd.random() < 0.3,
            page=page,
        ),
        hbm_tokens=rnd.choice((480, 640) if page > 1 else (240, 400)),
        window_tokens=rnd.choice((256, 320) if page > 1 else (200, 240)) if window else 0,
        settings=settings,
        memory=rnd.choice((10, 40)),
        **_others(rnd),
    )


def _others(rnd: random.Random) -> dict[str, float]:
    """Hints and repeats."""
    return {"prefetch": rnd.choice((0.0, 0.0, 0.2)), "repeats": rnd.choice((0.0, 0.1))}


def _pages(rnd: random.Random) -> HybridScenario:
    scenario = rnd.choice((COMPRESSED, LOW_RATIO, GROUPED, QSA))
    settings = replace(scenario.settings, overlap=rnd.random() < 0.4)
    return replace(scenario, settings=settings, **_others(rnd))


def _plain(rnd: random.Random) -> Scenario:
    attention, page = rnd.choice((("mha", 1), ("mha", 4), ("mla", 16), ("dsa", 64)))
    block = max(4, page)
    disk = rnd.choice((None, 200, 2000))
    draft = rnd.choice((0, 0, 1, 2))
    settings = _settings(rnd, page, mixed=not draft)
    return Scenario(
        "drawn",
        kind=PoolKind(attention, page, layers=rnd.choice((2, 3)), draft_layers=draft, algorithm="EAGLE"),
        block=block,
        hbm_tokens=16 * block if page == 64 else rnd.choice((240, 320)) // block * block,
        stretch=4 if page == 64 else 1,
        make_scheduler=VerifyingScheduler if draft else SimulatedScheduler,
        dram_blocks=max(280 // block, 8) * rnd.choice((1, 4)),
        disk_blocks=disk,
        disk_faults=rnd.choice((0.0, 0.1)) if disk else 0.0,
        stream=bool(disk) and rnd.random() < 0.3,
        threaded=rnd.random() < 0.5,
        memory=rnd.choice((20, 50)),
        settings=settings,
        **_others(rnd),
    )


FAMILIES: dict[str, Callable[[random.Random], HybridScenario | Scenario]] = {
    "windows": lambda rnd: _hybrid(rnd, window=True, states=False),
    "states": lambda rnd: _hybrid(rnd, window=False, states=True),
    "windows and states": lambda rnd: _hybrid(rnd, window=True, states=True),
    "pages": _pages,
    "plain": _plain,
}


def _sizes(rnd: random.Random, scenario: HybridScenario) -> Sizes:
    disk = rnd.choice((0, 1, 10)) * 200
    if scenario.kind.page == COMPRESSED.kind.page:
        full, other, disk = rnd.choice((16, 24)), rnd.choice((8, 12)), disk and 200
    else:
        full, other = rnd.choice((120, 600)), rnd.choice((60, 400))
    return Sizes(
        full=full,
        other=other,
        disk=disk,
        faults=rnd.choice((0.0, 0.1)) if disk else 0.0,
        backlog=1 << 26,
        threaded=rnd.random() < 0.5,
        hints=bool(scenario.prefetch),
        seed=rnd.randrange(1000),
    )


def run_for(minutes: float, first: int, failures: Path) -> int:
    """Run seeds until the time is over. Returns how many failed."""
    publish_server_args()
    end = time.monotonic() + 60 * minutes
    said, count, failed, loaded = time.monotonic(), 0, 0, 0
    families: Counter[str] = Counter()
    while time.monotonic() < end:
        crossing = draw(first + count)
        count += 1
        families.update(crossing.marks)
        try:
            loaded += crossing.run()
        except Exception:  # noqa: BLE001 - every fault is written down
            failed += 1
            print(f"FAILED {crossing}", flush=True)
            with failures.open("a", encoding="utf-8") as file:
                file.write(f"{crossing}\n{traceback.format_exc()}\n")
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            left = max(0.0, end - said) / 60
            print(
                f"{count} servers ({dict(families)}), {loaded} tokens loaded, {failed} failed, "
                f"{left:.1f} minutes left",
                flush=True,
            )
    print(f"{count} servers from seed {first}, {loaded} tokens loaded, {failed} failed")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--first", type=int, default=int(time.time()), help="the first seed")
    parser.add_argument("--failures", type=Path, default=Path("crossings-failed.txt"), help="a file")
    options = parser.parse_args()
    sys.exit(1 if run_for(options.minutes, options.first, options.failures) else 0)


if __name__ == "__main__":
    main()
