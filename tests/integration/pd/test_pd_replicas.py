"""Prefill and decode servers with replicas (``--dp-size``, DP attention): each replica of one makes a pair
with each of the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import aiohttp
import pytest
from hooked_server import FOLDER
from pd_fleet import ANSWER_TOKENS, COMMON, TRUTH, FaultySpec, fault, nothing_is_left, prompt_of
from token_requests import cold, generate, random_prompt

from sglang_ext.protocol.cluster import url_of_replica
from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import until
from tests.support.compare import Answer, assert_same
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200), pytest.mark.long]

BLOCK = 16
REPLICAS = 2
PAIRS = tuple(product(range(REPLICAS), repeat=2))
WITHIN_S = 90.0


@dataclass(frozen=True)
class Kind:
    """A model, and the flags with which both servers of it have replicas."""

    model: str
    flags: tuple[str, ...] = ("--dp-size", str(REPLICAS))


ATTENTION = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention")
GATHERED = "--no-enable-tp-lm-head-all-to-all"
"""Where the output layer is not the embeddings, SGLang's decode servers with DP attention exchange logits by
an operator that has a CUDA form only."""
KINDS = {
    "tiny": Kind("tiny"),
    "tiny-moe": Kind("tiny-moe"),
    "tiny-mla": Kind("tiny-mla"),
    "tiny-gemma3": Kind("tiny-gemma3"),
    "tiny-moe-attention": Kind("tiny-moe", (*ATTENTION, GATHERED)),
    "tiny-mla-moe-attention": Kind("tiny-mla-moe", ATTENTION),
}


@dataclass
class Replicated:
    """Both servers, one without a cache or replicas, and where a router is looked for."""

    pd: PdServers
    truth: ServerProcess
    port: int
    faults: Path

    def ask(self, prompt: list[int], prefill: int, decode: int) -> tuple[Answer, Answer]:
        """The answers of a pair of replicas."""
        pd, body = self.pd, {**self.pd.pair(), "disagg_prefill_dp_rank": prefill}
        halves = ((pd.prefill[0].server, prefill), (pd.decode[0], decode))
        first, second = (
            pd.pool.submit(server.generate, prompt, max_new_tokens=ANSWER_TOKENS, **body, routed_dp_rank=rank)
            for server, rank in halves
        )
        answer = second.result()
        return first.result(), answer

    def true(self, prompt: list[int]) -> Answer:
        return self.truth.generate(prompt, max_new_tokens=ANSWER_TOKENS)


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicated]:
    kind: Kind = request.param
    faults, port = tmp_path_factory.mktemp("faults"), free_port()
    flags = (
        *(*COMMON, "--page-size", str(BLOCK), *kind.flags),
        *("--radix-cache-backend", "global", "--kv-dram-size", "64MB", "--sleep-on-idle"),
        *("--kv-router", f"http://127.0.0.1:{port}", "--enable-cache-report"),
    )
    spec = ServerSpec(
        model=kind.model, flags=flags, environment={**STRICT, "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    )
    damaged = tuple(each for each in flags if each != "--kv-check")
    decode = replace(
        spec,
        flags=damaged,
        run=FaultySpec.run,
        environment={**spec.environment, FOLDER: str(faults), "SPAWNS_SCHEDULERS": "1"},
    )
    truth = replace(TRUTH, model=kind.model)
    with pd_servers([spec], [decode], [truth]) as (pd, others):
        yield Replicated(pd, others[0], port, faults)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_conversations_get_the_answers_of_one_server(servers: Replicated, prefill: int, decode: int) -> None:
    """A later turn finds the KV of the earlier one at the same replica of prefill."""
    prompt = prompt_of(10 + 2 * prefill + decode, 20 * BLOCK + 3)
    known = 0
    for _ in range(2):
        first, answer = servers.ask(prompt, prefill, decode)
        assert_same(servers.true(prompt), answer, atol=1e-4)
        assert first.cached_tokens >= known
        known = len(prompt) // BLOCK * BLOCK
        prompt = prompt + answer.tokens + prompt_of(4, 9)
    first, answer = servers.ask(prompt, 1 - prefill, decode)
    assert first.cached_tokens == 0, "the other replica has a cache of its own"
    assert_same(servers.true(prompt), answer, atol=1e-4)
    servers.pd.wait_idle()
    nothing_is_left(servers.pd.servers)


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_one_damaged_bit_is_another_answer(servers: Replicated, prefill: int, decode: int) -> None:
    """The twin of the test above: one bit of the received KV, at decode."""
    prompt = prompt_of(20 + 2 * prefill + decode, 203)
    with fault(servers.faults, "damage"):
        _, damaged = servers.ask(prompt, prefill, decode)
    with pytest.raises(AssertionError):
        assert_same(servers.true(prompt), damaged, atol=1e-4)
    servers.pd.wait_idle()
    for server in servers.pd.servers:
        server.flush()


async def test_a_router_chooses_the_replicas(servers: Replicated) -> None:
    """It sends later turns where their KV is; decode is connected to both replicas of prefill before."""
    rng = random.Random(6)
    pd = servers.pd
    prefills, decodes = (
        {url_of_replica(server.url, rank) for rank in range(REPLICAS)}
        for server in (pd.prefill[0].server, pd.decode[0])
    )
    async with (
        Router(RouterConfig(port=servers.port, policy="prompt-tree")) as router,
        aiohttp.ClientSession() as client,
    ):

        def known() -> bool:
            there = {each.name: each.trusted and not each.awaited for each in router.fleet.usable()}
            return there == dict.fromkeys(prefills | decodes, True)

        await until(known, WITHIN_S, "all replicas")
        await until(
            lambda: connected(pd.decode[0]) == REPLICAS * REPLICAS, WITHIN_S, "connections ahead of requests"
        )
        homes = []
        for _ in range(2 * REPLICAS):
            prompt = random_prompt(rng, 20 * BLOCK + 3)
            answer, headers = await generate(client, router.url, prompt)
            assert_same(await cold(client, servers.truth, prompt), answer, atol=1e-4)
            assert headers["x-kv-instance"] in decodes
            homes.append((prompt, answer, headers["x-kv-prefill-instance"]))
        assert {home for _, _, home in homes} == prefills
        for prompt, first, home in homes:
            later = prompt + first.tokens + random_prompt(rng, 5)
            answer, headers = await generate(client, router.url, later)
            assert headers["x-kv-prefill-instance"] == home
            assert answer.cached_tokens >= 20 * BLOCK
            assert_same(await cold(client, servers.truth, later), answer, atol=1e-4)
        router.check()


def connected(decode: ServerProcess) -> float:
    """Connections of all replicas of decode to replicas of prefill."""
    name = "sglang_ext_pd_prefill_servers{"
    return sum(
        value
        for sample, value in decode.metrics().items()
        if sample.startswith(name) and 'state="connected"' in sample
    )
