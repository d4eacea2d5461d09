"""The cache over a server's life: aborts under pressure, new weights, priorities, refusals."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sglang_ext.testing.models import model_path
from tests.support.compare import assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec, ServerStartError

pytestmark = pytest.mark.integration

GetServer = Callable[[ServerSpec], ServerProcess]

POOL_TOKENS = 2000

CRAMPED = ServerSpec(
    model="tiny",
    flags=(
        *("--radix-cache-backend", "global", "--kv-dram-size", "12MB", "--kv-check", "--enable-metrics"),
        *("--max-total-tokens", str(POOL_TOKENS), "--chunked-prefill-size", "256"),
        "--enable-priority-scheduling",
    ),
    environment={
        "SGLANG_TEST_RETRACT": "1",
        **STRICT,
        "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    },
)


@pytest.fixture(scope="module")
def server(get_server: GetServer) -> ServerProcess:
    return get_server(CRAMPED)


async def storm(url: str, requests: int, concurrency: int, seed: int) -> Counter[str]:
    """Requests that share beginnings; some are given up on at a random moment, which aborts them."""
    rng = random.Random(seed)
    beginnings = [[rng.randrange(100, 30_000) for _ in range(rng.randrange(50, 500))] for _ in range(10)]
    outcome: Counter[str] = Counter()
    gate = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, number: int) -> None:
        beginning = beginnings[number % len(beginnings)]
        body: dict[str, Any] = {
            "input_ids": beginning[: rng.randrange(20, 500)]
            + [rng.randrange(100, 30_000) for _ in range(rng.randrange(5, 200))],
            "sampling_params": {
                "temperature": 0,
                "max_new_tokens": rng.randrange(1, 60),
                "ignore_eos": True,
            },
            "stream": rng.random() < 0.5,
            "priority": rng.randrange(3),
        }
        if rng.random() < 0.3:
            body["cache_salt"] = f"tenant-{rng.randrange(2)}"
        patience = None if rng.random() < 0.6 else rng.uniform(0.02, 1.0)
        async with gate:
            try:
                async with asyncio.timeout(patience), session.post(f"{url}/generate", json=body) as response:
                    await response.read()
                    outcome[str(response.status)] += 1
            except TimeoutError:
                outcome["given up"] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(one(session, number) for number in range(requests)))
    return outcome


async def test_a_storm_of_aborted_requests_leaks_nothing(server: ServerProcess, long_run: bool) -> None:
    """SGLang checks its pool in every busy and idle pass, and ours its tree; either ends the server."""
    requests = 300 if long_run else 60
    threads_before = server.scheduler_threads()
    outcome = await storm(server.url, requests, concurrency=16, seed=5)
    assert set(outcome) == {"200", "given up"}, outcome
    assert outcome["given up"] > requests // 20, outcome
    assert outcome["200"] > requests // 4, outcome
    server.wait_idle()
    metrics = server.metrics()
    used = metrics['sglang_ext_cache_blocks{tier="hbm",tp_rank="0"}']
    assert used <= POOL_TOKENS // 16
    assert metrics['sglang_ext_cache_dram_blocks_total{event="loaded",tp_rank="0"}'] > 0
    # Nothing is locked: everything can be flushed, and the pool is whole again.
    server.flush()
    assert server.scheduler_threads() == threads_before
    prompt = list(range(1000, 1000 + POOL_TOKENS - 200))
    assert server.generate(prompt, max_new_tokens=4).prompt_tokens == len(prompt)


def test_new_weights_are_a_new_namespace(server: ServerProcess) -> None:
    prompt = random.Random(3).sample(range(100, 30_000), 200)
    before = server.generate(prompt, max_new_tokens=4)
    assert server.generate(prompt, max_new_tokens=4).hbm_tokens > 0
    server.post(
        "/update_weights_from_disk",
        {"model_path": str(model_path("tiny", "float32")), "flush_cache": False},
    )
    after = server.generate(prompt, max_new_tokens=4)
    assert after.hbm_tokens == after.dram_tokens == 0
    assert server.generate(prompt, max_new_tokens=4).hbm_tokens > 0
    assert_same(before, after, atol=1e-4)


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("tiny-swa", ("--pp-size", "2"), "--pp-size above 1.*sliding windows.*Use --tp-size"),
        ("tiny", ("--kv-block-size", "24", "--page-size", "16"), "--kv-block-size"),
        (
            "tiny",
            ("--dp-size", "2", "--tp-size", "2", "--enable-dp-attention", "--speculative-algorithm", "NGRAM"),
            "--attn-dp-size above 1 and --speculative-algorithm. Drop one of them",
        ),
    ],
    ids=["windows in stages", "block size", "DP attention"],
)
def test_what_cannot_be_served_is_refused_by_name(model: str, flags: tuple[str, ...], message: str) -> None:
    spec = ServerSpec(model=model, flags=("--radix-cache-backend", "global", *flags))
    with pytest.raises(ServerStartError, match=message):
        ServerProcess(spec).start()


@pytest.mark.long
@pytest.mark.parametrize(
    ("policy", "kept"), [("eviction:least_frequently_used", True), ("lru", False)], ids=["own", "twin"]
)
def test_a_server_evicts_by_a_function_of_ones_own(policy: str, kept: bool) -> None:
    """One of two prompts was used often and the other lately; a third takes the room of one of them."""
    flags = ("--radix-cache-backend", "global", "--kv-check", "--kv-eviction-policy", policy)
    spec = ServerSpec(
        flags=(*flags, "--max-total-tokens", str(POOL_TOKENS)),
        environment={**STRICT, "PYTHONPATH": str(EXAMPLES)},
    )
    rng = random.Random(11)
    often, lately, more = ([rng.randrange(100, 30_000) for _ in range(size)] for size in (600, 600, 1000))
    with ServerProcess(spec) as server:
        for prompt in (*[often] * 4, lately, more):
            server.generate(prompt, max_new_tokens=1)
        assert (server.generate(often, max_new_tokens=1).cached_tokens >= 592) == kept


EXAMPLES = Path(__file__).parents[3] / "examples" / "policies"
