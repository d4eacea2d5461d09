"""A model of which half the layers have a sliding window, and a pool for it that is smaller than the other
layers', served on a CPU with SGLang's own cache: answers do not depend on reuse.

A token's two slots have nothing in common once the window's pool has been given out once. The slots by
which attention reads are tested in `tests/patches/test_window_attention.py`, with twins.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from sglang_ext.testing.models import RECIPES
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import STRICT, ServerDiedError, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

MODEL = "tiny-spark"
WINDOW: int = RECIPES[MODEL].config["sliding_window"]
TOKENS, WINDOW_TOKENS = 2048, 512
CHUNK = 128
ANSWER_TOKENS = 8
LENGTHS = (3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 1, 300)
GetServer = Callable[[ServerSpec], ServerProcess]

FLAGS = (
    *("--max-total-tokens", str(TOKENS), "--max-running-requests", "4"),
    *("--chunked-prefill-size", str(CHUNK)),
)


@pytest.fixture(scope="module")
def server(get_server: GetServer) -> ServerProcess:
    ratio = str(WINDOW_TOKENS / TOKENS)
    spec = ServerSpec(model=MODEL, flags=(*FLAGS, "--swa-full-tokens-ratio", ratio), environment=STRICT)
    return get_server(spec)


def random_prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 30_000) for _ in range(length)]


def answer(server: ServerProcess, prompt: list[int], salt: str | None = None) -> Answer:
    return server.generate(prompt, max_new_tokens=ANSWER_TOKENS, cache_salt=salt)


def churn(server: ServerProcess, seed: int, tokens: int = 2 * WINDOW_TOKENS) -> None:
    """Other prompts, which take the slots that windows have left behind."""
    for number in range(tokens // 200):
        server.generate(random_prompt(200, seed=1000 * seed + number), max_new_tokens=1)


@pytest.mark.parametrize("length", LENGTHS)
def test_later_turns_answer_as_cold_ones_after_churn(server: ServerProcess, length: int) -> None:
    server.flush()
    churn(server, seed=length)
    history: list[int] = []
    for turn, new in enumerate((length, 1, WINDOW, 2 * WINDOW + 5, 2)):
        history += random_prompt(new, seed=10 * length + turn)
        warm = answer(server, history)
        cold = answer(server, history, salt=f"cold-{length}-{turn}")
        assert cold.cached_tokens == 0
        # The last token of the answer was never computed.
        assert warm.cached_tokens == (len(history) - new - 1 if turn else 0)
        assert_same(cold, warm)
        history += warm.tokens
        churn(server, seed=length + turn + 1, tokens=WINDOW_TOKENS // 2)
    churn(server, seed=2 * length, tokens=4 * TOKENS)
    assert answer(server, history).cached_tokens == 0, "prompts that have left the cache are computed"


def test_branches_answer_as_cold_ones(server: ServerProcess) -> None:
    """Where a prompt leaves another in its middle, the window's KV may be gone."""
    server.flush()
    prompt = random_prompt(300, seed=1)
    answer(server, prompt)
    reused = []
    for number, place in enumerate((300, 299, 150, WINDOW + 1, WINDOW, WINDOW - 1, 1)):
        branch = prompt[:place] + random_prompt(40, seed=place)
        warm = answer(server, branch)
        assert_same(answer(server, branch, salt=f"branch-{place}"), warm)
        reused.append(warm.cached_tokens)
        churn(server, seed=number, tokens=WINDOW_TOKENS // 4)
    assert reused[0] == 300, reused


def test_answers_in_a_batch_are_those_of_each_alone(server: ServerProcess) -> None:
    prompts = [random_prompt(length, seed=length) for length in LENGTHS]
    alone = [answer(server, prompt, salt=f"alone-{len(prompt)}") for prompt in prompts]

    def converse(index: int) -> None:
        salt = f"batch-{index}"
        first = answer(server, prompts[index], salt=salt)
        assert_same(alone[index], first)
        longer = [*prompts[index], *first.tokens, *prompts[1]]
        assert_same(answer(server, longer, salt=f"cold-{salt}"), answer(server, longer, salt=salt))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(converse, range(len(prompts))))


@pytest.mark.long
def test_one_pool_for_all_layers_gives_the_same_answers(server: ServerProcess, get_server: GetServer) -> None:
    """The same model without a pool for the window: right answers do not depend on slots."""
    server.flush()
    churn(server, seed=5)
    prompts = [random_prompt(length, seed=7 * length) for length in LENGTHS]
    answers = [answer(server, prompt) for prompt in prompts]
    plain = get_server(
        ServerSpec(model=MODEL, flags=(*FLAGS, "--disable-hybrid-swa-memory"), environment=STRICT)
    )
    for prompt, got in zip(prompts, answers, strict=True):
        assert_same(answer(plain, prompt), got)


WITHOUT_TRANSLATION = """
import runpy
from sglang_ext.patches.cpu import attention
attention._slots = lambda _backend, tokens, _window: tokens
if __name__ == "__main__":
    runpy.run_module("sglang_ext.launch_server", run_name="__main__")
"""


@pytest.mark.long
def test_without_translated_slots_a_server_is_wrong_or_ends(
    server: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The twin: SGLang's own way of reading, with which nothing else here could pass."""
    script = tmp_path_factory.mktemp("twin") / "without_translation.py"
    script.write_text(WITHOUT_TRANSLATION)
    spec = ServerSpec(
        model=MODEL, flags=server.spec.flags, environment=server.spec.environment, run=(str(script),)
    )
    prompt = random_prompt(300, seed=3)
    expected = answer(server, prompt)
    with ServerProcess(spec) as twin, pytest.raises((AssertionError, httpx.HTTPError, ServerDiedError)):
        churned_answer(twin, prompt, expected)


def churned_answer(server: ServerProcess, prompt: list[int], expected: Answer) -> None:
    churn(server, seed=4)
    assert_same(expected, answer(server, prompt))
