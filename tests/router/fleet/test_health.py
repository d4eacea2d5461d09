"""Finding out the workers' models, their deaths, and their returns."""

from __future__ import annotations

import asyncio

import pytest

from sglang_ext.clock import SystemClock
from sglang_ext.cost_model import Batching
from sglang_ext.errors import ConfigError
from sglang_ext.protocol.cluster import url_of_replica
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.fleet.fleet import Fleet, State
from sglang_ext.router.fleet.health import HealthWatch
from sglang_ext.router.fleet.worker import NotUsable, WorkerApi
from sglang_ext.router.http.types import ConnectFailed
from sglang_ext.router.http.upstream import HttpUpstream
from sglang_ext.tasks import Rounds
from sglang_ext.testing.fakes import FakeClock, Stopwatch
from tests.support.servers.workers import Gate, StandInWorker, running_worker

pytestmark = pytest.mark.slow


@pytest.fixture
async def api():
    upstream = HttpUpstream()
    yield WorkerApi(upstream)
    await upstream.close()


async def test_the_facts_of_a_worker(api, start_worker) -> None:
    worker = await start_worker(vocab_size=77, context_length=99, name="m")
    worker.server_info["allow_auto_truncate"] = True
    worker.server_info |= {
        "chunked_prefill_size": -1,
        "max_prefill_tokens": 16384,
        "enable_mixed_chunk": True,
    }
    facts = await api.learn(worker.url)
    assert (facts.model.name, facts.model.vocab_size, facts.model.context_length) == ("m", 77, 99)
    assert facts.model.architecture == "LlamaForCausalLM"
    assert facts.role == "colocated"
    assert facts.truncates
    assert facts.batching == Batching(0, 16_384, mixed=True)
    worker.server_info["chunked_prefill_size"] = 2048
    assert (await api.learn(worker.url)).batching.chunk == 2048
    assert worker.requests == []


@pytest.mark.parametrize(
    ("rank", "server", "generates", "words"),
    [
        (1, {"dp_size": 2}, True, ""),
        (2, {"dp_size": 2}, True, "no replica 2"),
        (1, {"dp_size": 1, "attn_dp_size": 2}, True, ""),
        (1, {}, True, "no replica 1"),
        (1, {"dp_size": 2}, False, "without --dp-size"),
        (None, {"dp_size": 2}, True, ""),
        (None, {"dp_size": 2, "launch_command": "serve --kv-router=http://r:1"}, True, "--worker-urls"),
        (None, {"dp_size": 2, "disaggregation_mode": "prefill"}, True, ""),
        (
            None,
            {
                "dp_size": 2,
                "disaggregation_mode": "prefill",
                "disaggregation_transfer_backend": "global",
            },
            True,
            "start it with --kv-router",
        ),
        (None, {"dp_size": 1, "launch_command": "serve --kv-router=http://r:1"}, True, ""),
    ],
)
async def test_a_replica_is_there_or_the_reason_is_told(
    api, start_worker, rank: int | None, server: dict[str, object], generates: bool, words: str
) -> None:
    worker = await start_worker()
    worker.server_info |= server
    worker.model_info["is_generation"] = generates
    url = worker.url if rank is None else url_of_replica(worker.url, rank)
    obstacle = (await api.learn(url)).obstacle
    assert words in obstacle
    assert bool(words) == bool(obstacle)


async def test_a_restart_changes_the_identity(api, start_worker) -> None:
    first, second = await start_worker(), await start_worker()
    assert (await api.learn(first.url)).identity == (await api.learn(first.url)).identity
    assert (await api.learn(first.url)).identity != (await api.learn(second.url)).identity


async def test_a_server_that_is_none_of_ours(api, start_worker, unused_tcp_port) -> None:
    worker = await start_worker()
    worker.context_length = None  # type: ignore[assignment]
    with pytest.raises(NotUsable, match="max_model_len"):
        await api.learn(worker.url)
    with pytest.raises(NotUsable, match="answered 404"):
        await api.learn(worker.url + "/else")
    with pytest.raises(ConnectFailed):
        await api.learn(f"http://127.0.0.1:{unused_tcp_port}")


def watch(fleet: Fleet, api: WorkerApi, clock: FakeClock | SystemClock, **options: float) -> HealthWatch:
    options.setdefault("interval_s", 0.5)
    options.setdefault("timeout_s", 0.3)
    return HealthWatch(fleet, api, clock, rounds=Rounds(clock), **options)


async def test_a_hanging_worker_is_down_after_the_threshold(api, start_worker) -> None:
    worker = await start_worker()
    fleet = Fleet((worker.url,), failure_threshold=3)
    health = watch(fleet, api, FakeClock())
    await health.check_once(worker.url)
    worker.hang_probes = Gate()
    states = []
    for _ in range(3):
        assert not await health.check_once(worker.url)
        states.append(fleet.rows[worker.url].state)
    assert states == [State.SUSPECT, State.SUSPECT, State.DOWN]
    worker.hang_probes = None
    assert await health.check_once(worker.url)
    assert fleet.rows[worker.url].state is State.READY


async def test_a_worker_that_answers_requests_is_not_down_for_late_probes(api, start_worker) -> None:
    worker = await start_worker()
    fleet = Fleet((worker.url,), failure_threshold=3)
    health = watch(fleet, api, FakeClock())
    await health.check_once(worker.url)
    worker.hang_probes = Gate()
    with fleet.carrying(worker.url, 0) as load:
        for _ in range(4):
            probe = asyncio.create_task(health.check_once(worker.url))
            await asyncio.sleep(0.02)
            load.answered()
            assert not await probe, "the next probe follows without a pause"
            assert fleet.rows[worker.url].state is State.READY
        for expected in (State.SUSPECT, State.SUSPECT, State.DOWN):
            await health.check_once(worker.url)
            assert fleet.rows[worker.url].state is expected, "bytes from before a probe prove nothing"
        probe = asyncio.create_task(health.check_once(worker.url))
        load.answered()
        await probe
        assert fleet.rows[worker.url].state is State.DOWN, "a lost instance has to answer again"


