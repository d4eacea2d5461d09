"""The disk tier of a real server: warm after a kill, a fault is a miss, one owner, nothing leaks.

How answers stay the same with disk hits among others is in test_same_answer.py.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from disk_damage import damage_last_layer, runs, spoil_values
from tuned_model import tuned

from sglang_ext.config import KvConfig
from sglang_ext.engine.tiers.opening import open_disk
from sglang_ext.errors import ConfigError
from sglang_ext.testing.blocks import LAYOUT
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import wait_until
from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.owner import lost_owners
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16

GetServer = Callable[[ServerSpec], ServerProcess]


def spec(folder: Path, *more: str) -> ServerSpec:
    return ServerSpec(
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always"),
            *("--kv-dram-size", "16MB", "--kv-disk-path", str(folder), "--kv-disk-size", "1GB"),
            *("--max-total-tokens", "2400", "--chunked-prefill-size", "256", "--enable-metrics", *more),
        ),
        environment=STRICT,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(100, 30_000) for _ in range(20 * BLOCK + 4)] for _ in range(6)]


@pytest.fixture(scope="module")
def cold(folder: Path, prompts: list[list[int]]) -> list[Answer]:
    """Answers of a server that computed them, wrote them to disk, and was then killed with SIGKILL.

    The last prompt's KV is damaged then, with forged checksums, so that verification passes.
    """
    with ServerProcess(spec(folder)) as server:
        answers = [server.generate(prompt, max_new_tokens=8) for prompt in prompts[:-1]]
        wait_until(lambda: on_disk(server) >= 5 * 20, seconds=20, what="five prompts on disk")
        sound = runs(folder)
        answers.append(server.generate(prompts[-1], max_new_tokens=8))
        wait_until(lambda: on_disk(server) >= 6 * 20, seconds=20, what="six prompts on disk")
        (scheduler,) = server.processes("sglang::scheduler")
        os.kill(scheduler, signal.SIGKILL)
    damage_last_layer(runs(folder) - sound, spoil_values, forge=True)
    # The index has checksums of the headers too; a new one, made from the segments, has the forged ones.
    (rank,) = folder.iterdir()
    shutil.rmtree(rank / INDEX_DIRECTORY)
    assert repair_directory(rank).blocks >= 6 * 20
    return answers


@pytest.fixture(scope="module")
def server(folder: Path, cold: list[Answer]) -> Iterator[ServerProcess]:
    """The next server on the same directory, which ends an answer only once the answer is on disk."""
    acked = ("--kv-durability", "acked")
    with ServerProcess(spec(folder, "--kv-instance-id", "second-life", *acked)) as server:
        yield server


def on_disk(server: ServerProcess) -> float:
    return counted(server, "sglang_ext_cache_blocks", 'tier="disk"')


def counted(server: ServerProcess, name: str, label: str) -> float:
    return sum(
        value
        for sample, value in server.metrics().items()
        if sample.startswith(f"{name}{{") and label in sample
    )


def test_a_restart_after_a_kill_is_warm(
    server: ServerProcess, prompts: list[list[int]], cold: list[Answer]
) -> None:
    calls = server.pool_calls()
    for prompt, before in zip(prompts[:3], cold[:3], strict=True):
        again = server.generate(prompt, max_new_tokens=8)
        assert again.disk_tokens == 20 * BLOCK
        assert_same(before, again)
    # The next turn of a conversation.
    longer = [*prompts[3], *cold[3].tokens, *prompts[0][:100]]
    answer = server.generate(longer, max_new_tokens=8)
    assert answer.disk_tokens == 20 * BLOCK
    assert_same(server.generate(longer, max_new_tokens=8, cache_salt="cold"), answer)
    # Looked up, brought from disk into memory that was set aside for it, computed, written on.
    server.wait_for_pool_calls(calls, "match", "alloc_mem", "swap_in", "insert", "swap_out")
    assert not server.pool_calls()["transfer_with_insert"]


def test_another_tenant_finds_nothing(server: ServerProcess, prompts: list[list[int]]) -> None:
    for fields in ({"cache_salt": "other"}, {"extra_key": "other"}):
        answer = server.generate(prompts[4], max_new_tokens=1, **fields)
        assert answer.cached_tokens == 0


def test_a_second_server_on_one_directory_is_refused_by_name(server: ServerProcess, folder: Path) -> None:
    """Opened here as the second server's factory would open it."""
    config = KvConfig(dram_size=1, disk_path=str(folder))
    with pytest.raises(ConfigError, match=r"is in use by .*second-life") as refused:
        open_disk(config, "another", "tp0of1", LAYOUT)
    assert refused.value.field == "--kv-disk-path"


def test_undetectable_damage_changes_the_answer(
    server: ServerProcess, prompts: list[list[int]], cold: list[Answer]
) -> None:
    """The twin: the answers above come from the bytes on the disk."""
    damaged = server.generate(prompts[-1], max_new_tokens=8)
    assert damaged.disk_tokens == 20 * BLOCK
    with pytest.raises(AssertionError):
        assert_same(cold[-1], damaged)


