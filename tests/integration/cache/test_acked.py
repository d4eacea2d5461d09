"""``--kv-durability acked`` on a real server: an answer whose end was sent is on disk."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from hooked_server import FOLDER

from sglang_ext.testing.waiting import wait_until
from sglang_ext.tiered_store.disk.check import check_directory
from tests.support.compare import assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
SLOW = 0.8
TIMEOUT = 2.5
TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def spec(faults: Path, folder: Path, *more: str) -> ServerSpec:
    return ServerSpec(
        run=(str(Path(__file__).parents[1].joinpath("servers", "faulty_disk_server.py")),),
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-load-policy", "always"),
            *("--kv-dram-size", "16MB", "--kv-disk-path", str(folder), "--kv-disk-size", "1GB"),
            *("--max-total-tokens", "2400", "--chunked-prefill-size", "256", "--enable-metrics", *more),
        ),
        environment={FOLDER: str(faults), **STRICT},
    )


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv")


@pytest.fixture(scope="module")
def server(faults: Path, folder: Path) -> Iterator[ServerProcess]:
    acked = ("--kv-durability", f"acked,timeout={TIMEOUT}", "--enable-response-store")
    with ServerProcess(spec(faults, folder, *acked)) as server:
        yield server


@pytest.fixture
def prompt(rng: random.Random) -> list[int]:
    return [rng.randrange(100, 30_000) for _ in range(6 * BLOCK + 4)]


@contextmanager
def fault(faults: Path, name: str, text: str = "") -> Iterator[None]:
    (faults / name).write_text(text)
    try:
        yield
    finally:
        (faults / name).unlink()


def metric(server: ServerProcess, name: str, label: str = "") -> float:
    samples = server.metrics().items()
    return sum(v for k, v in samples if k.startswith(f"sglang_ext_cache_{name}{{") and label in k)


def wait_for_metric(server: ServerProcess, name: str, label: str, least: float) -> None:
    wait_until(lambda: metric(server, name, label) >= least, seconds=10, what=f"{name} of {least}")


def events(server: ServerProcess, prompt: list[int], **fields: str) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events of a streamed answer of 8 tokens, with their times."""
    body = {
        "input_ids": prompt,
        "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True},
        "stream": True,
        **fields,
    }
    with httpx.stream("POST", f"{server.url}/generate", json=body, trust_env=False, timeout=60) as response:
        for line in response.iter_lines():
            data = line.removeprefix("data:").strip()
            if data and data != "[DONE]":
                yield time.monotonic(), json.loads(data)["meta_info"]


def blocks_on_disk(folder: Path) -> int:
    """The number of blocks that every rank has on disk."""
    return min(check_directory(rank).blocks for rank in folder.iterdir())


def test_the_end_waits_for_the_disk(server: ServerProcess, prompt: list[int], faults: Path) -> None:
    with fault(faults, "slow-writes", str(SLOW)):
        began = time.monotonic()
        answer = server.generate(prompt, max_new_tokens=8)
    assert answer.durability == "durable"
    assert time.monotonic() - began >= SLOW
    assert answer.stages is not None
    assert answer.stages.total < SLOW < answer.seconds
    assert_same(server.generate(prompt, max_new_tokens=8, cache_salt="other"), answer)
    wait_for_metric(server, "acked_answers_total", 'end="durable"', 2)
    # The write begins when the prompt is computed, so the end does not wait for the time of its 8 tokens.
    wait_for_metric(server, "durability_wait_seconds_sum", "", SLOW - answer.stages.total)


def test_tokens_before_the_last_do_not_wait(server: ServerProcess, prompt: list[int], faults: Path) -> None:
    seen = []
    with ExitStack() as held:
        held.enter_context(fault(faults, "hold-writes"))
        for _, meta in events(server, prompt):
            seen.append(meta)
            if meta["completion_tokens"] == 7:
                held.close()  # had it waited, it would come when the disk is given up
    *_, last, final = seen
    assert (last["completion_tokens"], last["finish_reason"]) == (7, None)
    assert final["finish_reason"] is not None
    assert final["cached_tokens_details"]["durability_end"] == "durable"


def test_a_response_in_the_background_is_completed_when_it_is_durable(
    server: ServerProcess, faults: Path
) -> None:
    (model,) = (each["id"] for each in server.get("/v1/models")["data"])
    body = {"model": model, "input": "tell me " * 60, "max_output_tokens": 8, "background": True}
    with fault(faults, "slow-writes", str(SLOW)):
        began = time.monotonic()
        name = server.post("/v1/responses", body)["id"]
        wait_until(lambda: status(server, name) not in ("queued", "in_progress"), seconds=20, what="the end")
        assert time.monotonic() - began >= SLOW
        assert status(server, name) in ("completed", "incomplete")


