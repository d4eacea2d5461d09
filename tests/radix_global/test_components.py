"""Coverage rules against their definition token by token, row maps, and layer maps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_ext.radix_global import Holder
from sglang_ext.radix_global.components import (
    FULL,
    AtSnapshot,
    Component,
    EveryToken,
    LastWindow,
    LayerMap,
    PagedRows,
    RequestTail,
    TableRows,
    resume_points,
    slot_rows,
)
from sglang_ext.tiers import Tier

WINDOW = Component("window", LastWindow(5))
STATE = Component("state", AtSnapshot())
TAIL = Component("tail", RequestTail())
BLOCKS = st.lists(st.booleans(), max_size=12)


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
    flags[TAIL] = np.zeros(len(held), np.bool_)
    expected = [legal(by, blocks, block_tokens) for blocks in range(len(held) + 1)]
    assert resume_points(flags, block_tokens).tolist() == expected


def test_a_short_prompt_needs_its_whole_window_and_no_more() -> None:
    held = np.array([True, True, False, True, True, True], np.bool_)
    assert LastWindow(8).resume_points(held, 4).tolist() == [True, True, True, False, False, True, True]
    assert LastWindow(9).resume_points(held, 4).tolist() == [True, True, True, False, False, False, True]
    with pytest.raises(ValueError, match="at least 1"):
        LastWindow(0)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(1, 8))
def test_what_is_saved_at_an_end_lets_a_request_resume_there(
    end: int, evicted: int, block_tokens: int
) -> None:
    blocks = end // block_tokens
    for coverage in (EveryToken(), LastWindow(5), AtSnapshot()):
        held = np.zeros(blocks, np.bool_)
        kept = coverage.to_save(end, evicted, block_tokens)
        held[kept.start : kept.stop] = True
        if isinstance(coverage, LastWindow):
            assert all(block * block_tokens >= evicted for block in kept), "a row of it is gone"
            if evicted > max(0, blocks * block_tokens - 5) // block_tokens * block_tokens:
                continue
        if isinstance(coverage, AtSnapshot) and end % block_tokens:
            assert not kept, "the state stands for tokens behind the last whole block"
            continue
        assert coverage.resume_points(held, block_tokens)[blocks]
    assert not RequestTail().to_save(end, evicted, block_tokens)


def test_names_differ_by_component_and_those_of_full_are_the_blocks() -> None:
    blocks = [bytes([i]) * 16 for i in range(3)]
    space, other = b"n" * 16, b"m" * 16
    assert FULL.names(space, blocks) == blocks
    names = [*WINDOW.names(space, blocks), *STATE.names(space, blocks), *WINDOW.names(other, blocks), *blocks]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {16}


def test_rows_of_slots() -> None:
    slots = np.arange(64, 192)
    assert slot_rows(slots) is slots
    assert PagedRows(64)(slots).tolist() == [1, 2]
    table = np.zeros(256, np.int64)
    table[100:104] = [7, 9, 8, 3]
    rows = TableRows(table)
    assert rows(np.array([100, 102])).tolist() == [7, 8]
    table[102] = 5
    assert rows(np.array([100, 102])).tolist() == [7, 5], "read anew"


def test_a_layer_may_lie_in_two_components() -> None:
    layers = LayerMap.of({FULL: [5, 8], WINDOW: [6, 7], STATE: [5, 6]}, 5, 4)
    assert layers.n_layers == 4
    assert layers.parts == (
        ((FULL, 0), (STATE, 0)),
        ((WINDOW, 0), (STATE, 1)),
        ((WINDOW, 1),),
        ((FULL, 1),),
    )
    assert layers.of_component(WINDOW) == [1, 2]
    with pytest.raises(ValueError, match="outside of"):
        LayerMap.of({FULL: [4]}, 5, 4)
    with pytest.raises(ValueError, match="twice"):
        LayerMap.of({FULL: [5, 5]}, 5, 4)


def test_a_holder_is_of_a_component() -> None:
    full, window = Holder.of("a", 1, Tier.DRAM), Holder.of("a", 1, Tier.DRAM, WINDOW)
    assert full is not window
    assert (full.full, window.full) == (None, full)
    assert Holder.of("a", 1, Tier.DRAM, Component("window", LastWindow(5))) is window
    assert (full.closed, window.closed, window.divides) == (True, False, True)
    assert Holder.of("a", 1, Tier.DRAM, STATE).divides is False
    assert (repr(full), repr(window)) == ("a/1/DRAM", "a/1/DRAM window")
