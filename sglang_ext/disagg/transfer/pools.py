"""The owner's pools: the readers of each block, and the times when its bytes may change.

    engine writes a block:     open(blocks) -> write -> seal(blocks)
    engine publishes blocks:   publish(...) -> Offer, which travels to the reader by whatever way
    engine reuses a block:     open(blocks): refused while a lease or a grant holds it

These calls may come from any thread (the engine's scheduler); the control plane's come from the event loop.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.clock import Clock
from sglang_ext.disagg.errors import RangeError
from sglang_ext.disagg.generations import COUNTER_BYTES, GenerationTable
from sglang_ext.disagg.memory import MemoryKind
from sglang_ext.disagg.messages import Offer
from sglang_ext.disagg.runs import Ids
from sglang_ext.disagg.tensors import PoolMeta, TensorMeta, arena_tensors, pool_strided, shard_tuple
from sglang_ext.disagg.transfer.leases import Ended, LeaseTable
from sglang_ext.geometry import Geometry, Shard
from sglang_ext.wire import pack_ids


@dataclass(frozen=True)
class MemoryRange:
    """Memory to register. fd: the sealed memfd that holds it at fd_offset, -1 for other memory."""

    address: int
    nbytes: int
    kind: MemoryKind = MemoryKind.HOST
    fd: int = -1
    fd_offset: int = 0
    keep: object = field(default=None, compare=False, repr=False)
    """Whatever owns the memory; held as long as the endpoint."""


class SharedPages(Protocol):
    """Memory that others may map."""

    @property
    def fd(self) -> int: ...


class BlockArena(Protocol):
    """The part of `tiered_store.dram.arena.DramArena` that a pool uses."""

    @property
    def address(self) -> int: ...

    @property
    def n_blocks(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def memory(self) -> SharedPages: ...


@dataclass(frozen=True)
class PoolSpec:
    """A pool to serve and to read into.

    name: `hbm`, `dram`, or another that both sides know. blocks: ids run over [0, blocks).
    memory: ranges that together hold every tensor; each tensor must lie inside one of them.
    lease_budget: most blocks that leases may pin at a time; 0 for half of the pool.
    borrowed: the blocks' real owner, an engine's allocator, reuses them without calling `open`. Then a lease
        seals open blocks, and its end opens the blocks that no other lease holds, before `on_ended` is
        called. The lease's caller keeps the engine from reusing the blocks until then (by a lock on tree
        nodes, or a request that has not been freed), and gives that up in `on_ended`.
    namespace: must be equal in a peer's pool of this name before one is read into the other; holds the names
        of model, weights and shard, for example.
    """

    name: str
    blocks: int
    block_tokens: int
    tensors: tuple[TensorMeta, ...]
    shard: Shard
    memory: tuple[MemoryRange, ...]
    lease_budget: int = 0
    borrowed: bool = False
    namespace: str = ""

    @staticmethod
    def of_geometry(
        name: str,
        geometry: Geometry,
        memory: Sequence[MemoryRange],
        lease_budget: int = 0,
        borrowed: bool = True,
    ) -> PoolSpec:
        """The engine's pool, in blocks of one page: with page size 1 a block is one token slot."""
        from sglang_ext.disagg.tensors import tensors_of

        page = geometry.page_tokens
        return PoolSpec(
            name,
            geometry.slots // page,
            page,
            tensors_of(geometry),
            geometry.shard,
            tuple(memory),
            lease_budget,
            borrowed,
        )

    @staticmethod
    def of_arena(
        name: str, geometry: Geometry, arena: BlockArena, lease_budget: int = 0, borrowed: bool = True
    ) -> PoolSpec:
        """A block-first arena. geometry: the layout of a block's bytes; its addresses are not used."""
        memory = MemoryRange(
            arena.address, arena.n_blocks * arena.block_bytes, fd=arena.memory.fd, keep=arena
        )
        return PoolSpec(
            name,
            arena.n_blocks,
            geometry.block_tokens,
            arena_tensors(geometry, arena.address, arena.n_blocks),
            geometry.shard,
            (memory,),
            lease_budget,
            borrowed,
        )

    def meta(self, generations: int) -> PoolMeta:
        """As CONNECT carries it; checked.

        Raises:
            RangeError: the metadata contradict themselves.
        """
        meta = PoolMeta(
            self.name,
            self.blocks,
            self.block_tokens,
            self.tensors,
            shard_tuple(self.shard),
            generations,
            self.namespace,
        )
        try:
            pool_strided(meta)
        except ValueError as error:
            raise RangeError(f"pool {self.name}: {error}") from None
        return meta


