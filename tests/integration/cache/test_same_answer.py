"""Same answer: with any mix of HBM, DRAM and disk hits, answers equal those without a cache.

Cold answers are taken on the same server under a cache salt of their own, so that nothing is reused. The
server's HBM holds a fraction of the conversations, its DRAM a larger one, its disk all of them; prefill is
chunked, and retraction is forced by SGLang's own test switch. The short form has each model and each page
size once, and latent attention and experts only in the comparison and its twin. Servers of two ranks are in
the long form.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from dram_damage import arena_files, flip_bit, make_huge, snapshot

from sglang_ext.testing.models import RECIPES
from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same, random_conversations
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

HBM_TOKENS = 3200
DRAM_TOKENS = 11_000
ANSWER_TOKENS = 8
CONCURRENCY = 4

GetServer = Callable[[ServerSpec], ServerProcess]


def spec(kind: str, page_size: int, disk: Path) -> ServerSpec:
    model = kind
    for suffix in (TWO_RANKS, TWO_STAGES, WHOLE_WINDOWS, SAME_KV):
        model = model.removesuffix(suffix)
    recipe, ranks = RECIPES[model], 2 if kind.endswith((TWO_RANKS, TWO_STAGES, SAME_KV)) else 1
    whole = ("--disable-hybrid-swa-memory",) if kind.endswith(WHOLE_WINDOWS) else ()
    split = "--pp-size" if kind.endswith(TWO_STAGES) else "--tp"
    contexts = ("--attn-cp-size", "2") if kind.endswith(SAME_KV) else ()
    # Ranks share the heads; latents have none, and each rank has them all. Stages share the layers.
    shares = 1 if contexts or ("kv_lora_rank" in recipe.config and split == "--tp") else ranks
    dram = DRAM_TOKENS * recipe.kv_elements_per_token * 4 // shares
    return ServerSpec(
        model=model,
        flags=(
            *("--radix-cache-backend", "global", "--kv-dram-size", str(dram), "--kv-check"),
            *("--kv-disk-path", str(disk), "--kv-disk-size", "4GB", "--kv-load-policy", "always"),
            *("--max-total-tokens", str(HBM_TOKENS), "--page-size", str(page_size)),
            *("--chunked-prefill-size", "256", *whole, *contexts, split, str(ranks)),
        ),
        environment={
            **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}),
            "SGLANG_TEST_RETRACT": "1",
            **STRICT,
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
        },
    )


TWO_RANKS, TWO_STAGES, WHOLE_WINDOWS, SAME_KV = "-tp2", "-pp2", "-whole", "-cp2"
SERVERS = (
    *(("tiny", 1), ("tiny", 16), ("tiny-mla", 1), ("tiny-mla", 16)),
    *(("tiny-moe", 16), ("tiny-mixtral", 1), ("tiny-glm", 16), ("tiny-mla-moe", 16)),
    *(("tiny-gemma2", 1), ("tiny-gemma3", 16), ("tiny-olmo3", 16)),
)
"""Models and page sizes."""
RANKS = (("tiny-moe-tp2", 16), ("tiny-mla-tp2", 16), ("tiny-mla-moe-tp2", 16), ("tiny-gemma3-tp2", 16))
STAGES = (("tiny-untied-pp2", 16), ("tiny-moe-pp2", 16))
WHOLE = (("tiny-spark-whole", 16),)
CONTEXTS = (("tiny-moe-cp2", 16), ("tiny-mla-cp2", 16), ("tiny-mla-moe-cp2", 16))
"""The same on two ranks, in two stages, with windows of which all KV is kept, and on two ranks with the same
KV, in the comparison and its twin alone. On a CPU, the last both compute all tokens of a prompt."""
SLOW = ("tiny-mla", "tiny-mla-moe")
"""Latent attention costs ten times as much on a CPU."""
LONG = {"tiny": 200, "tiny-mla": 20}
"""Conversations of the long form, where they are more than those of the short one."""


def on(*short: tuple[str, int], more: tuple[tuple[str, int], ...] = ()) -> pytest.MarkDecorator:
    """A test of all servers and more, of which the short form has some."""
    servers = [
        pytest.param(each, id=f"{each[0]}-page{each[1]}", marks=() if each in short else pytest.mark.long)
        for each in (*SERVERS, *more)
    ]
    return pytest.mark.parametrize("server", servers, indirect=True)


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, get_server: GetServer, tmp_path_factory: pytest.TempPathFactory
) -> ServerProcess:
    kind, page_size = request.param
    return get_server(spec(kind, page_size, tmp_path_factory.mktemp("kv")))


@dataclass
class Reuse:
    """The reuse by many answers, in tokens and in kinds of hit: the tiers used, as in "hbm+dram"."""

    prompt: int = 0
    dram: int = 0
    disk: int = 0
    kinds: set[str] = field(default_factory=set)

    def add(self, answer: Answer) -> None:
        self.prompt += answer.prompt_tokens
        self.dram += answer.dram_tokens
        self.disk += answer.disk_tokens
        hits = {"hbm": answer.hbm_tokens, "dram": answer.dram_tokens, "disk": answer.disk_tokens}
        self.kinds.add("+".join(tier for tier, tokens in hits.items() if tokens) or "cold")


def converse(server: ServerProcess, conversations: list[list[list[int]]], reuse: Reuse) -> list[list[Answer]]:
    """Play every conversation turn by turn, a few at a time; each turn's prompt repeats the turns before."""
    answers: list[list[Answer]] = [[] for _ in conversations]
    histories: list[list[int]] = [[] for _ in conversations]

    def turn(index: int, number: int) -> None:
        histories[index] += conversations[index][number]
        answer = server.generate(histories[index], max_new_tokens=ANSWER_TOKENS)
        answers[index].append(answer)
        histories[index] += answer.tokens

    for number in range(max(map(len, conversations))):
        having = [index for index, turns in enumerate(conversations) if number < len(turns)]
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(turn, having, [number] * len(having)))
    for each in answers:
        for answer in each:
            reuse.add(answer)
    return answers


