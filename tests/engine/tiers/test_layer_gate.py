"""Attention of a layer waits for that layer of the loads its batch depends on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_movers import HandMover
from engine_pools import PoolKind

from sglang_ext.engine.movers.mover import NOTHING_TO_WAIT_FOR, LayerGate

LAYERS = 3


class RecordingMover(HandMover):
    """Records the layers waited for."""

    def __init__(self) -> None:
        super().__init__(None, LAYERS)
        self.waits: list[tuple[int, int]] = []
        for _ in range(8):
            self.load(None, np.empty(0, np.int64))

    def wait_layer(self, ticket: int, layer: int) -> None:
        self.waits.append((ticket, layer))
        super().wait_layer(ticket, layer)


def test_a_batch_without_loads_waits_for_nothing() -> None:
    mover = RecordingMover()
    gate = LayerGate(mover, LAYERS)
    gate.wait_until(0)
    gate.set_consumer(NOTHING_TO_WAIT_FOR)
    gate.wait_until(2)
    assert mover.waits == []


def test_a_batch_waits_for_its_ticket_layer_by_layer() -> None:
    mover = RecordingMover()
    gate = LayerGate(mover, LAYERS)
    gate.set_consumer(5)
    for layer in range(3):
        gate.wait_until(layer)
    assert mover.waits == [(5, 0), (5, 1), (5, 2)]


def test_the_first_ticket_is_waited_for() -> None:
    mover = RecordingMover()
    gate = LayerGate(mover, LAYERS)
    gate.set_consumer(0)
    gate.wait_until(1)
    assert mover.waits == [(0, 1)]


def test_each_batch_replaces_the_ticket_and_reset_forgets_it() -> None:
    mover = RecordingMover()
    gate = LayerGate(mover, LAYERS)
    gate.set_consumer(3)
    gate.set_consumer(7)
    gate.wait_until(0)
    gate.set_consumer(NOTHING_TO_WAIT_FOR)
    gate.wait_until(1)
    gate.set_consumer(4)
    gate.reset()
    gate.wait_until(2)
    assert mover.waits == [(7, 0)]


def check_pool_asks(pool: Any, buffers: list[Any]) -> None:
    mover = RecordingMover()
    gate = LayerGate(mover, LAYERS)
    pool.register_layer_transfer_counter(gate)
    gate.set_consumer(1)
    for layer in (5, 6):
        for read in buffers:
            read(layer)
    assert mover.waits == [(1, local) for local in (0, 1) for _ in buffers]


def test_the_pools_of_sglang_ask_with_the_local_layer() -> None:
    """A pipeline stage that starts at layer 5 waits for its layer 0 when it reads layer 5."""
    mha = PoolKind("mha", 1, layers=2, start_layer=5).build(16)
    check_pool_asks(mha, [mha.get_key_buffer, mha.get_value_buffer])
    mla = PoolKind("mla", 1, layers=2, start_layer=5).build(16)
    check_pool_asks(mla, [mla.get_key_buffer, mla.get_value_buffer])


def test_the_ticket_is_readable_before_a_graph_is_replayed() -> None:
    """SGLang reads the ticket then, and waits for the last layer if it is not negative."""
    gate = LayerGate(RecordingMover(), LAYERS)
    assert gate.consumer_index < 0
    gate.set_consumer(3)
    assert gate.consumer_index == 3
    gate.reset()
    assert gate.consumer_index < 0


def test_a_prefill_graph_waits_for_all_layers() -> None:
    """SGLang's ``PrefillCudaGraphRunner`` waits once, before it replays all layers."""
    runner = pytest.importorskip("sglang.srt.model_executor.runner.prefill_cuda_graph_runner")
    mover = RecordingMover()
    gate = LayerGate(mover, LAYERS)
    gate.set_consumer(2)
    pool = SimpleNamespace(layer_transfer_counter=gate)
    replayed = SimpleNamespace(_is_full_backend=True, model_runner=SimpleNamespace(token_to_kv_pool=pool))
    runner.PrefillCudaGraphRunner._wait_for_layer_loads(replayed)
    assert mover.waits == [(2, LAYERS - 1)]
