"""KV that one server has computed is read by another, and answers are as if it had been computed there.

Two servers and a router; the router decides which server holds which KV, and sends the messages.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt
import pytest
from disk_damage import damage_last_layer, runs, spoil_values
from dram_damage import arena_files, last_change, make_huge, snapshot
from hooked_server import FOLDER
from places import KINDS, Place, place_of
from token_requests import advise, cold, generate, random_prompt, settled

from sglang_ext.keys import encode_tokens
from sglang_ext.protocol.cluster import VERDICT_S
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.policies import Match
from sglang_ext.testing.waiting import until, wait_until
from sglang_ext.tiered_store.disk.check import repair_directory
from sglang_ext.tiered_store.disk.tier import INDEX_DIRECTORY
from tests.support.compare import Answer, assert_same
from tests.support.leaks import LeakGuard
from tests.support.servers.ports import free_port
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec, ports_and_contexts

pytestmark = pytest.mark.integration

BLOCK = 16
TOKENS = 40 * BLOCK
NS = ("tokens", None, None, None)
GATED = str(Path(__file__).parents[1].joinpath("servers", "gated_fetching_server.py"))


@pytest.fixture(scope="module", params=KINDS)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, leak_guard: LeakGuard
) -> Iterator[Place]:
    with place_of(request.param, ("a", "b"), tmp_path_factory.mktemp("place"), leak_guard) as place:
        yield place


@pytest.fixture(scope="module")
def port() -> int:
    """Where each test's router listens, and the servers look for it."""
    return free_port()


class Pair:
    """Two servers; a test that kills one starts another in its place."""

    def __init__(self, place: Place, port: int, leak_guard: LeakGuard) -> None:
        self.place = place
        self._port = port
        self._folder = place.folder
        self._leak_guard = leak_guard
        self.servers: dict[str, ServerProcess] = {}

    def start(self, *names: str) -> None:
        """Start servers, at the same time; those of before with these names have to have ended."""
        for name in names:
            (self._folder / name).mkdir(exist_ok=True)
            spec = ServerSpec(
                run=(GATED,),
                flags=(
                    *("--radix-cache-backend", "global", "--kv-check", "--kv-instance-id", name),
                    *("--kv-router", self.place.router_url(self._port), *self.place.flags),
                    *("--kv-load-policy", "always"),
                    *("--kv-dram-size", "64MB", "--max-total-tokens", "4096", "--enable-metrics"),
                    *("--chunked-prefill-size", "512", "--enable-cache-report"),
                    *("--kv-disk-path", str(self.disk(name)), "--kv-disk-size", "1GB"),
                ),
                environment={
                    FOLDER: str(self._folder / name),
                    **STRICT,
                },
            )
            self.servers[name] = self.place.server(spec, name)
        with self._leak_guard.adopting(), ThreadPoolExecutor() as each:
            list(each.map(lambda name: self.servers[name].start(), names))

    def disk(self, name: str) -> Path:
        """The disk folder of the servers with this name."""
        return self._folder / name / "kv"

    def other(self, server: ServerProcess) -> ServerProcess:
        """The other server of the pair."""
        (other,) = (each for each in self.servers.values() if each is not server)
        return other

    def end(self, server: ServerProcess) -> None:
        """One was killed; the next test with both starts another one."""
        server.stop()

    def complete(self) -> None:
        """Start others in place of those that have ended."""
        self.start(*(name for name, server in self.servers.items() if not server.running))

    def at(self, url: str) -> ServerProcess:
        """The one at a URL."""
        return next(server for server in self.servers.values() if server.url == url)

    @asynccontextmanager
    async def holding_reads(self, server: ServerProcess, layer: int = 0) -> AsyncIterator[Path]:
        """While the block runs, the server's reads from the other one stop after the offer. layer: at which
        reads by layer stop."""
        gate = Path(server.spec.environment[FOLDER])
        (gate / "hold").write_text(str(layer))
        try:
            yield gate / "held"
        finally:
            for name in ("hold", "dead"):
                (gate / name).unlink(missing_ok=True)
            await until(lambda: not (gate / "held").exists(), 20, "the read to go on")

    def stop(self) -> None:
        for server in self.servers.values():
            server.stop()


