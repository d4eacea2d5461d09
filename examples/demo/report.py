"""The output of the demo: a line per turn, the sums, and the comparison. Numbers in, text out."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from examples.demo.client import Answer

COLUMNS = (
    ("conv.", 5),
    ("turn", 4),
    ("instance", 8),
    ("chosen because", 36),
    ("prompt", 6),
    ("HBM", 6),
    ("DRAM", 6),
    ("computed", 8),
    ("TTFT ms", 7),
    ("caching off", 11),
)
REASONS = {
    "no-prefix": "no server holds any of it",
    "short-prefix": "little of it is held: spread",
    "prefix": "it holds most of it",
    "prefix-shared": "it is the least busy of the holders",
    "rebalanced": "the holder is too busy",
}
"""The router's reasons in words; others are shown as the router reports them."""

TEXT_COLUMNS = 4
"""The first ones are aligned left, the numbers right."""


@dataclass(frozen=True)
class Turn:
    """One turn, sent to the cluster and to the cluster without a cache."""

    conversation: str
    number: int
    """From 1."""
    instance: str
    """Name of the server that was chosen."""
    cached: Answer
    plain: Answer


@dataclass(frozen=True)
class Summary:
    """The whole run in numbers; tokens are prompt tokens."""

    turns: int
    prompt_tokens: int
    hbm_tokens: int
    dram_tokens: int
    computed_tokens: int
    plain_computed_tokens: int
    median_first_token_s: float
    plain_median_first_token_s: float
    ratio: float
    """Median over the turns of (TTFT with caching off) / (TTFT)."""
    same_answers: int


def header() -> str:
    """The line of titles."""
    return _row([title for title, _ in COLUMNS])


def line(turn: Turn) -> str:
    """One turn."""
    answer = turn.cached
    return _row(
        [
            turn.conversation,
            str(turn.number),
            turn.instance,
            REASONS.get(answer.reason, answer.reason),
            str(answer.prompt_tokens),
            str(answer.hbm_tokens),
            str(answer.dram_tokens),
            str(answer.computed_tokens),
            f"{answer.first_token_s * 1000:.0f}",
            f"{turn.plain.first_token_s * 1000:.0f} ms",
        ]
    )


def _row(cells: Sequence[str]) -> str:
    padded = [
        cell[:width].ljust(width) if position < TEXT_COLUMNS else cell.rjust(width)
        for position, (cell, (_, width)) in enumerate(zip(cells, COLUMNS, strict=True))
    ]
    return "  ".join(padded).rstrip()


def summarize(turns: Sequence[Turn]) -> Summary:
    """The sums of a run of at least one turn."""
    return Summary(
        turns=len(turns),
        prompt_tokens=sum(turn.cached.prompt_tokens for turn in turns),
        hbm_tokens=sum(turn.cached.hbm_tokens for turn in turns),
        dram_tokens=sum(turn.cached.dram_tokens for turn in turns),
        computed_tokens=sum(turn.cached.computed_tokens for turn in turns),
        plain_computed_tokens=sum(turn.plain.computed_tokens for turn in turns),
        median_first_token_s=statistics.median(turn.cached.first_token_s for turn in turns),
        plain_median_first_token_s=statistics.median(turn.plain.first_token_s for turn in turns),
        ratio=statistics.median(turn.plain.first_token_s / turn.cached.first_token_s for turn in turns),
        same_answers=sum(turn.cached.text == turn.plain.text for turn in turns),
    )


def summary_lines(summary: Summary) -> list[str]:
    """The end of the report; the comparison is the last line."""
    total = summary.prompt_tokens

    def tokens(count: int) -> str:
        return f"{count:>7,} tokens {count / total:>5.0%}"

    return [
        f"Where the {total:,} prompt tokens of {summary.turns} turns came from:",
        f"  HBM       {tokens(summary.hbm_tokens)}   (the engine's KV pool; on a CPU host it is in RAM too)",
        f"  DRAM      {tokens(summary.dram_tokens)}   (left the pool, loaded back)",
        f"  computed  {tokens(summary.computed_tokens)}",
        f"Answers equal to those with caching off: {summary.same_answers} of {summary.turns}.",
        f"With caching off, the same {summary.turns} turns computed {summary.plain_computed_tokens:,} prompt "
        f"tokens instead of {summary.computed_tokens:,}, and the median time to first token was "
        f"{summary.plain_median_first_token_s * 1000:.0f} ms instead of "
        f"{summary.median_first_token_s * 1000:.0f} ms (median ratio {summary.ratio:.1f}).",
    ]
