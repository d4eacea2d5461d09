"""GPUDirect RDMA: registration of GPU memory with an adapter, its addresses, and the order of what adapters
write. pyverbs is a fake, and so is the GPU: it has never run.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.disagg.errors import TransportUnavailableError
from sglang_ext.disagg.memory import MemoryKind, RegionTable
from sglang_ext.disagg.runs import Runs
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transports import CancelToken, TransportName, verbs
from sglang_ext.disagg.transports._rdma import Device
from sglang_ext.disagg.transports.pinned import StagedTransport
from sglang_ext.disagg.transports.select import make_transports
from sglang_ext.disagg.transports.verbs import GpuDirectChannel, GpuDirectTransport, VerbsChannel
from sglang_ext.engine.movers.gpu_memory import GpuMemory
from sglang_ext.testing.transfer.host_device import HostDevice


class Posts:
    """A queue pair that completes at once. posted: the requests of each doorbell."""

    depth = 256

    def __init__(self) -> None:
        self.posted: list[list[tuple[int, ...]]] = []

    def post(self, requests: Any, *, write: bool) -> None:
        self.posted.append([tuple(row) for row in requests.tolist()])

    def wait(self, deadline: float) -> None:
        pass

    def close(self) -> None:
        pass


def channel(kind: type[VerbsChannel], pair: Posts, *rest: Any) -> VerbsChannel:
    """Between two pools, which adapters know by other addresses than processes."""
    memory = {0: SimpleNamespace(lkey=5), 2: SimpleNamespace(lkey=6)}
    device = SimpleNamespace(memory=memory, bases={0: 1000, 2: 64})
    answer = verbs._Answer((), (11, 12, 0), (1 << 40, 4096, 0))
    return kind(device, [pair], answer, *rest)  # type: ignore[arg-type, list-item]


def scattered(count: int) -> Runs:
    runs = np.zeros((count, 5), np.int64)
    runs[:, 0], runs[:, 1], runs[:, 2] = 1, np.arange(count) * 512, 2
    runs[:, 3], runs[:, 4] = np.arange(count) * 1024, 256
    return runs


def test_requests_have_the_adapters_addresses_and_go_by_doorbells() -> None:
    pair = Posts()
    channel(VerbsChannel, pair).read(0, scattered(1000), CancelToken())
    assert [len(each) for each in pair.posted] == [64] * 15 + [40]
    assert pair.posted[0][3] == (12, 4096 + 3 * 512, 6, 64 + 3 * 1024, 256)


def test_a_long_range_is_several_requests() -> None:
    pair = Posts()
    channel(VerbsChannel, pair).read(0, np.array([(0, 16, 0, 32, (1 << 30) + 8)], np.int64), CancelToken())
    assert pair.posted[0] == [
        (11, (1 << 40) + 16, 5, 1032, 1 << 30),
        (11, (1 << 40) + 16 + (1 << 30), 5, 1032 + (1 << 30), 8),
    ]


class VerbsError(Exception):
    pass


class Registrations:
    """``pyverbs.mr`` that refuses some kinds. made: kind, bytes and place of each."""

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.made: list[tuple[str, int, int]] = []

    def MR(self, domain: object, nbytes: int, access: int, *, address: int) -> Any:
        return self._made("address", nbytes, address)

    def DmaBufMR(self, domain: object, nbytes: int, access: int, *, dmabuf: int, offset: int) -> Any:
        os.fstat(dmabuf)  # open
        return self._made("dmabuf", nbytes, offset)

    def _made(self, kind: str, nbytes: int, place: int) -> Any:
        if kind in self.refused:
            raise VerbsError(f"{kind}: not supported")
        self.made.append((kind, nbytes, place))
        return SimpleNamespace(close=lambda: self.made.pop())


class Exporting(HostDevice):
    """A GPU whose memory has a dma-buf, which begins 4096 bytes before it."""

    def __init__(self) -> None:
        super().__init__()
        self.fds: list[int] = []
        self.flushed = 0

    def dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        self.fds.append(os.memfd_create("dmabuf"))
        return self.fds[-1], 4096

    def flush(self) -> None:
        self.flushed += 1


@pytest.fixture
def registrations(monkeypatch: pytest.MonkeyPatch) -> Registrations:
    found, error = Registrations(), ModuleType("pyverbs.pyverbs_error")
    error.PyverbsError = VerbsError  # type: ignore[attr-defined]
    for name, module in (
        ("pyverbs", ModuleType("pyverbs")),
        ("pyverbs.mr", found),
        ("pyverbs.pyverbs_error", error),
    ):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    return found


def opened(regions: RegionTable, gpu: HostDevice | None) -> Device:
    device = Device.__new__(Device)
    device.memory, device.bases, device.domain, device.access = {}, {}, None, 7
    for region in regions:
        device._register(region, gpu)
    return device


def mixed() -> RegionTable:
    regions = RegionTable()
    regions.add(1 << 20, 4096)
    regions.add(1 << 30, 1 << 16, kind=MemoryKind.CUDA)
    return regions


def test_gpu_memory_is_registered_by_a_dma_buf_at_its_offset(registrations: Registrations) -> None:
    gpu = Exporting()
    device = opened(mixed(), gpu)
    assert registrations.made == [("address", 4096, 1 << 20), ("dmabuf", 1 << 16, 4096)]
    assert device.bases == {0: 1 << 20, 1: 4096}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(gpu.fds[0])


@pytest.mark.parametrize("gpu", [None, HostDevice(), Exporting()], ids=["no CUDA", "no dma-buf", "refused"])
def test_without_a_dma_buf_nvidia_peermem_is_tried(
    registrations: Registrations, gpu: HostDevice | None
) -> None:
    registrations.refused = ("dmabuf",)
    assert opened(mixed(), gpu).bases == {0: 1 << 20, 1: 1 << 30}
    assert registrations.made[1] == ("address", 1 << 16, 1 << 30)


def test_gpu_memory_that_cannot_be_registered_is_refused_with_both_reasons(
    registrations: Registrations,
) -> None:
    registrations.refused = ("dmabuf", "address")
    regions = RegionTable()
    regions.add(1 << 30, 1 << 16, kind=MemoryKind.CUDA)
    with pytest.raises(TransportUnavailableError) as refused:
        opened(regions, Exporting())
    for text in ("by dma-buf: dmabuf: not supported", "address: not supported", "nvidia-peermem"):
        assert text in str(refused.value)


def test_gpudirect_is_used_only_where_it_is_named_and_then_before_staging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, regions = HostDevice(), mixed()
    config = EndpointConfig("x", "a model", device=device, staging_bytes=1 << 20)
    made = make_transports(config, regions)
    assert TransportName.GPUDIRECT not in made
    named = EndpointConfig(
        "x", "a model", device=device, staging_bytes=1 << 20,
        transports=(TransportName.TCP, TransportName.GPUDIRECT),
    )  # fmt: skip
    other = make_transports(named, mixed())
    assert list(other) == [TransportName.GPUDIRECT, TransportName.TCP]
    assert isinstance(other[TransportName.TCP], StagedTransport)
    for transport in (*made.values(), *other.values()):
        transport.close()


def test_reasons_against_gpudirect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "verbs_reason", lambda: "no RDMA device")
    assert _direct(RegionTable(), HostDevice()).unavailable() == "no pool is in GPU memory"
    assert _direct(mixed(), None).unavailable() == "CUDA is not used by this process"
    assert _direct(mixed(), HostDevice()).unavailable() == "no RDMA device"


def _direct(regions: RegionTable, gpu: HostDevice | None) -> GpuDirectTransport:
    return GpuDirectTransport(regions, 1, 0, verbs.NOWHERE, (), gpu)


def test_writes_of_the_adapter_are_ordered_before_kernels() -> None:
    gpu = Exporting()
    reader = channel(GpuDirectChannel, Posts(), gpu)
    reader.read(0, scattered(3), CancelToken())
    assert gpu.flushed == 1
    reader.write(0, scattered(3), CancelToken(), (1, 1))
    assert gpu.flushed == 1
    verbs._GpuDirectSession([], gpu).landed()
    assert gpu.flushed == 2


def test_a_dma_buf_is_of_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def dmabuf(address: int, nbytes: int) -> int:
        asked.append((address, nbytes))
        return 9

    gpu = GpuMemory.__new__(GpuMemory)
    gpu._device = torch.device("cuda", 0)
    gpu._runtime = SimpleNamespace(dmabuf=dmabuf)  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    assert gpu.dmabuf((1 << 30) + 100, 8000) == (9, 100)
    assert asked == [(1 << 30, 8192)]