@pytest.fixture(scope="module")
def both(place: Place, port: int, leak_guard: LeakGuard) -> Iterator[Pair]:
    pair = Pair(place, port, leak_guard)
    try:
        pair.start("a", "b")
        yield pair
    finally:
        pair.stop()


@pytest.fixture
def pair(both: Pair) -> Pair:
    both.complete()
    return both


@asynccontextmanager
async def routing(
    pair: Pair, port: int, policy: str, *, verdict_s: float = 20.0, **flags: Any
) -> AsyncIterator[Router]:
    """A router. verdict_s: after which a silent server is taken for dead; long where none dies, because on a
    busy machine a live one may get no core for seconds. Decisions are those of the default costs: estimates
    of this machine's would depend on its cores."""
    options = {"cost_profile": "none", **pair.place.router_options, **flags}
    config = RouterConfig(port=port, policy=policy, explain_routing=True, **options)
    async with Router(config) as router:
        urls = [server.url for server in pair.servers.values()]
        await until(lambda: all(router.trees.trusted(url) for url in urls), 30, "both servers")
        await until(lambda: len(router.fleet.usable()) == 2, 30, "both servers")
        # The machine that runs tests may be busy: reads are awaited for as long as they take.
        router.fetching.least_wait_s = 60.0
        router.agents.verdict_s = verdict_s
        yield router
        router.check()


def held(router: Router, server: ServerProcess, prompt: list[int]) -> Match:
    return router.trees.match(NS, encode_tokens(prompt)).get(server.url, Match(0))


def counted(server: ServerProcess, event: str) -> float:
    """A server's counter of KV sent to and received from peers."""
    wanted = f'event="{event}"'
    samples = server.metrics().items()
    return sum(v for k, v in samples if k.startswith("sglang_ext_cache_peers_total{") and wanted in k)


def nothing_is_exported(server: ServerProcess) -> bool:
    return counted(server, "exported") == counted(server, "given_back")


def signal_to(server: ServerProcess, number: signal.Signals) -> None:
    for pid in server.processes("sglang::scheduler"):
        os.kill(pid, number)


@contextmanager
def slowly(server: ServerProcess) -> Iterator[None]:
    """While the block runs, a server computes little in a second."""
    slow = Path(server.spec.environment[FOLDER], "slow")
    slow.touch()
    try:
        yield
    finally:
        slow.unlink(missing_ok=True)  # two blocks may slow one server


@asynccontextmanager
async def busy(client: aiohttp.ClientSession, router: Router, pair: Pair) -> AsyncIterator[ServerProcess]:
    """A long answer keeps one of the servers busy while the block runs. Yields this server."""
    body = {
        "text": "Go on. ",
        "stream": True,
        "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
    }
    async with client.post(f"{router.url}/generate", json=body) as response:
        row = router.fleet.rows[response.headers["x-kv-instance"]]
        server = pair.at(row.name)
        with slowly(server):
            yield server
        before = row.in_flight
        response.close()
    await until(lambda: row.in_flight < max(1, before), 30, "the end of it")


async def said_at(
    client: aiohttp.ClientSession, router: Router, server: ServerProcess, prompt: list[int]
) -> None:
    """A prompt's KV is at a server, and in the router's index."""
    await generate(client, server.url, prompt)
    await until(lambda: held(router, server, prompt).tokens >= TOKENS, 30, "the index")


async def explained(client: aiohttp.ClientSession, router: Router, headers: Any) -> dict[str, Any]:
    """The router's explanation of a request's fetch, once the fetch has ended."""
    await until(lambda: not router.fetching.under_way, 30, "the end of the fetch")
    async with client.get(f"{router.url}/explain/{headers['x-request-id']}") as response:
        return dict((await response.json())["routing"][-1]["fetch"])


