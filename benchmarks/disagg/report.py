"""The report of the benchmark of prefill and decode apart: rows, and the summary.

Every turn was asked of every design, so two designs are compared by pairs: the ratio of their means, with
the span in which it lies when the pairs are drawn anew (90 % of a bootstrap), and the median of the pairs'
ratios, which one disturbed turn does not move.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.disagg.servers import ROUTED, STOCK, STOCK_LATE, STOCK_ROUTED, TRUTH, Design
from benchmarks.lib.common import SEED, Report, percentile
from sglang_ext.stages import STAGES, StageTimes

LATE = 3
"""From this turn on a conversation has grown beyond its first prompts (the aims' "third turn and later")."""
GROWING = ("sharegpt", "react")
"""Loads whose turns continue the whole conversation."""
BLOCK = 16
DRAWS = 1000

SUMMARY = (
    "ttft_c3_vs_c1_turn3",
    "jct_c3_vs_basic",
    "ttft_c3_vs_stock_mooncake_tcp",
    "jct_c3_vs_stock_mooncake_tcp",
    "bytes_per_turn_growth_c1",
    "bytes_per_turn_growth_c3",
    "pull_vs_push_jct",
    "ttft_new_pair_vs_warm",
    "ttft_split_16k_vs_alone",
    "ttft_2p1d_fetched_vs_computed",
    "ttft_spilled_vs_not",
    "wrong_answers",
)
"""The keys of the summary, in each form of the benchmark; a value that was not measured is null."""


@dataclass
class Turn:
    """Durations of one turn in seconds, and its sizes in bytes. added: tokens that are new in its prompt."""

    load: str
    session: str
    number: int
    prompt: int
    added: int
    ttft: float
    jct: float
    tpot: float
    cached: int
    sent: float
    stages: StageTimes | None = None


@dataclass
class Leg:
    """A design, and the results measured with it."""

    design: Design
    turns: list[Turn] = field(default_factory=list)
    wrong: int = 0


@dataclass(frozen=True)
class Compared:
    """Two designs over the turns that both were asked."""

    ratio: float
    low: float
    high: float
    pairs_median: float
    pairs: int


def compare(
    over: Leg, under: Leg, what: str, chosen: Callable[[Turn], bool] = lambda _: True
) -> Compared | None:
    """A quantity of turns by pairs; None when no turn was asked of both."""
    other = {(t.load, t.session, t.number): t for t in under.turns}
    pairs = [
        (float(getattr(turn, what)), float(getattr(other[key], what)))
        for turn in over.turns
        if chosen(turn) and (key := (turn.load, turn.session, turn.number)) in other
    ]
    if not pairs or not sum(b for _, b in pairs):
        return None
    rng = random.Random(SEED)
    drawn = [_of_means([rng.choice(pairs) for _ in pairs]) for _ in range(DRAWS)]
    return Compared(
        _of_means(pairs),
        percentile(drawn, 5),
        percentile(drawn, 95),
        statistics.median(a / b for a, b in pairs),
        len(pairs),
    )


def _of_means(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(a for a, _ in pairs) / sum(b for _, b in pairs)


def late(turn: Turn) -> bool:
    """Whether a turn is one of those in which 3 is to be ahead of 1."""
    return turn.number >= LATE and turn.load in GROWING


def growth(leg: Leg | None) -> float | None:
    """Bytes sent per token that the user added in the later turns of conversations over those in the earlier
    ones, from the second turn on, where history begins. Both sides round to blocks: half of one is counted as
    added.
    """
    if leg is None:
        return None
    turns = [turn for turn in leg.turns if turn.load == GROWING[0] and turn.number > 1]
    numbers = sorted({turn.number for turn in turns})
    if len(numbers) < 2:
        return None

    def per_token(chosen: Sequence[int]) -> float:
        mine = [turn for turn in turns if turn.number in chosen]
        return sum(turn.sent for turn in mine) / sum(turn.added + BLOCK / 2 for turn in mine)

    half = len(numbers) // 2
    first = per_token(numbers[:half])
    return per_token(numbers[-half:]) / first if first else None


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Slope and coefficient of determination of the straight line through points; None below three."""
    if len(points) < 3:
        return None
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if len(set(xs)) < 2:
        return None
    slope, offset = statistics.linear_regression(xs, ys)
    mean = statistics.mean(ys)
    spread = sum((y - mean) ** 2 for y in ys)
    missed = sum((y - offset - slope * x) ** 2 for x, y in points)
    return slope, 1 - missed / spread if spread else 0.0


def report_on(report: Report, legs: Sequence[Leg]) -> None:
    """Rows of times by load and design, of bytes and reuse by turn, of pairs, and the summary."""
    _times(report, legs)
    for leg in legs:
        for load in sorted({turn.load for turn in leg.turns}):
            told = [(turn.stages, turn.jct) for turn in leg.turns if turn.load == load]
            breakdown(report, f"{load}, breakdown", leg.design.name, told)
    _turns(report, legs)
    by = {leg.design.name: leg for leg in legs}
    through = (
        (ROUTED.name, STOCK_ROUTED.name) if {ROUTED.name, STOCK_ROUTED.name} <= set(by) else ("3", STOCK)
    )
    _pairs(report, by, through)

    def of(over: str, under: str, what: str, chosen: Callable[[Turn], bool] = lambda _: True) -> float | None:
        if over not in by or under not in by:
            return None
        found = compare(by[over], by[under], what, chosen)
        return None if found is None else found.ratio

    report.summary |= {
        "ttft_c3_vs_c1_turn3": of("3", "1", "ttft", late),
        "jct_c3_vs_basic": of("3", "basic", "jct"),
        "ttft_c3_vs_stock_mooncake_tcp": of(*through, "ttft"),
        "jct_c3_vs_stock_mooncake_tcp": of(*through, "jct"),
        "bytes_per_turn_growth_c1": growth(by.get("1")),
        "bytes_per_turn_growth_c3": growth(by.get("3")),
        "wrong_answers": sum(leg.wrong for leg in legs),
    }


def complete_summary(report: Report, why: Mapping[str, str]) -> None:
    """Give the summary exactly its keys, in their order; a note explains each null.

    Args:
        why: reasons, by key; else it was not chosen.
    """
    report.summary = {key: report.summary.get(key) for key in SUMMARY}
    for key, value in report.summary.items():
        if value is None:
            report.note(f"{key}: {why.get(key, 'not measured in this form, or by the chosen options')}")


def breakdown(
    report: Report, case: str, design: str, asked: Sequence[tuple[StageTimes | None, float]]
) -> None:
    """Where the time of requests goes, in means (KVDirect, figures 3 and 14).

    Args:
        asked: (stages, seconds to the last token). The rest, outside all stages, is HTTP, tokenizer and
            detokenizer.
    """
    told = [(stages, jct) for stages, jct in asked if stages is not None]
    if not told:
        return
    means = {
        f"{stage}_ms": statistics.mean(dict(stages.items())[stage] for stages, _ in told) * 1e3
        for stage in STAGES
    }
    rest = statistics.mean(jct - stages.total for stages, jct in told) * 1e3
    report.add(case, design=design, **means, outside_ms=rest, requests=len(told))


def _times(report: Report, legs: Sequence[Leg]) -> None:
    for load in sorted({turn.load for leg in legs for turn in leg.turns}):
        for leg in legs:
            turns = [turn for turn in leg.turns if turn.load == load]
            if not turns:
                continue
            values: dict[str, float] = {}
            for what in ("ttft", "tpot", "jct"):
                seconds = [getattr(turn, what) for turn in turns]
                values |= {
                    f"{what}_mean_ms": statistics.mean(seconds) * 1e3,
                    f"{what}_p50_ms": percentile(seconds, 50) * 1e3,
                    f"{what}_p99_ms": percentile(seconds, 99) * 1e3,
                }
            report.add(load, design=leg.design.name, **values, turns=len(turns))


def _turns(report: Report, legs: Sequence[Leg]) -> None:
    for load in GROWING:
        for leg in legs:
            mine = [turn for turn in leg.turns if turn.load == load]
            for number in sorted({turn.number for turn in mine}):
                turns = [turn for turn in mine if turn.number == number]
                cached, prompt = (
                    statistics.mean(getattr(t, at) for t in turns) for at in ("cached", "prompt")
                )
                report.add(
                    load,
                    design=leg.design.name,
                    turn=number,
                    prompt_tokens=prompt,
                    cached_tokens=cached,
                    cached_share=cached / prompt,
                    sent_kib=statistics.mean(t.sent for t in turns) / 1024,
                    ttft_ms=statistics.mean(t.ttft for t in turns) * 1e3,
                )
        for leg in legs:
            mine = [turn for turn in leg.turns if turn.load == load]
            # From the second turn on: every session but the first finds the prefix that all sessions share.
            means = [
                (float(number), statistics.mean(t.cached for t in mine if t.number == number))
                for number in sorted({turn.number for turn in mine if turn.number > 1})
            ]
            found = line(means)
            if found is not None and leg.design.name != TRUTH:
                report.add(
                    load, design=leg.design.name, cached_tokens_per_turn=found[0], of_a_straight_line=found[1]
                )


def _pairs(report: Report, by: Mapping[str, Leg], through: tuple[str, str]) -> None:
    asked = [
        ("3", "1", "ttft", "turn 3 and later", late),
        *(("3", "1", "ttft", f"{load}, turn 3 and later", _late_in(load)) for load in GROWING),
        ("3", "2", "ttft", "turn 3 and later", late),
        ("2", "1", "ttft", "all", None),
        ("3", "2", "ttft", "all", None),
        ("2", "1", "jct", "all", None),
        ("3", "2", "jct", "all", None),
        ("3", "basic", "jct", "all", None),
        ("3", "basic", "ttft", "all", None),
        ("3", "colocated-caching", "ttft", "all", None),
        (*through, "ttft", "all", None),
        (*through, "jct", "all", None),
        *(("3", STOCK_LATE, what, "all", None) for what in ("ttft", "jct")),
        *((STOCK, STOCK_LATE, what, "all", None) for what in ("ttft", "jct")),
    ]
    for over, under, what, name, chosen in asked:
        if over not in by or under not in by:
            continue
        found = compare(by[over], by[under], what, chosen or (lambda _: True))
        if found is not None:
            report.add(
                name,
                what=what,
                design=over,
                over=under,
                ratio=found.ratio,
                low=found.low,
                high=found.high,
                pairs_median=found.pairs_median,
                pairs=found.pairs,
            )


def _late_in(load: str) -> Callable[[Turn], bool]:
    return lambda turn: late(turn) and turn.load == load
