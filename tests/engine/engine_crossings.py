"""Servers of the oracle, drawn at random: a family of models, its tiers, how it runs, and its traffic.

Traffic changes weights, retracts, aborts and flushes, for several tenants. Equal seeds draw equal servers.

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

if __name__ == "__main__":
    import conftest  # noqa: F401 - makes SGLang importable on a CPU

from engine_hybrid_store import Sizes, StoreBelow
from engine_hybrids import HybridKind, HybridRank, HybridScenario, drive
from engine_page_pools import COMPRESSED, GROUPED, LOW_RATIO
from engine_pools import PoolKind, publish_server_args
from engine_scheduler import Settings
from engine_simulation import Rank, Scenario, run
from test_oracle_ranks import on_two, traffic

from sglang_ext.patches.adapter.hybrid.cache import HybridRadixCache

STEPS = 100
PROGRESS_S = 30.0


@dataclass(frozen=True)
class Crossing:
    """The server that a seed draws.

    sizes: of the tiers of each rank; empty for plain models, whose scenario says them.
    """

    seed: int
    family: str
    scenario: HybridScenario | Scenario
    sizes: tuple[Sizes, ...] = ()

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.family}, {self.scenario!r}, {self.sizes}"

    def run(self) -> int:
        """Serve random traffic, with all checks after each pass. Returns how many tokens were loaded."""
        scenario = self.scenario
        if isinstance(scenario, Scenario):
            with Rank(scenario, pace=random.Random(self.seed)) as rank:
                run(rank, self.seed, STEPS)
                return rank.scheduler.loaded_tokens
        if len(self.sizes) == 2:
            ranks = on_two(scenario, self.sizes, traffic(self.seed, STEPS))
            return ranks[0].scheduler.loaded
        (sizes,) = self.sizes

        with HybridRank(
            scenario,
            make_cache=HybridRadixCache,
            make_below=lambda pools, cache: StoreBelow(pools, cache, sizes),
        ) as hybrid:
            drive(hybrid, self.seed, STEPS)
            return hybrid.scheduler.loaded


def draw(seed: int) -> Crossing:
    """The server of a seed."""
    rnd = random.Random(seed)
    family = rnd.choices(list(FAMILIES), [1 if each == "pages" else 3 for each in FAMILIES])[0]
    scenario = FAMILIES[family](rnd)
    if isinstance(scenario, Scenario):
        return Crossing(seed, family, scenario)
    ranks = rnd.choice((1, 1, 2))
    sizes = tuple(_sizes(rnd, scenario) for _ in range(ranks))
    if not all(each.disk for each in sizes):  # all ranks have a disk, or none
        sizes = tuple(replace(each, disk=0) for each in sizes)
    return Crossing(seed, family, replace(scenario, tree_core="python"), sizes)


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
    )


def _pages(rnd: random.Random) -> HybridScenario:
    scenario = rnd.choice((COMPRESSED, LOW_RATIO, GROUPED))
    return replace(scenario, settings=replace(scenario.settings, overlap=rnd.random() < 0.4))


def _plain(rnd: random.Random) -> Scenario:
    attention, page = rnd.choice((("mha", 1), ("mha", 4), ("mla", 16), ("dsa", 64)))
    block = max(4, page)
    disk = rnd.choice((None, 200, 2000))
    return Scenario(
        "drawn",
        kind=PoolKind(attention, page, layers=rnd.choice((2, 3)), draft_layers=rnd.choice((0, 0, 1, 2))),
        block=block,
        hbm_tokens=max(rnd.choice((240, 320)) // block, 8) * block,
        dram_blocks=max(280 // block, 8) * rnd.choice((1, 4)),
        disk_blocks=disk,
        disk_faults=rnd.choice((0.0, 0.1)) if disk else 0.0,
        stream=bool(disk) and rnd.random() < 0.3,
        threaded=rnd.random() < 0.5,
        prefetch=rnd.choice((0.0, 0.2)),
        memory=rnd.choice((20, 50)),
        settings=_settings(rnd, page, mixed=True),
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
        families[crossing.family] += 1
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