async def fetched(
    client: aiohttp.ClientSession,
    router: Router,
    owner: ServerProcess,
    rng: random.Random,
    said: Callable[[list[int]], Awaitable[None]],
) -> tuple[list[int], Answer, Any]:
    """A prompt that is ``said`` at its owner, and then fetched; returns the answer and headers."""
    prompt = random_prompt(rng, TOKENS + 3)
    await said(prompt)
    answer, headers = await generate(client, router.url, prompt)
    assert headers["x-kv-instance"] != owner.url
    return prompt, answer, headers


async def test_a_server_that_fetches_listens_on_three_ports(pair: Pair, port: int) -> None:
    async with routing(pair, port, "cost"):
        found = [
            ports_and_contexts(pid)
            for server in pair.servers.values()
            for pid in server.processes("sglang::scheduler")
        ]
    # Ports of the agent, the endpoint and its TCP transport; contexts of SGLang, the agent and the endpoint.
    assert found == [(3, 3), (3, 3)]


async def test_what_one_has_computed_another_fetches(pair, port, client, rng) -> None:
    async with routing(pair, port, "least-load") as router, busy(client, router, pair) as owner:
        reader = pair.other(owner)
        prompt, answer, headers = await fetched(
            client, router, owner, rng, lambda prompt: said_at(client, router, owner, prompt)
        )
        assert headers["x-kv-cached-tokens"] == str(TOKENS)
        assert (answer.hbm_tokens, answer.dram_tokens, answer.disk_tokens) == (0, TOKENS, 0)
        assert headers["x-kv-fetch"] in ("done", "under-way")
        assert headers["x-kv-fetch-source"] == owner.url
        told = await explained(client, router, headers)
        assert (told["end"], told["moved_tokens"]) == ("done", TOKENS)
        assert [(span["from"], span["start"], span["stop"], span["end"]) for span in told["plan"]] == [
            (owner.url, 0, TOKENS, "done"),
            ("compute", TOKENS, TOKENS + 3, None),
        ]
        assert 0 < told["expected_transfer_s"] <= told["expected_saving_s"]
        assert not told["calibrated"]
        took_s = told["plan"][0]["took_s"]
        assert took_s >= 0
        print(f"a first fetch took {took_s * 1000:.1f} ms, connecting to the holder not counted")
        assert_same(await cold(client, reader, prompt), answer)
        await asyncio.to_thread(wait_until, lambda: nothing_is_exported(owner), seconds=30, what="the lease")
        # A scheduler exports its counters between passes, not in the moment they change.
        await asyncio.to_thread(
            wait_until,
            lambda: counted(reader, "fetched_blocks") >= TOKENS // BLOCK,
            seconds=30,
            what="the count of fetched tokens",
        )
        await asyncio.to_thread(
            reader.wait_for_pool_calls, Counter(), "match", "alloc_mem", "transfer_with_insert", "swap_in"
        )
        by = {
            k.split('transport="')[1].split('"')[0] for k in reader.metrics() if "_fetched_bytes_total{" in k
        }
        assert by == pair.place.fetches_by
        # The KV is there now, and is not fetched again.
        again, headers = await generate(client, router.url, prompt)
        assert again.hbm_tokens == TOKENS
        assert "x-kv-fetch" not in headers
        async with client.get(f"{router.url}/metrics") as response:
            metrics = await response.text()
        assert 'sglang_ext_router_fetches_total{why="fetch"}' in metrics
        assert 'sglang_ext_router_fetches_ended_total{how="done"} 1.0' in metrics
        assert "sglang_ext_router_fetched_tokens_total" in metrics


async def test_one_damaged_byte_at_the_holder_is_another_answer(pair, port, client, rng) -> None:
    """The twin of the test above: the comparison covers the fetched KV."""
    async with routing(pair, port, "least-load") as router, busy(client, router, pair) as owner:
        (arena,) = arena_files(owner.pid)

        async def said_and_damaged(prompt: list[int]) -> None:
            before = await still(arena)
            await said_at(client, router, owner, prompt)
            last = await asyncio.to_thread(
                wait_until, lambda: last_change(arena, before), seconds=30, what="DRAM"
            )
            make_huge(arena, last)

        prompt, answer, _ = await fetched(client, router, owner, rng, said_and_damaged)
        assert answer.dram_tokens == TOKENS
        with pytest.raises(AssertionError):
            assert_same(await cold(client, owner, prompt), answer)
    for server in pair.servers.values():
        await asyncio.to_thread(server.flush)


