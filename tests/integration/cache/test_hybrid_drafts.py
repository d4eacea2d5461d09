"""Speculative decoding of a model with windows: the draft model's KV comes from DRAM and disk with the
model's, that of all tokens and that of windows.

The draft has the model's weights, so that it guesses well. A hit must leave answers and guesses as they were:
the same tokens, in as many passes.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from disk_damage import Place, damage_last_layer
from test_hybrid_tiers import settled

from sglang_ext.testing.models import model_path
from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

MODEL = "tiny-spark"
PAGE = 16
PROMPT = 20 * PAGE
NEW_TOKENS = 24
PROMPTS = 6
"""HBM holds two of them."""
DRAFT_LAYERS = 2
"""Of each component."""


@dataclass(frozen=True)
class Drafted:
    """An answer, and the passes of the model that it took."""

    answer: Answer
    passes: int


def spec(folder: Path) -> ServerSpec:
    return ServerSpec(
        model=MODEL,
        flags=(
            *(
                "--speculative-algorithm",
                "STANDALONE",
                "--speculative-draft-model-path",
                str(model_path(MODEL)),
            ),
            *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "4", "--page-size", str(PAGE)),
            *("--radix-cache-backend", "global", "--kv-check", "--swa-full-tokens-ratio", "0.5"),
            *("--kv-dram-size", "64MB", "--kv-disk-path", str(folder), "--kv-disk-size", "1GB"),
            *("--max-total-tokens", "900", "--max-running-requests", "2", "--chunked-prefill-size", "128"),
        ),
        environment=STRICT,
    )


def ask(server: ServerProcess, prompt: list[int]) -> Drafted:
    body: dict[str, Any] = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "return_logprob": True,
    }
    response = server.post("/generate", body)
    return Drafted(Answer.of(response), response["meta_info"]["spec_verify_ct"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(100, 30_000) for _ in range(PROMPT + 4)] for _ in range(PROMPTS)]


@pytest.fixture(scope="module")
def cold(folder: Path, prompts: list[list[int]]) -> list[Drafted]:
    """Answers of a server that computed them, and gave them again from DRAM and HBM. After its end, the
    draft's KV of the last prompt is damaged on disk, with forged checksums."""
    with ServerProcess(spec(folder)) as server:
        answers = [ask(server, prompt) for prompt in prompts[:-1]]
        sound = settled(folder)
        answers.append(ask(server, prompts[-1]))
        assert all(each.answer.cached_tokens == 0 for each in answers)
        last = settled(folder) - sound
        tiers = {"dram_tokens": 0, "hbm_tokens": 0}
        for index in (0, 1, 2, 3, 4, 5, 5, 5):
            again = ask(server, prompts[index])
            hit(answers[index], again)
            for tier in tiers:
                tiers[tier] += getattr(again.answer, tier)
        assert min(tiers.values()) >= PROMPT, tiers
    damage_last_layer(last, _spoil, forge=True, layers=DRAFT_LAYERS)
    for component in folder.iterdir():
        (rank,) = component.iterdir()
        # The index has checksums of the headers too; a new one, made from the segments, has the forged ones.
        shutil.rmtree(rank / INDEX_DIRECTORY)
        repair_directory(rank)
    assert components_of(last) == {"full", "window"}
    return answers


def components_of(places: set[Place]) -> set[str]:
    return {part for segment, _ in places for part in segment.parts if part in ("full", "window")}


def hit(cold: Drafted, warm: Drafted) -> None:
    assert warm.answer.cached_tokens >= PROMPT - PAGE
    assert_same(cold.answer, warm.answer)
    assert warm.passes == cold.passes


def _spoil(layer: bytearray) -> None:
    layer[:] = bytes(len(layer))


@pytest.fixture(scope="module")
def server(folder: Path, cold: list[Drafted]) -> Iterator[ServerProcess]:
    with ServerProcess(spec(folder)) as server:
        yield server


def test_the_draft_guesses_well_without_a_hit(cold: list[Drafted]) -> None:
    assert all(each.passes <= NEW_TOKENS / 2 for each in cold)


def test_from_disk_dram_and_hbm_the_draft_guesses_as_well(
    server: ServerProcess, prompts: list[list[int]], cold: list[Drafted]
) -> None:
    for index, prompt in enumerate(prompts[:-1]):
        again = ask(server, prompt)
        assert again.answer.disk_tokens >= PROMPT - PAGE
        hit(cold[index], again)


def test_damaged_kv_of_the_draft_costs_guesses_and_no_answer(
    server: ServerProcess, prompts: list[list[int]], cold: list[Drafted]
) -> None:
    """The twin: the guesses above depend on the draft's KV, and the answers do not."""
    damaged = ask(server, prompts[-1])
    assert damaged.answer.disk_tokens >= PROMPT - PAGE
    assert damaged.answer.tokens == cold[-1].answer.tokens
    assert damaged.passes > cold[-1].passes + 2
