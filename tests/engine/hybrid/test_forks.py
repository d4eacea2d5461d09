"""Where a prefill is cut for a state: the rule alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.engine.hybrid.forks import PASS_TOKENS, TAIL, Forks

FORKS = Forks(known=100, ahead=800)
LENGTHS = st.integers(0, 3000)


@pytest.mark.parametrize(
    ("what", "start", "prompt", "shared", "forks", "expected"),
    [
        ("a short prompt that comes once", 0, 700, 0, False, None),
        ("a long prompt that comes once", 0, 1000, 0, False, 1000 - TAIL),
        ("a short prompt that is likely to be forked from", 0, 700, 0, True, 700 - TAIL),
        ("too short for its forward pass", 0, 100, 0, True, None),
        ("a repeat without a state", 0, 700, 699, False, 700 - TAIL),
        ("a fork without a state", 0, 2000, 500, False, 500),
        ("the same, behind the cut", 500, 2000, 500, False, 2000 - TAIL),
        ("a fork shortly behind a state", 450, 600, 500, False, None),
        ("a repeat with a state", 692, 700, 699, True, None),
        ("a short turn behind a long history", 5000, 5300, 5000, False, None),
        ("a long turn behind a long history", 5000, 6300, 5000, False, 6300 - TAIL),
    ],
)
def test_where_a_chunk_ends(
    what: str, start: int, prompt: int, shared: int, forks: bool, expected: int | None
) -> None:
    assert FORKS.cut(start, prompt, shared, forks=forks) == expected, what


@given(LENGTHS, LENGTHS, LENGTHS, st.booleans())
def test_a_cut_is_inside_the_prompt_and_worth_it(start: int, prompt: int, shared: int, forks: bool) -> None:
    cut = FORKS.cut(start, prompt, shared, forks=forks)
    if cut is not None:
        assert start + FORKS.known <= cut <= prompt - TAIL
        # So many cuts at most: at the fork, and near the end.
        again = FORKS.cut(cut, prompt, shared, forks=forks)
        assert again is None or (cut == shared and again == prompt - TAIL)


def test_a_state_that_takes_the_memory_of_many_tokens_must_save_more() -> None:
    assert Forks.of(75 << 20, 24 << 10).known == (75 << 20) // (8 * (24 << 10)) == 400
    assert Forks.of(1 << 20, 24 << 10).known == PASS_TOKENS
    assert Forks.of(1 << 20, 0).ahead >= Forks.of(1 << 20, 0).known


@pytest.mark.parametrize(("start", "expected"), [(0, False), (80, False), (92, True), (99, True)])
def test_a_state_shortly_before_the_end_stands_for_that_at_the_end(start: int, expected: bool) -> None:
    assert Forks.replaces_end(start, 100) == expected
