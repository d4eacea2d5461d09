"""A fault in background work is logged and counted, and the work goes on; only repeated faults end a router,
and then it is started again."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from sglang_ext.errors import ConfigError, InternalError
from sglang_ext.protocol.cluster import Registration
from sglang_ext.router import Router, RouterConfig
from sglang_ext.router.cluster import role_change
from sglang_ext.router.cluster.members import CannotChangeRole
from sglang_ext.router.cluster.roster import Intent
from sglang_ext.router.fleet.lifecycle import USABLE, State
from sglang_ext.tasks import FAILURES, Round, Rounds
from sglang_ext.testing.fakes import FakeClock
from sglang_ext.testing.waiting import until
from tests.support.servers.ports import free_port
from tests.support.servers.workers import StandInWorker, running_worker

pytestmark = pytest.mark.slow

OF_ONE_PEER = {"health", "agents", "drains"}
BODY = {"text": "Hello", "sampling_params": {"max_new_tokens": 2}}
START_S = 120.0


@pytest.fixture
async def worker() -> AsyncIterator[StandInWorker]:
    async with running_worker() as found:
        yield found


@pytest.fixture
def config(worker: StandInWorker, tmp_path: Path, key_file: Path) -> RouterConfig:
    """With all the background work that there is on one machine."""
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    return RouterConfig(
        worker_urls=(worker.url,),
        port=0,
        cluster=f"local://{shared}",
        cluster_key_file=str(key_file),
        role_controller="dry-run",
        health_check_interval_secs=0.05,
    )


def broken(monkeypatch: pytest.MonkeyPatch, name: str, times: float) -> None:
    """Make work of this name fail so many times, from its first round on."""
    left = [times]
    whole = Rounds.once

    async def once(self: Rounds, this: str, each: Round) -> float | None:
        if this == name and left[0] > 0:
            left[0] -= 1
            raise RuntimeError(f"{name} fails")
        return await whole(self, this, each)

    monkeypatch.setattr(Rounds, "once", once)


def failures(router: Router, name: str) -> float:
    found = router.metrics.registry.get_sample_value("sglang_ext_router_task_failures_total", {"task": name})
    assert found is not None
    return found


async def names_of(config: RouterConfig) -> set[str]:
    async with Router(config) as router:
        await until(lambda: "tokenizer" in router.rounds.names)
        return set(router.rounds.names)


async def test_every_kind_of_work_goes_on_after_a_fault(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = await names_of(config)
    assert names >= {"accept_routers", "cluster_key", "connections", "documents", "health", "hints"}
    assert names >= {"members", "prompt_tree", "roles", "spilling", "tokenizer"}
    for name in sorted(names):
        with monkeypatch.context() as patch:
            broken(patch, name, 1)
            async with Router(config) as router:
                ended = asyncio.create_task(router.ended())
                await until(lambda router=router, name=name: failures(router, name) == 1)
                await until(lambda router=router: len(router.fleet.usable()) == 1)
                async with (
                    aiohttp.ClientSession() as client,
                    client.post(f"{router.url}/generate", json=BODY) as answer,
                ):
                    assert answer.status == 200, name
                assert not ended.done()
                ended.cancel()


async def test_work_that_always_fails_ends_the_router_but_no_peer_does(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_ext.tasks.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("sglang_ext.tasks.LONGEST_PAUSE_S", 0.01)
    names = await names_of(config)
    for name in sorted(names):
        with monkeypatch.context() as patch:
            broken(patch, name, float("inf"))
            router = Router(config)
            with contextlib.suppress(asyncio.CancelledError):
                await router.start()
            try:
                if name in OF_ONE_PEER:
                    await until(lambda router=router, name=name: failures(router, name) > 2 * FAILURES)
                    assert not router._ended.done()  # type: ignore[union-attr]
                else:
                    with pytest.raises(InternalError, match=f"{name} fails"):
                        await asyncio.wait_for(router.ended(), 60)
                    assert failures(router, name) == FAILURES + 1
            finally:
                await router.stop()


async def test_pauses_grow_and_faults_far_apart_end_nothing() -> None:
    clock = FakeClock()
    ended: list[BaseException] = []
    rounds = Rounds(clock, ended.append)
    seen: list[float] = []

    async def fails() -> float:
        seen.append(clock.monotonic())
        raise ValueError("always")

    async def now_and_then() -> float:
        if len(seen) % 2:
            seen.append(0.0)
            raise ValueError("now and then")
        seen.append(0.0)
        return 10.0

    task = rounds.start("often", fails)
    await asyncio.sleep(0)
    await clock.pass_time(60.0)
    assert [round(b - a, 3) for a, b in itertools.pairwise(seen)] == [
        *(0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0, 5.0)
    ]
    assert [str(error) for error in ended] == ["always"]
    assert task.done()
    seen.clear()
    task = rounds.start("rare", now_and_then)
    await asyncio.sleep(0)
    await clock.pass_time(600.0)
    assert not task.done()
    assert rounds.failures["rare"] > 2 * FAILURES
    task.cancel()

    async def refuses() -> float:
        raise ConfigError("at once")

    rounds.start("refused", refuses)
    await clock.pass_time(1.0)
    assert str(ended[-1]) == "at once"


async def test_a_worker_that_cannot_be_judged_gets_no_requests(
    config: RouterConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers make the check raise an unforeseen error."""
    async with Router(config) as router:
        await until(lambda: len(router.fleet.usable()) == 1)

        async def odd(*_: Any, **__: Any) -> Any:
            raise KeyError("odd")

        monkeypatch.setattr(router.api, "probe", odd)
        monkeypatch.setattr(router.api, "learn", odd)
        await until(lambda: not router.fleet.usable())
        monkeypatch.undo()
        await until(lambda: len(router.fleet.usable()) == 1, 60)


