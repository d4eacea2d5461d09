"""The conformance suite over ``cuda_ipc``, with deaths of its peers, and over ``shm`` and ``tcp`` through
pinned memory, on an emulated GPU, whose processes ``tests/disagg/test_cuda_ipc.py`` starts. The host makes
the copies for which the kernel is launched.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_ext.disagg.errors import PeerGoneError
from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transports import TransportName
from sglang_ext.engine.movers import row_copies
from sglang_ext.engine.movers.gpu_memory import GpuMemory
from sglang_ext.testing.transfer.rig import NAMESPACE, Gate, Rank, Shape, start_instance
from sglang_ext.testing.transfer.transports import TransportConformance
from sglang_ext.testing.waiting import until
from tests.fake_gpu.ipc import copy_by_host

SHAPE = {"layers": 2, "heads": 4, "width": 64, "blocks": 64, "block_tokens": 16, "dtype": "float32"}


@pytest.fixture(autouse=True)
def by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_copies, "launcher", lambda: copy_by_host)


class TestCudaIpc(TransportConformance):
    transport = TransportName.CUDA_IPC
    memory = MemoryKind.CUDA
    seeds = 2
    rewrites = 60

    def config(self, name: str, **changes: Any) -> EndpointConfig:
        return super().config(name, **{"device": GpuMemory(0), **changes})


class Staged(TestCudaIpc):
    """Through pinned memory, in slots that hold a few blocks: a request takes several."""

    def config(self, name: str, **changes: Any) -> EndpointConfig:
        return super().config(name, **{"staging_bytes": 1 << 20, **changes})


class TestStagedShm(Staged):
    transport = TransportName.SHM


class TestStagedTcp(Staged):
    transport = TransportName.TCP


@asynccontextmanager
async def process(**options: Any) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.fake_gpu.transfer_owner"),
        json.dumps({"shape": SHAPE, "transports": ["cuda_ipc"], **options}),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        async with asyncio.timeout(240):
            line = await child.stdout.readline()
        yield child, json.loads(line)
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


@asynccontextmanager
async def endpoint(**changes: Any) -> AsyncIterator[Rank]:
    values = {"heartbeat": 0.1, "dead_after": 1.0, "transports": (TransportName.CUDA_IPC,), **changes}
    config = EndpointConfig("reader", NAMESPACE, device=GpuMemory(0), **values)
    (rank,) = await start_instance(config, Shape(**SHAPE), kind=MemoryKind.CUDA)
    try:
        yield rank
        rank.endpoint.check()
    finally:
        await rank.close()


def mapped_pools() -> int:
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sum("memfd:hbm" in line for line in maps.splitlines())


async def test_what_a_session_has_mapped_is_unmapped_at_its_end() -> None:
    async with process(seed=5) as (_, found), endpoint() as me:
        own = mapped_pools()
        instance = await me.endpoint.connect([found["address"]])
        assert mapped_pools() == own + 1
        offer = await instance.offer(0, "r0", "hbm")
        instance.transfer("r0", [offer], "hbm", np.arange(64))
        await instance.complete("r0", 20)
        there = np.random.default_rng(5).integers(0, 256, me.pool.bytes.size, dtype=np.uint8)
        assert np.array_equal(me.pool.bytes, there)
        me.pool.bytes[1000] ^= 1
        assert not np.array_equal(me.pool.bytes, there)
        await instance.close()
        assert mapped_pools() == own


async def test_a_read_of_an_owner_that_was_killed_ends_with_an_error() -> None:
    """Its memory is still mapped, and its counters say nothing any more."""
    async with process(requests=3) as (child, found), endpoint(heartbeat=5.0, dead_after=20.0) as me:
        instance = await me.endpoint.connect([found["address"]])
        offers = [await instance.offer(0, f"r{i}", "hbm") for i in range(2)]
        gate = Gate(instance.links[0].peer, "read")
        instance.transfer("r0", offers[:1], "hbm", np.arange(64))
        reading = asyncio.ensure_future(instance.complete("r0", 20))
        await until(gate.reached.is_set)
        child.send_signal(signal.SIGKILL)
        await child.wait()
        gate.go.set()
        with pytest.raises(PeerGoneError, match="the peer's process has ended"):
            await reading
        await until(lambda: instance.gone)
        with pytest.raises(PeerGoneError):
            instance.transfer("r1", offers[1:2], "hbm", np.arange(64))


async def test_blocks_of_a_stopped_writer_are_free_when_it_has_ended() -> None:
    """Standing still says nothing about its GPU."""
    async with endpoint(grant_ttl=600.0, dead_after=3.0) as me:
        me.receiver.aside = {4, 5}
        me.owned.seal(np.arange(8, 16))
        me.endpoint.publish("hbm", "r0", np.arange(8, 16), ttl=600.0)
        writer = process(name="w", connect=me.endpoint.address, reserve=[4, 5], dead_after=30.0)
        async with writer as (child, _):
            owner = me.endpoint.owner
            assert me.owned.granted == 2
            child.send_signal(signal.SIGSTOP)
            await owner.revoke("push")
            await until(lambda: not owner.sessions, 60)
            await asyncio.sleep(4.0)
            assert (me.owned.granted, owner.set_aside) == (2, 2)
            child.send_signal(signal.SIGKILL)
            await child.wait()
            await until(lambda: me.owned.granted == 0, 20)
            assert (owner.set_aside, me.receiver.aside) == (0, {4, 5})
