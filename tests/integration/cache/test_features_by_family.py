"""LoRA adapters, grammars and reasoning parsers, with the shared cache, for models of other kinds than Llama.

One server for each family. HBM has fewer tokens than the test's conversations, so that later turns come from
DRAM as well.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hooked_server import FOLDER

from sglang_ext.testing.tokenizer import emitted_ids
from tests.support.adapters import TARGETS, build_adapter
from tests.support.compare import assert_same
from tests.support.servers.server import STRICT, Answer, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

RUN = (str(Path(__file__).parents[1] / "servers" / "lora_server.py"),)
STATES = (
    *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule", "--page-size", "1"),
    *("--max-mamba-cache-size", "16"),
)
# SGLang computes adapters of experts with Triton, on an accelerator.
MODELS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "tiny-gdn": (STATES, TARGETS),
    "tiny-spark": (("--page-size", "16", "--swa-full-tokens-ratio", "0.5"), TARGETS),
    "tiny-mla-moe": ((), ("o_proj",)),
}
SHORT = ("tiny-gdn",)
TURN = 160
ANSWER_TOKENS = 12
HBM_TOKENS = 900
ADAPTERS = (None, "one", "two")
GRAMMARS = (
    {"regex": "(cat|dog|[0-9]{4,8})( and [a-z]{3,5}){2}"},
    {
        "json_schema": json.dumps(
            {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        )
    },
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hooks")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in SHORT else pytest.mark.long, id=name) for name in MODELS],
)
def server(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    flags, targets = MODELS[request.param]
    out = tmp_path_factory.mktemp("adapters")
    paths = [
        f"{name}={build_adapter(request.param, name, out, targets=targets)}" for name in ADAPTERS if name
    ]
    spec = ServerSpec(
        model=request.param,
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-dram-size", "64MB", *flags),
            *("--max-total-tokens", str(HBM_TOKENS), "--max-running-requests", "2"),
            *("--chunked-prefill-size", "128", "--reasoning-parser", "deepseek-r1", "--enable-cache-report"),
            *("--enable-lora", "--max-lora-rank", "4", "--lora-target-modules", *targets),
            *("--lora-backend", "torch_native", "--lora-paths", *paths),
        ),
        environment={"SGLANG_MAMBA_CONV_DTYPE": "float32", **STRICT, FOLDER: str(folder)},
        run=RUN,
    )
    with ServerProcess(spec) as server:
        yield server


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(emitted_ids(), k=count)


def of(adapter: str | None) -> dict[str, Any]:
    return {} if adapter is None else {"lora_path": adapter}


def cold(server: ServerProcess, prompt: list[int], **fields: Any) -> Answer:
    salt = f"cold {random.random()}"
    answer = server.generate(prompt, max_new_tokens=ANSWER_TOKENS, cache_salt=salt, **fields)
    assert answer.cached_tokens == 0
    return answer


def leave_hbm(server: ServerProcess) -> None:
    for seed in range(HBM_TOKENS // TURN + 1):
        server.generate(words(1000 + seed, TURN), max_new_tokens=1)


def test_adapters_share_no_kv_and_no_states(server: ServerProcess, folder: Path) -> None:
    server.flush()
    prompt = words(1, TURN)
    histories = {}
    for adapter in ADAPTERS:
        first = server.generate(prompt, max_new_tokens=ANSWER_TOKENS, **of(adapter))
        assert first.cached_tokens == 0, "the prompt had another adapter before"
        histories[adapter] = [*prompt, *first.tokens, *words(2, 30)]
    assert len({tuple(history) for history in histories.values()}) == len(ADAPTERS)
    for tier in ("hbm_tokens", "dram_tokens"):
        if tier == "dram_tokens":
            leave_hbm(server)
        for adapter, history in histories.items():
            warm = server.generate(history, max_new_tokens=ANSWER_TOKENS, **of(adapter))
            assert getattr(warm, tier) >= TURN - 16 or tier == "hbm_tokens"
            assert warm.cached_tokens >= TURN - 16
            assert_same(cold(server, history, **of(adapter)), warm)
            histories[adapter] = [*history, *warm.tokens, *words(3, 30)]
    # The twin: KV and states have the same name whichever adapter they were computed with.
    server.flush()
    mixed = words(4, TURN)
    expected = cold(server, histories["two"], **of("two"))
    (folder / "mix").touch()
    try:
        server.generate(mixed, max_new_tokens=1, **of("one"))
        server.generate(histories["two"][:-30], max_new_tokens=1, **of("one"))
        damaged = server.generate(histories["two"], max_new_tokens=ANSWER_TOKENS, **of("two"))
    finally:
        (folder / "mix").unlink()
    assert damaged.cached_tokens
    with pytest.raises(AssertionError):
        assert_same(expected, damaged)
    server.flush()


@pytest.mark.parametrize("grammar", GRAMMARS, ids=["regex", "json_schema"])
def test_a_grammar_behind_kv_that_is_found(server: ServerProcess, grammar: dict[str, str]) -> None:
    server.flush()
    prompt = words(20, TURN)
    first = server.generate(prompt, max_new_tokens=ANSWER_TOKENS)
    history = [*prompt, *first.tokens, *words(21, 30)]
    asked = {"temperature": 0, "max_new_tokens": 24, **grammar}
    warm = server.generate(history, max_new_tokens=24, sampling_params=asked)
    assert warm.cached_tokens >= TURN - 16
    assert_same(cold(server, history, sampling_params=asked), warm)
    leave_hbm(server)
    from_dram = server.generate([*history, *words(22, 5)], max_new_tokens=24, sampling_params=asked)
    assert from_dram.dram_tokens >= TURN - 16
    assert_same(cold(server, [*history, *words(22, 5)], sampling_params=asked), from_dram)
    # The twin: the same prompt without the grammar.
    with pytest.raises(AssertionError):
        assert_same(server.generate(history, max_new_tokens=len(warm.tokens)), warm)
    body = {"input_ids": history, "sampling_params": asked}
    text = server.post("/generate", body)["text"]
    pattern = grammar.get("regex", r'\{\s*("n"\s*:|$)')
    assert re.match(pattern, text), text


def test_a_reasoning_parser_behind_kv_that_is_found(server: ServerProcess) -> None:
    server.flush()

    def said(messages: list[dict[str, str]], **fields: Any) -> tuple[dict[str, Any], int]:
        body = {"model": "m", "messages": messages, "temperature": 0, "max_tokens": ANSWER_TOKENS, **fields}
        answer = server.post("/v1/chat/completions", body)
        return answer["choices"][0]["message"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    turns = [{"role": "user", "content": "Name three trees and their leaves. " * 20}]
    first, cached = said(turns)
    assert not cached
    assert first["reasoning_content"], "the model's tokens are its reasoning until it ends that"
    assert not first["content"]
    turns += [
        {"role": "assistant", "content": first["reasoning_content"]},
        {"role": "user", "content": "Go on."},
    ]
    # A request that takes up the state of the first one, which ends behind its answer.
    warm, cached = said(turns)
    assert cached > 64
    assert warm == said(turns, cache_salt="cold")[0]
    whole, _ = said(turns, separate_reasoning=False)
    assert whole["content"] == warm["reasoning_content"]
