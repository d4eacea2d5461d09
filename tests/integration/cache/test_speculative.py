"""Speculative decoding on a CPU with SGLang's own cache: the answers of a server without it, and in each
round the draft model's right guesses are accepted.

How many rounds an answer takes is known beforehand: a draft model sees the text without its first token, so
that with the target's own weights its drafts are the greedy answers of a plain server to such a text.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from draft_models import eagle_head

from sglang_ext.testing.models import model_path
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

STEPS = 3
COMMON = ("--max-total-tokens", "4096", "--chunked-prefill-size", "128", "--max-running-requests", "8")
ANSWER_TOKENS = 24
LENGTHS = (40, 300, 129)


def with_draft(model: Path, algorithm: str = "STANDALONE") -> ServerSpec:
    """The tiny model with a draft model."""
    steps = ("--speculative-num-steps", str(STEPS), "--speculative-num-draft-tokens", str(STEPS + 1))
    draft = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(model))
    return ServerSpec(flags=(*COMMON, *draft, *steps, "--speculative-eagle-topk", "1"), environment=STRICT)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle_head(tmp_path_factory.mktemp("eagle") / "head")


@pytest.fixture(scope="module")
def plain() -> Iterator[ServerProcess]:
    with ServerProcess(ServerSpec(flags=COMMON)) as server:
        yield server


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(100, 32_000) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(plain: ServerProcess, prompts: list[list[int]]) -> list[Answer]:
    return [plain.generate(prompt, max_new_tokens=ANSWER_TOKENS) for prompt in prompts]


def ask(server: ServerProcess, prompt: Sequence[int]) -> tuple[Answer, dict[str, Any]]:
    """The answer, and what SGLang reports of it."""
    body = {
        "input_ids": list(prompt),
        "sampling_params": {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = server.post("/generate", body)
    return Answer.of(answer), answer["meta_info"]


def rounds_of(plain: ServerProcess, prompt: list[int], answer: list[int]) -> int:
    """In how many rounds the target verifies the drafts of its own weights, until the answer is whole.
    Prefill makes the first token, and each round one more than it accepts."""
    rounds, done = 0, 1
    while done < len(answer):
        drafts = plain.generate((prompt + answer[:done])[1:], max_new_tokens=STEPS).tokens
        rest = answer[done : done + STEPS]
        accepted = next((i for i, token in enumerate(rest) if token != drafts[i]), len(rest))
        rounds, done = rounds + 1, done + accepted + 1
    return rounds


@pytest.mark.parametrize("algorithm", ["STANDALONE", "EAGLE"])
def test_a_draft_with_the_targets_weights_is_accepted_and_the_answers_are_the_targets(
    algorithm: str, head: Path, plain: ServerProcess, prompts: list[list[int]], expected: list[Answer]
) -> None:
    draft = head if algorithm == "EAGLE" else model_path("tiny")
    with ServerProcess(with_draft(draft, algorithm)) as server:
        lengths = []
        for prompt, answer in zip(prompts, expected, strict=True):
            got, meta = ask(server, prompt)
            assert_same(answer, got)
            assert got.cached_tokens == 0
            assert meta["spec_verify_ct"] == rounds_of(plain, prompt, answer.tokens)
            lengths.append(meta["spec_accept_length"])
        assert sum(lengths) / len(lengths) > 2, lengths

        batch = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
        server.flush()
        together = server.post("/generate", {"input_ids": prompts, "sampling_params": batch})
        assert [each["output_ids"] for each in together] == [answer.tokens for answer in expected]
        assert [each["meta_info"]["spec_accept_length"] for each in together] == lengths

        # A hit: the draft's KV of the prompt is there as well.
        again, meta = ask(server, prompts[1])
        assert_same(expected[1], again)
        assert again.cached_tokens >= LENGTHS[1] - 2
        assert meta["spec_accept_length"] == lengths[1]


@pytest.fixture
def other_weights(tmp_path: Path) -> Path:
    """The tiny model with its layers in another order."""
    folder = shutil.copytree(model_path("tiny"), tmp_path / "draft")
    file = folder / "model.safetensors"
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    layers = [name for name in header if ".layers." in name]
    moved = dict(zip(layers, layers[len(layers) // 2 :] + layers[: len(layers) // 2], strict=True))
    renamed = {moved.get(name, name): entry for name, entry in header.items()}
    encoded = json.dumps(renamed, separators=(",", ":")).encode()
    assert len(encoded) <= size
    with file.open("r+b") as weights:
        weights.seek(8)
        weights.write(encoded.ljust(size))
    return folder


def test_a_draft_with_other_weights_is_not_accepted_and_the_answers_stay(
    prompts: list[list[int]], expected: list[Answer], other_weights: Path
) -> None:
    """The twin."""
    with ServerProcess(with_draft(other_weights)) as server:
        for prompt, answer in zip(prompts, expected, strict=True):
            got, meta = ask(server, prompt)
            assert_same(answer, got)
            assert meta["spec_accept_length"] < 1.2
