"""Replicas of one server, with ``--dp-size`` or with DP attention, where they step together: each is an
instance of its own, and the router chooses one."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest
from disk_damage import Place, damage_last_layer, spoil_values
from dram_damage import arena_files, last_change, make_huge, snapshot
from test_hybrid_tiers import STATES, WINDOWS
from test_hybrid_tiers import settled as written
from token_requests import advise, generate, random_prompt, settled

from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.cluster import url_of_replica
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.cluster.members_view import fills_of
from sglang_ext.router.policies import Match
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import until, wait_until
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
NS = ("tokens", None, None, None)
LIMITS = ("--max-total-tokens", "4096", "--chunked-prefill-size", "512")
WITHIN_S = 60.0


@dataclass(frozen=True)
class Kind:
    """A model, the flags with which a server of it has two replicas, and the ranks of each."""

    model: str
    flags: tuple[str, ...] = ("--dp-size", "2")
    ranks: int = 1
    model_flags: tuple[str, ...] = ()
    """Of a server without replicas too."""


ATTENTION = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
KINDS = {
    "tiny": Kind("tiny"),
    "tiny-moe": Kind("tiny-moe"),
    "tiny-mla": Kind("tiny-mla"),
    "tiny-mla-moe": Kind("tiny-mla-moe"),
    "tiny-gemma3": Kind("tiny-gemma3"),
    "tiny-spark": Kind("tiny-spark", model_flags=WINDOWS),
    "tiny-gdn": Kind("tiny-gdn", model_flags=STATES),
    "tiny-tp2": Kind("tiny", ("--dp-size", "2", "--tp-size", "2"), ranks=2),
    "tiny-moe-attention": Kind("tiny-moe", ATTENTION),
    "tiny-mla-moe-attention": Kind("tiny-mla-moe", ATTENTION),
    "tiny-gdn-attention": Kind("tiny-gdn", ATTENTION, model_flags=STATES),
    "tiny-step-attention": Kind("tiny-step", ATTENTION, model_flags=WINDOWS),
}


class Replicas:
    """A server with two replicas; a test that kills it starts another one in its place."""

    def __init__(self, kind: Kind, folder: Path, leak_guard: LeakGuard) -> None:
        self.kind = kind
        self.folder = folder
        self.port = free_port()
        """Where each test's router listens, and the server looks for it."""
        self.spec = ServerSpec(
            model=kind.model,
            flags=(
                *("--radix-cache-backend", "global", "--kv-check", "--kv-instance-id", "a", *kind.flags),
                *kind.model_flags,
                *("--kv-router", f"http://127.0.0.1:{self.port}", "--kv-load-policy", "always"),
                "--enable-cache-report",
                *("--kv-dram-size", "64MB", "--kv-disk-path", str(folder), "--kv-disk-size", "1GB", *LIMITS),
            ),
            environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
        )
        self._leak_guard = leak_guard
        self.server = self._started(self.spec)
        self.stock = self._started(ServerSpec(model=kind.model, flags=(*LIMITS, *kind.model_flags)))
        self.said: list[list[tuple[list[int], Answer]]] = [[], []]
        """By rank, the prompts of which a replica has the KV on disk, and their answers."""
        self.wrote: list[set[Place]] = [set(), set()]
        """By rank, the runs on disk with that KV."""

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

    def arenas(self) -> list[Path]:
        """The DRAM of all ranks of both replicas."""
        found = [arena for arena in arena_files(self.server.pid) if arena.stat().st_size > 1 << 24]
        assert len(found) == 2 * self.kind.ranks
        return found

    def kill(self, rank: int) -> None:
        """Kill the scheduler of one replica: SGLang then ends the server."""
        pid, *others = self.server.processes(f"sglang::scheduler_DP{rank}")
        assert len(others) == self.kind.ranks - 1
        os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        """Start the server again."""
        self.server.stop()
        self.server = self._started(self.spec)

    def stop(self) -> None:
        """End both servers."""
        self.server.stop()
        self.stock.stop()


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "tiny" else pytest.mark.long) for name in KINDS],
)
def replicas(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard
) -> Iterator[Replicas]:
    replicas = Replicas(KINDS[request.param], tmp_path_factory.mktemp("kv"), leak_guard)
    yield replicas
    replicas.stop()


@asynccontextmanager
async def routing(replicas: Replicas, policy: str) -> AsyncIterator[Router]:
    async with Router(RouterConfig(port=replicas.port, policy=policy)) as router:
        await both_known(router, replicas)
        router.fetching.least_wait_s = WITHIN_S  # the machine may be busy
        yield router
        router.check()


@pytest.fixture
async def router(replicas: Replicas) -> AsyncIterator[Router]:
    async with routing(replicas, "prompt-tree") as router:
        yield router


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