async def still(arena: Path) -> npt.NDArray[np.uint8]:
    """The bytes of an arena once all copies into it have ended."""
    while True:
        before = snapshot(arena)
        await asyncio.sleep(0.3)
        if np.array_equal(before, now := snapshot(arena)):
            return now


async def test_a_queue_makes_the_cost_policy_fetch(pair, port, client, rng) -> None:
    """Equation 2: the holder of a popular beginning has a queue, and so others fetch it."""
    async with routing(pair, port, "cost") as router:
        owner = pair.servers["a"]
        beginning = random_prompt(rng, TOKENS)
        await said_at(client, router, owner, beginning)
        prompts = [beginning + random_prompt(rng, 300) for _ in range(6)]
        answers = await asyncio.gather(*(generate(client, router.url, prompt) for prompt in prompts))
        ways = [(headers["x-kv-instance"], headers["x-kv-route-reason"]) for _, headers in answers]
        assert (pair.other(owner).url, "fetch") in ways
        assert (owner.url, "prefix") in ways
        for prompt, (answer, headers) in zip(prompts, answers, strict=True):
            # Where moving turns out slower than thought, computing is chosen for the later ones.
            if headers["x-kv-route-reason"] in ("fetch", "prefix"):
                assert answer.cached_tokens == TOKENS
            assert_same(await cold(client, owner, prompt), answer)


@pytest.mark.parametrize("when", ["before the offer", "before the read"])
async def test_a_holder_that_stops_hangs_no_request(when, pair, port, client, rng) -> None:
    async with (
        routing(pair, port, "least-load", verdict_s=VERDICT_S) as router,
        busy(client, router, pair) as owner,
    ):
        reader = pair.other(owner)
        if when == "before the offer":
            router.fetching.least_wait_s = 1.0
        prompt = random_prompt(rng, TOKENS + 3)
        await said_at(client, router, owner, prompt)
        expected = await cold(client, reader, prompt)
        try:
            if when == "before the offer":
                signal_to(owner, signal.SIGSTOP)
                answer, headers = await generate(client, router.url, prompt)
            else:
                async with pair.holding_reads(reader) as reading:
                    request = asyncio.create_task(generate(client, router.url, prompt))
                    await until(reading.exists, 30, "the read")
                    signal_to(owner, signal.SIGSTOP)
                answer, headers = await request
        finally:
            signal_to(owner, signal.SIGCONT)
        assert headers["x-kv-instance"] == reader.url
        told = await explained(client, router, headers)
        # One-sided: offered blocks can be read although the holder's processor does nothing.
        ends = ("late", "gone") if when == "before the offer" else ("done", "gone")
        assert told["end"] in ends
        assert answer.cached_tokens == (TOKENS if told["end"] == "done" else 0)
        assert_same(expected, answer)
        await asyncio.to_thread(wait_until, lambda: nothing_is_exported(owner), seconds=40, what="the lease")


# -- one prompt computed by both --------------------------------------------------------------------

LONG = 120 * BLOCK + 5
"""Tokens, of which each server computes at most 512 in a pass."""


def splitting(pair: Pair, port: int, **more: Any) -> Any:
    return routing(pair, port, "round-robin", sequence_parallel="1000", **more)


def is_split(told: dict[str, Any], helper: ServerProcess) -> int:
    """Where a prompt was split; checks the plan that ``/explain`` shows."""
    first, rest = told["plan"]
    assert (first["from"], first["tier"], first["start"]) == (helper.url, "compute", 0)
    assert (rest["from"], rest["start"], rest["stop"]) == ("compute", first["stop"], LONG)
    return int(first["stop"])


