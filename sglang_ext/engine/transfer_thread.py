"""Moves a rank's KV to and from other servers: one event loop, one endpoint and one control socket.

The loop has a thread of its own, because SGLang's threads have no event loop or are busy computing. Fetches
from peers, hand-overs and returns share it: a server that changes its role keeps the same endpoint.

Routers have a socket of their own, the agent's: its port may be given (``--kv-ports agent``) and reached over
IPv6, a router that does not take its events is dropped instead of waited for, and it answers heartbeats
while bytes are copied here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from sglang_ext.clock import Clock
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.control import TRANSFERS, Messages
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.leases import Ended
from sglang_ext.disagg.transfer.pools import PoolSpec
from sglang_ext.disagg.transfer.staging import Staging
from sglang_ext.engine.planners import Planner
from sglang_ext.errors import InternalError
from sglang_ext.tasks import Tasks

T = TypeVar("T")

CALL_SECONDS = 60.0

HBM_POOL = "hbm"
"""The pool of the engine's pages, in every endpoint of a server that hands KV over."""


class LoopThread:
    """Started by the constructor; `close` ends it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return f"<LoopThread {self._thread.name} alive={self._thread.is_alive()}>"

    def run(self, work: Coroutine[Any, Any, T], seconds: float = CALL_SECONDS) -> T:
        """Run a coroutine on the loop and return its result. From another thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(seconds)

    def close(self) -> None:
        """End the loop and cancel the tasks that still run on it."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join()

    def _main(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
        finally:
            self.loop.close()


class TransferThread(Planner):
    """The endpoint of one rank, on a thread of its own. Started by the constructor; `close` ends it.

    Args:
        config: identifies this rank.
        pools: the memory of this rank that is read, written and exported.
        staging: an additional pool; closed with the thread.
        messages: see `Endpoint.start`.

    Raises:
        The errors of ``Endpoint.start``.
    """

    def __init__(
        self,
        config: EndpointConfig,
        pools: Sequence[PoolSpec],
        *,
        staging: Staging | None = None,
        messages: Messages = TRANSFERS,
        clock: Clock | None = None,
    ) -> None:
        self.staging = staging
        self._ended: dict[str, Callable[[Ended], None]] = {}
        self._started = Tasks()
        self._thread = LoopThread("kv-transfer")
        self.loop = self._thread.loop
        self.run = self._thread.run
        every = [*pools, *([staging.spec] if staging is not None else ())]
        try:
            self._endpoint: Endpoint | None = self.run(
                Endpoint.start(config, every, clock=clock, on_ended=self._lease_ended, messages=messages)
            )
        except BaseException:
            self._thread.close()
            raise
        if staging is not None:
            staging.attach(self.endpoint)

    def __repr__(self) -> str:
        return f"<TransferThread {self._endpoint!r}>"

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint, until ``close``."""
        if self._endpoint is None:
            raise InternalError("the transfer thread has ended")
        return self._endpoint

    def watch_leases(self, pool: str, ended: Callable[[Ended], None] | None) -> None:
        """Set the callback for ended leases of a pool; None removes it. It runs on the event loop, or in a
        call that ends a lease.
        """
        if ended is None:
            self._ended.pop(pool, None)
        else:
            self._ended[pool] = ended

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start a coroutine on the loop; it is cancelled when the thread ends. From any thread."""
        self.loop.call_soon_threadsafe(self.keep, work)

    def keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Like `start`, called on the event loop."""
        return self._started.start(work)

    def close(self) -> None:
        """Disconnect, and end every lease; the pools' memory is still there. Safe to call again."""
        if self._endpoint is not None:
            self.run(self._endpoint.close())
            self._thread.close()
            # The endpoint's mappings are released with the last reference to it.
            self._endpoint = None
            if self.staging is not None:
                self.staging.close()

    def _lease_ended(self, pool: str, ended: Ended) -> None:
        if pool in self._ended:
            self._ended[pool](ended)
