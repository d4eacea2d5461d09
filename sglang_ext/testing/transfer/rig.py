"""Endpoints over random pools, for the conformance suite, tests and benchmarks of transfers."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.disagg.errors import RefusedError
from sglang_ext.disagg.memory import MemoryKind, SharedMemory
from sglang_ext.disagg.runs import Ids, Runs
from sglang_ext.disagg.tensors import arena_tensors, tensors_of
from sglang_ext.disagg.transfer.config import EndpointConfig
from sglang_ext.disagg.transfer.engine import Endpoint
from sglang_ext.disagg.transfer.leases import Ended
from sglang_ext.disagg.transfer.peer import Peer
from sglang_ext.disagg.transfer.pools import MemoryRange, OwnedPool, PoolSpec
from sglang_ext.disagg.transports import CancelToken
from sglang_ext.geometry import Geometry, mha_geometry, mla_geometry

NAMESPACE = "model/w1/float16"


@dataclass(frozen=True)
class Shape:
    """A model and a pool. mla: one latent plane per layer instead of K and V."""

    layers: int = 2
    heads: int = 4
    width: int = 8
    blocks: int = 24
    block_tokens: int = 4
    mla: bool = False
    dtype: str = "float16"

    @staticmethod
    def random(seed: int) -> Shape:
        """A shape whose layers and heads divide by 4."""
        r = random.Random(seed)
        return Shape(
            layers=4,
            heads=4 * r.randint(1, 2),
            width=r.choice([3, 16, 64]),
            blocks=r.randint(12, 40),
            block_tokens=r.choice([1, 4, 16]),
            mla=r.random() < 0.3,
            dtype=r.choice(["float16", "float32", "float8_e4m3fn"]),
        )


class Pool:
    """One rank's pool with its memory.

    planes: per plane of the geometry, uint8, shape (blocks, bytes of the plane's block) for plane-first
        pools.
    kind: where endpoints believe it to be; it is host memory always, as an emulated GPU's is.
    """

    def __init__(
        self,
        name: str,
        shape: Shape,
        *,
        shared: bool,
        first_layer: int = 0,
        layers: int | None = None,
        first_head: int = 0,
        heads: int | None = None,
        arena: bool = False,
        kind: MemoryKind = MemoryKind.HOST,
    ) -> None:
        layers = shape.layers if layers is None else layers
        heads = shape.heads if heads is None else heads
        flat = _geometry(shape, 0, first_layer, layers, first_head, heads)
        size = flat.layout.block_bytes * shape.blocks
        if shared:
            memory = SharedMemory(size, name)
            self.bytes: npt.NDArray[np.uint8] = memory.array
            self.keep: object = memory
            fd = memory.fd
        else:
            self.bytes = np.zeros(size, np.uint8)
            self.keep, fd = self.bytes, -1
        address = int(self.bytes.ctypes.data)
        self.geometry = _geometry(shape, address, first_layer, layers, first_head, heads)
        tensors = arena_tensors(self.geometry, address, shape.blocks) if arena else tensors_of(self.geometry)
        if kind is not MemoryKind.HOST:
            fd = -1  # as a GPU's memory has none
        self.spec = PoolSpec(
            name,
            shape.blocks,
            shape.block_tokens,
            tensors,
            self.geometry.shard,
            (MemoryRange(address, size, kind, fd=fd, keep=self.keep),),
            lease_budget=shape.blocks,
        )
        self._arena = arena
        self._shape = shape

    def view(self, layer: int, kind: str) -> npt.NDArray[np.uint8]:
        """Bytes of one plane, shape (blocks, tokens, heads, bytes of a head), a view of the pool."""
        planes = self.geometry.planes
        index = next(i for i, p in enumerate(planes) if p.layer == layer and p.kind == kind)
        plane, layout, shape = planes[index], self.geometry.layout, self._shape
        rows = (shape.blocks, shape.block_tokens, plane.dim("H"), plane.row_bytes // plane.dim("H"))
        if self._arena:
            low, high = layout.plane_offsets[index], layout.plane_offsets[index + 1]
            return self.bytes.reshape(shape.blocks, -1)[:, low:high].reshape(rows)
        start = plane.address - int(self.bytes.ctypes.data)
        return self.bytes[start : start + plane.nbytes].reshape(rows)

    def close(self) -> None:
        """Give the memory up, once no endpoint uses it."""
        if isinstance(self.keep, SharedMemory):
            self.keep.close()
        self.bytes = np.empty(0, np.uint8)

    def fill(self, seed: int) -> None:
        """Random bytes."""
        self.bytes[:] = np.random.default_rng(seed).integers(0, 256, self.bytes.size, dtype=np.uint8)


def _geometry(
    shape: Shape, address: int, first_layer: int, layers: int, first_head: int, heads: int
) -> Geometry:
    item = {"float32": 4, "float16": 2, "float8_e4m3fn": 1}[shape.dtype]
    slots = shape.blocks * shape.block_tokens
    plane = slots * shape.width * item * (1 if shape.mla else heads)
    if shape.mla:
        return mla_geometry(
            addresses=tuple(address + i * plane for i in range(layers)),
            slots=slots,
            latent_dim=shape.width,
            dtype=shape.dtype,
            first_layer=first_layer,
            model_layers=shape.layers,
            block_tokens=shape.block_tokens,
            page_tokens=shape.block_tokens,
        )
    return mha_geometry(
        k_addresses=tuple(address + 2 * i * plane for i in range(layers)),
        v_addresses=tuple(address + (2 * i + 1) * plane for i in range(layers)),
        slots=slots,
        heads=heads,
        head_dim=shape.width,
        dtype=shape.dtype,
        first_layer=first_layer,
        model_layers=shape.layers,
        first_head=first_head,
        model_heads=shape.heads,
        block_tokens=shape.block_tokens,
        page_tokens=shape.block_tokens,
    )


class ListReceiver:
    """A receiver with a set of blocks that peers may write, and lists of their outcomes."""

    def __init__(self) -> None:
        self.pools: dict[str, OwnedPool] = {}
        self.aside: set[int] = set()
        """Blocks that peers may name."""
        self.claim_seconds: float | None = None
        """For how long they may write those; None for the endpoint's `grant_ttl`."""
        self.writers = 1
        """How many peers may have the same blocks at a time."""
        self.writing: Counter[tuple[int, ...]] = Counter()
        """How many have them."""
        self.written: list[list[int]] = []
        self.discarded = 0

    async def claim(self, pool: str, blocks: Ids, request: str) -> float | None:
        """Accept only blocks that were set aside, each for at most `writers` writers at a time."""
        named = tuple(blocks.tolist())
        if not self.aside.issuperset(named) and not 0 < self.writing[named] < self.writers:
            raise RefusedError("blocks", f"{blocks.tolist()} were not set aside")
        self.aside -= set(named)
        self.writing[named] += 1
        return self.claim_seconds

    async def filled(self, pool: str, blocks: Ids, request: str) -> None:
        """Seal and remember, once all have filled them."""
        if not self._left(blocks):
            self.pools[pool].seal(blocks)
            self.written.append(blocks.tolist())

    async def discard(self, pool: str, blocks: Ids, request: str) -> None:
        """The blocks may be granted again once no writer has them."""
        self.discarded += 1
        if not self._left(blocks):
            self.aside |= set(blocks.tolist())

    def _left(self, blocks: Ids) -> int:
        named = tuple(blocks.tolist())
        self.writing[named] -= 1
        return self.writing[named]


@dataclass
class Rank:
    """One endpoint with its pool and the ends that its leases reported."""

    endpoint: Endpoint
    pool: Pool
    receiver: ListReceiver
    ended: list[Ended] = field(default_factory=list)

    async def close(self) -> None:
        """Stop the endpoint and free the pool."""
        await self.endpoint.close()
        self.pool.close()

    @property
    def owned(self) -> OwnedPool:
        """The pool as the owner sees it."""
        return self.endpoint.pools[self.pool.spec.name]


async def start_instance(
    config: EndpointConfig,
    shape: Shape,
    *,
    tp: int = 1,
    pp: int = 1,
    shared: bool = True,
    name: str = "hbm",
    arena: bool = False,
    kind: MemoryKind = MemoryKind.HOST,
) -> list[Rank]:
    """All ranks of an instance, PP-major. KV heads are replicated where tp exceeds them; a latent always
    is.
    """
    import dataclasses

    ranks: list[Rank] = []
    for index, (stage, rank) in enumerate(itertools.product(range(pp), range(tp))):
        layers = shape.layers // pp
        heads = shape.heads if shape.mla else max(1, shape.heads // tp)
        pool = Pool(
            name,
            shape,
            shared=shared,
            first_layer=stage * layers,
            layers=layers,
            first_head=0 if shape.mla else rank * shape.heads // tp,
            heads=heads,
            arena=arena,
            kind=kind,
        )
        ended: list[Ended] = []
        receiver = ListReceiver()
        endpoint = await Endpoint.start(
            dataclasses.replace(config, rank=index),
            [pool.spec],
            on_ended=lambda pool, end, ended=ended: ended.append(end),  # type: ignore[misc]
            receiver=receiver,
        )
        receiver.pools = dict(endpoint.pools)
        ranks.append(Rank(endpoint, pool, receiver, ended))
    return ranks


def planes_of(ranks: Sequence[Rank], shape: Shape) -> dict[tuple[int, str], npt.NDArray[np.uint8]]:
    """The whole model's planes, put together from all ranks: (blocks, tokens, heads, bytes) each. A copy."""
    kinds = ("latent",) if shape.mla else ("k", "v")
    planes: dict[tuple[int, str], npt.NDArray[np.uint8]] = {}
    for layer, kind in itertools.product(range(shape.layers), kinds):
        parts: dict[int, npt.NDArray[np.uint8]] = {}
        for rank in ranks:
            shard = rank.pool.geometry.shard
            if shard.first_layer <= layer < shard.first_layer + shard.layers:
                view = rank.pool.view(layer, kind)
                for h in range(view.shape[2]):
                    parts[(0 if shape.mla else shard.first_head) + h] = view[:, :, h].copy()
        planes[layer, kind] = np.stack([parts[h] for h in sorted(parts)], 2)
    return planes


def fill_alike(ranks: Sequence[Rank], shape: Shape, seed: int) -> None:
    """Random bytes in every rank's pool, the same wherever two ranks hold the same heads."""
    rng = np.random.default_rng(seed)
    for layer, kind in itertools.product(range(shape.layers), ("latent",) if shape.mla else ("k", "v")):
        whole: npt.NDArray[np.uint8] | None = None
        for rank in ranks:
            shard = rank.pool.geometry.shard
            if not shard.first_layer <= layer < shard.first_layer + shard.layers:
                continue
            view = rank.pool.view(layer, kind)
            if whole is None:
                heads = 1 if shape.mla else shape.heads
                size = (view.shape[0], view.shape[1], heads, view.shape[3])
                whole = rng.integers(0, 256, size, dtype=np.uint8)
            low = 0 if shape.mla else shard.first_head
            view[:] = whole[:, :, low : low + view.shape[2]]


class Gate:
    """Holds every read or write of a peer before its first byte.

    name: `read` or `write`.
    """

    def __init__(self, peer: Peer, name: str) -> None:
        peer._inline_bytes = 0  # a lane moves them, as it does those of a large request
        channel = peer.channel
        self.reached, self.go = threading.Event(), threading.Event()
        stock = getattr(channel, name)

        def gated(lane: int, runs: Runs, token: CancelToken, *rest: Any) -> None:
            self.reached.set()
            assert self.go.wait(30)
            # A writer that was stopped here has looked at its token already.
            stock(lane, runs, CancelToken() if name == "write" else token, *rest)

        setattr(channel, name, gated)
