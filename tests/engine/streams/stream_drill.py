"""Every operation of the CUDA mover, with the promises of its contract, which its mutants must break."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fake_cuda import DEVICE, FakeCuda
from stream_engine import BLOCK, HEADS, WIDTH, PinnedArena, on_device
from stream_trace import join

from sglang_ext.engine.forward_fence import ForwardFence
from sglang_ext.engine.movers import cuda_mover
from sglang_ext.engine.movers.mover import Near
from sglang_ext.patches.adapter.hbm import pool_geometry
from sglang_ext.tiered_store.dram.arena import DramArena

LAYERS, SLOTS, BLOCKS = 3, 96, 24


class WrongBytesError(AssertionError):
    """A copy's result differs from its source."""


class Drill:
    """A pool, an arena and the mover of ``module``, and passes and the host around them. kernel: whether it
    can be compiled."""

    def __init__(
        self, pace: float, module: Any = cuda_mover, fence_class: Any = ForwardFence, *, kernel: bool = True
    ) -> None:
        self.cuda = FakeCuda(1, pace)
        self._module, self._fence_class, self._kernel = module, fence_class, kernel

    def run(self) -> None:
        """Raises AssertionError or whatever a mutant raises."""
        with self.started():
            self._run()
            races = [str(race) for race in self.cuda.trace.races.values()]
            assert not races, "; ".join(races[:3])
            self.mover.close()

    @contextmanager
    def started(self) -> Iterator[None]:
        """With the mover; nothing was done yet."""
        with on_device(self.cuda, self._module, kernel=self._kernel), self.cuda.installed():
            self._prepare()
            self.cuda.launches.clear()
            yield

    def _prepare(self) -> None:
        torch.manual_seed(1)
        self.inner = [[torch.randn(SLOTS, HEADS, WIDTH) for _ in "kv"] for _ in range(LAYERS)]
        planes = [
            [self.cuda.rows(plane, f"{name} of layer {at}") for name, plane in zip("KV", layer, strict=True)]
            for at, layer in enumerate(self.inner)
        ]
        layout = pool_geometry(
            planes,
            block_tokens=BLOCK,
            page_tokens=1,
            first_layer=0,
            model_layers=LAYERS,
            tp_rank=0,
            tp_size=1,
            model_kv_heads=HEADS,
        ).layout
        size = BLOCKS * (layout.block_bytes + 8) + 8
        self.arena = PinnedArena(DramArena(layout, size, shared=False, pin=False), self.cuda)
        self.planes, self.forward = planes, self.cuda.stream(name="forward")
        self.mover = self._module.CudaMover(planes, self.arena, self.forward)

    # -- the engine ------------------------------------------------------------------------------

    @staticmethod
    def slots(first: int, blocks: int) -> torch.Tensor:
        """Made on the scheduler's stream, in no order; the pool has them at ``rows``."""
        return torch.arange(first, first + blocks * BLOCK, device=DEVICE).flip(0)

    @staticmethod
    def rows(first: int, blocks: int) -> list[int]:
        return list(range(first + blocks * BLOCK - 1, first - 1, -1))

    def access(self, layer: int, rows: list[int]) -> list[Any]:
        return [(plane.lives.memory, np.array(rows, np.int64)) for plane in self.planes[layer]]

    def compute(self, rows: list[int], stamp: float) -> None:
        """A pass stores to slots, layer by layer."""
        for layer in range(LAYERS):
            self.store(layer, rows, stamp)

    def store(self, layer: int, rows: list[int], stamp: float) -> None:
        """A pass stores a layer of slots."""

        def act() -> None:
            for at, plane in enumerate(self.inner[layer]):
                plane[rows] = stamp + layer + at / 2 + torch.arange(len(rows))[:, None, None] / 64

        self.cuda.launch(f"pass, layer {layer}", act, (), self.access(layer, rows), self.forward)

    def attend(self, rows: list[int], stamp: float, ticket: int | None = None) -> None:
        """A pass reads slots, each layer once it is there."""
        for layer in range(LAYERS):
            with torch.cuda.stream(self.forward):
                if ticket is not None:
                    self.mover.wait_layer(ticket, layer)

            def look(layer: int = layer) -> None:
                for at, plane in enumerate(self.inner[layer]):
                    wanted = stamp + layer + at / 2 + torch.arange(len(rows))[:, None, None] / 64
                    if not torch.equal(plane[rows], wanted.expand(-1, HEADS, WIDTH)):
                        raise WrongBytesError(f"layer {layer}")

            self.cuda.launch(f"pass, layer {layer}", look, self.access(layer, rows), (), self.forward)

    def host(self, blocks: Any, *, writes: bool = False) -> None:
        """The disk reads blocks of DRAM, or fills them."""
        access = [self.arena.access(blocks)]
        trace = self.cuda.trace
        trace.run(trace.host, "disk", reads=() if writes else access, writes=access if writes else ())

    def until(self, done: Any, count: int) -> None:
        """The scheduler looks in each pass."""
        for _ in range(60):
            if done() >= count:
                return
        if self.cuda.pace:
            raise AssertionError("the copy does not end")
        self.mover.settle()
        assert done() >= count

    # -- the drill -------------------------------------------------------------------------------

    def _run(self) -> None:
        mover, blocks = self.mover, np.array([3, 4, 9, 2, 17, 18])
        # A write: the pass that computes its KV runs, and its slots are let go at once.
        self.compute(self.rows(0, 6), 10.0)
        mover.write(self.slots(0, 6), blocks)
        self.until(mover.writes_done, 1)
        self.host(blocks)
        self._loads(blocks)
        self._near(blocks)
        self._fence()
        # A write for which the host waits, and a write that is under way at the end.
        self.compute(self.rows(4, 2), 30.0)
        mover.write(self.slots(4, 2), np.array([6, 7]))
        mover.wait_writes(4)
        self.host(np.array([6, 7]))
        self._streams(blocks)
        self.compute(self.rows(8, 2), 40.0)
        mover.write(self.slots(8, 2), np.array([10, 12]))
        ticket = mover.load(self.slots(60, 2), np.array([6, 7]))
        arriving = mover.load(self.slots(30, 6), blocks, Arriving(self, blocks))
        mover.settle()
        assert mover.writes_done() == 5
        assert mover.loads_done() == arriving + 1
        self.host(np.array([6, 7, 10, 12]), writes=True)
        self.attend(self.rows(60, 2), 30.0, ticket)
        self._computes(mover.wait_writes, 6, 70.0)
        self._computes(lambda _: mover.settle(), 7, 80.0)
        assert mover.writes_done() == 7

    def _loads(self, blocks: Any) -> None:
        """Slots to which a pass still stores are loaded, and passes read them."""
        mover = self.mover
        self.compute(self.rows(30, 6), -1.0)
        ticket = mover.load(self.slots(30, 6), blocks)
        self.attend(self.rows(30, 6), 10.0, ticket)
        self.until(mover.loads_done, 1)
        assert mover.load_bytes_per_second
        self.compute(self.rows(60, 6), -1.0)
        mover.bring(self.slots(60, 6), blocks)
        self.until(mover.writes_done, 2)
        self.attend(self.rows(60, 6), 10.0)

    def _near(self, blocks: Any) -> None:
        """Layer 1 of two blocks is in the planes of layer 2, and the load takes it from there."""
        mover = self.mover
        self.compute(self.rows(84, 2), -1.0)
        mover.fill(self.slots(84, 2), blocks[[1, 3]], 1, 2)
        self.until(mover.writes_done, 3)
        near = Near(
            1, 2, self.slots(84, 2), np.array([1, 3])
        )  # its owner keeps it until the load is complete
        self.compute(self.rows(30, 6), -1.0)
        ticket = mover.load(self.slots(30, 6), blocks, near=[near])
        self.attend(self.rows(30, 6), 10.0, ticket)
        self.until(mover.loads_done, 2)
        self.host(blocks, writes=True)  # they are given to others

    def _streams(self, blocks: Any) -> None:
        """The disk brings a load layer by layer, to DRAM and past it, while a pass waits for each."""
        mover = self.mover
        self.compute(self.rows(30, 6), -1.0)
        mover.load(self.slots(30, 6), blocks, Arriving(self, blocks))
        ticket = mover.load(self.slots(60, 2), np.array([6, 7]))
        self.attend(self.rows(30, 6), 10.0, ticket)
        self.attend(self.rows(60, 2), 30.0, ticket)
        self.host(blocks, writes=True)
        self.until(mover.loads_done, 4)
        self.compute(self.rows(84, 2), -1.0)
        past = Arriving(self, blocks[:2], mover.into(self.slots(84, 2)))
        ticket = mover.follow(past)
        self.attend(self.rows(84, 2), 10.0, ticket)
        self.until(mover.loads_done, 5)

    def _computes(self, wait: Any, count: int, stamp: float) -> None:
        """Each layer that a pass computes goes to DRAM, from where a peer reads it as soon as it is reported;
        another pass gets the slots."""
        blocks, rows, trace = np.array([20, 13]), self.rows(66, 2), self.cuda.trace
        memory, cells = self.arena.access(blocks)
        reported: list[int] = []

        def copied(layer: int) -> None:
            trace.run(trace.host, "export", reads=[(memory, cells[cells % LAYERS == layer])])
            reported.append(layer)

        self.mover.write(self.slots(66, 2), blocks, Computing(), copied)
        for layer in range(LAYERS):
            self.store(layer, rows, stamp)
            with torch.cuda.stream(self.forward):
                self.mover.computed(layer)
        wait(count)
        assert reported == list(range(LAYERS))
        self.compute(rows, -1.0)
        self.host(blocks, writes=True)
        ticket = self.mover.load(self.slots(66, 2), blocks)
        self.attend(rows, stamp, ticket)
        self.until(self.mover.loads_done, ticket + 1)

    def _fence(self) -> None:
        """A NIC writes to slots to which a pass still stores, with overlap and without."""
        trace = self.cuda.trace
        for stream in (self.forward, self.cuda.default):
            rows = self.rows(50, 1)
            parts = [part for layer in range(LAYERS) for part in self.access(layer, rows)]
            self.cuda.launch("pass", lambda: None, (), parts, stream)
            passed = self._fence_class(torch.cuda, (self.forward,))()
            host, trace.host = trace.host, trace.timeline("transfer thread", [trace.host])
            try:
                if self.cuda.pace:
                    while not passed():
                        pass
                    nic = trace.timeline("nic", [trace.host])
                    trace.run(nic, "write by a peer", writes=parts)
                else:
                    assert not passed(), "nothing has ended"
                    nic = trace.host
            finally:
                trace.host = host
            self.forward.wait_stream(self.cuda.default)
            for timeline in (self.forward.timeline, self.cuda.default.timeline):
                join(timeline.clock, self.forward.timeline.clock)
                join(timeline.clock, nic.clock)


