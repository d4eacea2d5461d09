"""The supervisor over small real processes."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from cluster_processes import SMALL_SERVER, alive, async_wait_for, wait_for

from sglang_ext.cluster.lifecycle import State
from sglang_ext.cluster.plan import Part
from sglang_ext.cluster.supervisor import Cluster, ClusterError, PartStatus

MakePart = Callable[..., Part]
Pids = Callable[[str], list[int]]


class Diary:
    """Notes every change as (part, state)."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, State]] = []

    def begin(self, parts: Mapping[str, PartStatus]) -> None:
        self.entries += [(name, status.state) for name, status in parts.items()]

    def changed(self, status: PartStatus) -> None:
        self.entries.append((status.part.name, status.state))

    def position(self, name: str, state: State) -> int:
        return self.entries.index((name, state))


async def test_a_part_is_ready_when_it_says_so_itself(small_part: MakePart, tmp_path: Path) -> None:
    """A router that serves without its servers' snapshots makes no cluster that is ready."""
    knows = asyncio.Event()
    asked = asyncio.Event()

    async def probe(url: str) -> bool:
        asked.set()
        return knows.is_set() if url.endswith("/ready") else True

    part = dataclasses.replace(small_part("router"), ready_path="/ready")
    async with Cluster([part], tmp_path, probe=probe) as cluster:
        await asked.wait()
        assert cluster.parts["router"].state is State.STARTING
        knows.set()
        await cluster.ready()


async def test_starts_in_order_and_ends_in_the_opposite_order(
    small_part: MakePart, tmp_path: Path, pids_of: Pids
) -> None:
    parts = [
        small_part("server-0"),
        small_part("server-1"),
        small_part("router", needs=("server-0", "server-1")),
    ]
    diary = Diary()
    async with Cluster(parts, tmp_path, observer=diary) as cluster:
        await cluster.ready()
        cluster.check()
        assert all(status.ready_after_s is not None for status in cluster.parts.values())
        assert repr(cluster) == "Cluster(server-0 ready, server-1 ready, router ready)"
    cluster.check()
    assert cluster.failure is None
    at = diary.position
    assert max(at("server-0", State.READY), at("server-1", State.READY)) < at("router", State.STARTING)
    assert at("router", State.ENDED) < min(at("server-0", State.STOPPING), at("server-1", State.STOPPING))
    for name in ("server-0", "server-1", "router"):
        (pid,) = pids_of(name)
        assert not alive(pid)
    assert "listening on" in (tmp_path / "router.log").read_text()


async def test_a_part_that_dies_takes_the_cluster_down_and_says_why(
    small_part: MakePart, tmp_path: Path, pids_of: Pids
) -> None:
    parts = [small_part("server-0"), small_part("server-1", "exit=3")]
    async with Cluster(parts, tmp_path) as cluster:
        with pytest.raises(ClusterError) as caught:
            await cluster.ready()
        text = str(caught.value)
        assert "server-1 ended with exit status 3" in text
        assert str(tmp_path / "server-1.log") in text
        assert "about to give up" in text
        await cluster.ended()
        assert cluster.parts["server-0"].state is State.ENDED
        assert cluster.parts["server-1"].state is State.FAILED
    assert not any(alive(pid) for pid in pids_of("server-0"))


async def test_a_part_that_is_killed_is_named_with_its_signal(
    small_part: MakePart, tmp_path: Path, pids_of: Pids
) -> None:
    async with Cluster([small_part("server-0")], tmp_path) as cluster:
        await cluster.ready()
        os.kill(pids_of("server-0")[0], signal.SIGKILL)
        await cluster.ended()
    assert "server-0 was killed by signal 9 (SIGKILL)" in str(cluster.failure)


async def test_restarts_while_they_last(small_part: MakePart, tmp_path: Path, pids_of: Pids) -> None:
    diary = Diary()
    parts = [small_part("server-0", "exit-once=4"), small_part("router", needs=("server-0",))]
    async with Cluster(parts, tmp_path, restarts=1, observer=diary) as cluster:
        await cluster.ready()
        assert cluster.parts["server-0"].restarts == 1
        assert diary.entries.count(("server-0", State.STARTING)) == 2
        os.kill(pids_of("server-0")[1], signal.SIGKILL)
        with pytest.raises(ClusterError, match="after 1 restarts"):
            await cluster.failed()
    assert cluster.failure is not None


async def test_a_ready_part_is_started_again_alone(
    small_part: MakePart, tmp_path: Path, pids_of: Pids
) -> None:
    parts = [small_part("server-0"), small_part("router", needs=("server-0",))]
    async with Cluster(parts, tmp_path, restarts=2) as cluster:
        await cluster.ready()
        os.kill(pids_of("server-0")[0], signal.SIGKILL)
        await async_wait_for(lambda: cluster.parts["server-0"].restarts == 1, "the restart")
        await cluster.ready()
        assert len(pids_of("router")) == 1
    assert cluster.failure is None


