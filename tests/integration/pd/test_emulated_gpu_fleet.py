"""Two prefill and two decode servers on an emulated GPU (``tests.fake_gpu``) and a router. Hand-overs go by
`cuda_ipc`; before them, KV comes from the other prefill server, by a hint or from disk. Answers are those of
no cache, and with a damaged bit they are others.

Nothing is said of speed, of races, or of what CUDA does with the handles.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest
from emulated_gpu import ATOL, damage, prompt
from hooked_server import FOLDER
from pd_fleet import fault, nothing_is_left
from test_fetching import counted, held
from token_requests import advise, generate, settled

from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import until, wait_until
from sglang_ext.tiers import Tier
from tests import fake_gpu
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.pd_servers import PdServers, pd_servers
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(2400)]

SERVER = Path(__file__).parents[1] / "servers" / "gpu_pd_server.py"
BLOCK = 16
WHOLE = 5 * BLOCK
PROMPT_TOKENS = WHOLE + 4
ANSWER = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
FILLING_TOKENS = 96
HBM_TOKENS, DRAM_TOKENS = 256, 512
"""Of a prefill server."""
SECONDS = 240
PREFILLS, DECODES = ("p", "q"), ("a", "b")


@dataclass
class Fleet:
    """The servers, where their router is to listen, and where each looks for its faults."""

    pd: PdServers
    port: int
    faults: dict[str, Path]
    salts: int = 0

    @property
    def servers(self) -> list[ServerProcess]:
        return self.pd.servers

    def prefill_at(self, url: str) -> int:
        """The number of a prefill server."""
        return next(number for number, each in enumerate(self.pd.prefill) if each.server.url == url)

    def cold(self, ids: list[int], tokens: int = ANSWER["max_new_tokens"]) -> Answer:
        """The answer of a pair without any cache."""
        self.salts += 1
        answer = self.pd.generate(ids, max_new_tokens=tokens, cache_salt=f"cold {self.salts}")
        assert answer.cached_tokens == 0
        return answer

    def flush(self, *servers: ServerProcess) -> None:
        """Have servers forget all KV."""
        self.pd.wait_idle()
        for server in servers:
            server.flush()

    def fill(self, prefill: int, tokens: int, seed: int) -> None:
        """So many tokens of other prompts, for which a prefill server evicts its earlier ones."""
        for number in range(-(-tokens // FILLING_TOKENS)):
            self.pd.generate(prompt(seed + number, FILLING_TOKENS), max_new_tokens=1, prefill=prefill)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard) -> Iterator[Fleet]:
    port, faults = free_port(), {}

    def spec(name: str, *more: str) -> ServerSpec:
        faults[name] = tmp_path_factory.mktemp(name)
        return ServerSpec(
            flags=(
                *("--chunked-prefill-size", "64", "--skip-server-warmup"),
                *("--max-running-requests", "4", "--enable-metrics", "--enable-cache-report"),
                *("--kv-pd-caching", "2", "--kv-load-policy", "always", "--kv-check", "--page-size", "16"),
                # KV goes from GPU to GPU by the first, and from DRAM to DRAM by the second.
                *("--kv-transports", "cuda_ipc,shm", "--kv-dram-size", f"{DRAM_TOKENS // 256}MiB"),
                *("--kv-router", f"http://127.0.0.1:{port}", "--kv-instance-id", name, *more),
            ),
            # Not forked from a process that has imported SGLang for a CPU.
            environment={**fake_gpu.ENVIRONMENT, FOLDER: str(faults[name])},
            run=(str(SERVER),),
        )

    def prefilling(name: str) -> ServerSpec:
        disk = ("--kv-disk-path", str(tmp_path_factory.mktemp("disk")), "--kv-disk-size", "1GB")
        return spec(name, "--max-total-tokens", str(HBM_TOKENS), *disk)

    def decoding(name: str) -> ServerSpec:
        # SGLang keeps 512 tokens free for each request that runs.
        return spec(name, "--max-total-tokens", "2048")

    prefill, decode = [prefilling(name) for name in PREFILLS], [decoding(name) for name in DECODES]
    with leak_guard.adopting(), pd_servers(prefill, decode) as (pd, _):
        yield Fleet(pd, port, faults)


@asynccontextmanager
async def routing(fleet: Fleet) -> AsyncIterator[Router]:
    """A router that sends requests to the servers of each kind in turn."""
    config = RouterConfig(
        port=fleet.port,
        policy="round-robin",
        explain_routing=True,
        cost_profile="none",
        health_check_timeout_secs=30.0,
        learnt_hints=0.0,
    )
    async with Router(config) as router:
        router.agents.verdict_s = 60.0  # the machine may be busy
        router.fetching.least_wait_s = 60.0
        await until(lambda: all(router.trees.trusted(each.url) for each in fleet.servers), SECONDS, "all")
        await until(lambda: len(router.fleet.usable()) == len(fleet.servers), SECONDS, "all servers")
        yield router
        router.check()


async def computed(
    fleet: Fleet,
    router: Router,
    patient_client: aiohttp.ClientSession,
    ids: list[int],
    session: str | None = None,
) -> ServerProcess:
    """Ask for a prompt; the prefill server that has its KV then, as no decode server has."""
    _, headers = await generate(patient_client, router.url, ids, session=session, sampling_params=ANSWER)
    server = fleet.pd.prefill[fleet.prefill_at(headers["x-kv-prefill-instance"])].server
    await until(lambda: held(router, server, ids).tokens >= WHOLE, SECONDS, "the index")
    await asyncio.to_thread(fleet.flush, *fleet.pd.decode)
    await until(lambda: not any(held(router, each, ids).tokens for each in fleet.pd.decode), SECONDS, "less")
    return server


async def compare(fleet: Fleet, ids: list[int], answer: Answer, *, damaged: bool) -> None:
    """With the cold answer, which a damaged one is not."""
    cold = await asyncio.to_thread(fleet.cold, ids)
    if damaged:
        with pytest.raises(AssertionError):
            assert_same(cold, answer, atol=ATOL)
        await asyncio.to_thread(fleet.flush, *fleet.servers)
    else:
        assert_same(cold, answer, atol=ATOL)


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
async def test_one_prefill_server_fetches_what_the_other_has_and_hands_it_over(
    damaged: bool, fleet: Fleet, patient_client: aiohttp.ClientSession
) -> None:
    async with routing(fleet) as router:
        ids = prompt(20 + damaged, PROMPT_TOKENS)
        owner = await computed(fleet, router, patient_client, ids)
        (reader,) = (each.server for each in fleet.pd.prefill if each.server is not owner)
        before = counted(reader, "fetched_blocks")
        with damage(owner.pid) if damaged else nullcontext():
            answer, headers = await generate(patient_client, router.url, ids, sampling_params=ANSWER)
        assert headers["x-kv-prefill-instance"] == reader.url
        assert headers["x-kv-fetch"] in ("done", "under-way")
        assert headers["x-kv-fetch-source"] == owner.url
        assert answer.cached_tokens == WHOLE
        await compare(fleet, ids, answer, damaged=damaged)
        await asyncio.to_thread(
            wait_until,
            lambda: counted(reader, "fetched_blocks") - before >= WHOLE // BLOCK,
            seconds=SECONDS,
            what="the count of fetched blocks",
        )
    assert nothing_is_left(fleet.servers, seconds=30)


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
async def test_a_hint_brings_kv_to_hbm_for_a_hand_over(
    damaged: bool, fleet: Fleet, patient_client: aiohttp.ClientSession
) -> None:
    """From DRAM, of the server that has it. The damage is there when the hint comes."""
    async with routing(fleet) as router:
        ids = prompt(30 + damaged, PROMPT_TOKENS)
        owner = await computed(fleet, router, patient_client, ids, session=f"s{damaged}")
        await asyncio.to_thread(fleet.fill, fleet.prefill_at(owner.url), HBM_TOKENS, 300 + 10 * damaged)
        await until(lambda: held(router, owner, ids).hbm == 0, SECONDS, "HBM to give it up")
        with damage(owner.pid) if damaged else nullcontext():
            told = await advise(patient_client, router, session=f"s{damaged}", input_ids=ids)
            ready = await settled(patient_client, router, told["id"])
            assert (ready["state"], ready["moved_tokens"]) == ("ready", WHOLE), ready
            where = fleet.pd.prefill[fleet.prefill_at(told["instance"])].server
            await until(lambda: held(router, where, ids).hbm >= WHOLE, SECONDS, "it in HBM")
        answer, headers = await generate(
            patient_client, router.url, ids, session=f"s{damaged}", sampling_params=ANSWER
        )
        assert headers["x-kv-route-reason"] == "advised"
        assert headers["x-kv-prefill-instance"] == told["instance"]
        assert answer.cached_tokens == WHOLE
        await compare(fleet, ids, answer, damaged=damaged)
    assert nothing_is_left(fleet.servers, seconds=30)


@pytest.mark.parametrize("damaged", [False, True], ids=["sound", "one wrong bit"])
async def test_kv_from_disk_is_handed_over(
    damaged: bool, fleet: Fleet, patient_client: aiohttp.ClientSession
) -> None:
    """The damage is in what decode got."""
    async with routing(fleet) as router:
        ids = prompt(40 + damaged, PROMPT_TOKENS)
        owner = await computed(fleet, router, patient_client, ids)
        number = fleet.prefill_at(owner.url)
        await asyncio.to_thread(fleet.fill, number, HBM_TOKENS + DRAM_TOKENS, 400 + 20 * damaged)
        await until(lambda: held(router, owner, ids).below.get(Tier.DISK, 0) >= WHOLE, SECONDS, "disk alone")
        await asyncio.to_thread(fleet.flush, *fleet.pd.decode)
        with fault(fleet.faults["a"], "damage") if damaged else nullcontext():
            first, second = fleet.pd.start(ids, max_new_tokens=ANSWER["max_new_tokens"], prefill=number)
            answer = await asyncio.wrap_future(second)
        assert (await asyncio.wrap_future(first)).disk_tokens == WHOLE
        await compare(fleet, ids, answer, damaged=damaged)
    assert nothing_is_left(fleet.servers, seconds=30)
