"""Copies between HBM and DRAM of one instance: the times of a mover, without its bytes and its thread.

One copy runs at a time, and loads go first, as in `ThreadMover`. A write that a load interrupts goes on
behind it. A copy takes the time that the cost model gives it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sglang_ext.engine.movers.bandwidth import Bandwidth
from sglang_ext.engine.movers.mover import BlockIds, Copied, LayerSink, Mover, Near, Source
from sglang_ext.errors import InternalError


class Copier(Mover):
    """A `Mover`.

    Args:
        loop: of virtual time.
        seconds: that copying so many bytes takes.
        block_bytes: of a block.
        ended: called when a copy has ended.
    """

    streams = False
    blocks_without_kernel = 0

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: Callable[[float], float],
        block_bytes: int,
        ended: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._block_bytes = block_bytes
        self._ended = ended
        self._loads: deque[list[float]] = deque()
        """Of each load, the seconds left, and its bytes."""
        self._writes: deque[list[float]] = deque()
        self._loads_done = self._writes_done = 0
        self._timer: asyncio.TimerHandle | None = None
        self._current: deque[list[float]] | None = None
        self._since = 0.0
        self._rate = Bandwidth()
        self.stalled_s = 0.0
        """Seconds that the scheduler has waited for copies (`settle`), until its next pass takes them."""
        self.bytes_loaded = self.bytes_written = 0.0

    # -- as a mover ---------------------------------------------------------------------------------

    @property
    def load_bytes_per_second(self) -> float | None:
        return self._rate.bytes_per_second

    def load(
        self, slots: Any, blocks: BlockIds, source: Source | None = None, near: Sequence[Near] = ()
    ) -> int:
        return self._submit(self._loads, self._loads_done, len(blocks))

    def bring(self, slots: Any, blocks: BlockIds) -> int:
        return self._submit(self._writes, self._writes_done, len(blocks))

    def write(
        self, slots: Any, blocks: BlockIds, source: Source | None = None, copied: Copied | None = None
    ) -> int:
        return self._submit(self._writes, self._writes_done, len(blocks))

    def computed(self, layer: int) -> None:
        """No write follows a pass."""

    def fill(self, slots: Any, blocks: BlockIds, layer: int, place: int) -> int:
        raise InternalError("single layers are not simulated")

    def follow(self, source: Source) -> int:
        raise InternalError("loads that stream are not simulated")

    def into(self, slots: Any) -> LayerSink:
        raise InternalError("loads that stream are not simulated")

    def writes_done(self) -> int:
        return self._writes_done

    def loads_done(self) -> int:
        return self._loads_done

    def wait_layer(self, ticket: int, layer: int) -> None:
        """A pass takes the time of its loads instead: `loads_left_s`."""

    def wait_writes(self, count: int) -> None:
        """The first writes are complete, and the loads before them; their time is the scheduler's."""
        self._pause()
        while self._writes_done < count and self._writes:
            while self._loads:
                self.stalled_s += self._loads.popleft()[0]
                self._loads_done += 1
            self.stalled_s += self._writes.popleft()[0]
            self._writes_done += 1
        self._go_on()

    def settle(self) -> None:
        """All copies are complete; their time is the scheduler's."""
        self._pause()
        self.stalled_s += sum(left for left, _ in (*self._loads, *self._writes))
        self._loads_done += len(self._loads)
        self._writes_done += len(self._writes)
        self._loads.clear()
        self._writes.clear()

    def close(self) -> None:
        self._pause()

    # -- in time ------------------------------------------------------------------------------------

    def loads_left_s(self) -> float:
        """Seconds until the loads that were submitted have ended."""
        self._pause()
        self._go_on()
        return sum(left for left, _ in self._loads)

    def take_stall(self) -> float:
        """Seconds for which the scheduler has waited since the last call."""
        stalled, self.stalled_s = self.stalled_s, 0.0
        return stalled

    def _submit(self, queue: deque[list[float]], done: int, blocks: int) -> int:
        nbytes = float(blocks * self._block_bytes)
        queue.append([self._seconds(nbytes), nbytes])
        if self._current is None or (queue is self._loads and self._current is self._writes):
            self._pause()
            self._go_on()
        return done + len(queue) - 1

    def _pause(self) -> None:
        """Take note of the time that the current copy has run for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._current is not None:
            first = self._current[0]
            first[0] = max(0.0, first[0] - (self._loop.time() - self._since))
            self._current = None

    def _go_on(self) -> None:
        queue = self._loads or self._writes
        if queue:
            self._current, self._since = queue, self._loop.time()
            self._timer = self._loop.call_later(queue[0][0], self._over)

    def _over(self) -> None:
        queue = self._current
        assert queue is not None
        self._timer = self._current = None
        _, nbytes = queue.popleft()
        if queue is self._loads:
            self._loads_done += 1
            self.bytes_loaded += nbytes
            self._rate.observe(int(nbytes), self._seconds(nbytes))
        else:
            self._writes_done += 1
            self.bytes_written += nbytes
        self._go_on()
        self._ended()
