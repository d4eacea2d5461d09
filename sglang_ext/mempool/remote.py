"""MemServe's calls with an instance named (table 1): memory of another instance, which its owner has granted.

    memory = await RemoteMemory.alloc_mem(link, request, "hbm", blocks, calls)
    memory.transfer(runs)           one-sided writes; may be called many times
    await memory.landed(seconds)
    await memory.end()              reports the transfer as complete and returns the blocks to the owner; or
    await memory.free_mem()         returns the blocks once no write of this instance to them is under way

The owner chooses the blocks: its engine allocates them for a request of its own, and names them here. The
grant holds for that request and this connection, until either side ends it.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from sglang_ext.disagg.handover import WRITE_SECONDS, moving_seconds
from sglang_ext.disagg.messages import Completed, Reserve, Reserved, Written
from sglang_ext.disagg.runs import Ids, Runs
from sglang_ext.disagg.transfer.link import Link
from sglang_ext.disagg.transfer.transactions import Direction
from sglang_ext.mempool.ledger import Call
from sglang_ext.wire import pack_ids


class RemoteMemory:
    """Blocks of another instance that this instance may write. Made by `alloc_mem`; ended by `end` or
    `free_mem`.

    request: the request whose KV the blocks hold, by the ID that both sides use. calls: counts the calls of
    table 1 that are carried out.
    """

    def __init__(self, link: Link, request: str, held: Reserved, calls: Counter[Call]) -> None:
        self._link = link
        self._request = request
        self._held = held
        self._calls = calls
        self._queued = 0
        """Bytes queued since the last call of `landed`."""

    @classmethod
    async def alloc_mem(
        cls, link: Link, request: str, pool: str, blocks: Ids, calls: Counter[Call]
    ) -> RemoteMemory:
        """Acquire blocks of a pool of the other instance, which has set them aside for a request.

        Raises:
            RefusedError: the owner has not set these blocks aside, or the request has ended there.
            PeerGoneError, TransferDeadlineError: the owner is gone, or does not answer.
        """
        reserve = Reserve(link.session, request, pool, pack_ids(blocks))
        held = await link.ask_for(Reserved, reserve, WRITE_SECONDS)
        calls[Call.ALLOC_MEM] += 1
        return cls(link, request, held, calls)

    def transfer(self, runs: Runs) -> None:
        """Queue writes to the blocks.

        Raises:
            RefusedError: the owner has revoked the grant. RangeError: a write exceeds the owner's memory.
        """
        grant = (self._held.slot, self._held.grant)
        self._link.peer.transfer(self._request, runs, direction=Direction.WRITE, grant=grant)
        self._queued += int(runs[:, 4].sum())

    async def landed(self) -> None:
        """Return when all queued writes have arrived."""
        seconds, self._queued = moving_seconds(WRITE_SECONDS, self._queued), 0
        await self._link.peer.landed(self._request, asyncio.get_running_loop().time() + seconds)

    async def end(self) -> None:
        """Report to the owner that all writes have arrived; the blocks belong to the owner from now on.

        Raises:
            RefusedError: the grant has ended, and the written KV is lost.
        """
        done = Written(self._link.session, self._request, self._held.grant)
        await self._link.ask_for(Completed, done, WRITE_SECONDS)
        self._calls[Call.TRANSFER] += 1

    async def free_mem(self) -> None:
        """Give the blocks up. Returns once no write of this instance is under way; the owner is notified
        in the background.
        """
        await self._link.peer.drop(self._request)
        self._link.spawn(self._link.give_up(self._held.grant))
        self._calls[Call.FREE_MEM] += 1
