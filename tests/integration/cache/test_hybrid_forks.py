"""Prompts that repeat and fork find states at a server: SGLang's ``no_buffer`` alone keeps none for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sglang_ext.engine.hybrid.forks import AHEAD, PASS_TOKENS, TAIL
from sglang_ext.keys import KEEP_HEADER
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

LONG, SHORT = AHEAD * PASS_TOKENS + 100, 600
"""A prompt whose state is kept ahead of a repeat, and a shorter one, long enough where a repeat is known."""
GetServer = Callable[[ServerSpec], ServerProcess]


@pytest.fixture(scope="module")
def server(get_server: GetServer) -> ServerProcess:
    return get_server(
        ServerSpec(
            model="tiny-gdn",
            flags=(
                *("--radix-cache-backend", "global", "--kv-check", "--kv-dram-size", "64MB"),
                *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
                *("--page-size", "1", "--max-total-tokens", "12000", "--max-running-requests", "4"),
                *("--max-mamba-cache-size", "24", "--chunked-prefill-size", "4096"),
            ),
            environment={"SGLANG_MAMBA_CONV_DTYPE": "float32", **STRICT},
        )
    )


def tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 30_000) for _ in range(count)]


def ask(server: ServerProcess, prompt: list[int], **fields: Any) -> Answer:
    return server.generate(prompt, max_new_tokens=8, **fields)


def test_a_long_prompt_is_found_when_it_repeats(server: ServerProcess) -> None:
    prompt = tokens(LONG, seed=1)
    cold, warm = ask(server, prompt), ask(server, prompt)
    assert (cold.cached_tokens, warm.cached_tokens) == (0, LONG - TAIL)
    assert_same(cold, warm)


def test_a_short_prompt_is_found_from_its_second_repeat_on(server: ServerProcess) -> None:
    prompt = tokens(SHORT, seed=2)
    first, second, third = (ask(server, prompt) for _ in range(3))
    assert [each.cached_tokens for each in (first, second, third)] == [0, 0, SHORT - TAIL]
    assert_same(first, second)
    assert_same(first, third)


def test_several_answers_share_a_prompt(server: ServerProcess) -> None:
    """SGLang computes the prompt once before it computes ``n`` answers."""
    prompt = tokens(SHORT, seed=3)
    sampling = {"max_new_tokens": 8, "temperature": 0, "n": 3}
    answers = server.post("/generate", {"input_ids": prompt, "sampling_params": sampling})
    assert [each["meta_info"]["cached_tokens"] for each in answers] == [SHORT - TAIL] * 3
    cold = ask(server, prompt, cache_salt="cold 3")
    assert all(each["output_ids"] == cold.tokens for each in answers)


def test_a_shared_beginning_is_found_by_the_third_prompt(server: ServerProcess) -> None:
    beginning = tokens(SHORT, seed=4)
    for user, expected in enumerate((0, 0, SHORT, SHORT)):
        prompt = [*beginning, *tokens(60, seed=40 + user)]
        warm = ask(server, prompt)
        assert warm.cached_tokens == expected
        assert_same(ask(server, prompt, cache_salt=f"cold {user}"), warm)


def test_a_beginning_that_a_router_names_is_found_by_the_second_prompt(server: ServerProcess) -> None:
    for keep, expected in (({KEEP_HEADER: str(SHORT)}, SHORT), ({}, 0)):
        beginning = tokens(SHORT, seed=6 + expected)
        for user in range(2):
            prompt = [*beginning, *tokens(60, seed=60 + user)]
            warm = ask(server, prompt, headers=keep)
            assert warm.cached_tokens == (expected if user else 0)
            assert_same(ask(server, prompt, cache_salt=f"cold {expected} {user}"), warm)


def test_logprobs_of_a_prompt_do_not_depend_on_where_it_is_cut(server: ServerProcess) -> None:
    prompt = tokens(LONG, seed=5)

    def logprobs(length: int) -> np.ndarray:
        sampling = {"max_new_tokens": 1, "temperature": 0}
        body = {"input_ids": prompt[:length], "sampling_params": sampling, "cache_salt": f"logprobs {length}"}
        answer = server.post("/generate", {**body, "return_logprob": True, "logprob_start_len": 0})
        found = answer["meta_info"]["input_token_logprobs"]
        assert [token for _, token, *_ in found] == prompt[:length]
        return np.array([logprob for logprob, *_ in found[1:]])

    whole = logprobs(LONG - 200)  # too short for a cut ahead
    cut = logprobs(LONG)
    np.testing.assert_allclose(cut[: len(whole)], whole, atol=1e-3)