def test_a_damaged_block_is_computed_again(
    server: ServerProcess, folder: Path, prompts: list[list[int]], cold: list[Answer]
) -> None:
    before = counted(server, "sglang_ext_cache_disk_blocks_total", 'event="read_failed"')
    calls = server.pool_calls()
    damage_last_layer(runs(folder), flip, forge=False)
    answer = server.generate(prompts[4], max_new_tokens=8)
    assert answer.disk_tokens == 0
    assert_same(cold[4], answer)
    wait_until(
        lambda: counted(server, "sglang_ext_cache_disk_blocks_total", 'event="read_failed"') > before,
        seconds=10,
        what="the count of blocks that could not be read",
    )
    server.wait_for_pool_calls(calls, "free_mem")


def update(server: ServerProcess, model: Path) -> None:
    """New weights under running requests, and no flush: as reinforcement learning does it."""
    server.post("/pause_generation", {"mode": "in_place"})
    server.post("/update_weights_from_disk", {"model_path": str(model), "flush_cache": False})
    server.post("/continue_generation", {})


def test_weights_updated_in_place_neither_use_nor_leave_kv_of_others(
    server: ServerProcess, tmp_path: Path
) -> None:
    """A request runs through the update; its prompt and answer are sent again before and after the first
    weights are back, whose KV is on disk."""
    rng = random.Random(7)
    known, running = ([rng.randrange(100, 30_000) for _ in range(20 * BLOCK + 4)] for _ in range(2))
    before = on_disk(server)
    with_first = server.generate(known, max_new_tokens=8)
    assert with_first.durability == "durable"
    wait_until(lambda: on_disk(server) >= before + 20, seconds=20, what="the prompt on disk")
    fine_tune = tuned(model_path("tiny"), tmp_path / "tuned")
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(server.generate, running, max_new_tokens=300)
        wait_until(
            lambda: server.get("/v1/loads")["loads"][0]["num_running_reqs"], seconds=20, what="a request"
        )
        update(server, fine_tune)
        assert not answer.done()
        with_tuned = server.generate(known, max_new_tokens=8)
        through = answer.result()
    assert with_tuned.cached_tokens == 0
    assert (with_tuned.durability, through.durability) == ("durable", "uncached")
    limited = ("--model-path", str(fine_tune), "--max-total-tokens", "2400")
    with ServerProcess(ServerSpec(flags=limited)) as fresh:
        assert_same(fresh.generate(known, max_new_tokens=8), with_tuned)
    with pytest.raises(AssertionError):
        assert_same(with_first, with_tuned)
    server.wait_idle()
    update(server, model_path("tiny"))
    again = server.generate(known, max_new_tokens=8)
    assert again.disk_tokens == 20 * BLOCK
    assert_same(with_first, again)
    whole = [*running, *through.tokens]
    found = server.generate(whole, max_new_tokens=8)
    assert_same(server.generate(whole, max_new_tokens=8, cache_salt="cold"), found)


def test_a_directory_that_goes_under_the_server_is_made_anew(server: ServerProcess, folder: Path) -> None:
    """And an answer is durable only when its whole conversation is in the new one. Last here: the tests above
    lose their blocks on disk."""
    rng = random.Random(8)
    prompt, others = ([rng.randrange(100, 30_000) for _ in range(20 * BLOCK + 4)] for _ in range(2))
    first = server.generate(prompt, max_new_tokens=8)
    assert (first.durability, list(lost_owners(folder))) == ("durable", [])
    (rank,) = folder.iterdir()
    shutil.rmtree(rank)
    (scheduler,) = server.processes("sglang::scheduler")
    assert [(owner.pid, owner.instance) for owner in lost_owners(folder)] == [(scheduler, "second-life")]
    assert server.generate(others, max_new_tokens=8).durability == "durable"
    assert not list(lost_owners(folder))
    turn = [*prompt, *first.tokens, *others[:100]]
    answer = server.generate(turn, max_new_tokens=8)
    assert (answer.cached_tokens >= 20 * BLOCK, answer.durability) == (True, "durable")
    assert_same(server.generate(turn, max_new_tokens=8, cache_salt="cold"), answer)
    blocks = len(others) // BLOCK + len(turn) // BLOCK
    wait_until(lambda: on_disk(server) >= blocks, seconds=20, what="both conversations on disk")
    capacity = lambda: counted(server, "sglang_ext_cache_capacity_blocks", 'tier="disk"')  # noqa: E731
    wait_until(lambda: capacity() > 0, seconds=20, what="the capacity of the new directory")
    assert sum(file.stat().st_blocks for file in rank.glob("*.seg")) > 0


def flip(layer: bytearray) -> None:
    layer[len(layer) // 2] ^= 1
