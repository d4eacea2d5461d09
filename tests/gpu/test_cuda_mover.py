"""Properties of the CUDA mover that only a GPU shows: its copies keep their order with the engine's streams,
and nothing waits on the host. Needs torch, and no SGLang. Each order has its twin, in which it is not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from sglang_ext.engine.movers.cuda_mover import CudaMover
from sglang_ext.engine.movers.mover import BlockIds, LayerGate, Near
from sglang_ext.patches.adapter.hbm import pool_geometry
from sglang_ext.tiered_store.dram.arena import DramArena

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LAYERS, TOKENS, BLOCKS = 4, 4, 256
"""Tokens of a block, and blocks of the pool and the arena."""
BUSY = 600_000_000
"""Cycles for which a stream is kept busy: a few tenths of a second."""

Planes = list[list[torch.Tensor]]


@dataclass
class Gpu:
    planes: Planes
    arena: DramArena
    forward: torch.cuda.Stream

    def mover(self, forward: torch.cuda.Stream | None = None) -> CudaMover:
        return CudaMover(self.planes, self.arena, forward or self.forward)

    def blocks(self, count: int) -> BlockIds:
        """Blocks of the arena, not in order."""
        found = self.arena.alloc(count)
        assert found is not None
        return np.random.default_rng(count).permutation(found)

    def kv(self, slots: torch.Tensor) -> torch.Tensor:
        """On the current stream, shape (planes, slots, heads, width)."""
        return torch.stack([plane[slots] for layer in self.planes for plane in layer])


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    torch.manual_seed(1)
    planes = [[torch.randn(BLOCKS * TOKENS, 2, 8, device="cuda") for _ in "kv"] for _ in range(LAYERS)]
    layout = pool_geometry(
        planes,
        block_tokens=TOKENS,
        page_tokens=1,
        first_layer=0,
        model_layers=LAYERS,
        tp_rank=0,
        tp_size=1,
        model_kv_heads=2,
    ).layout
    # A generation of eight bytes for each block lies behind the blocks.
    with DramArena(layout, BLOCKS * (layout.block_bytes + 8)) as arena:
        assert arena.pinned
        found = Gpu(planes, arena, torch.cuda.Stream())
        mover = found.mover()  # CUDA loads a kernel when it is first used, and waits for the device
        mover.write(slots_of(0, 1), found.blocks(1))
        mover.load(slots_of(0, 1), found.blocks(1))
        found.kv(slots_of(0, 1))
        store(planes, slots_of(0, 1)[:0], 0.0)
        mover.settle()
        torch.cuda.synchronize()
        yield found
        torch.cuda.synchronize()


def slots_of(first: int, blocks: int) -> torch.Tensor:
    """The slots of so many blocks of the pool, not in order."""
    order = np.random.default_rng(first).permutation(blocks * TOKENS)
    return torch.from_numpy(first * TOKENS + order).cuda()


def store(planes: Planes, slots: torch.Tensor, value: float) -> None:
    """The writes of a pass, on the current stream."""
    for layer in planes:
        for plane in layer:
            plane.index_fill_(0, slots, value)


@pytest.mark.parametrize("follows", [True, False], ids=["as-built", "twin"])
@pytest.mark.parametrize("kind", ["load", "bring", "fill"])
def test_a_load_comes_after_the_pass_that_still_stores_to_its_slots(
    gpu: Gpu, kind: str, follows: bool
) -> None:
    mover = gpu.mover(None if follows else torch.cuda.Stream())
    source, target, blocks = slots_of(0, 5), slots_of(9, 5), gpu.blocks(5)
    before = gpu.kv(source)
    mover.write(source, blocks)
    mover.settle()
    torch.cuda.synchronize()
    with torch.cuda.stream(gpu.forward):
        torch.cuda._sleep(BUSY)
        store(gpu.planes, target, 7.0)
    if kind == "fill":
        for layer in range(LAYERS):
            mover.fill(target, blocks, layer, layer)
    else:
        getattr(mover, kind)(target, blocks)
    assert not gpu.forward.query(), "the host waited for the pass"
    torch.cuda.synchronize()
    assert torch.equal(gpu.kv(target), before) is follows
    mover.close()


@pytest.mark.parametrize("follows", [True, False], ids=["as-built", "twin"])
def test_a_write_comes_after_the_pass_whose_kv_it_reads(gpu: Gpu, follows: bool) -> None:
    mover = gpu.mover()
    source, target, blocks = slots_of(0, 5), slots_of(9, 5), gpu.blocks(5)
    torch.cuda.synchronize()
    with torch.cuda.stream(gpu.forward):
        torch.cuda._sleep(BUSY)
        store(gpu.planes, source, 7.0)
    if follows:  # as the scheduler's stream does before it takes a pass's result
        torch.cuda.current_stream().wait_stream(gpu.forward)
    mover.write(source, blocks)
    assert not gpu.forward.query(), "the host waited for the pass"
    torch.cuda.synchronize()
    mover.load(target, blocks)
    mover.settle()
    assert bool((gpu.kv(target) == 7.0).all()) is follows
    mover.close()


@pytest.mark.parametrize("waits", [True, False], ids=["as-built", "twin"])
def test_a_pass_waits_for_each_layer(gpu: Gpu, waits: bool) -> None:
    mover = gpu.mover()
    source, target, blocks = slots_of(0, 5), slots_of(9, 5), gpu.blocks(5)
    before = gpu.kv(source)
    mover.write(source, blocks)
    mover.settle()
    torch.cuda.synchronize()
    with torch.cuda.stream(mover._load_stream):
        torch.cuda._sleep(BUSY)
    ticket = mover.load(target, blocks)
    read = []
    with torch.cuda.stream(gpu.forward):
        for layer in range(LAYERS):
            if waits:
                mover.wait_layer(ticket, layer)
            read += [plane[target] for plane in gpu.planes[layer]]
    assert mover.loads_done() == 0, "the host waited for the load"
    torch.cuda.synchronize()
    assert torch.equal(torch.stack(read), before) is waits
    assert mover.loads_done() == 1
    mover.close()


@pytest.mark.parametrize("waits", [True, False], ids=["as-built", "twin"])
def test_a_captured_pass_is_replayed_after_the_load(gpu: Gpu, waits: bool) -> None:
    """A CUDA graph calls no Python for its layers: SGLang waits for the last layer before each replay."""
    mover = gpu.mover()
    gate = LayerGate(mover, LAYERS)
    source, target, blocks = slots_of(0, 5), slots_of(9, 5), gpu.blocks(5)
    before = gpu.kv(source)
    mover.write(source, blocks)
    mover.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=gpu.forward):
        read = gpu.kv(target)
    for loaded in range(2):
        store(gpu.planes, target, 7.0)
        torch.cuda.synchronize()
        with torch.cuda.stream(mover._load_stream):
            torch.cuda._sleep(BUSY)
        gate.set_consumer(mover.load(target, blocks))
        with torch.cuda.stream(gpu.forward):
            if waits:
                gate.wait_until(gate.num_layers - 1)
            graph.replay()
            seen = read.clone()
        assert mover.loads_done() == loaded, "the host waited for the load"
        torch.cuda.synchronize()
        assert torch.equal(seen, before) is waits
        assert mover.loads_done() == loaded + 1
    mover.close()


@pytest.mark.parametrize("follows", [True, False], ids=["as-built", "twin"])
def test_a_load_comes_after_a_captured_pass_that_stores_to_its_slots(gpu: Gpu, follows: bool) -> None:
    mover = gpu.mover(None if follows else torch.cuda.Stream())
    source, target, blocks = slots_of(0, 5), slots_of(9, 5), gpu.blocks(5)
    before = gpu.kv(source)
    mover.write(source, blocks)
    mover.settle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=gpu.forward):
        torch.cuda._sleep(BUSY)
        store(gpu.planes, target, 7.0)
    torch.cuda.synchronize()
    with torch.cuda.stream(gpu.forward):
        graph.replay()
    mover.load(target, blocks)
    assert not gpu.forward.query(), "the host waited for the pass"
    torch.cuda.synchronize()
    assert torch.equal(gpu.kv(target), before) is follows
    mover.close()


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "plain"])
def test_nothing_waits_on_the_host(gpu: Gpu, kernel: bool) -> None:
    mover = gpu.mover()
    if not kernel:
        mover.without_kernel("for the test")
    source, target, strip, blocks = slots_of(0, 8), slots_of(10, 8), slots_of(20, 4), gpu.blocks(8)
    before = gpu.kv(source)
    mover.write(source, blocks)
    mover.fill(strip, blocks[:4], 1, 2)
    mover.load(target, blocks)  # first use only: loads kernels, and the allocator's first memory
    mover.load(target, blocks, near=[Near(1, 2, strip, np.arange(4))])
    mover.settle()
    store(gpu.planes, target, 7.0)
    torch.cuda.synchronize()
    asks: list[Callable[[], int]] = [
        lambda: mover.load(target, blocks, near=[Near(1, 2, strip, np.arange(4))]),
        lambda: mover.load(target, blocks),
        lambda: mover.bring(target, blocks),
        lambda: mover.fill(strip, blocks[:4], 1, 2),
        lambda: mover.write(source, blocks),
    ]
    for at, ask in enumerate(asks):
        busy = torch.cuda.Event()
        with torch.cuda.stream(gpu.forward):
            torch.cuda._sleep(BUSY)
            busy.record()
        torch.cuda.current_stream().wait_stream(gpu.forward)
        ask()
        assert not busy.query(), f"call {at} waited for the pass"
        torch.cuda.synchronize()
        if at < 3:
            assert torch.equal(gpu.kv(target), before), at
            store(gpu.planes, target, 7.0)
    mover.close()


def test_many_at_once_keep_their_bytes(gpu: Gpu) -> None:
    """Staging memory goes from one copy to the next, and the engine allocates meanwhile."""
    mover = gpu.mover()
    rng = np.random.default_rng(3)
    parts = [gpu.blocks(4) for _ in range(20)]
    before = [gpu.kv(slots_of(4 * at, 4)) for at in range(20)]
    for at, part in enumerate(parts):
        mover.write(slots_of(4 * at, 4), part)
        torch.randn(int(rng.integers(1, 1 << 16)), device="cuda")
    mover.settle()
    assert mover.writes_done() == 20
    for at, part in enumerate(parts):  # layer 1 of two blocks of each is put in the planes of layer 3
        mover.fill(slots_of(200 + 2 * at, 2), part[:2], 1, 3)
    mover.settle()
    for at, part in enumerate(parts):
        near = [Near(1, 3, slots_of(200 + 2 * at, 2), np.arange(2))]
        if at % 3:
            mover.load(slots_of(100 + 4 * at, 4), part, near=near if at % 3 == 1 else ())
        else:
            mover.bring(slots_of(100 + 4 * at, 4), part)
        torch.randn(int(rng.integers(1, 1 << 16)), device="cuda")
    mover.settle()
    torch.cuda.synchronize()
    for at in range(20):
        there, here = gpu.kv(slots_of(100 + 4 * at, 4)), before[at]
        # slots_of gives each place an order of its own: token i of the one is token i of the other.
        assert torch.equal(there, here), at
    assert mover.load_bytes_per_second is not None
    assert not mover.blocks_without_kernel, "the kernel was not used"
    mover.close()


class Arriving:
    """Layers that the test brings."""

    def __init__(self) -> None:
        self.layers = 0

    def decided(self, layer: int) -> bool:
        return layer < self.layers


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "plain"])
def test_a_layer_is_in_dram_while_the_pass_computes_the_next(gpu: Gpu, kernel: bool) -> None:
    mover = gpu.mover()
    if not kernel:
        mover.without_kernel("a test")
    source, blocks, offsets = slots_of(0, 5), gpu.blocks(5), gpu.arena.layout.layer_offsets
    gpu.arena.blocks[blocks] = 0
    reported: list[tuple[int, bool, bool]] = []
    torch.cuda.synchronize()

    def copied(layer: int) -> None:
        part = gpu.arena.blocks[blocks, offsets[layer] : offsets[layer + 1]]
        reported.append((layer, bool(part.any(1).all()), gpu.forward.query()))

    mover.write(source, blocks, Arriving(), copied)
    with torch.cuda.stream(gpu.forward):
        for layer, planes in enumerate(gpu.planes):
            torch.cuda._sleep(BUSY)
            for plane in planes:
                plane.index_fill_(0, source, layer + 1.0)
            mover.computed(layer)
    assert not gpu.forward.query(), "the host waited for the pass"
    mover.settle()
    assert [(layer, whole) for layer, whole, _ in reported] == [(layer, True) for layer in range(LAYERS)]
    assert not reported[0][2], "the pass had not ended"
    assert mover.writes_done() == 1
    mover.close()


def test_a_pass_reads_layers_that_arrive_while_it_runs(gpu: Gpu) -> None:
    mover = gpu.mover()
    source, target, blocks = slots_of(0, 5), slots_of(9, 5), gpu.blocks(5)
    before, offsets = gpu.kv(source), gpu.arena.layout.layer_offsets
    mover.write(source, blocks)
    mover.settle()
    kept = gpu.arena.blocks[blocks].copy()
    gpu.arena.blocks[blocks] = 0
    arriving, read = Arriving(), []
    ticket = mover.load(target, blocks, arriving)
    with torch.cuda.stream(gpu.forward):
        for layer in range(LAYERS):
            part = slice(offsets[layer], offsets[layer + 1])
            gpu.arena.blocks[blocks, part] = kept[:, part]
            arriving.layers += 1
            mover.wait_layer(ticket, layer)
            read += [plane[target] for plane in gpu.planes[layer]]
    gpu.arena.blocks[blocks] = 0  # given to others
    torch.cuda.synchronize()
    assert torch.equal(torch.stack(read), before)
    assert mover.loads_done() == 1
    mover.close()