async def test_a_part_that_never_answers(small_part: MakePart, tmp_path: Path, pids_of: Pids) -> None:
    async with Cluster([small_part("server-0", "deaf")], tmp_path, start_timeout_s=0.5) as cluster:
        with pytest.raises(ClusterError, match=r"server-0 did not answer within 0\.5 s"):
            await cluster.ready()
        await cluster.ended()
        assert cluster.parts["server-0"].state is State.ENDED
    assert not any(alive(pid) for pid in pids_of("server-0"))


async def test_a_stubborn_part_is_killed(small_part: MakePart, tmp_path: Path, pids_of: Pids) -> None:
    async with Cluster([small_part("server-0", "stubborn")], tmp_path, stop_timeout_s=0.2) as cluster:
        await cluster.ready()
    assert not alive(pids_of("server-0")[0])
    assert cluster.failure is None


async def test_hurry_does_not_wait_for_the_stubborn(
    small_part: MakePart, tmp_path: Path, pids_of: Pids
) -> None:
    parts = [small_part("server-0", "stubborn"), small_part("router", "stubborn", needs=("server-0",))]
    async with Cluster(parts, tmp_path, stop_timeout_s=600) as cluster:
        await cluster.ready()
        cluster.stop()
        assert cluster.parts["server-0"].state is State.READY
        cluster.hurry()
        await asyncio.wait_for(cluster.ended(), 20)
    assert not any(alive(pid) for name in ("server-0", "router") for pid in pids_of(name))


async def test_a_cancelled_owner_still_ends_everything(
    small_part: MakePart, tmp_path: Path, pids_of: Pids
) -> None:
    entered = asyncio.Event()

    async def own() -> None:
        async with Cluster([small_part("server-0", "stubborn")], tmp_path, stop_timeout_s=600) as cluster:
            await cluster.ready()
            entered.set()
            await cluster.failed()

    owner = asyncio.create_task(own())
    await entered.wait()
    owner.cancel()
    await asyncio.sleep(0)
    owner.cancel()  # while it ends the parts
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(owner, 20)
    assert not alive(pids_of("server-0")[0])


async def test_work_ends_with_the_cluster(small_part: MakePart, tmp_path: Path, pids_of: Pids) -> None:
    async def forever() -> int:
        await asyncio.Event().wait()
        return 0

    async def number() -> int:
        return 7

    async with Cluster([small_part("server-0")], tmp_path) as cluster:
        await cluster.ready()
        assert await cluster.doing(number()) == 7
        os.kill(pids_of("server-0")[0], signal.SIGKILL)
        with pytest.raises(ClusterError, match="server-0"):
            await cluster.doing(forever())


async def test_waiting_for_a_cluster_that_was_stopped(small_part: MakePart, tmp_path: Path) -> None:
    async with Cluster([small_part("server-0", "deaf")], tmp_path) as cluster:
        # So early that there is no process yet to be stopped.
        cluster.stop()
        with pytest.raises(ClusterError, match="was stopped"):
            await cluster.ready()
    assert cluster.failure is None


async def test_a_part_that_cannot_be_started(small_part: MakePart, tmp_path: Path) -> None:
    async with Cluster([small_part("server-0")], tmp_path / "missing") as cluster:
        with pytest.raises(ClusterError, match=r"server-0: .*No such file"):
            await cluster.ready()


def test_a_killed_supervisor_leaves_nothing(
    tmp_path: Path, pids_of: Pids, free_port: Callable[[], int]
) -> None:
    code = textwrap.dedent(
        f"""
        import asyncio, sys
        from pathlib import Path
        from sglang_ext.cluster.plan import Part
        from sglang_ext.cluster.supervisor import Cluster

        def part(name, port, *behaviours):
            command = (sys.executable, "-S", {str(SMALL_SERVER)!r}, str(port),
                       f"{tmp_path}/{{name}}.pids", *behaviours)
            return Part(name, command, {{}}, f"http://127.0.0.1:{{port}}")

        async def main():
            parts = [part("server-0", {free_port()}, "family"), part("server-1", {free_port()}, "stubborn")]
            async with Cluster(parts, Path({str(tmp_path)!r}), stop_timeout_s=0.5) as cluster:
                await cluster.ready()
                print(*[status.pid for status in cluster.parts.values()], flush=True)
                await cluster.failed()

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        guards = [int(pid) for pid in supervisor.stdout.readline().split()]
        wait_for(lambda: len(pids_of("server-0")) == 2, "the family")
        pids = [*guards, *pids_of("server-0"), *pids_of("server-1")]
        assert len(pids) == 5
        assert all(alive(pid) for pid in pids)
        supervisor.kill()
    wait_for(lambda: not any(alive(pid) for pid in pids), "the end of everything")
