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
from sglang_ext.engine.movers.gpu_memory import PROGRAMS, ROW_BYTES, GpuMemory, Ranges, batches_of
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