def conversations_of(server: ServerProcess, long_run: bool) -> int:
    model, ranks = server.spec.model, server.spec.flags[-1]
    short = 3 if model in SLOW else 9
    return LONG.get(model, short) if long_run and ranks == "1" else short


@pytest.mark.timeout(3600)
@on(("tiny", 1), ("tiny-mla", 16), ("tiny-moe", 16), more=(*RANKS, *STAGES, *WHOLE, *CONTEXTS))
def test_hits_of_every_kind_give_the_cold_answer(server: ServerProcess, long_run: bool) -> None:
    count = conversations_of(server, long_run)
    conversations = random_conversations(
        seed=7, count=count, turns=(2, 4), tokens=(8, 700), system_tokens=150
    )
    reuse = Reuse()
    warm = converse(server, conversations, reuse)

    for index, turns in enumerate(conversations):
        history: list[int] = []
        for number, prompt in enumerate(turns):
            history += prompt
            cold = server.generate(history, max_new_tokens=ANSWER_TOKENS, cache_salt=f"cold-{index}-{number}")
            assert cold.cached_tokens == 0
            assert_same(cold, warm[index][number], atol=1e-4)
            history += warm[index][number].tokens

    # Prompts share beginnings, which stay in HBM: a prompt whose hit is in one tier alone is sent by itself.
    for tokens in (DRAM_TOKENS + 3200, HBM_TOKENS + 800, 0):
        fill(server, tokens, seed=tokens)
        again = server.generate(conversations[0][0], max_new_tokens=ANSWER_TOKENS)
        assert_same(warm[0][0], again, atol=1e-4)
        reuse.add(again)

    answered = [token for answer in (each for turns in warm for each in turns) for token in answer.tokens]
    assert len(set(answered)) > len(answered) / 4, "the model repeats itself"
    assert reuse.kinds >= {"cold", "hbm", "dram", "disk"}, reuse
    assert any("+" in kind for kind in reuse.kinds), reuse
    assert reuse.dram + reuse.disk > 0.05 * reuse.prompt, reuse


@on(("tiny", 1))
def test_the_stages_of_a_request_add_up(server: ServerProcess) -> None:
    rng = random.Random(11)
    answer = server.generate([rng.randrange(100, 30_000) for _ in range(300)], max_new_tokens=60)
    assert answer.stages is not None
    assert 0.9 * answer.seconds <= answer.stages.total <= answer.seconds, answer
    assert min(answer.stages.prefill_queue, answer.stages.prefill, answer.stages.decode) > 0.0
    assert answer.stages.transfer == answer.stages.decode_queue == 0.0


