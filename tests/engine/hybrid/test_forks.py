"""Where a prefill is cut for a state: the rule alone, and what becomes of SGLang's choice of a chunk."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.managers.schedule_policy import AddReqResult

from sglang_ext.engine.hybrid.forks import PASS_TOKENS, TAIL, Forks
from sglang_ext.patches.adapter.hybrid.chunks import Chunks

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


@pytest.mark.parametrize(
    ("what", "start", "prompt", "shared", "breakpoints", "expected"),
    [
        ("a breakpoint", 0, 700, 0, (300,), 300),
        ("the first of several, in any order", 0, 2000, 0, (900, 300), 300),
        ("the next one", 300, 2000, 0, (900, 300), 900),
        ("before a fork", 0, 2000, 500, (300,), 300),
        ("behind a fork", 0, 2000, 500, (900,), 500),
        ("too near the beginning", 0, 700, 0, (99,), None),
        ("shortly behind a state", 450, 700, 0, (500,), None),
        ("behind the end", 0, 700, 0, (700, 5000), None),
        ("behind all of them", 900, 2000, 0, (900, 300), 2000 - TAIL),
    ],
)
def test_a_chunk_ends_at_a_breakpoint(
    what: str, start: int, prompt: int, shared: int, breakpoints: tuple[int, ...], expected: int | None
) -> None:
    assert FORKS.cut(start, prompt, shared, breakpoints=breakpoints) == expected, what


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
    assert Forks.of(75 << 20, 0).known == PASS_TOKENS
    assert Forks.of(1 << 30, 1 << 10).ahead == Forks.of(1 << 30, 1 << 10).known


@pytest.mark.parametrize(("start", "expected"), [(0, False), (80, False), (92, True), (99, True)])
def test_a_state_shortly_before_the_end_stands_for_that_at_the_end(start: int, expected: bool) -> None:
    assert Forks.replaces_end(start, 100) == expected


@dataclass(frozen=True)
class Admission:
    """SGLang's choice of a prompt's first chunk."""

    prefix_len: int = 0
    extend_len: int = 1000
    max_new_tokens: int = 16
    is_chunked: bool = False


def admitted(admission: Any, *, chunk: int | None = 8192, busy: bool = False, grid: int | None = None) -> Any:
    """The outcome for a prompt of 1000 tokens."""
    chunks = Chunks(FORKS)
    req = SimpleNamespace(
        full_untruncated_fill_ids=range(1000),
        sampling_params=SimpleNamespace(max_new_tokens=16),
        skip_radix_cache_insert=False,
        positional_embed_overrides=None,
    )
    adder: Any = SimpleNamespace(rem_chunk_tokens=chunk, new_chunked_req=None)
    about = {"has_chunked_req": busy, "truncation_align_size": grid}
    return chunks.admit(lambda *_, **__: admission, adder, req, **about)


def test_a_cut_prompt_reserves_the_memory_of_its_rest() -> None:
    assert admitted(Admission()) == Admission(0, 1000 - TAIL, TAIL + 16, is_chunked=True)


def test_a_cut_is_aligned_as_other_chunks_are() -> None:
    assert admitted(Admission(), grid=64).extend_len == 960
    assert admitted(Admission(), grid=1024) == Admission()


def test_a_chunk_that_ends_before_the_cut_stays() -> None:
    chunk = Admission(extend_len=512, max_new_tokens=0, is_chunked=True)
    assert admitted(chunk, chunk=512) == chunk


def test_without_chunked_prefill_nothing_is_cut() -> None:
    assert admitted(Admission(), chunk=None) == Admission()


def test_one_prompt_at_a_time_is_in_chunks() -> None:
    assert admitted(Admission(), busy=True) == Admission()
    assert admitted(Admission(is_chunked=True), busy=True) is AddReqResult.OTHER
    assert admitted(AddReqResult.NO_TOKEN) is AddReqResult.NO_TOKEN
