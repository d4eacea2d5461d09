"""The router's index of a real server: right within a second of every change, and of no use when in doubt.

The truth comes from the server itself: a second reader says hello, and gets a snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from index_truth import assert_right, known
from tuned_model import tuned

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import Instance, Match
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import until
from sglang_ext.tiers import Tier
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.redis_server import RedisServer, redis_is_installed
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
WITHIN_S = 60.0
NS = ("tokens", None, None, None)
RNG = random.Random(11)


@pytest.fixture(scope="module")
def port() -> int:
    """Where each test's router listens, and the server looks for it."""
    return free_port()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "cluster.key"
    path.touch(mode=0o600)
    path.write_text("an-integration-test-0123456789-abcdefghij\n")
    return path


@pytest.fixture(scope="module")
def spec(port: int, key_file: Path, tmp_path_factory: pytest.TempPathFactory) -> ServerSpec:
    return ServerSpec(
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-instance-id", "one"),
            *("--kv-router", f"http://127.0.0.1:{port}", "--kv-cluster-key-file", str(key_file)),
            *("--kv-dram-size", "14MB", "--kv-disk-path", str(tmp_path_factory.mktemp("kv"))),
            *("--kv-disk-size", "1GB", "--kv-load-policy", "always"),
            *("--max-total-tokens", "2048", "--chunked-prefill-size", "512"),
        )
    )