async def test_two_servers_compute_one_prompt(pair, port, client, rng) -> None:
    async with splitting(pair, port) as router:
        prompt = random_prompt(rng, LONG)
        answer, headers = await generate(client, router.url, prompt)
        server = pair.at(headers["x-kv-instance"])
        helper = pair.other(server)
        told = await explained(client, router, headers)
        cut = is_split(told, helper)
        assert (told["end"], told["moved_tokens"]) == ("done", cut)
        assert answer.cached_tokens == cut
        assert_same(await cold(client, server, prompt), answer)
        # Nearly always streamed into the pass; all of it had come before where the pass was late.
        for each, event in ((server, "fetched_blocks"), (helper, "span_computed")):
            await asyncio.to_thread(
                wait_until, lambda s=each, e=event: counted(s, e) >= cut // BLOCK, seconds=30, what=event
            )
        await asyncio.to_thread(
            wait_until, lambda: nothing_is_exported(helper), seconds=30, what="the leases"
        )
        async with client.get(f"{router.url}/metrics") as response:
            assert 'sglang_ext_router_fetches_total{why="split"} 1.0' in await response.text()
        # Now one has it all, and the other one its span.
        await until(lambda: held(router, helper, prompt).tokens == cut, 30, "the index")
        again, headers = await generate(client, server.url, prompt)
        assert again.cached_tokens == LONG // BLOCK * BLOCK


async def test_one_damaged_byte_of_a_layer_is_another_answer(pair, port, client, rng) -> None:
    """The twin of the test above: the forward pass uses the KV received from the other server."""
    async with splitting(pair, port) as router:
        prompt = random_prompt(rng, LONG)
        first, second = pair.servers.values()
        # The server that gets the request asks the other one.
        arenas = {server.url: arena_files(server.pid)[0] for server in (first, second)}
        before = {url: await still(arena) for url, arena in arenas.items()}
        computed = {server.url: counted(server, "span_computed") for server in (first, second)}
        async with pair.holding_reads(first, layer=1) as one, pair.holding_reads(second, layer=1) as other:
            request = asyncio.create_task(generate(client, router.url, prompt))
            await until(lambda: one.exists() or other.exists(), 30, "the read")
            helper = second if one.exists() else first
            # The helper depends on no other server, and so has computed all of its span soon.
            await asyncio.to_thread(
                wait_until,
                lambda: counted(helper, "span_computed") > computed[helper.url],
                seconds=30,
                what="the span",
            )
            last = await asyncio.to_thread(
                wait_until,
                lambda: last_change(arenas[helper.url], before[helper.url]),
                seconds=30,
                what="DRAM",
            )
            make_huge(arenas[helper.url], last)
        answer, headers = await request
        assert headers["x-kv-instance"] != helper.url
        assert answer.cached_tokens > 0
        with pytest.raises(AssertionError):
            assert_same(await cold(client, helper, prompt), answer)
    for server in pair.servers.values():
        await asyncio.to_thread(server.flush)


# -- hints ------------------------------------------------------------------------------------------


async def turn(
    client: aiohttp.ClientSession, router: Router, session: str, prompt: list[int]
) -> tuple[Answer, Any]:
    return await generate(client, router.url, prompt, session=session)


