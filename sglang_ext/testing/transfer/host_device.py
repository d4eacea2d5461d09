"""A GPU whose memory is the host's: copies are done when they return, and pinned memory is remembered."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from sglang_ext.disagg.errors import TransportUnavailableError
from sglang_ext.disagg.transports.cuda_ipc import Ranges


class HostDevice:
    """A `DeviceMemory` that no other process maps.

    calls: how many ranges each call of `gather` and `scatter` had. before: called before each of them.
    """

    def __init__(self, *, pins: bool = True) -> None:
        self.pins = pins
        self.pinned: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.before: Callable[[str], None] = lambda call: None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Nothing is needed."""

    def export(self, address: int) -> tuple[bytes, int]:
        """No handle."""
        raise TransportUnavailableError("cuda_ipc: the pool can grow")

    def open(self, handle: bytes) -> tuple[int, int]:
        """No memory of others."""
        raise TransportUnavailableError("cuda_ipc: no GPU maps it")

    def close(self, address: int) -> None:
        """Never called."""
        raise AssertionError("nothing was mapped")

    def copy(self, ranges: Ranges) -> None:
        """By the host."""
        for source, target, nbytes in ranges.tolist():
            ctypes.memmove(target, source, nbytes)

    copy_mixed = copy

    def dmabuf(self, address: int, nbytes: int) -> tuple[int, int]:
        """None."""
        raise TransportUnavailableError("no dma-buf")

    def flush(self) -> None:
        """Nothing is under way."""

    def pin(self, address: int, nbytes: int) -> None:
        """Remember it."""
        if not self.pins:
            raise TransportUnavailableError("0 MiB of host memory cannot be pinned")
        assert address not in self.pinned
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        """Forget it."""
        del self.pinned[address]

    def gather(self, ranges: Ranges) -> None:
        """By the host, to pinned memory only."""
        self._staged("gather", ranges, 1)
        ends = ranges[:, 1] + ranges[:, 2]
        assert (ranges[1:, 1] == ends[:-1]).all(), "the ranges do not lie side by side"

    def scatter(self, ranges: Ranges) -> None:
        """By the host, from pinned memory only."""
        self._staged("scatter", ranges, 0)

    def _staged(self, call: str, ranges: Ranges, column: int) -> None:
        self.before(call)
        with self._lock:
            self.calls.append((call, len(ranges)))
        low, high = int(ranges[:, column].min()), int((ranges[:, column] + ranges[:, 2]).max())
        assert any(at <= low and high <= at + nbytes for at, nbytes in self.pinned.items()), "not pinned"
        self.copy(ranges)
