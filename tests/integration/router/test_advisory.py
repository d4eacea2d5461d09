"""Hints on a real server: the KV is in HBM before the request is, and no hint ever changes an answer.

Symphony's cases (section 3.4) are placed by the size of HBM: free, under growing pressure, full.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from dram_damage import arena_files, last_change, make_huge, snapshot
from token_requests import NAMESPACE, advise, cold, generate, held_in_hbm, random_prompt, settled

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.clients.pauses import Turned
from sglang_ext.router.cluster.members_view import fills_of
from sglang_ext.testing.waiting import until, wait_until
from sglang_ext.tiers import Tier
from tests.support.compare import assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
TOKENS = 20 * BLOCK
HBM_TOKENS = 2048
CHUNK = 256


@pytest.fixture(scope="module")
def port() -> int:
    """Where each test's router listens, and the server looks for it."""
    return free_port()


FAMILIES = ("tiny-moe", "tiny-mla", "tiny-mla-moe", "tiny-gemma3")
RANKS = (("tiny", 1), pytest.param(("tiny", 2), marks=pytest.mark.long))
of_each_family = pytest.mark.parametrize(
    "server",
    [*RANKS, *(pytest.param((name, 1), marks=pytest.mark.long) for name in FAMILIES)],
    ids=lambda param: f"{param[0]}-{param[1]} rank(s)",
    indirect=True,
)


