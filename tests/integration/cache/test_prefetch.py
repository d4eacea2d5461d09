"""A prompt is brought to HBM before its request comes, on a real server; and answers report loads."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from dram_damage import arena_files, flip_bit, last_change, make_huge, snapshot
from hooked_server import FOLDER

from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
BLOCKS = 20
TOKENS = BLOCK * BLOCKS
TOKEN_BYTES, LAYERS = 4096, 4
"""Sizes of the model `tiny`."""
REGION = "layer_region_block_layers_total"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("asked")


@pytest.fixture(scope="module")
def server(disk: Path, asked: Path) -> Iterator[ServerProcess]:
    spec = ServerSpec(
        run=(str(Path(__file__).parents[1].joinpath("servers", "prefetching_server.py")),),
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always"),
            *("--kv-dram-size", "16MB", "--kv-disk-path", str(disk), "--kv-disk-size", "1GB"),
            *("--max-total-tokens", "2400", "--chunked-prefill-size", "256", "--enable-metrics"),
            *("--kv-layer-region-size", "1GB"),
        ),
        environment={
            FOLDER: str(asked),
            **STRICT,
        },
    )
    with ServerProcess(spec) as server:
        yield server


def metric(server: ServerProcess, name: str, label: str = "") -> float:
    samples = server.metrics().items()
    return sum(v for k, v in samples if k.startswith(f"sglang_ext_cache_{name}{{") and label in k)


def push_out(server: ServerProcess, rng: random.Random) -> None:
    """More than DRAM holds, at the speed of the disk."""
    for _ in range(6):
        server.generate([rng.randrange(100, 30_000) for _ in range(1000)], max_new_tokens=1)
        wait_until(lambda: metric(server, "disk_backlog_bytes") == 0, seconds=20, what="everything written")


@pytest.fixture
def prompt(server: ServerProcess, request: pytest.FixtureRequest) -> list[int]:
    """A prompt that is on disk and nowhere else."""
    rng = random.Random(request.node.name)
    prompt = [rng.randrange(100, 30_000) for _ in range(TOKENS + 4)]
    server.generate(prompt, max_new_tokens=1)
    push_out(server, rng)
    return prompt


def prefetch(asked: Path, name: str, prompt: list[int]) -> list[object]:
    """Ask for a prompt; how that ended."""
    part, told = asked / f"{name}.part", asked / f"{name}.told"
    part.write_text(json.dumps(prompt))
    part.rename(asked / f"{name}.ask")
    wait_until(told.exists, seconds=20, what="the prefetch to end")
    ended: list[object] = json.loads(told.read_text())
    return ended


def cold(server: ServerProcess, prompt: list[int]) -> Answer:
    return server.generate(prompt, max_new_tokens=8, cache_salt="cold")


def test_what_was_on_disk_is_hit_in_hbm(server: ServerProcess, asked: Path, prompt: list[int]) -> None:
    assert prefetch(asked, "sound", prompt) == ["done", TOKENS, TOKENS]
    answer = server.generate(prompt, max_new_tokens=8)
    assert (answer.hbm_tokens, answer.dram_tokens, answer.disk_tokens) == (TOKENS, 0, 0)
    assert_same(cold(server, prompt), answer)
    wait_until(
        lambda: metric(server, "dram_blocks_total", '"prefetched"') >= BLOCKS, seconds=10, what="the count"
    )
    assert metric(server, "prefetches_total", '"done"') >= 1


def test_a_flipped_bit_gives_another_answer(server: ServerProcess, asked: Path) -> None:
    """The twin: the request hits the KV that the prefetch has copied to HBM."""
    server.flush()
    (arena,) = arena_files(server.pid)
    rng = random.Random(7)
    prompt = [rng.randrange(100, 30_000) for _ in range(TOKENS + 4)]
    empty = snapshot(arena)
    before = server.generate(prompt, max_new_tokens=8)
    last = wait_until(lambda: last_change(arena, empty), seconds=20, what="write-through")
    for _ in range(3):  # more than HBM holds, less than DRAM
        server.generate([rng.randrange(100, 30_000) for _ in range(900)], max_new_tokens=1)
    make_huge(arena, last)
    ended = prefetch(asked, "damaged", prompt)
    damaged = server.generate(prompt, max_new_tokens=8)
    assert ended[:2] == ["done", TOKENS]
    assert damaged.hbm_tokens == TOKENS
    with pytest.raises(AssertionError):
        assert_same(before, damaged)
    server.flush()


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "damaged"])
def test_layer_0_of_what_does_not_fit_is_taken_from_hbm(
    server: ServerProcess, asked: Path, damaged: bool
) -> None:
    """More sessions are announced than HBM has room for. In the twin, a bit of layer 0 was flipped in DRAM
    while that layer was brought, and flipped back: so the answer shows where the forward pass has it from.
    """
    server.flush()
    (arena,) = arena_files(server.pid)
    rng = random.Random(11 + damaged)
    late, *others = ([rng.randrange(100, 30_000) for _ in range(TOKENS + 4)] for _ in range(9))
    empty = snapshot(arena)
    before = server.generate(late, max_new_tokens=8)
    last = wait_until(lambda: last_change(arena, empty), seconds=20, what="write-through")
    for prompt in others:
        server.generate(prompt, max_new_tokens=1)
    # The last value of layer 0.
    block_bytes = BLOCK * TOKEN_BYTES
    place = last // block_bytes * block_bytes + block_bytes // LAYERS - 1
    if damaged:
        place = make_huge(arena, place)
    filled, used = (metric(server, REGION, what) for what in ('"filled"', '"used"'))
    for number, prompt in enumerate(others):
        prefetch(asked, f"other {number} {damaged}", prompt)
    assert prefetch(asked, f"late {damaged}", late)[0] == "no_room"
    wait_until(lambda: metric(server, REGION, '"filled"') >= filled + BLOCKS, seconds=20, what="layer 0")
    if damaged:
        flip_bit(arena, place, bit=6)
    answer = server.generate(late, max_new_tokens=8)
    assert answer.dram_tokens == TOKENS
    wait_until(lambda: metric(server, REGION, '"used"') >= used + BLOCKS, seconds=20, what="the count")
    if damaged:
        with pytest.raises(AssertionError):
            assert_same(before, answer)
    else:
        assert_same(before, answer)
        assert metric(server, "layer_region_blocks") > 0
    server.flush()


def test_an_answer_says_what_was_decided_and_by_which_numbers(
    server: ServerProcess, prompt: list[int]
) -> None:
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    details = server.post("/generate", body)["meta_info"]["cached_tokens_details"]
    assert details["storage"] == details["storage_found_tokens"] == details["storage_read_tokens"] == TOKENS
    assert (details["storage_decision"], details["storage_reason"]) == ("load", "always")
    assert details["storage_read_bytes"] == TOKENS * TOKEN_BYTES
    assert details["storage_backend"] == "global"
    assert details["storage_compute_us"] > 0
    wait_until(
        lambda: metric(server, "load_decisions_total", 'tier="disk"') >= 1, seconds=10, what="the count"
    )
    push_out(server, random.Random(8))
    measured = server.post("/generate", body)["meta_info"]["cached_tokens_details"]
    assert measured["storage_decision"] == "load"
    assert measured["storage_load_us"] > 0
    again = server.post("/generate", body)["meta_info"]["cached_tokens_details"]
    assert again["device"] == TOKENS
    assert "storage_decision" not in again
    assert again["storage_backend"] == "global", "as SGLang names its own also where nothing came from there"
