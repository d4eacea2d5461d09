"""Loads in front of the forward pass: order, waiting, failing, cancelling, staging."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.errors import DeadlineError, InternalError
from sglang_ext.testing.blocks import LAYOUT, NAMESPACE, contents, prefix_keys, put_all
from sglang_ext.testing.tiers import FaultyTier, GatedTier, MemoryTier, WrappedTier
from sglang_ext.tiered_store.disk.state import DiskConfig
from sglang_ext.tiered_store.disk.tier import DiskTier
from sglang_ext.tiered_store.loading.loader import Loader
from sglang_ext.tiered_store.tier import BlockMemory, BlockTier, Get, Ids, LayerRead, Outcome

LAYERS = LAYOUT.n_layers


class Log(WrappedTier):
    """Notes which layers are read for which get, in order, and the most bytes at once."""

    def __init__(self, inner: BlockTier) -> None:
        super().__init__(inner)
        self.reads: list[tuple[bytes, int]] = []
        self._lock = threading.Lock()

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        with self._lock:
            self.reads.append((get.keys[0], layer))
        return super().get_layer(get, layer, memory, ids)


def filled(prefixes: int = 4, blocks: int = 5) -> MemoryTier:
    tier = MemoryTier(LAYOUT, 100)
    for prefix in range(prefixes):
        put_all(tier, NAMESPACE, prefix_keys(prefix, blocks))
    return tier


def new_memory(blocks: int) -> tuple[BlockMemory, np.ndarray]:
    array = np.zeros((blocks, LAYOUT.block_bytes), dtype=np.uint8)
    return BlockMemory.of_blocks(LAYOUT, array), array


def right(array: np.ndarray, prefix: int, blocks: int) -> bool:
    keys = prefix_keys(prefix, blocks)
    return all(np.array_equal(array[i], contents(LAYOUT, NAMESPACE, key)) for i, key in enumerate(keys))


@pytest.fixture
def loader() -> Iterator[Loader]:
    loader = Loader(1 << 20, threads=2, at_once=2)
    yield loader
    loader.check()
    loader.close()
    loader.close()


def test_every_layer_comes(loader: Loader) -> None:
    tier = filled()
    memory, array = new_memory(5)
    passed_on: list[int] = []
    get = tier.prepare_get(NAMESPACE, prefix_keys(2, 5))
    load = loader.load(tier, get, memory, np.arange(5), on_layer=lambda layer, *_: passed_on.append(layer))
    for layer in range(LAYERS):
        assert load.wait(layer, 30) == LayerRead(5, Outcome.DONE)
        assert load.arrived(layer)
    assert load.result(30) == LayerRead(5, Outcome.DONE)
    assert right(array, 2, 5)
    assert sorted(passed_on) == list(range(LAYERS))
    assert tier.stats().pins == 0
    assert repr(load) == "<Load 5/5 blocks, 3/3 layers, done>"


def test_from_disk_through_staging(loader: Loader, tmp_path: Path) -> None:
    tier = DiskTier(DiskConfig(tmp_path, 64 << 20), LAYOUT)
    target = np.zeros((40, LAYOUT.block_bytes), dtype=np.uint8)
    offsets = LAYOUT.layer_offsets
    put_all(tier, NAMESPACE, prefix_keys(1, 40))

    def copy_on(layer: int, memory: BlockMemory, blocks: int) -> None:
        rows = memory.layers[layer]
        assert rows.ctypes.data % 4096 == 0
        target[:blocks, offsets[layer] : offsets[layer + 1]] = rows[:blocks]

    for _ in range(3):
        target[:] = 0
        load = loader.load(
            tier, tier.prepare_get(NAMESPACE, prefix_keys(1, 40)), None, range(40), on_layer=copy_on
        )
        assert load.result(30) == LayerRead(40, Outcome.DONE)
        assert right(target, 1, 40)
    assert sum(buffer.nbytes for buffer in loader._spare) <= 2 * 40 * max(
        LAYOUT.layer_bytes(i) for i in range(LAYERS)
    )
    with pytest.raises(ValueError, match="on_layer"):
        loader.load(tier, tier.prepare_get(NAMESPACE, prefix_keys(9, 1)), None, [])
    tier.close()


def test_the_forward_pass_waits_for_its_layer_only(loader: Loader) -> None:
    tier = GatedTier(filled())
    memory, array = new_memory(5)
    inside: list[int] = []

    def stop_after_the_first(layer: int, *_: object) -> None:
        inside.append(layer)

    tier.close_gate("get_layer")
    load = loader.load(
        tier, tier.prepare_get(NAMESPACE, prefix_keys(0, 5)), memory, range(5), on_layer=stop_after_the_first
    )
    tier.wait_until_stopped("get_layer", 2)  # two threads: layers 0 and 1
    with pytest.raises(DeadlineError, match="layer 0"):
        load.wait(0, 0.0)
    with pytest.raises(DeadlineError, match="not ended"):
        load.result(0.0)
    assert inside == []
    tier.open_gate("get_layer")
    assert load.wait(0, 30).outcome is Outcome.DONE
    load.result(30)
    assert right(array, 0, 5)


def test_lowest_layers_of_all_requests_go_first() -> None:
    tier = Log(GatedTier(filled()))
    gate = tier.inner
    assert isinstance(gate, GatedTier)
    loader = Loader(1, threads=1)  # one read at a time
    gate.close_gate("get_layer")
    loads = []
    for prefix in range(3):
        memory, _ = new_memory(5)
        get = tier.prepare_get(NAMESPACE, prefix_keys(prefix, 5))
        loads.append(loader.load(tier, get, memory, range(5), priority=5 if prefix == 2 else 0))
        gate.wait_until_stopped("get_layer")
    loader.set_priority(loads[1], 9)
    gate.open_gate("get_layer")
    for load in loads:
        assert load.result(30).outcome is Outcome.DONE
    order = [(next(i for i in range(3) if key == prefix_keys(i, 1)[0]), layer) for key, layer in tier.reads]
    assert order == [(0, 0), (1, 0), (2, 0), (1, 1), (2, 1), (0, 1), (1, 2), (2, 2), (0, 2)]
    loader.close()


def test_bytes_in_flight_are_bounded() -> None:
    tier = GatedTier(filled(4, 5))
    sizes = [5 * LAYOUT.layer_bytes(i) for i in range(LAYERS)]
    loader = Loader(2 * sizes[0], threads=8)
    tier.close_gate("get_layer")
    loads = [
        loader.load(tier, tier.prepare_get(NAMESPACE, prefix_keys(i, 5)), new_memory(5)[0], range(5))
        for i in range(4)
    ]
    tier.wait_until_stopped("get_layer", 2)
    with loader._work:
        assert (loader._queue.budget.used, loader._queue.budget.holders) == (2 * sizes[0], 2)
    tier.open_gate("get_layer")
    assert all(load.result(30).outcome is Outcome.DONE for load in loads)
    assert "4 reads" not in repr(loader)
    loader.close()


class BadLayer(WrappedTier):
    """Layer 1 of block 3 does not verify."""

    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        if layer == 1 and len(ids) > 3:
            get.blocks = 3
            super().get_layer(get, layer, memory, ids[:3])
            return LayerRead(3, Outcome.DAMAGED)
        return super().get_layer(get, layer, memory, ids)


def test_a_damaged_block_shortens_the_prefix_and_the_rest_still_comes(loader: Loader) -> None:
    tier = BadLayer(filled())
    memory, array = new_memory(5)
    passed_on: dict[int, int] = {}
    load = loader.load(
        tier,
        tier.prepare_get(NAMESPACE, prefix_keys(0, 5)),
        memory,
        range(5),
        on_layer=lambda layer, _, blocks: passed_on.update({layer: blocks}),
    )
    assert load.wait(1, 30) == LayerRead(3, Outcome.DAMAGED)
    assert load.result(30) == LayerRead(3, Outcome.DAMAGED)
    assert right(array, 0, 3)
    assert passed_on[1] == 3
    assert tier.stats().pins == 0


def test_a_first_block_that_is_damaged_ends_the_load(loader: Loader) -> None:
    tier = FaultyTier(filled(1, 1), seed=0, rate=0.0)
    get = tier.prepare_get(NAMESPACE, prefix_keys(0, 1))
    tier.rate = 1.0
    load = loader.load(tier, get, new_memory(1)[0], [0])
    for layer in range(LAYERS):
        assert load.wait(layer, 30).blocks == 0
    assert load.result(30).outcome in (Outcome.DAMAGED, Outcome.IO_ERROR)
    assert tier.stats().pins == 0


def test_what_on_layer_raises_reaches_the_waiter(loader: Loader) -> None:
    tier = filled()

    def broken(layer: int, memory: BlockMemory, blocks: int) -> None:
        raise ZeroDivisionError

    load = loader.load(
        tier, tier.prepare_get(NAMESPACE, prefix_keys(0, 5)), new_memory(5)[0], range(5), on_layer=broken
    )
    for wait in (lambda: load.wait(2, 30), lambda: load.result(30)):
        with pytest.raises(InternalError) as raised:
            wait()
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert tier.stats().pins == 0
    memory, array = new_memory(5)  # the threads live on
    again = loader.load(tier, tier.prepare_get(NAMESPACE, prefix_keys(1, 5)), memory, range(5))
    assert again.result(30).outcome is Outcome.DONE
    assert right(array, 1, 5)


@pytest.mark.parametrize("begun", [False, True])
def test_cancelling(begun: bool) -> None:
    tier = Log(GatedTier(filled()))
    gate = tier.inner
    assert isinstance(gate, GatedTier)
    loader = Loader(1, threads=1)
    gate.close_gate("get_layer")
    first = loader.load(tier, tier.prepare_get(NAMESPACE, prefix_keys(0, 5)), new_memory(5)[0], range(5))
    gate.wait_until_stopped("get_layer")
    second = loader.load(tier, tier.prepare_get(NAMESPACE, prefix_keys(1, 5)), new_memory(5)[0], range(5))
    cancelled, other = (first, second) if begun else (second, first)
    loader.cancel(cancelled)
    loader.cancel(cancelled)
    assert cancelled.wait(2, 30).blocks == 0
    gate.open_gate("get_layer")
    assert cancelled.result(30) == LayerRead(0, Outcome.ABSENT)
    assert other.result(30) == LayerRead(5, Outcome.DONE)
    loader.cancel(other)  # too late to matter
    assert other.result(0) == LayerRead(5, Outcome.DONE)
    assert sum(key == cancelled.get.keys[0] for key, _ in tier.reads) == (1 if begun else 0)
    assert tier.stats().pins == 0
    loader.close()


def test_a_load_of_nothing_is_over_at_once(loader: Loader) -> None:
    tier = filled()
    load = loader.load(tier, tier.prepare_get(NAMESPACE, prefix_keys(8, 3)), new_memory(1)[0], [])
    assert load.result(0) == LayerRead(0, Outcome.DONE)
    get = tier.prepare_get(NAMESPACE, prefix_keys(8, 3))
    with pytest.raises(ValueError, match="3 blocks wanted"):
        loader.load(tier, get, new_memory(3)[0], range(3))
    tier.complete_get(get)


def test_a_closed_loader_finishes_what_has_begun_and_takes_nothing() -> None:
    tier = filled()
    loader = Loader(1 << 20, threads=2)
    memory, array = new_memory(5)
    load = loader.load(tier, tier.prepare_get(NAMESPACE, prefix_keys(0, 5)), memory, range(5))
    loader.close()
    assert load.result(0).outcome is Outcome.DONE
    assert right(array, 0, 5)
    refused = loader.load(tier, tier.prepare_get(NAMESPACE, prefix_keys(0, 5)), memory, range(5))
    assert refused.result(0) == LayerRead(0, Outcome.CLOSED)
    assert tier.stats().pins == 0


def test_many_loads_at_once_with_faults() -> None:
    """Whatever fails: every load ends, blocks reported as loaded are right, and no block stays pinned."""
    tier = FaultyTier(filled(8, 6), seed=3, rate=0.15)
    loader = Loader(4000, threads=4, patience=8)
    loads = []
    for number in range(120):
        get = tier.prepare_get(NAMESPACE, prefix_keys(number % 8, 6))
        memory, array = new_memory(6)
        loads.append(
            (number % 8, loader.load(tier, get, memory, range(get.blocks), priority=number % 3), array)
        )
        if number % 17 == 0:
            loader.cancel(loads[-1][1])
        if get.blocks < 6:
            tier.rate = 0.0
            put_all(tier, NAMESPACE, prefix_keys(number % 8, 6))
            tier.rate = 0.15
    outcomes = set()
    for prefix, load, array in loads:
        read = load.result(60)
        outcomes.add(read.outcome)
        assert right(array, prefix, read.blocks)
    # The threads' timing decides which faults hit which load; but some loads must fail and some succeed.
    assert Outcome.DONE in outcomes
    assert outcomes & {Outcome.IO_ERROR, Outcome.DAMAGED, Outcome.ABSENT}
    loader.check()
    loader.close()
    assert tier.stats().pins == 0
