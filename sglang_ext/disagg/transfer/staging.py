"""Staging: a request's pages packed into one run of bytes (MemServe, section 5.2: by request, aggregated).

The engine's pool keeps a layer's K and V apart, so that a page is as many ranges as there are planes. In
staging a page has its planes adjacent, and the pages of a request lie side by side: one range, on both
sides. The price is a copy in memory on each side. Blocks that find no room in staging go from and to the
engine's pages as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

import numpy as np

from sglang_ext.disagg.memory import SharedMemory
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.tensors import arena_tensors
from sglang_ext.disagg.transfer.aggregate import Packer
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.pools import MemoryRange, PoolSpec
from sglang_ext.geometry import Geometry

STAGING = "staging"


class Staging:
    """The staging of one rank: blocks of a page each. `take` and `give` are thread-safe.

    geometry: of the engine's pool, with blocks of one page. nbytes: how much memory; at least one page is
    taken, and never more than the pool has. of: the engine's pool, by its name at the endpoint.
    """

    def __init__(self, geometry: Geometry, nbytes: int, of: str = "hbm") -> None:
        self._of = of
        block_bytes = geometry.layout.block_bytes
        pages = geometry.slots // geometry.page_tokens
        self.blocks = max(1, min(pages, nbytes // block_bytes))
        self._memory = SharedMemory(self.blocks * block_bytes, "kv-staging")
        memory = self._memory
        self.spec = PoolSpec(
            STAGING,
            self.blocks,
            geometry.page_tokens,
            arena_tensors(geometry, memory.address, self.blocks),
            geometry.shard,
            (MemoryRange(memory.address, memory.nbytes, fd=memory.fd, keep=memory),),
            lease_budget=self.blocks,
            borrowed=True,
        )
        self._packer: Packer | None = None
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}
        """First block to number of blocks."""

    def __repr__(self) -> str:
        return f"<Staging blocks={self.used}/{self.blocks}>"

    @property
    def used(self) -> int:
        """Blocks that are taken."""
        with self._lock:
            return sum(self._taken.values())

    def attach(self, endpoint: Endpoint) -> None:
        """The endpoint serves the engine's pool and `spec` now."""
        self._packer = Packer(endpoint.pools[self._of].meta, endpoint.pools[STAGING].meta, endpoint.regions)

    def take(self, count: int) -> Ids | None:
        """So many blocks side by side, the first that are free; None when there are none."""
        if count < 1:
            return None
        with self._lock:
            at = 0
            for first, length in sorted(self._taken.items()):
                if first - at >= count:
                    break
                at = first + length
            if at + count > self.blocks:
                return None
            self._taken[at] = count
        return np.arange(at, at + count, dtype=np.int64)

    def give(self, blocks: Ids) -> None:
        """Free blocks that `take` gave."""
        with self._lock:
            count = self._taken.pop(int(blocks[0]))
            assert count == len(blocks), "blocks that were not taken together"

    async def pack(self, pages: Ids, into: Ids) -> None:
        """Copy pages of the engine into blocks, to the end: cancelled, it is so only then."""
        assert self._packer is not None
        await _to_the_end(self._packer.pack, pages, into)

    async def unpack(self, blocks: Ids, into: Ids) -> None:
        """Copy blocks into pages of the engine, to the end."""
        assert self._packer is not None
        await _to_the_end(self._packer.unpack, blocks, into)

    def close(self) -> None:
        """Give the memory up; the endpoint is closed."""
        self._packer = None
        self._memory.close()


async def _to_the_end(copy: Callable[[Ids, Ids], None], source: Ids, target: Ids) -> None:
    """Run a copy beside the event loop; a cancellation of the caller meanwhile takes effect when the copy has
    ended."""
    work = asyncio.ensure_future(asyncio.to_thread(copy, source, target))
    cancelled = False
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            cancelled = True
        except BaseException:  # noqa: BLE001 - raised below, by the result
            break
    if cancelled:
        with contextlib.suppress(Exception):
            work.result()
        raise asyncio.CancelledError
    work.result()
