"""An instance that changes its role: drained, switched, and back; refusals, and deaths in the middle. A
controller that has instances do so by itself. Stand-in workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console

from sglang_ext.cluster.status import show
from sglang_ext.protocol.cluster import Registration, RoleName
from sglang_ext.router import Router
from sglang_ext.router.cluster import role_change
from sglang_ext.router.cluster.members import CannotChangeRole
from sglang_ext.router.cluster.members_view import cluster
from sglang_ext.router.cluster.role_change import RoleChanges
from sglang_ext.router.fleet.lifecycle import State
from sglang_ext.stages import StageTimes
from tests.support.servers.redis_server import HOW_TO_GET_IT, RedisServer, redis_is_installed
from tests.support.servers.workers import Gate, StandInWorker

pytestmark = pytest.mark.slow

BODY = {"input_ids": list(range(64)), "sampling_params": {"max_new_tokens": 4}}
NOT_IDLE = "instance is not idle; drain all requests before switching"
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@dataclass
class Rig:
    """Instances p and q prefill and d decodes, or p prefills and d and e decode."""

    router: Router
    changes: RoleChanges
    workers: dict[str, StandInWorker]
    eventually: Eventually

    def state(self, name: str) -> State:
        return self.router.fleet.rows[self.workers[name].url].state

    def register(self, name: str, role: RoleName, epoch: int = 0) -> None:
        url = self.workers[name].url
        self.workers[name].model_info["disaggregation_mode"] = role
        self.router.members.register(
            Registration(url=url, instance=name, epoch=f"{epoch or ord(name):032x}", role=role)
        )

    @property
    def roles(self) -> list[str]:
        return sorted(instance.role.value for instance in self.router.fleet.usable())

    def counted(self, role: str, outcome: str, why: str = "asked") -> float:
        labels = {"role": role, "why": why, "outcome": outcome}
        name = "sglang_ext_router_role_changes_total"
        return self.router.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
def start_rig(start_worker: Any, start_router: Any, eventually: Eventually) -> Callable[..., Awaitable[Rig]]:
    async def start(names: str = "pqd", *, switches: bool = True, **options: Any) -> Rig:
        workers = {name: await start_worker() for name in names}
        for worker in workers.values():
            worker.server_info["enable_pd_role_switch"] = switches
        router: Router = await start_router(**options)
        rig = Rig(router, router.role_changes, workers, eventually)
        for name in names:
            rig.register(name, "prefill" if name in "pq" else "decode")
            workers[name].switched.subscribe(lambda role, name=name: rig.register(name, role))
        await eventually(lambda: len(router.fleet.usable()) == 3)
        return rig

    return start


@pytest.fixture
async def rig(start_rig: Callable[..., Awaitable[Rig]]) -> Rig:
    return await start_rig()


async def test_it_serves_in_its_new_role(rig: Rig) -> None:
    rig.workers["q"].role_refusals = [NOT_IDLE, NOT_IDLE]  # transfers end a moment behind the answers
    await rig.changes.change("q", "decode")
    assert rig.roles == ["decode", "decode", "prefill"]
    await rig.changes.change("q", "decode")
    assert rig.workers["q"].targets.count("/pd_role_switch") == 3
    await rig.changes.change("q", "prefill")
    assert rig.roles == ["decode", "prefill", "prefill"]
    assert (rig.counted("decode", "done"), rig.counted("prefill", "done")) == (1, 1)
    assert rig.changes.expected_s is not None
    assert 0.0 < rig.changes.expected_s <= max(view.took_s for view in rig.changes.recent()) + 0.001
    assert [(view.role, view.outcome) for view in rig.changes.recent()] == [
        ("prefill", "done"),
        ("decode", "done"),
    ]


async def test_what_refuses_stays_and_serves_on(rig: Rig) -> None:
    rig.workers["q"].role_refusals = ["--enable-pd-role-switch is not set on this instance"]
    with pytest.raises(CannotChangeRole, match="enable-pd-role-switch"):
        await rig.changes.change("q", "decode")
    await rig.eventually(lambda: rig.roles == ["decode", "prefill", "prefill"])
    assert rig.counted("decode", "refused") == 1
    assert "enable-pd-role-switch" in rig.changes.recent()[0].text


async def test_the_last_of_its_kind_and_colocated_ones_stay(rig: Rig) -> None:
    with pytest.raises(CannotChangeRole, match="last decode"):
        await rig.changes.change("d", "prefill")
    with pytest.raises(CannotChangeRole, match="was started as prefill"):
        await rig.changes.change("q", "colocated")
    assert not any("/pd_role_switch" in worker.targets for worker in rig.workers.values())


async def test_two_changes_at_once_are_one(rig: Rig) -> None:
    first = asyncio.create_task(rig.changes.change("q", "decode"))
    await asyncio.sleep(0)
    with pytest.raises(CannotChangeRole, match="already"):
        await rig.changes.change("q", "decode")
    await first


# -- deaths in the middle ------------------------------------------------------------------------------------


@asynccontextmanager
async def draining(rig: Rig, client: Any) -> AsyncIterator[asyncio.Task[None]]:
    """Instance q is to decode, and finishes a request before: the change, while the block runs."""
    worker = rig.workers["q"]
    # Decode too, which else answers without having waited for prefill.
    worker.before_head = rig.workers["d"].before_head = Gate()

    async def generate(number: int) -> None:
        body = {**BODY, "input_ids": list(range(1000 * number, 1000 * number + 64))}
        async with client.post(rig.router.url + "/generate", json=body) as answer:
            await answer.read()

    running = [asyncio.create_task(generate(number)) for number in range(4)]
    await rig.eventually(lambda: rig.router.fleet.rows[worker.url].in_flight > 0)
    change = asyncio.create_task(rig.changes.change("q", "decode"))
    await rig.eventually(lambda: rig.state("q") is State.DRAINING)
    try:
        yield change
    finally:
        change.cancel()
        worker.before_head.open()
        await asyncio.gather(change, *running, return_exceptions=True)


async def test_the_other_of_its_role_dies_meanwhile(rig: Rig, client: Any) -> None:
    async with draining(rig, client) as change:
        rig.workers["p"].hang_probes = Gate()  # or the next probe would find that it lives
        rig.router.fleet.lost(rig.workers["p"].url, "it died")
        with pytest.raises(CannotChangeRole, match="last prefill"):
            await change
        rig.workers["p"].hang_probes.open()
    await rig.eventually(lambda: rig.state("q") is State.READY)
    assert "/pd_role_switch" not in rig.workers["q"].targets


async def test_it_is_started_anew_meanwhile(rig: Rig, client: Any) -> None:
    async with draining(rig, client) as change:
        rig.register("q", "prefill", epoch=77)
        with pytest.raises(CannotChangeRole, match="started anew"):
            await change
    await rig.eventually(lambda: rig.state("q") is State.READY)
    assert rig.roles == ["decode", "prefill", "prefill"]


async def test_it_dies_while_it_switches(rig: Rig) -> None:
    """As a stopped or killed server does: it never says whether it has."""
    worker = rig.workers["q"]
    worker.before_switch = Gate()
    change = asyncio.create_task(rig.changes.change("q", "decode"))
    await worker.before_switch.reached()
    rig.router.fleet.lost(worker.url, "it died")
    worker.role_refusals = ["gone"]
    worker.before_switch.open()
    with pytest.raises(CannotChangeRole, match="gone"):
        await change
    assert rig.router.members.member("q").changing is None
    # It comes back in the role that it was started with.
    rig.register("q", "prefill", epoch=78)
    await rig.eventually(lambda: rig.roles == ["decode", "prefill", "prefill"])


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.mark.skipif(not redis_is_installed(), reason=HOW_TO_GET_IT)
async def test_its_router_dies_meanwhile(
    redis: RedisServer,
    start_rig: Callable[..., Awaitable[Rig]],
    start_router: Any,
    client: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another router takes the drain back; until the first is known to be gone, none does."""
    monkeypatch.setattr(role_change, "ORPHANED_S", 0.5)
    rig = await start_rig(cluster=redis.url)
    other: Router = await start_router(cluster=redis.url)
    await rig.eventually(lambda: len(other.fleet.usable()) == 3)
    url = rig.workers["q"].url
    async with draining(rig, client):
        await rig.eventually(lambda: other.fleet.rows[url].state is not State.READY)
        assert other.members.member("q").changing is not None
        await rig.eventually(lambda: bool(other.members.store.others))
        for _ in range(5):
            other.members.tick()
            assert other.members.member("q").changing is not None
        # It says nothing any more, nor does it tidy up.
        monkeypatch.setattr(rig.router.members, "resume", lambda instance: None)
        await rig.router.members.store.stop()
        await rig.eventually(lambda: other.members.member("q").changing is None)
        await rig.eventually(lambda: other.fleet.rows[url].state is State.READY)
    assert other.role_changes.recent()[0].outcome == "taken_back"


