"""Isolated tenants at APIs whose bodies have no field for a salt: real servers, behind a router and alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_rig import FLAGS, until
from test_pooling_models import DOCUMENTS, KINDS, QUERY, RERANKER, Json, Kind, differs, ranked, spec

from sglang_ext.keys import SALT_HEADER
from sglang_ext.patches.hooks.headers import SALT
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.tenancy.tenants import SALT_PREFIX
from tests.support.servers.ports import free_port
from tests.support.servers.server import ServerProcess, ServerSpec

pytestmark = pytest.mark.integration

KEYS = {"a": "the-key-of-tenant-a", "b": "the-key-of-tenant-b"}
OURS = {SALT_HEADER: "kv-tenant-a"}
THEIRS = {SALT_HEADER: "kv-tenant-b"}


@pytest.fixture(scope="module", params=["embeds", pytest.param("generates", marks=pytest.mark.long)])
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def port() -> int:
    """Where each test's router listens, and the server looks for it."""
    return free_port()


@dataclass(frozen=True)
class Rig:
    """A stock server, and a server of ours that registers with a router at `port`."""

    kind: Kind
    stock: ServerProcess
    ours: ServerProcess
    port: int
    client: aiohttp.ClientSession

    async def ask(self, url: str, path: str, body: Json, headers: dict[str, str]) -> tuple[int, Any, float]:
        """(status, JSON, tokens that our server found cached)."""
        before = await asyncio.to_thread(self._cached)
        async with self.client.post(url + path, json=body, headers=headers) as answer:
            found = await answer.json()
        return answer.status, found, await asyncio.to_thread(self._cached) - before

    def _cached(self) -> float:
        samples = self.ours.metrics().items()
        return sum(value for name, value in samples if name.startswith("sglang:cached_tokens_total{"))

    @asynccontextmanager
    async def routing(self, keys: Path, *listed: str, isolated: bool = True) -> AsyncIterator[Router]:
        """A router with both tenants, at which our server has registered."""
        write_keys(keys, isolated)
        config = RouterConfig(
            port=self.port, policy="round-robin", api_keys_file=str(keys), worker_urls=listed
        )
        async with Router(config) as router:
            urls = {self.ours.url, *listed}
            await until(lambda: {each.name for each in router.fleet.usable()} == urls, 60)
            await until(lambda: router.trees.trusted(self.ours.url), 60)
            yield router
            router.check()


@pytest.fixture
async def rig(
    kind: Kind,
    port: int,
    get_server: Callable[[ServerSpec], ServerProcess],
    tmp_path_factory: pytest.TempPathFactory,
    client: aiohttp.ClientSession,
) -> Rig:
    template = tmp_path_factory.getbasetemp() / "tenants-reranker.jinja"
    template.write_text(RERANKER)
    router = ("--kv-router", f"http://127.0.0.1:{port}", "--kv-instance-id", "one")
    stock, ours = (get_server(spec(kind, str(template), *more)) for more in ((), (*FLAGS[:2], *router)))
    await asyncio.to_thread(ours.flush)
    return Rig(kind, stock, ours, port, client)


def write_keys(file: Path, isolated: bool) -> None:
    entries = [{"key": key, "tenant": tenant, "isolated": isolated} for tenant, key in KEYS.items()]
    file.touch(mode=0o600)
    file.write_text(json.dumps({"keys": entries}), encoding="utf-8")


def key_of(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


async def test_a_tenant_finds_its_own_prefix_alone(rig: Rig, tmp_path: Path) -> None:
    """Answers are a stock server's."""
    async with rig.routing(tmp_path / "keys.json", rig.stock.url) as router:
        for path, about in rig.kind.prefixed:
            body = about(f"Of {path}: {QUERY}", DOCUMENTS[:1])
            status, expected, _ = await rig.ask(rig.stock.url, path, body, {})
            assert status == 200
            reused = {}
            for who in ("a", "b", "a again", "b again"):
                status, got, reused[who] = await rig.ask(router.url, path, body, key_of(who[0]))
                assert (status, differs(ranked(expected), ranked(got))) == (200, ""), (path, who)
            assert reused["a"] == reused["b"] <= 32, (path, reused)  # a template's own words, in one tenant
            assert min(reused["a again"], reused["b again"]) > 100, (path, reused)


async def test_the_twin_without_salts_shares(rig: Rig, tmp_path: Path) -> None:
    async with rig.routing(tmp_path / "keys.json", isolated=False) as router:
        path, about = rig.kind.prefixed[0]
        body = about("In common: " + QUERY, DOCUMENTS[:1])
        assert (await rig.ask(router.url, path, body, key_of("a")))[2] <= 32
        assert (await rig.ask(router.url, path, body, key_of("b")))[2] > 100


async def test_a_client_cannot_choose_a_salt(rig: Rig, tmp_path: Path) -> None:
    """The salt of another tenant in the header does not reach the server."""
    async with rig.routing(tmp_path / "keys.json") as router:
        path, about = rig.kind.prefixed[0]
        body = about("Chosen: " + QUERY, DOCUMENTS[:1])
        salt = SALT_PREFIX + hashlib.sha256(b"a").hexdigest()[:32]
        assert (await rig.ask(router.url, path, body, key_of("a")))[2] <= 32
        forged = {**key_of("b"), SALT_HEADER: salt}
        assert (await rig.ask(router.url, path, body, forged))[2] <= 32


async def test_servers_that_have_not_registered_are_given_none(rig: Rig, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    write_keys(keys, isolated=True)
    config = RouterConfig(port=0, api_keys_file=str(keys), worker_urls=(rig.stock.url,))
    async with Router(config) as router:
        await until(lambda: len(router.fleet.usable()) == 1, 60)
        path, about = rig.kind.prefixed[0]
        status, told, _ = await rig.ask(router.url, path, about(QUERY, DOCUMENTS), key_of("a"))
        assert (status, told["error"]["code"]) == (403, "not_kept_apart")


async def test_the_server_alone(rig: Rig) -> None:
    """A header is a name of its own. The twins: without it, and with another one, no KV is found."""
    path, about = rig.kind.prefixed[0]
    body = about("Alone: " + QUERY, DOCUMENTS[:1])
    assert (await rig.ask(rig.ours.url, path, body, OURS))[2] <= 32
    assert (await rig.ask(rig.ours.url, path, body, {}))[2] <= 32
    assert (await rig.ask(rig.ours.url, path, body, THEIRS))[2] <= 32
    assert (await rig.ask(rig.ours.url, path, body, OURS))[2] > 100
    if rig.kind is KINDS["embeds"]:
        forged = {"sampling_params": {"custom_params": {SALT: OURS[SALT_HEADER]}}}
        once = {"text": "Forged: " + QUERY}
        assert (await rig.ask(rig.ours.url, "/encode", once, OURS))[2] <= 32
        assert (await rig.ask(rig.ours.url, "/encode", once | forged, {}))[2] <= 32
        assert (await rig.ask(rig.ours.url, "/encode", once, OURS))[2] > 100
