"""Changes of a whole fleet, on real servers: LoRA adapters, weights and pauses, through the router.

Answers are compared with those of stock servers (SGLang's own radix cache) that have the same adapters, and
were started with the same weights.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hooked_server import FOLDER
from router_rig import running
from token_requests import generate, random_prompt
from tuned_model import tuned

from sglang_ext.router import Router, RouterConfig
from sglang_ext.testing.models import model_path
from sglang_ext.testing.waiting import until, wait_until
from tests.support.adapters import TARGETS, build_adapter
from tests.support.compare import Answer, assert_same
from tests.support.servers.server import STRICT, ServerProcess, ServerSpec

pytestmark = [pytest.mark.integration, pytest.mark.long]

Json = dict[str, Any]
BLOCK = 16
POOL_TOKENS = 2400
RUN = (str(Path(__file__).parents[1] / "servers" / "lora_server.py"),)
LORA = (
    *("--enable-lora", "--max-lora-rank", "4", "--lora-target-modules", *TARGETS),
    *("--lora-backend", "torch_native", "--max-total-tokens", str(POOL_TOKENS)),
)
ADAPTERS = ("one", "two")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder through which the tests damage the servers."""
    return tmp_path_factory.mktemp("hooks")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("adapters")
    return {name: build_adapter("tiny", name, out) for name in ADAPTERS}


