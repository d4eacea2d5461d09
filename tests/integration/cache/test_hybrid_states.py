"""Models of which layers keep states, served on a CPU with SGLang's own cache: answers do not depend on
reuse, on how a prompt was cut into chunks, or on the batch.

SGLang keeps a state at the end of each request (``no_buffer``), so that the next turn of a conversation finds
it. The CPU runtime keeps the inputs of convolutions in float32: in SGLang's bfloat16, a state that is taken
up again would differ by their rounding from a state that was computed in one go.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from tests.support.compare import assert_same
from tests.support.reference import Reference
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

CHUNK = 128
ANSWER_TOKENS = 12
LONG = ("tiny-gdn-moe", "tiny-mamba2", "tiny-nemotron", "tiny-kda")
MODELS = ("tiny-gdn", "tiny-lfm2", *(pytest.param(name, marks=pytest.mark.long) for name in LONG))
GetServer = Callable[[ServerSpec], ServerProcess]


@pytest.fixture(scope="module", params=MODELS)
def server(request: pytest.FixtureRequest, get_server: GetServer) -> ServerProcess:
    return get_server(
        ServerSpec(
            model=request.param,
            flags=(
                *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
                *("--page-size", "1", "--max-total-tokens", "8192", "--max-running-requests", "8"),
                *("--max-mamba-cache-size", "32"),
                *("--chunked-prefill-size", str(CHUNK)),
            ),
            environment=STRICT,
        )
    )


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 32_000) for _ in range(length)]


def test_prompts_in_chunks_are_answered_as_transformers_does_in_one(server: ServerProcess) -> None:
    reference = Reference(server.spec.model)
    server.flush()
    for length in (1, CHUNK, 2 * CHUNK + 20):
        prompt = random_prompt(length, seed=length)
        cold = server.generate(prompt, max_new_tokens=ANSWER_TOKENS)
        assert cold.cached_tokens == 0
        tokens, logprobs = reference.answer(prompt, ANSWER_TOKENS)
        assert assert_same(replace(cold, tokens=tokens, logprobs=logprobs), cold) > 0
    # The twin: states that are off by one in a hundred give another answer.
    tokens, logprobs = reference.answer(prompt, ANSWER_TOKENS, state_factor=1.01)
    with pytest.raises(AssertionError):
        assert_same(replace(cold, tokens=tokens, logprobs=logprobs), cold)


def test_later_turns_take_up_the_state_and_answer_as_cold_ones(server: ServerProcess) -> None:
    server.flush()
    for conversation in range(2):
        history: list[int] = []
        for turn, length in enumerate((150, 20, 1, 200)):
            history += random_prompt(length, seed=10 * conversation + turn)
            warm = server.generate(history, max_new_tokens=ANSWER_TOKENS)
            cold = server.generate(
                history, max_new_tokens=ANSWER_TOKENS, cache_salt=f"cold-{conversation}-{turn}"
            )
            assert cold.cached_tokens == 0
            # The last token of the answer was never computed.
            assert warm.cached_tokens == (len(history) - length - 1 if turn else 0)
            assert_same(cold, warm)
            history += warm.tokens


def test_answers_in_a_batch_are_those_of_each_alone(server: ServerProcess) -> None:
    prompts = [random_prompt(length, seed=length) for length in (30, 260, 3, 150)]
    alone = [
        server.generate(prompt, max_new_tokens=ANSWER_TOKENS, cache_salt=f"alone-{len(prompt)}")
        for prompt in prompts
    ]

    def answer(prompt: list[int]) -> None:
        salt = f"batch-{len(prompt)}"
        first = server.generate(prompt, max_new_tokens=ANSWER_TOKENS, cache_salt=salt)
        assert_same(alone[prompts.index(prompt)], first)
        longer = [*prompt, *first.tokens, *prompts[0]]
        second = server.generate(longer, max_new_tokens=ANSWER_TOKENS, cache_salt=salt)
        assert second.cached_tokens == len(prompt) + ANSWER_TOKENS - 1
        assert_same(server.generate(longer, max_new_tokens=ANSWER_TOKENS, cache_salt=f"cold-{salt}"), second)

    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(answer, prompts))
