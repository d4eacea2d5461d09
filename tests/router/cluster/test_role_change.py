"""An instance that changes its role: drained, switched, and back; and what is refused. Stand-in workers."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from sglang_ext.protocol.cluster import Registration
from sglang_ext.router import Router
from sglang_ext.router.cluster.members import CannotChangeRole
from sglang_ext.router.cluster.role_change import RoleChanges
from sglang_ext.testing.servers.workers import StandInWorker


class Switching:
    """Calls to workers, which take on roles, and register so."""

    def __init__(self, router: Router, workers: list[StandInWorker]) -> None:
        self._router = router
        self._workers = {worker.url: worker for worker in workers}
        self.refuses = ""
        self.busy = 0
        self.calls: list[tuple[str, Any]] = []

    async def call(self, url: str, method: str, target: str, *, body: Any, timeout_s: float) -> Any:
        self.calls.append((url, body["new_role"]))
        assert self._router.fleet.rows[url].in_flight == 0
        why = self.refuses
        if self.busy:
            self.busy -= 1
            why = "instance is not idle; drain all requests before switching"
        if not why:
            self._workers[url].model_info["disaggregation_mode"] = body["new_role"]
            member = self._router.members.roster.at(url)
            assert member is not None
            assert member.registration is not None
            now = msgspec.structs.replace(member.registration, role=body["new_role"])
            asyncio.get_running_loop().call_soon(self._router.members.register, now)
        return _Answer(400 if why else 200, {"success": not why, "message": why})


class _Answer:
    def __init__(self, status: int, body: Any) -> None:
        self.status = status
        self._body = body

    def json(self) -> Any:
        return self._body


@pytest.fixture
async def rig(start_worker: Any, start_router: Any, eventually: Any) -> tuple[Router, Switching, RoleChanges]:
    workers = [await start_worker() for _ in range(3)]
    router: Router = await start_router()
    for worker, name, role in zip(workers, "pqd", ("prefill", "prefill", "decode"), strict=True):
        worker.model_info["disaggregation_mode"] = role
        router.members.register(
            Registration(url=worker.url, instance=name, epoch=f"{ord(name):032x}", role=role)
        )
    await eventually(lambda: len(router.fleet.usable()) == 3)
    api = Switching(router, workers)
    return router, api, RoleChanges(router.members, api)  # type: ignore[arg-type]


def roles(router: Router) -> list[str]:
    return sorted(instance.role.value for instance in router.fleet.usable())


async def test_it_serves_in_its_new_role(rig: tuple[Router, Switching, RoleChanges]) -> None:
    router, api, changes = rig
    api.busy = 2  # transfers end a moment behind the answers
    await changes.change("q", "decode")
    assert roles(router) == ["decode", "decode", "prefill"]
    await changes.change("q", "decode")
    assert len(api.calls) == 3
    await changes.change("q", "prefill")
    assert roles(router) == ["decode", "prefill", "prefill"]


async def test_what_refuses_stays_and_serves_on(
    rig: tuple[Router, Switching, RoleChanges], eventually: Any
) -> None:
    router, api, changes = rig
    api.refuses = "--enable-pd-role-switch is not set on this instance"
    with pytest.raises(CannotChangeRole, match="enable-pd-role-switch"):
        await changes.change("q", "decode")
    await eventually(lambda: roles(router) == ["decode", "prefill", "prefill"])


async def test_the_last_of_its_kind_and_colocated_ones_stay(
    rig: tuple[Router, Switching, RoleChanges],
) -> None:
    _, api, changes = rig
    with pytest.raises(CannotChangeRole, match="last decode"):
        await changes.change("d", "prefill")
    with pytest.raises(CannotChangeRole, match="was started as prefill"):
        await changes.change("q", "colocated")
    assert not api.calls


async def test_two_changes_at_once_are_one(rig: tuple[Router, Switching, RoleChanges]) -> None:
    _, _, changes = rig
    first = asyncio.create_task(changes.change("q", "decode"))
    await asyncio.sleep(0)
    with pytest.raises(CannotChangeRole, match="already"):
        await changes.change("q", "decode")
    await first