@pytest.mark.long
async def test_a_session_moves_as_often_as_balance_wants(pair, port, client, rng) -> None:
    """Its KV is in HBM where its next request will run, each time before that comes."""
    async with routing(pair, port, "least-load") as router, AsyncExitStack() as rest:
        said, places = random_prompt(rng, TOKENS), []
        crowd = await rest.enter_async_context(AsyncExitStack())
        await crowd.enter_async_context(busy(client, router, pair))
        answer, headers = await turn(client, router, "s", said)
        places.append(headers["x-kv-instance"])
        for _ in range(2):
            # Another client's long answer runs where the session's KV is now, and the other server is idle.
            following = await rest.enter_async_context(AsyncExitStack())
            assert (await following.enter_async_context(busy(client, router, pair))).url == places[-1]
            await crowd.aclose()
            crowd = following
            said = said + answer.tokens
            before = (len(said) - 1) // BLOCK * BLOCK  # the last token has no KV
            said = said + random_prompt(rng, 40)
            told = await advise(client, router, session="s")
            assert told["instance"] not in places[-1:]
            assert told["tokens"]["elsewhere"] > 0
            ready = await settled(client, router, told["id"])
            assert (ready["state"], ready["tokens"]["hbm"]) == ("ready", before), ready
            answer, headers = await turn(client, router, "s", said)
            assert headers["x-kv-route-reason"] == "advised"
            assert headers["x-kv-instance"] == told["instance"]
            assert "x-kv-fetch" not in headers
            assert (answer.hbm_tokens, answer.dram_tokens) == (before, 0)
            assert_same(await cold(client, pair.servers["a"], said), answer)
            places.append(headers["x-kv-instance"])
        assert places[0] == places[2] != places[1]


# -- a holder's disk --------------------------------------------------------------------------------


def on_disk(server: ServerProcess) -> float:
    samples = server.metrics().items()
    return sum(v for k, v in samples if k.startswith("sglang_ext_cache_blocks{") and 'tier="disk"' in k)


@asynccontextmanager
async def busy_at(
    client: aiohttp.ClientSession, router: Router, pair: Pair, server: ServerProcess
) -> AsyncIterator[None]:
    """As `busy`, of this server."""
    async with AsyncExitStack() as crowd, AsyncExitStack() as other:
        if await other.enter_async_context(busy(client, router, pair)) is not server:
            assert await crowd.enter_async_context(busy(client, router, pair)) is server
            await other.aclose()
        yield


