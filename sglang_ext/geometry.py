"""How the KV of one rank lies in memory: planes, their geometry, and the layout of a block.

A *plane* is one tensor of the engine's KV pool: K or V of one layer (MHA, GQA), the latent of one layer
(MLA), or the index keys of one layer (DSA). The layers of a draft model follow those of the model. Each plane
is described by address, dims, shape, stride and dtype (KVDirect, section 4.1, figure 5), which is all that a
peer needs to read it one-sidedly and all that a tier needs to copy it. The *geometry* of a rank is all of its
planes, with the shard of the model that they hold.

A *block layout* is what remains once addresses are taken away: the bytes of a row of each plane and the
tokens of a block. Inside a block all planes are adjacent (MemServe, section 5.2, calls such a block
aggregated), and the planes of one layer side by side, so that one layer of a block is one run of bytes:

    block = [layer 0: K rows | V rows] [layer 1: K rows | V rows] ...     rows = block_tokens x row bytes
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

BIDIRECTIONAL: Final = frozenset({
    "BertModel", "Contriever", "BertForSequenceClassification", "XLMRobertaModel",
    "XLMRobertaForSequenceClassification",
})  # fmt: skip
"""Architectures in which the KV of a token depends on those behind it, too: no prefix of it can be reused."""

TOKEN_DIM = "T"
HEAD_DIM = "H"
ELEMENT_DIM = "D"

_ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "uint8": 1,
    "int8": 1,
}


def item_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype` (a name as torch prints it, without the `torch.`)."""
    try:
        return _ITEM_BYTES[dtype]
    except KeyError:
        known = ", ".join(_ITEM_BYTES)
        raise ValueError(
            f"KV dtype {dtype!r} is not known; set --kv-cache-dtype to one of: {known}"
        ) from None


class PlaneKind(enum.StrEnum):
    """The content of a plane's row: one token's K, V, latent, or index key."""

    K = "k"
    V = "v"
    LATENT = "latent"
    INDEX = "index"
    """A page of index keys has all keys and then all scales. So one row is not the key of one token, but the
    rows of a whole page are the keys of its tokens: only whole pages may be copied."""

    @property
    def has_heads(self) -> bool:
        """Whether ranks share the heads of a row; each rank has the whole row otherwise."""
        return self in (PlaneKind.K, PlaneKind.V)


KINDS_OF_A_LAYER: Final = (
    [PlaneKind.K, PlaneKind.V],
    [PlaneKind.LATENT],
    [PlaneKind.LATENT, PlaneKind.INDEX],
)