@pytest.fixture(scope="module")
def fine_tune(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tuned(model_path("tiny", "float32"), tmp_path_factory.mktemp("tuned") / "model")


@pytest.fixture(scope="module")
def servers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Two servers whose cache has three tiers."""

    def spec() -> ServerSpec:
        disk = tmp_path_factory.mktemp("kv")
        flags = (
            *("--radix-cache-backend", "global", "--kv-load-policy", "always", "--kv-dram-size", "16MB"),
            *("--kv-disk-path", str(disk), "--kv-disk-size", "1GB", "--enable-metrics"),
        )
        return ServerSpec(flags=(*LORA, *flags), environment={**STRICT, FOLDER: str(folder)}, run=RUN)

    with ServerProcess(spec()) as one, ServerProcess(spec()) as two:
        yield [one, two]


@pytest.fixture
async def router(servers: list[ServerProcess]) -> AsyncIterator[Router]:
    """Requests go to the servers in turn."""
    await until(lambda: running(servers) == 0, 30, "servers without requests")
    for server in servers:
        server.flush()
    config = RouterConfig(worker_urls=tuple(server.url for server in servers), port=0, policy="round-robin")
    async with Router(config) as router:
        yield router
        router.check()


async def post(
    client: aiohttp.ClientSession, router: Router, path: str, body: Json, status: int = 200
) -> Json:
    """The answers of all servers."""
    async with client.post(router.url + path, json=body) as answer:
        told = await answer.json()
        assert answer.status == status, told
        return dict(told["workers"])


async def at_both(
    client: aiohttp.ClientSession, router: Router, prompt: list[int], **fields: Any
) -> list[Answer]:
    """The answers of both servers, in the order of their addresses."""
    found = {}
    for _ in range(2):
        answer, headers = await generate(client, router.url, prompt, **fields)
        found[headers["x-kv-instance"]] = answer
    assert len(found) == 2
    return [found[url] for url in sorted(found)]


@contextmanager
def damaged(folder: Path, how: str) -> Iterator[None]:
    (folder / how).touch()
    try:
        yield
    finally:
        (folder / how).unlink()


def of(adapter: str | None) -> Json:
    return {} if adapter is None else {"lora_path": adapter}


# -- LoRA -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [random_prompt(rng, 8 * BLOCK + 5) for _ in range(3)]


@pytest.fixture(scope="module")
def stock(
    folder: Path, adapters: dict[str, Path], prompts: list[list[int]]
) -> dict[str | None, list[Answer]]:
    """A stock server's answers with each adapter, and without one."""
    spec = ServerSpec(flags=LORA, environment={FOLDER: str(folder)}, run=RUN)
    with ServerProcess(spec) as server:
        for name, path in adapters.items():
            server.post("/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        return {
            name: [server.generate(prompt, max_new_tokens=8, **of(name)) for prompt in prompts]
            for name in (*ADAPTERS, None)
        }


@pytest.fixture
async def loaded(
    router: Router, client: aiohttp.ClientSession, adapters: dict[str, Path], servers: list[ServerProcess]
) -> AsyncIterator[Router]:
    for name, path in adapters.items():
        told = await post(client, router, "/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        assert set(told) == {server.url for server in servers}
        assert all(name in one["message"]["loaded_adapters"] for one in told.values())
    yield router
    for name in adapters:
        await post(client, router, "/unload_lora_adapter", {"lora_name": name})


async def test_adapters_of_a_fleet_answer_as_those_of_a_stock_server(
    loaded: Router,
    client: aiohttp.ClientSession,
    servers: list[ServerProcess],
    prompts: list[list[int]],
    stock: dict[str | None, list[Answer]],
) -> None:
    """Whatever was cached before, in whichever tier."""
    prompt = prompts[0]
    assert len({tuple(answers[0].tokens) for answers in stock.values()}) == 3, "adapters that change nothing"

    async def found() -> list[Answer]:
        answers = []
        for name in (*ADAPTERS, None):
            for answer in await at_both(client, loaded, prompt, **of(name)):
                assert_same(stock[name][0], answer, atol=1e-3)
                answers.append(answer)
        return answers

    assert [answer.cached_tokens for answer in await found()] == [0] * 6, "nothing of another adapter"
    assert all(answer.hbm_tokens >= 8 * BLOCK for answer in await found())
    for server in servers:
        wait_until(lambda server=server: blocks(server, "disk") >= 3 * 8, seconds=30, what="KV on disk")
    crowd(servers, POOL_TOKENS)
    assert all(answer.dram_tokens >= 8 * BLOCK for answer in await found())
    crowd(servers, 40_000)
    assert all(answer.disk_tokens >= 8 * BLOCK for answer in await found())


async def test_the_twin_that_mixes_adapters_is_found(
    loaded: Router,
    client: aiohttp.ClientSession,
    folder: Path,
    prompts: list[list[int]],
    stock: dict[str | None, list[Answer]],
) -> None:
    with damaged(folder, "mix"):
        for name in ADAPTERS:
            answers = await at_both(client, loaded, prompts[1], **of(name))
    assert all(answer.cached_tokens for answer in answers)
    for answer in answers:
        with pytest.raises(AssertionError):
            assert_same(stock["two"][1], answer, atol=1e-3)


async def test_an_adapter_that_is_loaded_anew_finds_nothing_of_the_former(
    loaded: Router,
    client: aiohttp.ClientSession,
    adapters: dict[str, Path],
    prompts: list[list[int]],
    stock: dict[str | None, list[Answer]],
) -> None:
    for answer in await at_both(client, loaded, prompts[2], lora_path="one"):
        assert_same(stock["one"][2], answer, atol=1e-3)
    await post(client, loaded, "/unload_lora_adapter", {"lora_name": "one"})
    body = {"lora_name": "one", "lora_path": str(adapters["two"])}
    await post(client, loaded, "/load_lora_adapter", body)
    for answer in await at_both(client, loaded, prompts[2], lora_path="one"):
        assert answer.cached_tokens == 0
        assert_same(stock["two"][2], answer, atol=1e-3)


async def test_where_one_server_refuses_an_adapter_none_has_it(
    router: Router,
    client: aiohttp.ClientSession,
    servers: list[ServerProcess],
    adapters: dict[str, Path],
) -> None:
    body = {"lora_name": "one", "lora_path": str(adapters["one"])}
    servers[0].post("/load_lora_adapter", body)
    told = await post(client, router, "/load_lora_adapter", body, status=400)
    refused, done = (told[server.url] for server in servers)
    assert (refused["status"], done["status"], done["undone"]) == (400, 200, "set back")
    assert "already" in refused["message"]["error_message"]
    # Asked by name, a server would load it again: so the test reads the list of loaded adapters.
    for server, there in zip(servers, (["one", "two"], ["two"]), strict=True):
        answer = server.post("/load_lora_adapter", {"lora_name": "two", "lora_path": str(adapters["two"])})
        assert sorted(answer["loaded_adapters"]) == there
        for name in there:
            server.post("/unload_lora_adapter", {"lora_name": name})


async def test_an_adapter_that_was_never_loaded_is_refused_as_by_a_server(
    router: Router, client: aiohttp.ClientSession, servers: list[ServerProcess]
) -> None:
    request = {"text": "x", "lora_path": "none"}
    errors = []
    for url in (servers[0].url, router.url):
        async with client.post(url + "/generate", json=request) as answer:
            assert answer.status == 400
            errors.append(str(await answer.json()).partition("All loaded")[0])
    assert errors[0] == errors[1]
    assert "never been loaded: none" in errors[0]


def blocks(server: ServerProcess, tier: str) -> float:
    return sum(
        value
        for name, value in server.metrics().items()
        if name.startswith("sglang_ext_cache_blocks{") and f'tier="{tier}"' in name
    )


def crowd(servers: list[ServerProcess], tokens: int) -> None:
    """Fill the nearest tiers with so many tokens of prompts that no test sends."""
    rng = random.Random(tokens)
    for server in servers:
        for _ in range(0, tokens, POOL_TOKENS // 2):
            server.generate(random_prompt(rng, POOL_TOKENS // 2), max_new_tokens=1)


# -- weights ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tuned_answer(folder: Path, fine_tune: Path, prompts: list[list[int]]) -> Answer:
    """The answer of a stock server that was started with the other weights."""
    flags = (*LORA, "--model-path", str(fine_tune))
    with ServerProcess(ServerSpec(flags=flags, environment={FOLDER: str(folder)}, run=RUN)) as server:
        return server.generate(prompts[0], max_new_tokens=8)


async def update(client: aiohttp.ClientSession, router: Router, model: Path, status: int = 200) -> Json:
    body = {"model_path": str(model), "flush_cache": False}
    return await post(client, router, "/update_weights_from_disk", body, status)


async def test_weights_of_a_fleet_change_together_and_old_kv_is_not_used(
    router: Router,
    client: aiohttp.ClientSession,
    prompts: list[list[int]],
    stock: dict[str | None, list[Answer]],
    fine_tune: Path,
    tuned_answer: Answer,
    tmp_path: Path,
) -> None:
    before = stock[None][0]
    assert before.tokens != tuned_answer.tokens
    original = model_path("tiny", "float32")
    for _ in range(2):
        for answer in await at_both(client, router, prompts[0]):
            assert_same(before, answer, atol=1e-3)
    assert answer.cached_tokens
    try:
        told = await update(client, router, fine_tune)
        assert all(one["message"]["success"] for one in told.values())
        for answer in await at_both(client, router, prompts[0]):
            assert answer.cached_tokens == 0, "KV of the former weights"
            assert_same(tuned_answer, answer, atol=1e-3)
        for answer in await at_both(client, router, prompts[0]):
            assert answer.cached_tokens
            assert_same(tuned_answer, answer, atol=1e-3)
        told = await update(client, router, tmp_path, status=400)  # a folder without a model
        assert all(not one["message"]["success"] for one in told.values())
    finally:
        await update(client, router, original)
    for answer in await at_both(client, router, prompts[0]):
        assert_same(before, answer, atol=1e-3)


async def test_the_twin_without_a_fence_uses_old_kv(
    router: Router,
    client: aiohttp.ClientSession,
    folder: Path,
    servers: list[ServerProcess],
    prompts: list[list[int]],
    fine_tune: Path,
    tuned_answer: Answer,
) -> None:
    for _ in range(2):
        await at_both(client, router, prompts[0])
    with damaged(folder, "no-fence"):
        await update(client, router, fine_tune)
        answers = await at_both(client, router, prompts[0])
        await update(client, router, model_path("tiny", "float32"))
    for server in servers:
        server.flush()
    assert all(answer.cached_tokens for answer in answers)
    for answer in answers:
        with pytest.raises(AssertionError):
            assert_same(tuned_answer, answer, atol=1e-3)


# -- pauses -----------------------------------------------------------------------------------------


async def test_a_fleet_pauses_and_goes_on_with_what_it_had(
    router: Router,
    client: aiohttp.ClientSession,
    prompts: list[list[int]],
    stock: dict[str | None, list[Answer]],
) -> None:
    told = await post(client, router, "/pause_generation", {"mode": "in_place"})
    assert all(one["message"]["status"] == "ok" for one in told.values())
    waiting = [asyncio.ensure_future(generate(client, router.url, prompts[0])) for _ in range(4)]
    done, _ = await asyncio.wait(waiting, timeout=2.0)
    assert not done, "a paused fleet answers"
    told = await post(client, router, "/continue_generation", {})
    assert len(told) == 2
    for answer, _ in await asyncio.gather(*waiting):
        assert_same(stock[None][0], answer, atol=1e-3)
