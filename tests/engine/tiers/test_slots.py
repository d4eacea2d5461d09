"""Slots as the tree keeps them, on a host and on a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ext.engine.movers.slots import DeviceSlots, HostSlots, SlotOps, slot_ops

CPU = torch.device("cpu")


@pytest.fixture(params=["host", "device"])
def ops(request: pytest.FixtureRequest) -> SlotOps:
    # The device's operations work on any device of torch, so on the CPU too.
    return HostSlots() if request.param == "host" else DeviceSlots(CPU)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_is_kept_does_not_follow_the_row(ops: SlotOps, dtype: torch.dtype) -> None:
    row = torch.arange(5, 13, dtype=dtype)
    kept = ops.keep(row[:6])
    row[:] = 99
    joined = ops.join([kept])
    assert joined.tolist() == [5, 6, 7, 8, 9, 10]
    assert len(kept) == 6


def test_slices_join_to_the_whole_in_a_tensor_of_its_own(ops: SlotOps) -> None:
    kept = ops.keep(torch.tensor([4, 2, 9, 7], dtype=torch.int32))
    joined = ops.join([kept[:1], kept[1:3], kept[3:]])
    assert joined.tolist() == [4, 2, 9, 7]
    assert joined.dtype == torch.int64
    joined[:] = 0
    assert ops.join([kept]).tolist() == [4, 2, 9, 7]


def test_nothing_joins_to_an_empty_tensor(ops: SlotOps) -> None:
    joined = ops.join([])
    assert joined.dtype == torch.int64
    assert joined.shape == (0,)
    assert ops.join([ops.keep(torch.empty(0, dtype=torch.int32))]).shape == (0,)


def test_a_row_of_a_wider_table_is_kept(ops: SlotOps) -> None:
    table = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    assert ops.join([ops.keep(table[2, :4])]).tolist() == [12, 13, 14, 15]
    assert ops.join([ops.keep(table[:, 1])]).tolist() == [1, 7, 13, 19]


def test_the_pool_s_device_decides() -> None:
    host = slot_ops(CPU)
    assert isinstance(host, HostSlots)
    assert isinstance(host.keep(torch.arange(3)), np.ndarray)
    device = slot_ops(torch.device("meta"))
    assert isinstance(device, DeviceSlots)
    assert device.join([]).device.type == "meta"