@pytest.fixture(scope="module", params=RANKS, ids=lambda param: f"{param[1]} rank(s)")
def server(
    request: pytest.FixtureRequest,
    port: int,
    tmp_path_factory: pytest.TempPathFactory,
    leak_guard: LeakGuard,
) -> Iterator[ServerProcess]:
    model, ranks = request.param
    spec = ServerSpec(
        model=model,
        flags=(
            *("--radix-cache-backend", "global", "--kv-check", "--kv-instance-id", "one"),
            *("--kv-router", f"http://127.0.0.1:{port}", "--kv-load-policy", "always"),
            *("--kv-dram-size", "16MB", "--kv-disk-path", str(tmp_path_factory.mktemp("kv"))),
            *("--kv-disk-size", "1GB", "--max-total-tokens", str(HBM_TOKENS)),
            *("--chunked-prefill-size", str(CHUNK), "--kv-advisory-compute", "--enable-metrics"),
            *("--tp", str(ranks)),
        ),
        environment={
            **({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if ranks == 2 else {}),
            **STRICT,
        },
    )
    with leak_guard.adopting():
        process = ServerProcess(spec)
        process.start()
    # Compile now: a compilation at first use holds up its agent, on a busy machine for longer than a silence
    # that counts as death.
    process.generate(list(range(100, 1000)), max_new_tokens=2)
    process.flush()
    yield process
    process.stop()


@contextlib.asynccontextmanager
async def routing(port: int, server: ServerProcess, **config: Any) -> AsyncIterator[Router]:
    async with Router(RouterConfig(port=port, policy="prompt-tree", **config)) as router:
        # A machine that is busy with other tests may leave the server without a core for longer than 3 s.
        router.agents.verdict_s = 20.0
        await until(lambda: router.trees.trusted(server.url) and router.fleet.usable(), 30, "the server")
        yield router
        router.check()


@pytest.fixture
async def router(port: int, server: ServerProcess) -> AsyncIterator[Router]:
    # The hints of these tests are the clients'.
    async with routing(port, server, learnt_hints=0.0) as router:
        yield router


async def said_and_pushed_out(
    client: aiohttp.ClientSession, router: Router, server: ServerProcess, rng: random.Random
) -> list[int]:
    """A conversation of the session ``s`` whose KV HBM has given up; returns its tokens."""
    prompt = random_prompt(rng, TOKENS)
    await generate(client, router.url, prompt, session="s")
    for _ in range(3):
        await generate(client, router.url, random_prompt(rng, 900))
    where = router.trees.match(NAMESPACE, encode_tokens(prompt)).get(server.url)
    assert where is not None
    await until(lambda: not held_in_hbm(router, server, prompt), 60, "HBM to have given it up")
    return prompt


def blocks_on_disk(router: Router, server: ServerProcess) -> int:
    beat = router.agents.beat(server.url)
    return 0 if beat is None else fills_of(beat)[Tier.DISK].used


def deferred(server: ServerProcess) -> float:
    return server.metrics()['sglang_ext_cache_deferred_prompts{tp_rank="0"}']


async def test_a_hinted_request_hits_hbm(server, router, client, rng) -> None:
    """Case 1: HBM is free."""
    prompt = await said_and_pushed_out(client, router, server, rng)
    told = await advise(client, router, session="s")
    assert told["instance"] == server.url
    assert told["tokens"]["hbm"] == 0
    ready = await settled(client, router, told["id"])
    assert ready["state"] == "ready"
    assert ready["moved_tokens"] >= TOKENS
    async with client.get(f"{router.url}/cluster") as response:
        (instance,) = (await response.json())["instances"]
    assert instance["tiers"].keys() == {"hbm", "dram", "disk"}
    assert instance["tiers"]["hbm"]["size"] == HBM_TOKENS // BLOCK
    assert all(0 < fill["used"] <= fill["size"] for fill in instance["tiers"].values())
    await until(lambda: held_in_hbm(router, server, prompt) >= TOKENS, 60, "the index to see it")
    follow_up = prompt + random_prompt(rng, 5)
    answer, headers = await generate(client, router.url, follow_up, session="s")
    assert headers["x-kv-route-reason"] == "advised"
    assert (answer.hbm_tokens, answer.dram_tokens, answer.disk_tokens) == (TOKENS, 0, 0)
    assert_same(await cold(client, server, follow_up), answer)


async def test_what_is_brought_is_given_up_under_pressure(server, router, client, rng) -> None:
    """Case 2: others need HBM after the hint; its request then loads the evicted part and answers alike."""
    prompt = await said_and_pushed_out(client, router, server, rng)
    told = await advise(client, router, session="s")
    await settled(client, router, told["id"])
    await generate(client, router.url, random_prompt(rng, HBM_TOKENS - 200))
    answer, _ = await generate(client, router.url, [*prompt, 7], session="s")
    assert answer.cached_tokens == TOKENS
    assert answer.hbm_tokens < TOKENS, "loaded KV should have made room"
    assert_same(await cold(client, server, [*prompt, 7]), answer)


async def test_kv_of_a_later_request_is_in_hbm_shortly_before_it(server, router, client, rng) -> None:
    prompt = await said_and_pushed_out(client, router, server, rng)
    asked = time.monotonic()
    told = await advise(client, router, session="s", earliest_s=4)
    assert 3 < told["earliest_in_s"] <= 4
    await until(lambda: deferred(server) == 1, 60, "it to rest")
    assert held_in_hbm(router, server, prompt) == 0
    ready = await settled(client, router, told["id"])
    assert (ready["state"], ready["moved_tokens"] >= TOKENS) == ("ready", True)
    assert time.monotonic() - asked > 2, "not at once"
    answer, _ = await generate(client, router.url, [*prompt, 7], session="s")
    assert answer.hbm_tokens == TOKENS
    assert_same(await cold(client, server, [*prompt, 7]), answer)


async def test_a_request_earlier_than_announced_is_served_at_once(server, router, client, rng) -> None:
    prompt = await said_and_pushed_out(client, router, server, rng)
    told = await advise(client, router, session="s", earliest_s=3600)
    assert told["state"] == "moving"
    answer, headers = await generate(client, router.url, [*prompt, 7], session="s")
    assert headers["x-kv-route-reason"] == "advised"
    assert (answer.hbm_tokens, answer.cached_tokens) == (0, TOKENS)
    assert_same(await cold(client, server, [*prompt, 7]), answer)
    await until(lambda: deferred(server) == 0, 60, "it to be forgotten")


@pytest.mark.parametrize("learnt", [0.5, 0.0], ids=["learnt hints", "no hints"])
async def test_kv_of_a_session_that_pauses_is_back_before_its_next_turn(
    learnt: float, port, server, client, rng
) -> None:
    """No client sends a hint. The twin without the router's own loads late."""
    async with routing(port, server, learnt_hints=learnt) as router:
        for _ in range(8):
            router.pausing.pauses.learn(Turned("", "Python", "another"), 12.0)
        prompt = random_prompt(rng, TOKENS)
        await generate(client, router.url, prompt, session="s")
        asked = time.monotonic()
        for _ in range(3):
            await generate(client, router.url, random_prompt(rng, 900))
        await until(lambda: not held_in_hbm(router, server, prompt), 60, "HBM to have given it up")
        assert time.monotonic() - asked < 11, "long before its turn"
        if learnt:
            await until(lambda: held_in_hbm(router, server, prompt) >= TOKENS, 60, "it to be back")
        answer, _ = await generate(client, router.url, [*prompt, 7], session="s")
        found = (TOKENS, 0) if learnt else (0, TOKENS)
        assert (answer.hbm_tokens, answer.cached_tokens - answer.hbm_tokens) == found
        assert_same(await cold(client, server, [*prompt, 7]), answer)


@pytest.mark.parametrize("share", [0.5, 0.0], ids=["admitted as a whole", "not"])
async def test_sessions_that_do_not_fit_together_take_turns(share: float, port, server, client, rng) -> None:
    """Both turns come at once. The second waits until the first session's long pause begins."""
    async with routing(port, server, learnt_hints=0.0, program_share=share) as router:
        for _ in range(8):
            router.pausing.pauses.learn(Turned("", "Python", "another"), 600.0)
        programs, most = router.programs.programs, 0
        prompts = [random_prompt(rng, 3 * HBM_TOKENS // 8) for _ in range(2)]
        turns = [
            asyncio.create_task(generate(client, router.url, prompt, session=f"s{number}"))
            for number, prompt in enumerate(prompts)
        ]
        while not all(turn.done() for turn in turns):
            most = max(most, programs.working)
            await asyncio.sleep(0.005)
        assert most == (1 if share else 0)
        assert programs.waiting == 0
        for prompt, turn in zip(prompts, turns, strict=True):
            assert_same(await cold(client, server, prompt), (await turn)[0])


async def test_what_is_announced_goes_last(server, router, client, rng) -> None:
    """The same traffic as pushes a session out that is not expected."""
    prompt = await said_and_pushed_out(client, router, server, rng)
    await settled(client, router, (await advise(client, router, session="s"))["id"])
    for _ in range(3):
        await generate(client, router.url, random_prompt(rng, 900))
    answer, _ = await generate(client, router.url, [*prompt, 7], session="s")
    assert answer.hbm_tokens == TOKENS
    assert_same(await cold(client, server, [*prompt, 7]), answer)
    await generate(client, router.url, random_prompt(rng, HBM_TOKENS - 200))
    await until(lambda: held_in_hbm(router, server, prompt) < TOKENS, 60, "it to go, now that it was used")


async def test_a_high_priority_takes_the_place_of_a_low_one(server, router, client, rng) -> None:
    """Both are expected, and HBM has room for one and a half."""
    low, high = random_prompt(rng, 75 * BLOCK), random_prompt(rng, 75 * BLOCK)
    for session, prompt in (("low", low), ("high", high)):
        await generate(client, router.url, prompt, session=session)
    for session, prompt in (("low", low), ("high", high)):
        told = await advise(client, router, session=session, priority=int(session == "high"))
        await settled(client, router, told["id"])
        await until(lambda prompt=prompt: held_in_hbm(router, server, prompt) == 75 * BLOCK, 60, session)
    # The router's own guess from sending the requests counts for two seconds.
    await until(lambda: held_in_hbm(router, server, low) < 75 * BLOCK, 60, "the low one to make room")
    for session, prompt in (("high", high), ("low", low)):
        answer, _ = await generate(client, router.url, [*prompt, 7], session=session)
        assert answer.cached_tokens == 75 * BLOCK
        assert (answer.hbm_tokens == 75 * BLOCK) == (session == "high")
        assert_same(await cold(client, server, [*prompt, 7]), answer)


# -- uncached prompts ---------------------------------------------------------------------------------


async def test_uncached_tokens_are_computed_ahead_and_hit(server, router, client, rng) -> None:
    prompt = random_prompt(rng, 3 * CHUNK + 5 * BLOCK)
    told = await advise(client, router, input_ids=prompt)
    assert told["tokens"]["nowhere"] == len(prompt)
    ready = await settled(client, router, told["id"])
    assert (ready["state"], ready["moved_tokens"], ready["computed_tokens"]) == ("ready", 0, len(prompt))
    assert ready["tokens"]["hbm"] == len(prompt)
    answer, _ = await generate(client, router.url, [*prompt, 7])
    assert answer.hbm_tokens == len(prompt)
    computed = 'sglang_ext_cache_announced_blocks_total{event="computed",tp_rank="0"}'
    await until(lambda: server.metrics().get(computed, 0) * BLOCK >= len(prompt), 60, "the count")
    assert_same(await cold(client, server, [*prompt, 7]), answer)


async def test_a_request_in_the_middle_of_computing_ahead_goes_first(server, router, client, rng) -> None:
    """No piece begins while it runs: at most the one under way is added."""
    sampling = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    for _ in range(4):
        prompt, other = random_prompt(rng, 1600), random_prompt(rng, 50)
        told = await advise(client, router, input_ids=prompt)
        await until(lambda prompt=prompt: held_in_hbm(router, server, prompt), 60, "the first piece")
        before = held_in_hbm(router, server, prompt)
        answer, _ = await generate(client, router.url, other, sampling_params=sampling)
        async with client.get(f"{router.url}/v1/advisory/{told['id']}") as response:
            state = (await response.json())["state"]
        reached = held_in_hbm(router, server, prompt)
        ready = await settled(client, router, told["id"])
        assert (ready["state"], ready["computed_tokens"]) == ("ready", 1600)
        again, _ = await generate(client, server.url, other, sampling_params=sampling, cache_salt="cold")
        assert_same(again, answer)
        # On a busy machine pieces go on while the request is still on its way to the server.
        if (state, reached <= before + 2 * CHUNK) == ("computing", True):
            break
        # An announced prompt is kept for a while, and HBM holds only one of this length.
        await asyncio.to_thread(server.flush)
    else:
        pytest.fail("computing ahead went on beside each request")


async def test_the_request_itself_finds_what_was_computed_so_far(server, router, client, rng) -> None:
    prompt = random_prompt(rng, 1600)
    told = await advise(client, router, input_ids=prompt, session="s")
    await until(lambda: held_in_hbm(router, server, prompt), 60, "the first piece")
    answer, headers = await generate(client, router.url, [*prompt, 7], session="s")
    assert headers["x-kv-route-reason"] == "advised"
    assert CHUNK <= answer.hbm_tokens < 1600
    assert (await settled(client, router, told["id"]))["state"] == "used"
    assert_same(await cold(client, server, [*prompt, 7]), answer)


async def test_a_full_hbm_keeps_its_running_requests(server, router, client, rng) -> None:
    """Case 3: nothing of HBM is free. The hint waits below, and running requests are not disturbed."""
    prompt = await said_and_pushed_out(client, router, server, rng)
    long = random_prompt(rng, HBM_TOKENS - 300)
    running = asyncio.create_task(
        generate(
            client,
            router.url,
            long,
            sampling_params={"temperature": 0, "max_new_tokens": 150, "ignore_eos": True},
        )
    )
    await until(lambda: sum(row.in_flight for row in router.fleet.rows.values()), 60, "the long request")
    told = await advise(client, router, session="s")
    answer, _ = await running
    assert len(answer.tokens) == 150
    await settled(client, router, told["id"])
    follow_up, _ = await generate(client, router.url, [*prompt, 7], session="s")
    assert follow_up.cached_tokens == TOKENS
    assert_same(await cold(client, server, [*prompt, 7]), follow_up)


async def _late(client, router, prompt, rng) -> None:
    await advise(client, router, session="s")  # the request follows at once


async def _missing(client, router, prompt, rng) -> None:
    pass


async def _wrong(client, router, prompt, rng) -> None:
    told = await advise(client, router, input_ids=prompt[: 3 * BLOCK] + random_prompt(rng, 200), session="s")
    await settled(client, router, told["id"])


async def _cancelled(client, router, prompt, rng) -> None:
    told = await advise(client, router, session="s")
    async with client.delete(f"{router.url}/v1/advisory/{told['id']}") as response:
        assert (await response.json())["state"] == "cancelled"


async def _repeated(client, router, prompt, rng) -> None:
    first = await advise(client, router, session="s")
    for _ in range(5):
        assert (await advise(client, router, session="s"))["id"] == first["id"]
    await settled(client, router, first["id"])


HINTS: dict[str, Any] = {
    "late": _late,
    "missing": _missing,
    "wrong": _wrong,
    "cancelled": _cancelled,
    "repeated": _repeated,
}


SHORT = {"late", "wrong"}
KINDS = [
    pytest.param(kind, marks=() if kind in SHORT else pytest.mark.long, id=kind) for kind in sorted(HINTS)
]


@of_each_family
@pytest.mark.parametrize("kind", KINDS)
async def test_no_hint_changes_an_answer(kind, server, router, client, rng) -> None:
    prompt = await said_and_pushed_out(client, router, server, rng)
    await HINTS[kind](client, router, prompt, rng)
    follow_up = prompt + random_prompt(rng, 5)
    answer, _ = await generate(client, router.url, follow_up, session="s")
    assert answer.cached_tokens == TOKENS
    assert_same(await cold(client, server, follow_up), answer)


async def test_a_flood_of_hints_without_requests_does_no_harm(server, router, client, rng) -> None:
    prompts = [random_prompt(rng, 200) for _ in range(30)]
    for prompt in prompts[:5]:
        await generate(client, router.url, prompt)
    told = [await advise(client, router, input_ids=prompt, ttl_s=0.2) for prompt in prompts]
    assert {each["verdict"] for each in told} == {"accepted"}
    prompt = random_prompt(rng, TOKENS)
    answer, _ = await generate(client, router.url, prompt)
    assert_same(await cold(client, server, prompt), answer)
    await until(lambda: not len(router.advisor.book), 60, "every hint to have ended")


# -- documents ----------------------------------------------------------------------------------------


async def register(
    client: aiohttp.ClientSession, router: Router, server: ServerProcess, content: list[int]
) -> None:
    """Register a document, which the server computes ahead, or has, until all of it is in HBM."""
    async with client.put(f"{router.url}/v1/documents/d", json={"input_ids": content}) as response:
        assert response.status == 200, await response.text()
    await until(lambda: held_in_hbm(router, server, content) == len(content), 30, "the document's KV")


async def test_a_documents_kv_outlives_what_is_not_held_back(server, router, client, rng) -> None:
    """And without the document, the same traffic takes its KV."""
    document, plain = random_prompt(rng, TOKENS), random_prompt(rng, TOKENS)
    await register(client, router, server, document)
    await generate(client, router.url, plain)
    for _ in range(3):
        await generate(client, router.url, random_prompt(rng, 900))
    answer, headers = await generate(client, router.url, [7, 8], document_ids=["d"])
    assert answer.hbm_tokens == TOKENS
    assert_same(await cold(client, server, [*document, 7, 8]), answer)
    async with client.get(f"{router.url}/explain/{headers['x-request-id']}") as response:
        told = (await response.json())["documents"]
    assert told == {"ids": ["d"], "tokens": TOKENS, "cached_tokens": TOKENS}
    twin, _ = await generate(client, router.url, [*plain, 7, 8])
    assert twin.hbm_tokens < TOKENS, "KV without a hint should have gone"
    async with client.delete(f"{router.url}/v1/documents/d") as response:
        assert response.status == 200
    for _ in range(3):
        await generate(client, router.url, random_prompt(rng, 900))
    await until(
        lambda: held_in_hbm(router, server, document) < TOKENS, 10, "it to go, now that it is deleted"
    )


@of_each_family
async def test_a_damaged_bit_of_a_document_is_seen(server, router, client, rng) -> None:
    """The twin of the test above: its KV comes back to HBM as DRAM has it."""
    await asyncio.to_thread(server.flush)
    arenas = arena_files(server.pid)
    empty = snapshot(arenas[0])
    document = random_prompt(rng, TOKENS)
    await register(client, router, server, document)
    last = await asyncio.to_thread(
        wait_until, lambda: last_change(arenas[0], empty), seconds=20, what="write-through"
    )
    async with client.delete(f"{router.url}/v1/documents/d") as response:
        assert response.status == 200
    for _ in range(3):
        await generate(client, router.url, random_prompt(rng, 900))
    await until(lambda: not held_in_hbm(router, server, document), 60, "HBM to have given it up")
    await asyncio.to_thread(make_huge, arenas[0], last)
    await register(client, router, server, document)
    answer, _ = await generate(client, router.url, [7, 8], document_ids=["d"])
    assert answer.hbm_tokens == TOKENS
    with pytest.raises(AssertionError):
        assert_same(await cold(client, server, [*document, 7, 8]), answer, atol=1e-4)
    await asyncio.to_thread(server.flush)


@pytest.mark.long
async def test_a_document_survives_its_instances_restart(
    server, router, client, rng, leak_guard: LeakGuard
) -> None:
    """Its KV is read from disk before any request, because the router sends the hint to the new process."""
    document, before = random_prompt(rng, TOKENS), blocks_on_disk(router, server)
    await register(client, router, server, document)
    await until(lambda: blocks_on_disk(router, server) >= before + TOKENS // BLOCK, 20, "the disk")
    await asyncio.to_thread(server.stop)
    with leak_guard.adopting():  # it is the module's, and ends with it
        await asyncio.to_thread(server.start)
    await until(lambda: held_in_hbm(router, server, document) == TOKENS, 60, "the document's KV")
    computed = 'sglang_ext_cache_announced_blocks_total{event="computed",tp_rank="0"}'
    assert not server.metrics().get(computed, 0)
    answer, _ = await generate(client, router.url, [7, 8], document_ids=["d"])
    assert answer.hbm_tokens == TOKENS
    assert_same(await cold(client, server, [*document, 7, 8]), answer)
    await asyncio.to_thread(server.flush)


PROGRAM = """
import os, sys
from sglang_ext.patches.cpu import runtime
runtime.prepare_process(os.environ)
import sglang as sgl
from sglang_ext.patches.adapter.frontend import AdvisingEndpoint

@sgl.function
def program(s):
    s += "You are a careful clerk who writes down what has been said, and nothing else. " * 3
    s += sgl.gen("first", max_tokens=4)
    s["first"]  # waits for the answer
    print("a tool works", flush=True)
    sys.stdin.readline()
    s += " A tool has answered. "
    s += sgl.gen("second", max_tokens=4)
    branches = s.fork(2)
    for branch in branches:
        branch += " And this branch says: "
        branch += sgl.gen("third", max_tokens=4)
    branches.join()

endpoint = AdvisingEndpoint(sys.argv[1])
program.run(backend=endpoint).text()  # waits for the program
endpoint.hints.close()
print(endpoint.hints.sent, endpoint.hints.dropped, flush=True)
os._exit(0)
"""


async def test_a_frontend_program_announces_its_next_call(server, router) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, router.url),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    async with asyncio.timeout(120):
        while (await process.stdout.readline()) != b"a tool works\n":
            assert not process.stdout.at_eof()
    await until(lambda: len(router.advisor.book) > 0, 30, "the hint after the first answer")
    said, _ = await asyncio.wait_for(process.communicate(b"\n"), 120)
    sent, dropped = map(int, said.decode().split()[-2:])
    assert (sent, dropped) == (5, 0), "after each of four answers, and at the fork"
    # The call after the tool, that of the fork's beginning, and a branch: each was announced.
    assert router.advisor.book.counts["used"] >= 2
