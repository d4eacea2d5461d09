"""Coverage rules against their definition, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.engine.hybrid.components import (
    FULL,
    AtSnapshot,
    Component,
    EveryToken,
    LastWindow,
    resume_points,
)

WINDOW = Component("window", LastWindow(5))
STATE = Component("state", AtSnapshot())


def legal(held: dict[Component, list[bool]], blocks: int, block_tokens: int) -> bool:
    """Whether a request may resume after so many blocks, by looking at each token."""
    tokens = blocks * block_tokens

    def has(component: Component, token: int) -> bool:
        return held[component][token // block_tokens]

    full = all(has(FULL, token) for token in range(tokens))
    window = all(has(WINDOW, token) for token in range(max(0, tokens - WINDOW.coverage.tokens), tokens))
    state = blocks == 0 or held[STATE][blocks - 1]
    return full and window and state


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=12), st.integers(1, 6))
def test_resume_points_are_those_at_which_every_row_is_there(
    held: list[tuple[bool, bool, bool]], block_tokens: int
) -> None:
    # Mostly present, so that long prefixes occur.
    by = {
        part: [row[i] or at % 3 == 0 for at, row in enumerate(held)]
        for i, part in enumerate((FULL, WINDOW, STATE))
    }
    flags = {part: np.array(each, np.bool_) for part, each in by.items()}
    expected = [legal(by, blocks, block_tokens) for blocks in range(len(held) + 1)]
    assert resume_points(flags, block_tokens).tolist() == expected


def test_a_short_prompt_needs_its_whole_window_and_no_more() -> None:
    held = np.array([True, True, False, True, True, True], np.bool_)
    assert LastWindow(8).resume_points(held, 4).tolist() == [True, True, True, False, False, True, True]
    assert LastWindow(9).resume_points(held, 4).tolist() == [True, True, True, False, False, False, True]
    with pytest.raises(ValueError, match="at least 1"):
        LastWindow(0)


@given(st.integers(1, 20), st.integers(1, 8))
def test_the_blocks_before_an_end_let_a_request_resume_there(blocks: int, block_tokens: int) -> None:
    for coverage in (EveryToken(), LastWindow(5), AtSnapshot()):
        held = np.zeros(blocks, np.bool_)
        needed = coverage.blocks(block_tokens) or blocks
        held[-needed:] = True
        assert coverage.resume_points(held, block_tokens)[blocks]
        held[-min(needed, blocks)] = False
        assert not coverage.resume_points(held, block_tokens)[blocks], "one block fewer would do"
