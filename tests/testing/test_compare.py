"""Comparing answers: passed, failed, undecided; conversations from a seed."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from tests.support.compare import Answer, assert_same, random_conversations

ANSWER = Answer(
    tokens=[7, 8, 9],
    logprobs=[-1.0, -2.0, -3.0],
    prompt_tokens=100,
    cached_tokens=64,
    hbm_tokens=48,
    dram_tokens=16,
    disk_tokens=0,
    seconds=0.5,
    margins=[0.5, 0.5, 0.5],
)


def with_logprob(place: int, value: float) -> Answer:
    logprobs = list(ANSWER.logprobs)
    logprobs[place] = value
    return replace(ANSWER, logprobs=logprobs)


def with_token(place: int, token: int, **changes: Any) -> Answer:
    tokens = list(ANSWER.tokens)
    tokens[place] = token
    return replace(ANSWER, tokens=tokens, **changes)


def test_an_answer_is_read_from_the_servers_json() -> None:
    meta = {
        "output_token_logprobs": [[-1.0, 7, None], [None, 8, None]],
        "output_top_logprobs": [[[-1.0, 7, None], [-1.25, 5, None]], [[-2.0, 8, None], [-4.0, 6, None]]],
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "cached_tokens_details": {"device": 48, "host": 16},
        "e2e_latency": 0.5,
    }
    answer = Answer.of({"meta_info": meta})
    assert answer.tokens == [7, 8]
    assert answer.logprobs[0] == -1.0
    assert answer.logprobs[1] != answer.logprobs[1]
    assert (answer.prompt_tokens, answer.cached_tokens) == (100, 64)
    assert (answer.hbm_tokens, answer.dram_tokens) == (48, 16)
    assert answer.margins == [0.25, 2.0]
    bare = {key: meta[key] for key in meta if key not in {"output_top_logprobs", "cached_tokens_details"}}
    without = Answer.of({"meta_info": bare})
    assert (without.margins, without.hbm_tokens, without.dram_tokens) == ([], 0, 0)


@pytest.mark.parametrize("got", [ANSWER, with_logprob(1, -2.00009), replace(ANSWER, hbm_tokens=0, seconds=9)])
def test_what_is_the_same(got: Answer) -> None:
    assert assert_same(ANSWER, got, atol=1e-4) == 3


@pytest.mark.parametrize(
    ("got", "message"),
    [
        (with_token(1, 5), "token 1 is 5, not 8"),
        (with_logprob(2, -3.0002), "token 2 differs by 2.00e-04, more than 1e-04"),
        (with_logprob(0, nan), "token 0 differs by nan"),
        (with_logprob(0, -inf), "token 0 differs by inf"),
        (replace(ANSWER, tokens=[7, 8]), "2 tokens instead of 3"),
        (replace(ANSWER, tokens=[]), "0 tokens instead of 3"),
    ],
)
def test_what_differs_is_shown_with_what_was_reused(got: Answer, message: str) -> None:
    with pytest.raises(AssertionError, match=r"100 prompt tokens, 48 from HBM, 16 from DRAM") as caught:
        assert_same(ANSWER, got, atol=1e-4)
    assert message in str(caught.value)


def test_a_tie_ends_the_comparison() -> None:
    tied = replace(ANSWER, margins=[0.5, 1e-5, 0.5])
    other = with_token(1, 5, margins=[0.5, 2e-5, 0.7], logprobs=[-1.0, -2.00001, -9.0])
    assert assert_same(tied, other, atol=1e-4) == 1


@pytest.mark.parametrize(
    ("expected_margin", "got_margin", "logprob"),
    [(0.5, 1e-5, -2.0), (1e-5, 0.5, -2.0), (1e-5, 1e-5, -2.1), (nan, 1e-5, -2.0)],
    ids=["clear before", "clear now", "another log probability", "unknown"],
)
def test_what_looks_like_a_tie_and_is_none(expected_margin: float, got_margin: float, logprob: float) -> None:
    expected = replace(ANSWER, margins=[0.5, expected_margin, 0.5])
    got = with_token(1, 5, margins=[0.5, got_margin, 0.5], logprobs=[-1.0, logprob, -3.0])
    with pytest.raises(AssertionError, match="token 1 is 5, not 8"):
        assert_same(expected, got, atol=1e-4)


def test_without_margins_there_is_no_tie() -> None:
    with pytest.raises(AssertionError, match="token 1 is 5, not 8"):
        assert_same(replace(ANSWER, margins=[]), with_token(1, 5, margins=[]), atol=1e-4)


def test_conversations_come_from_their_seed() -> None:
    def make(seed: int) -> list[list[list[int]]]:
        return random_conversations(
            seed=seed, count=40, turns=(1, 4), tokens=(3, 50), system_tokens=20, vocabulary=(100, 200)
        )

    conversations = make(1)
    assert conversations == make(1)
    assert conversations != make(2)
    assert {len(turns) for turns in conversations} == {1, 2, 3, 4}
    assert len({tuple(turns[0][:20]) for turns in conversations}) == 2
    firsts = [turns[0][20:] for turns in conversations]
    added = firsts + [turn for turns in conversations for turn in turns[1:]]
    assert min(map(len, added)) >= 3
    assert max(map(len, added)) <= 50
    assert all(100 <= token < 200 for turns in conversations for turn in turns for token in turn)