@pytest.mark.parametrize("moment", ["drain", "join"])
async def test_an_instance_that_leaves_while_it_changes_its_role_stays_gone(
    config: RouterConfig, worker: StandInWorker, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setattr(role_change, "JOIN_S", 0.5)
    async with running_worker() as other, running_worker() as third:
        workers = {"p": worker, "q": other, "d": third}
        for each in workers.values():
            each.server_info["enable_pd_role_switch"] = True
        async with Router(config) as router:
            for name, each in workers.items():
                role = "decode" if name == "d" else "prefill"
                each.model_info["disaggregation_mode"] = role
                router.members.register(
                    Registration(url=each.url, instance=name, epoch=f"{ord(name):032x}", role=role)
                )
            await until(lambda: len(router.fleet.usable()) == 3)
            member = router.members.member("q")
            if moment == "join":  # it registers in its new role, and leaves before it serves

                def joins(role: str) -> None:
                    other.model_info["disaggregation_mode"] = role
                    router.members.register(
                        Registration(url=other.url, instance="q", epoch=f"{ord('q'):032x}", role="decode")
                    )
                    router.members.leave("q")

                other.switched.subscribe(joins)
            changing = asyncio.create_task(router.role_changes.change("q", "decode"))
            if moment == "drain":
                await until(lambda: router.fleet.rows[member.url].state not in USABLE)
                router.members.leave("q")
            with pytest.raises(CannotChangeRole, match="left"):
                await changing
            gone = router.members.roster.get("q")
            assert gone is None or gone.intent is Intent.GONE
            row = router.fleet.rows.get(member.url)
            assert row is None or row.state is State.LEFT


# -- routers that end are started again -----------------------------------------------------------------


STARTED = re.compile(r"worker (\d+) is process (\d+), alone at (http://127\.0\.0\.1:\d+)")


@asynccontextmanager
async def router_process(log: Path, *flags: str, files: int = 4096) -> AsyncIterator[tuple[Any, str]]:
    """A router as users start it, that may have so many files open."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_ext.router", "--port", str(port), *flags]
    with log.open("w", encoding="utf-8") as file:
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *command, stderr=file
        )
    try:
        yield process, f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await asyncio.wait_for(process.wait(), 60)


async def ready(client: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with client.get(f"{url}/ready") as answer:
            return answer.status == 200
    except OSError:
        return False


async def eventually_ready(client: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(START_S):
        while not await ready(client, url):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_idle_connections_that_take_all_files_end_no_router(
    worker: StandInWorker, tmp_path: Path
) -> None:
    """Clients without a key, and not a byte sent: a router of two processes ended with status 1 after 2 s."""
    log = tmp_path / "log"
    flags = ("--workers", "2", "--worker-urls", worker.url)
    timeout = aiohttp.ClientTimeout(total=10)
    async with (
        router_process(log, *flags, files=256) as (process, url),
        aiohttp.ClientSession(timeout=timeout) as client,
    ):
        await eventually_ready(client, url)
        host, port = url.removeprefix("http://").split(":")
        idle = [socket.create_connection((host, int(port))) for _ in range(600)]
        try:
            with pytest.raises(TimeoutError):  # three ticks of the membership
                await asyncio.wait_for(process.wait(), 3.5)
        finally:
            for each in idle:
                each.close()
        await eventually_ready(client, url)
        async with client.post(f"{url}/generate", json=BODY) as answer:
            assert answer.status == 200
        assert len(STARTED.findall(log.read_text())) == 2


async def test_a_worker_process_that_ends_by_an_error_is_started_again(
    worker: StandInWorker, tmp_path: Path
) -> None:
    log, broken_site = tmp_path / "log", tmp_path / "site"
    broken_site.mkdir()
    # One of the two fails for good: its third tick of the membership and all that follow.
    (broken_site / "sitecustomize.py").write_text(FAILS_FOR_GOOD.format(mark=str(tmp_path / "taken")))
    flags = ("--workers", "2", "--worker-urls", worker.url)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(broken_site)
    try:
        async with router_process(log, *flags) as (process, url), aiohttp.ClientSession() as client:
            async with asyncio.timeout(START_S):
                while len(STARTED.findall(log.read_text())) < 3:
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.05)
            await eventually_ready(client, url)
            async with client.post(f"{url}/generate", json=BODY) as answer:
                assert answer.status == 200
            assert process.returncode is None
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
    assert "died with status 1; it starts again" in log.read_text()


FAILS_FOR_GOOD = """
import os, sys
if "sglang_ext.router" in sys.orig_argv:
    from sglang_ext import tasks
    tasks.FIRST_PAUSE_S = tasks.LONGEST_PAUSE_S = 0.001
    whole, broken = tasks.Rounds.once, []

    async def once(self, name, each):
        if name == "members" and not broken:
            try:
                os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                broken.append(0)
            else:
                broken.append(os.getpid())
        if name == "members" and broken[0] == os.getpid():
            raise RuntimeError("for good")
        return await whole(self, name, each)

    tasks.Rounds.once = once
"""
