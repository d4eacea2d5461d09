"""The contract of a block tier: a store of blocks under their keys, below the engine's own pool.

Two sides, as with any contract:

**The caller guarantees**
- A block under a key never changes: every caller puts the same bytes under a key (keys are hashes of the
  inputs that the bytes were computed from).
- Keys of one call belong to one prefix, in order, each the child of the one before.
- Memory named in `put_layer` stays unchanged, and no thread reads memory named in `get_layer`, until the call
  returns.
- Each `Put` ends in exactly one `complete_puts` or `abort_put`, each `Get` in exactly one `complete_get`.
  Several threads may work on one `Get` if they ask for different layers; a `Put` is used by one thread at a
  time.

**A tier must**
- show all layers of a block or none: a block is found only after `complete_puts` returned `DONE` for it
  (atomic per run: the blocks of one `Put` appear together);
- keep the blocks that a `Get` has pinned readable until `complete_get`, despite evictions meanwhile;
- hand out only bytes that were put under that key in that namespace, verified where the medium can err. A
  block that cannot be verified is a miss with a reason, never wrong bytes and never an exception;
- count every block that it refused, lost or failed to read, by `Outcome`;
- when `durable`: have on the medium, findable after a crash, every block for which `complete_puts` returned
  `DONE`.

**Calls that may block**
- `match`, `held`, `prepare_put`, `prepare_get`, `complete_get`, `abort_put`, `stats`: index work only,
  microseconds per block; may be called from the scheduler's thread.
- `put_layer`, `complete_puts`, `get_layer`, `drop`, `clear`, `check`, `close`: may do I/O; call them
  elsewhere.

All methods may be called from any thread. Exceptions are for broken contracts (`ValueError`) and are never
used for the medium's failures.
"""

from __future__ import annotations

import abc
import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_ext.geometry import BlockLayout
from sglang_ext.keys import BLOCK_KEY_BYTES
from sglang_ext.tiered_store.dram.arena import Arena
from sglang_ext.tiers import Tier

Ids = npt.NDArray[np.int64]


class Outcome(enum.Enum):
    """The result of a call, by the party that must act. Every value but `DONE` means: treat the block as not
    being there."""

    DONE = "done"
    ABSENT = "absent"
    """Not here: never put, evicted, or dropped. No action is needed."""
    DAMAGED = "damaged"
    """Bytes, header or length do not verify; the tier has dropped the block. Look at the medium if it
    repeats.
    """
    IO_ERROR = "io_error"
    """The medium failed. The block may still be there and is tried again later."""
    FULL = "full"
    """No room, and nothing that may go."""
    READ_ONLY = "read_only"
    """The medium takes no writes."""
    BEHIND = "behind"
    """Skipped, because the writer could not keep up."""
    CLOSED = "closed"
    """The tier has been closed."""


