"""Pools in a GPU's memory without RDMA and without CUDA: refused at start where this side has no transport
left, else when a peer joins, with the reasons of both sides and the way out. The memory is the host's and
only said to be a GPU's: nothing is read here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sglang_ext.disagg.errors import RefusedError, TransportUnavailableError
from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.disagg.transports import TransportName
from sglang_ext.disagg.transports.verbs import VerbsTransport
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.testing.transfer.rig import NAMESPACE, Pool, Shape

pytestmark = pytest.mark.slow

SHAPE = Shape(layers=2, heads=4, width=64, blocks=16, block_tokens=16, dtype="float32")


def device_pool(pool: Pool) -> PoolSpec:
    memory = [
        dataclasses.replace(each, kind=MemoryKind.CUDA, fd=-1, fd_offset=0) for each in pool.spec.memory
    ]
    return dataclasses.replace(pool.spec, memory=tuple(memory))


@asynccontextmanager
async def endpoint(
    name: str, *transports: TransportName, device: bool
) -> AsyncIterator[tuple[Endpoint, Pool]]:
    pool = Pool("hbm", SHAPE, shared=True)
    spec = device_pool(pool) if device else pool.spec
    started = await Endpoint.start(EndpointConfig(name, NAMESPACE, transports=transports), [spec])
    try:
        yield started, pool
    finally:
        await started.close()


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    """This side has an adapter that registers GPU memory; owners refuse it by name."""
    monkeypatch.setattr(VerbsTransport, "unavailable", lambda self: None)
    monkeypatch.setattr(VerbsTransport, "offer", lambda self: b"offer")
    monkeypatch.setattr(VerbsTransport, "withdraw", lambda self, offer: None)

    def refuse(self: VerbsTransport, *_: object) -> None:
        raise TransportUnavailableError("verbs: no RDMA device")

    monkeypatch.setattr(VerbsTransport, "accept", refuse)


@pytest.fixture
def no_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VerbsTransport, "unavailable", lambda self: "no RDMA device")


async def test_a_device_pool_without_rdma_is_refused_at_start(no_adapter: None) -> None:
    with pytest.raises(TransportUnavailableError) as refused:
        async with endpoint("decode", device=True):
            pass
    text = str(refused.value)
    for name in ("shm", "cma", "tcp"):
        assert f"{name}: a pool is in cuda memory" in text
    assert "cuda_ipc: CUDA is not used by this process" in text
    assert "verbs: no RDMA device" in text
    assert "pinned host memory" in text
    assert "without --disaggregation-mode" in text


async def test_host_memory_starts_without_rdma(no_adapter: None) -> None:
    """The twin."""
    async with endpoint("decode", device=False) as (started, _):
        assert started.address


async def test_one_allowed_transport_that_is_not_there_is_refused_by_its_flag(no_adapter: None) -> None:
    with pytest.raises(TransportUnavailableError, match=r"--kv-transports: .*verbs: no RDMA device.*Allow"):
        async with endpoint("decode", TransportName.VERBS, device=False):
            pass


async def test_a_join_that_no_transport_carries_names_both_sides(adapter: None) -> None:
    """Decode's pool is on a device, with an adapter; prefill has none."""
    async with (
        endpoint("prefill-1", device=False) as (owner, _),
        endpoint("decode-1", device=True) as (reader, _),
    ):
        with pytest.raises(RefusedError) as refused:
            await reader.connect([owner.address])
    text = str(refused.value)
    assert "from prefill-1 to decode-1" in text
    assert "prefill-1: verbs: no RDMA device" in text
    assert "decode-1: shm: a pool is in cuda memory; cma:" in text
    assert "pinned host memory" in text


async def test_a_device_pool_of_the_owner_is_named_by_it(adapter: None) -> None:
    async with (
        endpoint("prefill-1", device=True) as (owner, _),
        endpoint("decode-1", TransportName.SHM, TransportName.TCP, device=False) as (reader, _),
    ):
        with pytest.raises(RefusedError) as refused:
            await reader.connect([owner.address])
    text = str(refused.value)
    assert "prefill-1: shm: a pool is in cuda memory; tcp: a pool is in cuda memory" in text
    assert text.count("pinned host memory") == 1


async def test_host_pools_beside_each_other_connect(adapter: None) -> None:
    """The twin of both."""
    async with (
        endpoint("prefill-1", device=False) as (owner, _),
        endpoint("decode-1", device=False) as (reader, _),
    ):
        assert (await reader.connect([owner.address])).name == "prefill-1"


def test_the_transfer_thread_of_pd_does_not_start(no_adapter: None) -> None:
    config = EndpointConfig("x", NAMESPACE, transports=(TransportName.VERBS,))
    with pytest.raises(TransportUnavailableError, match="no RDMA device"):
        TransferThread(config, [Pool("hbm", SHAPE, shared=True).spec])
