"""Ranges of any lengths as launches of the kernel: every byte once, by the interpreter and by the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.engine.movers import gpu_memory
from sglang_ext.engine.movers.gpu_memory import PROGRAMS, ROW_BYTES, GpuMemory, Ranges, RowBatch, batches_of
from sglang_ext.engine.movers.mover import MoverError
from sglang_ext.engine.movers.row_copies import Launch, Side
from tests.engine.tiers.test_row_copies import interpreted  # noqa: F401
from tests.fake_gpu.ipc import copy_by_host


class Memory:
    """Two buffers, and ranges from one to the other that do not overlap."""

    def __init__(self, lengths: list[int], gap: int, at: int = 0) -> None:
        rng = np.random.default_rng(len(lengths))
        size = at + sum(length + gap for length in lengths) + 64
        self.source = rng.integers(0, 256, size, dtype=np.uint8)
        self.target = np.zeros(size, np.uint8)
        self.expected = np.zeros(size, np.uint8)
        self.ranges: Ranges = np.zeros((len(lengths), 3), np.int64)
        # Aligned as an allocation is: numpy's own begin anywhere.
        starts = [int(each.ctypes.data) for each in (self.source, self.target)]
        skips = [-start % 16 for start in starts]
        bases = [start + skip for start, skip in zip(starts, skips, strict=True)]
        for row, length in enumerate(lengths):
            self.ranges[row] = (bases[0] + at, bases[1] + at, length)
            there = slice(skips[1] + at, skips[1] + at + length)
            self.expected[there] = self.source[skips[0] + at : skips[0] + at + length]
            at += length + gap

    def copy(self, launch: object) -> None:
        for batch in batches_of(self.ranges):
            pieces = torch.from_numpy(np.ascontiguousarray(batch.pieces))
            units = [torch.from_numpy(np.ascontiguousarray(each)) for each in (batch.sources, batch.targets)]
            side = Side(pieces, 1)
            launch(Launch(side, units[0], side, units[1], len(units[0]), batch.tile, PROGRAMS))  # type: ignore[operator]


LENGTHS = {
    "rows of tokens": ([1024] * 6, 1024, 0),
    "latents": ([1152, 2304, 1152], 1152, 0),
    "merged rows and single ones": ([1024 * 9, 1024, 1024 * 24], 1024, 0),
    "odd lengths at odd addresses": ([1, 77, 8193, 99], 3, 5),
    "words that vectors do not divide": ([24, 40, 8200], 8, 8),
    "one long range": ([3 * ROW_BYTES + 640], 0, 0),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_every_byte_arrives_and_no_other_changes(interpreted: object, name: str) -> None:  # noqa: F811
    for launch in (copy_by_host, interpreted):
        memory = Memory(*LENGTHS[name])
        memory.copy(launch)
        assert np.array_equal(memory.target, memory.expected)
        memory.target[memory.expected.nonzero()[0][0]] ^= 1
        assert not np.array_equal(memory.target, memory.expected)


def test_long_ranges_and_rests_are_two_launches() -> None:
    memory = Memory([1024 * 9, 1024, 1024 * 24], 1024, 0)
    whole, rest = batches_of(memory.ranges)
    assert (whole.words * 8, len(whole.sources)) == (ROW_BYTES, 4)
    assert (rest.words * 8, len(rest.sources)) == (1024, 2)
    assert whole.tile.aligned == rest.tile.aligned == 2


class Streams:
    """In place of `torch.cuda`: the names of its calls, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextmanager
    def device(self, _: object) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(f"on {stream}")
        yield

    def Stream(self, device: object, priority: int) -> str:
        return f"stream of priority {priority}"

    def Event(self, *, blocking: bool) -> Any:
        assert blocking
        return SimpleNamespace(
            record=lambda stream: self.calls.append(f"record {stream}"),
            synchronize=lambda: self.calls.append("synchronize"),
        )


class Runtime:
    """Of the GPU; `fails` after so many copies."""

    def __init__(self, calls: list[str], fails: int = 99) -> None:
        self.calls, self.left = calls, fails
        self.batch = None

    def copy(self, source: int, target: int, nbytes: int, stream: int) -> None:
        self.left -= 1
        if self.left < 0:
            raise MoverError("cudaMemcpyAsync failed")
        self.calls.append("copy")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> tuple[GpuMemory, list[str]]:
    streams = Streams()
    monkeypatch.setattr(gpu_memory, "torch", SimpleNamespace(cuda=streams, device=torch.device))
    made = GpuMemory(0)
    made._stream = lambda: "own"  # type: ignore[method-assign]
    return made, streams.calls


TWO = np.array([(16, 32, ROW_BYTES + 16), (1 << 20, 1 << 21, 64)], np.int64)


