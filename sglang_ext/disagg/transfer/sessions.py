"""An owner's state of each connected reader, and its interface to the receiver of transfers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.messages import Identity
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transports import MAX_GRANTS, Served


class Receiver(Protocol):
    """Decisions of the owner of pushed-to memory (MemServe, 4.3). Called on the event loop."""

    async def claim(self, pool: str, blocks: Ids, request: str) -> float | None:
        """A peer wants to write to blocks: returns when they were set aside for that, and are open.

        Called once for each peer. Where several may have the same blocks, each fills a part of every block.

        Returns for how many seconds they may be written, None for the endpoint's `grant_ttl`; infinity where
        the receiver ends the grant itself (`Owner.revoke`).

        Raises:
            RefusedError: they were not set aside, so no peer may write to them.
        """

    async def filled(self, pool: str, blocks: Ids, request: str) -> None:
        """Everything of one peer's is written, and nothing more of it will be."""

    async def discard(self, pool: str, blocks: Ids, request: str) -> None:
        """A peer has given it up, or it did not begin: that peer writes there no more, and the blocks are
        open."""


@dataclass(slots=True, eq=False)
class Session:
    """One connected reader."""

    number: bytes
    reader: Identity
    identity: bytes
    served: dict[str, Served]
    last_seen: float
    born: int
    """When its process started, by this host's clock; 0 when it is not on this host."""
    transport: str = ""
    grants: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(MAX_GRANTS, np.int64))
    slots: dict[int, int] = field(default_factory=dict)
    """Grant number to slot."""
