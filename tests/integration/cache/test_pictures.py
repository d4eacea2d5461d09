"""A vision model: a picture finds the KV of the same picture, in every tier, and never that of another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from dram_damage import arena_files, flip_bit, last_change, make_huge, snapshot
from pictures import MODEL, PICTURE_TOKENS, TOKEN_BYTES, picture, plain_picture, prompt, with_picture, words

from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
BEFORE, AFTER = 50, 40
"""Words around the picture: it begins and ends within a block."""
LENGTH = BEFORE + 2 + PICTURE_TOKENS + AFTER
WHOLE = LENGTH // BLOCK * BLOCK
SHARED = BEFORE // BLOCK * BLOCK
"""Tokens of the blocks before the picture."""
PROMPT = prompt(1, before=BEFORE, after=AFTER)
HBM_TOKENS = 1600
SETTLED = 60


def spec(folder: Path) -> ServerSpec:
    return ServerSpec(
        model=MODEL,
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always"),
            *(
                "--kv-dram-size",
                str(4000 * TOKEN_BYTES),
                "--kv-disk-path",
                str(folder),
                "--kv-disk-size",
                "1GB",
            ),
            *("--max-total-tokens", str(HBM_TOKENS), "--chunked-prefill-size", "256", "--enable-metrics"),
        ),
        environment=STRICT,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


def ask(server: ServerProcess, number: int, **fields: object) -> Answer:
    return server.generate(PROMPT, max_new_tokens=8, **with_picture(number, **fields))


def on_disk(server: ServerProcess) -> float:
    found = server.metrics().items()
    return sum(
        value for name, value in found if name.startswith("sglang_ext_cache_blocks{") and "disk" in name
    )


@pytest.fixture(scope="module")
def cold(folder: Path, leak_guard: LeakGuard) -> list[Answer]:
    """Answers about two pictures by a server that has ended since; the KV of the first is on disk."""
    with leak_guard.adopting(), ServerProcess(spec(folder)) as server:
        first = ask(server, 1)
        wait_until(lambda: on_disk(server) >= WHOLE // BLOCK, seconds=SETTLED, what="the prompt on disk")
        return [first, ask(server, 2, cache_salt="cold")]


@pytest.fixture(scope="module")
def server(folder: Path, cold: list[Answer], leak_guard: LeakGuard) -> Iterator[ServerProcess]:
    with leak_guard.adopting(), ServerProcess(spec(folder)) as server:
        yield server


def test_a_restart_finds_the_picture_on_disk_and_no_other(server: ServerProcess, cold: list[Answer]) -> None:
    assert cold[0].prompt_tokens == LENGTH
    assert cold[0].tokens != cold[1].tokens, "the model does not see its pictures"
    again = ask(server, 1)
    assert again.disk_tokens == WHOLE
    assert_same(cold[0], again)
    other = ask(server, 2)
    assert other.cached_tokens == other.hbm_tokens == SHARED
    assert_same(cold[1], other)


def test_the_same_picture_is_found_in_hbm(server: ServerProcess, cold: list[Answer]) -> None:
    for number, expected in enumerate(cold, 1):
        ask(server, number)
        again = ask(server, number)
        assert again.hbm_tokens == again.cached_tokens == WHOLE
        assert_same(expected, again)
    text = [*PROMPT[:BEFORE], *words(9, 30)]
    assert server.generate(text, max_new_tokens=1).cached_tokens == SHARED


def test_hashes_that_agree_in_thirty_bits_are_two_pictures(server: ServerProcess) -> None:
    """SGLang takes hashes from a client, so that they can be chosen: up to 0.5.22 it uses 30 bits of them."""
    ask(server, 1, mm_hashes=["5"])
    assert ask(server, 1, mm_hashes=["5"]).cached_tokens == WHOLE
    for near in (5 + (1 << 30), 5 + (1 << 62), 5 + (1 << 63)):
        assert ask(server, 2, mm_hashes=[f"{near:x}"]).cached_tokens == SHARED


def test_a_wide_picture_and_a_high_one_of_one_color_are_two(server: ServerProcess) -> None:
    """The processor makes the same values of both, and their tokens have other positions."""
    wide, high = ({"image_data": [plain_picture(*size)]} for size in ((224, 56), (56, 224)))
    server.flush()
    first = server.generate(PROMPT, max_new_tokens=8, **wide)
    other = server.generate(PROMPT, max_new_tokens=8, **high)
    assert (first.prompt_tokens, other.prompt_tokens) == (LENGTH, LENGTH)
    assert other.cached_tokens == SHARED
    assert_same(server.generate(PROMPT, max_new_tokens=8, cache_salt="high", **high), other)
    with pytest.raises(AssertionError):  # the twin
        assert_same(first, other)


def fill(server: ServerProcess) -> None:
    """Other prompts, until all earlier KV has left HBM."""
    for seed in range(HBM_TOKENS // 400 + 1):
        server.generate(words(1000 + seed, 400), max_new_tokens=1)


def test_a_picture_comes_from_dram_and_one_damaged_bit_of_it_is_seen(
    server: ServerProcess, cold: list[Answer]
) -> None:
    """With its twin: the answers above come from the bytes of a picture's KV."""
    server.flush()
    (arena,) = arena_files(server.pid)
    empty = snapshot(arena)
    # 64 tokens of a picture from the fifth token on: each of the four whole blocks ends with one of them.
    side, blocks = 224, 4
    large = prompt(5, before=3, after=6)

    def answer() -> Answer:
        return server.generate(large, max_new_tokens=4, **with_picture(3, side))

    before = answer()
    written = wait_until(lambda: last_change(arena, empty), seconds=SETTLED, what="the copy in DRAM")
    fill(server)
    sound = answer()
    assert sound.dram_tokens == blocks * BLOCK
    assert_same(before, sound)
    fill(server)
    offset = make_huge(arena, written)
    damaged = answer()
    flip_bit(arena, offset, bit=6)
    assert damaged.dram_tokens == sound.dram_tokens
    with pytest.raises(AssertionError):
        assert_same(before, damaged)
    server.flush()