def status(server: ServerProcess, name: str) -> str:
    return str(server.get(f"/v1/responses/{name}")["status"])


def test_a_full_disk_is_said_and_not_waited_for(
    server: ServerProcess, prompt: list[int], faults: Path
) -> None:
    with fault(faults, "full"):
        began = time.monotonic()
        answer = server.generate(prompt, max_new_tokens=8)
        assert time.monotonic() - began < TIMEOUT
    assert answer.durability == "refused"
    wait_for_metric(server, "acked_answers_total", 'end="refused"', 1)
    # The next turn's write includes the refused blocks.
    longer = [*prompt, *answer.tokens, *prompt]
    assert server.generate(longer, max_new_tokens=8).durability == "durable"


def test_a_disk_that_hangs_holds_an_end_no_longer_than_the_flag_says(
    server: ServerProcess, prompt: list[int], faults: Path
) -> None:
    """Other requests go on meanwhile, and an abort of an answer whose end is held back changes nothing."""
    with fault(faults, "hold-writes"):
        for _, meta in events(server, prompt, rid="late"):
            if meta["completion_tokens"] == 7:
                # It has no whole block, so it waits for no disk. Once it has ended, the 8th token is computed
                # as well; an abort before that would end the answer itself.
                assert server.generate(prompt[:8], max_new_tokens=2).durability == "durable"
                server.post("/abort_request", {"rid": "late"})
    assert meta["completion_tokens"] == 8
    assert meta["finish_reason"]["type"] == "length"
    details = meta["cached_tokens_details"]
    assert details["durability_end"] == "late"
    assert details["durability_wait_us"] / 1e6 >= TIMEOUT
    wait_for_metric(server, "acked_answers_total", 'end="late"', 1)


def kill(server: ServerProcess) -> None:
    for scheduler in server.processes("sglang::scheduler"):
        os.kill(scheduler, signal.SIGKILL)


def test_durable_answers_survive_a_kill_and_others_do_not(
    server: ServerProcess, rng: random.Random, faults: Path, folder: Path
) -> None:
    it_survives_a_kill(server, spec(faults, folder), rng, faults, folder)


@pytest.mark.long
def test_durable_answers_survive_a_kill_of_two_ranks(
    rng: random.Random, faults: Path, tmp_path: Path
) -> None:
    plain = replace(
        spec(faults, tmp_path, "--tp", "2"), environment={FOLDER: str(faults), **STRICT, **TWO_RANKS}
    )
    acked = ("--kv-durability", "acked,timeout=20")
    with ServerProcess(replace(plain, flags=(*plain.flags, *acked))) as server:
        it_survives_a_kill(server, plain, rng, faults, tmp_path, ranks=2)


def it_survives_a_kill(
    server: ServerProcess,
    without_flag: ServerSpec,
    rng: random.Random,
    faults: Path,
    folder: Path,
    *,
    ranks: int = 1,
) -> None:
    """Killed right after the end of an answer was sent, with a slow disk. The second server is the twin."""
    prompt, other = ([rng.randrange(100, 30_000) for _ in range(10 * BLOCK + 4)] for _ in range(2))
    with fault(faults, "slow-writes", str(SLOW)):
        answer = server.generate(prompt, max_new_tokens=2 * BLOCK)
        kill(server)
    assert answer.durability == "durable"
    server.stop()
    assert len(list(folder.iterdir())) == ranks
    with ServerProcess(without_flag) as twin:
        # The KV of the last token was never computed.
        whole = [*prompt, *answer.tokens][: 12 * BLOCK + 1]
        found = twin.generate([*whole, 5, 6, 7], max_new_tokens=1)
        assert found.disk_tokens == 12 * BLOCK
        assert_same(answer, twin.generate(prompt, max_new_tokens=2 * BLOCK))
        twin.wait_idle()
        wait_until(lambda: metric(twin, "disk_backlog_bytes") == 0, seconds=20, what="everything written")
        before = metric(twin, "blocks", 'tier="disk"') / ranks
        with fault(faults, "slow-writes", str(SLOW)):
            told = twin.generate(other, max_new_tokens=2 * BLOCK)
            kill(twin)
    assert told.durability is None
    with pytest.raises(AssertionError):
        assert blocks_on_disk(folder) >= before + 12