class Running:
    """The server that runs now; one test kills it and starts another."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server


@pytest.fixture(scope="module")
def running(spec: ServerSpec, leak_guard: LeakGuard) -> Iterator[Running]:
    with leak_guard.adopting():
        process = ServerProcess(spec)
        process.start()
    running = Running(process)
    yield running
    running.server.stop()


@pytest.fixture
def server(running: Running) -> ServerProcess:
    return running.server


@pytest.fixture
async def router(port: int, key_file: Path) -> AsyncIterator[Router]:
    key = str(key_file)
    config = RouterConfig(port=port, cluster_key_file=key, policy="prompt-tree", cost_profile="none")
    async with Router(config) as router:
        yield router
        router.check()


def prompt(tokens: int = 20 * BLOCK + 3) -> list[int]:
    return [RNG.randrange(100, 30_000) for _ in range(tokens)]


async def generate(client: aiohttp.ClientSession, url: str, tokens: list[int], **fields: Any) -> None:
    body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 1}, **fields}
    async with client.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def test_what_a_server_says_of_itself_is_what_it_is_expected_to_take(
    server: ServerProcess, router: Router, client: aiohttp.ClientSession
) -> None:
    """Its chunks, its running batch of all clients, and the error of the estimated times."""
    await known(router, server)
    assert router.fleet.batching(server.url).chunk == 512

    def there() -> Instance:
        (instance,) = router.fleet.usable()
        return instance

    await until(lambda: router.costs.queue_s(there()) == 0, WITHIN_S, "an idle server")
    alone = router.costs.decode_s(there())
    body = {
        "input_ids": prompt(),
        "rid": "direct",
        "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
    }
    direct = asyncio.ensure_future(client.post(server.url + "/generate", json=body))
    await until(
        lambda: router.costs.queue_s(there()) > 0, WITHIN_S, "a heartbeat with another client's request"
    )
    assert (router.fleet.in_flight(server.url), router.costs.decode_s(there()) > alone) == (0, True)
    async with client.post(server.url + "/abort_request", json={"rid": "direct"}) as answer:
        assert answer.status == 200
    (await direct).close()
    await until(lambda: router.costs.queue_s(there()) == 0, WITHIN_S, "a heartbeat without it")

    body = {"input_ids": prompt(1300), "stream": True, "sampling_params": {"max_new_tokens": 2}}
    async with client.post(router.url + "/generate", json=body, headers={"x-request-id": "est"}) as answer:
        assert answer.status == 200
        await answer.read()
    async with client.get(router.url + "/explain/est") as answer:
        estimate = (await answer.json())["routing"][-1]["estimate"]
    # Three passes, by defaults of 20 ms and 0.1 ms per token.
    assert estimate["exec_s"] / estimate["correction"] == pytest.approx(3 * 0.02 + 0.13, rel=0.01)
    assert estimate["observed_s"] > 0
    shown = router.metrics.registry.get_sample_value
    labels = {"instance": server.url, "term": "ttft"}
    observed = shown("sglang_ext_router_estimate_ratio_sum", labels)
    assert observed == pytest.approx(estimate["observed_s"] / estimate["ttft_s"])


async def post(client: aiohttp.ClientSession, url: str, body: dict[str, Any] | None = None) -> None:
    async with client.post(url, json=body or {}) as response:
        assert response.status == 200, await response.text()


def held(router: Router, server: ServerProcess, tokens: list[int], *rest: str | None) -> Match:
    namespace = ("tokens", None, *rest) if rest else NS
    return router.trees.match(namespace, encode_tokens(tokens)).get(server.url, Match(0))


async def test_what_was_computed_is_known_and_what_was_evicted_is_not(
    router: Router, server: ServerProcess, client: aiohttp.ClientSession
) -> None:
    replica = await known(router, server)
    prompts = [prompt() for _ in range(14)]
    slowest = 0.0
    for tokens in prompts:
        await generate(client, router.url, tokens)
        router.trees.forget(server.url)  # only the server's events count here, not the guess
        took = await until(
            lambda tokens=tokens: held(router, server, tokens).tokens >= 20 * BLOCK, WITHIN_S, "an insertion"
        )
        slowest = max(slowest, took)
    print(f"an insertion was known after {slowest * 1000:.1f} ms at most")
    tiers = [held(router, server, tokens) for tokens in prompts]
    assert tiers[-1].hbm == 20 * BLOCK
    assert tiers[0].hbm < 20 * BLOCK, "nothing was evicted from HBM"
    assert sum(match.below.get(Tier.DRAM, 0) for match in tiers) > 0
    await until(lambda: replica.names >= 14 * 20, 60, "blocks on disk")
    assert all(held(router, server, tokens).tokens >= 20 * BLOCK for tokens in prompts)
    assert sum(held(router, server, tokens).below.get(Tier.DISK, 0) for tokens in prompts) > 0
    await assert_right(router, server)
    assert router.agents.counters()[server.url].gaps == 0
    assert replica.trusted


async def test_tenants_are_kept_apart(
    router: Router, server: ServerProcess, client: aiohttp.ClientSession
) -> None:
    await known(router, server)
    tokens = prompt()
    await generate(client, router.url, tokens, cache_salt="mine")
    router.trees.forget(server.url)
    await until(lambda: held(router, server, tokens, None, "mine").tokens, WITHIN_S, "an insertion")
    assert held(router, server, tokens).tokens == 0
    assert held(router, server, tokens, "mine", None).tokens == 0
    await assert_right(router, server)


async def test_a_router_that_comes_back_receives_a_snapshot(router: Router, server: ServerProcess) -> None:
    """Each test has a router of its own at the same place."""
    await assert_right(router, server)
    assert router.agents.counters()[server.url].snapshots == 1
    assert router.trees.blocks > 0


async def test_a_killed_server_is_not_trusted_and_a_warm_one_tells_its_disk(
    router: Router,
    server: ServerProcess,
    running: Running,
    spec: ServerSpec,
    client: aiohttp.ClientSession,
    leak_guard: LeakGuard,
) -> None:
    replica = await known(router, server)
    tokens = prompt()
    before = replica.names
    await generate(client, router.url, tokens)
    await until(lambda: replica.names >= before + 20, WITHIN_S, "blocks on disk")
    router.trees.forget(server.url)
    for pid in server.processes("sglang::scheduler"):
        os.kill(pid, signal.SIGKILL)
    took = await until(lambda: held(router, server, tokens).tokens == 0, WITHIN_S, "the verdict")
    print(f"the verdict over a killed server fell after {took:.2f} s")
    await asyncio.to_thread(server.stop)
    again = ServerProcess(spec)
    with leak_guard.adopting():
        await asyncio.to_thread(again.start)
    running.server = again
    await known(router, again)
    match = held(router, again, tokens)
    assert (match.tokens, match.below) == (20 * BLOCK, {Tier.DISK: 20 * BLOCK})
    assert held(router, server, tokens).tokens == 0, "its former address is still believed"
    await assert_right(router, again)
    await generate(client, router.url, tokens)
    router.trees.forget(again.url)
    await until(lambda: held(router, again, tokens).hbm >= 19 * BLOCK, WITHIN_S, "a promotion")
    await assert_right(router, again)


async def test_new_weights_leave_nothing_that_matches(
    router: Router, server: ServerProcess, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    await known(router, server)
    tokens = prompt()
    await generate(client, router.url, tokens)
    router.trees.forget(server.url)
    await until(lambda: held(router, server, tokens).tokens, WITHIN_S, "an insertion")
    fine_tune = tuned(model_path("tiny", "float32"), tmp_path / "tuned")
    body = {"model_path": str(fine_tune), "flush_cache": False}
    await post(client, f"{server.url}/update_weights_from_disk", body)
    router.trees.forget(server.url)
    await until(lambda: held(router, server, tokens).tokens == 0, WITHIN_S, "an update of the weights")
    await generate(client, router.url, tokens)
    router.trees.forget(server.url)
    await until(lambda: held(router, server, tokens).tokens, WITHIN_S, "an insertion")
    await assert_right(router, server)


async def test_a_flush_empties_the_index(
    router: Router, server: ServerProcess, client: aiohttp.ClientSession
) -> None:
    replica = await known(router, server)
    tokens = prompt()
    await generate(client, router.url, tokens)
    await until(lambda: replica.blocks, WITHIN_S, "an insertion")
    await until(lambda: replica.names, 60, "blocks on disk")
    await post(client, f"{server.url}/flush_cache")
    took = await until(lambda: not replica.blocks and not replica.names, WITHIN_S, "a flush")
    print(f"a flush was known after {took * 1000:.1f} ms")
    await assert_right(router, server)


async def asked(client: aiohttp.ClientSession, url: str, tokens: list[int], session: str = "") -> int:
    """A request by a connection of its own; how many of its tokens that router expected to be cached."""
    body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    headers = {"connection": "close", **({"x-session-id": session} if session else {})}
    async with client.post(f"{url}/generate", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()
        return int(response.headers["x-kv-matched-tokens"])


@pytest.mark.skipif(not redis_is_installed(), reason="redis-server is not installed")
async def test_two_routers_over_redis_know_one_server_and_each_others_sessions(
    server: ServerProcess, port: int, key_file: Path, client: aiohttp.ClientSession
) -> None:
    """It registers with one; when that one goes, the other serves on. The twin has no Redis."""
    tokens, whole = prompt(), 20 * BLOCK

    def config(port: int, redis: str) -> RouterConfig:
        return RouterConfig(port=port, cluster_key_file=str(key_file), policy="prompt-tree", cluster=redis)

    with RedisServer() as redis:
        async with Router(config(0, redis.url)) as second:
            async with Router(config(port, redis.url)) as first, Router(config(0, "embedded")) as twin:
                for router in (first, second):
                    await known(router, server)
                assert not twin.fleet.rows
                await asked(client, first.url, tokens, session="s")
                await assert_right(second, server, WITHIN_S)
                assert await asked(client, second.url, tokens) == whole
                body = {"session": "s", "ttl_s": 5}
                hint: dict[str, Any] = {}
                async with asyncio.timeout(60):  # until Redis has passed the first router's session on
                    while hint.get("verdict") != "accepted":
                        await asyncio.sleep(0.05)
                        async with client.post(f"{second.url}/v1/advisory", json=body) as answer:
                            hint = await answer.json()
                other = prompt()
                await asked(client, second.url, other)
                await assert_right(first, server, WITHIN_S)
                assert await asked(client, first.url, other) == whole
                first.check()
            assert await asked(client, second.url, tokens) == whole
            await assert_right(second, server, WITHIN_S)
            second.check()


async def test_both_workers_of_a_router_know_what_the_server_holds(
    server: ServerProcess, port: int, key_file: Path, client: aiohttp.ClientSession, tmp_path: Path
) -> None:
    """Also a worker that is started anew after it was killed."""
    log, alone = tmp_path / "log", re.compile(r"worker (\d+) is process (\d+), alone at (http://\S+)")
    flags = ("--port", str(port), "--policy", "prompt-tree", "--cluster-key-file", str(key_file))
    command = [sys.executable, "-m", "sglang_ext.router", "--workers", "2", *flags]
    with log.open("w") as file:
        process = await asyncio.create_subprocess_exec(*command, stderr=file)

    async def all_know(tokens: list[int], workers: int) -> list[tuple[str, str, str]]:
        """Until the last of each number expects the prompt to be cached; those that were ever started."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                started = alone.findall(log.read_text())
                latest = {number: own for number, _, own in started}
                with contextlib.suppress(aiohttp.ClientError, AssertionError):
                    found = [await asked(client, own, tokens) for own in latest.values()]
                    if len(started) >= workers and set(found) == {20 * BLOCK}:
                        return started
                await asyncio.sleep(0.1)

    try:
        tokens = prompt()
        await generate(client, server.url, tokens)
        started = await all_know(tokens, 2)
        os.kill(int(started[0][1]), signal.SIGKILL)
        other = prompt()
        await generate(client, server.url, other)
        assert len(await all_know(other, 3)) == 3
        assert await asked(client, f"http://127.0.0.1:{port}", other) == 20 * BLOCK
    finally:
        process.terminate()
        await process.wait()
    assert process.returncode == 0
