"""Registration and agent of an instance with whole routers, over real sockets; no SGLang server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from agent_rig import BLOCK, PLAIN, Instance, until
from prometheus_client.parser import text_string_to_metric_families

from sglang_ext.cluster_key import ClusterKey, read_cluster_key
from sglang_ext.engine.events import registration
from sglang_ext.engine.events.registration import Registrar
from sglang_ext.keys import encode_tokens
from sglang_ext.router import Router, RouterConfig
from tests.support.servers.ports import free_port
from tests.support.servers.workers import StandInWorker, running_worker

pytestmark = pytest.mark.slow

OFF_S = -90.0
"""Seconds by which the clocks of instances are ahead of the routers'."""


@pytest.fixture(autouse=True)
def patient_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server leaves a router within a second; here, that may take as long as a busy machine does."""
    monkeypatch.setattr(registration, "LEAVE_S", 60.0)


@pytest.fixture
async def worker(tokenizer_dir: Path) -> AsyncIterator[StandInWorker]:
    from sglang_ext.router.tokens.prompt_tokenizer import load_tokenizer

    stand_in = StandInWorker(
        tokenizer=load_tokenizer(str(tokenizer_dir), trust_remote_code=False),
        tokenizer_path=str(tokenizer_dir),
    )
    async with running_worker(stand_in, 0):
        yield stand_in


def router_at(port: int, key_file: Path | None, *urls: str, **more: str) -> Router:
    return Router(
        RouterConfig(
            worker_urls=urls,
            port=port,
            block_size=BLOCK,
            cluster_key_file=str(key_file) if key_file else None,
            health_check_interval_secs=0.1,
            **more,
        )
    )


@pytest.mark.parametrize("trusted", [True, False])
async def test_a_router_with_tls_is_registered_with_when_its_certificate_is_trusted(
    trusted: bool,
    certificate: tuple[str, str],
    key_file: Path,
    worker: StandInWorker,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    key = read_cluster_key(key_file)
    instance = Instance(key=key, url=worker.url)
    instance.insert([7] * 8)
    port = free_port()
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
    registrar = Registrar([f"https://127.0.0.1:{port}"], instance.registration, key, instance.agent.silent_s)
    try:
        async with router_at(
            port, key_file, tls_cert_file=certificate[0], tls_key_file=certificate[1]
        ) as router:
            registrar.start()
            if trusted:
                await until(lambda: tells(router, worker), instance)
                assert tokens_known(router, instance, [7] * 8) == 8
            else:
                await until(lambda: registrar._routers[0].problem, instance)
                assert "certificate verify failed" in registrar._routers[0].problem
                assert "SSL_CERT_FILE" in registrar._routers[0].problem
                assert not router.fleet.rows
            await asyncio.to_thread(registrar.close)
            await until(lambda: router.trees.replica(worker.url) is None, instance)
    finally:
        registrar.close()
        instance.close()


def registrar_of(instance: Instance, ports: list[int], key: ClusterKey | None) -> Registrar:
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    return Registrar(
        urls, instance.registration, key, instance.agent.silent_s, wall=lambda: time.time() + OFF_S
    )


async def metrics_of(router: Router) -> dict[str, float]:
    """Samples by name and labels, the instance left out."""
    async with aiohttp.ClientSession() as client, client.get(f"{router.url}/metrics") as response:
        text = await response.text()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = [value for name, value in sample.labels.items() if name != "instance"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def tells(router: Router, worker: StandInWorker) -> bool:
    """Whether the router trusts the events of the instance's agent."""
    replica = router.trees.replica(worker.url)
    return replica is not None and router.trees.trusted(worker.url)


def tokens_known(router: Router, instance: Instance, tokens: list[int]) -> int:
    match = router.trees.match(PLAIN, encode_tokens(tokens)).get(instance.registration.url)
    return 0 if match is None else match.tokens


