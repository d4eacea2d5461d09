"""The sources of moves: reads from disk, reads from peers, copies between this rank's own tiers."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, Protocol

from sglang_ext.engine.moves.move import Source
from sglang_ext.errors import InternalError, SglangExtError
from sglang_ext.mempool.ledger import Reservation
from sglang_ext.tiered_store.loading.loader import Load, Loader

logger = logging.getLogger(__name__)

STOP_SECONDS: Final = 30.0
"""Limit for a task to end after its cancellation."""


class FromDisk(Source):
    """A read by `Loader`.

    Args:
        loader: reads.
        load: the read.
    """

    ends_alike = False

    def __init__(self, loader: Loader, load: Load) -> None:
        self._loader = loader
        self.load = load

    @property
    def blocks(self) -> int | None:
        return self.wait() if self.load.over else None

    @property
    def first_layer(self) -> bool:
        return self.load.arrived(0)

    def wait(self) -> int:
        try:
            return self.load.result().blocks
        except InternalError:
            logger.exception("reading from disk failed in a way that is not the disk's; computing instead")
            return 0

    def cancel(self) -> None:
        self._loader.cancel(self.load)


class PeerJob(Protocol):
    """The fields of ``peers.fetch_link.Job`` that a source uses."""

    @property
    def layers_in(self) -> int: ...

    @property
    def read(self) -> int | None: ...


class FromPeer(Source):
    """A read from another instance's DRAM.

    Args:
        job: the read; ``read`` is known once it has ended.
        blocks: that it reads.
        wait: returns when a job has ended, whether all of it is here and verified.
        cancel: ends a job, and waits until nothing of it writes.
    """

    ends_alike = False

    def __init__(
        self, job: PeerJob, blocks: int, wait: Callable[[], bool], cancel: Callable[[], None]
    ) -> None:
        self._job = job
        self._blocks = blocks
        self._wait = wait
        self._cancel = cancel

    @property
    def blocks(self) -> int | None:
        return self._job.read

    @property
    def first_layer(self) -> bool:
        return self._job.layers_in > 0

    def wait(self) -> int:
        return self._blocks if self._wait() else 0

    def cancel(self) -> None:
        self._cancel()


class TaskThread(Protocol):
    """The members of ``transfer_thread.TransferThread`` that a source uses."""

    loop: asyncio.AbstractEventLoop

    def keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task. On the event loop."""


class FromTask(Source):
    """A task that fills all blocks of a move, or none. Started by the constructor.

    Args:
        thread: runs it.
        work: fills the blocks, and raises where it cannot. However it ends, it writes no more.
        name: for the log.
        blocks: that it fills.
        wake: called on the event loop when it has ended.
    """

    ends_alike = False
    first_layer = False

    def __init__(
        self,
        thread: TaskThread,
        work: Coroutine[Any, Any, None],
        name: str,
        blocks: int,
        wake: Callable[[], None],
    ) -> None:
        self._thread = thread
        self._name = name
        self._blocks = blocks
        self._filled = 0
        self._wake = wake
        self._task: asyncio.Task[None] | None = None
        self._stopped = threading.Event()
        thread.loop.call_soon_threadsafe(self._begin, work)

    @property
    def blocks(self) -> int | None:
        return self._filled if self._stopped.is_set() else None

    def wait(self) -> int:
        """See `Source.wait`.

        Raises:
            RuntimeError: the task runs for longer than `STOP_SECONDS`.
        """
        if not self._stopped.wait(STOP_SECONDS):
            raise RuntimeError(f"a {self._name} did not stop within {STOP_SECONDS:.0f} s")
        return self._filled

    def cancel(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._cancel)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._task = self._thread.keep(work)
        # Also called for a task that is cancelled before it begins.
        self._task.add_done_callback(self._over)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _over(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._filled = 0 if task.cancelled() else self._blocks
        elif isinstance(error, SglangExtError):
            logger.debug("a %s: %s", self._name, error)
        else:
            logger.error("a %s failed", self._name, exc_info=error)
        self._stopped.set()
        self._wake()


class OwnCopy(Source):
    """A copy between two tiers of this rank by `Copies`, which calls ``arrived`` in the same pass on every
    rank.

    Args:
        reservation: the memory that it fills. Where it gives way, the engine may take it back once the copy
            has ended.
        settle: waits for all copies under way.
    """

    ends_alike = True

    def __init__(self, reservation: Reservation, settle: Callable[[], None]) -> None:
        self._reservation = reservation
        self._settle = settle
        self._over = False

    def arrived(self) -> None:
        """The copy has ended: no thread writes to the memory any more."""
        self._over = True
        self._reservation.gives_way = self._reservation.parent is None

    @property
    def blocks(self) -> int | None:
        return self._reservation.blocks if self._over else None

    @property
    def first_layer(self) -> bool:
        return self._over

    def wait(self) -> int:
        if not self._over:
            self._settle()
        return self._reservation.blocks

    def cancel(self) -> None:
        """Copies are not cancelled: they take milliseconds."""