async def test_the_verdict_falls_within_three_seconds(start_worker, start_router, eventually) -> None:
    """By default settings, on the real clock, counted from the moment the worker stops."""
    worker = await start_worker()
    config = RouterConfig(worker_urls=(worker.url,))
    timeout = config.health_check_timeout_secs
    before = max(config.health_check_interval_secs, timeout)
    assert before + config.health_failure_threshold * timeout <= 3.0
    router = await start_router(worker, health_check_interval_secs=config.health_check_interval_secs)
    worker.hang_probes = Gate()
    with Stopwatch() as verdict:
        await eventually(lambda: router.fleet.rows[worker.url].state is State.DOWN)
    assert verdict.seconds <= 3.2


async def test_a_worker_is_probed_at_the_interval(api, start_worker, eventually) -> None:
    worker = await start_worker()
    clock = FakeClock()
    fleet = Fleet((worker.url,))
    health = watch(fleet, api, clock)
    health.start()
    try:
        await eventually(lambda: clock.sleepers == 1)
        assert fleet.rows[worker.url].state is State.READY
        worker.model_info["weight_version"] = "v2"
        clock.advance(0.4)
        await asyncio.sleep(0)
        assert clock.sleepers == 1
        clock.advance(0.2)
        await eventually(lambda: fleet.rows[worker.url].facts.weight_version == "v2")
    finally:
        await health.stop()


async def test_other_weights_and_restarts_clear_the_index(
    start_worker, start_router, client, eventually
) -> None:
    worker = await start_worker()
    router = await start_router(worker)
    body = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 1}}
    async with client.post(router.url + "/generate", json=body) as answer:
        assert answer.status == 200
    assert router.trees.tokens_of(worker.url) > 0
    worker.model_info["weight_version"] = "v2"
    await eventually(lambda: router.trees.tokens_of(worker.url) == 0)


async def test_weights_from_another_path_make_no_other_model(start_worker, start_router, eventually) -> None:
    """SGLang names a server after the path of an update of its weights; it is let in again all the same."""
    updated, other = await start_worker(), await start_worker()
    router = await start_router(updated, other)
    updated.model_info |= {"model_path": "/fine-tune", "served_model_name": "/fine-tune"}
    router.members.drain(updated.url, 10.0)
    await eventually(lambda: router.fleet.rows[updated.url].state is State.LEFT)
    router.members.resume(updated.url)
    await eventually(lambda: router.fleet.rows[updated.url].state is State.READY)


async def test_a_worker_that_comes_back_is_used_again(start_router, client, eventually, tokenizer) -> None:
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    async with running_worker(StandInWorker(tokenizer=tokenizer)) as worker:
        router = await start_router(worker)
        port = int(worker.url.rpartition(":")[2])
    await eventually(lambda: router.fleet.rows[worker.url].state is State.DOWN)
    async with client.post(router.url + "/generate", json=body) as answer:
        assert answer.status == 503
    async with running_worker(StandInWorker(tokenizer=tokenizer), port):
        await eventually(lambda: router.fleet.rows[worker.url].state is State.READY)
        async with client.post(router.url + "/generate", json=body) as answer:
            assert answer.status == 200


async def test_a_router_waits_for_workers_that_start_later(
    start_router, client, eventually, unused_tcp_port
) -> None:
    router = await start_router(f"http://127.0.0.1:{unused_tcp_port}")
    async with client.get(router.url + "/health") as answer:
        assert answer.status == 503
    async with running_worker(StandInWorker(), unused_tcp_port):
        await eventually(lambda: len(router.fleet.usable()) == 1)
        async with client.get(router.url + "/health") as answer:
            assert answer.status == 200


async def test_mixed_models_stop_the_start(start_worker) -> None:
    one, two = await start_worker(vocab_size=100), await start_worker(vocab_size=200)
    with pytest.raises(ConfigError, match=r"--worker-urls: .*vocab_size") as caught:
        async with Router(RouterConfig(worker_urls=(one.url, two.url), port=0)):
            pytest.fail("a router of two models must not start")
    assert caught.value.field == "--worker-urls"


async def test_a_watch_that_fails_takes_its_worker_down_and_no_other(
    start_worker, start_router, eventually, monkeypatch
) -> None:
    worker, other = await start_worker(), await start_worker()
    router = await start_router(worker, other)
    whole = router.watch._api.probe

    async def broken(name: str, timeout_s: float) -> object:
        if name == worker.url:
            raise ZeroDivisionError("a bug")
        return await whole(name, timeout_s)

    monkeypatch.setattr(router.watch._api, "probe", broken)
    await eventually(lambda: [each.name for each in router.fleet.usable()] == [other.url])
    assert "cannot be judged" in router.fleet.rows[worker.url].why
    monkeypatch.undo()
    await eventually(lambda: len(router.fleet.usable()) == 2)
    assert router.rounds.failures.pop("health") >= 3


async def test_the_key_for_the_workers_is_sent(start_router, client, start_worker) -> None:
    worker = await start_worker()
    router = await start_router(worker, worker_api_key="theirs", api_key="ours")
    headers = {"authorization": "Bearer ours"}
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    async with client.post(router.url + "/generate", json=body, headers=headers) as answer:
        assert answer.status == 200
    assert worker.requests[-1][2]["authorization"] == "Bearer theirs"
