"""A model of sounds (Qwen2-Audio): a sound finds the KV of the same sound, in every tier, and of no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import sounds
from dram_damage import arena_files, flip_bit, last_change, make_huge, snapshot
from pictures import TOKEN_BYTES, words

from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long]

RUN = (str(Path(__file__).parents[1] / "servers" / "sound_server.py"),)
BLOCK = 16
BEFORE, AFTER = 50, 40
SHARED = BEFORE // BLOCK * BLOCK
HBM_TOKENS = 1600
PROMPT = [*words(1, BEFORE), sounds.START, sounds.SOUND, sounds.END, *words(2, AFTER)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ServerSpec:
    model, folder = sounds.build(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("kv")
    return ServerSpec(
        flags=(
            *("--model-path", str(model), "--radix-cache-backend", "global", "--kv-check"),
            *("--kv-load-policy", "always", "--kv-dram-size", str(4000 * TOKEN_BYTES)),
            *("--kv-disk-path", str(folder), "--kv-disk-size", "1GB", "--enable-metrics"),
            *("--max-total-tokens", str(HBM_TOKENS), "--chunked-prefill-size", "256"),
        ),
        environment=STRICT,
        run=RUN,
    )


def ask(server: ServerProcess, number: int, **fields: object) -> Answer:
    return server.generate(PROMPT, max_new_tokens=8, audio_data=[sounds.sound(number)], **fields)


def on_disk(server: ServerProcess) -> float:
    found = server.metrics().items()
    return sum(v for name, v in found if name.startswith("sglang_ext_cache_blocks{") and "disk" in name)


@pytest.fixture(scope="module")
def cold(spec: ServerSpec, leak_guard: LeakGuard) -> list[Answer]:
    """Answers about two sounds by a server that has ended since; the KV of the first is on disk."""
    with leak_guard.adopting(), ServerProcess(spec) as server:
        first = ask(server, 1)
        blocks = first.prompt_tokens // BLOCK
        wait_until(lambda: on_disk(server) >= blocks, seconds=60, what="the prompt on disk")
        return [first, ask(server, 2, cache_salt="cold")]


@pytest.fixture(scope="module")
def server(spec: ServerSpec, cold: list[Answer], leak_guard: LeakGuard) -> Iterator[ServerProcess]:
    with leak_guard.adopting(), ServerProcess(spec) as server:
        yield server


def test_a_restart_finds_the_sound_on_disk_and_no_other(server: ServerProcess, cold: list[Answer]) -> None:
    whole = cold[0].prompt_tokens // BLOCK * BLOCK
    assert cold[0].prompt_tokens > BEFORE + AFTER + 20
    assert cold[0].prompt_tokens == cold[1].prompt_tokens, "the sounds are of one length"
    assert cold[0].tokens != cold[1].tokens, "the model does not hear its sounds"
    again = ask(server, 1)
    assert again.disk_tokens == whole
    assert_same(cold[0], again)
    other = ask(server, 2)
    assert other.cached_tokens == other.hbm_tokens == SHARED
    assert_same(cold[1], other)
    for number, expected in enumerate(cold, 1):
        again = ask(server, number)
        assert again.hbm_tokens == whole
        assert_same(expected, again)


def test_a_sound_comes_from_dram_and_one_damaged_bit_of_it_is_seen(
    server: ServerProcess, cold: list[Answer]
) -> None:
    def fill() -> None:
        for seed in range(HBM_TOKENS // 400 + 1):
            server.generate(words(1000 + seed, 400), max_new_tokens=1)

    server.flush()
    (arena,) = arena_files(server.pid)
    empty = snapshot(arena)
    before = ask(server, 3)
    written = wait_until(lambda: last_change(arena, empty), seconds=60, what="the copy in DRAM")
    fill()
    sound = ask(server, 3)
    assert sound.dram_tokens == before.prompt_tokens // BLOCK * BLOCK
    assert_same(before, sound)
    fill()
    offset = make_huge(arena, written)
    damaged = ask(server, 3)
    flip_bit(arena, offset, bit=6)
    assert damaged.dram_tokens == sound.dram_tokens
    with pytest.raises(AssertionError):
        assert_same(before, damaged)
    server.flush()
