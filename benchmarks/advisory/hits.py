"""How close a hinted request comes to an HBM hit: one request at a time, while others' KV is being moved.

More sessions than HBM holds take turns; the hint for each is some requests ahead of it. Each is at once asked
again with other new tokens: an HBM hit of the same lengths under the same conditions: moves for others run
beside one of the two, by turns. Through these hits goes the line that one takes by its lengths. The rows also
give how often HBM hits themselves are within 1.1 of the line, which bounds what hints can reach on this
machine. On a guest whose host takes cores away, the requests during which it took none are reported
separately.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.advisory.figures import Served, fit_hits, share_within
from benchmarks.advisory.fleet import Fleet, Tiers, progress
from benchmarks.advisory.play import Player, Scene
from benchmarks.advisory.talks import Ask, Talk, fresh
from benchmarks.lib.common import SEED, Report, percentile

LENGTHS = (512, 1024, 2048)
NEW_TOKENS = (32, 64, 128)
ANSWER_TOKENS = 2
AHEAD = 3
"""Requests between a hint and its request: on each of two instances, one or two."""
OVERBOOKED = 1.25
"""Tokens of all sessions over those that HBM holds."""


def measure_hits(report: Report, fleet: Fleet, url: str, rounds: int, tiers: Tiers) -> None:
    """Rows of TTFT, and the share of hinted requests within 1.1 of an HBM hit."""
    rng = random.Random(SEED)
    total = OVERBOOKED * tiers.hbm * len(fleet.servers)
    pasts: list[Talk] = []
    while sum(len(talk.past) for talk in pasts) < total:
        length = LENGTHS[len(pasts) % len(LENGTHS)]
        pasts.append(Talk(f"hit-{len(pasts)}", fresh(rng, length), ()))
    scene = Scene("hits", SEED, 0.0, hints=True)
    player = Player(url, scene)
    fleet.flush()
    player.warm(pasts, 2)
    fleet.settle()
    plan = [_asked(pasts[number % len(pasts)], rng) for number in range(rounds)]
    player.in_turn(plan, AHEAD)
    hinted = [one for one in scene.served if one.hinted and one.turn == 1]
    again = [one for one in scene.served if one.turn == 2 and one.hbm >= one.known - one.known % 16]
    line = fit_hits(again)
    share, itself = share_within(hinted, line), share_within(again, line)
    groups = {"hinted": hinted, "HBM hits": again}
    for name, found in list(groups.items()):
        for level, word in ((0.0, "alone"), (1.0, "beside moves")):
            groups[f"{name}, {word}"] = [one for one in found if one.level == level]
        # Core time taken by another guest of the same host is no property of a hint.
        groups[f"{name}, no core taken"] = [one for one in found if not one.stolen]
    for name, found in groups.items():
        if not found:
            continue
        relative = [one.ttft / line.seconds(max(1, one.prompt - one.known), one.known) for one in found]
        report.add(
            f"TTFT, {name}",
            requests=len(found),
            p50_ms=1e3 * percentile([one.ttft for one in found], 50),
            vs_hit_p50=percentile(relative, 50),
            vs_hit_p95=percentile(relative, 95),
            vs_hit_p99=percentile(relative, 99),
            within_1_1=share_within(found, line),
            in_hbm=_in_hbm(found),
        )
    progress(f"hits: {share:.0%} of hinted requests within 1.1 of an HBM hit, {itself:.0%} of HBM hits")
    report.summary["share_within_1_1_of_hbm_hit"] = share


def _asked(past: Talk, rng: random.Random) -> Talk:
    new = rng.choice(NEW_TOKENS)
    # The second is the HBM hit that the first is compared with.
    asks = tuple(Ask(fresh(rng, new), ANSWER_TOKENS, 0.0, 0.0) for _ in range(2))
    return Talk(past.name, past.past, asks)


def _in_hbm(found: Sequence[Served]) -> float:
    return sum(min(one.hbm, one.known) for one in found) / max(1, sum(one.known for one in found))
