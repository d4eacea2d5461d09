"""A stock SGLang server that publishes KV events: the router follows its cached and evicted blocks."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Callable

import aiohttp
import pytest
import zmq.asyncio

from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.cluster.stock_links import StockLink
from sglang_ext.router.index.index import Index
from sglang_ext.router.index.stock_replica import StockReplica
from sglang_ext.router.policies.base import Role
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.waiting import until
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

BLOCK = 16
NS = ("tokens", None, None, None)
RNG = random.Random(5)
PUBLISHED = {
    "publisher": "zmq",
    "endpoint": f"tcp://*:{free_port()}",
    "replay_endpoint": f"tcp://*:{free_port()}",
    "topic": "kv",
}
SPEC = ServerSpec(flags=("--kv-events-config", json.dumps(PUBLISHED), "--max-total-tokens", "2048"))


@pytest.fixture(scope="module")
def server(get_server: Callable[[ServerSpec], ServerProcess]) -> ServerProcess:
    return get_server(SPEC)


@pytest.fixture
async def router(server: ServerProcess) -> AsyncIterator[Router]:
    server.flush()
    async with Router(RouterConfig(worker_urls=(server.url,), port=0, policy="prompt-tree")) as router:
        yield router
        router.check()


async def cached(client: aiohttp.ClientSession, url: str, tokens: list[int]) -> int:
    """The server's count of cached tokens."""
    body = {"input_ids": tokens, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    async with client.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["meta_info"]["cached_tokens"]


def known(index: Index, name: str, tokens: list[int]) -> int:
    match = index.match(NS, encode_tokens(tokens)).get(name)
    return 0 if match is None else match.tokens


class IgnoringReplica(StockReplica):
    """Ignores removals."""

    def _removed(self, names: list[int]) -> None:
        """Nothing."""


async def test_what_is_evicted_is_known_where_requests_alone_would_not_tell(
    router: Router, server: ServerProcess, client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until(lambda: router.trees.trusted(server.url), 20, "the server's events")
    facts = router.fleet.rows[server.url].facts
    assert facts is not None
    assert facts.events is not None
    assert facts.events.topic == "kv"

    # Twins: one ignores evictions, one infers the cache from requests alone.
    deaf, believing = Index(FakeClock()), Index(FakeClock(), mode="approximate")
    with monkeypatch.context() as patch:
        patch.setattr("sglang_ext.router.index.index.StockReplica", IgnoringReplica)
        replica = deaf.attach_stock(server.url, Role.COLOCATED)
    context = zmq.asyncio.Context()
    link = StockLink(context, deaf, server.url, facts.events, facts.identity, replica, keep_up_s=0.2)

    shared = [RNG.randrange(100, 30_000) for _ in range(5 * BLOCK)]
    prompts = [shared + [RNG.randrange(100, 30_000) for _ in range(20 * BLOCK + 3)] for _ in range(8)]
    for tokens in prompts:
        await cached(client, router.url, tokens)
        believing.confirm(NS, encode_tokens(tokens), server.url)
    # A guess lives for two seconds and a half at most.
    truth = router.trees.stock(server.url)
    assert truth is not None
    await until(
        lambda: truth.blocks < 2048 // BLOCK + 1 and all_told(router, server, prompts, truth.blocks),
        20,
        "events",
    )
    await until(lambda: replica.next == truth.next, 20, "the twin's events")

    told = [known(router.trees, server.url, tokens) for tokens in prompts]
    assert told[0] == 5 * BLOCK, told  # evicted, up to the prefix that the others share
    assert told[-1] == 25 * BLOCK, told
    assert known(deaf, server.url, prompts[0]) == 25 * BLOCK
    assert known(believing, server.url, prompts[0]) == 25 * BLOCK
    # The server itself confirms it. Prompts are sent last first, since new KV takes the room of the oldest.
    for tokens in reversed(prompts):
        expected = known(router.trees, server.url, tokens)
        before = truth.next
        found = await cached(client, server.url, tokens)
        assert found // BLOCK * BLOCK == expected, (prompts.index(tokens), found, told)
        if found < 25 * BLOCK:
            await until(lambda before=before: truth.next > before, 20, "an event")
    await cached(client, server.url, prompts[-1])
    await until(lambda: not link.task.done(), 1, "the twin")

    # A flush is everything at once.
    server.flush()
    await until(lambda: truth.blocks == 0, 20, "the flush")
    assert not truth.partial
    link.task.cancel()
    await until(link.task.done, 60, "the twin's end")
    context.term()


def all_told(router: Router, server: ServerProcess, prompts: list[list[int]], told: int) -> bool:
    """Whether no guess is left: all matched blocks are within the blocks of the server's events."""
    own = [known(router.trees, server.url, tokens) // BLOCK - 5 for tokens in prompts]
    return own[0] < 20 == own[-1] and 5 + sum(own) <= told