class OwnedPool:
    """One pool of this endpoint, as its owner sees it."""

    def __init__(
        self,
        spec: PoolSpec,
        meta: PoolMeta,
        counters: npt.NDArray[np.int64],
        clock: Clock,
        numbers: Iterator[int] | None = None,
    ) -> None:
        self.name = spec.name
        self.meta = meta
        self.blocks = spec.blocks
        self.block_bytes = sum(part.nbytes for part in spec.memory) // spec.blocks
        self._borrowed = spec.borrowed
        self._generations = GenerationTable(counters)
        self._leases = LeaseTable(spec.blocks, spec.lease_budget or max(1, spec.blocks // 2), numbers)
        self._granted: npt.NDArray[np.bool_] = np.zeros(spec.blocks, np.bool_)
        self._coming: dict[str, tuple[float, float]] = {}
        """Requests without anything published yet -> when that is expected, and until when this answer is
        given."""
        self._clock = clock
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<OwnedPool {self.name} {self._generations!r} {self._leases!r} granted={self.granted}>"

    @property
    def granted(self) -> int:
        """Blocks that a peer may be writing."""
        return int(self._granted.sum())

    @property
    def pinned(self) -> int:
        """Blocks that leases hold."""
        return self._leases.pinned

    def open(self, blocks: Ids) -> None:
        """The bytes of `blocks` are about to change. Returns before any of them may.

        Raises:
            RangeError: a block is already open, or a lease or grant holds it.
        """
        blocks = np.asarray(blocks, np.int64)
        with self._lock:
            self._free(blocks)
            self._generations.open(blocks)

    def seal(self, blocks: Ids) -> npt.NDArray[np.int64]:
        """The bytes of `blocks` are written. Returns their generations."""
        with self._lock:
            return self._generations.seal(blocks)

    def current(self, blocks: Ids) -> npt.NDArray[np.int64]:
        """The generations of `blocks` now; even ones are sealed."""
        return self._generations.current(blocks)

    def is_sealed(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        """A mask of the `blocks` that may be published."""
        return self._generations.is_sealed(blocks)

    def may_reuse(self, blocks: Ids) -> npt.NDArray[np.bool_]:
        """A mask of the `blocks` that neither a lease nor a grant holds."""
        blocks = np.asarray(blocks, np.int64)
        with self._lock:
            free: npt.NDArray[np.bool_] = ~(self._leases.is_pinned(blocks) | self._granted[blocks])
            return free

    def lease(
        self, request: str, blocks: Ids, ttl: float, reader: bytes | None, names: bytes = b""
    ) -> tuple[int, Ids]:
        """Pin sealed blocks for a reader; returns the lease's number and their generations. names: see
        `Offer`.

        Raises:
            RangeError: a block is open (of a borrowed pool: is granted to a writer).
            RefusedError: the lease budget is spent.
        """
        blocks = np.asarray(blocks, np.int64)
        with self._lock:
            self._coming.pop(request, None)
            sealed = self._generations.is_sealed(blocks)
            if self._borrowed:
                if self._granted[blocks].any():
                    raise RangeError(f"a block of {request!r} is granted to a writer")
                self._generations.seal(blocks[~sealed])
            elif not sealed.all():
                raise RangeError(
                    f"{int((~sealed).sum())} blocks of {request!r} are open; seal them before publishing"
                )
            try:
                lease = self._leases.grant(request, blocks, self._clock.monotonic() + ttl, reader, names)
            except BaseException:
                if self._borrowed:
                    self._generations.open(blocks[~sealed])
                raise
            return lease.number, self._generations.current(blocks)

    def expect(self, request: str, seconds: float) -> None:
        """A request's blocks are on their way, and are expected to be published after so many seconds."""
        now = self._clock.monotonic()
        self._say(request, now + seconds, now + seconds)

    def give_up(self, request: str, seconds: float) -> None:
        """Nothing will be published for a request. This answer is given for so many seconds."""
        self._say(request, math.inf, self._clock.monotonic() + seconds)

    def _say(self, request: str, at: float, until: float) -> None:
        with self._lock:
            now = self._clock.monotonic()
            self._coming = {name: said for name, said in self._coming.items() if said[1] > now}
            self._coming[request] = at, until

    def coming(self, request: str) -> float:
        """Seconds until something is published for a request; 0: nothing is known; infinite: never."""
        with self._lock:
            at, until = self._coming.get(request, (0.0, 0.0))
            now = self._clock.monotonic()
            return max(0.0, at - now) if now < until else 0.0

    def offer(self, request: str, reader: bytes, instance: str, rank: int, epoch: bytes) -> Offer | None:
        """The newest live lease of a request as an offer to `reader`; None when there is none for it."""
        with self._lock:
            lease = self._leases.find(request)
            if lease is None or not self._leases.bind(lease.number, reader):
                return None
            left = max(0.0, lease.deadline - self._clock.monotonic())
            return Offer(
                instance,
                rank,
                epoch,
                self.name,
                request,
                lease.number,
                pack_ids(lease.blocks),
                pack_ids(self._generations.current(lease.blocks)),
                int(left * 1000),
                lease.names,
            )

    def complete(self, lease: int, reader: bytes) -> Ended | None:
        """COMPLETE of a reader; None when the lease was over or is another's."""
        with self._lock:
            ended = self._leases.complete(lease, reader)
            self._open_freed(ended)
            return ended

    def renew(self, lease: int, reader: bytes, ttl: float) -> bool:
        """Extend a reader's lease."""
        with self._lock:
            return self._leases.bind(lease, reader) and self._leases.renew(
                lease, self._clock.monotonic() + ttl
            )

    def withdraw(self, lease: int) -> Ended | None:
        """Take a lease back; its reader will find other generations once the blocks are reused."""
        with self._lock:
            ended = self._leases.withdraw(lease)
            self._open_freed(ended)
            return ended

    def expire(self, dead: Sequence[bytes] = ()) -> tuple[Ended, ...]:
        """End leases whose time is over or whose reader is dead."""
        with self._lock:
            ended = self._leases.expire(self._clock.monotonic())
            for reader in dead:
                ended += self._leases.reader_dead(reader)
            self._open_freed(*ended)
            return ended

    def _open_freed(self, *ended: Ended | None) -> None:
        """Blocks of a borrowed pool that are no longer leased may be reused as soon as our caller gets the
        result."""
        if self._borrowed:
            for end in ended:
                if end is not None:
                    self._generations.open(end.freed[self._generations.is_sealed(end.freed)])

    def hold(self, blocks: Ids) -> None:
        """Blocks that a peer may write from now on. They must be open, and without a lease or grant.

        Raises:
            RangeError: a block is sealed, leased, or granted already.
        """
        blocks = np.asarray(blocks, np.int64)
        with self._lock:
            if self._generations.is_sealed(blocks).any():
                raise RangeError("blocks must be open before a peer may write them")
            self._free(blocks)
            self._granted[blocks] = True

    def release(self, blocks: Ids) -> None:
        """No peer writes these blocks any more."""
        with self._lock:
            self._granted[blocks] = False

    def check(self) -> None:
        """Verify leases, generations, and that no leased block is open or granted."""
        with self._lock:
            self._leases.check()
            self._generations.check()
            every = np.arange(self.blocks)
            pinned = self._leases.is_pinned(every)
            assert self._generations.is_sealed(every[pinned]).all(), "a leased block is open"
            assert not self._borrowed or not self._generations.is_sealed(every[~pinned]).any(), (
                "a block that an engine may reuse is sealed"
            )
            assert not (pinned & self._granted).any(), "a leased block is granted to a writer"

    def _free(self, blocks: Ids) -> None:
        if blocks.size and (int(blocks.min()) < 0 or int(blocks.max()) >= self.blocks):
            raise RangeError(f"block ids of {self.name} must lie in [0, {self.blocks})")
        held = self._leases.is_pinned(blocks)
        if held.any():
            raise RangeError(f"block {blocks[held][0]} is leased to a reader; wait for the lease to end")
        if self._granted[blocks].any():
            raise RangeError(f"block {blocks[self._granted[blocks]][0]} is granted to a writer")


def counters_bytes(specs: Sequence[PoolSpec]) -> int:
    """Bytes of the generation tables of all pools."""
    return sum(s.blocks for s in specs) * COUNTER_BYTES
