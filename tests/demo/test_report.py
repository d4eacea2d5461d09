"""The demo's report, from numbers."""

from __future__ import annotations

import dataclasses

from examples.demo.client import Answer
from examples.demo.report import COLUMNS, REASONS, Turn, header, line, summarize, summary_lines

CACHED = Answer(
    text="yes",
    instance="http://127.0.0.1:1",
    reason="prefix",
    prompt_tokens=1000,
    hbm_tokens=600,
    dram_tokens=300,
    first_token_s=0.1,
)
PLAIN = dataclasses.replace(CACHED, hbm_tokens=0, dram_tokens=0, first_token_s=0.4)


def turn(number: int, **cached: object) -> Turn:
    return Turn("A", number, "server-1", dataclasses.replace(CACHED, **cached), PLAIN)  # type: ignore[arg-type]


def test_a_line_has_a_cell_under_each_title() -> None:
    cells = [cell for cell in line(turn(2)).split("  ") if cell]
    assert [cell.strip() for cell in cells] == [
        *("A", "2", "server-1", "it holds most of it", "1000", "600", "300", "100", "100", "400 ms")
    ]
    assert line(turn(2)).index("600") + 3 == header().index("HBM") + 3


def test_every_reason_fits_into_its_column() -> None:
    width = dict(COLUMNS)["chosen because"]
    assert all(len(text) <= width for text in REASONS.values())
    assert "a new reason" in line(turn(1, reason="a new reason"))


def test_sums_and_medians() -> None:
    summary = summarize([turn(1), turn(2, first_token_s=0.2, text="no"), turn(3, dram_tokens=0)])
    assert (summary.turns, summary.prompt_tokens) == (3, 3000)
    assert (summary.hbm_tokens, summary.dram_tokens, summary.computed_tokens) == (1800, 600, 600)
    assert summary.plain_computed_tokens == 3000
    assert summary.ratio == 4.0
    assert summary.same_answers == 2


def test_the_tiers_are_named_with_their_tokens_and_the_comparison_comes_last() -> None:
    lines = summary_lines(summarize([turn(1)]))
    assert any("HBM" in text and "600 tokens" in text for text in lines)
    assert any("DRAM" in text and "300 tokens" in text for text in lines)
    assert lines[-1].startswith(
        "With caching off, the same 1 turns computed 1,000 prompt tokens instead of 100"
    )
    assert lines[-1].endswith("400 ms instead of 100 ms (median ratio 4.0).")