async def compare(
    client: aiohttp.ClientSession, replicas: Replicas, prompt: list[int], answer: Answer, damaged: bool
) -> None:
    """Verify that an answer is the one of SGLang's own cache; or not, if KV was damaged."""
    right = await expected(client, replicas, prompt)
    if damaged:
        with pytest.raises(AssertionError):
            assert_same(right, answer, atol=1e-4)
    else:
        assert_same(right, answer, atol=1e-4)


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
        assert headers["x-kv-instance"] == home
        assert TOKENS <= answer.cached_tokens < TOKENS + BLOCK
        assert_same(await expected(client, replicas, later), answer, atol=1e-4)
        replicas.said[replicas.urls.index(home)].append((later, answer))
    await until(lambda: all(map(partial(is_on_disk, router, replicas), range(2))), WITHIN_S, "disk")
    for rank in range(2):
        replicas.wrote[rank] = await asyncio.to_thread(written, replicas.disk(rank))
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
    url, prompt = replicas.server.url, random_prompt(random.Random(4), TOKENS + 3)
    first, _ = await generate(client, url, prompt, routed_dp_rank=0)
    later = next_turn(prompt, first)
    cached = [(await generate(client, url, later, routed_dp_rank=rank))[0].cached_tokens for rank in range(2)]
    assert first.cached_tokens == cached[1] == 0
    assert TOKENS <= cached[0] < TOKENS + BLOCK


def next_turn(prompt: list[int], answer: Answer) -> list[int]:
    """A prompt that goes on behind an answer, where models with states have one."""
    return [*prompt, *answer.tokens, 7]


def held(router: Router, url: str, prompt: list[int]) -> Match:
    """The tokens of a prompt that the router knows at a replica."""
    return router.trees.match(NS, encode_tokens(prompt)).get(url, Match(0))


async def pushed_out(
    router: Router, client: aiohttp.ClientSession, replicas: Replicas, prompts: list[list[int]]
) -> None:
    """Others are served until the KV of each replica's prompt is in DRAM only. Both compute at once: with DP
    attention, the replicas' batches differ in every step."""
    rng = random.Random(str(prompts))

    async def push(rank: int, url: str) -> None:
        for _ in range(40):
            match = held(router, url, prompts[rank])
            if match.tokens >= TOKENS and not match.hbm:
                return
            pushing = random_prompt(rng, rng.randrange(300, 900))
            await generate(client, replicas.server.url, pushing, routed_dp_rank=rank)
        raise AssertionError(f"still {held(router, url, prompts[rank])}")

    await asyncio.gather(*(push(rank, url) for rank, url in enumerate(replicas.urls)))


@pytest.mark.long
@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
async def test_each_replica_loads_from_its_dram(
    replicas: Replicas, router: Router, client: aiohttp.ClientSession, damaged: bool
) -> None:
    rng = random.Random(f"dram {damaged}")
    prompts = [random_prompt(rng, TOKENS + 3) for _ in range(2)]
    arenas = replicas.arenas()
    before = {arena: await asyncio.to_thread(snapshot, arena) for arena in arenas}
    answers = await asyncio.gather(
        *(
            generate(client, replicas.server.url, prompt, routed_dp_rank=rank)
            for rank, prompt in enumerate(prompts)
        )
    )
    for arena in arenas:
        changed = partial(last_change, arena, before[arena])
        last = await asyncio.to_thread(wait_until, changed, seconds=WITHIN_S, what="DRAM")
        if damaged:
            await asyncio.to_thread(make_huge, arena, last)
    await pushed_out(router, client, replicas, prompts)
    for prompt, (first, _), url in zip(prompts, answers, replicas.urls, strict=True):
        later = next_turn(prompt, first)
        again, headers = await generate(client, router.url, later)
        assert headers["x-kv-instance"] == url
        assert (again.hbm_tokens, again.disk_tokens) == (0, 0)
        assert again.dram_tokens >= TOKENS
        await compare(client, replicas, later, again, damaged)


