"""Tensor-centric metadata: a block id becomes byte ranges by arithmetic (KVDirect, section 4.1, figure 5).

A rank describes each tensor of its pools by address, dims, shape, stride and dtype, and sends that once, at
CONNECT. From then on the reading side finds any block by a dot product, with no word from the other side.
Dims may come in any order:

    B   blocks                  L  tokens of a block     T  token slots: B and L fused
    N   layers                  H  heads                 D  elements of a head, or of a latent row
    KV  the tensors K and V

Whatever the order, a tensor is brought to one canonical form, a `Strided`: one layer, one kind, and byte
strides for B, L, H and D.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from sglang_ext.geometry import Geometry, PlaneKind, Shard, item_bytes

MAX_TENSORS = 4096
"""Tensors of one pool; a model of 200 layers has 400."""

_DIMS = {"B", "L", "T", "N", "KV", "H", "D"}


class TensorMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor as it lies in its owner's memory (KVDirect, figure 5).

    layer: first layer that the tensor holds, in the whole model.
    kind: `k`, `v`, `latent`, `index`, or `kv` with a KV dim.
    address: of element 0, in the owner's address space, in bytes.
    shape, stride: per dim, in elements.
    """

    layer: int
    kind: str
    address: int
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class PoolMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pool of blocks: tensors that share block ids, and the generation table over those ids.

    name: the memory of the blocks, `hbm` or `dram`, or another name that an owner registers.
    blocks, block_tokens: ids run over [0, blocks), each `block_tokens` tokens.
    shard: (first layer, layers, first head, heads, model layers, model heads), see `geometry.Shard`.
    generations: offset of this pool's first generation in the control region, in bytes.
    namespace: of the KV in it, where a pool of the same name may have other KV.
    """

    name: str
    blocks: int
    block_tokens: int
    tensors: tuple[TensorMeta, ...]
    shard: tuple[int, int, int, int, int, int]
    generations: int
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class Strided:
    """One layer and kind of a pool in canonical form. Strides and address in bytes."""

    layer: int
    kind: str
    dtype: str
    address: int
    blocks: int
    tokens: int
    heads: int
    width: int
    """Elements of a head (or of a latent row)."""
    block_stride: int
    token_stride: int
    head_stride: int
    element_stride: int
    first_head: int = 0

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return item_bytes(self.dtype)

    @property
    def span(self) -> int:
        """Bytes from the first element to the end of the last."""
        return (
            (self.blocks - 1) * self.block_stride
            + (self.tokens - 1) * self.token_stride
            + (self.heads - 1) * self.head_stride
            + (self.width - 1) * self.element_stride
            + self.item
        )

    def block_address(self, block: int) -> int:
        """Address of a block's first element: the dot product of index and stride."""
        return self.address + block * self.block_stride


def canonical(meta: TensorMeta, block_tokens: int) -> tuple[Strided, ...]:
    """The layers and kinds of a tensor, each in canonical form; its first head counts as head 0.

    Raises:
        ValueError: the metadata contradict themselves; the text says how. A peer's metadata come through
        here,
            so nothing in them is trusted.
    """
    if not len(meta.dims) == len(meta.shape) == len(meta.stride):
        raise ValueError("dims, shape and stride have different lengths")
    if len(set(meta.dims)) != len(meta.dims) or not set(meta.dims) <= _DIMS:
        raise ValueError(f"dims {meta.dims} are unknown or repeated; known: {sorted(_DIMS)}")
    if min(meta.shape, default=0) < 1 or min(meta.stride, default=-1) < 0:
        raise ValueError(f"shape {meta.shape} or stride {meta.stride} out of range")
    if not 0 <= meta.address < 1 << 63 or meta.layer < 0:
        raise ValueError("address or layer out of range")
    size = dict(zip(meta.dims, meta.shape, strict=True))
    item = item_bytes(meta.dtype)
    step = {d: s * item for d, s in zip(meta.dims, meta.stride, strict=True)}
    if sum((size[d] - 1) * step[d] for d in meta.dims) + item > 1 << 48:
        raise ValueError("tensor spans more than 2**48 bytes")
    if "T" in size:
        if "B" in size or "L" in size:
            raise ValueError("dims name T beside B or L")
        if size["T"] % block_tokens and block_tokens > 1:
            size["T"] -= size["T"] % block_tokens
        size["B"], size["L"] = size["T"] // block_tokens, block_tokens
        step["B"], step["L"] = step["T"] * block_tokens, step["T"]
    if "B" not in size or size["B"] < 1:
        raise ValueError("tensor has no whole block")
    if size.get("L", 1) != block_tokens:
        raise ValueError(f"tensor has {size.get('L', 1)} tokens a block, its pool {block_tokens}")
    if (meta.kind == "kv") != ("KV" in size) or size.get("KV", 2) != 2:
        raise ValueError("kind `kv` and a KV dim of 2 go together")
    if meta.kind not in {"kv", *PlaneKind}:
        raise ValueError(f"kind {meta.kind!r} is not one of kv, {', '.join(PlaneKind)}")
    base = Strided(
        meta.layer,
        meta.kind,
        meta.dtype,
        meta.address,
        size["B"],
        block_tokens,
        size.get("H", 1),
        size.get("D", 1),
        step["B"],
        step.get("L", 0),
        step.get("H", 0),
        step.get("D", 0),
    )
    kinds = [("k", 0), ("v", step["KV"])] if meta.kind == "kv" else [(meta.kind, 0)]
    return tuple(
        replace(base, layer=meta.layer + n, kind=kind, address=meta.address + n * step.get("N", 0) + offset)
        for n in range(size.get("N", 1))
        for kind, offset in kinds
    )