class BlockMemory:
    """Memory that tiers read blocks from and write blocks to: for each layer, rows of bytes by block id.

    layers: per local layer a uint8 array of shape (ids, layer bytes) whose rows are contiguous.
    """

    def __init__(self, layout: BlockLayout, layers: Sequence[npt.NDArray[np.uint8]]) -> None:
        if len(layers) != layout.n_layers:
            raise ValueError(f"{len(layers)} layer arrays for a layout of {layout.n_layers} layers")
        for index, rows in enumerate(layers):
            wanted = layout.layer_bytes(index)
            dense = rows.size == 0 or rows.strides[-1] == 1
            if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != wanted or not dense:
                raise ValueError(f"layer {index}: expected uint8 rows of {wanted} bytes, got {rows.shape}")
        self.layout = layout
        self.layers = tuple(layers)
        self._addresses = tuple(int(rows.ctypes.data) for rows in layers)

    @staticmethod
    def of_arena(arena: Arena) -> BlockMemory:
        """The blocks of an arena, by arena block id."""
        return BlockMemory(arena.layout, [arena.layer(i) for i in range(arena.layout.n_layers)])

    @staticmethod
    def of_blocks(layout: BlockLayout, blocks: npt.NDArray[np.uint8]) -> BlockMemory:
        """Whole blocks as rows, shape (ids, block bytes)."""
        offsets = layout.layer_offsets
        return BlockMemory(layout, [blocks[:, offsets[i] : offsets[i + 1]] for i in range(layout.n_layers)])

    @staticmethod
    def of_staging(layout: BlockLayout, buffer: npt.NDArray[np.uint8], blocks: int) -> BlockMemory:
        """One flat buffer that holds a single layer of some blocks at a time, densely: for loads past DRAM.

        The ids of every layer start at 0 and share the bytes: bring in one layer, use it, bring in the next.
        A layer for which the buffer is too small has fewer rows.
        """
        layers = []
        for index in range(layout.n_layers):
            size = layout.layer_bytes(index)
            rows = min(blocks, buffer.size // size)
            layers.append(buffer[: rows * size].reshape(rows, size))
        return BlockMemory(layout, layers)

    def rows(self, layer: int, ids: Ids) -> list[npt.NDArray[np.uint8]]:
        """The bytes of one layer of each block, as arrays over the memory itself."""
        array = self.layers[layer]
        return [array[i] for i in ids]

    def vectors(self, layer: int, ids: Ids) -> npt.NDArray[np.uint64]:
        """Address and length of one layer of each block, shape (n, 2): the arguments of preadv and pwritev.

        Raises:
            ValueError: an id is out of range.
        """
        array = self.layers[layer]
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= array.shape[0]):
            raise ValueError(f"block ids {ids.min()}..{ids.max()} are outside of [0, {array.shape[0]})")
        vectors = np.empty((ids.size, 2), dtype=np.uint64)
        vectors[:, 0] = (self._addresses[layer] + ids * array.strides[0]).astype(np.uint64)
        vectors[:, 1] = array.shape[1]
        return vectors


@dataclass(slots=True, eq=False)
class Put:
    """A write under way: room for the blocks that the tier lacks. Tiers add fields of their own.

    missing: positions in the keys of `prepare_put` that the tier wants, ascending; the ids of `put_layer` are
        theirs. Empty when the tier has all of them.
    refused: positions that the tier lacks and has no room for.
    """

    namespace: bytes
    keys: tuple[bytes, ...]
    missing: tuple[int, ...]
    refused: tuple[int, ...]

    @property
    def wanted(self) -> tuple[bytes, ...]:
        """The keys that the tier wants."""
        return tuple(self.keys[i] for i in self.missing)


@dataclass(slots=True, eq=False)
class Get:
    """A read under way: the longest prefix of the keys that the tier had, pinned.

    blocks: how many blocks can still be read; shrinks when one turns out to be unreadable, because the blocks
        after it in the prefix are of no use without it.
    """

    namespace: bytes
    keys: tuple[bytes, ...]
    blocks: int


@dataclass(frozen=True, slots=True)
class LayerRead:
    """The result of `get_layer`.

    blocks: how many leading blocks lie in memory and verify.
    outcome: `DONE` when that is all that were asked for; else why the next one is missing.
    """

    blocks: int
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class TierStats:
    """Contents and counters of a tier. Counts are in blocks since the start, bytes where the name
    says.

    limit_bytes: the size it was given; used_bytes: the used part of the capacity, overhead included.
    put, got: blocks by outcome.
    """

    blocks: int
    used_bytes: int
    limit_bytes: int
    pins: int
    put: Mapping[Outcome, int]
    got: Mapping[Outcome, int]
    evicted: int = 0
    extra: Mapping[str, float] = field(default_factory=dict)


