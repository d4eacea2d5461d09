"""How many announced sessions the same HBM serves as if they were there: whole sessions, or layers of all.

More sessions than HBM holds are announced; when nothing moves any more, each asks, one request at a time, and
asks again with other new tokens, which is an HBM hit of the same lengths. A session counts where the median
of its rounds is within 1.1 of the median of such hits. In between nothing else runs.

HBM and DRAM of this machine are the same memory; `slow_link` makes the way from one to the other as slow as
``LINK`` says. Its effect depends on the time to load a session's KV relative to the time to compute the new
tokens; the rows give both.
"""

from __future__ import annotations

import random
import statistics
from collections import defaultdict

from benchmarks.advisory.figures import WITHIN
from benchmarks.advisory.fleet import Fleet, System, progress
from benchmarks.advisory.play import Player, Scene
from benchmarks.advisory.talks import Ask, Talk, fresh
from benchmarks.lib.common import SEED, Report, percentile

LINK = 60e6
"""Bytes per second."""
LENGTH, NEW_TOKENS = 2048, 64
SETTLE_S = 1.5
"""Seconds beyond the transfer time of the link: KV that is promoted in pieces waits for the scheduler."""
MOVED = "sglang_ext_cache_layer_region_block_layers_total"


def measure_layers(
    report: Report, fleet: Fleet, system: System, url: str, sessions: int, rounds: int
) -> None:
    """A row per number of sessions."""
    rng = random.Random(SEED)
    pasts = [Talk(f"{system.word}-{number}", fresh(rng, LENGTH), ()) for number in range(sessions)]
    fleet.flush()
    Player(url, Scene("layers", SEED, 0.0)).warm(pasts, 2)
    fleet.settle()
    ratios: defaultdict[str, list[float]] = defaultdict(list)
    first: list[float] = []
    hits: list[float] = []
    in_hbm = 0
    for _ in range(rounds):
        asks = [tuple(Ask(fresh(rng, NEW_TOKENS), 1, 0.0, 0.0) for _ in range(2)) for _ in pasts]
        scene = Scene("layers", SEED, 0.0, hints=True)
        Player(url, scene).announced(
            [Talk(past.name, past.past, ask) for past, ask in zip(pasts, asks, strict=True)],
            SETTLE_S + sessions * LENGTH * fleet.token_bytes / LINK,
        )
        again = [one.ttft for one in scene.served if one.turn == 2 and one.hbm >= LENGTH]
        hit = statistics.median(again)
        hits += again
        for one in scene.served:
            if one.turn == 1:
                ratios[one.session].append(one.ttft / hit)
                first.append(one.ttft)
                in_hbm += one.hbm >= LENGTH
    medians = [statistics.median(found) for found in ratios.values()]
    served = sum(median <= WITHIN for median in medians)
    metrics = fleet.servers[0].metrics()
    report.add(
        "layers",
        system=system.name,
        announced=sessions,
        within_1_1=served,
        vs_hit_p50=percentile(medians, 50),
        vs_hit_max=max(medians),
        whole_in_hbm=in_hbm / rounds,
        hit_ms=1e3 * statistics.median(hits),
        ttft_p50_ms=1e3 * percentile(first, 50),
        load_ms=1e3 * LENGTH * fleet.token_bytes / LINK,
        layers_used=sum(v for k, v in metrics.items() if k.startswith(MOVED) and '"used"' in k),
    )
    progress(f"{system.name}: {served} of {sessions} announced sessions within {WITHIN} of an HBM hit")
