"""Streaming from disk on a real server: admitted early, thrown away when a layer is damaged, never wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hooked_server import FOLDER

from sglang_ext.testing.waiting import wait_until
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
BLOCKS = 20
AGAIN = "run again"


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(faults: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    spec = ServerSpec(
        run=(str(Path(__file__).parents[1].joinpath("servers", "faulty_disk_server.py")),),
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always"),
            *("--kv-dram-size", "16MB", "--kv-disk-path", str(tmp_path_factory.mktemp("kv"))),
            *("--kv-disk-size", "1GB", "--max-total-tokens", "2400", "--chunked-prefill-size", "256"),
            "--enable-metrics",
        ),
        environment={
            FOLDER: str(faults),
            **STRICT,
        },
    )
    with ServerProcess(spec) as server:
        yield server


@pytest.fixture
def prompt(server: ServerProcess, request: pytest.FixtureRequest) -> list[int]:
    """A prompt that is on disk and nowhere else."""
    rng = random.Random(request.node.name)
    prompt = [rng.randrange(100, 30_000) for _ in range(BLOCKS * BLOCK + 4)]
    server.generate(prompt, max_new_tokens=1)
    for _ in range(6):  # more than DRAM holds, at the speed of the disk
        server.generate([rng.randrange(100, 30_000) for _ in range(1000)], max_new_tokens=1)
        wait_until(lambda: metric(server, "disk_backlog_bytes") == 0, seconds=20, what="everything written")
    return prompt


def metric(server: ServerProcess, name: str, label: str = "") -> float:
    samples = server.metrics().items()
    return sum(v for k, v in samples if k.startswith(f"sglang_ext_cache_{name}{{") and label in k)


def cold(server: ServerProcess, prompt: list[int]) -> Answer:
    return server.generate(prompt, max_new_tokens=8, cache_salt="cold")


def restarts(server: ServerProcess) -> int:
    return server.log.read_text(errors="replace").count(AGAIN)


def test_what_streams_gives_the_cold_answer(server: ServerProcess, prompt: list[int]) -> None:
    before = restarts(server)
    longer = [*prompt, 7, 8, 9]
    answer = server.generate(longer, max_new_tokens=8)
    assert answer.disk_tokens == BLOCKS * BLOCK
    assert_same(cold(server, longer), answer)
    wait_until(
        lambda: metric(server, "disk_blocks_total", '"streamed"') >= BLOCKS, seconds=10, what="streamed"
    )
    assert restarts(server) == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_layer_costs_time_and_no_answer(
    server: ServerProcess, prompt: list[int], faults: Path, stream: bool
) -> None:
    """Also for a request of the same batch, of several chunks, whose answer is streamed to the client."""
    before = restarts(server)
    longer = [*prompt, *prompt[:300]]
    other = list(reversed(prompt))
    (faults / "damage").touch()
    try:
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(server.generate, longer, max_new_tokens=8, stream=stream)
            second = pool.submit(server.generate, other, max_new_tokens=8, stream=stream)
            answers = first.result(), second.result()
    finally:
        (faults / "damage").unlink()
    assert restarts(server) > before
    assert_same(cold(server, longer), answers[0])
    assert_same(cold(server, other), answers[1])
    assert answers[0].disk_tokens < BLOCKS * BLOCK
    server.flush()  # waits until nothing runs and nothing is held


def test_a_server_that_does_not_look_gives_another_answer(
    server: ServerProcess, prompt: list[int], faults: Path
) -> None:
    """The twin."""
    longer = [*prompt, 7, 8, 9]
    (faults / "damage").touch()
    (faults / "blind").touch()
    try:
        damaged = server.generate(longer, max_new_tokens=8)
    finally:
        (faults / "damage").unlink()
        (faults / "blind").unlink()
    with pytest.raises(AssertionError):
        assert_same(cold(server, longer), damaged)
    server.flush()
