"""Two servers on an emulated GPU (``tests.fake_gpu``) and a router: KV that one has computed is read by the
other from pinned memory to pinned memory, also layer by layer while it is computed, and answers are those of
no cache; with a damaged bit they are others.

Nothing is said of speed, of races, or of the bytes that real kernels write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import pytest
from emulated_gpu import ATOL, damage, prompt, spec
from hooked_server import FOLDER
from test_fetching import counted, explained, held, nothing_is_exported
from token_requests import cold, generate

from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.waiting import until, wait_until
from tests.support.compare import assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess

pytestmark = [pytest.mark.integration, pytest.mark.long, pytest.mark.timeout(1800)]

SERVER = Path(__file__).parents[1] / "servers" / "gpu_fetching_server.py"
BLOCK = 16
WHOLE = 5 * BLOCK
PROMPT_TOKENS = WHOLE + 4
CHUNK = 48
"""Tokens that a server computes in a pass."""
SECONDS = 120


@dataclass
class Pair:
    """Two servers. port: at which they look for a router. transport: of their reads from each other."""

    port: int
    servers: list[ServerProcess]
    transport: str

    def other(self, url: str) -> ServerProcess:
        """The server with another URL."""
        (found,) = (server for server in self.servers if server.url != url)
        return found

    def at(self, url: str) -> ServerProcess:
        """The server with this URL."""
        return next(server for server in self.servers if server.url == url)


@pytest.fixture(scope="module", params=["shm", "tcp"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard
) -> Iterator[Pair]:
    port, servers = free_port(), []
    for name in ("a", "b"):
        folder = tmp_path_factory.mktemp(name)
        flags = (
            *("--kv-router", f"http://127.0.0.1:{port}", "--kv-instance-id", name),
            *("--kv-transports", request.param, "--enable-metrics", "--enable-cache-report"),
            # Less than the shortest run that is loaded otherwise.
            *("--chunked-prefill-size", str(CHUNK), "--kv-load-policy", f"always,min-tokens={BLOCK}"),
        )
        of = spec(folder / "disk", *flags)
        environment = {**of.environment, FOLDER: str(folder)}
        servers.append(ServerProcess(replace(of, environment=environment, run=(str(SERVER),))))
    try:
        with leak_guard.adopting(), ThreadPoolExecutor() as each:
            list(each.map(ServerProcess.start, servers))
        yield Pair(port, servers, request.param)
    finally:
        for server in servers:
            server.stop()


@asynccontextmanager
async def routing(pair: Pair, **options: str) -> AsyncIterator[Router]:
    """A router that sends requests to the servers in turn."""
    config = RouterConfig(
        port=pair.port, policy="round-robin", explain_routing=True, cost_profile="none", **options
    )
    async with Router(config) as router:
        await until(lambda: all(router.trees.trusted(each.url) for each in pair.servers), SECONDS, "both")
        await until(lambda: len(router.fleet.usable()) == 2, SECONDS, "both servers")
        router.fetching.least_wait_s = 60.0  # the machine may be busy
        router.agents.verdict_s = 60.0
        yield router
        router.check()


async def test_what_one_has_computed_another_fetches(
    pair: Pair, patient_client: aiohttp.ClientSession
) -> None:
    async with routing(pair) as router:
        for number, changed in enumerate((False, True)):
            said = prompt(10 + number, PROMPT_TOKENS)
            _, headers = await generate(patient_client, router.url, said)
            owner = pair.at(headers["x-kv-instance"])
            await until(lambda: held(router, owner, said).tokens >= WHOLE, SECONDS, "the index")  # noqa: B023
            reader = pair.other(owner.url)
            with damage(owner.pid) if changed else nullcontext():
                answer, headers = await generate(patient_client, router.url, said)
            assert headers["x-kv-instance"] == reader.url
            assert headers["x-kv-fetch"] in ("done", "under-way")
            assert headers["x-kv-fetch-source"] == owner.url
            assert (answer.hbm_tokens, answer.dram_tokens, answer.disk_tokens) == (0, WHOLE, 0)
            compared = await cold(patient_client, reader, said)
            if changed:
                with pytest.raises(AssertionError):
                    assert_same(compared, answer, atol=ATOL)
            else:
                assert_same(compared, answer, atol=ATOL)
            wanted = (number + 1) * WHOLE // BLOCK
            total = lambda: sum(counted(each, "fetched_blocks") for each in pair.servers)  # noqa: E731
            await asyncio.to_thread(wait_until, lambda: total() == wanted, seconds=SECONDS, what="the count")  # noqa: B023
            await asyncio.to_thread(
                wait_until,
                lambda: nothing_is_exported(owner),  # noqa: B023
                seconds=SECONDS,
                what="the lease",
            )
    for server in pair.servers:
        by = {
            k.split('transport="')[1].split('"')[0] for k in server.metrics() if "_fetched_bytes_total{" in k
        }
        assert by <= {pair.transport}
        assert "without our kernel" not in server.log.read_text(encoding="utf-8")
        await asyncio.to_thread(server.flush)


@contextmanager
def reads_held(server: ServerProcess, layer: int) -> Iterator[Path]:
    """A server's reads by layer from the other one wait at this layer. Yields the file that is there while
    one waits."""
    gate = Path(server.spec.environment[FOLDER])
    (gate / "hold").write_text(str(layer))
    try:
        yield gate / "held"
    finally:
        (gate / "hold").unlink()


async def test_two_servers_compute_one_prompt(pair: Pair, patient_client: aiohttp.ClientSession) -> None:
    """Each in chunks. The twin's reads wait until the other server's KV is damaged."""
    async with routing(pair, sequence_parallel=str(WHOLE)) as router:
        said = prompt(20, PROMPT_TOKENS)
        before = {each.url: counted(each, "span_computed") for each in pair.servers}
        answer, headers = await generate(patient_client, router.url, said)
        server = pair.at(headers["x-kv-instance"])
        helper = pair.other(server.url)
        told = await explained(patient_client, router, headers)
        cut = told["plan"][0]["stop"]
        assert [(span["from"], span["stop"]) for span in told["plan"]] == [
            (helper.url, cut),
            ("compute", PROMPT_TOKENS),
        ]
        assert (told["end"], told["moved_tokens"], answer.cached_tokens) == ("done", cut, cut), told
        assert_same(await cold(patient_client, server, said), answer, atol=ATOL)
        await span_computed(helper, before[helper.url])

        said = prompt(21, PROMPT_TOKENS)
        before = {each.url: counted(each, "span_computed") for each in pair.servers}
        with ExitStack() as damaged:
            with ExitStack() as held_up:
                held = {each.url: held_up.enter_context(reads_held(each, 1)) for each in pair.servers}
                request = asyncio.create_task(generate(patient_client, router.url, said))
                await until(lambda: any(each.exists() for each in held.values()), SECONDS, "the read")
                helper = pair.other(next(url for url, each in held.items() if each.exists()))
                await span_computed(helper, before[helper.url])
                damaged.enter_context(damage(helper.pid))
            answer, headers = await request
        assert headers["x-kv-instance"] == pair.other(helper.url).url
        assert answer.cached_tokens > 0
        with pytest.raises(AssertionError):
            assert_same(await cold(patient_client, helper, said), answer, atol=ATOL)
    for server in pair.servers:
        await asyncio.to_thread(server.flush)


async def span_computed(helper: ServerProcess, before: float) -> None:
    """A server has computed a span for the other one."""
    await asyncio.to_thread(
        wait_until, lambda: counted(helper, "span_computed") > before, seconds=SECONDS, what="the span"
    )
