"""Reads of peers' DRAM arenas into this rank's, on the rank's transfer thread.

The scheduler's thread starts jobs, and looks at their results; it never waits for a peer.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from sglang_ext.disagg.errors import (
    RefusedError,
    StaleReadError,
    TransferDeadlineError,
)
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.instance import Instance
from sglang_ext.engine.peers.arena_leases import DRAM_POOL
from sglang_ext.engine.peers.export import layer_name
from sglang_ext.engine.transfer_thread import TransferThread
from sglang_ext.errors import SglangExtError
from sglang_ext.wire import pack_ids, unpack_ids

log = logging.getLogger(__name__)

USE = "fetch"
"""The use under which the bytes are counted."""
ASK_SECONDS = 0.005
"""Pause between two requests for a lease that the owner's scheduler has not published yet."""
LAYER_SECONDS = 10.0
"""Limit between two layers that a peer computes, while our forward pass waits for them."""
SLOW = "slow"
"""Reason of a refusal: the owner's disk needs longer than the reader waits."""
MOST_SLOW_SECONDS = 30.0
"""The owner gives up an export that takes longer."""
DECLINE_SECONDS = 5.0
"""Limit for the publication of a lease that the reader declines, so that the lease can be ended."""
END_SECONDS = 20.0
"""Limit for a job to end after a cancel; a read ends when its call has returned."""
EPOCH_MARK = "/"


def peer_name(instance: str, epoch: bytes) -> str:
    """The name of an instance's endpoints: a restarted instance is another peer."""
    return f"{instance}{EPOCH_MARK}{epoch.hex()}"


@dataclass(eq=False)
class Job:
    """A read from one peer. Written by the link's thread, looked at by the scheduler's and the mover's.

    layered: it comes layer by layer, while the peer computes it. layers_in: how many
    layers are in place and verified, from the first on. offered: blocks of the prompt's beginning that the
    peer exports; ``None`` until the peer has answered. read: blocks that are in place and verified; ``None``
    until the reading has ended. connecting_s: seconds to connect, once connected; later reads from that peer
    do not take them. why: one word for the failure, or empty.
    """

    address: str
    export: str
    deadline: float
    """By the clock of the link's loop."""
    layered: bool = False
    layers_in: int = 0
    offered: int | None = None
    read: int | None = None
    why: str = ""
    connecting_s: float = 0.0
    instance: Instance | None = None
    offers: dict[str, Offer] = field(default_factory=dict)
    """By pool; set once the peer has answered for all."""
    task: asyncio.Task[int] | None = None
    declined: bool = False
    """The offered blocks are not wanted."""
    ended: threading.Event = field(default_factory=threading.Event)
    """Nothing of it runs on the link's thread any more."""

    def decided(self, layer: int) -> bool:
        """While it is being read: whether a layer is in place, or will not come any more."""
        return self.layers_in > layer or self.ended.is_set()