class BlockTier(abc.ABC):
    """A place for blocks, by key. See the module for the contract; every method here is part of it."""

    tier: Tier
    durable: bool
    layout: BlockLayout

    @property
    def parts(self) -> tuple[BlockTier, ...]:
        """The tiers that it consists of, nearest first: itself, unless it is made of others."""
        return (self,)

    @property
    def renewals(self) -> int:
        """How often its medium was lost in use and begun anew, without anything that was there before."""
        return 0

    def sources(self, get: Get) -> list[tuple[Tier, int]]:
        """The tiers that serve a just prepared get, each with its number of blocks, in order."""
        return [(self.tier, get.blocks)]

    @abc.abstractmethod
    def match(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """How many leading keys are here: the longest prefix that a `prepare_get` would pin."""

    def held(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        """For each key, whether its block is here, whatever is before it. Keys need not be of one prefix."""
        return [self.match(namespace, [key]) == 1 for key in keys]

    @abc.abstractmethod
    def prepare_put(self, namespace: bytes, keys: Sequence[bytes]) -> Put | Outcome:
        """Announce blocks, in prefix order. Returns a Put for the blocks that the tier wants, or an Outcome
        with the reason why it takes none."""

    @abc.abstractmethod
    def put_layer(self, put: Put, layer: int, memory: BlockMemory, ids: Ids) -> Outcome:
        """Take one layer of the missing blocks from memory; `ids` go with `put.missing`. Layers in any order.

        After anything but `DONE` the put can only be aborted.
        """

    @abc.abstractmethod
    def complete_puts(self, puts: Sequence[Put]) -> list[Outcome]:
        """Make puts visible, and durable where the tier is: one outcome each. Several share one sync.

        Raises:
            ValueError: a layer of a put is missing. Then none is completed.
        """

    @abc.abstractmethod
    def abort_put(self, put: Put) -> None:
        """Forget a put and give its room back."""

    @abc.abstractmethod
    def prepare_get(self, namespace: bytes, keys: Sequence[bytes]) -> Get:
        """Pin the longest prefix of `keys` that is here, possibly of no blocks."""

    @abc.abstractmethod
    def get_layer(self, get: Get, layer: int, memory: BlockMemory, ids: Ids) -> LayerRead:
        """Bring one layer of the pinned blocks into memory, the first `len(ids)` of them.

        On failure, `get.blocks` is lowered to the number of intact blocks; bytes of the failed block are
        undefined.
        """

    @abc.abstractmethod
    def complete_get(self, get: Get) -> None:
        """Unpin, and note the use of the blocks that were read."""

    @abc.abstractmethod
    def drop(self, namespace: bytes, keys: Sequence[bytes]) -> int:
        """Forget blocks. Those being read stay readable for that read. Returns how many were here."""

    @abc.abstractmethod
    def clear(self, namespace: bytes | None = None) -> int:
        """Forget a namespace, or everything. Returns how many blocks were here."""

    @abc.abstractmethod
    def stats(self) -> TierStats:
        """Contents and counters of the tier now."""

    @abc.abstractmethod
    def check(self) -> None:
        """Verify all invariants of the tier's own state. Raises AssertionError naming the violated
        invariant."""

    @abc.abstractmethod
    def close(self) -> None:
        """End. Durable blocks stay; calls after this answer `CLOSED` or find nothing. May be repeated."""


def check_put_layer(put: Put, layer: int, memory: BlockMemory, ids: Ids, layout: BlockLayout) -> None:
    """Verify the caller's side of `put_layer`. Raises ValueError naming the fault."""
    _check_layer(layer, memory, layout)
    if len(ids) != len(put.missing):
        raise ValueError(f"{len(ids)} block ids for {len(put.missing)} missing blocks")


def check_get_layer(get: Get, layer: int, memory: BlockMemory, ids: Ids, layout: BlockLayout) -> None:
    """Verify the caller's side of `get_layer`. Raises ValueError naming the fault."""
    _check_layer(layer, memory, layout)
    if len(ids) > len(get.keys):
        raise ValueError(f"{len(ids)} block ids for a get of {len(get.keys)} keys")


def check_names(namespace: bytes, keys: Sequence[bytes]) -> None:
    """Verify the sizes of a namespace and of keys, which tiers on a medium store in fixed places.

    Raises ValueError naming the fault.
    """
    if len(namespace) != BLOCK_KEY_BYTES:
        raise ValueError(f"a namespace of {len(namespace)} bytes; `Namespace.digest()` has {BLOCK_KEY_BYTES}")
    for key in keys:
        if len(key) != BLOCK_KEY_BYTES:
            raise ValueError(
                f"a block key of {len(key)} bytes; `block_keys()` makes them of {BLOCK_KEY_BYTES}"
            )


def _check_layer(layer: int, memory: BlockMemory, layout: BlockLayout) -> None:
    if memory.layout != layout:
        raise ValueError(f"memory has layout {memory.layout.facts()}, the tier {layout.facts()}")
    if not 0 <= layer < layout.n_layers:
        raise ValueError(f"layer {layer} is outside of [0, {layout.n_layers})")
