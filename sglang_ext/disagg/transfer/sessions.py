"""What an owner knows of each connected reader, and what it asks of whoever receives transfers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.messages import Identity
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transports import MAX_GRANTS, Served


class Receiver(Protocol):
    """What the memory pool does at the receiving end of a transfer (MemServe, 4.3). Called on the event
    loop.
    """

    async def allocate(self, pool: str, count: int, request: str, private: bytes) -> Ids:
        """Blocks of `pool` for a transfer, opened (`OwnedPool.open`). Raises RefusedError when there are
        none.
        """

    async def claim(self, pool: str, blocks: Ids, request: str, private: bytes) -> float | None:
        """The sender names the blocks: returns when they were set aside for transfers, and are open.

        Returns for how many seconds they may be written, None for the endpoint's `grant_ttl`; infinity where
        whoever set them aside ends the grant itself (`Owner.revoke`).

        Raises:
            RefusedError: they were not, so that nobody may write to them.
        """

    async def insert(
        self, pool: str, blocks: Ids, tokens: bytes, flags: int, request: str, private: bytes
    ) -> bool:
        """The blocks are filled. Seal them; index them under `tokens` unless that is empty; whether it
        did.
        """

    async def discard(self, pool: str, blocks: Ids, request: str) -> None:
        """The transfer failed, or did not begin: the blocks are free again, and still open."""


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
