"""Speculative decoding with the shared cache: the draft model's KV comes from DRAM and disk with the model's.

The draft has the model's weights, so that it guesses well. A hit must leave answers and guesses as they were:
the same tokens, in as many passes. The long form has latents and Gemma 3 too.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from disk_damage import damage_last_layer, runs
from draft_models import SILENT, drafted_gemma

from sglang_ext.testing.models import RECIPES, model_path
from sglang_ext.testing.waiting import wait_until
from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
BLOCKS = 20
"""Of a prompt. HBM holds two prompts, DRAM four."""
NEW_TOKENS = 24
DRAFT_LAYERS = 4
GEMMA = "tiny-gemma3"
# SGLang 0.5.23 starts the draft of a Qwen3-MoE or DeepSeek model as its MTP layer, whatever the algorithm.
MODELS = ["tiny", *(pytest.param(name, marks=pytest.mark.long) for name in ("tiny-mla", GEMMA))]


@dataclass(frozen=True)
class Drafted:
    """An answer, and the passes of the model that it took."""

    answer: Answer
    passes: int


def spec(model: str, weights: Path, folder: Path) -> ServerSpec:
    dram = (4 * BLOCKS + 4) * BLOCK * 2 * RECIPES[model].kv_elements_per_token * 4
    return ServerSpec(
        model=model,
        flags=(
            *("--model-path", str(weights), "--speculative-algorithm", "STANDALONE"),
            *("--speculative-draft-model-path", str(weights)),
            *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "4"),
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always"),
            *("--kv-dram-size", str(dram), "--kv-disk-path", str(folder), "--kv-disk-size", "1GB"),
            *("--max-total-tokens", "900", "--chunked-prefill-size", "256", "--enable-metrics"),
        ),
        environment=STRICT,
    )


def ask(server: ServerProcess, prompt: list[int], **fields: Any) -> Drafted:
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
        **fields,
    }
    response = server.post("/generate", body)
    return Drafted(Answer.of(response), response["meta_info"]["spec_verify_ct"])


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def weights(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model and of its draft."""
    if model == GEMMA:
        return drafted_gemma(tmp_path_factory.mktemp("models") / model)
    return model_path(model)


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def prompts(model: str) -> list[list[int]]:
    rng = random.Random(5)
    found = [[rng.randrange(100, 30_000) for _ in range(BLOCKS * BLOCK + 4)] for _ in range(6)]
    if model == GEMMA:
        for prompt in found:
            prompt[0] = SILENT
    return found


@pytest.fixture(scope="module")
def cold(model: str, weights: Path, folder: Path, prompts: list[list[int]]) -> list[Drafted]:
    """Answers of a server that computed them, wrote them to disk, and was then killed. The draft's KV of the
    last prompt, which is in the last layers, is damaged then, with forged checksums."""

    def on_disk(server: ServerProcess) -> float:
        return sum(
            value
            for sample, value in server.metrics().items()
            if sample.startswith("sglang_ext_cache_blocks{") and 'tier="disk"' in sample
        )

    with ServerProcess(spec(model, weights, folder)) as server:
        answers = [ask(server, prompt) for prompt in prompts[:-1]]
        wait_until(lambda: on_disk(server) >= 5 * BLOCKS, seconds=20, what="five prompts on disk")
        sound = runs(folder)
        answers.append(ask(server, prompts[-1]))
        wait_until(lambda: on_disk(server) >= 6 * BLOCKS, seconds=20, what="six prompts on disk")
        (scheduler,) = server.processes("sglang::scheduler")
        os.kill(scheduler, signal.SIGKILL)
    damage_last_layer(runs(folder) - sound, _spoil, forge=True, layers=DRAFT_LAYERS)
    (rank,) = folder.iterdir()
    shutil.rmtree(rank / INDEX_DIRECTORY)
    assert repair_directory(rank).blocks >= 6 * BLOCKS
    return answers


def _spoil(layer: bytearray) -> None:
    layer[:] = bytes(len(layer))


@pytest.fixture(scope="module")
def server(model: str, weights: Path, folder: Path, cold: list[Drafted]) -> Iterator[ServerProcess]:
    with ServerProcess(spec(model, weights, folder)) as server:
        yield server


def test_the_draft_guesses_well_without_a_hit(cold: list[Drafted]) -> None:
    assert all(each.passes <= NEW_TOKENS / 2 for each in cold), [each.passes for each in cold]


def test_from_disk_dram_and_hbm_the_draft_guesses_as_well(
    server: ServerProcess, prompts: list[list[int]], cold: list[Drafted]
) -> None:
    tiers = {"disk_tokens": 0, "dram_tokens": 0, "hbm_tokens": 0}
    for order in (range(5), (2, 3, 4, 2, 3, 4), (0, 0)):
        for index in order:
            again = ask(server, prompts[index])
            assert again.answer.cached_tokens == BLOCKS * BLOCK
            assert_same(cold[index].answer, again.answer)
            assert again.passes == cold[index].passes
            for tier in tiers:
                tiers[tier] += getattr(again.answer, tier)
    assert min(tiers.values()) >= BLOCKS * BLOCK, tiers


def test_damaged_kv_of_the_draft_costs_guesses_and_no_answer(
    server: ServerProcess, prompts: list[list[int]], cold: list[Drafted]
) -> None:
    """The twin: the guesses above depend on the draft's KV, and the answers do not."""
    damaged = ask(server, prompts[-1])
    assert damaged.answer.disk_tokens == BLOCKS * BLOCK
    assert damaged.answer.tokens == cold[-1].answer.tokens
    assert damaged.passes > cold[-1].passes + 2