class FetchLink:
    """See the module's docstring. pools: of the thread's endpoint, which are read, the first one first."""

    def __init__(self, transfers: TransferThread, pools: Sequence[str] = (DRAM_POOL,)) -> None:
        self._transfers = transfers
        self._pools = tuple(pools)

    @property
    def endpoint(self) -> Endpoint:
        """The rank's endpoint."""
        return self._transfers.endpoint

    @property
    def address(self) -> str:
        """host:port, for peers."""
        return self.endpoint.address

    @property
    def transport_bytes(self) -> dict[str, int]:
        """Bytes that were fetched from peers, by the transport that brought them. From any thread."""
        return {str(name): stats.bytes for name, stats in self.endpoint.totals(USE).items()}

    def ask(self, address: str, export: str, seconds: float, *, layered: bool = False) -> Job:
        """Ask a peer for its export under a name, which it may publish later. layered: the peer exports each
        layer as it computes it.
        """
        job = Job(address, export, self._transfers.loop.time() + seconds, layered)
        self._start(job, partial(self._asking, job), asking=True)
        return job

    def read(self, job: Job, start: int, ids: Ids) -> None:
        """Read the offered blocks from ``start`` on into ``ids``, and verify them.

        Until ``job.read`` is known the blocks may be written.
        """
        job.ended.clear()
        if job.layered:
            self._start(job, partial(self._reading_layers, job, start, ids), asking=False)
        else:
            parts = {DRAM_POOL: (np.arange(start, start + len(ids)), ids)}
            self._start(job, partial(self._reading, job, parts, len(ids)), asking=False)

    def read_parts(self, job: Job, parts: Mapping[str, tuple[Ids, Ids]], blocks: int) -> None:
        """Like `read`, from several pools: of each, which of the offered blocks, and where to. ``job.read``
        is ``blocks`` then.
        """
        job.ended.clear()
        self._start(job, partial(self._reading, job, parts, blocks), asking=False)

    def wait(self, job: Job) -> bool:
        """Return when reading has ended, as it does with the last layer: whether all is here and verified."""
        return job.ended.wait(END_SECONDS) and not job.why

    def drop(self, job: Job) -> None:
        """Let the peer release the blocks that it offers, or will offer: they are not needed."""

        def drop() -> None:
            job.declined = True
            if job.ended.is_set():
                self._release(job)

        self._transfers.loop.call_soon_threadsafe(drop)

    def decline(self, address: str, export: str, *, layered: bool = False, after_s: float = 0.0) -> None:
        """Let a peer release its export under a name, published now or expected after so many seconds: it is
        not needed.

        A layered export is left alone: the peer computes it for its own cache too, and releases it when no
        reader asks.
        """
        if layered:
            return
        deadline = self._transfers.loop.time() + after_s + DECLINE_SECONDS
        job = Job(address, export, deadline, declined=True)
        self._start(job, partial(self._asking, job), asking=True)

    def cancel(self, job: Job) -> None:
        """End a job, and wait until nothing of it writes any more."""

        def stop() -> None:
            if job.task is not None:
                job.task.cancel()

        self._transfers.loop.call_soon_threadsafe(stop)
        if not job.ended.wait(END_SECONDS):
            log.error("a read from %s does not end", job.address)

    def _start(self, job: Job, work: Callable[[], Coroutine[Any, Any, int]], *, asking: bool) -> None:
        def begin() -> None:
            job.task = self._transfers.keep(work())
            # Also called for a task that is cancelled before it begins.
            job.task.add_done_callback(ended)

        def ended(task: asyncio.Task[int]) -> None:
            blocks = 0
            if task.cancelled():
                job.why = "cancelled"
            elif (error := task.exception()) is not None:
                self._failed(job, error)
            else:
                blocks = task.result()
                if job.declined:
                    self._release(job)
            job.ended.set()
            if asking:
                job.offered = blocks
            else:
                job.read = blocks

        self._transfers.loop.call_soon_threadsafe(begin)

    async def _asking(self, job: Job) -> int:
        async with asyncio.timeout_at(job.deadline):
            began = asyncio.get_running_loop().time()
            job.instance = await self.endpoint.reach(job.address, use=USE)
            job.connecting_s = asyncio.get_running_loop().time() - began
            for pool in self._pools:
                job.instance.plan(pool, pool)  # of another namespace, it is refused before it is asked
            name = layer_name(job.export, 0) if job.layered else job.export
            for pool in self._pools:
                job.offers[pool] = await self._offered(job.instance, job, name, pool)
        return len(unpack_ids(job.offers[self._pools[0]].blocks))

    async def _offered(self, instance: Instance, job: Job, export: str, pool: str = DRAM_POOL) -> Offer:
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await instance.offer(0, export, pool, max(0.001, job.deadline - loop.time()))
            except RefusedError as error:
                if error.reason != "request":
                    raise
                again_s = error.again_s
            # A peer that keeps no copy on disk answers 0: the deadline ends that wait, even if just passed.
            if again_s and again_s > job.deadline - loop.time():
                # The waiting request computes instead, from now on and not from the deadline.
                if not job.declined and again_s < MOST_SLOW_SECONDS:
                    self.decline(job.address, job.export, after_s=again_s)
                raise RefusedError(SLOW, f"it comes from a disk there, which takes {again_s:.3f} s")
            await asyncio.sleep(max(ASK_SECONDS, again_s / 2))

    async def _reading(self, job: Job, parts: Mapping[str, tuple[Ids, Ids]], blocks: int) -> int:
        """Read from one pool after the other: on an error or a cancellation, no other read is under way."""
        if asyncio.get_running_loop().time() >= job.deadline:
            self._release(job)
            raise TransferDeadlineError("no time is left to read it")
        try:
            for pool, (places, ids) in parts.items():
                await self._read(job, job.export, job.offers[pool], places, ids, None)
        finally:
            # No caller waits for the peer's answer: the bytes are here, or of no use.
            self._release(job)
        return blocks

    async def _reading_layers(self, job: Job, start: int, ids: Ids) -> int:
        """Read each layer once it is exported."""
        instance, first = job.instance, job.offers[DRAM_POOL]
        assert instance is not None
        places = np.arange(start, start + len(ids))
        shard = self.endpoint.pools[DRAM_POOL].meta.shard
        for layer in range(shard[1]):
            name = layer_name(job.export, layer)
            if layer:
                async with asyncio.timeout(LAYER_SECONDS), asyncio.timeout_at(job.deadline):
                    job.offers[DRAM_POOL] = await self._offered(instance, job, name)
            offer = job.offers[DRAM_POOL]
            try:
                if offer.blocks != first.blocks:
                    raise StaleReadError(name, len(ids), len(ids))
                await self._read(job, name, offer, places, ids, [shard[0] + layer])
            finally:
                self._release(job)
            job.layers_in = layer + 1
        return len(ids)

    async def _read(
        self,
        job: Job,
        name: str,
        offer: Offer,
        places: Ids,
        ids: Ids,
        layers: Sequence[int] | None,
    ) -> None:
        """Read the offered blocks at these places, and verify them. layers: of the whole model; None for
        all.
        """
        instance = job.instance
        assert instance is not None
        part = msgspec.structs.replace(
            offer,
            blocks=pack_ids(unpack_ids(offer.blocks)[places]),
            generations=pack_ids(unpack_ids(offer.generations)[places]),
        )
        instance.transfer(name, [part], offer.pool, ids, layers)
        await instance.landed(name, max(0.001, job.deadline - asyncio.get_running_loop().time()))

    def _failed(self, job: Job, error: BaseException) -> None:
        if not isinstance(error, SglangExtError | TimeoutError):
            log.error("fetching KV from %s failed", job.address, exc_info=error)
        log.info("KV is not fetched from %s: %s", job.address, error)
        if isinstance(error, StaleReadError):
            job.why = "stale"
        elif isinstance(error, TimeoutError | TransferDeadlineError):
            job.why = "late"
        elif isinstance(error, RefusedError):
            job.why = "too_slow" if error.reason == SLOW else "refused"
        else:
            job.why = "gone"

    def _release(self, job: Job) -> None:
        instance = job.instance
        if instance is not None and not instance.gone:
            link = instance.links[0]
            for offer in job.offers.values():
                link.spawn(link.complete(offer.request, offer.lease, True, 5.0))

    # -- deaths -------------------------------------------------------------------------------------

    def peer_dead(self, instance: str, epoch: bytes) -> None:
        """A router reports that an instance died: give up its silent endpoints sooner. An empty epoch means
        any.
        """
        dead = peer_name(instance, epoch)

        def said(name: str) -> bool:
            return name.startswith(dead) if dead.endswith(EPOCH_MARK) else name == dead

        self._transfers.loop.call_soon_threadsafe(self.endpoint.doubt, said)

    def __repr__(self) -> str:
        return f"FetchLink({self._transfers!r})"
