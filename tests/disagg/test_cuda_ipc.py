"""`cuda_ipc` on the emulated GPU: its conformance, deaths of peers, and two processes that use the kernel in
Triton's interpreter. On a GPU: tests/gpu/test_cuda_ipc.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.disagg.errors import PeerGoneError, PeerProtocolError, TransportUnavailableError
from sglang_ext.disagg.memory import MemoryKind, RegionMeta, RegionTable, SharedMemory
from sglang_ext.disagg.transports import CancelToken, PeerInfo, host_identity
from sglang_ext.disagg.transports.cuda_ipc import CudaIpcTransport, Ranges, _Mapped

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def on_the_emulator(file: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.fake_gpu.plugin", "-q", "-p", "no:cacheprovider", file],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


@pytest.mark.timeout(1000)
def test_the_suite_of_transports() -> None:
    """With pinned memory too."""
    assert "57 passed" in on_the_emulator("tests/fake_gpu/transfer_suite.py")


@pytest.mark.timeout(1000)
def test_two_processes_and_the_kernel() -> None:
    assert "3 passed" in on_the_emulator("tests/gpu/test_cuda_ipc.py")


class Gpu:
    """Of which nothing is used. held: bytes of each allocation."""

    def __init__(self, held: int = 1 << 20) -> None:
        self.held = held
        self.opened: list[bytes] = []
        self.closed: list[int] = []

    def prepare(self) -> None:
        pass

    def export(self, address: int) -> tuple[bytes, int]:
        return b"h" * 64, 4096

    def open(self, handle: bytes) -> tuple[int, int]:
        self.opened.append(handle)
        return 1 << 40, self.held

    def close(self, address: int) -> None:
        self.closed.append(address)

    def copy(self, ranges: Ranges) -> None:
        raise RuntimeError("an illegal memory access")

    copy_mixed = copy


class Side:
    """A transport with a control region and two pools in one allocation."""

    def __init__(self, gpu: Gpu | None) -> None:
        self.control, self.regions = SharedMemory(4096), RegionTable()
        self.regions.add(self.control.address, 4096, fd=self.control.fd, keep=self.control)
        for address in (1 << 30, 1 << 31):
            self.regions.add(address, 1 << 16, kind=MemoryKind.CUDA)
        self.transport = CudaIpcTransport(self.regions, 1, gpu)

    def peer(self, pid: int, regions: tuple[RegionMeta, ...] = ()) -> PeerInfo:
        return PeerInfo("owner", b"e" * 16, host_identity(), "", pid, regions or self.regions.metas())


def test_memory_that_it_does_not_carry_is_named() -> None:
    assert Side(None).transport.unavailable() == "CUDA is not used by this process"
    host = RegionTable()
    assert CudaIpcTransport(host, 1, Gpu()).unavailable() == "no pool is in GPU memory"
    side = Side(Gpu())
    side.regions.add(1 << 20, 4096)
    assert "not in shared memory" in str(side.transport.unavailable())


def test_a_peer_elsewhere_is_refused() -> None:
    side = Side(Gpu())
    with pytest.raises(TransportUnavailableError, match="another host"):
        side.transport.accept(b"s" * 16, b"elsewhere/1 77", np.zeros(4096, np.int64))


def test_each_allocation_is_mapped_once_and_checked_against_its_size() -> None:
    parent = os.getppid()
    owner, gpu = Side(Gpu()), Gpu()
    assert owner.transport.unavailable() is None
    reader = Side(gpu)
    assert reader.transport.unavailable() is None
    _, served = owner.transport.accept(b"s" * 16, reader.transport.offer(), np.zeros(4096, np.int64))
    metas = owner.regions.metas()[1:]
    assert {(m.handle, m.handle_at) for m in metas} == {(b"h" * 64, 4096)}
    # The regions of this process as those of another one, whose table and control region are not asked for.
    empty = RegionMeta(0, 0, MemoryKind.HOST, -1, 0, 0, 0)
    peer = owner.peer(parent, (empty, *metas))
    mapped = _Mapped(gpu, peer)
    assert gpu.opened == [b"h" * 64]
    assert mapped.bases[1] == (1 << 40) + 4096
    mapped.close()
    assert gpu.closed == [1 << 40]
    for bad in (
        RegionMeta(1 << 30, 1 << 20, MemoryKind.CUDA, -1, 0, 0, 0, b"h" * 64, 4096),
        RegionMeta(1 << 30, 1 << 20, MemoryKind.CUDA, -1, 0, 0, 0),
    ):
        with pytest.raises(PeerProtocolError):
            _Mapped(gpu, owner.peer(parent, (empty, bad)))
    assert len(gpu.closed) == 2
    served.close()


def test_an_error_of_the_gpu_ends_the_channel() -> None:
    owner, reader = Side(Gpu()), Side(Gpu())
    assert reader.transport.unavailable() is None
    answer, served = owner.transport.accept(b"s" * 16, reader.transport.offer(), np.zeros(4096, np.int64))
    channel = reader.transport.open(owner.peer(os.getpid()), b"s" * 16, b"", answer)
    with pytest.raises(PeerGoneError, match="illegal memory access"):
        channel.read(0, np.array([(1, 0, 1, 0, 64)], np.int64), CancelToken())
    assert channel.broken
    channel.close()
    served.close()