# -- by itself -----------------------------------------------------------------------------------------------

LONG_PROMPTS = StageTimes(0.5, 0.4, 0.01, 0.0, 0.1)
LONG_ANSWERS = StageTimes(0.0, 0.001, 0.01, 0.0, 6.0)


@asynccontextmanager
async def load(rig: Rig, client: Any, stages: StageTimes) -> AsyncIterator[None]:
    """Requests, one after the other in four lanes; answers say that they took so long."""
    for worker in rig.workers.values():
        worker.end_details = stages.details()

    async def lane(number: int) -> None:
        for turn in range(1 << 30):
            ids = [(number * 1009 + turn * 31 + at) % 30_000 for at in range(64)]
            async with client.post(rig.router.url + "/generate", json={**BODY, "input_ids": ids}) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            await asyncio.sleep(0.1)

    lanes = [asyncio.create_task(lane(number)) for number in range(4)]
    try:
        yield
    finally:
        for each in lanes:
            each.cancel()
        for end in await asyncio.gather(*lanes, return_exceptions=True):
            assert isinstance(end, asyncio.CancelledError), end


def status_of(rig: Rig) -> str:
    """As ``sglang-ext cluster-status`` prints it."""
    console = Console(width=400, record=True, file=None, quiet=False)
    with console.capture() as printed:
        show(cluster(rig.router.members, rig.router.roles.view()), console)
    return printed.get()


