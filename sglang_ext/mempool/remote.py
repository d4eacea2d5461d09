"""MemServe's calls with an instance named (table 1): memory of another instance, which its owner has granted.

    memory = await RemoteMemory.alloc_mem(link, request, "hbm", blocks, calls)
    memory.transfer(runs)           one-sided writes, as often as there is something to write
    await memory.landed(seconds)
    await memory.end()              the owner hears that all is there, and has its blocks back; or
    await memory.free_mem()         the owner has them back when nothing of ours writes there any more

The blocks are the owner's choice: its engine allocates them for a request of its own, and says which they
are. They are granted for that request and to this connection, until either side ends it.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from sglang_ext.disagg.handover import WRITE_SECONDS, moving_seconds
from sglang_ext.disagg.messages import Completed, Reserve, Reserved, Written
from sglang_ext.disagg.runs import Ids, Runs
from sglang_ext.disagg.transfer.link import Link
from sglang_ext.disagg.transfer.transactions import Direction
from sglang_ext.mempool.store import Call
from sglang_ext.wire import pack_ids


class RemoteMemory:
    """Blocks of another instance that are ours to write. Made by `alloc_mem`; ended by `end` or `free_mem`.

    request: by which both sides know what they are for. calls: counts what is called.
    """

    def __init__(self, link: Link, request: str, held: Reserved, calls: Counter[Call]) -> None:
        self._link = link
        self._request = request
        self._held = held
        self._calls = calls
        self._queued = 0
        """Bytes, since all had landed."""

    @classmethod
    async def alloc_mem(
        cls, link: Link, request: str, pool: str, blocks: Ids, calls: Counter[Call]
    ) -> RemoteMemory:
        """Have blocks of a pool of the other instance, which it has set aside for a request.

        Raises:
            RefusedError: it has not, or not these, or the request is over there.
            PeerGoneError, TransferDeadlineError: it is gone, or does not answer.
        """
        reserve = Reserve(link.session, request, pool, pack_ids(blocks))
        held = await link.ask_for(Reserved, reserve, WRITE_SECONDS)
        calls[Call.ALLOC_MEM] += 1
        return cls(link, request, held, calls)

    def transfer(self, runs: Runs) -> None:
        """Queue writes to the blocks.

        Raises:
            RefusedError: the owner has revoked the grant. RangeError: they leave its memory.
        """
        grant = (self._held.slot, self._held.grant)
        self._link.peer.transfer(self._request, runs, direction=Direction.WRITE, grant=grant)
        self._queued += int(runs[:, 4].sum())

    async def landed(self) -> None:
        """Return when all that was queued is there."""
        seconds, self._queued = moving_seconds(WRITE_SECONDS, self._queued), 0
        await self._link.peer.landed(self._request, asyncio.get_running_loop().time() + seconds)

    async def end(self) -> None:
        """All is there: tell the owner, whose the blocks are from now on.

        Raises:
            RefusedError: the grant is over, and what was written is lost.
        """
        done = Written(self._link.session, self._request, self._held.grant)
        await self._link.ask_for(Completed, done, WRITE_SECONDS)
        self._calls[Call.TRANSFER] += 1

    async def free_mem(self) -> None:
        """Give the blocks up: returns when nothing of ours writes there any more, and the owner is told."""
        await self._link.peer.drop(self._request)
        self._link.spawn(self._link.give_up(self._held.grant))
        self._calls[Call.FREE_MEM] += 1