def test_a_copy_is_over_when_it_returns(memory: tuple[GpuMemory, list[str]]) -> None:
    """Generations are compared next: without the event, a kernel might load bytes after that."""
    of, calls = memory
    of._launch = lambda launch: None
    of._queue = lambda launch, batch: calls.append("launch")  # type: ignore[method-assign]
    of.copy(TWO)
    assert calls == ["on own", "launch", "launch", "record own", "synchronize"]


def test_a_kernel_that_fails_leaves_nothing_under_way_and_is_replaced(
    memory: tuple[GpuMemory, list[str]],
) -> None:
    of, calls = memory
    of._launch = lambda launch: None
    of._runtime = Runtime(calls)  # type: ignore[assignment]
    of._stream = lambda: SimpleNamespace(cuda_stream=1)  # type: ignore[method-assign, assignment, return-value]

    def queue(launch: object, batch: object) -> None:
        calls.append("launch")
        if calls.count("launch") == 2:
            raise RuntimeError("out of resources")

    of._queue = queue  # type: ignore[method-assign]
    of.copy(TWO)
    kinds = [call.split()[0] for call in calls]
    assert kinds == [
        "on",
        "launch",
        "launch",
        "record",
        "synchronize",
        "on",
        "copy",
        "copy",
        "record",
        "synchronize",
    ]
    of.copy(TWO)
    assert calls.count("launch") == 2


def test_a_call_that_fails_leaves_nothing_under_way(memory: tuple[GpuMemory, list[str]]) -> None:
    of, calls = memory
    of._runtime = Runtime(calls, 1)  # type: ignore[assignment]
    of._stream = lambda: SimpleNamespace(cuda_stream=1)  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(MoverError):
        of.copy_mixed(TWO)
    assert [call.split()[0] for call in calls] == ["on", "copy", "record", "synchronize"]


PINNED = 1 << 30


@pytest.fixture
def pinned(memory: tuple[GpuMemory, list[str]]) -> tuple[GpuMemory, list[str]]:
    """Host memory that kernels see 4096 bytes further on, and a buffer of the GPU at 1 << 40."""
    of, calls = memory
    of._launch = lambda launch: None
    of._runtime = Runtime(calls)  # type: ignore[assignment]
    of._runtime.pin = lambda address, nbytes: address + 4096  # type: ignore[method-assign, union-attr]
    of._runtime.unpin = lambda address: calls.append("unpin")  # type: ignore[method-assign, union-attr]
    of._stream = lambda: SimpleNamespace(cuda_stream=1)  # type: ignore[method-assign, assignment, return-value]

    def queue(launch: object, batch: RowBatch) -> None:
        unit = batch.tile.aligned * batch.tile.word.itemsize
        calls.append(f"launch to {batch.targets[0] * unit:#x} from {batch.sources[0] * unit:#x}")

    of._queue = queue  # type: ignore[method-assign]
    of._buffers = [SimpleNamespace(nbytes=1 << 20, data_ptr=lambda: 1 << 40)]  # type: ignore[list-item]
    of.pin(PINNED, 1 << 20)
    return of, calls


def test_a_gather_collects_in_the_gpu_and_is_over_when_it_returns(
    pinned: tuple[GpuMemory, list[str]],
) -> None:
    of, calls = pinned
    of.gather(np.array([(1 << 33, PINNED, 4096), (1 << 34, PINNED + 4096, 4096)], np.int64))
    assert calls[1:] == [
        f"launch to {1 << 40:#x} from {1 << 33:#x}",
        "copy",
        f"record {of._stream()}",
        "synchronize",
    ]
    assert len(of._buffers) == 1


def test_a_scatter_reads_pinned_memory_where_kernels_see_it(pinned: tuple[GpuMemory, list[str]]) -> None:
    of, calls = pinned
    of.scatter(np.array([(PINNED + 64, 1 << 33, 4096)], np.int64))
    assert calls[1] == f"launch to {1 << 33:#x} from {PINNED + 4096 + 64:#x}"
    assert calls[-1] == "synchronize"
    with pytest.raises(MoverError, match="not pinned"):
        of.scatter(np.array([(PINNED - 64, 1 << 33, 4096)], np.int64))
    of.unpin(PINNED)
    assert calls[-1] == "unpin"
    with pytest.raises(MoverError, match="not pinned"):
        of.scatter(np.array([(PINNED, 1 << 33, 4096)], np.int64))


def test_without_the_kernel_ranges_are_copied_one_by_one(pinned: tuple[GpuMemory, list[str]]) -> None:
    of, calls = pinned
    of._launch = None
    of.gather(np.array([(1 << 33, PINNED, 64), (1 << 34, PINNED + 64, 64)], np.int64))
    of.scatter(np.array([(PINNED, 1 << 33, 64)], np.int64))
    assert calls.count("copy") == 3
    assert calls.count("synchronize") == 2