async def test_a_router_sends_pictures_on(server: ServerProcess, client: aiohttp.ClientSession) -> None:
    def chat(number: int) -> dict[str, object]:
        parts = [
            {"type": "image_url", "image_url": {"url": picture(number)}},
            {"type": "text", "text": " What is in this picture?" * 8},
        ]
        return {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 8}

    async def answer(url: str, number: int) -> str:
        async with client.post(f"{url}/v1/chat/completions", json=chat(number)) as response:
            assert response.status == 200, await response.text()
            return str((await response.json())["choices"][0]["message"]["content"])

    async with Router(RouterConfig(worker_urls=(server.url,), port=0)) as router:
        texts = [await answer(router.url, number) for number in (11, 12, 11)]
        assert texts[0] == texts[2] != texts[1]
        assert [await answer(server.url, number) for number in (11, 12)] == texts[:2]
        router.check()


@pytest.fixture(scope="module")
def pair(leak_guard: LeakGuard) -> Iterator[PdServers]:
    flags = ("--max-total-tokens", "4000", "--kv-check", "--kv-pd-caching", "3")
    base = ServerSpec(model=MODEL, flags=flags, environment=STRICT)
    with leak_guard.adopting(), pd_servers([base], [base]) as (servers, _):
        yield servers


@pytest.mark.long
@pytest.mark.timeout(900)
def test_prefill_and_decode_hand_pictures_over(pair: PdServers, server: ServerProcess) -> None:
    expected = {number: ask(server, number, cache_salt=f"pair-{number}") for number in (1, 2)}
    for number in (1, 2, 1, 2):
        answer = pair.generate(PROMPT, max_new_tokens=8, **with_picture(number))
        assert_same(expected[number], answer)
    again = pair.generate(PROMPT, max_new_tokens=8, **with_picture(1))
    assert again.cached_tokens >= WHOLE
    other = pair.generate(PROMPT, max_new_tokens=8, **with_picture(4))
    assert other.cached_tokens <= SHARED
