"""The CPU runtime with SGLang's own cache: it computes the same as transformers, in pages and with MLA.

The oracle is independent of SGLang: transformers' greedy generation over the whole prompt, without a cache
between requests. Without `--long` it is one model and one page size; `test_model_reference.py` has MLA.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from sglang_ext.testing.models import model_path
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

GetServer = Callable[[ServerSpec], ServerProcess]

ORACLE = Path(__file__).parents[1].joinpath("transformers_oracle.py")
COMMON = ("--max-total-tokens", "2048", "--chunked-prefill-size", "128")
ANSWER_TOKENS = 12
# Around the borders of a page of 16 and of a chunk of 128 tokens.
LENGTHS = (1, 15, 16, 17, 127, 128, 129, 300)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(100, 32_000) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with latent attention and plain rotary embeddings."""
    path = tmp_path_factory.mktemp("mla") / "model"
    shutil.copytree(model_path("tiny-mla", "float32"), path)
    config = json.loads((path / "config.json").read_text())
    config["rope_scaling"] = None
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def expected(mla: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[int]]]:
    """Greedy continuations by transformers, of the tiny model and of the other."""
    run = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(ORACLE), str(ANSWER_TOKENS)),
            *(str(model_path("tiny", "float32")), str(mla)),
        ],
        env={**os.environ, "TMPDIR": str(tmp_path_factory.mktemp("scratch"))},
        input=json.dumps(prompts()),
        capture_output=True,
        text=True,
        timeout=480,
    )
    assert run.returncode == 0, run.stderr
    tiny, other = json.loads(run.stdout.splitlines()[-1])
    return {"tiny": tiny, "mla": other}


def answers_of(server: ServerProcess) -> list[list[int]]:
    return [server.generate(prompt, max_new_tokens=ANSWER_TOKENS).tokens for prompt in prompts()]


def answers_at_once(server: ServerProcess) -> list[list[int]]:
    """The same prompts in one batch, which allocates for several requests together."""
    answers: list[list[int]] = [[] for _ in LENGTHS]

    def one(index: int, prompt: list[int]) -> None:
        answers[index] = server.generate(prompt, max_new_tokens=ANSWER_TOKENS, cache_salt="at once").tokens

    threads = [threading.Thread(target=one, args=item) for item in enumerate(prompts())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


@pytest.mark.parametrize(
    ("flags", "environment"),
    [
        (("--page-size", "16"), {}),
        pytest.param(("--page-size", "1"), {}, marks=pytest.mark.long),
        pytest.param(("--page-size", "16", "--enable-mixed-chunk"), {}, marks=pytest.mark.long),
        pytest.param(("--page-size", "16", "--disable-overlap-schedule"), {}, marks=pytest.mark.long),
        pytest.param(
            ("--page-size", "16", "--tp", "2"), {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}, marks=pytest.mark.long
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_answers_are_those_of_transformers(
    get_server: GetServer,
    flags: tuple[str, ...],
    environment: dict[str, str],
    expected: dict[str, list[list[int]]],
) -> None:
    server = get_server(ServerSpec(flags=(*COMMON, *flags), environment=environment))
    right = expected["tiny"]
    assert answers_of(server) == right, "cold"
    assert answers_of(server) == right, "from the cache"
    assert answers_at_once(server) == right, "in one batch"
    refused = httpx.post(
        f"{server.url}/generate", json={"input_ids": [5, 32_000, 7]}, timeout=60, trust_env=False
    )
    assert refused.status_code == 400
    assert "input_ids[1] is 32000, outside the vocabulary" in refused.text
    assert answers_of(server) == right, "after a request that kills a stock server"


@pytest.mark.long
def test_an_mla_model_without_yarn_answers_as_with_transformers(
    get_server: GetServer, mla: Path, expected: dict[str, list[list[int]]]
) -> None:
    server = get_server(ServerSpec(flags=("--model-path", str(mla), *COMMON, "--page-size", "16")))
    assert answers_of(server) == expected["mla"]
    assert answers_at_once(server) == expected["mla"]
