"""Real servers compute as the models' files define, and an answer's KV is found again over the chat API."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.support.compare import assert_same
from tests.support.reference import Reference
from tests.support.servers.server import ServerProcess, ServerSpec

FLAGS = ("--radix-cache-backend", "global", "--max-total-tokens", "8192")
BLOCK_TOKENS = 16
ANSWER_TOKENS = 12

GetServer = Callable[[ServerSpec], ServerProcess]


WINDOWS = ("--page-size", "16", "--swa-full-tokens-ratio", "0.5", "--attention-backend", "intel_amx")
MODELS: dict[str, tuple[str, ...]] = {
    "tiny": (),
    "tiny-mla": (),
    "tiny-gpt-oss": WINDOWS,
    "tiny-mimo": WINDOWS,
    "tiny-gemma4": WINDOWS,
    "tiny-step": WINDOWS[:-2],
}
SHORT = ("tiny", "tiny-mla")
of_each_model = pytest.mark.parametrize(
    "server",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in MODELS],
    indirect=True,
)


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, get_server: GetServer) -> ServerProcess:
    return get_server(ServerSpec(model=request.param, flags=(*FLAGS, *MODELS[request.param])))


def random_prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(3, 32_000) for _ in range(length)]


@of_each_model
def test_the_server_answers_as_transformers_does(server: ServerProcess) -> None:
    reference = Reference(server.spec.model)
    server.flush()
    for length in (1, 20, 300, 1100):
        prompt = random_prompt(length)
        cold = server.generate(prompt, max_new_tokens=ANSWER_TOKENS)
        assert cold.cached_tokens == 0
        tokens, logprobs = reference.answer(prompt, ANSWER_TOKENS)
        assert assert_same(replace(cold, tokens=tokens, logprobs=logprobs), cold) > 0


@of_each_model
def test_a_stream_ends_with_the_same_answer(server: ServerProcess) -> None:
    prompt = random_prompt(77)
    whole = server.generate(prompt, max_new_tokens=ANSWER_TOKENS)
    streamed = server.generate(prompt, max_new_tokens=ANSWER_TOKENS, stream=True)
    assert assert_same(whole, streamed) == ANSWER_TOKENS
    assert len(streamed.margins) == ANSWER_TOKENS
    assert min(streamed.margins) >= 0


@pytest.mark.parametrize("server", SHORT, indirect=True)
def test_each_turn_of_a_chat_finds_the_answer_before_it(server: ServerProcess) -> None:
    server.flush()
    messages = [{"role": "system", "content": "Answer at length."}]
    known = 0
    for question in ("What is a cache?", "And what is a prefix?", "\u4f60\u597d\uff0c\u4e16\u754c"):
        messages.append({"role": "user", "content": question})
        answer: Any = server.post(
            "/v1/chat/completions",
            {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 40},
        )
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or {}
        # All whole blocks of the turn before; the KV of its last token was never computed.
        assert details.get("cached_tokens", 0) == max(known - 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
        assert usage["completion_tokens"] == 40
        known = usage["prompt_tokens"] + usage["completion_tokens"]
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
    assert known > 120
