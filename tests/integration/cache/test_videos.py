"""A vision model: a video finds the KV of the same video, in every tier, and never that of another.

SGLang decodes the videos with decord. Models that are given the times of frames are in
`tests/patches/test_wide_pads.py`, without a server.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from dram_damage import arena_files, flip_bit, last_change, make_huge, snapshot
from pictures import END, MODEL, START, TOKEN_BYTES, VIDEO, video, words

from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(900)]

BLOCK = 16
BEFORE, AFTER = 50, 40
SHARED = BEFORE // BLOCK * BLOCK
"""Tokens of the blocks before the video."""
HBM_TOKENS = 3200
PROMPT = [*words(1, BEFORE), START, VIDEO, END, *words(2, AFTER)]
SETTLED = 60


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ServerSpec:
    return ServerSpec(
        model=MODEL,
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always"),
            *("--kv-dram-size", str(6000 * TOKEN_BYTES), "--kv-disk-size", "1GB", "--enable-metrics"),
            *("--kv-disk-path", str(tmp_path_factory.mktemp("kv"))),
            *("--max-total-tokens", str(HBM_TOKENS), "--chunked-prefill-size", "256"),
        ),
        environment=STRICT,
    )


def ask(server: ServerProcess, url: str, **fields: object) -> Answer:
    return server.generate(PROMPT, max_new_tokens=8, video_data=[url], **fields)


def on_disk(server: ServerProcess) -> float:
    found = server.metrics().items()
    return sum(v for name, v in found if name.startswith("sglang_ext_cache_blocks{") and "disk" in name)


@pytest.fixture(scope="module")
def cold(spec: ServerSpec, leak_guard: LeakGuard) -> list[Answer]:
    """Answers about two videos by a server that has ended since; the KV of the first is on disk."""
    with leak_guard.adopting(), ServerProcess(spec) as server:
        first = ask(server, video(1))
        blocks = first.prompt_tokens // BLOCK
        wait_until(lambda: on_disk(server) >= blocks, seconds=SETTLED, what="the prompt on disk")
        return [first, ask(server, video(2), cache_salt="cold")]


@pytest.fixture(scope="module")
def server(spec: ServerSpec, cold: list[Answer], leak_guard: LeakGuard) -> Iterator[ServerProcess]:
    with leak_guard.adopting(), ServerProcess(spec) as server:
        yield server


def test_a_restart_finds_the_video_on_disk_and_no_other(server: ServerProcess, cold: list[Answer]) -> None:
    whole = cold[0].prompt_tokens // BLOCK * BLOCK
    assert cold[0].prompt_tokens == cold[1].prompt_tokens > BEFORE + AFTER + 20
    assert cold[0].tokens != cold[1].tokens, "the model does not see its videos"
    again = ask(server, video(1))
    assert again.disk_tokens == whole
    assert_same(cold[0], again)
    other = ask(server, video(2))
    assert other.cached_tokens == other.hbm_tokens == SHARED
    assert_same(cold[1], other)
    for number, expected in enumerate(cold, 1):
        again = ask(server, video(number))
        assert again.hbm_tokens == again.cached_tokens == whole
        assert_same(expected, again)


def test_the_same_frames_at_another_rate_are_one_video_to_this_model(server: ServerProcess) -> None:
    """SGLang gives Qwen2.5-VL no times: a cold answer about the slow video is that of the fast one's KV."""
    ask(server, video(3, per_second=2))
    slow = video(3, per_second=1)
    cold = ask(server, slow, cache_salt="slow")
    found = ask(server, slow)
    assert found.cached_tokens == cold.prompt_tokens // BLOCK * BLOCK
    assert_same(cold, found)


def fill(server: ServerProcess) -> None:
    """Other prompts, until all earlier KV has left HBM."""
    for seed in range(HBM_TOKENS // 400 + 1):
        server.generate(words(1000 + seed, 400), max_new_tokens=1)


def test_a_video_comes_from_dram_and_one_damaged_bit_of_it_is_seen(server: ServerProcess) -> None:
    """With its twin: the answers above come from the bytes of a video's KV."""
    server.flush()
    (arena,) = arena_files(server.pid)
    empty = snapshot(arena)
    before = ask(server, video(5))
    written = wait_until(lambda: last_change(arena, empty), seconds=SETTLED, what="the copy in DRAM")
    fill(server)
    sound = ask(server, video(5))
    assert sound.dram_tokens == sound.prompt_tokens // BLOCK * BLOCK
    assert_same(before, sound)
    fill(server)
    offset = make_huge(arena, written)
    damaged = ask(server, video(5))
    flip_bit(arena, offset, bit=6)
    assert damaged.dram_tokens == sound.dram_tokens
    with pytest.raises(AssertionError):
        assert_same(before, damaged)
    server.flush()
