"""The sources of moves: reads from disk, reads from a peer, copies between this rank's own tiers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from sglang_ext.engine.moves.move import Source
from sglang_ext.errors import InternalError
from sglang_ext.mempool.ledger import Reservation
from sglang_ext.tiered_store.loading.loader import Load, Loader

logger = logging.getLogger(__name__)


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