class Computing:
    """A source of a write that follows a pass; the drill calls the mover for each layer."""

    def decided(self, layer: int) -> bool:
        return False


class Arriving:
    """Blocks whose layers the disk brings one by one: to DRAM, where they are lost before, or to a sink."""

    def __init__(self, drill: Drill, blocks: Any, sink: Any = None) -> None:
        self._drill, self._blocks, self._sink = drill, blocks, sink
        self._there = 0
        self._bytes = drill.arena.blocks[blocks].copy()
        if sink is None:
            drill.host(blocks, writes=True)
            drill.arena.blocks[blocks] = 0
        self._loader = drill.cuda.trace.timeline("loader", [drill.cuda.trace.host])

    def bring(self) -> None:
        """The next layer, in the loader's thread."""
        layer, trace = self._there, self._drill.cuda.trace
        if layer == LAYERS:
            return
        first, last = self._drill.arena.layout.layer_offsets[layer : layer + 2]
        rows = self._bytes[:, first:last]
        host, trace.host = trace.host, self._loader
        try:
            if self._sink is None:
                memory, cells = self._drill.arena.access(self._blocks)
                trace.run(self._loader, "disk", writes=[(memory, cells[cells % LAYERS == layer])])
                self._drill.arena.blocks[self._blocks, first:last] = rows
            else:
                self._sink(layer, SimpleNamespace(layers={layer: rows}), len(rows))
        finally:
            trace.host = host
        self._there += 1

    def decided(self, layer: int) -> bool:
        """Asked by the thread of arrivals; true is an order."""
        if layer >= self._there:
            return False
        join(self._drill.cuda.trace.host.clock, self._loader.clock)
        return True
