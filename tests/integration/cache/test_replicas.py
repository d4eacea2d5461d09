"""Replicas of one server (``--dp-size``): each is an instance of its own, and the router chooses one."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from disk_damage import damage_last_layer, runs, spoil_values
from token_requests import generate, random_prompt

from sglang_ext.protocol.cluster import url_of_replica
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.cluster.members_view import fills_of
from sglang_ext.testing.waiting import until
from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from sglang_ext.tiers import Tier
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
TOKENS = 20 * BLOCK
LIMITS = ("--max-total-tokens", "4096", "--chunked-prefill-size", "512")
WITHIN_S = 60.0
FAMILIES = ("tiny-moe", "tiny-mla", "tiny-mla-moe", "tiny-gemma3")
MODELS = ["tiny", *(pytest.param(name, marks=pytest.mark.long) for name in FAMILIES)]


class Replicas:
    """A server with two replicas; a test that kills it starts another one in its place."""

    def __init__(self, model: str, folder: Path, leak_guard: LeakGuard) -> None:
        self.folder = folder
        self.port = free_port()
        """Where each test's router listens, and the server looks for it."""
        self.spec = ServerSpec(
            model=model,
            flags=(
                *("--radix-cache-backend", "global", "--kv-check", "--kv-instance-id", "a", "--dp-size", "2"),
                *("--kv-router", f"http://127.0.0.1:{self.port}", "--kv-load-policy", "always"),
                "--enable-cache-report",
                *("--kv-dram-size", "64MB", "--kv-disk-path", str(folder), "--kv-disk-size", "1GB", *LIMITS),
            ),
            environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        )
        self._leak_guard = leak_guard
        self.server = self._started(self.spec)
        self.stock = self._started(ServerSpec(model=model, flags=LIMITS))
        self.said: list[list[tuple[list[int], Answer]]] = [[], []]
        """By rank, the prompts of which a replica has the KV on disk, and their answers."""

    def _started(self, spec: ServerSpec) -> ServerProcess:
        with self._leak_guard.adopting():
            server = ServerProcess(spec)
            server.start()
        return server

    @property
    def urls(self) -> list[str]:
        """Of the replicas, by rank."""
        return [url_of_replica(self.server.url, rank) for rank in range(2)]

    def disk(self, rank: int) -> Path:
        """The directory of a replica."""
        return self.folder / f"dp{rank}"

    def kill(self, rank: int) -> None:
        """Kill the scheduler of one replica: SGLang then ends the server."""
        (pid,) = self.server.processes(f"sglang::scheduler_DP{rank}")
        os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        """Start the server again."""
        self.server.stop()
        self.server = self._started(self.spec)

    def stop(self) -> None:
        """End both servers."""
        self.server.stop()
        self.stock.stop()


@pytest.fixture(scope="module", params=MODELS)
def replicas(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard
) -> Iterator[Replicas]:
    replicas = Replicas(request.param, tmp_path_factory.mktemp("kv"), leak_guard)
    yield replicas
    replicas.stop()


@pytest.fixture
async def router(replicas: Replicas) -> AsyncIterator[Router]:
    async with Router(RouterConfig(port=replicas.port, policy="prompt-tree")) as router:
        await both_known(router, replicas)
        yield router
        router.check()


async def both_known(router: Router, replicas: Replicas) -> None:
    """Both replicas can take requests, and their snapshots are in."""

    def known() -> bool:
        there = {each.name: each.trusted and not each.awaited for each in router.fleet.usable()}
        return there == dict.fromkeys(replicas.urls, True)

    await until(known, WITHIN_S, "both replicas")


async def expected(client: aiohttp.ClientSession, replicas: Replicas, prompt: list[int]) -> Answer:
    """The answer of a server with SGLang's own cache."""
    answer, _ = await generate(client, replicas.stock.url, prompt)
    return answer


async def test_a_conversation_stays_with_the_replica_that_has_its_kv(
    replicas: Replicas, router: Router, client: aiohttp.ClientSession
) -> None:
    rng = random.Random(3)
    homes = []
    for _ in range(4):
        prompt = random_prompt(rng, TOKENS + 3)
        answer, headers = await generate(client, router.url, prompt)
        assert answer.cached_tokens == 0
        assert_same(await expected(client, replicas, prompt), answer, atol=1e-4)
        homes.append((prompt, answer, headers["x-kv-instance"]))
    assert {home for _, _, home in homes} == set(replicas.urls)
    for prompt, first, home in homes:
        later = prompt + first.tokens + random_prompt(rng, 5)
        answer, headers = await generate(client, router.url, later, routed_dp_rank=7)
        assert (headers["x-kv-instance"], answer.cached_tokens) == (home, TOKENS)
        assert_same(await expected(client, replicas, later), answer, atol=1e-4)
        replicas.said[replicas.urls.index(home)].append((later, answer))
    await until(lambda: all(map(partial(is_on_disk, router, replicas), range(2))), WITHIN_S, "disk")
    assert all(runs(replicas.disk(rank)) for rank in range(2))
    async with client.get(router.url + "/cluster") as response:
        seen = {each["instance"]: each for each in (await response.json())["instances"]}
    assert {name: each["url"] for name, each in seen.items()} == dict(
        zip(("a.dp0", "a.dp1"), replicas.urls, strict=True)
    )
    assert router.agents.can_fetch(*replicas.urls), "what one has, the other can fetch"
    assert len({each["epoch"] for each in seen.values()} | {each["agent"] for each in seen.values()}) == 4


def is_on_disk(router: Router, replicas: Replicas, rank: int) -> bool:
    """Whether the KV of all answers of a replica is on its disk, as it reports itself."""
    beat = router.agents.beat(replicas.urls[rank])
    blocks = sum((len(prompt) + len(answer.tokens) - 1) // BLOCK for prompt, answer in replicas.said[rank])
    return beat is not None and fills_of(beat)[Tier.DISK].used >= blocks


async def test_the_rank_decides_where_a_prompt_is_computed(
    replicas: Replicas, router: Router, client: aiohttp.ClientSession
) -> None:
    """The twin: without the router's rank, the same prompt finds nothing at the other replica."""
    prompt = random_prompt(random.Random(4), TOKENS + 3)
    cached = [
        (await generate(client, replicas.server.url, prompt, routed_dp_rank=rank))[0].cached_tokens
        for rank in (0, 0, 1)
    ]
    assert cached == [0, TOKENS, 0]


async def test_replicas_die_together_and_come_back_with_what_each_has_on_disk(
    replicas: Replicas, router: Router, client: aiohttp.ClientSession
) -> None:
    """One byte of each block of the first replica is damaged meanwhile, so that its answers are others."""
    replicas.kill(1)
    await until(lambda: not router.fleet.usable(), WITHIN_S, "the verdict over both")
    replicas.server.stop()
    damage_last_layer(runs(replicas.disk(0)), spoil_values, forge=True)
    # The index has checksums of the headers too; a new one, made from the segments, has the forged ones.
    (shard,) = replicas.disk(0).iterdir()
    shutil.rmtree(shard / INDEX_DIRECTORY)
    assert repair_directory(shard).blocks
    replicas.restart()
    await both_known(router, replicas)
    for rank, url in enumerate(replicas.urls):
        for prompt, before in replicas.said[rank]:
            answer, headers = await generate(client, router.url, prompt)
            assert (headers["x-kv-instance"], answer.disk_tokens > 0) == (url, True)
            if rank == 1:
                assert_same(before, answer, atol=1e-4)
            else:
                with pytest.raises(AssertionError):
                    assert_same(before, answer, atol=1e-4)