@pytest.mark.long
async def test_a_hint_goes_to_the_replica_that_has_the_kv(
    replicas: Replicas, router: Router, client: aiohttp.ClientSession
) -> None:
    rng = random.Random(7)
    prompts = [random_prompt(rng, TOKENS) for _ in range(2)]
    for rank, prompt in enumerate(prompts):
        await generate(client, replicas.server.url, prompt, routed_dp_rank=rank)
    await pushed_out(router, client, replicas, prompts)
    for url, prompt in zip(replicas.urls, prompts, strict=True):
        told = await advise(client, router, input_ids=prompt)
        assert (told["instance"], told["tokens"]["hbm"]) == (url, 0)
        ready = await settled(client, router, told["id"])
        assert ready["state"] == "ready"
        answer, headers = await generate(client, router.url, [*prompt, 7])
        assert (headers["x-kv-instance"], headers["x-kv-route-reason"]) == (url, "advised")
        if not replicas.kind.model_flags:  # hints bring windows and states to DRAM
            assert (ready["moved_tokens"], answer.hbm_tokens, answer.dram_tokens) == (TOKENS, TOKENS, 0)
        assert answer.cached_tokens >= TOKENS
        assert_same(await expected(client, replicas, [*prompt, 7]), answer, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
async def test_what_one_replica_has_computed_the_other_fetches(
    replicas: Replicas, client: aiohttp.ClientSession, damaged: bool
) -> None:
    rng = random.Random(f"fetch {damaged}")
    async with routing(replicas, "round-robin") as router:
        arenas = replicas.arenas()
        before = {arena: await asyncio.to_thread(snapshot, arena) for arena in arenas}
        prompt = random_prompt(rng, TOKENS)
        answer, headers = await generate(client, router.url, prompt)
        owner = headers["x-kv-instance"]
        said = [*prompt, *answer.tokens[:-1]]  # the last token of an answer was never computed
        whole = len(said) // BLOCK * BLOCK
        await until(lambda: held(router, owner, said).tokens >= whole, WITHIN_S, "the index")
        written = partial(changes, before)
        places = await asyncio.to_thread(wait_until, written, seconds=WITHIN_S, what="DRAM")
        assert len(places) == replicas.kind.ranks, "the other replica writes nothing"
        if damaged:
            for arena, last in places.items():
                await asyncio.to_thread(make_huge, arena, last)
        later = [*said, answer.tokens[-1], *random_prompt(rng, 5)]
        again, headers = await generate(client, router.url, later)
        assert headers["x-kv-instance"] != owner
        assert (headers["x-kv-fetch"], headers["x-kv-fetch-source"]) == ("done", owner)
        assert (again.hbm_tokens, again.disk_tokens) == (0, 0)
        assert again.dram_tokens >= whole
        await compare(client, replicas, later, again, damaged)


def changes(before: Mapping[Path, npt.NDArray[np.uint8]]) -> dict[Path, int]:
    """The arenas that have changed since, and the place of the last change of each."""
    found = {arena: last_change(arena, then) for arena, then in before.items()}
    return {arena: last for arena, last in found.items() if last}


@pytest.mark.long
async def test_new_weights_are_a_new_namespace_at_each_replica(
    replicas: Replicas, router: Router, client: aiohttp.ClientSession
) -> None:
    prompt = random_prompt(random.Random(9), TOKENS + 3)

    async def ask() -> list[int]:
        """Tokens that each replica has of the prompt, behind whose answer the next one goes on."""
        nonlocal prompt
        answers = [
            (await generate(client, replicas.server.url, prompt, routed_dp_rank=rank))[0] for rank in range(2)
        ]
        assert_same(await expected(client, replicas, prompt), answers[0], atol=1e-4)
        assert_same(answers[0], answers[1], atol=1e-4)
        prompt = next_turn(prompt, answers[0])
        return [answer.hbm_tokens + answer.dram_tokens for answer in answers]

    assert await ask() == [0, 0]
    assert min(await ask()) >= TOKENS
    path = str(model_path(replicas.kind.model, "float32"))
    body = {"model_path": path, "flush_cache": False}
    async with client.post(replicas.server.url + "/update_weights_from_disk", json=body) as response:
        assert response.status == 200, await response.text()
    assert await ask() == [0, 0]
    assert min(await ask()) >= TOKENS


@pytest.mark.long
async def test_replicas_die_together_and_come_back_with_what_each_has_on_disk(
    replicas: Replicas, router: Router, client: aiohttp.ClientSession
) -> None:
    """One byte of each block of these prompts is damaged meanwhile at the first replica, so that its answers
    are others. The blocks of later tests stay: behind a huge value of theirs, norms give zeros."""
    assert all(replicas.said)
    replicas.kill(1)
    await until(lambda: not router.fleet.usable(), WITHIN_S, "the verdict over both")
    replicas.server.stop()
    damage_last_layer(replicas.wrote[0], spoil_values, forge=True)
    # The index has checksums of the headers too; a new one, made from the segments, has the forged ones.
    for index in list(replicas.disk(0).rglob(INDEX_DIRECTORY)):
        shutil.rmtree(index)
        assert repair_directory(index.parent).blocks
    replicas.restart()
    await both_known(router, replicas)
    for rank, url in enumerate(replicas.urls):
        for prompt, before in replicas.said[rank]:
            if replicas.kind.model_flags == STATES:
                # With pages of one token, routers get no names of what is on disk.
                answer, _ = await generate(client, replicas.server.url, prompt, routed_dp_rank=rank)
            else:
                answer, headers = await generate(client, router.url, prompt)
                assert headers["x-kv-instance"] == url
            assert answer.disk_tokens > 0
            if rank == 1:
                assert_same(before, answer, atol=1e-4)
            else:
                with pytest.raises(AssertionError):
                    assert_same(before, answer, atol=1e-4)
