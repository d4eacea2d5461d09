"""Peers of the stream checker: the transfer thread, adapters that read and write slots, and hand-overs' ends.

The event loop of the transfer thread is turned by hand, between passes, on a timeline of its own. What it
starts comes after what its caller had seen, and the scheduler comes after what the thread had seen when it
rings.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeCuda
from stream_trace import Access, Clock, join

from sglang_ext.engine import forward_fence
from sglang_ext.engine.pd.messages import Return, Returned, ReturnEnd
from sglang_ext.engine.transfer_thread import HBM_POOL


class Wire:
    """The transfer thread, and adapters that it has read and write."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._trace = cuda.trace
        self._loop = asyncio.new_event_loop()
        self.thread = self._trace.timeline("transfer thread")
        self._rung: Clock = {}

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """From the scheduler, or from the thread itself."""
        join(self.thread.clock, self._trace.host.clock)
        return self._loop.create_task(work)

    def ring(self) -> None:
        """The scheduler may look at results."""
        join(self._rung, self.thread.clock)

    def heard(self) -> bool:
        """Whether it was rung since the scheduler asked last, which then is after it."""
        rung, self._rung = self._rung, {}
        join(self._trace.host.clock, rung)
        return bool(rung)

    def turn(self, times: int = 2) -> None:
        """Let the thread run for a while."""
        host, self._trace.host = self._trace.host, self.thread
        try:
            for _ in range(times):
                self._loop.call_soon(self._loop.stop)
                self._loop.run_forever()
        finally:
            self._trace.host = host

    def move(
        self,
        name: str,
        *,
        reads: Sequence[Access] = (),
        writes: Sequence[Access] = (),
        action: Callable[[], None] | None = None,
    ) -> None:
        """An adapter moves bytes on the thread's behalf, which waits for the end."""
        nic = self._trace.timeline("nic", [self.thread])
        self._trace.run(nic, name, reads=reads, writes=writes, action=action)
        join(self.thread.clock, nic.clock)

    def close(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self.turn()
        self._loop.close()


@contextmanager
def wire(cuda: FakeCuda) -> Iterator[Wire]:
    """A wire whose thread looks at fences in each of its turns, whatever the time."""
    made = Wire(cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_fence, "POLL_SECONDS", 0)
        try:
            yield made
        finally:
            made.close()


class ReturningAgent:
    """What a `ReturnSender` uses of decode's agent. read: has an adapter read pages of a message. A peer
    discards what it has read under a lease that was withdrawn: that is no read at all here.
    """

    def __init__(self, of: Wire, read: Callable[[Return, Any], None]) -> None:
        self._read = read
        self._leases: dict[int, Any] = {}
        self._numbers = itertools.count()
        pools = {HBM_POOL: SimpleNamespace(blocks=1 << 30, block_bytes=1)}
        self.endpoint = SimpleNamespace(
            config=SimpleNamespace(instance="decode"),
            pools=pools,
            address="decode",
            publish=self._publish,
            withdraw=lambda pool, lease: self._leases.pop(lease, None),
        )
        self.config = SimpleNamespace(local=SimpleNamespace(rank=0, ranks=1))
        self.weights: Any = None
        self.calls: Counter[Any] = Counter()
        self.alarm = of
        self.start = of.start

    def _publish(self, pool: str, name: str, pages: Any, seconds: float, epoch: bytes) -> Any:
        lease = next(self._numbers)
        self._leases[lease] = np.array(pages)
        return SimpleNamespace(lease=lease)

    def peer(self, address: str) -> Any:
        return SimpleNamespace(ranks=[SimpleNamespace(epoch=b"")], give_back=self._give_back)

    async def _give_back(self, message: Return, seconds: float) -> Returned:
        (offer,) = message.offers
        if offer.lease not in self._leases:
            return Returned(0, ReturnEnd.UNREAD)
        self._read(message, self._leases[offer.lease])
        return Returned(1)