async def test_the_controller_follows_the_load(start_rig: Any, client: Any) -> None:
    rig = await start_rig("pde", role_controller="on", role_dwell_secs=2.0)
    await rig.eventually(lambda: "0 answers" in status_of(rig))
    async with load(rig, client, LONG_PROMPTS):
        await rig.eventually(lambda: rig.roles == ["decode", "prefill", "prefill"])
    await rig.eventually(lambda: rig.counted("prefill", "done", why="prefill") == 1)
    said = status_of(rig)
    assert "role controller (on)" in said
    assert "to prefill (prefill), done" in said


async def test_a_dry_run_only_says_what_it_would_do(start_rig: Any, client: Any) -> None:
    rig = await start_rig("pde", role_controller="dry-run", role_dwell_secs=2.0)
    async with load(rig, client, LONG_PROMPTS):
        await rig.eventually(lambda: rig.counted("prefill", "dry-run", why="prefill") >= 1)
    said = status_of(rig)
    assert "dry run: " in said
    assert "would become prefill" in said
    assert rig.roles == ["decode", "decode", "prefill"]
    assert not any("/pd_role_switch" in worker.targets for worker in rig.workers.values())
    gauge = rig.router.metrics.registry.get_sample_value
    rig.router.metrics.refreshing()
    splits = {"1P2D", "2P1D"}
    seconds = {
        split: gauge("sglang_ext_router_role_controller_expected_seconds", {"split": split})
        for split in splits
    }
    assert seconds["1P2D"] > seconds["2P1D"] >= 0.0


async def test_who_refuses_is_left_in_peace(start_rig: Any, client: Any) -> None:
    rig = await start_rig("pde", role_controller="on", role_dwell_secs=1.0)
    for name in "de":
        rig.workers[name].role_refusals = ["not today"] * 9
    async with load(rig, client, LONG_PROMPTS):
        await rig.eventually(lambda: rig.counted("prefill", "refused", why="prefill") == 2)
        await rig.eventually(lambda: "no instance can become prefill" in status_of(rig))
    assert [worker.targets.count("/pd_role_switch") for worker in rig.workers.values()] == [0, 1, 1]
    assert rig.roles == ["decode", "decode", "prefill"]


async def test_only_servers_that_can_change_are_asked_and_off_is_off(start_rig: Any, client: Any) -> None:
    off = await start_rig("pde")
    assert off.router.roles.view() is None
    assert "role controller" not in status_of(off)
    rig = await start_rig("pde", switches=False, role_controller="on", role_dwell_secs=1.0)
    async with load(rig, client, LONG_PROMPTS):
        await rig.eventually(lambda: "no instance can become prefill" in status_of(rig))
    assert not any("/pd_role_switch" in worker.targets for worker in rig.workers.values())


@pytest.mark.skipif(not redis_is_installed(), reason=HOW_TO_GET_IT)
async def test_of_several_routers_one_acts(
    redis: RedisServer, start_rig: Any, start_router: Any, client: Any
) -> None:
    options = {"cluster": redis.url, "role_controller": "on", "role_dwell_secs": 1.0}
    rig = await start_rig("pde", **options)
    other: Router = await start_router(**options)
    both = [rig.router, other]
    await rig.eventually(lambda: all(router.members.store.others for router in both))
    first, second = sorted(both, key=lambda router: router.members.router)
    assert first.roles.idle_because() is None
    assert second.roles.idle_because() == f"router {first.members.router} does it"
    async with load(rig, client, LONG_PROMPTS):
        if rig.router is second:
            # It sees the load and leaves it to the other, which sees none of it.
            await rig.eventually(lambda: "does it" in status_of(rig) and "wishes" in status_of(rig))
        else:
            await rig.eventually(lambda: rig.roles == ["decode", "prefill", "prefill"])
    await first.members.store.stop()
    await rig.eventually(lambda: second.roles.idle_because() is None)