def pool_strided(pool: PoolMeta) -> tuple[Strided, ...]:
    """Every layer and kind of a pool, ordered by layer, K before V.

    Raises:
        ValueError: as `canonical`; also when the tensors disagree with the pool's blocks or its shard.
    """
    if len(pool.tensors) > MAX_TENSORS:
        raise ValueError(f"pool has {len(pool.tensors)} tensors, at most {MAX_TENSORS} are allowed")
    if pool.block_tokens < 1 or pool.blocks < 1:
        raise ValueError("pool has no blocks, or blocks without tokens")
    shard = Shard(*pool.shard)
    found = [
        replace(s, first_head=_first_head(s, shard))
        for t in pool.tensors
        for s in canonical(t, pool.block_tokens)
    ]
    found.sort(key=lambda s: (s.layer, s.kind))
    names = [(s.layer, s.kind) for s in found]
    if len(set(names)) != len(names):
        raise ValueError("a layer and kind is described twice")
    wanted = set(range(shard.first_layer, shard.first_layer + shard.layers))
    if {s.layer for s in found} != wanted:
        raise ValueError("tensors do not cover the layers of the shard")
    for s in found:
        if s.blocks < pool.blocks:
            raise ValueError(f"layer {s.layer} {s.kind} has {s.blocks} blocks, the pool {pool.blocks}")
    return tuple(found)


def _first_head(s: Strided, shard: Shard) -> int:
    """A rank's first head of a layer, counted in the whole model; 0 where the ranks do not share its heads.

    The layers of a draft may have another number of heads than the model's, which the ranks share alike.
    """
    if not PlaneKind(s.kind).has_heads:
        return 0
    if shard.first_head * s.heads % shard.heads:
        raise ValueError(
            f"layer {s.layer} {s.kind} has {s.heads} heads, which the shard does not share as its "
            f"{shard.heads}"
        )
    return shard.first_head * s.heads // shard.heads


def tensors_of(geometry: Geometry) -> tuple[TensorMeta, ...]:
    """The planes of an engine's pool as tensors, ready for CONNECT."""
    return tuple(
        TensorMeta(p.layer, str(p.kind), p.address, p.dims, p.shape, p.stride, p.dtype)
        for p in geometry.planes
    )


def arena_tensors(geometry: Geometry, address: int, blocks: int) -> tuple[TensorMeta, ...]:
    """Tensors of a block-first arena: block i holds all planes of `geometry` adjacent, at address + i *
    block_bytes.

    This is the layout of MemServe's aggregation (section 5.2): one block is one run of bytes.
    """
    layout = geometry.layout
    result: list[TensorMeta] = []
    for plane, offset in zip(geometry.planes, layout.plane_offsets, strict=False):
        item = item_bytes(plane.dtype)
        if layout.block_bytes % item or offset % item:
            raise ValueError(f"{plane.name}: arena blocks are not aligned to elements of {plane.dtype}")
        row = plane.row_bytes // item
        rest = plane.dims[1:]
        result.append(
            TensorMeta(
                plane.layer,
                str(plane.kind),
                address + offset,
                ("B", "L", *rest),
                (blocks, geometry.block_tokens, *plane.shape[1:]),
                (layout.block_bytes // item, row, *plane.stride[1:]),
                plane.dtype,
            )
        )
    return tuple(result)


def shard_tuple(shard: Shard) -> tuple[int, int, int, int, int, int]:
    """A shard as CONNECT carries it."""
    return (
        shard.first_layer,
        shard.layers,
        shard.first_head,
        shard.heads,
        shard.model_layers,
        shard.model_heads,
    )


def dtypes(strided: Iterable[Strided]) -> str:
    """The element types of a pool, for messages: `bfloat16`, or `bfloat16,uint8`."""
    return ",".join(sorted({s.dtype for s in strided}))


__all__ = [
    "MAX_TENSORS",
    "PlaneKind",
    "PoolMeta",
    "Strided",
    "TensorMeta",
    "arena_tensors",
    "canonical",
    "dtypes",
    "pool_strided",
    "shard_tuple",
    "tensors_of",
]
