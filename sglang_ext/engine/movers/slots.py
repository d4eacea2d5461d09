"""Token slots as the tree keeps them: numpy where the pool is in host memory, tensors where it is not.

The tree slices slots when it splits a node, and the cache joins the slots of a path for every match. On a
host, numpy slices and joins several times faster than torch; on a GPU the slots have to stay on the device,
or each match would wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch


class SlotOps(Protocol):
    """How slots are kept. A kept run is sliceable and has one entry per token."""

    def keep(self, row: Any) -> Any:
        """A copy of a row of the request-to-token table, a tensor of shape (tokens,), for the tree."""

    def join(self, parts: Sequence[Any]) -> Any:
        """Kept runs as one new tensor of int64, shape (tokens,), on the pool's device."""


class HostSlots:
    """Slots of a pool in host memory: int64 arrays."""

    def __init__(self) -> None:
        self._none = torch.empty(0, dtype=torch.int64)

    def keep(self, row: torch.Tensor) -> npt.NDArray[np.int64]:
        kept: npt.NDArray[np.int64] = row.numpy().astype(np.int64)
        return kept

    def join(self, parts: Sequence[npt.NDArray[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)) if parts else self._none


class DeviceSlots:
    """Slots of a pool in device memory: int64 tensors on that device."""

    def __init__(self, device: torch.device) -> None:
        self._none = torch.empty(0, dtype=torch.int64, device=device)

    def keep(self, row: torch.Tensor) -> torch.Tensor:
        return row.to(torch.int64, copy=True)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts)) if parts else self._none


def slot_ops(device: torch.device) -> SlotOps:
    """The way to keep slots for a pool on ``device``."""
    return HostSlots() if device.type == "cpu" else DeviceSlots(device)