@dataclass(frozen=True, slots=True)
class Plane:
    """One tensor of the KV pool (KVDirect, figure 5).

    layer: index of the layer in the whole model, not in this pipeline stage.
    address: of element 0, in the process that owns the pool; 0 when the plane is described without a pool.
    dims: the meaning of each dimension, outermost first; the first is `T`, one entry per token slot.
    shape, stride: per dimension, in elements. All dimensions after the first are dense, so that the row of a
        token is one run of bytes; rows may lie further apart than they are long.
    """

    layer: int
    kind: PlaneKind
    address: int
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if not len(self.dims) == len(self.shape) == len(self.stride) >= 2:
            raise ValueError(
                f"plane {self.name}: dims, shape and stride must have the same length, at least 2"
            )
        if self.dims[0] != TOKEN_DIM:
            raise ValueError(
                f"plane {self.name}: dims start with {self.dims[0]!r}, not {TOKEN_DIM!r} (token slots)"
            )
        if len(set(self.dims)) != len(self.dims):
            raise ValueError(f"plane {self.name}: dims {self.dims} name a dimension twice")
        if min(self.shape) < 1 or self.layer < 0 or self.address < 0:
            raise ValueError(f"plane {self.name}: shape, layer or address is out of range: {self}")
        dense = 1
        for size, step in zip(self.shape[:0:-1], self.stride[:0:-1], strict=True):
            if size > 1 and step != dense:
                raise ValueError(
                    f"plane {self.name}: the row of a token is not contiguous (shape {self.shape}, stride "
                    f"{self.stride}); this pool layout is not supported"
                )
            dense *= size
        if self.stride[0] < dense:
            raise ValueError(
                f"plane {self.name}: rows of {dense} elements overlap at stride {self.stride[0]}"
            )
        item_bytes(self.dtype)

    @property
    def name(self) -> str:
        """As logs and errors call it: `layer 3 k`."""
        return f"layer {self.layer} {self.kind}"

    @property
    def slots(self) -> int:
        """Token slots in the plane."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token."""
        elements = 1
        for size in self.shape[1:]:
            elements *= size
        return elements * item_bytes(self.dtype)

    @property
    def slot_stride(self) -> int:
        """Bytes from one token slot to the next; at least `row_bytes`."""
        return self.stride[0] * item_bytes(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last, the range that a transport registers."""
        return (self.slots - 1) * self.slot_stride + self.row_bytes

    def dim(self, name: str) -> int:
        """Size of the dimension called `name`; 1 where the plane has none (a latent has no heads)."""
        return self.shape[self.dims.index(name)] if name in self.dims else 1


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of the model's KV that a rank holds. Ranges are half-open: [first, first + count)."""

    first_layer: int
    layers: int
    first_head: int
    heads: int
    model_layers: int
    model_heads: int

    def __post_init__(self) -> None:
        if not 0 <= self.first_layer < self.first_layer + self.layers <= self.model_layers:
            raise ValueError(f"shard holds layers outside of the model: {self}")
        if not 0 <= self.first_head < self.first_head + self.heads <= self.model_heads:
            raise ValueError(f"shard holds heads outside of the model: {self}")

    @property
    def whole(self) -> bool:
        """Whether this rank holds all layers and all heads."""
        return self.layers == self.model_layers and self.heads == self.model_heads


@dataclass(frozen=True)
class BlockLayout:
    """The bytes of a block: `block_tokens` tokens of every plane, planes of a layer adjacent.

    layers: for each local layer, the row bytes of each of its planes: ((256, 256), (256, 256)) for two layers
        of K and V with 256 bytes per token; ((1152,),) for one layer of MLA.
    """

    block_tokens: int
    layers: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens is {self.block_tokens}; it must be at least 1")
        if not self.layers or not all(rows and min(rows) > 0 for rows in self.layers):
            raise ValueError(
                f"each layer needs at least one plane of at least one byte per token: {self.layers}"
            )

    @staticmethod
    def uniform(*, n_layers: int, planes_per_layer: int, row_bytes: int, block_tokens: int) -> BlockLayout:
        """A layout whose planes are all alike."""
        return BlockLayout(block_tokens, ((row_bytes,) * planes_per_layer,) * n_layers)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes per token of each plane, in block order."""
        return tuple(row for rows in self.layers for row in rows)

    @property
    def n_planes(self) -> int:
        return len(self.row_bytes)

    @cached_property
    def plane_offsets(self) -> tuple[int, ...]:
        """Byte offset of each plane inside a block; one more entry than planes, the last is the end."""
        return _running_sum(row * self.block_tokens for row in self.row_bytes)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Byte offset of each layer inside a block; one more entry than layers, the last is the end."""
        return _running_sum(sum(rows) * self.block_tokens for rows in self.layers)

    @cached_property
    def first_plane(self) -> tuple[int, ...]:
        """Index of the first plane of each layer; one more entry than layers."""
        return _running_sum(len(rows) for rows in self.layers)

    @property
    def block_bytes(self) -> int:
        return self.plane_offsets[-1]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all planes."""
        return sum(self.row_bytes)

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one local layer of a block."""
        return self.layer_offsets[layer + 1] - self.layer_offsets[layer]

    def planes_of(self, layer: int) -> range:
        """Indices of the planes of one local layer."""
        return range(self.first_plane[layer], self.first_plane[layer + 1])

    def facts(self) -> str:
        """The layout in one line of text, the same in every process: part of namespaces and file headers."""
        groups: list[tuple[tuple[int, ...], int]] = []
        for rows in self.layers:
            if groups and groups[-1][0] == rows:
                groups[-1] = (rows, groups[-1][1] + 1)
            else:
                groups.append((rows, 1))
        text = ",".join(f"{count}x({'+'.join(map(str, rows))})" for rows, count in groups)
        return f"block_tokens={self.block_tokens};layers={text}"


@dataclass(frozen=True)
class Geometry:
    """All planes of a rank, ordered by layer, and the shard of the model that they hold.

    block_tokens: tokens of a block, a multiple of `page_tokens`, the engine's page size.
    """

    planes: tuple[Plane, ...]
    shard: Shard
    block_tokens: int = 16
    page_tokens: int = 1

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.page_tokens < 1 or self.block_tokens % self.page_tokens:
            raise ValueError(
                f"block_tokens ({self.block_tokens}) must be a multiple of the engine's page size "
                f"({self.page_tokens}); set --kv-block-size to one"
            )
        if [p.layer for p in self.planes] != sorted(p.layer for p in self.planes):
            raise ValueError("planes must be ordered by layer")
        expected = range(self.shard.first_layer, self.shard.first_layer + self.shard.layers)
        if {p.layer for p in self.planes} != set(expected):
            raise ValueError(
                f"planes cover layers {sorted({p.layer for p in self.planes})}, shard {self.shard}"
            )
        if len({p.slots for p in self.planes}) != 1:
            raise ValueError("planes of one pool must have the same number of token slots")
        for layer in expected:
            kinds = [p.kind for p in self.planes if p.layer == layer]
            if kinds not in KINDS_OF_A_LAYER:
                raise ValueError(
                    f"layer {layer} has planes {kinds}; expected K and V, a latent, or latent and index keys"
                )

    @property
    def slots(self) -> int:
        """Token slots of the pool."""
        return self.planes[0].slots

    @property
    def n_layers(self) -> int:
        return self.shard.layers

    @cached_property
    def layout(self) -> BlockLayout:
        """The layout of a block of this rank."""
        return BlockLayout(
            self.block_tokens,
            tuple(tuple(p.row_bytes for p in self.layer_planes(i)) for i in range(self.n_layers)),
        )

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes

    def layer_planes(self, layer: int) -> tuple[Plane, ...]:
        """Planes of local layer `layer` (0 is this pipeline stage's first), in the order of their kinds."""
        return self._by_layer[layer]

    @cached_property
    def _by_layer(self) -> tuple[tuple[Plane, ...], ...]:
        first = self.shard.first_layer
        rows: list[list[Plane]] = [[] for _ in range(self.shard.layers)]
        for plane in self.planes:
            rows[plane.layer - first].append(plane)
        return tuple(tuple(row) for row in rows)

    def facts(self) -> str:
        """Facts that must be equal for KV to be exchanged byte by byte: layout, dtype, dims, shard; no
        address.
        """
        first = self.planes[0]
        s = self.shard
        dims = "|".join(sorted({f"{p.kind}:{''.join(p.dims)}:{p.shape[1:]}:{p.dtype}" for p in self.planes}))
        return (
            f"{self.layout.facts()};dtype={first.dtype};dims={dims};"
            f"layers={s.first_layer}+{s.layers}/{s.model_layers};heads={s.first_head}+{s.heads}/{s.model_heads}"
        )

    def digest(self) -> str:
        """Hex digest of `facts()`, 32 characters: the geometry's part of a namespace."""
        return hashlib.blake2b(self.facts().encode(), digest_size=16).hexdigest()


def mha_geometry(
    *,
    k_addresses: tuple[int, ...],
    v_addresses: tuple[int, ...],
    slots: int,
    heads: int,
    head_dim: int,
    dtype: str,
    v_head_dim: int | None = None,
    first_layer: int = 0,
    model_layers: int | None = None,
    first_head: int = 0,
    model_heads: int | None = None,
    block_tokens: int = 16,
    page_tokens: int = 1,
) -> Geometry:
    """Geometry of a K and a V tensor per layer, each (slots, heads, head_dim) and contiguous."""
    planes: list[Plane] = []
    for i, (k, v) in enumerate(zip(k_addresses, v_addresses, strict=True)):
        for kind, address, dim in ((PlaneKind.K, k, head_dim), (PlaneKind.V, v, v_head_dim or head_dim)):
            shape = (slots, heads, dim)
            stride = (heads * dim, dim, 1)
            dims = (TOKEN_DIM, HEAD_DIM, ELEMENT_DIM)
            planes.append(Plane(first_layer + i, kind, address, dims, shape, stride, dtype))
    layers = len(k_addresses)
    shard = Shard(
        first_layer,
        layers,
        first_head,
        heads,
        model_layers or first_layer + layers,
        model_heads or first_head + heads,
    )
    return Geometry(tuple(planes), shard, block_tokens, page_tokens)


def mla_geometry(
    *,
    addresses: tuple[int, ...],
    slots: int,
    latent_dim: int,
    dtype: str,
    first_layer: int = 0,
    model_layers: int | None = None,
    block_tokens: int = 16,
    page_tokens: int = 1,
) -> Geometry:
    """Geometry of one latent tensor per layer (MLA), each (slots, latent_dim) and contiguous."""
    planes = tuple(
        Plane(
            first_layer + i,
            PlaneKind.LATENT,
            address,
            (TOKEN_DIM, ELEMENT_DIM),
            (slots, latent_dim),
            (latent_dim, 1),
            dtype,
        )
        for i, address in enumerate(addresses)
    )
    shard = Shard(first_layer, len(addresses), 0, 1, model_layers or first_layer + len(addresses), 1)
    return Geometry(planes, shard, block_tokens, page_tokens)


def _running_sum(values: Iterator[int]) -> tuple[int, ...]:
    total, sums = 0, [0]
    for value in values:
        total += value
        sums.append(total)
    return tuple(sums)