async def test_what_a_restarted_server_has_on_disk_another_fetches(pair, port, client, rng) -> None:
    """Three prompts: one intact, one with damage that checksums show, one with forged checksums."""
    name, owner = "a", pair.servers["a"]
    prompts = [random_prompt(rng, TOKENS + 3) for _ in range(3)]
    expected, written = [], []
    await asyncio.to_thread(owner.flush)
    for number, prompt in enumerate(prompts, 1):
        before = runs(pair.disk(name))
        expected.append((await generate(client, owner.url, prompt))[0])
        # A server's metrics of its tiers are as old as its last pass, which may have been before the flush.
        await asyncio.to_thread(
            wait_until,
            lambda number=number: on_disk(owner) == number * (TOKENS // BLOCK),
            seconds=30,
            what="the prompt on disk",
        )
        written.append(runs(pair.disk(name)) - before)
    signal_to(owner, signal.SIGKILL)
    await asyncio.to_thread(pair.end, owner)
    damage_last_layer(written[2], spoil_values, forge=True)
    # The index has checksums of the headers too; a new one, made from the segments, has the forged ones.
    (rank,) = pair.disk(name).iterdir()
    shutil.rmtree(rank / INDEX_DIRECTORY)
    assert repair_directory(rank).blocks >= 3 * TOKENS // BLOCK
    damage_last_layer(written[1], spoil_values, forge=False)
    await asyncio.to_thread(pair.complete)
    owner = pair.servers[name]
    reader = pair.other(owner)
    async with routing(pair, port, "least-load") as router, busy_at(client, router, pair, owner):
        router.costs.observe_load(owner.url, 1.0, 0.001)  # its disk is fast
        answers, plans = [], []
        for prompt in prompts:
            await until(lambda prompt=prompt: held(router, owner, prompt).tokens >= TOKENS, 30, "the index")
            assert not held(router, owner, prompt).in_memory
            answer, headers = await generate(client, router.url, prompt)
            assert headers["x-kv-instance"] == reader.url
            plans.append((await explained(client, router, headers))["plan"])
            answers.append(answer)
        read = [[(s["from"], s["tier"], s["end"], s["moved_tokens"]) for s in plan[:-1]] for plan in plans]
        assert read[0] == read[2] == [(owner.url, "disk", "done", TOKENS)]
        assert all(plan[0]["loading_s"] > 0 for plan in plans)
        # All blocks of the damaged prompt are damaged, so none was exported.
        assert read[1] == [(owner.url, "disk", "needless", 0)]
        assert [answer.cached_tokens for answer in answers] == [TOKENS, 0, TOKENS]
        assert_same(expected[0], answers[0])
        assert_same(expected[1], answers[1])
        with pytest.raises(AssertionError):
            assert_same(expected[2], answers[2])
        await asyncio.to_thread(
            wait_until,
            lambda: counted(owner, "from_disk") == 2 * TOKENS // BLOCK,
            seconds=30,
            what="the count of tokens from disk",
        )
        await asyncio.to_thread(wait_until, lambda: nothing_is_exported(owner), seconds=40, what="the lease")
    for server in pair.servers.values():
        await asyncio.to_thread(server.flush)


# -- deaths: each test leaves one server, and the next one starts another ---------------------------


@pytest.mark.long
async def test_the_chosen_instance_dies_in_mid_prefetch(pair, port, client, rng) -> None:
    async with (
        routing(pair, port, "least-load", verdict_s=VERDICT_S) as router,
        busy(client, router, pair) as owner,
    ):
        reader = pair.other(owner)
        prompt = random_prompt(rng, TOKENS + 3)
        await said_at(client, router, owner, prompt)
        async with pair.holding_reads(reader) as reading:
            told = await advise(client, router, input_ids=prompt)
            assert told["instance"] == reader.url
            await until(reading.exists, 30, "the read")
            await asyncio.to_thread(
                wait_until, lambda: not nothing_is_exported(owner), seconds=30, what="an export"
            )
            signal_to(reader, signal.SIGKILL)
            reading.unlink()
        answer, headers = await generate(client, router.url, prompt)
        assert headers["x-kv-instance"] == owner.url
        assert answer.cached_tokens == TOKENS
        assert_same(await cold(client, owner, prompt), answer)
        await until(
            lambda: all(entry.instance != reader.url for entry in router.advisor.book.live()),
            30,
            "the verdict",
        )
        await asyncio.to_thread(wait_until, lambda: nothing_is_exported(owner), seconds=30, what="the lease")
    await asyncio.to_thread(pair.end, reader)


async def test_the_holder_dies_in_mid_read(pair, port, client, rng) -> None:
    """While one prompt is read for a request, and another for a hint. The reads go on once the death has been
    reported to the reader: until then, its mapping of the memory outlives the holder, and the bytes are
    right.
    """
    async with (
        routing(pair, port, "least-load", verdict_s=VERDICT_S) as router,
        busy(client, router, pair) as owner,
    ):
        reader = pair.other(owner)
        asked, announced = random_prompt(rng, TOKENS + 3), random_prompt(rng, TOKENS + 3)
        for prompt in (asked, announced):
            await said_at(client, router, owner, prompt)
        async with pair.holding_reads(reader) as reading:
            told = await advise(client, router, input_ids=announced)
            assert told["instance"] == reader.url
            request = asyncio.create_task(generate(client, router.url, asked))
            await until(lambda: reading.exists() and reading.read_text() == "2", 30, "the reads")
            signal_to(owner, signal.SIGKILL)
            await until(reading.with_name("dead").exists, 30, "the reader to know of the death")
        answer, headers = await request
        assert headers["x-kv-instance"] == reader.url
        fetched = await explained(client, router, headers)
        assert fetched["end"] == "gone"
        assert answer.cached_tokens == 0
        assert_same(await cold(client, reader, asked), answer)
        await settled(client, router, told["id"])
        answer, headers = await generate(client, router.url, announced)
        assert headers["x-kv-instance"] == reader.url
        assert answer.cached_tokens == 0
        assert_same(await cold(client, reader, announced), answer)
        await asyncio.to_thread(
            wait_until,
            lambda: counted(reader, "gone") >= 2,
            seconds=10,
            what="the counts",
        )
    await asyncio.to_thread(pair.end, owner)
