"""Wrong answers that users of other caches have reported, at a server of a model with GDN: each report's
recipe gives the answers of no cache. docs/models.md lists the reports.

A first server computes all prompts, writes them to disk, and ends. KV or states of some of them are damaged
then, with forged checksums: the twins, whose answers must differ. A second server has that disk.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from disk_damage import Damage, Place, damage_last_layer, spoil_values
from test_hybrid_tiers import STATES, random_tokens, settled, spoil

from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from tests.support.compare import assert_same
from tests.support.servers.server import STRICT, Answer, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long]

TOOLS = 600
"""Tokens with which a short and a long request begin: long enough for a state where they fork."""
CONTEXT = 200
SESSIONS = 5
"""Of the last one, KV is damaged."""
HBM_TOKENS = 1600


def spec(folder: Path) -> ServerSpec:
    return ServerSpec(
        model="tiny-gdn",
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always", *STATES),
            *("--kv-dram-size", "64MB", "--kv-disk-path", str(folder), "--kv-disk-size", "1GB"),
            *("--max-total-tokens", str(HBM_TOKENS), "--max-running-requests", "4"),
            *("--chunked-prefill-size", "1024"),
        ),
        environment={"SGLANG_MAMBA_CONV_DTYPE": "float32", **STRICT},
    )


@dataclass(frozen=True)
class Prompt:
    """A prompt, its answer without a cache, and how many of its tokens are on disk at least."""

    tokens: list[int]
    cold: Answer
    known: int


@dataclass(frozen=True)
class Played:
    """The prompts of each recipe; those of the twins are last."""

    folder: Path
    after_long: list[Prompt]
    sessions: list[Prompt]
    short: list[Prompt]


def ask(server: ServerProcess, prompt: list[int], **fields: Any) -> Answer:
    return server.generate(prompt, max_new_tokens=8, **fields)


def cold(server: ServerProcess, prompt: list[int]) -> Answer:
    answer = ask(server, prompt, cache_salt=f"cold {prompt[-1]} {len(prompt)}")
    assert answer.cached_tokens == 0
    return answer


def churn(server: ServerProcess, seed: int) -> None:
    """Other prompts, of more tokens than HBM has."""
    for number in range(HBM_TOKENS // 300 + 2):
        ask(server, random_tokens(300, 1000 * seed + number))


def short_after_long(server: ServerProcess, seed: int) -> Prompt:
    """A short request, a long one with the same beginning, and the short one again, while HBM has the
    beginning and after it has left."""
    tools = random_tokens(TOOLS, seed)
    short, long = [*tools, *random_tokens(30, seed + 1)], [*tools, *random_tokens(400, seed + 2)]
    expected = cold(server, short)
    first = ask(server, short)
    assert first.cached_tokens == 0
    assert_same(cold(server, long), ask(server, long))
    again = ask(server, short)
    assert again.hbm_tokens == TOOLS
    churn(server, seed)
    loaded = ask(server, short)
    assert (loaded.hbm_tokens, loaded.dram_tokens) == (0, TOOLS)
    for answer in (first, again, loaded):
        assert_same(expected, answer)
    return Prompt(short, expected, TOOLS)


def session(server: ServerProcess, seed: int) -> Prompt:
    """The third turn of a session of which two were answered."""
    history: list[int] = []
    for turn in range(2):
        history += random_tokens(CONTEXT, seed + turn)
        history += ask(server, history).tokens
    third = [*history, *random_tokens(30, seed + 2)]
    return Prompt(third, cold(server, third), len(history) - 17)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    folder = tmp_path_factory.mktemp("reported") / "kv"
    with ServerProcess(spec(folder)) as server:
        after_long = [short_after_long(server, 10)]
        sessions = [session(server, 100 + 10 * number) for number in range(SESSIONS - 1)]
        texts = [random_tokens(24, 200 + number) for number in range(2 * SESSIONS)]
        short = [Prompt(text, cold(server, text), 0) for text in texts]
        before = settled(folder)
        after_long.append(short_after_long(server, 20))
        forked = settled(folder)
        sessions.append(session(server, 300))
        last = settled(folder)
    damage(of("state", forked - before), spoil)
    damage(of("full", last - forked), spoil_values)
    return Played(folder, after_long, sessions, short)


def of(component: str, places: set[Place]) -> set[Place]:
    return {place for place in places if component in place[0].parts}


def damage(places: set[Place], how: Damage) -> None:
    assert places
    damage_last_layer(places, how, forge=True)
    for rank in {segment.parent for segment, _ in places}:
        # The index has checksums of the headers too; a new one, made from the segments, has the forged ones.
        shutil.rmtree(rank / INDEX_DIRECTORY)
        assert repair_directory(rank).blocks


@pytest.fixture(scope="module")
def server(played: Played) -> Iterator[ServerProcess]:
    with ServerProcess(spec(played.folder)) as server:
        yield server


def test_sessions_that_come_back_from_disk_at_once_get_their_own_kv(
    server: ServerProcess, played: Played
) -> None:
    """ai-dynamo/dynamo#14416, among short requests. The last session is the twin."""
    among = zip(played.sessions, played.short[::2], played.short[1::2], strict=True)
    prompts = [each for three in among for each in three]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda prompt: ask(server, prompt.tokens), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.disk_tokens >= prompt.known
        if prompt is played.sessions[-1]:
            with pytest.raises(AssertionError):
                assert_same(prompt.cold, answer)
        else:
            assert_same(prompt.cold, answer)


def test_a_short_request_after_a_long_one_sees_its_tools(server: ServerProcess, played: Played) -> None:
    """vllm-project/vllm#49127, from disk; the first server has had HBM and DRAM. The last one is the twin."""
    sound, damaged = played.after_long
    for prompt in (sound, damaged):
        answer = ask(server, prompt.tokens)
        assert answer.disk_tokens == TOOLS
        if prompt is damaged:
            with pytest.raises(AssertionError):
                assert_same(prompt.cold, answer)
        else:
            assert_same(prompt.cold, answer)