def fill(server: ServerProcess, tokens: int, seed: int) -> None:
    """Other prompts of so many tokens, so that everything before them has left the tiers that hold fewer."""
    rng = random.Random(seed)
    for _ in range(tokens // 800):
        server.generate([rng.randrange(100, 30_000) for _ in range(800)], max_new_tokens=1)


@on(("tiny", 1), ("tiny-mla", 16), ("tiny-moe", 16), more=(*RANKS, *STAGES, *WHOLE, *CONTEXTS))
def test_one_damaged_bit_in_dram_is_seen(server: ServerProcess) -> None:
    """The twin: if this did not fail, the test above would prove nothing."""
    server.flush()
    arena = arena_files(server.pid)[0]
    rng = random.Random(11)
    # 25 whole blocks and a tail that no answer fills to another one: the copy in DRAM is the loaded part.
    prompt = [rng.randrange(100, 30_000) for _ in range(25 * 16 + 4)]
    empty = snapshot(arena)
    before = server.generate(prompt, max_new_tokens=ANSWER_TOKENS)
    written = wait_until(lambda: settled_change(arena, empty), seconds=20, what="write-through")
    fill(server, HBM_TOKENS + 800, seed=12)
    offset = make_huge(arena, written - 1)
    damaged = server.generate(prompt, max_new_tokens=ANSWER_TOKENS)
    flip_bit(arena, offset, bit=6)
    assert damaged.dram_tokens > 0, "the prompt was not loaded from DRAM"
    with pytest.raises(AssertionError):
        assert_same(before, damaged, atol=1e-4)
    server.flush()


def settled_change(arena: Path, before: npt.NDArray[np.uint8]) -> int:
    """One more than the offset of the last byte that has changed; 0 while none has or more are changing."""
    now = snapshot(arena)
    changed = np.flatnonzero(now != before)
    return int(changed[-1]) + 1 if changed.size and np.array_equal(now, snapshot(arena)) else 0


@on(("tiny", 1))
def test_a_salt_shares_nothing(server: ServerProcess) -> None:
    rng = random.Random(21)
    prompt = [rng.randrange(100, 30_000) for _ in range(200)]
    plain = server.generate(prompt, max_new_tokens=4)
    assert server.generate(prompt, max_new_tokens=4).hbm_tokens > 0
    mine = server.generate(prompt, max_new_tokens=4, cache_salt="mine")
    assert mine.hbm_tokens == mine.dram_tokens == 0
    assert server.generate(prompt, max_new_tokens=4, cache_salt="mine").hbm_tokens > 0
    theirs = server.generate(prompt, max_new_tokens=4, extra_key="theirs")
    assert theirs.hbm_tokens == theirs.dram_tokens == 0
    assert_same(plain, mine, atol=1e-4)
    assert_same(plain, theirs, atol=1e-4)


@on(("tiny", 1))
def test_what_is_in_use_is_not_deleted(server: ServerProcess) -> None:
    """MemServe, table 1: neither `/flush_cache` nor the needs of other requests delete KV in use."""
    rng = random.Random(41)
    prompt, *others = ([rng.randrange(100, 30_000) for _ in range(900)] for _ in range(4))
    expected = server.generate(prompt, max_new_tokens=120, cache_salt="cold")
    server.generate(prompt, max_new_tokens=1)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.generate, prompt, max_new_tokens=120)
        wait_until(lambda: running(server), seconds=30, what="the request")
        assert server.asked_to_flush() == 400
        for other in others:
            server.generate(other, max_new_tokens=2)
        assert_same(expected, answer.result(120), atol=1e-4)
    server.wait_idle()
    assert server.asked_to_flush() == 200


def running(server: ServerProcess) -> bool:
    return any(load["num_running_reqs"] for load in server.get("/v1/loads")["loads"])


@on(("tiny", 1))
def test_flushing_empties_every_tier(server: ServerProcess) -> None:
    rng = random.Random(31)
    prompt = [rng.randrange(100, 30_000) for _ in range(300)]
    server.generate(prompt, max_new_tokens=2)
    assert server.generate(prompt, max_new_tokens=2).hbm_tokens > 0
    server.flush()
    after = server.generate(prompt, max_new_tokens=2)
    assert after.cached_tokens == 0