@pytest.mark.parametrize("with_key", [False, True], ids=["loopback", "key"])
async def test_two_routers_know_an_instance_until_it_leaves(
    with_key: bool, key_file: Path, worker: StandInWorker
) -> None:
    key = read_cluster_key(key_file) if with_key else None
    instance = Instance(key=key, url=worker.url)
    instance.insert([7] * 8)
    ports = [free_port(), free_port()]
    registrar = registrar_of(instance, ports, key)
    try:
        async with AsyncExitStack() as stack:
            routers = [
                await stack.enter_async_context(router_at(port, key_file if with_key else None))
                for port in ports
            ]
            registrar.start()
            for router in routers:
                await until(lambda router=router: tells(router, worker), instance)
                assert tokens_known(router, instance, [7] * 8) == 8
                await until(lambda router=router: router.fleet.usable(), instance)
                assert router.fleet.usable()[0].trusted
                await until(lambda router=router: router.agents.beat(worker.url), instance)
                shown = await metrics_of(router)
                assert (
                    shown["sglang_ext_router_index_trusted"]
                    == shown["sglang_ext_router_index_snapshots"]
                    == 1
                )
                assert shown["sglang_ext_router_instance_requests queued"] == 1
                assert shown["sglang_ext_router_tier_blocks hbm size"] == 9
            await asyncio.to_thread(registrar.close)
            for router in routers:
                await until(lambda router=router: router.trees.replica(worker.url) is None, instance)
                router.check()
    finally:
        registrar.close()
        instance.close()


async def test_a_router_that_was_restarted_finds_its_instances_again(
    key_file: Path, worker: StandInWorker
) -> None:
    key = read_cluster_key(key_file)
    instance = Instance(key=key, url=worker.url)
    instance.insert([7] * 8)
    port = free_port()
    registrar = registrar_of(instance, [port], key)
    registrar.start()
    try:
        for _ in range(2):
            async with router_at(port, key_file) as router:
                await until(
                    lambda router=router: (
                        router.trees.trusted(worker.url) and tokens_known(router, instance, [7] * 8) == 8
                    ),
                    instance,
                    seconds=60,
                )
    finally:
        registrar.close()
        instance.close()


async def test_an_instance_with_another_key_is_refused_without_harm(
    key_file: Path, worker: StandInWorker, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = ClusterKey(b"wrong" * 10)
    instance = Instance(key=wrong, url=worker.url)
    port = free_port()
    # With the right time: the router sends its time to members only.
    registrar = Registrar([f"http://127.0.0.1:{port}"], instance.registration, wrong, instance.agent.silent_s)
    try:
        async with router_at(port, key_file) as router:
            registrar.start()
            await until(lambda: "another cluster key" in caplog.text, instance)
            assert router.trees.replica(worker.url) is None
            assert not router.fleet.rows
    finally:
        registrar.close()
        instance.close()


async def test_a_router_that_is_not_there_is_tried_again(worker: StandInWorker) -> None:
    instance = Instance(url=worker.url)
    port = free_port()
    registrar = registrar_of(instance, [port], None)
    registrar.start()
    try:
        await until(lambda: registrar._routers[0].problem, instance)
        async with router_at(port, None) as router:
            await until(lambda: tells(router, worker), instance)
    finally:
        registrar.close()
        instance.close()


async def test_an_instance_that_was_listed_too_is_one_instance(worker: StandInWorker) -> None:
    """As ``sglang-ext cluster`` starts them."""
    instance = Instance(url=worker.url)
    instance.insert([7] * 8)
    port = free_port()
    registrar = registrar_of(instance, [port], None)
    try:
        async with router_at(port, None, worker.url) as router:
            await until(lambda: router.fleet.usable(), instance)
            registrar.start()
            await until(lambda: tells(router, worker), instance)
            assert tokens_known(router, instance, [7] * 8) == 8
            assert list(router.fleet.rows) == [worker.url]
            await until(lambda: router.fleet.usable() and router.fleet.usable()[0].cached_tokens, instance)
    finally:
        registrar.close()
        instance.close()
