"""Speculative decoding with the shared cache: the draft model's KV comes from DRAM and disk with the model's.

The draft has the model's weights, so that it guesses well. A hit must leave answers and guesses as they were:
the same tokens, in as many passes. The long form has latents, Gemma 3 and an EAGLE head too.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from disk_damage import damage_last_layer, runs
from draft_models import SILENT, drafted_gemma, eagle_head
from hooked_server import FOLDER

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
RUN = (str(Path(__file__).parents[1] / "servers" / "wanted_dram_server.py"),)
GEMMA = "tiny-gemma3"
EAGLE = "tiny-eagle"
"""The tiny model with an EAGLE head."""
# SGLang 0.5.23 starts the draft of a Qwen3-MoE or DeepSeek model as its MTP layer, whatever the algorithm.
MODELS = ["tiny", *(pytest.param(name, marks=pytest.mark.long) for name in ("tiny-mla", GEMMA, EAGLE))]


@dataclass(frozen=True)
class Drafted:
    """An answer, and the passes of the model that it took."""

    answer: Answer
    passes: int


@dataclass(frozen=True)
class Pair:
    """weights: of the model. draft: its folder; its last layers compute what the model's layers compute."""

    model: str
    weights: Path
    draft: Path
    algorithm: str = "STANDALONE"
    draft_layers: int = 4

    @staticmethod
    def of(kind: str, folder: Path) -> Pair:
        """folder: where changed models may be written."""
        if kind == EAGLE:
            return Pair("tiny", model_path("tiny"), eagle_head(folder / "head"), "EAGLE", 5)
        weights = drafted_gemma(folder / kind) if kind == GEMMA else model_path(kind)
        return Pair(kind, weights, weights)

    def prompts(self, count: int, seed: int) -> list[list[int]]:
        """Random prompts of `BLOCKS` blocks and four tokens."""
        rng = random.Random(seed)
        found = [[rng.randrange(100, 30_000) for _ in range(BLOCKS * BLOCK + 4)] for _ in range(count)]
        if self.model == GEMMA:
            for prompt in found:
                prompt[0] = SILENT
        return found


def spec(pair: Pair, folder: Path) -> ServerSpec:
    """folder: of the disk tier, beside which is that of the server's faults."""
    model = RECIPES[pair.model]
    layers = model.config["num_hidden_layers"]
    token_bytes = 4 * model.kv_elements_per_token * (layers + pair.draft_layers) // layers
    return ServerSpec(
        model=pair.model,
        run=RUN,
        flags=(
            *("--model-path", str(pair.weights), "--speculative-algorithm", pair.algorithm),
            *("--speculative-draft-model-path", str(pair.draft)),
            *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", "4"),
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always"),
            *("--kv-dram-size", str((4 * BLOCKS + 4) * BLOCK * token_bytes)),
            *("--kv-disk-path", str(folder), "--kv-disk-size", "1GB"),
            *("--max-total-tokens", "900", "--chunked-prefill-size", "256", "--enable-metrics"),
        ),
        environment={FOLDER: str(folder.with_name("faults")), **STRICT},
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
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair.of(request.param, tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def folder(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("drafts") / "kv"
    folder.with_name("faults").mkdir()
    return folder


@pytest.fixture(scope="module")
def prompts(pair: Pair) -> list[list[int]]:
    return pair.prompts(6, seed=5)


@pytest.fixture(scope="module")
def cold(pair: Pair, folder: Path, prompts: list[list[int]]) -> list[Drafted]:
    """Answers of a server that computed them, wrote them to disk, and was then killed. The draft's KV of the
    last prompt, which is in the last layers, is damaged then, with forged checksums."""

    def on_disk(server: ServerProcess) -> float:
        return sum(
            value
            for sample, value in server.metrics().items()
            if sample.startswith("sglang_ext_cache_blocks{") and 'tier="disk"' in sample
        )

    with ServerProcess(spec(pair, folder)) as server:
        answers = [ask(server, prompt) for prompt in prompts[:-1]]
        wait_until(lambda: on_disk(server) >= 5 * BLOCKS, seconds=20, what="five prompts on disk")
        sound = runs(folder)
        answers.append(ask(server, prompts[-1]))
        wait_until(lambda: on_disk(server) >= 6 * BLOCKS, seconds=20, what="six prompts on disk")
        (scheduler,) = server.processes("sglang::scheduler")
        os.kill(scheduler, signal.SIGKILL)
    damage_last_layer(runs(folder) - sound, _spoil, forge=True, layers=pair.draft_layers)
    (rank,) = folder.iterdir()
    shutil.rmtree(rank / INDEX_DIRECTORY)
    assert repair_directory(rank).blocks >= 6 * BLOCKS
    return answers


def _spoil(layer: bytearray) -> None:
    layer[:] = bytes(len(layer))


@pytest.fixture(scope="module")
def server(pair: Pair, folder: Path, cold: list[Drafted]) -> Iterator[ServerProcess]:
    with ServerProcess(spec(pair, folder)) as server:
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


def given_up(server: ServerProcess) -> float:
    """Blocks that left DRAM so far."""
    return server.metrics()['sglang_ext_cache_dram_blocks_total{event="evicted",tp_rank="0"}']


def ask_from_dram(
    server: ServerProcess, pair: Pair, prompt: list[int], folder: Path, fault: str = ""
) -> Drafted:
    """The answer to a prompt that comes from DRAM, in a batch with others, while all of DRAM is wanted."""
    *before, one, another = pair.prompts(5, seed=prompt[-1])
    for each in (prompt, *before):
        ask(server, each)
    evicted, wanted = given_up(server), folder.with_name("faults") / "wanted"
    wanted.write_text(fault)
    with ThreadPoolExecutor(3) as clients:
        again, *_ = clients.map(lambda each: ask(server, each), (prompt, one, another))
    wanted.unlink()
    assert (again.answer.hbm_tokens, again.answer.dram_tokens) == (0, BLOCKS * BLOCK)
    wait_until(lambda: given_up(server) >= evicted + 2 * BLOCKS, seconds=20, what="DRAM to be given away")
    return again


def test_drafts_from_dram_guess_as_well_while_others_want_it(
    server: ServerProcess, pair: Pair, prompts: list[list[int]], cold: list[Drafted], folder: Path
) -> None:
    """sglang#30321."""
    for index in (0, 1):
        again = ask_from_dram(server, pair, prompts[index], folder)
        assert_same(cold[index].answer, again.answer)
        assert again.passes == cold[index].passes


def test_damaged_kv_of_the_draft_in_dram_costs_guesses_and_no_answer(
    server: ServerProcess, pair: Pair, prompts: list[list[int]], cold: list[Drafted], folder: Path
) -> None:
    """The first twin."""
    damaged = ask_from_dram(server, pair, prompts[-1], folder)
    assert damaged.answer.tokens == cold[-1].answer.tokens
    assert damaged.passes > cold[-1].passes + 2


def test_dram_that_is_given_up_while_it_is_loaded_changes_the_answer(
    server: ServerProcess, pair: Pair, prompts: list[list[int]], cold: list[Drafted], folder: Path
) -> None:
    """The second twin: the fault that was reported."""
    garbled = ask_from_dram(server, pair, prompts[2], folder, "unlocked")
    with pytest.raises(AssertionError):
        assert_same(cold[2].answer, garbled.answer)
    server.flush()
